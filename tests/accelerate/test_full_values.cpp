// Whole parameters, gradients and optimizer states, read and written by name while ranks hold parts
// of them; and several backwards of one step. In every mode what one process has, to the bit.
// ctest labels: threads
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include <tessera/accelerate/full_values.h>
#include <tessera/core/error.h>
#include <tessera/distributed/fully_shard/fully_shard.h>

#include "accelerate/sharded_words.h"
#include "message_of.h"
#include "thinned.h"

namespace tessera::test_full_values {
namespace {

using accelerate::FullValues;
using accelerate::Sharding;
using distributed::compared_ranks;

constexpr Sharding kWays[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2, Sharding::kZero3,
                              Sharding::kFsdp};
const char* way_name(Sharding sharding) {
  static const char* const names[] = {"ddp", "zero1", "zero2", "zero3", "fsdp"};
  return names[static_cast<int>(sharding)];
}

// By what it is of: "first.weight exp_avg".
using ByName = std::map<std::string, std::vector<float>>;

// Rows that do not divide by the ranks, fewer rows than ranks, one element; no dropout.
struct Uneven : nn::Module<Uneven> {
  Uneven()
      : first(add<nn::Linear>("first", 3, 5)),
        second(add<nn::Linear>("second", 5, 1)),
        scale(parameter("scale", raw::full({1}, 0.5, kF32))) {}
  Tensor forward(const Tensor& x) { return second(tanh(first(x))) * scale; }
  nn::Linear& first;
  nn::Linear& second;
  const Tensor& scale;
};

// Batch `number` of all; 4 rows.
std::array<Tensor, 2> batch_of(int64_t number) {
  const NoGradGuard no_grad;
  const RandomStream stream{99, static_cast<uint64_t>(number)};
  const Tensor x = randn({4, 3}, {}, stream);
  return {x, x.sum({1}, true) + 1};
}

struct Job {
  Sharding sharding = Sharding::kDdp;
  int ranks = 1;
  int micro_batches = 1;  // of a rank
  Precision precision = Precision::kNo;
};

struct Training {
  explicit Training(const Job& job)
      : accelerator({.mixed_precision = job.precision,
                     .precision_policy = job.precision == Precision::kNo
                                             ? PrecisionPolicy::kAutocast
                                             : PrecisionPolicy::kPure,
                     .gradient_accumulation_steps = job.micro_batches,
                     .sharding = job.sharding,
                     .loss_scale = {.init_scale = 1024},
                     .config_file = ""}),
        optimizer(model.named_parameters(), {.lr = 0.05, .weight_decay = 0.1}),
        ranks(job.ranks),
        steps(job.micro_batches) {
    accelerator.prepare(model, optimizer);
  }
  // The micro-batches of a step, dealt in turn.
  void backwards() {
    for (int micro = 0; micro < steps; ++micro) {
      const auto scope = accelerator.accumulate(model);
      const auto batch = batch_of(next + micro * ranks + accelerator.process_index());
      accelerator.backward(squared_error(model(batch[0]), batch[1]));
    }
    next += ranks * steps;
  }
  void step() { optimizer.step(), optimizer.zero_grad(); }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& [name, tensor] : model.named_parameters()) all.push_back(name);
    return all;
  }

  Accelerator accelerator;
  Uneven model;
  optim::AdamW optimizer;
  int ranks, steps;
  int64_t next = 0;
};

