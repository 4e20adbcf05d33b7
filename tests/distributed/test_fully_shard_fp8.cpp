// Weights that products in fp8 alone read travel as their bytes: one a parameter, and the bits
// of replicas, whatever else happens to be read.
// ctest labels: threads
// ctest ranks: 2
#include <functional>
#include <set>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/fp8/weight.h>
#include <tessera/core/factory/factory.h>
#include <tessera/nn/norm.h>
#include <tessera/precision/autocast.h>

#include "distributed/sharded_fixture.h"
#include "message_of.h"
#include "thinned.h"

namespace tessera::distributed::test_fully_shard_fp8 {
namespace {

using precision::Fp8Recipe;
using precision::Fp8Scaling;

constexpr int64_t kWidth = 32, kHidden = 48, kRows = 16;  // 3 ranks: 11, 11, 10 and 16 each
const std::vector<Fp8Scaling> kRecipes = {Fp8Scaling::kTensorwise, Fp8Scaling::kDelayed};

struct Layer : nn::Module<Layer> {
  Layer()
      : norm(add<nn::LayerNorm>("norm", kWidth)),
        up(add<nn::Linear>("up", kWidth, kHidden)),
        down(add<nn::Linear>("down", kHidden, kWidth)) {}
  Tensor forward(const Tensor& x) {
    const auto update = [this](const Tensor& h) { return down(relu(up(norm(h)))); };
    Tensor y = x + (recomputes ? checkpoint(update, x) : update(x));
    if (also) y = also(*this, y);
    return y;
  }
  bool recomputes = false;
  std::function<Tensor(Layer&, const Tensor&)> also;
  nn::LayerNorm& norm;
  nn::Linear& up;
  nn::Linear& down;
};
// The filter leaves out `in`, whose width is no multiple of 16, and `head`, which is the last.
struct Net : nn::Module<Net> {
  Net()
      : in(add<nn::Linear>("in", 8, kWidth)),
        first(add<Layer>("first")),
        second(add<Layer>("second")),
        head(add<nn::Linear>("head", kWidth, 16)) {}
  Tensor forward(const Tensor& x) { return head(second(first(in(x)))).to(kF32); }
  nn::Linear& in;
  Layer& first;
  Layer& second;
  nn::Linear& head;
};

// What a training does besides, before the step of a number.
struct Training;
using Before = std::function<void(Training&, int step)>;

struct Options {
  Fp8Recipe recipe = {};
  int micro_batches = 1;
  Before before = {};
  std::function<void(const Tensor& maxima)> reduction = [](const Tensor& maxima) {
    world()
        .all_reduce(maxima, ReduceOp::kMax, {.channel = Channel::kControl, .tag = "fp8_maxima"})
        .wait();
  };
};

// A training in parts or of replicas.
struct Training {
  Training(Way way, const Options& options_in)
      : options(options_in),
        seeded((manual_seed(3), true)),
        mesh(world()),
        applied(precision::apply(model, precision::Policy::fp8(options.recipe))),
        parallel(shard_in(way, model, mesh, {.average = GradientAverage::kWindow})),
        optimizer(model.named_parameters(), {.lr = 0.05}) {
    applied.fp8()->set_reduction(options.reduction);
  }
  double backward(int micro, int64_t rows = kRows) {
    StepPlan plan = StepPlan::of(micro, options.micro_batches);
    plan.sync_gradients = true;
    parallel->set_plan(plan);
    const Tensor loss = loss_of(
        model, (step_ * options.micro_batches + micro) * world_size() + world().rank(), rows);
    loss.backward();
    return loss.item();
  }
  void step() {
    if (options.before) options.before(*this, step_);
    for (int i = 0; i < options.micro_batches; ++i) losses.push_back(backward(i));
    applied.fp8()->update();
    optimizer.step();
    optimizer.zero_grad();
    ++step_;
  }
  // Losses, values, scales and histories, and what was counted.
  std::map<std::string, std::vector<float>> outcome() {
    auto all = whole_values(model);
    for (const auto& [name, tensor] : applied.fp8()->state_dict()) {
      all["state of " + name] = tensor.to_vector<float>();
    }
    all["losses"].assign(losses.begin(), losses.end());
    for (const auto& layer : applied.fp8()->report().layers) {
      for (const auto& operand : layer.operands) {
        for (const double value :
             {static_cast<double>(operand.amax), operand.saturated, operand.underflown}) {
          all["report of " + layer.name].push_back(static_cast<float>(value));
        }
      }
      all["calls of " + layer.name] = {static_cast<float>(layer.fp8_calls)};
    }
    return all;
  }

