// Ranks that throw, end, hang or come late; calls that are lost or delayed; deadlines.
// ctest labels: threads
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <functional>
#include <future>
#include <latch>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>

#include "distributed/compared_ranks.h"
#include "distributed/fault_backend.h"
#include "message_of.h"

namespace tessera::distributed::test_collective_failures {
namespace {

TEST(Failures, ACE1_ARankThatThrowsMakesTheOthersRaise) {
  for (const bool in_collective : {false, true}) {
    std::atomic<int> raised{0};
    const std::string message = message_of([&] {
      failing_ranks("rank 2 throws", 4, [&](int rank) {
        barrier();
        if (rank == 2) TS_THROW(ValueError, "loss", "is not finite");
        if (!in_collective) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        try {
          for (;;) all_reduce(zeros({4}));
        } catch (const DistributedError& error) {
          EXPECT_NE(std::string(error.what()).find("rank 2 failed: loss: is not finite"),
                    std::string::npos)
              << error.what();
          ++raised;
        }
      });
    });
    EXPECT_EQ(raised, 3);
    EXPECT_EQ(message, "rank 2: loss: is not finite");  // the first cause, not its consequences
  }
}

TEST(Failures, ACE1_ARankThatEndsEarlyIsNamed) {
  std::atomic<int> raised{0};
  failing_ranks("rank 1 ends early", 3, [&](int rank) {
    if (rank == 1) return;
    const std::string message = message_of([] { barrier(); });
    EXPECT_NE(message.find("rank 1 ended"), std::string::npos) << message;
    ++raised;
  });
  EXPECT_EQ(raised, 2);
}

// What it sent before is received; what nobody takes keeps nothing alive (AddressSanitizer).
TEST(Failures, ACE1_ARankThatEndedNeitherSendsNorReceives) {
  failing_ranks("rank 1 sends once and ends", 3, [](int rank) {
    Group& group = world();
    if (rank == 1) {
      group.send(full({2}, 7), 0).forget();
      group.send(full({2}, 8), 2).forget();
      return;
    }
    if (rank == 2) return;  // never receives
    const Tensor received = zeros({2});
    group.recv(received, 1).wait();
    EXPECT_EQ(received.to_vector(), (std::vector<double>{7, 7}));
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { group.recv(received, 1).wait(); }, [&] { group.send(received, 1).wait(); }}) {
      const std::string message = message_of<DistributedError>(call);
      EXPECT_NE(message.find("rank 1 ended"), std::string::npos) << message;
    }
  });
}

// Rank 0 waits already when rank 1 ends: for it, and for rank 2 as well. What rank 1 has joined goes on.
TEST(Failures, ARankThatEndsFailsWhatWaitsForItAndNothingElse) {
  std::latch waiting(1), told(1);
  failing_ranks("rank 1 joins one call and ends", 3, [&](int rank) {
    Group& group = world();
    const CollectiveOptions soon{.channel = Channel::kPeer, .timeout_seconds = 30};
    const Tensor sum = full({2}, rank + 1), never = zeros({2});
    const auto ended = [](const std::function<void()>& call) {
      const std::string message = message_of<DistributedError>(call);
      EXPECT_NE(message.find("rank 1 ended"), std::string::npos) << message;
    };
    if (rank == 1) {
      waiting.wait();
      group.all_reduce(sum).forget();
      return;
    }
    if (rank == 2) {
      told.wait();
      group.send(full({2}, 5), 0).wait();
      all_reduce(sum);
      ended([&] { all_reduce(never); });
    } else {
      const Tensor received = zeros({2});
      const Work from_two = group.recv(received, 2);
      const Work joined = group.all_reduce(sum);
      const Work missing = group.all_reduce(never, ReduceOp::kSum, {.timeout_seconds = 30});
      const Work from_one = group.recv(zeros({2}), 1, 0, soon);
      const Work to_one = group.send(never, 1, 0, soon);
      waiting.count_down();
      for (const Work& work : {from_one, to_one, missing}) ended([&] { work.wait(); });
      told.count_down();
      from_two.wait();
      EXPECT_EQ(received.to_vector(), (std::vector<double>{5, 5}));
      joined.wait();
    }
    EXPECT_EQ(sum.to_vector(), (std::vector<double>{6, 6}));
  });
}

