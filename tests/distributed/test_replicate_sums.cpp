// Sums that replicas leave undivided while a step goes on, whose order is that of one process; and
// what communication hooks refuse.
// ctest labels: threads
// ctest ranks: 2
#include <tessera/core/error.h>

#include "distributed/replicate_fixture.h"
#include "message_of.h"
#include "refusals.h"

namespace tessera::distributed::test_replicate_sums {
namespace {

// Micro-batch k of m, reduced whether it is the last or not.
StepPlan reduced(int64_t k, int64_t m) {
  StepPlan plan = StepPlan::of(k, m);
  plan.sync_gradients = true;
  return plan;
}

Gradients in_one_process_over(int64_t count, double divisor) {
  Gradients gradients;
  in_one_process([&] {
    Net net;
    gradients = accumulate_in_one_process(net, 0, count, divisor);
  });
  return gradients;
}

// With views of buckets and with gradients of their own, whatever the divisor.
TEST(ReplicateSums, AStepThatIsReducedInEachMicroBatchHasTheBitsOfOneProcess) {
  for (const int size : {1, 2, 3, 4}) {
    const int micro = 12 / size;
    for (const bool as_views : {true, false}) {
      for (const GradientAverage average :
           {GradientAverage::kRanks, GradientAverage::kWindow, GradientAverage::kWeight}) {
        SCOPED_TRACE(testing::Message() << size << " ranks, views " << as_views << ", average "
                                        << static_cast<int>(average));
        const Gradients expected =
            in_one_process_over(12, average == GradientAverage::kRanks ? size : 12);
        on_ranks(size, [&](int rank) {
          manual_seed(3);
          Net net;
          Mesh mesh(world());
          ReplicateOptions options = small_buckets();
          options.gradient_as_bucket_view = as_views;
          options.average = average;
          const Replica replica = replicate(net, mesh, options);
          for (int k = 0; k < micro; ++k) {
            StepPlan plan = reduced(k, micro);
            plan.weight = k + 1;
            replica.set_plan(plan);
            loss_of(net, k * size + rank).backward();
          }
          EXPECT_FALSE(replica.pass().holds_unreduced());
          expect_same_bits(gradients_of(net), expected);
        });
      }
    }
  }
}

// A micro-batch under no_sync adds to the sum on its rank.
TEST(ReplicateSums, LocalBackwardsInBetweenAreCountedOnce) {
  on_ranks(2, [](int rank) {
    manual_seed(3);
    Net net;
    Mesh mesh(world());
    const Replica replica = replicate(net, mesh, small_buckets());
    const auto backward = [&](const StepPlan& plan, int64_t k) {
      replica.set_plan(plan);
      loss_of(net, 2 * k + rank).backward();
    };
    backward(reduced(0, 4), 0);
    const Gradients first = gradients_of(net);
    backward(StepPlan::of(1, 4), 1);  // adds up here
    backward(reduced(2, 4), 2);
    backward(reduced(3, 4), 3);
    const Gradients all = gradients_of(net);
    const Gradients expected = in_one_process_over(8, 2);
    expect_same_bits(first, in_one_process_over(2, 1));
    for (size_t i = 0; i < all.values.size(); ++i) {
      for (size_t j = 0; j < all.values[i].size(); ++j) {
        EXPECT_NEAR(all.values[i][j], expected.values[i][j],
                    1e-5 * std::max(1.f, std::abs(expected.values[i][j])));
      }
    }
  });
}

// Between micro-batches every rank has the sum; what was cleared there is no part of it any more.
TEST(ReplicateSums, AreOnEveryRankMeanwhileAndMayBeCleared) {
  on_ranks(3, [](int rank) {
    manual_seed(3);
    Net net;
    Mesh mesh(world());
    const Replica replica = replicate(net, mesh, small_buckets());
    for (const bool to_none : {true, false}) {
      replica.set_plan(reduced(0, 2));
      loss_of(net, 9 + rank).backward();
      net.zero_grad(to_none);
      replica.set_plan(reduced(0, 2));
      loss_of(net, rank).backward();
      expect_same_bits(gradients_of(net), in_one_process_over(3, 1));
      EXPECT_TRUE(replica.pass().holds_unreduced());
      replica.set_plan(reduced(1, 2));
      loss_of(net, 3 + rank).backward();
      expect_same_bits(gradients_of(net), in_one_process_over(6, 3));
      net.zero_grad();
    }
  });
}

// A loss that does not come from the model's outputs begins its backward at a parameter.
TEST(ReplicateSums, ALossBesideTheOutputsNeedsToldThatItGoesOn) {
  on_ranks(2, [](int rank) {
    manual_seed(3);
    Net net;
    Mesh mesh(world());
    const Replica replica = replicate(net, mesh, small_buckets());
    const auto backward = [&](int64_t k, bool resume) {
      replica.set_plan(reduced(k, 3));
      if (resume) replica.pass().resume_undivided();
      (net.first.weight * static_cast<double>(1 + 2 * k + rank)).sum().backward();
    };
    backward(0, false);
    backward(1, true);
    EXPECT_EQ(net.first.weight.grad().to_vector()[0], 1 + 2 + 3 + 4);
    const std::string message = message_of<AutogradError>([&] { backward(2, false); });
    EXPECT_NE(message.find("'first.weight'"), std::string::npos) << message;
    EXPECT_NE(message.find("resume_undivided()"), std::string::npos) << message;
    net.zero_grad();
    backward(0, false);
    EXPECT_EQ(net.first.weight.grad().to_vector()[0], 1 + 2);
    replica.set_plan(reduced(2, 3));
    loss_of(net, rank).backward();
    EXPECT_FALSE(replica.pass().holds_unreduced());
  });
}

// Compressed sums are divided each time and refuse what would count them twice.
TEST(ReplicateSums, OfHooksThatRoundAreMeans) {
  on_ranks(2, [](int rank) {
    manual_seed(3);
    Net net;
    Mesh mesh(world());
    Replica replica = replicate(net, mesh, small_buckets());
    replica.set_communication_hook(std::make_shared<CastHook>(kBF16));
    replica.set_plan(reduced(0, 2));
    loss_of(net, rank).backward();
    EXPECT_FALSE(replica.pass().holds_unreduced());
    const Gradients mean = in_one_process_over(2, 2), own = gradients_of(net);
    for (size_t i = 0; i < own.values.size(); ++i) {
      for (size_t j = 0; j < own.values[i].size(); ++j) {
        EXPECT_NEAR(own.values[i][j], mean.values[i][j],
                    0x1p-7 * std::max(1e-2f, std::abs(mean.values[i][j])));
      }
    }
    replica.set_plan(reduced(1, 2));
    EXPECT_THROW(loss_of(net, 2 + rank).backward(), AutogradError);
    net.zero_grad();
  });
}

// Of ranks with different numbers of batches every reduction is a mean.
TEST(ReplicateSums, UnderJoinEveryReductionIsDivided) {
  on_ranks(2, [](int rank) {
    manual_seed(3);
    Net net;
    Mesh mesh(world());
    Replica replica = replicate(net, mesh, small_buckets());
    {
      Join join = replica.join();
      for (int k = 0; k < 2 + rank; ++k) {
        replica.set_plan(reduced(0, 2));
        loss_of(net, rank == 0 || k < 2 ? 2 * k + rank : 8).backward();
        EXPECT_FALSE(replica.pass().holds_unreduced());
        if (k == 0) expect_same_bits(gradients_of(net), in_one_process_over(2, 2));
        net.zero_grad();
      }
      join.finish();
    }
    replica.set_plan(reduced(0, 2));
    loss_of(net, rank).backward();
    EXPECT_TRUE(replica.pass().holds_unreduced());
    net.zero_grad();
  });
}

TEST(CommunicationHook, OptionsAndStatesThatCannotBeAreRefused) {
  const auto made = [](const PowerSgdOptions& options) {
    return [options] { PowerSgdHook{options}; };
  };
  for (const PowerSgdOptions& fits :
       {PowerSgdOptions{.rank = 1}, PowerSgdOptions{.start_step = 0},
        PowerSgdOptions{.min_compression = 0}, PowerSgdOptions{.wire = kF16},
        PowerSgdOptions{.wire = kBF16}}) {
    EXPECT_NO_THROW(made(fits)());
  }
  const auto state = [](const std::string& name) {
    return [name] {
      StateDict state;
      state.set(name, scalar_tensor(1, kI64));
      PowerSgdHook().load_state_dict(state);
    };
  };
  EXPECT_NO_THROW(state("w.steps")());
  expect_refusals({
      {"gradients travel as f16 or bf16; got f32", [] { CastHook{kF32}; }},
      {"gradients travel as f16 or bf16; got f64", [] { CastHook{kF64}; }},
      {"the rank must be at least 1; got 0", made({.rank = 0})},
      {"must not be negative", made({.start_step = -1})},
      {"must not be negative", made({.min_compression = -0.5})},
      {"sends f32, f16 or bf16; got f64", made({.wire = kF64})},
      {"'w.step' is no entry of its state", state("w.step")},
      {"'error' is no entry of its state", state("error")},
  });
  on_ranks(2, [](int rank) {
    Net net;
    net.to(kF64);
    Mesh mesh(world());
    Replica replica = replicate(net, mesh);
    replica.set_communication_hook(std::make_shared<PowerSgdHook>());
    const std::string message = message_of([&] {
      net(ones({2, 8}, {.dtype = kF64})).sum().backward();
    });
    EXPECT_TRUE(mentions(message, "compresses f32 gradients")) << rank << message;
  });
}

}  // namespace
}  // namespace tessera::distributed::test_replicate_sums