  const Options options;
  const bool seeded;
  Net model;
  Mesh mesh;
  precision::AppliedPolicy applied;
  std::unique_ptr<DataParallelModel> parallel;
  optim::SGD optimizer;
  std::vector<double> losses;

 private:
  int step_ = 0;
};

using Outcome = std::map<std::string, std::vector<float>>;
Outcome train(Way way, const Options& options, int steps = 5) {
  Training run(way, options);
  for (int step = 0; step < steps; ++step) run.step();
  return run.outcome();
}

void expect_equal(const Outcome& own, const Outcome& expected) {
  ASSERT_EQ(own.size(), expected.size());
  for (const auto& [name, values] : expected) EXPECT_EQ(own.at(name), values) << name;
}
// Of two runs; none in a process that is not the first rank.
void expect_equal(const std::vector<Outcome>& outcomes) {
  if (outcomes.empty() && !ranks_are_threads()) return;
  ASSERT_EQ(outcomes.size(), 2U);
  expect_equal(outcomes[1], outcomes[0]);
}

// The same in all modes as with replicas; with several micro-batches as in ZeRO-2, which reduces
// each (docs/sharding.md).
void same_as_replicas(const Options& options) {
  for (const int size : tests::thinned({2, 3}, 2)) {
    SCOPED_TRACE(std::string(name_of(options.recipe.scaling)) + " on " + std::to_string(size));
    const bool one = options.micro_batches == 1;
    std::vector<Outcome> expected(static_cast<size_t>(size));
    on_ranks(size, [&](int rank) {
      expected[static_cast<size_t>(rank)] = train(one ? Way::kReplicate : Way::kZero2, options);
    });
    for (const Way way : {Way::kFully, Way::kFullyKept, Way::kZero3}) {
      SCOPED_TRACE(name_of(way));
      on_ranks(size, [&](int rank) {
        expect_equal(train(way, options), expected[static_cast<size_t>(rank)]);
      });
    }
  }
}
void same_as_replicas(const Before& before, int micro_batches = 1) {
  for (const Fp8Scaling recipe : kRecipes) {
    same_as_replicas(
        {.recipe = {.scaling = recipe}, .micro_batches = micro_batches, .before = before});
  }
}

struct Sent {
  std::map<std::string, std::set<std::string>> dtypes;  // of each unit
  std::map<std::string, int64_t> bytes;                 // of one gather
  int64_t gathers = 0, maxima = 0;
};
Sent sent_in(const CommTrace::Scope& scope) {
  Sent sent;
  for (const CommRecord& record : scope.records()) {
    sent.maxima += record.tag == "fp8_maxima";
    if (record.channel != Channel::kParameter) continue;
    ++sent.gathers;
    sent.dtypes[record.tag].insert(std::string(tessera::name_of(record.dtype)));
    sent.bytes[record.tag] = record.bytes;
  }
  return sent;
}

// ---- What travels ------------------------------------------------------------------------------

TEST(FullyShardFp8, AParameterTravelsAsOneByte) {
  // Of one rank of two, in a unit of one layer: the weights' bytes, what else there is, and a label
  // for each weight.
  constexpr int64_t kWeights = 2 * kWidth * kHidden / 2;
  constexpr int64_t kNorm = 2 * kWidth / 2 * 4, kBiases = (kWidth + kHidden) / 2 * 2;
  for (const Fp8Scaling recipe : kRecipes) {
    SCOPED_TRACE(name_of(recipe));
    on_ranks(2, [&](int) {
      Training run(Way::kZero3, {.recipe = {.scaling = recipe}, .micro_batches = 2});
      memory_stats()->reset_peak();
      {
        const CommTrace::Scope scope(*rank_context().trace);
        run.step();
        const Sent sent = sent_in(scope);
        EXPECT_EQ(sent.dtypes.at("unit first"), (std::set<std::string>{"f32", "u8"}))
            << "after the first backward the ranks know";
      }
      const int64_t wholes = memory_stats()->peak(MemoryCategory::kUnsharded);
      memory_stats()->reset_peak();
      const CommTrace::Scope scope(*rank_context().trace);
      run.step();
      const Sent sent = sent_in(scope);
      for (const char* unit : {"unit first", "unit second"}) {
        EXPECT_EQ(sent.bytes.at(unit),
                  kWeights + kNorm + kBiases + 2 * static_cast<int64_t>(sizeof(Fp8Label)));
        EXPECT_EQ(sent.dtypes.at(unit), (std::set<std::string>{"u8"}));
      }
      EXPECT_EQ(sent.dtypes.at("unit head"), (std::set<std::string>{"bf16"})) << "the last Linear";
      EXPECT_EQ(sent.dtypes.at("unit in"), (std::set<std::string>{"bf16"}));
      EXPECT_EQ(sent.maxima, 1) << "once a step, of all weights together";
      EXPECT_LT(memory_stats()->peak(MemoryCategory::kUnsharded), wholes * 4 / 10);
      // This rank's own bytes, which stay; and two scales for each of four weights.
      EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
      EXPECT_GE(memory_stats()->current(MemoryCategory::kWeightCache), 2 * kWeights);
      EXPECT_LE(memory_stats()->peak(MemoryCategory::kWeightCache), 2 * kWeights + 4 * 2 * 64);
      int64_t reported = 0, gathered = 0;
      for (const auto& [unit, bytes] : sent.bytes) gathered += 2 * bytes;
      for (const UnitReport& unit : dynamic_cast<ShardedModel&>(*run.parallel).report()) {
        reported += unit.whole_bytes;
      }
      EXPECT_EQ(reported, gathered);
    });
  }
}

TEST(FullyShardFp8, ScalesOfRowsTravelAsTheyAre) {
  for (const Fp8Scaling recipe :
       {Fp8Scaling::kRowwise, Fp8Scaling::kRowwiseWithGwHp, Fp8Scaling::kBlockwise}) {
    on_ranks(2, [&](int) {
      Training run(Way::kZero3, {.recipe = {.scaling = recipe}});
      run.step();
      const CommTrace::Scope scope(*rank_context().trace);
      run.step();
      const Sent sent = sent_in(scope);
      EXPECT_GT(sent.bytes.at("unit first"), 2 * kWidth * kHidden / 2 * 4);
      EXPECT_EQ(sent.maxima, 0);
    });
  }
}

// ---- Bits --------------------------------------------------------------------------------------

TEST(FullyShardFp8, HasTheBitsOfReplicas) { same_as_replicas(Before()); }

TEST(FullyShardFp8, MicroBatchesAddUpAsInOtherModes) { same_as_replicas(Before(), 2); }

TEST(FullyShardFp8, RecomputedCallsReadTheBytes) {
  same_as_replicas([](Training& run, int step) {
    run.model.first.recomputes = run.model.second.recomputes = true;
    if (step == 0) run.model.first.checkpoint_calls();
  });
}

// Weights that are cut along their columns, evenly.
TEST(FullyShardFp8, ColumnsTravelLikeRows) {
  std::vector<Outcome> outcomes;
  for (const int dim : {0, 1}) {
    on_ranks(2, [&](int rank) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      const auto applied = precision::apply(model, precision::Policy::fp8());
      const auto parallel = shard_in(
          Way::kZero3, model, mesh,
          {.placement = [&](const std::string&, const Tensor& tensor) -> std::optional<Shard> {
            return tensor.dim() == 2 ? std::optional(Shard(dim)) : std::nullopt;
          }});
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.05});
      for (int step = 0; step < 3; ++step) {
        const CommTrace::Scope scope(*rank_context().trace);
        loss_of(model, 2 * step + rank, kRows).backward();
        optimizer.step(), optimizer.zero_grad();
        EXPECT_EQ(sent_in(scope).maxima, step > 0 ? 1 : 0);
      }
      const Outcome own = whole_values(model);
      if (rank == 0) outcomes.push_back(own);
    });
  }
  expect_equal(outcomes);
}