TEST(Failures, ACE1_ATimeoutNamesWhoIsWhereAndLeavesADump) {
  const std::string folder = testing::TempDir();
  std::latch issued(3), gave_up(4);
  failing_ranks("rank 3 does not come", 4, [&](int rank) {
    rank_context().dump_directory = folder;
    std::remove((folder + "/comm-rank-" + std::to_string(rank) + ".json").c_str());
    all_reduce(zeros({4}), ReduceOp::kSum, world(), {.tag = "bucket 0"});
    if (rank == 3) {  // hangs, until the others have given up
      gave_up.arrive_and_wait();
      EXPECT_THROW(barrier(), DistributedError);
      return;
    }
    const Work work = world().all_reduce(zeros({8}), ReduceOp::kSum, {.timeout_seconds = 0.1});
    issued.arrive_and_wait();
    const std::string message = message_of([&] { work.wait(); });
    gave_up.count_down();
    // One rank's wait runs out first and breaks the group for the others.
    EXPECT_NE(message.find("all_reduce #2 (sum, f32[8]) of 'world': waited "), std::string::npos)
        << message;
    EXPECT_NE(message.find("ranks 0,1,2 are at #2; rank 3 is at #1 (all_reduce #1 (sum, f32[4]) "
                           "'bucket 0' at test_collective_failures.cpp:"),
              std::string::npos)
        << message;
    std::FILE* file =
        std::fopen((folder + "/comm-rank-" + std::to_string(rank) + ".json").c_str(), "r");
    ASSERT_NE(file, nullptr);
    const nlohmann::json dump = nlohmann::json::parse(file);
    std::fclose(file);
    EXPECT_EQ(dump.at("rank"), rank);
    EXPECT_EQ(dump.at("records").at(1).at("state"), "failed");
  });
}

TEST(Failures, AbortEndsWhatIsUnderWayAndRefusesWhatComes) {
  std::latch aborted(2);
  failing_ranks("the group is aborted", 2, [&](int rank) {
    if (rank == 0) {
      const Work work = world().all_reduce(zeros({4}));
      world().abort("tired");
      EXPECT_THROW(work.wait(), DistributedError);
    }
    aborted.arrive_and_wait();
    const std::string message = message_of([] { barrier(); });
    EXPECT_NE(message.find("aborted: tired"), std::string::npos) << message;
  });
}

TEST(Failures, OfAWorkThatNobodyWaitsForAreSaidAndRaisedByTheNextCall) {
  testing::internal::CaptureStderr();
  // A call has ended when both ranks have issued it.
  std::latch issued(2), issued_again(2);
  failing_ranks("the ranks call different things", 2, [&](int rank) {
    const Tensor x = zeros({4});
    const auto differ = [&] { return rank == 0 ? world().all_reduce(x) : world().broadcast(x, 0); };
    differ();
    issued.arrive_and_wait();
    const std::string message = message_of([&] { all_reduce(x); });
    EXPECT_NE(message.find("nobody waited for an earlier call"), std::string::npos) << message;
    EXPECT_NE(message.find("ranks call different things here"), std::string::npos) << message;
    all_reduce(x);  // said once
    // What is under way with a call whose failure was raised is let go without a word.
    const Work first = differ();
    differ();
    issued_again.arrive_and_wait();
    EXPECT_THROW(first.wait(), DistributedError);
    all_reduce(x);
  });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("nobody waited for a collective: all_reduce #1"), std::string::npos) << said;
}

// Works whose last copy goes late: the next call raises what nobody saw, once, and with it lets go of
// what was under way.
TEST(Failures, OfWorksThatAreKeptAreRaisedOnceWhenTheyGo) {
  testing::internal::CaptureStderr();
  std::barrier meeting(2);
  failing_ranks("the ranks call different things", 2, [&](int rank) {
    const Tensor x = zeros({4});
    const auto differ = [&] { return rank == 0 ? world().all_reduce(x) : world().broadcast(x, 0); };
    const auto raises = [](const std::function<void()>& call) {
      const std::string message = message_of<DistributedError>(call);
      EXPECT_NE(message.find("nobody waited for an earlier call"), std::string::npos) << message;
    };
    const auto reduce = [&] { all_reduce(x); };

    std::optional<Work> kept = differ();
    reduce(), reduce();  // what goes well meanwhile makes nothing of it seen
    kept.reset();
    raises(reduce);
    reduce();

    for (const bool kept_last : {false, true}) {
      std::optional<Work> first = differ(), last = differ();
      meeting.arrive_and_wait();
      (kept_last ? first : last).reset();
      raises(reduce);
      (kept_last ? last : first).reset();
      reduce();
    }

    // A message of one rank raises it too, and of what fails after that the next call tells again.
    differ();
    meeting.arrive_and_wait();
    if (rank == 0) {
      raises([&] { world().send(x, 1).wait(); });
    } else {
      raises([&] { world().recv(x, 0).wait(); });
    }
    differ();
    meeting.arrive_and_wait();
    raises(reduce);
    reduce();
  });
  testing::internal::GetCapturedStderr();
}

