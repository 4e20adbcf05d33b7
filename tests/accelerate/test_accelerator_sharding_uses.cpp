// What programs do with an Accelerator, in every mode of sharding: what replicas do, to the bit, or
// an error that says why not.
// ctest labels: threads
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include <tessera/accelerate/local_sgd.h>
#include <tessera/core/error.h>
#include <tessera/nn/norm.h>
#include <tessera/optim/ema.h>

#include "accelerate/sharded_words.h"
#include "message_of.h"
#include "thinned.h"

namespace tessera::test_accelerator_sharding_uses {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;
using distributed::full_tensor;
using distributed::is_dtensor;

constexpr Sharding kShardedWays[] = {Sharding::kZero1, Sharding::kZero2, Sharding::kZero3,
                                     Sharding::kFsdp};

const char* way_name(Sharding sharding) {
  static const char* const names[] = {"ddp", "zero1", "zero2", "zero3", "fsdp"};
  return names[static_cast<int>(sharding)];
}

AcceleratorOptions in_mode(Sharding sharding) {
  return {.seed = 5, .sharding = sharding, .config_file = ""};
}

// What the program gives on each rank.
using Program = std::function<Values(const AcceleratorOptions& options)>;
std::vector<Values> outcomes_of(int ranks, Sharding sharding, const Program& program) {
  std::vector<Values> outcomes(static_cast<size_t>(ranks));
  compared_ranks(ranks, [&](int rank) {
    manual_seed(5);
    outcomes[static_cast<size_t>(rank)] = program(in_mode(sharding));
  });
  return outcomes;
}

// The program has the bits of replicas in these modes, with two and three ranks.
void expect_as_replicas(const Program& program, std::span<const Sharding> ways = kShardedWays) {
  for (const int ranks : tests::thinned({2, 3}, 2)) {
    const std::vector<Values> expected = outcomes_of(ranks, Sharding::kDdp, program);
    for (const Sharding sharding : ways) {
      SCOPED_TRACE(testing::Message() << way_name(sharding) << " on " << ranks << " ranks");
      EXPECT_TRUE(outcomes_of(ranks, sharding, program) == expected);
    }
  }
}

Tensor loss_of(Words& model, const std::array<Tensor, 2>& batch) {
  return cross_entropy(model(batch[0]).reshape({-1, 131}), batch[1].reshape({-1}));
}

// An epoch.
void train_clipped(Accelerator& accelerator, Words& model,
                   data::DataLoader<std::array<Tensor, 2>>& loader, optim::Optimizer& optimizer) {
  for (const auto& batch : loader) {
    const auto micro = accelerator.accumulate(model);
    accelerator.backward(loss_of(model, batch));
    accelerator.clip_grad_norm(model.parameters(), 0.5);
    optimizer.step(), optimizer.zero_grad();
  }
}

struct Training {
  explicit Training(const AcceleratorOptions& options, int64_t samples = 48)
      : accelerator(options),
        loader(std::make_shared<Tokens>(samples), {.batch_size = 2, .shuffle = true}),
        optimizer(model.named_parameters(), {.lr = 1e-2, .weight_decay = 0.1}) {
    accelerator.prepare(model, optimizer, loader);
  }
  void step() { optimizer.step(), optimizer.zero_grad(); }
  void train(const std::array<Tensor, 2>& batch) {
    const auto micro = accelerator.accumulate(model);
    accelerator.backward(loss_of(model, batch));
    step();
  }
  Values epoch() {
    for (const auto& batch : loader) train(batch);
    return whole_values(model);
  }
  Accelerator accelerator;
  Words model;
  data::DataLoader<std::array<Tensor, 2>> loader;
  optim::AdamW optimizer;
};

// ---- Windows -----------------------------------------------------------------------------------

TEST(ShardingUses, BackwardsUnderNoSyncAddUpWhereWholeGradientsAreKept) {
  constexpr Sharding kKeep[] = {Sharding::kZero1, Sharding::kZero3, Sharding::kFsdp};
  expect_as_replicas(
      [](const AcceleratorOptions& options) {
        Training run(options);
        int64_t turn = 0;
        for (const auto& batch : run.loader) {
          if (++turn % 3 != 0) {
            const AcceleratorScope alone = run.accelerator.no_sync(run.model);
            run.accelerator.backward(loss_of(run.model, batch));
            continue;
          }
          run.accelerator.backward(loss_of(run.model, batch));
          run.step();
        }
        return whole_values(run.model);
      },
      kKeep);
}

TEST(ShardingUses, UnderZero2NoSyncIsAnErrorAfterWhichTheNextStepIsGood) {
  const auto program = [](bool alone) {
    return [alone](const AcceleratorOptions& options) {
      Training run(options);
      bool first = alone;
      for (const auto& batch : run.loader) {
        if (std::exchange(first, false)) {
          const AcceleratorScope scope = run.accelerator.no_sync(run.model);
          const std::string message =
              message_of<ConfigError>([&] { run.accelerator.backward(loss_of(run.model, batch)); });
          EXPECT_NE(message.find("leave out no_sync()"), std::string::npos) << message;
          continue;
        }
        run.train(batch);
      }
      return whole_values(run.model);
    };
  };
  const Values values = outcomes_of(2, Sharding::kZero2, program(true))[0];
  for (const std::vector<float>& one : values) EXPECT_TRUE(std::isfinite(one[0]));
}

// 13 batches of each rank make windows of 4, 4, 4 and 1.
TEST(ShardingUses, AShortLastWindowIsAMeanToo) {
  for (const int ranks : tests::thinned({2, 3}, 2)) {
    const auto program = [ranks](AcceleratorOptions options) {
      options.gradient_accumulation_steps = 4;
      return Training(options, 26 * ranks).epoch();
    };
    const std::vector<Values> expected = outcomes_of(ranks, Sharding::kDdp, program);
    EXPECT_TRUE(outcomes_of(ranks, Sharding::kZero1, program) == expected);
    const std::vector<Values> reduced = outcomes_of(ranks, Sharding::kZero2, program);
    // One sum over ranks and micro-batches has an order of its own.
    EXPECT_TRUE(near(reduced[0], expected[0], 1e-4));
    EXPECT_TRUE(outcomes_of(ranks, Sharding::kZero3, program) == reduced);
    EXPECT_TRUE(outcomes_of(ranks, Sharding::kFsdp, program) == reduced);
  }
}

// The last batch of the last rank has one sample.
TEST(ShardingUses, UnevenLastBatchesWeighWhatTheyHold) {
  expect_as_replicas([](AcceleratorOptions options) {
    options.even_batches = false;
    return Training(options, 47).epoch();
  });
  expect_as_replicas([](const AcceleratorOptions& options) {  // filled up
    return Training(options, 43).epoch();
  });
}

TEST(ShardingUses, TwoLossesOfAMicroBatchAddUp) {
  expect_as_replicas([](const AcceleratorOptions& options) {
    Training run(options);
    for (const auto& batch : run.loader) {
      const auto micro = run.accelerator.accumulate(run.model);
      const Tensor loss = loss_of(run.model, batch);
      run.accelerator.backward(loss * 0.5, {.retain_graph = true});
      run.accelerator.backward(loss * 0.25);
      run.step();
    }
    return whole_values(run.model);
  });
}

TEST(ShardingUses, GradientsAreTheMeanAndCanBeReadWhole) {
  expect_as_replicas([](const AcceleratorOptions& options) {
    Training run(options);
    const auto micro = run.accelerator.accumulate(run.model);
    run.accelerator.backward(loss_of(run.model, *run.loader.begin()));
    Values gradients;
    for (const auto& [name, tensor] : run.model.named_parameters()) {
      const Tensor grad = tensor.grad();
      EXPECT_TRUE(grad.defined()) << name;
      gradients.push_back((is_dtensor(grad) ? full_tensor(grad) : grad).to_vector<float>());
    }
    return gradients;
  });
}

TEST(ShardingUses, ValuesAreClippedOneByOne) {
  expect_as_replicas([](const AcceleratorOptions& options) {
    Training run(options);
    for (const auto& batch : run.loader) {
      const auto micro = run.accelerator.accumulate(run.model);
      run.accelerator.backward(loss_of(run.model, batch));
      run.accelerator.clip_grad_value(run.model.parameters(), 1e-3);
      run.step();
    }
    return whole_values(run.model);
  });
}

TEST(ShardingUses, AnOverflowOfOneRankSkipsTheStepOnAll) {
  expect_as_replicas([](AcceleratorOptions options) {
    options.mixed_precision = Precision::kFP16;
    options.loss_scale.init_scale = 256;
    Training run(options);
    Values outcome(1);
    int turn = 0;
    for (const auto& batch : run.loader) {
      const auto micro = run.accelerator.accumulate(run.model);
      Tensor loss = loss_of(run.model, batch);
      if (++turn == 3 && run.accelerator.process_index() == 1) loss = loss * INFINITY;
      run.accelerator.backward(loss);
      run.step();
      EXPECT_EQ(run.accelerator.optimizer_step_was_skipped(), turn == 3) << turn;
      outcome[0].push_back(static_cast<float>(run.accelerator.loss_scale()));
    }
    EXPECT_LT(outcome[0].back(), outcome[0].front());
    for (std::vector<float>& one : whole_values(run.model)) outcome.push_back(std::move(one));
    return outcome;
  });
}

// ---- Ranks that have no more batches -----------------------------------------------------------

TEST(ShardingUses, JoiningUnevenInputsIsRefusedAndSaysWhatToDo) {
  for (const Sharding sharding : kShardedWays) {
    compared_ranks(2, [&](int) {
      Training run(in_mode(sharding));
      const std::string message = message_of<UnsupportedError>(
          [&] { run.accelerator.join_uneven_inputs(run.model, [&] { run.epoch(); }); });
      EXPECT_NE(message.find("even batches"), std::string::npos) << message;
      run.epoch();
    });
  }
}

TEST(ShardingUses, LocalSgdIsRefusedAndSaysWhy) {
  for (const Sharding sharding : kShardedWays) {
    compared_ranks(2, [&](int) {
      Training run(in_mode(sharding));
      const std::string message = message_of<UnsupportedError>(
          [&] { const LocalSGD local(run.accelerator, run.model, {.steps = 2}); });
      EXPECT_NE(message.find("sharding=ddp"), std::string::npos) << message;
      run.epoch();
    });
  }
}

// ---- Beside the training -----------------------------------------------------------------------

// With the average of the parameters in their place, and with themselves again afterwards.
TEST(ShardingUses, AnAverageOfTheParametersEvaluates) {
  expect_as_replicas([](const AcceleratorOptions& options) {
    Training run(options);
    optim::EMA average(run.model.named_parameters(), {.decay = 0.9});
    const Tensor probe = Tokens(4).get(1)[0].reshape({1, 6});
    const auto answer = [&] {
      const NoGradGuard no_grad;
      run.model.eval();
      std::vector<float> logits = run.model(probe).to_vector<float>();
      run.model.train();
      return logits;
    };
    Values outcome;
    for (const auto& batch : run.loader) {
      run.train(batch);
      average.update();
      const std::vector<float> own = answer();
      {
        const optim::EMA::Scope scope(average);
        outcome.push_back(answer());
        EXPECT_NE(outcome.back(), own);
      }
      EXPECT_EQ(answer(), own);
    }
    for (std::vector<float>& one : whole_values(run.model)) outcome.push_back(std::move(one));
    return outcome;
  });
}

TEST(ShardingUses, ValuesOfAllRanksAreGatheredAndReduced) {
  expect_as_replicas([](const AcceleratorOptions& options) {
    Training run(options);
    Values outcome(2);
    for (const auto& batch : run.loader) {
      const auto micro = run.accelerator.accumulate(run.model);
      const Tensor loss = loss_of(run.model, batch);
      run.accelerator.backward(loss);
      run.step();
      const NoGradGuard no_grad;
      for (const float one : run.accelerator.gather(loss.detach().reshape({1})).to_vector<float>())
        outcome[0].push_back(one);
      outcome[1].push_back(
          static_cast<float>(run.accelerator.reduce(loss.detach().reshape({1})).item()));
    }
    return outcome;
  });
}

TEST(ShardingUses, APartIsNotGatheredAsIfItWereTheWhole) {
  for (const Sharding sharding : kShardedWays) {
    compared_ranks(2, [&](int) {
      Training run(in_mode(sharding));
      const Tensor part = run.model.embedding.weight.detach();
      const std::vector<Tensor> parts = {part, part};
      EXPECT_THROW(run.accelerator.gather(part), UnsupportedError);
      EXPECT_THROW(run.accelerator.gather(parts), UnsupportedError);
      EXPECT_THROW(run.accelerator.reduce(part), UnsupportedError);
      EXPECT_THROW(run.accelerator.reduce(parts), UnsupportedError);
      EXPECT_THROW(run.accelerator.broadcast(part), UnsupportedError);
      EXPECT_THROW(run.accelerator.broadcast(parts), UnsupportedError);
      EXPECT_THROW(run.accelerator.pad_across_processes(part), UnsupportedError);
      EXPECT_THROW(part.sum(), UnsupportedError);
      run.epoch();
    });
  }
}

TEST(ShardingUses, EvaluationBetweenStepsChangesNothing) {
  const auto program = [](bool evaluates) {
    return [evaluates](const AcceleratorOptions& options) {
      Training run(options);
      data::DataLoader validation(std::make_shared<Tokens>(11), {.batch_size = 2});
      run.accelerator.prepare(validation);
      std::vector<float> scores;
      const auto evaluate = [&](bool records) {
        std::optional<NoGradGuard> no_grad;
        if (!records) no_grad.emplace();
        run.model.eval();
        for (const auto& batch : validation) {
          const Tensor best = run.model(batch[0]).detach().argmax(-1);
          const Tensor right = best.eq(batch[1]).to(kF32).mean({1});
          const Tensor all = run.accelerator.gather_for_metrics(right);
          for (const float one : all.to_vector<float>()) scores.push_back(one);
        }
        run.model.train();
      };
      for (const auto& batch : run.loader) {
        run.train(batch);
        if (!evaluates) continue;
        evaluate(false);
        evaluate(true);  // a graph that goes without a backward
      }
      EXPECT_EQ(scores.size() % 11, 0u);
      Values outcome = whole_values(run.model);
      if (evaluates) outcome.push_back(scores);
      return outcome;
    };
  };
  expect_as_replicas(program(true));
  for (const Sharding sharding : kShardedWays) {
    std::vector<Values> with = outcomes_of(2, sharding, program(true));
    for (Values& one : with) one.pop_back();
    EXPECT_TRUE(with == outcomes_of(2, sharding, program(false))) << way_name(sharding);
  }
}

struct Normed : nn::Module<Normed> {
  Normed()
      : first(add<nn::Linear>("first", 1, 6)),
        norm(add<nn::BatchNorm1d>("norm", 6)),
        second(add<nn::Linear>("second", 6, 1)) {}
  Tensor forward(const Tensor& x) { return second(relu(norm(first(x)))); }
  nn::Linear& first;
  nn::BatchNorm1d& norm;
  nn::Linear& second;
};

TEST(ShardingUses, RunningStatisticsAreThoseOfReplicas) {
  for (const int64_t micro : {1, 2}) {
    for (const int ranks : tests::thinned({2, 3}, 2)) {
      const auto program = [micro](AcceleratorOptions options) {
        options.gradient_accumulation_steps = micro;
        Accelerator accelerator(options);
        Normed model;
        optim::SGD optimizer(model.named_parameters(), {.lr = 1e-2});
        data::DataLoader loader(std::make_shared<Line>(96), {.batch_size = 4});
        accelerator.prepare(model, optimizer, loader);
        for (const auto& batch : loader) {
          const auto window = accelerator.accumulate(model);
          accelerator.backward(squared_error(model(batch[0]), batch[1]));
          optimizer.step(), optimizer.zero_grad();
        }
        Values values;
        for (const auto& [name, buffer] : model.named_buffers()) {
          values.push_back(buffer.to(kF32).to_vector<float>());
        }
        if (micro == 1) {
          for (std::vector<float>& one : whole_values(model)) values.push_back(std::move(one));
        }
        return values;
      };
      const std::vector<Values> expected = outcomes_of(ranks, Sharding::kDdp, program);
      for (const Sharding sharding : kShardedWays) {
        const std::vector<Values> outcome = outcomes_of(ranks, sharding, program);
        EXPECT_TRUE(micro == 1 ? outcome == expected : near(outcome[0], expected[0], 1e-4))
            << way_name(sharding) << " on " << ranks << " ranks, windows of " << micro;
      }
    }
  }
}

// ---- Several models ----------------------------------------------------------------------------

TEST(ShardingUses, AFrozenTeacherStandsBesideAStudent) {
  expect_as_replicas([](const AcceleratorOptions& options) {
    Words teacher;
    for (const Tensor& parameter : teacher.parameters()) parameter.set_requires_grad(false);
    teacher.eval();
    Training run(options);
    run.accelerator.prepare(teacher);
    for (const auto& batch : run.loader) {
      const auto micro = run.accelerator.accumulate(run.model);
      const Tensor wanted = teacher(batch[0]);
      run.accelerator.backward(squared_error(run.model(batch[0]), wanted));
      run.step();
    }
    Values values = whole_values(run.model);
    for (std::vector<float>& one : whole_values(teacher)) values.push_back(std::move(one));
    return values;
  });
}

TEST(ShardingUses, FrozenPartsOfAModelStayAsTheyAre) {
  expect_as_replicas([](const AcceleratorOptions& options) {
    Accelerator accelerator(options);
    Words model;
    for (const Tensor& parameter : model.blocks.child(1).parameters()) {
      parameter.set_requires_grad(false);
    }
    data::DataLoader loader(std::make_shared<Tokens>(24), {.batch_size = 2});
    NamedTensors trained = model.named_parameters();
    std::erase_if(trained, [](const NamedTensor& one) { return !one.tensor.requires_grad(); });
    optim::AdamW optimizer(trained, {.lr = 1e-2});
    accelerator.prepare(model, optimizer, loader);
    train_clipped(accelerator, model, loader, optimizer);
    return whole_values(model);
  });
}

struct Critic : nn::Module<Critic> {
  Critic() : first(add<nn::Linear>("first", 3, 8)), second(add<nn::Linear>("second", 8, 1)) {}
  Tensor forward(const Tensor& x) { return second(relu(first(x))); }
  nn::Linear& first;
  nn::Linear& second;
};
struct Maker : nn::Module<Maker> {
  Maker() : first(add<nn::Linear>("first", 2, 8)), second(add<nn::Linear>("second", 8, 3)) {}
  Tensor forward(const Tensor& x) { return second(relu(first(x))); }
  nn::Linear& first;
  nn::Linear& second;
};

// The maker's loss goes through the critic, whose gradients of it are thrown away.
TEST(ShardingUses, TwoModelsAreTrainedAgainstEachOther) {
  expect_as_replicas([](const AcceleratorOptions& options) {
    Accelerator accelerator(options);
    Maker maker;
    Critic critic;
    optim::AdamW of_maker(maker.named_parameters(), {.lr = 1e-2});
    optim::AdamW of_critic(critic.named_parameters(), {.lr = 1e-2});
    accelerator.prepare(maker, critic, of_maker, of_critic);
    const auto rank = static_cast<uint64_t>(accelerator.process_index());
    for (uint64_t step = 0; step < 6; ++step) {
      const Tensor noise = randn({4, 2}, {}, RandomStream{rank, 2 * step});
      const Tensor real = randn({4, 3}, {}, RandomStream{rank, 2 * step + 1});
      {
        const auto micro = accelerator.accumulate(critic);
        const Tensor fake = maker(noise).detach();
        accelerator.backward(critic(fake).mean() - critic(real).mean());
        of_critic.step(), of_critic.zero_grad();
      }
      {
        const auto micro = accelerator.accumulate(maker);
        accelerator.backward(-critic(maker(noise)).mean());
        of_maker.step(), of_maker.zero_grad(), of_critic.zero_grad();
      }
    }
    Values values = whole_values(maker);
    for (std::vector<float>& one : whole_values(critic)) values.push_back(std::move(one));
    return values;
  });
}

// ---- Preparing ---------------------------------------------------------------------------------

TEST(ShardingUses, PreparingAgainChangesNothing) {
  expect_as_replicas([](const AcceleratorOptions& options) {
    Training run(options);
    run.accelerator.prepare(run.model, run.optimizer, run.loader);
    run.epoch();
    run.accelerator.prepare(run.model);
    return run.epoch();
  });
}

TEST(ShardingUses, DescribeNamesModeRanksAndUnits) {
  const std::string modes[] = {"replicate over", "zero1 on", "zero2 on", "fully_shard on",
                               "fully_shard on"};
  for (const Sharding sharding : kShardedWays) {
    compared_ranks(2, [&](int) {
      const Training run(in_mode(sharding));
      const std::string text = run.accelerator.describe();
      EXPECT_NE(text.find(modes[static_cast<int>(sharding)]), std::string::npos) << text;
      EXPECT_NE(text.find(std::string("sharding")), std::string::npos) << text;
      EXPECT_NE(text.find(way_name(sharding)), std::string::npos) << text;
    });
  }
}

TEST(ShardingUses, ACutModelIsNotPreparedAgainByAnotherAccelerator) {
  for (const Sharding sharding : kShardedWays) {
    for (const Sharding next : {sharding, Sharding::kDdp}) {
      compared_ranks(2, [&](int) {
        Words model;
        {
          Accelerator accelerator(in_mode(sharding));
          accelerator.prepare(model);
        }
        Accelerator accelerator(in_mode(next));
        const std::string message = message_of<ConfigError>([&] { accelerator.prepare(model); });
        EXPECT_NE(message.find("make the model anew"), std::string::npos) << message;
      });
    }
  }
}

// A search for a batch size makes an Accelerator for each try.
TEST(ShardingUses, ProgramsMakeModelAndAcceleratorAgain) {
  expect_as_replicas([](const AcceleratorOptions& options) {
    Values values;
    for (int tries = 0; tries < 2; ++tries) {
      Words model;
      Accelerator accelerator(options);
      data::DataLoader loader(std::make_shared<Tokens>(24), {.batch_size = 2});
      optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
      accelerator.prepare(model, optimizer, loader);
      for (const auto& batch : loader) {
        const auto micro = accelerator.accumulate(model);
        accelerator.backward(loss_of(model, batch));
        optimizer.step(), optimizer.zero_grad();
      }
      values = whole_values(model);
    }
    return values;
  });
}

TEST(ShardingUses, AnOptimizerMadeAfterPrepareHasTheParts) {
  expect_as_replicas([](const AcceleratorOptions& options) {
    Accelerator accelerator(options);
    Words model;
    data::DataLoader loader(std::make_shared<Tokens>(24), {.batch_size = 2});
    accelerator.prepare(model, loader);
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
    accelerator.prepare(optimizer);
    train_clipped(accelerator, model, loader, optimizer);
    return whole_values(model);
  });
}

// ---- Failures ----------------------------------------------------------------------------------

struct Stumbling : nn::Module<Stumbling> {
  Stumbling() : words(add<Words>("words")) {}
  Tensor forward(const Tensor& tokens) {
    Tensor x = words.embedding(tokens);
    for (size_t i = 0; i < words.blocks.num_children(); ++i) {
      if (i == 2 && stumbles) throw std::runtime_error("stumbled");
      x = words.blocks.child(i).call_tensor(x);
    }
    return matmul(words.norm(x), words.embedding.weight.t());
  }
  Words& words;
  bool stumbles = false;
};

// Prepared together with the model, in a call before, in one after.
TEST(ShardingUses, AnOptimizerThatHasSteppedTakesItsStateAlong) {
  for (const int order : {0, 1, 2}) {
    SCOPED_TRACE(order);
    expect_as_replicas([&](const AcceleratorOptions& options) {
      Words model;
      optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2, .amsgrad = true});
      const Tokens own(4);
      for (int step = 0; step < 2; ++step) {
        const auto [inputs, targets] = own.get(step);
        cross_entropy(model(inputs), targets).backward();
        optimizer.step(), optimizer.zero_grad();
      }
      Accelerator accelerator(options);
      data::DataLoader loader(std::make_shared<Tokens>(12), {.batch_size = 2});
      accelerator.prepare(loader);
      if (order == 0) accelerator.prepare(model, optimizer);
      if (order == 1) accelerator.prepare(optimizer);
      if (order != 0) accelerator.prepare(model);
      if (order == 2) accelerator.prepare(optimizer);
      train_clipped(accelerator, model, loader, optimizer);
      return whole_values(model);
    });
  }
}

