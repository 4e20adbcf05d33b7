// What must not be seen in the result: how much is asked for ahead, what is kept, when calls end.
// And norms of every order of what a model's modes hold.
// ctest labels: threads
#include <chrono>
#include <limits>
#include <random>
#include <thread>

#include <tessera/core/error.h>
#include <tessera/core/tensor/raw_views.h>

#include "distributed/fault_backend.h"
#include "distributed/sharded_fixture.h"

namespace tessera::distributed::test_shard_settings {
namespace {

constexpr double kWithoutBound = std::numeric_limits<double>::infinity();

// ---- Bits --------------------------------------------------------------------------------------

struct Result {
  std::vector<double> losses;
  std::map<std::string, std::vector<float>> values;
};

Result train_odd(Odd& model, int rank, int size) {
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2, .weight_decay = 0.1});
  Result result;
  for (int step = 0; step < 3; ++step) {
    const Tensor loss = loss_of(model, step * size + rank);
    result.losses.push_back(loss.item());
    loss.backward();
    optim::clip_grad_norm(model.parameters(), 0.05);
    optimizer.step();
    optimizer.zero_grad();
  }
  result.values = whole_values(model);
  return result;
}

// What is asked for ahead, in a forward and in a backward: the next one, nothing, a unit that is
// not needed yet, all.
enum class Ahead { kNext, kNothing, kFar, kAll };

void ask(const Odd& model, Ahead ahead) {
  const std::vector<nn::ModuleBase*> order{&model.first, &model.second, &model.narrow,
                                           &model.third};
  const auto handles = [](std::vector<nn::ModuleBase*> modules) {
    std::vector<FullyShardedModule> list;
    for (nn::ModuleBase* module : modules) list.push_back(fully_sharded(*module));
    return list;
  };
  for (size_t i = 0; i < order.size(); ++i) {
    const FullyShardedModule unit = fully_sharded(*order[i]);
    switch (ahead) {
      case Ahead::kNext:
        break;
      case Ahead::kNothing:  // itself, which is there
        unit.set_modules_to_forward_prefetch(handles({order[i]}));
        unit.set_modules_to_backward_prefetch(handles({order[i]}));
        break;
      case Ahead::kFar:
        unit.set_modules_to_forward_prefetch(handles({order[(i + 2) % 4]}));
        unit.set_modules_to_backward_prefetch(handles({order[(i + 1) % 4]}));
        break;
      case Ahead::kAll:
        unit.set_modules_to_forward_prefetch(handles(order));
        unit.set_modules_to_backward_prefetch(handles({order.rbegin(), order.rend()}));
        break;
    }
  }
}

TEST(ShardSettings, WhatIsAskedForAheadAndKeptChangesNoBit) {
  constexpr int kRanks = 3;
  std::vector<Result> expected(kRanks);
  compared_ranks(kRanks, [&](int rank) {
    manual_seed(3);
    Odd model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kReplicate, model, mesh);
    expected[static_cast<size_t>(rank)] = train_odd(model, rank, kRanks);
  });
  for (const Way way : {Way::kFully, Way::kFullyKept, Way::kZero3}) {
    for (const Ahead ahead : {Ahead::kNext, Ahead::kNothing, Ahead::kFar, Ahead::kAll}) {
      for (const bool late : {false, true}) {
        for (const bool reshards : {true, false}) {
          SCOPED_TRACE(testing::Message() << name_of(way) << ", ahead " << static_cast<int>(ahead)
                                          << ", late " << late << ", reshards " << reshards);
          compared_ranks(
              kRanks,
              [&](int rank) {
                const auto random = std::make_shared<std::mt19937>(rank + 7);
                if (late) {
                  faults().before_start = [random](const Call&) {
                    std::this_thread::sleep_for(std::chrono::microseconds((*random)() % 300));
                    return true;
                  };
                }
                manual_seed(3);
                Odd model;
                Mesh mesh(world());
                const auto parallel = shard_in(way, model, mesh);
                ask(model, ahead);
                StepPlan plan;
                plan.reshard_after_backward = reshards;
                parallel->set_plan(plan);
                const Result own = train_odd(model, rank, kRanks);
                EXPECT_EQ(own.losses, expected[static_cast<size_t>(rank)].losses);
                EXPECT_EQ(own.values, expected[static_cast<size_t>(rank)].values);
                faults().before_start = {};
              },
              {.decorate = with_faults()});
        }
      }
    }
  }
}