// Reads and writes everything in the course of four steps.
ByName read_and_written(const Job& job) {
  manual_seed(3);
  Training run(job);
  FullValues values = run.accelerator.full_values(run.model);
  ByName found;
  const auto read = [&](int step) {
    for (const std::string& name : run.names()) {
      const std::string prefix = std::to_string(step) + " " + name + " ";
      found[prefix + "parameter"] = values.parameter(name).to_vector<float>();
      for (const std::string& state : values.state_names(name)) {
        found[prefix + state] = values.state(name, state).to_vector<float>();
      }
    }
  };
  read(0);
  for (int step = 1; step <= 4; ++step) {
    run.backwards();
    for (const std::string& name : run.names()) {
      const Tensor gradient = values.gradient(name);
      EXPECT_EQ(gradient.dtype(), kF32);
      found[std::to_string(step) + " " + name + " gradient"] = gradient.to_vector<float>();
      if (step == 2) {
        const Tensor given = gradient * 0.5 + 0.25;
        values.set_gradient(name, given);
        EXPECT_EQ(values.gradient(name).to_vector<float>(), given.to_vector<float>()) << name;
      }
    }
    run.step();
    read(step);
    if (step == 1) {
      for (const std::string& name : run.names()) {
        values.set_state(name, "exp_avg", values.state(name, "exp_avg") * 3);
        const Tensor given = values.state(name, "exp_avg_sq") + 0.125;
        values.set_state(name, "exp_avg_sq", given);
        EXPECT_EQ(values.state(name, "exp_avg_sq").to_vector<float>(), given.to_vector<float>());
      }
    }
    if (step == 3) {  // 1 / 3 is no bf16 number
      for (const std::string& name : run.names()) {
        const Tensor given = values.parameter(name) * (1.0 / 3);
        values.set_parameter(name, given);
        EXPECT_EQ(values.parameter(name).to_vector<float>(), given.to_vector<float>()) << name;
      }
    }
  }
  return found;
}

ByName on_ranks_of(const Job& job, const std::function<ByName(const Job&)>& program) {
  std::vector<ByName> found(static_cast<size_t>(job.ranks));
  compared_ranks(job.ranks, [&](int rank) { found[static_cast<size_t>(rank)] = program(job); });
  for (const ByName& other : found) EXPECT_TRUE(other == found[0]) << "ranks read other values";
  return found[0];
}

void expect_same(const ByName& found, const ByName& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, value] : expected) {
    const auto at = found.find(name);
    ASSERT_NE(at, found.end()) << name;
    EXPECT_EQ(at->second, value) << name;
  }
}

// ---- Reading and writing -----------------------------------------------------------------------

TEST(FullValues, AreThoseOfOneProcessInEveryMode) {
  for (const Precision precision : {Precision::kNo, Precision::kBF16, Precision::kFP16}) {
    for (const int ranks : tests::thinned({2, 3, 4}, 3)) {
      const ByName expected =
          read_and_written({.ranks = 1, .micro_batches = ranks, .precision = precision});
      for (const Sharding sharding : kWays) {
        SCOPED_TRACE(testing::Message() << way_name(sharding) << " on " << ranks << " ranks, "
                                        << static_cast<int>(precision));
        expect_same(on_ranks_of({.sharding = sharding, .ranks = ranks, .precision = precision},
                                read_and_written),
                    expected);
      }
    }
  }
}

TEST(FullValues, OfASumOfRanksAndMicroBatchesAreThoseOfOneProcess) {
  const ByName expected = read_and_written({.ranks = 1, .micro_batches = 6});
  for (const Sharding sharding : {Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp}) {
    SCOPED_TRACE(way_name(sharding));
    expect_same(
        on_ranks_of({.sharding = sharding, .ranks = 3, .micro_batches = 2}, read_and_written),
        expected);
  }
}

TEST(FullValues, AreMastersWhereParametersAreNarrowAndBeginUnrounded) {
  for (const Sharding sharding : kWays) {
    SCOPED_TRACE(way_name(sharding));
    compared_ranks(2, [&](int) {
      manual_seed(3);
      const Uneven before;
      manual_seed(3);
      Training run({.sharding = sharding, .ranks = 2, .precision = Precision::kBF16});
      const FullValues values = run.accelerator.full_values(run.model);
      EXPECT_EQ(run.model.first.weight.dtype(), kBF16);
      EXPECT_EQ(values.parameter("first.weight").to_vector<float>(),
                before.first.weight.to_vector<float>());
    });
  }
}

