// Sharded training: fully_shard() and zero() give the bits of replicas and of one process.
// ctest labels: threads
// ctest ranks: 2 4
#include <chrono>
#include <random>
#include <thread>

#include <tessera/core/memory/allocator.h>
#include <tessera/nn/materialise.h>

#include "distributed/fault_backend.h"
#include "distributed/sharded_fixture.h"
#include "message_of.h"

namespace tessera::distributed::test_fully_shard {
namespace {

struct Trained {
  std::vector<double> losses;
  std::map<std::string, std::vector<float>> gradients, values;  // of the last step, and after it
  friend bool operator==(const Trained&, const Trained&) = default;
};

struct Training {
  int micro = 1;
  int steps = 2;
  bool local_sums = false;  // micro-batches add up before they are reduced
  bool momentum = false;    // SGD in place of AdamW
};

template <class Body>
Trained train_steps(Odd& model, const Training& training, const Body& step_of) {
  std::unique_ptr<optim::Optimizer> optimizer;
  if (training.momentum) {
    optimizer = std::make_unique<optim::SGD>(model.named_parameters(),
                                             optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  } else {
    optimizer = std::make_unique<optim::AdamW>(
        model.named_parameters(), optim::AdamWOptions{.lr = 1e-2, .weight_decay = 0.1});
  }
  Trained result;
  for (int step = 0; step < training.steps; ++step) {
    step_of(step, result.losses);
    if (step + 1 == training.steps) result.gradients = whole_gradients(model);
    optimizer->step();
    optimizer->zero_grad();
  }
  result.values = whole_values(model);
  return result;
}

// Micro-batches are dealt in turn: number k of rank r is batch k * size + r of its step.
Trained train(Odd& model, int rank, int size, const Training& training,
              const DataParallelModel& parallel) {
  return train_steps(model, training, [&](int step, std::vector<double>& losses) {
    for (int k = 0; k < training.micro; ++k) {
      StepPlan plan = StepPlan::of(k, training.micro);
      if (!training.local_sums) plan.sync_gradients = true;
      parallel.set_plan(plan);
      const Tensor loss = loss_of(model, (step * training.micro + k) * size + rank);
      losses.push_back(loss.item());
      loss.backward();
    }
  });
}

Trained train_alone(int total, const Training& training) {
  Context context;
  const ContextGuard guard(context);
  set_num_threads(1);
  manual_seed(3);
  Odd model;
  return train_steps(model, training, [&](int step, std::vector<double>& losses) {
    for (int k = 0; k < total; ++k) {
      const Tensor loss = loss_of(model, step * total + k);
      losses.push_back(loss.item());
      loss.backward();
    }
    const NoGradGuard no_grad;
    // Divided as the ranks divide: once.
    for (const Tensor& parameter : model.parameters()) mul_(parameter.grad(), Scalar(1.0 / total));
  });
}

constexpr Way kWays[] = {Way::kReplicate, Way::kZero1,     Way::kZero2,
                         Way::kFully,     Way::kFullyKept, Way::kZero3};

TEST(FullyShard, EveryModeHasTheBitsOfOneProcess) {
  constexpr int kSteps = 10;
  for (const int size : {1, 2, 3, 4}) {
    const Trained expected = train_alone(size, {.steps = kSteps});
    for (const Way way : kWays) {
      SCOPED_TRACE(std::string(name_of(way)) + " on " + std::to_string(size));
      on_ranks(size, [&](int rank) {
        manual_seed(3);
        Odd model;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh);
        const Trained own = train(model, rank, size, {.steps = kSteps}, *parallel);
        EXPECT_EQ(own.values, expected.values);
        EXPECT_EQ(own.gradients, expected.gradients);
        for (int step = 0; step < kSteps; ++step) {
          EXPECT_EQ(own.losses[static_cast<size_t>(step)],
                    expected.losses[static_cast<size_t>(step * size + rank)]);
        }
      });
    }
  }
}

// However units are made, kept and recomputed, and whichever calls come late.
TEST(FullyShard, TenStepsOfAnyUnitsHaveTheBitsOfOneProcess) {
  NEEDS_THREADS;
  constexpr int kRanks = 4, kSteps = 10;
  const Trained expected = train_alone(kRanks, {.steps = kSteps});
  using Lists = std::vector<std::vector<std::string>>;
  const Lists units[] = {{},
                         {{"first"}, {"narrow"}, {"second"}, {"third"}},
                         {{"narrow", "first"}, {"second", "third"}}};
  const ReshardAfterForward keeps[] = {true, false, 2};
  for (const Lists& lists : units) {
    for (const ReshardAfterForward& keep : keeps) {
      for (const bool recomputes : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << lists.size() << " units beside the root, reshard "
                     << keep.reshards().value_or(false) << " among "
                     << keep.ranks().value_or(kRanks) << (recomputes ? ", recomputed" : ""));
        compared_ranks(kRanks,
                       [&](int rank) {
                         std::minstd_rand late(static_cast<unsigned>(rank + 1));
                         faults().before_start = [&](const Call&) {
                           std::this_thread::sleep_for(std::chrono::microseconds(late() % 30));
                           return true;
                         };
                         manual_seed(3);
                         Odd model;
                         Mesh mesh(world());
                         const FullyShardOptions unit{.reshard_after_forward = keep};
                         std::vector<HookHandle> handles;
                         for (const auto& names : lists) {
                           std::vector<nn::ModuleBase*> modules;
                           for (const auto& [name, child] : model.named_children()) {
                             if (std::ranges::find(names, name) == names.end()) continue;
                             modules.push_back(child);
                             if (recomputes) handles.push_back(child->checkpoint_calls());
                           }
                           if (names.front() == "narrow") std::ranges::reverse(modules);
                           fully_shard(modules, mesh, unit);
                         }
                         fully_shard(model, mesh, unit);
                         const ShardedModel parallel = sharded_model(model);
                         const Trained own =
                             train(model, rank, kRanks, {.steps = kSteps}, parallel);
                         EXPECT_EQ(own.values, expected.values);
                         EXPECT_EQ(own.gradients, expected.gradients);
                         for (size_t step = 0; step < kSteps; ++step) {
                           EXPECT_EQ(own.losses[step],
                                     expected.losses[step * kRanks + static_cast<size_t>(rank)]);
                         }
                         faults().before_start = {};
                       },
                       {.decorate = with_faults()});
      }
    }
  }
}

// Twelve micro-batches a step, however many of them a rank computes.
TEST(FullyShard, AnyDealingOfMicroBatchesHasOneHash) {
  for (const bool momentum : {false, true}) {
    const Trained expected = train_alone(12, {.momentum = momentum});
    for (const int size : {1, 2, 3, 4, 6}) {
      for (const Way way : kWays) {
        SCOPED_TRACE(std::string(name_of(way)) + " on " + std::to_string(size));
        on_ranks(size, [&](int rank) {
          manual_seed(3);
          Odd model;
          Mesh mesh(world());
          const auto parallel = shard_in(way, model, mesh, {.average = GradientAverage::kWindow});
          const Training training{.micro = 12 / size, .momentum = momentum};
          const Trained own = train(model, rank, size, training, *parallel);
          EXPECT_EQ(own.gradients, expected.gradients);
          EXPECT_EQ(own.values, expected.values);
          for (size_t i = 0; i < own.losses.size(); ++i) {
            const size_t batch = i * static_cast<size_t>(size) + static_cast<size_t>(rank);
            EXPECT_EQ(own.losses[i], expected.losses[batch]);
          }
        });
      }
    }
  }
}

// Where ranks add up their own micro-batches first the order is another one, the same for all.
TEST(FullyShard, LocalSumsAreAClassOfTheirOwn) {
  for (const int size : {2, 3, 4}) {
    Trained expected;
    for (const Way way : {Way::kReplicate, Way::kZero1, Way::kFully, Way::kFullyKept}) {
      SCOPED_TRACE(std::string(name_of(way)) + " on " + std::to_string(size));
      on_ranks(size, [&](int rank) {
        manual_seed(3);
        Odd model;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh, {.average = GradientAverage::kWindow});
        const Trained own = train(model, rank, size, {.micro = 3, .local_sums = true}, *parallel);
        if (way == Way::kReplicate && keeps_results(rank)) expected = own;
        world().barrier();
        EXPECT_EQ(own.gradients, expected.gradients);
        EXPECT_EQ(own.values, expected.values);
      });
    }
  }
}