// What adds up on a rank alone goes with zero_grad(), as it does in replicas.
TEST(ShardSettings, ClearingForgetsWhatWasNotReduced) {
  for (const Way way : {Way::kReplicate, Way::kZero1, Way::kFully, Way::kFullyKept, Way::kZero3}) {
    for (const bool to_none : {true, false}) {
      SCOPED_TRACE(std::string(name_of(way)) + (to_none ? "" : ", to zeros"));
      compared_ranks(2, [&](int rank) {
        manual_seed(3);
        Odd model;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh);
        optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
        const auto locally = [&](int64_t batch) {
          const NoSync local = parallel->no_sync();
          loss_of(model, batch).backward();
        };
        std::map<std::string, std::vector<float>> expected;
        in_one_process([&] {
          Odd plain;
          accumulate_in_one_process(plain, 0, 2, 2);
          expected = whole_gradients(plain);
        });
        locally(10 + rank), locally(20 + rank);
        model.zero_grad(to_none);
        loss_of(model, rank).backward();
        EXPECT_EQ(whole_gradients(model), expected);
        optimizer.zero_grad(to_none);
        // After a reduction, and by the optimizer.
        loss_of(model, 30 + rank).backward();
        optimizer.zero_grad(to_none);
        locally(40 + rank);
        optimizer.zero_grad(to_none);
        locally(50 + rank);
        model.zero_grad(to_none);
        loss_of(model, rank).backward();
        EXPECT_EQ(whole_gradients(model), expected);
      });
    }
  }
}

// ---- Norms -------------------------------------------------------------------------------------

struct Measured {
  double norm = 0;
  std::map<std::string, std::vector<float>> clipped;
};

Measured measure(nn::ModuleBase& model, double p) {
  Measured result;
  result.norm = optim::clip_grad_norm(model.parameters(), 0.01, {.norm_type = p}).item();
  result.clipped = whole_gradients(model);
  return result;
}

constexpr double kOrders[] = {1, 2, 3, kWithoutBound};
constexpr Way kModes[] = {Way::kReplicate, Way::kZero1,     Way::kZero2,
                          Way::kFully,     Way::kFullyKept, Way::kZero3};

TEST(ShardSettings, NormsOfEveryOrderAreThoseOfTheWholeForOneCall) {
  constexpr int kRanks = 3;
  for (const double p : kOrders) {
    Measured expected;
    in_one_process([&] {
      Odd model;
      accumulate_in_one_process(model, 0, kRanks, kRanks);
      expected = measure(model, p);
    });
    for (const Way way : kModes) {
      SCOPED_TRACE(testing::Message() << name_of(way) << ", p = " << p);
      compared_ranks(kRanks, [&](int rank) {
        manual_seed(3);
        Odd model;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh);
        loss_of(model, rank).backward();
        const CommTrace::Scope scope(*rank_context().trace);
        optim::clip_grad_norm(model.parameters(), 1e9, {.norm_type = p});
        EXPECT_EQ(scope.records().size(), way == Way::kReplicate ? 0u : 1u);
        const Measured own = measure(model, p);
        if (p == 2) {
          EXPECT_EQ(own.norm, expected.norm);
          EXPECT_EQ(own.clipped, expected.clipped);
          return;
        }
        EXPECT_NEAR(own.norm, expected.norm, 4 * 0x1p-23 * expected.norm);
        for (const auto& [name, values] : expected.clipped) {
          for (size_t i = 0; i < values.size(); ++i) {
            ASSERT_NEAR(own.clipped.at(name)[i], values[i], 4 * 0x1p-23 * std::abs(values[i]));
          }
        }
      });
    }
  }
}