TEST(FullValues, CanBeNamedByTheTensorAndAreCopies) {
  for (const Sharding sharding : kWays) {
    SCOPED_TRACE(way_name(sharding));
    compared_ranks(2, [&](int) {
      Training run({.sharding = sharding, .ranks = 2});
      const FullValues values = run.accelerator.full_values(run.model);
      const Tensor copy = values.parameter(run.model.first.weight);
      EXPECT_EQ(copy.shape(), (Shape{5, 3}));
      EXPECT_FALSE(copy.requires_grad());
      const std::vector<float> before = copy.to_vector<float>();
      zero_(copy);
      EXPECT_EQ(values.parameter("first.weight").to_vector<float>(), before);
    });
  }
}

TEST(FullValues, OfOneProcessAreCopiesAndWritesArrive) {
  Training run({});
  const FullValues values = run.accelerator.full_values(run.model);
  zero_(values.parameter("scale"));
  EXPECT_EQ(values.parameter("scale").item<float>(), 0.5F);
  values.set_parameter("scale", raw::full({1}, 2, kF64));
  EXPECT_EQ(run.model.scale.item<float>(), 2);
}

// Forward reads what was written, also where whole parameters are kept (zero1, zero2, fsdp's root).
TEST(FullValues, ThatWereWrittenAreWhatTheNextCallReads) {
  for (const Sharding sharding : kWays) {
    SCOPED_TRACE(way_name(sharding));
    compared_ranks(3, [&](int) {
      manual_seed(3);
      Training run({.sharding = sharding, .ranks = 3});
      const FullValues values = run.accelerator.full_values(run.model);
      const auto batch = batch_of(0);
      const NoGradGuard no_grad;
      const Tensor before = run.model(batch[0]);
      values.set_parameter("scale", raw::full({1}, 1, kF32));
      EXPECT_EQ(run.model(batch[0]).to_vector<float>(), (before * 2).to_vector<float>());
    });
  }
}

// What ops read is the value that was given, rounded; its master is not rounded.
TEST(FullValues, ThatWereWrittenAreRoundedWhereParametersAreNarrow) {
  for (const Sharding sharding : kWays) {
    SCOPED_TRACE(way_name(sharding));
    compared_ranks(2, [&](int) {
      manual_seed(3);
      Training run({.sharding = sharding, .ranks = 2, .precision = Precision::kBF16});
      const FullValues values = run.accelerator.full_values(run.model);
      const Tensor given = raw::full({1}, 1.0 / 3, kF32);
      values.set_parameter("scale", given);
      const Tensor whole = distributed::is_dtensor(run.model.scale)
                               ? distributed::full_tensor(run.model.scale.detach())
                               : run.model.scale;
      EXPECT_EQ(whole.dtype(), kBF16);
      EXPECT_EQ(whole.to(kF32).item<float>(), given.to(kBF16).to(kF32).item<float>());
      EXPECT_EQ(values.parameter("scale").item<float>(), 1.0F / 3);
    });
  }
}

// Of an optimizer that has not begun its masters: they begin with what was given.
TEST(FullValues, ThatWereWrittenBeforeTheFirstStepAreWhereMastersBegin) {
  Uneven model;
  model.to(kBF16);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 0});
  const FullValues values(model, {.optimizers = {&optimizer}});
  values.set_parameter("scale", raw::full({1}, 1.0 / 3, kF32));
  EXPECT_EQ(values.parameter("scale").item<float>(), 1.0F / 3);
  EXPECT_EQ(optimizer.parameter_state("scale").at("master").item<float>(), 1.0F / 3);
}

// Without an Accelerator.
TEST(FullValues, OfFullyShardedModelsAreReadWithTheirOptimizer) {
  compared_ranks(3, [&](int) {
    using namespace distributed;
    manual_seed(3);
    Uneven model;
    const std::vector<float> weight = model.first.weight.to_vector<float>();
    fully_shard(model.first, mesh());
    fully_shard(model, mesh());
    optim::AdamW optimizer(model.named_parameters(), {.lr = 0.1, .weight_decay = 0});
    const FullValues values(model, {.optimizers = {&optimizer}});
    EXPECT_EQ(values.parameter("first.weight").to_vector<float>(), weight);
    const auto batch = batch_of(0);
    squared_error(model(batch[0]), batch[1]).backward();
    const std::vector<float> gradient = values.gradient("first.weight").to_vector<float>();
    optimizer.step();
    const std::vector<float> moment = values.state("first.weight", "exp_avg").to_vector<float>();
    ASSERT_EQ(moment.size(), gradient.size());
    for (size_t i = 0; i < moment.size(); ++i) EXPECT_FLOAT_EQ(moment[i], 0.1F * gradient[i]);
  });
}

