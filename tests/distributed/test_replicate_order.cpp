// When data-parallel training communicates: launch order under random delays, overlap under a
// virtual clock.
// ctest labels: threads
#include <chrono>
#include <future>
#include <random>
#include <thread>

#include "distributed/fault_backend.h"
#include "distributed/replicate_fixture.h"

namespace tessera::distributed::test_replicate_order {
namespace {

void with_faulty_ranks(int size, const std::function<void(int rank)>& body) {
  compared_ranks(size, body, {.decorate = with_faults()});
}

void sleep_some(std::mt19937& random, int most_microseconds) {
  const auto amount = random() % static_cast<unsigned>(most_microseconds);
  if (amount < static_cast<unsigned>(most_microseconds) / 2) return;
  std::this_thread::sleep_for(std::chrono::microseconds(amount));
}

// Two steps with a delay, or none, before every gradient and every collective.
void train_with_delays(unsigned seed, int rank, bool swap_and_skip) {
  std::mt19937 random(seed * 64 + static_cast<unsigned>(rank));
  faults().before_start = [&](const Call&) {
    sleep_some(random, 100);
    return true;
  };
  manual_seed(3);
  Pairs model;
  Mesh mesh(world());
  ReplicateOptions options;
  options.first_bucket_bytes = 300, options.bucket_bytes = 600;
  const Replica replica = replicate(model, mesh, options);
  std::vector<HookHandle> handles;
  for (const Tensor& parameter : model.parameters()) {
    handles.push_back(register_hook(parameter, [&](const Tensor&) {
      sleep_some(random, 100);
      return Tensor();
    }));
  }
  for (int step = 0; step < 2; ++step) {
    const unsigned swapped = swap_and_skip ? random() : 0, skipped = swap_and_skip ? random() : 0;
    const Tensor x = randn({2, 8}, {}, RandomStream{seed, static_cast<uint64_t>(rank)});
    model(x, swapped, skipped).sum().backward();
    model.zero_grad();
  }
  for (HookHandle& handle : handles) handle.remove();
  faults().before_start = nullptr;
}

TEST(ReplicateOrder, D13_EveryRankIssuesTheSameSequenceUnder200SeedsOfDelays) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    // compared_ranks compares the sequences.
    with_faulty_ranks(seed % 2 == 0 ? 2 : 4, [&](int rank) {
      train_with_delays(seed, rank, /*swap_and_skip=*/seed % 4 >= 2);
    });
    if (HasFailure()) break;
  }
}

TEST(ReplicateOrder, D14_EveryBucketButTheLastIsIssuedBeforeTheLastGradient) {
  on_ranks(4, [](int rank) {
    Net net;
    Mesh mesh(world());
    ReplicateOptions options;
    options.first_bucket_bytes = options.bucket_bytes = 1;
    const Replica replica = replicate(net, mesh, options);
    for (int step = 0; step < 3; ++step) {
      const CommTrace::Scope scope(world().trace());
      loss_of(net, rank).backward();
      const BackwardRecord& record = replica.pass().record();
      const auto buckets = static_cast<int64_t>(replica.schedule().buckets().size());
      ASSERT_EQ(buckets, 6);
      ASSERT_EQ(static_cast<int64_t>(record.launches.size()), buckets);
      EXPECT_EQ(record.gradients, 6);
      // The first backward knows the order of layers, not yet that of weight and bias.
      const int64_t late = step == 0 ? 1 : 0;
      for (int64_t i = 0; i < buckets; ++i) {
        EXPECT_EQ(record.launches[static_cast<size_t>(i)].bucket, i);
        EXPECT_LE(record.launches[static_cast<size_t>(i)].gradients_before, i + 1 + late);
      }
      EXPECT_LT(record.launches[static_cast<size_t>(buckets - 2)].gradients_before, 6 + late);
      // The trace says the same: in order, under the names of the buckets.
      std::vector<std::string> tags;
      for (const CommRecord& entry : scope.records()) {
        if (entry.channel == Channel::kGradient) tags.push_back(entry.tag);
      }
      EXPECT_EQ(tags, (std::vector<std::string>{"bucket 0", "bucket 1", "bucket 2", "bucket 3",
                                                "bucket 4", "bucket 5"}));
      net.zero_grad();
    }
  });
}