// Kept from one step to the next: the bytes follow the weights and the scales.
TEST(FullyShardFp8, GatheredBytesFollowTheWeights) {
  for (const Fp8Scaling recipe : kRecipes) {
    std::vector<Outcome> outcomes;
    for (const bool kept : {false, true}) {
      on_ranks(2, [&](int rank) {
        Training run(Way::kFullyKept, {.recipe = {.scaling = recipe}});
        fully_sharded(run.model).set_reshard_after_backward(!kept);
        for (int step = 0; step < 4; ++step) {
          run.step();
          // Scales that are new, of weights that are not.
          if (step == 2) run.backward(0), run.applied.fp8()->update(), run.model.zero_grad();
        }
        const Outcome own = run.outcome();
        if (rank == 0) outcomes.push_back(own);
      });
    }
    expect_equal(outcomes);
  }
}

// Parts of bytes among two neighbours of four, which backward gathers.
TEST(FullyShardFp8, NeighboursKeepParts) {
  std::vector<Outcome> outcomes;
  for (const bool near : {false, true}) {
    on_ranks(4, [&](int rank) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      const auto applied = precision::apply(model, precision::Policy::fp8());
      FullyShardOptions options;
      if (near) options.reshard_after_forward = 2;
      for (nn::ModuleBase* unit : std::initializer_list<nn::ModuleBase*>{
               &model.in, &model.first, &model.second, &model.head, &model}) {
        fully_shard(*unit, mesh, options);
      }
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.05});
      for (int step = 0; step < 3; ++step) {
        loss_of(model, 4 * step + rank, kRows).backward();
        optimizer.step(), optimizer.zero_grad();
      }
      const Outcome own = whole_values(model);
      if (rank == 0) outcomes.push_back(own);
    });
  }
  expect_equal(outcomes);
}