TEST(FullyShard, AModelMadeWithoutMemoryTrainsAsOneThatHadItFromTheBeginning) {
  for (const int size : {2, 3}) {
    const Trained expected = train_alone(size, {.steps = 3});
    for (const bool reshard : {false, true}) {
      on_ranks(size, [&](int rank) {
        manual_seed(3);
        const auto model = [] {
          const nn::ParameterDefaultsGuard guard({.device = kMeta});
          return std::make_unique<Odd>();
        }();
        Mesh mesh(world());
        for (const auto& [name, child] : model->named_children()) {
          fully_shard(*child, mesh, {.reshard_after_forward = reshard});
        }
        fully_shard(*model, mesh, {.reshard_after_forward = reshard});
        nn::materialise(*model);
        ShardedModel parallel = sharded_model(*model);
        const Trained own = train(*model, rank, size, {.steps = 3}, parallel);
        EXPECT_EQ(own.values, expected.values);
      });
    }
  }
}

// As a loop of one's own has it: the first call is the first that is heard of the model.
TEST(FullyShard, AModelThatGetsItsMemoryBeforeItsFirstCallTrains) {
  for (const int size : {1, 2, 3}) {
    for (const bool whole : {false, true}) {  // one unit, or one for each child
      std::map<std::string, std::vector<float>> expected;
      in_one_process([&] {
        Net plain;
        accumulate_in_one_process(plain, 0, size, size);
        expected = whole_gradients(plain);
      });
      on_ranks(size, [&](int rank) {
        manual_seed(3);
        const auto model = [] {
          const nn::ParameterDefaultsGuard guard({.device = kMeta});
          return std::make_unique<Net>();
        }();
        Mesh mesh(world());
        for (const auto& [name, child] : model->named_children()) {
          if (!whole) fully_shard(*child, mesh);
        }
        fully_shard(*model, mesh);
        EXPECT_NE(
            message_of<DeviceError>([&] { loss_of(*model, rank); }).find("give the model memory"),
            std::string::npos);
        nn::materialise(*model);
        loss_of(*model, rank).backward();
        EXPECT_EQ(whole_gradients(*model), expected);
      });
    }
  }
}