TEST(Failures, NothingFollowsAShutdown) {
  compared_ranks(2, [](int) {
    const auto group = world().split(0);
    all_reduce(zeros({4}), ReduceOp::kSum, *group);
    group->shutdown();
    EXPECT_THROW(all_reduce(zeros({4}), ReduceOp::kSum, *group), DistributedError);
    barrier();  // others live
  });
}

// Injected ---------------------------------------------------------------------------------------

TEST(Injected, ADroppedCallMakesTheOthersWaitInVain) {
  const auto body = [](int rank) {
    if (rank == 1) {
      faults().before_start = [](const Call& call) {
        return std::string_view(call.text.data()).find("'lost'") == std::string_view::npos;
      };
    }
    EXPECT_THROW(
        all_reduce(zeros({4}), ReduceOp::kSum, world(), {.timeout_seconds = 0.1, .tag = "lost"}),
        DistributedError);
  };
  failing_ranks("a call is lost", 2, body, {.decorate = with_faults()});
}

TEST(Injected, DelaysDoNotChangeBits) {
  std::vector<double> reference;
  for (const uint64_t seed : {0, 1, 2, 3}) {
    const auto body = [&](int rank) {
      uint64_t state = seed * 4 + static_cast<uint64_t>(rank);
      faults().before_start = [&](const Call&) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        if (seed > 0) std::this_thread::sleep_for(std::chrono::microseconds(state >> 54));
        return true;
      };
      const Tensor x = randn({50}, {}, RandomStream{1, static_cast<uint64_t>(rank)});
      for (int i = 0; i < 20; ++i) all_reduce(x, ReduceOp::kMean);
      faults().before_start = nullptr;
      if (rank != 0) return;
      if (seed == 0) reference = x.to_vector();
      EXPECT_EQ(x.to_vector(), reference);
    };
    compared_ranks(4, body, {.decorate = with_faults()});
  }
}

TEST(Injected, TheVirtualClockMakesACollectiveTakeItsLatencyFromTheLastRank) {
  const auto body = [](int rank) {
    auto clock = std::make_shared<VirtualClock>();
    clock->latency = [](const Call& call) {
      return std::string_view(call.text.data()).find("'slow'") != std::string_view::npos ? 5.0
                                                                                         : 0.0;
    };
    use_clock(clock);
    clock->now = rank == 0 ? 1 : 3;  // rank 1 comes last
    const Work work = world().all_reduce(zeros({4}), ReduceOp::kSum, {.tag = "slow"});
    const Work next = world().all_reduce(zeros({4}), ReduceOp::kSum, {.tag = "slow"});
    clock->now += 2;  // compute
    work.wait();
    EXPECT_EQ(clock->now, 8);
    next.wait();
    EXPECT_EQ(clock->now, 13);  // one after the other
    const auto records = world().trace().records();
    EXPECT_EQ(records[0].queued, rank == 0 ? 1 : 3);
    EXPECT_EQ(records[0].done, 8);
    // Rank 1: 15 s of transfers, of which it waited 3 + 5.
    use_clock(nullptr);
    if (rank == 0) return;
    EXPECT_NEAR(hidden_share(records, Channel::kUser), 1 - 8.0 / 15, 1e-12);
  };
  compared_ranks(2, body, {.decorate = with_faults()});
}

TEST(Injected, ASkippedWaitIsSeen) {
  std::promise<void> looked;
  const auto body = [&](int rank) {
    if (rank == 1) looked.get_future().wait_for(std::chrono::minutes(1));
    const Tensor x = full({4}, 1.0);
    faults().skip_wait = rank == 0;
    world().all_reduce(x).wait();  // on rank 0 before the other has come
    faults().skip_wait = false;
    EXPECT_EQ(x.to_vector()[0], rank == 0 ? 1 : 2);
    if (rank == 0) looked.set_value();
  };
  compared_ranks(2, body, {.decorate = with_faults()});
}

}  // namespace
}  // namespace tessera::distributed::test_collective_failures