TEST(ShardingUses, AForwardThatThrowsOnAllRanksIsForgotten) {
  expect_as_replicas([](const AcceleratorOptions& options) {
    Accelerator accelerator(options);
    Stumbling model;
    data::DataLoader loader(std::make_shared<Tokens>(24), {.batch_size = 2});
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
    accelerator.prepare(model, optimizer, loader);
    int turn = 0;
    for (const auto& batch : loader) {
      const auto micro = accelerator.accumulate(model);
      model.stumbles = ++turn == 2;
      const auto loss = [&] {
        return cross_entropy(model(batch[0]).reshape({-1, 131}), batch[1].reshape({-1}));
      };
      if (model.stumbles) {
        EXPECT_THROW(loss(), std::runtime_error);
        continue;
      }
      accelerator.backward(loss());
      optimizer.step(), optimizer.zero_grad();
    }
    return whole_values(model);
  });
}

// ---- Saving ------------------------------------------------------------------------------------

std::string folder_for(const std::string& name) {
  const std::string folder = testing::TempDir() + "sharding_uses_" + name;
  std::filesystem::remove_all(folder);
  return folder;
}

// Trains on until so many samples of all ranks are done; windows hold 6 micro-batches in all.
Values train_until(const AcceleratorOptions& options, const std::string& load,
                   const std::string& save, int64_t updates) {
  Training run(options, 72);
  int64_t done = 0;
  if (!load.empty()) {
    run.accelerator.load_state(load);
    done = 2;
  }
  for (const auto& batch : run.loader) {
    const auto micro = run.accelerator.accumulate(run.model);
    run.accelerator.backward(loss_of(run.model, batch));
    run.accelerator.clip_grad_norm(run.model.parameters(), 0.5);
    run.step();
    if (micro.sync_gradients() && ++done == updates) break;
  }
  EXPECT_EQ(done, updates);
  if (!save.empty()) run.accelerator.save_state(save);
  return whole_values(run.model);
}