// ---- Errors ------------------------------------------------------------------------------------

TEST(FullValues, SayWhyThereIsNone) {
  for (const Sharding sharding : kWays) {
    SCOPED_TRACE(way_name(sharding));
    compared_ranks(2, [&](int) {
      Training run({.sharding = sharding, .ranks = 2, .micro_batches = 2});
      const FullValues values = run.accelerator.full_values(run.model);
      const auto expect = [&]<class E>(const auto& call, const std::string& part, E) {
        const std::string message = message_of<E>(call);
        EXPECT_NE(message.find(part), std::string::npos) << message;
      };
      const ValueError value{""};
      expect([&] { values.parameter("frist.weight"); }, "did you mean 'first.weight'?", value);
      expect([&] { values.parameter(tessera::ones({5, 3})); }, "no parameter of Uneven", value);
      expect([&] { values.gradient("scale"); }, "no backward came to it", value);
      expect([&] { values.set_gradient("scale", tessera::ones({1})); }, "no gradient", value);
      expect([&] { values.state("scale", "exp_avg"); }, "has not stepped with it yet", value);
      expect(
          [&] {
            values.set_parameter("first.weight", tessera::ones({3, 5}));
          },
          "f32[3, 5]", ShapeError{""});
      expect([&] { values.set_parameter("scale", tessera::ones({1}, {.dtype = kI64})); },
             "floating-point", DTypeError{""});
      {  // the first of two micro-batches
        const auto micro = run.accelerator.accumulate(run.model);
        const auto batch = batch_of(run.accelerator.process_index());
        run.accelerator.backward(squared_error(run.model(batch[0]), batch[1]));
        expect([&] { values.gradient("scale"); }, "a sum that goes on", AutogradError{""});
      }
      {
        const auto micro = run.accelerator.accumulate(run.model);
        const auto batch = batch_of(2 + run.accelerator.process_index());
        run.accelerator.backward(squared_error(run.model(batch[0]), batch[1]));
        EXPECT_EQ(values.gradient("scale").numel(), 1);
        run.step();
      }
      expect([&] { values.gradient("scale"); }, "no backward came to it", value);
      expect([&] { values.state("scale", "momentum_buffer"); }, "there are exp_avg, exp_avg_sq",
             value);
      expect([&] { values.state("scale", "step"); }, "is a number", value);
      EXPECT_EQ(values.state("first.weight", "exp_avg").shape(), (Shape{5, 3}));
    });
  }
}

TEST(FullValues, OfAParameterWithoutAnOptimizerHaveNoStates) {
  Uneven model;
  const FullValues values(model);
  EXPECT_TRUE(values.state_names("scale").empty());
  EXPECT_NE(message_of<ValueError>([&] { values.state("scale", "exp_avg"); }).find("no optimizer"),
            std::string::npos);
  EXPECT_EQ(values.parameter("scale").item<float>(), 0.5F);
  Accelerator accelerator({.config_file = ""});
  EXPECT_THROW(accelerator.full_values(model), ValueError);
}

// ---- Several backwards of a step ---------------------------------------------------------------

enum class TwoLosses { kTwoForwards, kRetainedGraph };

Tensor first_loss(const Tensor& y, const Tensor& target) { return squared_error(y, target); }
Tensor second_loss(const Tensor& y) { return (y * y * y).mean() * 0.25; }

