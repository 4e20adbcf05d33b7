// Forwards and backwards in other orders than one after the other, in every mode: the gradients are
// those of one process. And calls that throw.
// ctest labels: threads
#include <atomic>
#include <stdexcept>

#include <tessera/core/error.h>

#include "distributed/sharded_fixture.h"
#include "message_of.h"

namespace tessera::distributed::test_shard_orders {
namespace {

constexpr Way kEveryMode[] = {Way::kReplicate, Way::kZero1,     Way::kZero2,
                              Way::kFully,     Way::kFullyKept, Way::kZero3};

// Two outputs that require grad, one that does not, and a whole number.
struct Several {
  Tensor first, second, silent, count;
  void visit_tensors(auto&& visit) { visit(first), visit(second), visit(silent), visit(count); }
};
struct Forked : nn::Module<Forked> {
  Forked()
      : trunk(add<nn::Linear>("trunk", 8, 9)),
        left(add<nn::Linear>("left", 9, 5)),
        right(add<nn::Linear>("right", 9, 4)),
        scale(parameter("scale", tessera::ones({3}))) {}
  Several forward(const Tensor& x) {
    if (fails) throw std::runtime_error("fails in the forward");
    const Tensor h = relu(trunk(x));
    const Tensor scaled = left(h) * scale.sum();
    return {scaled, right(h), h.detach(), raw::full({1}, 3, kI64)};
  }
  bool fails = false;
  nn::Linear& trunk;
  nn::Linear& left;
  nn::Linear& right;
  const Tensor& scale;
};

Tensor batch_of(int64_t index) {
  return randn({5, 8}, {}, RandomStream{7, static_cast<uint64_t>(index)});
}
Tensor mean_square(const Tensor& y) { return (y * y).mean(); }

// What a rank does with its batch, as one process does it for each.
struct Order {
  const char* what;
  std::function<void(Forked& model, int64_t index)> backward;
  // Parameters that no gradient comes to.
  std::vector<std::string> untouched = {};
};

const Order kOrders[] = {
    {"one output of several",
     [](Forked& model, int64_t index) { mean_square(model(batch_of(index)).second).backward(); },
     {"left.weight", "left.bias", "scale"}},
    {"both outputs",
     [](Forked& model, int64_t index) {
       const Several y = model(batch_of(index));
       (mean_square(y.first) + mean_square(y.second)).backward();
     }},
    {"two forwards, a backward of both",
     [](Forked& model, int64_t index) {
       const Several y = model(batch_of(index)), z = model(batch_of(100 + index));
       (mean_square(y.first) + mean_square(z.second)).backward();
     }},
    {"a forward without gradients between",
     [](Forked& model, int64_t index) {
       const Tensor loss = mean_square(model(batch_of(index)).first);
       {
         const NoGradGuard no_grad;
         model(batch_of(200 + index));
       }
       loss.backward();
     },
     {"right.weight", "right.bias"}},
    {"an evaluation between",
     [](Forked& model, int64_t index) {
       const Several y = model(batch_of(index));
       model.eval();
       {
         const NoGradGuard no_grad;
         model(batch_of(300 + index));
       }
       model.train();
       (mean_square(y.first) + mean_square(y.second)).backward();
     }},
    {"a forward that is thrown away",
     [](Forked& model, int64_t index) {
       model(batch_of(400 + index));
       const Several y = model(batch_of(index));
       (mean_square(y.first) + mean_square(y.second)).backward();
     }},
    {"an output that does not require grad goes on",
     [](Forked& model, int64_t index) {
       const Several y = model(batch_of(index));
       (mean_square(y.first) * y.silent.sum() * y.count.to(kF32).sum()).backward();
     },
     {"right.weight", "right.bias"}},
    {"the later of two forwards comes back first",
     [](Forked& model, int64_t index) {
       const Several y = model(batch_of(index)), z = model(batch_of(500 + index));
       (mean_square(z.first) + 2.0 * mean_square(y.second)).backward();
     }},
};

TEST(ShardOrders, GradientsAreThoseOfOneProcess) {
  constexpr int kRanks = 3;
  for (const Order& order : kOrders) {
    std::map<std::string, std::vector<float>> expected;
    in_one_process([&] {
      Forked model;
      for (int rank = 0; rank < kRanks; ++rank) order.backward(model, rank);
      const NoGradGuard no_grad;
      for (const Tensor& parameter : model.parameters()) {
        if (parameter.grad().defined()) mul_(parameter.grad(), Scalar(1.0 / kRanks));
      }
      expected = whole_gradients(model);
    });
    for (const std::string& name : order.untouched) EXPECT_FALSE(expected.contains(name)) << name;
    for (const Way way : kEveryMode) {
      SCOPED_TRACE(std::string(order.what) + ", " + name_of(way));
      compared_ranks(kRanks, [&](int rank) {
        manual_seed(3);
        Forked model;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh);
        for (int step = 0; step < 2; ++step) {
          model.zero_grad();
          order.backward(model, rank);
          EXPECT_EQ(whole_gradients(model), expected);
          if (way != Way::kFullyKept) {
            EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
          }
          EXPECT_EQ(memory_stats()->current(MemoryCategory::kCommunication), 0);
        }
      });
    }
  }
}

// Two forwards, then their backwards, in the order of a pipeline: F F B B, twice.
TEST(ShardOrders, MicroBatchesOfAPipelineAddUp) {
  constexpr int kRanks = 2, kMicro = 4;
  std::map<std::string, std::vector<float>> expected;
  const auto loss_in = [](Forked& model, int64_t index) {
    const Several y = model(batch_of(index));
    return mean_square(y.first) + mean_square(y.second);
  };
  in_one_process([&] {
    Forked model;
    for (int k = 0; k < kMicro; ++k) {
      for (int rank = 0; rank < kRanks; ++rank) loss_in(model, k * kRanks + rank).backward();
    }
    const NoGradGuard no_grad;
    for (const Tensor& parameter : model.parameters()) {
      mul_(parameter.grad(), Scalar(1.0 / kRanks));
    }
    expected = whole_gradients(model);
  });
  for (const Way way : kEveryMode) {
    SCOPED_TRACE(name_of(way));
    compared_ranks(kRanks, [&](int rank) {
      manual_seed(3);
      Forked model;
      Mesh mesh(world());
      const auto parallel = shard_in(way, model, mesh);
      for (int step = 0; step < 2; ++step) {
        model.zero_grad();
        for (int pair = 0; pair < kMicro; pair += 2) {
          const Tensor losses[] = {loss_in(model, pair * kRanks + rank),
                                   loss_in(model, (pair + 1) * kRanks + rank)};
          for (int k = 0; k < 2; ++k) {
            StepPlan plan = StepPlan::of(pair + k, kMicro);
            plan.sync_gradients = true;
            parallel->set_plan(plan);
            losses[k].backward();
          }
        }
        EXPECT_EQ(whole_gradients(model), expected);
      }
    });
  }
}

// ---- Calls that throw --------------------------------------------------------------------------

// On all ranks: as if it had not been called, whatever came before.
TEST(ShardOrders, AForwardThatThrowsIsForgotten) {
  const Order& order = kOrders[1];
  for (const Way way : kEveryMode) {
    SCOPED_TRACE(name_of(way));
    std::map<std::string, std::vector<float>> expected;
    for (const bool fails : {false, true}) {
      compared_ranks(2, [&](int rank) {
        manual_seed(3);
        Forked model;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh);
        optim::SGD optimizer(model.named_parameters(), {.lr = 0.1, .momentum = 0.9});
        for (int step = 0; step < 3; ++step) {
          if (fails) {
            model.fails = true;
            EXPECT_THROW(model(batch_of(step)), std::runtime_error);
            model.fails = false;
            EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
          }
          order.backward(model, 2 * step + rank);
          optimizer.step();
          optimizer.zero_grad();
        }
        const auto values = whole_values(model);
        if (!fails && rank == 0) expected = values;
        world().barrier();
        EXPECT_EQ(values, expected);
      });
    }
  }
}

// On one rank, whose error leaves the program: the others hear of it at once, whatever they wait
// for.
TEST(ShardOrders, AForwardThatThrowsOnOneRankEndsTheOthers) {
  for (const Way way : kEveryMode) {
    for (const bool first_step : {true, false}) {
      SCOPED_TRACE(std::string(name_of(way)) + (first_step ? ", at once" : ""));
      std::atomic<int> told{0};
      EXPECT_THROW(failing_ranks("one throws in its forward", 3,
                                 [&](int rank) {
                                   manual_seed(3);
                                   Forked model;
                                   Mesh mesh(world());
                                   const auto parallel = shard_in(way, model, mesh);
                                   if (!first_step) kOrders[1].backward(model, rank);
                                   model.zero_grad();
                                   model.fails = rank == 1;
                                   try {
                                     kOrders[1].backward(model, rank);
                                   } catch (const DistributedError& error) {
                                     const std::string message = error.what();
                                     EXPECT_NE(message.find("rank 1"), std::string::npos)
                                         << message;
                                     ++told;
                                     throw;
                                   }
                                 }),
                   std::exception);
      EXPECT_EQ(told, 2);
    }
  }
}

}  // namespace
}  // namespace tessera::distributed::test_shard_orders