// ---- Other reads -------------------------------------------------------------------------------

// The unit is gathered as it is stored when something else reads a weight, until the next step.
TEST(FullyShardFp8, AnotherReadGathersTheWeightItself) {
  same_as_replicas([](Training& run, int step) {
    run.model.second.also = [step](Layer& layer, const Tensor& y) {
      return step == 2 ? y + layer.up.weight.t().sum() * 0.1 : y;
    };
  });
  on_ranks(2, [](int) {
    Training run(Way::kZero3, {.before = [](Training& run, int step) {
                   run.model.second.also = [step](Layer& layer, const Tensor& y) {
                     return step == 2 ? y + layer.up.weight.t().sum() * 0.1 : y;
                   };
                 }});
    for (int step = 0; step < 5; ++step) {
      const CommTrace::Scope scope(*rank_context().trace);
      run.step();
      const auto dtypes = sent_in(scope).dtypes.at("unit second");
      if (step == 2) {
        EXPECT_TRUE(dtypes.contains("f32") && dtypes.contains("u8"));
      } else if (step > 2) {
        EXPECT_EQ(dtypes, (std::set<std::string>{"u8"})) << "bytes again";
      }
    }
  });
}

TEST(FullyShardFp8, AWeightThatIsReadInBothWaysTravelsAsItIs) {
  const Before both = [](Training& run, int) {
    run.model.second.also = [](Layer& layer, const Tensor& y) {
      return y + layer.up.weight.t().sum() * 0.1;
    };
  };
  same_as_replicas(both);
  on_ranks(2, [&](int) {
    Training run(Way::kZero3, {.before = both});
    for (int step = 0; step < 3; ++step) {
      const CommTrace::Scope scope(*rank_context().trace);
      run.step();
      const std::vector<std::string> events = unit_events(scope.records());
      EXPECT_EQ(std::ranges::count(events, "G unit second"), 2) << "nothing is gathered twice";
    }
  });
}

// Calls that cannot run in fp8 on any rank: the products are those of bf16, backward included,
// and a step later they may again.
TEST(FullyShardFp8, CallsThatFallBackHaveTheWeight) {
  same_as_replicas([](Training& run, int step) {
    if (step != 2) return;
    const Tensor loss = loss_of(run.model, 100 + world().rank(), 5);
    loss.backward();
    run.losses.push_back(loss.item());
    run.model.zero_grad();
  });
}