struct Scaled : nn::Module<Scaled> {
  Scaled() : fc(add<nn::Linear>("fc", 8, 3)), scale(parameter("scale", tessera::ones({}))) {}
  Tensor forward(const Tensor& x) { return fc(x) * scale; }
  nn::Linear& fc;
  const Tensor& scale;
};

// A run of elements needs no dimension, rows do.
TEST(FullyShard, ScalarsLieInRunsAndHaveNoRows) {
  on_ranks(2, [](int rank) {
    Mesh mesh(world());
    std::map<std::string, std::vector<float>> expected;
    for (const Way way : {Way::kReplicate, Way::kZero1, Way::kZero2}) {
      manual_seed(3);
      Scaled model;
      const auto parallel = shard_in(way, model, mesh);
      optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
      for (int step = 0; step < 2; ++step) {
        loss_of(model, 2 * step + rank).backward();
        optimizer.step(), optimizer.zero_grad();
      }
      if (way == Way::kReplicate) {
        expected = whole_values(model);
      } else {
        EXPECT_EQ(whole_values(model), expected) << name_of(way);
      }
    }
    Scaled rows;
    EXPECT_NE(message_of<ConfigError>([&] { fully_shard(rows, mesh); }).find("'scale' is a scalar"),
              std::string::npos);
  });
}

// Buckets of one element, of some parameters, of all.
TEST(FullyShard, BucketsChangeNoBit) {
  for (const Way way : {Way::kZero1, Way::kZero2}) {
    Trained expected;
    if (way == Way::kZero2) expected = train_alone(6, {});
    for (const int64_t bytes : {6, 700, 6000, 1 << 20}) {
      SCOPED_TRACE(std::string(name_of(way)) + ", buckets of " + std::to_string(bytes));
      on_ranks(3, [&](int rank) {
        manual_seed(3);
        Odd model;
        Mesh mesh(world());
        const auto parallel = shard_in(
            way, model, mesh, {.average = GradientAverage::kWindow, .bucket_bytes = bytes});
        const Training training{.micro = 2, .local_sums = way == Way::kZero1};
        const Trained own = train(model, rank, 3, training, *parallel);
        if (keeps_results(rank) && expected.values.empty()) expected = own;
        world().barrier();
        EXPECT_EQ(own.gradients, expected.gradients);
        EXPECT_EQ(own.values, expected.values);
      });
    }
  }
}