// One step, with both losses of each micro-batch.
ByName two_losses(const Job& job, TwoLosses how, bool says_more) {
  manual_seed(3);
  Training run(job);
  for (int micro = 0; micro < job.micro_batches; ++micro) {
    const auto scope = run.accelerator.accumulate(run.model);
    const auto batch = batch_of(micro * job.ranks + run.accelerator.process_index());
    const Tensor y = run.model(batch[0]);
    run.accelerator.backward(first_loss(y, batch[1]),
                             {.retain_graph = how == TwoLosses::kRetainedGraph, .more = says_more});
    const Tensor again = how == TwoLosses::kRetainedGraph ? y : run.model(batch[0]);
    run.accelerator.backward(second_loss(again));
  }
  const FullValues values = run.accelerator.full_values(run.model);
  ByName found;
  for (const std::string& name : run.names()) {
    found[name] = values.gradient(name).to_vector<float>();
  }
  run.step();
  for (const std::string& name : run.names()) {
    found[name + " after"] = values.parameter(name).to_vector<float>();
  }
  return found;
}

// Of one process, by hand: the gradients of its backwards in this order, (batch, loss), each
// bracket summed by itself; then their mean over the batches.
using Order = std::vector<std::vector<std::pair<int, int>>>;
ByName by_hand(const Order& order, int batches) {
  manual_seed(3);
  Uneven model;
  std::map<std::string, Tensor> sums;
  for (const auto& bracket : order) {
    for (const auto& [number, loss] : bracket) {
      const auto batch = batch_of(number);
      const Tensor y = model(batch[0]);
      (loss == 0 ? first_loss(y, batch[1]) : second_loss(y)).backward();
    }
    const NoGradGuard no_grad;
    for (const auto& [name, tensor] : model.named_parameters()) {
      Tensor& sum = sums[name];
      sum = sum.defined() ? sum + tensor.grad() : tensor.grad().clone();
      tensor.zero_grad();
    }
  }
  const NoGradGuard no_grad;
  ByName found;
  optim::AdamW optimizer(model.named_parameters(), {.lr = 0.05, .weight_decay = 0.1});
  for (const auto& [name, tensor] : model.named_parameters()) {
    mul_(sums[name], Scalar(1.0 / batches));
    found[name] = sums[name].to_vector<float>();
    tensor.set_grad(sums[name]);
  }
  optimizer.step();
  for (const auto& [name, tensor] : model.named_parameters()) {
    found[name + " after"] = tensor.to_vector<float>();
  }
  return found;
}

bool reduces_each(Sharding sharding) {
  return sharding != Sharding::kDdp && sharding != Sharding::kZero1;
}

TEST(SeveralBackwards, OfAStepHaveTheBitsOfOneProcessWhereTheProgramSaysThatMoreFollow) {
  for (const int ranks : tests::thinned({2, 3, 4}, 3)) {
    // Ranks that keep whole gradients add up their own first; the others all of a loss.
    Order by_rank, by_loss(1);
    for (int rank = 0; rank < ranks; ++rank) by_rank.push_back({{rank, 0}, {rank, 1}});
    for (const int loss : {0, 1}) {
      for (int rank = 0; rank < ranks; ++rank) by_loss[0].push_back({rank, loss});
    }
    for (const Sharding sharding : kWays) {
      const ByName expected = by_hand(reduces_each(sharding) ? by_loss : by_rank, ranks);
      for (const TwoLosses how : {TwoLosses::kTwoForwards, TwoLosses::kRetainedGraph}) {
        SCOPED_TRACE(testing::Message() << way_name(sharding) << " on " << ranks << " ranks");
        expect_same(on_ranks_of({.sharding = sharding, .ranks = ranks},
                                [&](const Job& job) { return two_losses(job, how, true); }),
                    expected);
      }
    }
  }
}

TEST(SeveralBackwards, OfSeveralMicroBatchesHaveTheBitsOfOneProcessToo) {
  constexpr int kRanks = 3, kMicro = 2;
  Order by_rank(kRanks), by_turn(1);
  for (int micro = 0; micro < kMicro; ++micro) {
    for (const int loss : {0, 1}) {
      for (int rank = 0; rank < kRanks; ++rank) {
        const std::pair<int, int> one{micro * kRanks + rank, loss};
        by_rank[static_cast<size_t>(rank)].push_back(one);
        by_turn[0].push_back(one);
      }
    }
  }
  for (const Sharding sharding : kWays) {
    SCOPED_TRACE(way_name(sharding));
    expect_same(on_ranks_of({.sharding = sharding, .ranks = kRanks, .micro_batches = kMicro},
                            [](const Job& job) {
                              return two_losses(job, TwoLosses::kRetainedGraph, true);
                            }),
                by_hand(reduces_each(sharding) ? by_turn : by_rank, kRanks * kMicro));
  }
}