// A backward whose every gradient takes `compute` seconds of the virtual clock and whose every
// bucket takes `latency`.
struct Times {
  double total = 0, hidden = 0;
};
Times backward_on_virtual_clock(double compute, double latency, bool overlap) {
  Times times;
  with_faulty_ranks(4, [&](int rank) {
    auto clock = std::make_shared<VirtualClock>();
    clock->latency = [=](const Call& call) {
      return call.channel == Channel::kGradient ? latency : 0.0;
    };
    use_clock(clock);
    Net net;
    Mesh mesh(world());
    ReplicateOptions options;
    options.first_bucket_bytes = options.bucket_bytes = overlap ? 1 : 1 << 20;
    const Replica replica = replicate(net, mesh, options);
    std::vector<HookHandle> handles;
    for (const Tensor& parameter : net.parameters()) {
      handles.push_back(register_hook(parameter, [&](const Tensor&) {
        clock->now += compute;
        return Tensor();
      }));
    }
    for (int step = 0; step < 2; ++step) {
      const CommTrace::Scope scope(world().trace());
      const double begin = clock->now;
      loss_of(net, rank).backward();
      if (rank == 0)
        times = {clock->now - begin, hidden_share(scope.records(), Channel::kGradient)};
      net.zero_grad();
    }
    for (HookHandle& handle : handles) handle.remove();
  });
  return times;
}

TEST(ReplicateOrder, D14_CommunicationThatFitsIsHiddenButForTheLastBucket) {
  for (const double latency : {0.2, 0.5, 0.9}) {
    const Times times = backward_on_virtual_clock(1, latency, true);
    EXPECT_LE(times.total, (6 + latency) * 1.1) << "latency " << latency;
    EXPECT_NEAR(times.hidden, 5.0 / 6, 0.01);
  }
}

TEST(ReplicateOrder, D14_OneBucketForAllHidesNothing) {
  const Times times = backward_on_virtual_clock(1, 0.9, false);
  EXPECT_NEAR(times.total, 6.9, 1e-6);
  EXPECT_NEAR(times.hidden, 0, 1e-6);
}

// ---- Timeouts ----------------------------------------------------------------------------------

TEST(ReplicateOrder, TheFirstReductionHasATimeoutOfItsOwn) {
  std::atomic<int> steps{0}, raised{0};
  std::promise<void> rank_0_raised;
  failing_ranks("rank 1 is late", 2, [&](int rank) {
    manual_seed(3);
    Net net;
    Mesh mesh(world());
    const Replica replica = replicate(net, mesh, {});
    rank_context().timeouts.collective = 0.15;
    rank_context().timeouts.first_step = 30;
    try {
      for (int step = 0; step < 2; ++step) {
        // Rank 1 is late: in the first step by more than a collective's time, then until rank 0 has
        // given up.
        if (rank == 1 && step == 0) std::this_thread::sleep_for(std::chrono::milliseconds(450));
        if (rank == 1 && step == 1) rank_0_raised.get_future().wait_for(std::chrono::minutes(1));
        loss_of(net, rank).backward();
        net.zero_grad();
        ++steps;
      }
    } catch (const DistributedError& error) {
      if (rank == 0) {
        EXPECT_NE(std::string(error.what()).find("waited "), std::string::npos) << error.what();
        rank_0_raised.set_value();
      }
      ++raised;
    }
  });
  EXPECT_EQ(steps, 2);  // one of each rank
  EXPECT_EQ(raised, 2);
}

// ---- A deliberate bug --------------------------------------------------------------------------

// A rank that does not wait reads gradients that are not there yet.
TEST(ReplicateOrder, WaitingForNothingIsSeen) {
  Gradients expected;
  {
    Context context;
    const ContextGuard guard(context);
    manual_seed(3);
    Net net;
    expected = accumulate_in_one_process(net, 0, 2, 2);
  }
  for (const bool skips : {false, true}) {
    std::atomic<bool> right{true};
    with_faulty_ranks(2, [&](int rank) {
      manual_seed(3);
      Net net;
      Mesh mesh(world());
      const Replica replica = replicate(net, mesh, small_buckets());
      faults().skip_wait = skips && rank == 1;
      loss_of(net, rank).backward();
      if (gradients_of(net).values != expected.values) right = false;
      faults().skip_wait = false;
    });
    EXPECT_EQ(right, !skips);
  }
}

}  // namespace
}  // namespace tessera::distributed::test_replicate_order