// Along the replicated axis what the owners of parts have summed is added: a double sum. `every`:
// in each micro-batch, after which the first replica goes on from it.
Gradients double_sum(int shards, int micro, bool every) {
  Context context;
  const ContextGuard guard(context);
  set_num_threads(1);
  manual_seed(3);
  Odd replicas[2];
  for (int k = 0; k < micro; ++k) {
    for (int replica = 0; replica < 2; ++replica) {
      for (int r = 0; r < shards; ++r) {
        loss_of(replicas[replica], (2 * k + replica) * shards + r).backward();
      }
    }
    if (!every && k + 1 < micro) continue;
    const NoGradGuard no_grad;
    const TensorList first = replicas[0].parameters(), second = replicas[1].parameters();
    for (size_t i = 0; i < first.size(); ++i) {
      add_(first[i].grad(), second[i].grad());
      zero_(second[i].grad());
      if (k + 1 == micro) mul_(first[i].grad(), Scalar(1.0 / (2 * shards)));
    }
  }
  return gradients_of(replicas[0]);
}

TEST(FullyShard, HybridShardingIsADoubleSum) {
  constexpr int kMicro = 2, kUnits = 5;
  for (const int shards : {2, 4}) {
    for (const bool every : {false, true}) {
      SCOPED_TRACE(std::to_string(shards) + " shards" + (every ? ", every one" : ""));
      const Gradients expected = double_sum(shards, kMicro, every);
      on_ranks(2 * shards, [&](int rank) {
        manual_seed(3);
        Odd model;
        Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", shards}});
        const auto parallel = shard_in(Way::kFully, model, mesh);
        const CommTrace::Scope scope(*rank_context().trace);
        for (int k = 0; k < kMicro; ++k) {
          StepPlan plan = StepPlan::of(k, kMicro);
          plan.sync_gradients = true;
          plan.all_reduce = plan.all_reduce || every;
          parallel->set_plan(plan);
          loss_of(model, 2 * k * shards + rank).backward();
        }
        const std::vector<CommRecord> records = scope.records();
        EXPECT_EQ(count(records, Operation::kReduceScatter, Channel::kGradient), kMicro * kUnits);
        EXPECT_EQ(count(records, Operation::kAllReduce, Channel::kGradient),
                  (every ? kMicro : 1) * kUnits);
        const auto gradients = whole_gradients(model);
        for (size_t i = 0; i < expected.names.size(); ++i) {
          EXPECT_EQ(gradients.at(expected.names[i]), expected.values[i]) << expected.names[i];
        }
      });
    }
  }
}

// A model of one rank is trained as a plain one: nothing is sent, and no memory is asked for
// beyond.
TEST(FullyShard, OneRankTrainsAsAPlainModel) {
  const auto step = [](Odd& model, optim::AdamW& optimizer) {
    loss_of(model, 0).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  int64_t plain_allocations = 0, plain_peak = 0;
  std::map<std::string, std::vector<float>> expected;
  for (const bool sharded : {false, true}) {
    compared_ranks(1, [&](int) {
      manual_seed(3);
      Odd model;
      Mesh mesh(world());
      std::unique_ptr<DataParallelModel> parallel;
      if (sharded) parallel = shard_in(Way::kFully, model, mesh);
      optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
      step(model, optimizer);
      const CommTrace::Scope scope(*rank_context().trace);
      const int64_t before = memory_stats()->allocations(), held = memory_stats()->current();
      memory_stats()->reset_peak();
      step(model, optimizer);
      const int64_t allocations = memory_stats()->allocations() - before;
      const int64_t peak = memory_stats()->peak() - held;
      EXPECT_TRUE(scope.records().empty());
      if (!sharded) {
        plain_allocations = allocations, plain_peak = peak, expected = whole_values(model);
      } else {
        EXPECT_LE(allocations, plain_allocations);
        EXPECT_LE(peak, plain_peak);
        EXPECT_EQ(whole_values(model), expected);
      }
    });
  }
}

}  // namespace
}  // namespace tessera::distributed::test_fully_shard