TEST(FullyShardFp8, EvaluationInAnotherPrecisionGathersTheWeights) {
  for (const Fp8Scaling recipe : kRecipes) {
    same_as_replicas({.recipe = {.scaling = recipe, .in_evaluation = false},
                      .before = [](Training& run, int step) {
                        if (step != 1 && step != 3) return;
                        const NoGradGuard no_grad;
                        run.model.eval();
                        run.losses.push_back(loss_of(run.model, 7, kRows).item());
                        run.losses.push_back(loss_of(run.model, 8, kRows).item());
                        run.model.train();
                      }});
  }
}

TEST(FullyShardFp8, EvaluationReadsTheBytes) {
  same_as_replicas([](Training& run, int) {
    const NoGradGuard no_grad;
    run.losses.push_back(loss_of(run.model, 7, kRows).item());
    // By itself, without the root's autocast.
    run.losses.push_back(run.model.first(ones({16, kWidth})).sum().item());
  });
}

// One rank cannot have what the others do not send: all are told, and it says which weight.
TEST(FullyShardFp8, AReadOfOneRankAloneIsAnErrorThatNamesTheWeight) {
  failing_ranks("one calls what the others do not", 2, [](int rank) {
    Training run(Way::kZero3, {});
    run.step();
    run.step();
    try {
      run.backward(0, rank == 1 ? 5 : kRows);
      ADD_FAILURE() << "rank " << rank << " has gone on";
    } catch (const DistributedError& error) {
      const std::string message = error.what();
      if (rank == 1) {
        EXPECT_NE(message.find("'first.up.weight' came in fp8"), std::string::npos) << message;
      }
      EXPECT_NE(message.find("ranks call different things"), std::string::npos) << message;
    }
  });
}

TEST(FullyShardFp8, MeasuredNoiseIsOfTheWeightItself) {
  std::vector<double> noise;  // as rank 0 has it
  for (const Way way : {Way::kReplicate, Way::kZero3}) {
    on_ranks(2, [&](int rank) {
      Training run(way, {});
      for (int step = 0; step < 3; ++step) {
        run.applied.fp8()->measure_noise(step == 2);
        run.step();
      }
      const auto report = run.applied.fp8()->report();
      if (rank == 0) noise.push_back(report.layers[1].operands[1].sqnr);
    });
  }
  if (noise.empty() && !ranks_are_threads()) return;  // in a process that is another rank
  ASSERT_EQ(noise.size(), 2U);
  EXPECT_GT(noise[0], 10);
  EXPECT_EQ(noise[1], noise[0]);
}

TEST(FullyShardFp8, WholeParametersAreThoseOfTheParts) {
  on_ranks(2, [](int) {
    Training run(Way::kFullyKept, {});
    run.step();
    run.step();
    {
      const NoGradGuard no_grad;
      loss_of(run.model, 3, kRows);  // bytes are there
    }
    const auto values = whole_values(run.model);
    {
      const auto scope = full_parameters(run.model, {.writes = true});
      EXPECT_EQ(run.model.first.up.weight.to_vector<float>(), values.at("first.up.weight"));
      const NoGradGuard no_grad;
      mul_(run.model.first.up.weight, 2.0);
    }
    auto doubled = values.at("first.up.weight");
    for (float& value : doubled) value *= 2;
    EXPECT_EQ(whole_values(run.model).at("first.up.weight"), doubled);
    run.step();
  });
}

// ---- Mistakes ----------------------------------------------------------------------------------

TEST(FullyShardFp8, ScalesThatDifferAmongRanksAreAnErrorThatNamesTheWeight) {
  failing_ranks("what is injected reduces nothing", 2, [](int rank) {
    Training run(Way::kZero3, {.recipe = {.scaling = Fp8Scaling::kDelayed},
                               .reduction = [rank](const Tensor& maxima) {
                                 mul_(maxima, 1.0 + rank);
                                 world().barrier();
                               }});
    run.step();
    const std::string message = message_of<DistributedError>([&] { run.step(); });
    EXPECT_NE(message.find("'first.up.weight' was quantised with the scale"), std::string::npos)
        << message;
    // For failing_ranks: a call that did not end well.
    try {
      rank == 0 ? world().barrier() : world().all_reduce(ones({1})).wait();
    } catch (const DistributedError&) {
    }
  });
}

}  // namespace
}  // namespace tessera::distributed::test_fully_shard_fp8