// Of some parameters, of which ranks may hold no element: what one process makes of the gradients.
TEST(ShardSettings, SomeParametersAreClippedAndTheOthersStay) {
  const std::vector<std::string> subsets[] = {
      {"first.weight", "scale", "third.bias"}, {"narrow.weight"}, {"narrow.bias", "second.bias"}};
  const auto clip = [](const nn::ModuleBase& model, const std::vector<std::string>& names) {
    TensorList some;
    for (const auto& [name, tensor] : model.named_parameters()) {
      if (std::ranges::find(names, name) != names.end()) some.push_back(tensor);
    }
    EXPECT_EQ(some.size(), names.size());
    return optim::clip_grad_norm(some, 1e-3).item();
  };
  const auto same_as_whole = [&](nn::ModuleBase& model, size_t calls) {
    const auto gradients = whole_gradients(model);
    for (const auto& names : subsets) {
      manual_seed(3);
      Odd whole;
      const auto before = whole_gradients(model);
      for (const auto& [name, own] : whole.named_parameters()) {
        own.set_grad(tensor(std::span<const float>(before.at(name)), own.shape()));
      }
      const double expected = clip(whole, names);
      EXPECT_GT(expected, 1e-3) << "it is clipped";
      const CommTrace::Scope scope(*rank_context().trace);
      EXPECT_EQ(clip(model, names), expected);
      EXPECT_EQ(scope.records().size(), calls);
      EXPECT_EQ(whole_gradients(model), whole_gradients(whole));
    }
    EXPECT_NE(whole_gradients(model), gradients);
  };
  for (const Way way : kModes) {
    SCOPED_TRACE(name_of(way));
    compared_ranks(3, [&](int rank) {
      manual_seed(3);
      Odd model;
      Mesh mesh(world());
      const auto parallel = shard_in(way, model, mesh);
      loss_of(model, rank).backward();
      same_as_whole(model, way == Way::kReplicate ? 0 : 1);
    });
  }
  compared_ranks(4, [&](int rank) {
    manual_seed(3);
    Odd model;
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}});
    const auto parallel = shard_in(Way::kFully, model, mesh);
    loss_of(model, rank).backward();
    same_as_whole(model, 1);
  });
}

// Replicas of shards: the axis that replicates is not asked.
TEST(ShardSettings, NormsOfReplicasOfShardsAreAskedOfTheShardsAlone) {
  compared_ranks(4, [](int rank) {
    manual_seed(3);
    Odd model;
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}});
    const auto parallel = shard_in(Way::kZero3, model, mesh);
    loss_of(model, rank).backward();
    const auto gradients = whole_gradients(model);
    Odd whole;
    for (const auto& [name, own] : whole.named_parameters()) {
      own.set_grad(tensor(std::span<const float>(gradients.at(name)), own.shape()));
    }
    for (const double p : kOrders) {
      const CommTrace::Scope scope(*rank_context().trace);
      const double norm = optim::clip_grad_norm(model.parameters(), 1e9, {.norm_type = p}).item();
      ASSERT_EQ(scope.records().size(), 1u);
      EXPECT_EQ(scope.records()[0].group_size, 2);
      const double expected =
          optim::clip_grad_norm(whole.parameters(), 1e9, {.norm_type = p}).item();
      EXPECT_NEAR(norm, expected, 4 * 0x1p-23 * expected) << p;
    }
  });
}

// One rank's batch has an overflow, which only the owners of its elements see.
TEST(ShardSettings, ANormThatIsNotFiniteIsAnErrorOnEveryRank) {
  for (const Way way : kModes) {
    SCOPED_TRACE(name_of(way));
    compared_ranks(3, [&](int rank) {
      manual_seed(3);
      Odd model;
      Mesh mesh(world());
      const auto parallel = shard_in(way, model, mesh);
      for (const double p : kOrders) {
        if (rank == 1) {
          model.in_the_middle = [](const Tensor& h) {
            register_hook(h, [](const Tensor& grad) {  // of one column
              const Tensor spoilt = grad.clone();
              raw::narrow(spoilt, 1, 2, 1).fill_(kWithoutBound);
              return spoilt;
            });
            return h;
          };
        }
        loss_of(model, rank).backward();
        EXPECT_THROW(optim::clip_grad_norm(model.parameters(), 1,
                                           {.norm_type = p, .error_if_nonfinite = true}),
                     ValueError);
        model.zero_grad();
        model.in_the_middle = {};
      }
      loss_of(model, rank).backward();
      EXPECT_GT(optim::clip_grad_norm(model.parameters(), 1, {.error_if_nonfinite = true}).item(),
                0);
    });
  }
}

}  // namespace
}  // namespace tessera::distributed::test_shard_settings
