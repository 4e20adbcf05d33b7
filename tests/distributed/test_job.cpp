// A rank's tie to its job: who hears of which failure. Ranks are Job objects of one process here.
// ctest labels: threads
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <optional>

#include <tessera/distributed/rendezvous/job.h>

namespace tessera::distributed::test_job {
namespace {

using namespace std::chrono_literals;

constexpr Milliseconds kLong = 20s;  // never reached by a test that passes

LaunchInfo rank_of(int rank, int world_size) {
  LaunchInfo info;
  info.launcher = Launcher::kMpi;
  info.rank = info.local_rank = rank;
  info.world_size = info.local_world_size = world_size;
  return info;
}

// A job whose store rank 0 hosts, as under bare mpirun.
std::vector<std::shared_ptr<Job>> make_job(int world_size) {
  std::vector<std::shared_ptr<Job>> ranks = {Job::host(rank_of(0, world_size))};
  for (int rank = 1; rank < world_size; ++rank) {
    ranks.push_back(Job::join(rank_of(rank, world_size), ranks[0]->address()));
  }
  return ranks;
}

// Leaving waits for the others, so all do it at once.
void leave_all(const std::vector<std::shared_ptr<Job>>& ranks) {
  std::vector<std::future<void>> leaving;
  for (const auto& job : ranks) {
    leaving.push_back(std::async(std::launch::async, [job] { job->leave(kLong); }));
  }
}

// The failure that a rank hears of, through its callback.
RankFailure next_failure(Job& job) {
  std::promise<RankFailure> promise;
  const int number =
      job.on_failure([&](const RankFailure& failure) { promise.set_value(failure); });
  auto future = promise.get_future();
  EXPECT_EQ(future.wait_for(kLong), std::future_status::ready);
  job.remove_callback(number);
  return future.get();
}

TEST(Job, AJobThatEndsWellReportsNothing) {
  const auto ranks = make_job(3);
  ranks[1]->store()->set("key", "value");
  EXPECT_EQ(ranks[2]->store()->wait("key", kLong), "value");
  leave_all(ranks);
  for (const auto& job : ranks) {
    EXPECT_EQ(job->failure(), nullptr);
    EXPECT_NO_THROW(job->check("step"));
  }
}

TEST(Job, AnErrorReachesEveryOtherRankWithItsWords) {
  const auto ranks = make_job(3);
  ranks[1]->publish(FailureKind::kError, "linear: inner dimensions differ");
  for (const int rank : {0, 2}) {
    const RankFailure failure = next_failure(*ranks[static_cast<size_t>(rank)]);
    EXPECT_EQ(failure.rank, 1);
    EXPECT_EQ(failure.kind, FailureKind::kError);
    EXPECT_NE(failure.describe().find("rank 1 on "), std::string::npos) << failure.describe();
    EXPECT_NE(failure.describe().find("inner dimensions differ"), std::string::npos);
    try {
      ranks[static_cast<size_t>(rank)]->check("all_reduce");
      FAIL();
    } catch (const DistributedError& error) {
      EXPECT_NE(std::string(error.what()).find("inner dimensions differ"), std::string::npos);
    }
  }
  EXPECT_EQ(ranks[1]->failure(), nullptr);  // its own is no news
  leave_all(ranks);
}

TEST(Job, ARankThatGoesWithoutLeavingIsLost) {
  auto ranks = make_job(2);
  // Its sockets close without a word, as the kernel does for a killed process.
  auto gone = TcpStore::connect(ranks[0]->address(), kLong);
  RankFailure will;
  will.rank = 1;
  will.kind = FailureKind::kLost;
  gone->leave_will("job/failure/1", will.to_text());
  gone.reset();
  EXPECT_EQ(next_failure(*ranks[0]).kind, FailureKind::kLost);
  leave_all(ranks);
}

TEST(Job, TheLossOfTheHostIsAFailureOfRankZero) {
  auto server = std::make_unique<TcpStoreServer>(StoreAddress{"127.0.0.1", 0, ""});
  const auto job = Job::join(rank_of(1, 2), {"127.0.0.1", server->port(), ""});
  server.reset();
  const RankFailure failure = next_failure(*job);
  EXPECT_EQ(failure.rank, 0);
  EXPECT_EQ(failure.kind, FailureKind::kLost);
}

TEST(Job, UnderTheLauncherItsLossIsTheLaunchers) {
  auto server = std::make_unique<TcpStoreServer>(StoreAddress{"127.0.0.1", 0, ""});
  LaunchInfo info = rank_of(1, 2);
  info.under_tessera = true;
  info.store = StoreAddress{"127.0.0.1", server->port(), ""};
  const auto job = Job::join(info);
  server.reset();
  EXPECT_EQ(next_failure(*job).rank, -1);
  EXPECT_NE(job->failure()->describe().find("the launcher is gone"), std::string::npos);
}

TEST(Job, WhatARankThrowsBecauseOfAnotherIsAConsequence) {
  const auto ranks = make_job(2);
  ranks[0]->publish(FailureKind::kError, "first");
  next_failure(*ranks[1]);
  ranks[1]->publish(FailureKind::kError, "all_reduce: rank 0 failed");
  const auto text = ranks[0]->store()->wait("job/failure/1", kLong);
  EXPECT_EQ(RankFailure::from_text(text).kind, FailureKind::kConsequence);
  leave_all(ranks);
}

TEST(Job, OnlyTheFirstErrorOfARankCounts) {
  const auto ranks = make_job(2);
  ranks[1]->publish(FailureKind::kError, "cause");
  ranks[1]->publish(FailureKind::kError, "its destructor's complaint");
  EXPECT_NE(next_failure(*ranks[0]).message.find("cause"), std::string::npos);
  leave_all(ranks);
}

TEST(Job, AnExceptionThatPassesTheJobIsPublished) {
  const auto host = Job::host(rank_of(0, 2));
  try {
    const auto job = Job::join(rank_of(1, 2), host->address());
    throw ValueError("optimizer: lr is negative");
  } catch (const ValueError&) {
  }
  EXPECT_EQ(next_failure(*host).rank, 1);
  host->leave(kLong);
}

TEST(Job, ACallbackThatComesLateIsCalledAtOnceAndARemovedOneNever) {
  const auto ranks = make_job(2);
  std::atomic<int> calls{0};
  ranks[0]->remove_callback(ranks[0]->on_failure([&](const RankFailure&) { calls += 100; }));
  ranks[1]->publish(FailureKind::kError, "x");
  next_failure(*ranks[0]);
  ranks[0]->on_failure([&](const RankFailure&) { ++calls; });
  EXPECT_EQ(calls, 1);
  leave_all(ranks);
}

TEST(Job, WithoutALauncherItSaysSo) { EXPECT_THROW(Job::join(rank_of(0, 2)), ConfigError); }

TEST(Job, FailuresTravelAsText) {
  for (const FailureKind kind :
       {FailureKind::kSignal, FailureKind::kError, FailureKind::kExit, FailureKind::kLost,
        FailureKind::kTimeout, FailureKind::kConsequence}) {
    RankFailure failure;
    failure.rank = 3;
    failure.kind = kind;
    failure.code = 137;
    failure.message = "quote \" newline \n byte \xff";
    failure.host = "node";
    const RankFailure copy = RankFailure::from_text(failure.to_text());
    EXPECT_EQ(copy.rank, 3);
    EXPECT_EQ(copy.kind, kind);
    EXPECT_EQ(copy.code, 137);
    EXPECT_EQ(copy.host, "node");
  }
  for (const char* numbers :
       {"\"rank\": -2, \"code\": 1", "\"rank\": 4294967296, \"code\": 1",
        "\"rank\": 18446744073709551615, \"code\": 1", "\"rank\": 1048577, \"code\": 1",
        "\"rank\": 0, \"code\": 256", "\"rank\": 0, \"code\": 1000"}) {
    EXPECT_THROW(RankFailure::from_text("{" + std::string(numbers) +
                                        ", \"kind\": \"exit\", \"message\": \"\", \"host\": \"\"}"),
                 DistributedError)
        << numbers;
  }
  EXPECT_THROW(RankFailure::from_text("{\"rank\": 0, \"kind\": \"tired\", \"code\": 0, "
                                      "\"message\": \"\", \"host\": \"\"}"),
               DistributedError);
}

}  // namespace
}  // namespace tessera::distributed::test_job