Values on_so_many(int ranks, Sharding sharding, const std::string& load, const std::string& save,
                  int64_t updates) {
  return outcomes_of(ranks, sharding, [&](AcceleratorOptions options) {
    options.gradient_accumulation_steps = 6 / ranks;
    return train_until(options, load, save, updates);
  })[0];
}

// Where gradients are reduced in every micro-batch the sum is one, whatever number of ranks.
TEST(ShardingUses, AStateGoesOnInAnotherModeAndOnAnotherNumberOfRanks) {
  constexpr Sharding kOneSum[] = {Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp};
  const Values whole = on_so_many(2, Sharding::kFsdp, "", "", 4);
  for (const Sharding from : kOneSum) {
    for (const int ranks : tests::thinned({2, 3}, 2)) {
      const std::string folder = folder_for("elastic");
      on_so_many(ranks, from, "", folder, 2);
      for (const Sharding into : kOneSum) {
        for (const int others : {1, 2, 3}) {
          EXPECT_TRUE(on_so_many(others, into, folder, "", 4) == whole)
              << way_name(from) << " of " << ranks << " into " << way_name(into) << " of "
              << others;
        }
      }
    }
  }
}

TEST(ShardingUses, AStateOfReplicasGoesOnInEveryModeAndBack) {
  const auto program = [](const std::string& load, const std::string& save, int64_t updates) {
    return [=](const AcceleratorOptions& options) {
      return train_until(options, load, save, updates);
    };
  };
  constexpr Sharding kAll[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2, Sharding::kZero3,
                               Sharding::kFsdp};
  for (const int ranks : tests::thinned({2, 3}, 2)) {
    const Values whole = outcomes_of(ranks, Sharding::kDdp, program("", "", 4))[0];
    for (const Sharding from : kAll) {
      const std::string folder = folder_for("modes");
      outcomes_of(ranks, from, program("", folder, 2));
      for (const Sharding into : kAll) {
        EXPECT_TRUE(outcomes_of(ranks, into, program(folder, "", 4))[0] == whole)
            << way_name(from) << " into " << way_name(into) << " on " << ranks;
      }
    }
  }
}

TEST(ShardingUses, ModelsAreSavedWholeAndLoadedIntoParts) {
  std::vector<Values> loaded;
  std::string first;
  for (const Sharding sharding :
       {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp}) {
    const std::string folder = folder_for(std::string("model_") + way_name(sharding));
    const Values values = outcomes_of(3, sharding, [&](const AcceleratorOptions& options) {
      Training run(options);
      run.epoch();
      save_model(run.model, folder);
      return run.epoch();
    })[0];
    for (const Sharding into : {Sharding::kDdp, Sharding::kZero1, Sharding::kFsdp}) {
      loaded.push_back(outcomes_of(2, into, [&](const AcceleratorOptions& options) {
        Training run(options);
        load_model(run.model, folder);
        Values weights = whole_values(run.model);
        // The next forward sees them.
        const NoGradGuard no_grad;
        run.model.eval();
        weights.push_back(run.model(Tokens(4).get(1)[0].reshape({1, 6})).to_vector<float>());
        return weights;
      })[0]);
      EXPECT_TRUE(loaded.back() == loaded.front())
          << way_name(sharding) << " into " << way_name(into);
    }
  }
}

}  // namespace
}  // namespace tessera::test_accelerator_sharding_uses