// Without a word each of them ends in a mean, which the next takes up again.
TEST(SeveralBackwards, ThatSayNothingAddUpAllTheSame) {
  for (const int ranks : {2, 3}) {
    Order by_loss(1);
    for (const int loss : {0, 1}) {
      for (int rank = 0; rank < ranks; ++rank) by_loss[0].push_back({rank, loss});
    }
    const ByName expected = by_hand(by_loss, ranks);
    for (const Sharding sharding : kWays) {
      SCOPED_TRACE(testing::Message() << way_name(sharding) << " on " << ranks << " ranks");
      const ByName found = on_ranks_of({.sharding = sharding, .ranks = ranks}, [](const Job& job) {
        return two_losses(job, TwoLosses::kRetainedGraph, false);
      });
      if (ranks == 2) {  // halves are exact
        expect_same(found, expected);
        continue;
      }
      for (const auto& [name, value] : expected) {
        if (name.ends_with("after")) continue;
        for (size_t i = 0; i < value.size(); ++i) {
          EXPECT_NEAR(found.at(name)[i], value[i], 4 * 0x1p-23F * std::abs(value[i])) << name;
        }
      }
    }
  }
}

// A gradient that was written between two backwards is what the second adds to.
TEST(SeveralBackwards, AddToWhatWasWrittenBetweenThem) {
  for (const int ranks : {2, 4}) {
    for (const Sharding sharding : kWays) {
      SCOPED_TRACE(testing::Message() << way_name(sharding) << " on " << ranks << " ranks");
      compared_ranks(ranks, [&](int rank) {
        const auto gradients = [&](bool first) {
          manual_seed(3);
          Training run({.sharding = sharding, .ranks = ranks});
          const FullValues values = run.accelerator.full_values(run.model);
          const auto micro = run.accelerator.accumulate(run.model);
          const auto batch = batch_of(rank);
          if (first) {
            run.accelerator.backward(first_loss(run.model(batch[0]), batch[1]));
            for (const std::string& name : run.names()) {
              values.set_gradient(name, values.gradient(name) * 0 + 1);
            }
          }
          run.accelerator.backward(second_loss(run.model(batch[0])));
          ByName found;
          for (const std::string& name : run.names()) {
            found[name] = values.gradient(name).to_vector<float>();
          }
          return found;
        };
        const ByName alone = gradients(false), both = gradients(true);
        for (const auto& [name, value] : alone) {
          for (size_t i = 0; i < value.size(); ++i) {
            EXPECT_NEAR(both.at(name)[i], 1 + value[i], 4 * 0x1p-23F * (1 + std::abs(value[i])));
          }
        }
      });
    }
  }
}

TEST(SeveralBackwards, OfWhichTheLastIsMissingAreAnErrorOfTheStep) {
  for (const Sharding sharding : kWays) {
    SCOPED_TRACE(way_name(sharding));
    compared_ranks(2, [&](int rank) {
      Training run({.sharding = sharding, .ranks = 2});
      const auto micro = run.accelerator.accumulate(run.model);
      const auto batch = batch_of(rank);
      run.accelerator.backward(first_loss(run.model(batch[0]), batch[1]), {.more = true});
      EXPECT_NE(message_of<AutogradError>([&] { run.optimizer.step(); }).find("not reduced"),
                std::string::npos);
      run.accelerator.backward(second_loss(run.model(batch[0])));
      EXPECT_TRUE(run.optimizer.step());
    });
  }
  Uneven model;
  Accelerator accelerator({.config_file = ""});
  accelerator.prepare(model);
  EXPECT_THROW(accelerator.backward(second_loss(model(batch_of(0)[0])), {.more = true}),
               ValueError);
}

}  // namespace
}  // namespace tessera::test_full_values
