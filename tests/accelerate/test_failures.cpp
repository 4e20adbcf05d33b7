// AC-E1: one rank is killed, exits, throws or hangs in each phase of a training program; the others
// raise DistributedError that names it, in time, and the job's code is the first cause's. Processes
// under `tessera launch`; at the end the same under bare mpirun.
//
// Prints a table of what was measured, which docs/launching.md shows.
//
// ctest shards: 5
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "finished_process.h"

namespace tessera::test_failures {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr double kSlower = 4;
#else
constexpr double kSlower = 1;
#endif
// Seconds. Only a hung rank is found by a timeout, which exceeds what a busy machine may hold up
// the others; all else is noticed, on an idle machine within 2 s, and long before a timeout.
constexpr double kTimeoutOfHung = 3 * kSlower, kInitTimeoutOfHung = 4 * kSlower;
constexpr double kTimeout = 120;
constexpr double kNotice = 30;  // until every other rank has raised
// Of two ranks that a hung one holds up the second hears of the first's timeout within it.
constexpr double kGrace = 2 * kSlower;

struct Case {
  const char* phase;
  const char* action;
  int code;
  int ranks = 2;
};

std::ostream& operator<<(std::ostream& out, const Case& fault) {
  return out << fault.action << " in phase " << fault.phase << " of " << fault.ranks << " ranks";
}

// A rank's "raised TIME MESSAGE".
struct Raised {
  double time = 0;
  std::string message;
};

std::vector<Raised> raised_lines(const std::string& output) {
  std::vector<Raised> result;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find("raised ");
    if (at == std::string::npos) continue;
    std::istringstream words(line.substr(at + 7));
    Raised raised;
    words >> raised.time;
    std::getline(words >> std::ws, raised.message);
    result.push_back(raised);
  }
  return result;
}

class Failure : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { SKIP_WITHOUT_MPI(); }
  TestFolder folder_;
};

TEST_P(Failure, ACE1EveryOtherRankRaisesInTimeAndTheCodeIsTheFirstCauses) {
  const Case fault = GetParam();
  const bool hangs = fault.action == std::string("hang") || fault.action == std::string("stop");
  const std::string mark = folder_.path("mark");
  const double collective_timeout = hangs ? kTimeoutOfHung : kTimeout;
  const double init_timeout = hangs ? kInitTimeoutOfHung : kTimeout;
  std::vector<std::string> command = {TESSERA_COMMAND,
                                      "launch",
                                      "-n",
                                      std::to_string(fault.ranks),
                                      "--threads",
                                      "1",
                                      "--collective-timeout",
                                      std::to_string(collective_timeout),
                                      "--init-timeout",
                                      std::to_string(init_timeout),
                                      "--grace",
                                      std::to_string(kGrace),
                                      "--dump-dir",
                                      folder_.path(".")};
  for (const char* word : {TESSERA_RANK_PROGRAM, "--rank", "1", "--phase", fault.phase, "--action",
                           fault.action, "--mark", mark.c_str()}) {
    command.push_back(word);
  }
  const FinishedProcess job = run_process(command);
  EXPECT_EQ(job.code(), fault.code) << job;

  const std::vector<Raised> raised = raised_lines(job.output);
  // A rank that throws is heard of as a DistributedError by the others alone.
  ASSERT_EQ(raised.size(), static_cast<size_t>(fault.ranks - 1)) << job;
  const double failed_at = std::stod("0" + folder_.read("mark"));
  ASSERT_GT(failed_at, 0) << job;
  double last = 0;
  const bool staged = fault.phase == std::string("pipeline");
  for (const Raised& rank : raised) {
    // Every rank says where in its schedule it is.
    if (staged) {
      EXPECT_NE(rank.message.find("pipeline, rank "), std::string::npos) << job;
    }
    last = std::max(last, rank.time - failed_at);
    // One that stops inside MPI's own start cannot be told from those that wait for it there.
    if (fault.phase != std::string("init") || !hangs) {
      EXPECT_NE(rank.message.find("rank 1"), std::string::npos) << job;
    }
  }
  const bool starting =
      fault.phase == std::string("init") || fault.phase == std::string("before-init");
  const double timeout = !hangs ? 0 : starting ? init_timeout : collective_timeout;
  EXPECT_LT(last, kNotice + timeout) << job;
  EXPECT_FALSE(job.printed("done")) << job;
  for (int rank = 0; rank < fault.ranks; ++rank) {
    if (rank == 1) continue;
    EXPECT_TRUE(job.printed("[" + std::to_string(rank) + "] cleaned up")) << job;
  }
  EXPECT_TRUE(job.complained(hangs ? "first cause: rank" : "first cause: rank 1")) << job;
  if (!starting) {
    for (int rank = 0; rank < fault.ranks; ++rank) {
      if (rank == 1) continue;
      const std::string dump = folder_.read("comm-rank-" + std::to_string(rank) + ".json");
      const char* const call = staged ? "all_gather" : "all_reduce";  // that a step ends with
      EXPECT_NE(dump.find(call), std::string::npos) << "rank " << rank << ": " << dump;
    }
  }
  if (hangs) {
    EXPECT_TRUE(job.complained("rank 1 killed: still running")) << job;
  }
  std::printf("| %s | %s | %d | %.2f | %d | %s |\n", fault.phase, fault.action, fault.ranks, last,
              job.code(), raised.front().message.c_str());
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const char* phase : {"before-init", "between", "backward", "save", "shutdown"}) {
    cases.push_back({phase, "kill", 137});
    cases.push_back({phase, "exit", 3});
    cases.push_back({phase, "throw", 1});
    cases.push_back({phase, "hang", 1});
  }
  // Where the main thread waits inside the library, another one fails: an exception cannot pass.
  for (const char* phase : {"init", "collective"}) {
    cases.push_back({phase, "kill", 137});
    cases.push_back({phase, "exit", 3});
    cases.push_back({phase, "stop", 1});
  }
  for (const int ranks : {2, 4}) {
    cases.push_back({"pipeline", "kill", 137, ranks});
    cases.push_back({"pipeline", "throw", 1, ranks});
    cases.push_back({"pipeline", "hang", 1, ranks});
  }
  cases.push_back({"backward", "kill", 137, 4});
  cases.push_back({"between", "throw", 1, 4});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Phases, Failure, ::testing::ValuesIn(all_cases()), [](const auto& info) {
  std::string name = std::string(info.param.phase) + "_" + info.param.action + "_" +
                     std::to_string(info.param.ranks);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

class Launched : public Failure {};

TEST_P(Launched, AProgramWithoutFaultsEndsWell) {
  const FinishedProcess job =
      run_process({TESSERA_COMMAND, "launch", "-n", std::to_string(GetParam().ranks), "--threads",
                   "1", TESSERA_RANK_PROGRAM},
                  {{"TESSERA_COMPARE_TRACES", "1"}});
  EXPECT_EQ(job.code(), 0) << job;
  for (int rank = 0; rank < GetParam().ranks; ++rank) {
    EXPECT_TRUE(job.printed("[" + std::to_string(rank) + "] done")) << job;
  }
  EXPECT_EQ(job.error, "");
}
INSTANTIATE_TEST_SUITE_P(Ranks, Launched,
                         ::testing::Values(Case{"none", "none", 0, 2}, Case{"none", "none", 0, 4}),
                         [](const auto& info) { return "Of" + std::to_string(info.param.ranks); });

FinishedProcess launch_faulty(std::vector<std::string> flags, const char* phase,
                              const char* action) {
  std::vector<std::string> command = {TESSERA_COMMAND, "launch", "-n",      "2",
                                      "--threads",     "1",      "--grace", "1"};
  command.insert(command.end(), flags.begin(), flags.end());
  for (const char* word :
       {TESSERA_RANK_PROGRAM, "--rank", "1", "--phase", phase, "--action", action}) {
    command.push_back(word);
  }
  return run_process(command);
}

size_t times_in(const std::string& text, const std::string& part) {
  size_t times = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++times;
  return times;
}

// By the rank that has it and as the first cause; the other ranks name the rank alone.
TEST(Reports, AnErrorIsToldTwiceAndMpisOwnLinesNever) {
  SKIP_WITHOUT_MPI();
  const FinishedProcess thrown = launch_faulty({}, "between", "throw");
  EXPECT_EQ(times_in(thrown.error, "told to throw"), 2U) << thrown;
  EXPECT_TRUE(thrown.complained("rank 1 failed")) << thrown;
  const FinishedProcess killed = launch_faulty({}, "between", "kill");
  EXPECT_EQ(times_in(killed.error, "was killed by signal 9"), 2U) << killed;
  for (const FinishedProcess* job : {&thrown, &killed}) {
    EXPECT_FALSE(job->complained("PMIX ERROR")) << *job;
  }
}

// Long before its timeout, with the last call of every rank.
TEST(Reports, ARankThatWaitsIsToldWithThePositionsOfAll) {
  SKIP_WITHOUT_MPI();
  const FinishedProcess job =
      launch_faulty({"--wait-warning", "0.5", "--collective-timeout", "4"}, "between", "hang");
  EXPECT_TRUE(job.complained("warning: rank 0 waits for other ranks for")) << job;
  EXPECT_TRUE(job.complained("s in all_reduce #2 (sum, f32[1]) of 'world' (rank_program.cpp:"))
      << job;
  EXPECT_TRUE(job.complained("rank 1: ")) << job;
  EXPECT_TRUE(job.complained("user barrier #1")) << job;  // where rank 1 is
  EXPECT_EQ(times_in(job.error, "warning:"), 1U) << job;
}

// Without the launcher the rank says it, one for all.
TEST(Reports, UnderBareMpirunARankThatWaitsSaysItWithThePositionsOfAll) {
  SKIP_WITHOUT_MPI();
  const FinishedProcess job =
      run_process({"mpirun", "-n", "3", "--oversubscribe", "--bind-to", "none",
                   TESSERA_RANK_PROGRAM, "--rank", "1", "--phase", "between", "--action", "hang"},
                  {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                   {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                   {"TESSERA_WAIT_WARNING", "1"},
                   {"TESSERA_COLLECTIVE_TIMEOUT", "5"}});
  EXPECT_TRUE(job.complained("s in all_reduce #2 (sum, f32[1]) of 'world' (rank_program.cpp:"))
      << job;
  for (const char* rank : {"rank 0: ", "rank 2: "}) {
    EXPECT_TRUE(job.complained("tessera:   " + std::string(rank)) &&
                job.complained("user all_reduce #2"))
        << job;
  }
  EXPECT_TRUE(job.complained("tessera:   rank 1: ") && job.complained("user barrier #1")) << job;
  EXPECT_EQ(times_in(job.error, "waits for other ranks for"), 1U) << job;
}

TEST(Reports, TheJobsTimeoutSaysWhereRanksWere) {
  SKIP_WITHOUT_MPI();
  const FinishedProcess job = launch_faulty({"--job-timeout", "6"}, "between", "hang");
  EXPECT_EQ(job.code(), 124) << job;
  EXPECT_TRUE(job.complained("rank 0: ") && job.complained("user all_reduce #2")) << job;
  EXPECT_TRUE(job.complained("rank 1: ") && job.complained("user barrier #1")) << job;
}

// Of two ranks one is told another size of the world.
TEST(WrongWorld, TheRankThatSeesItRaisesAndTheOthersAreInformed) {
  SKIP_WITHOUT_MPI();
  const FinishedProcess job = run_process(
      {TESSERA_COMMAND, "launch", "-n", "2", "--threads", "1", "--grace", "1", "sh", "-c",
       "if [ $TESSERA_RANK = 1 ]; then export TESSERA_WORLD_SIZE=3; fi; exec " +
           std::string(TESSERA_RANK_PROGRAM)});
  EXPECT_EQ(job.code(), 1) << job;
  EXPECT_TRUE(job.complained("TESSERA_WORLD_SIZE")) << job;
  const std::vector<Raised> raised = raised_lines(job.output);
  ASSERT_EQ(raised.size(), 1u) << job;
  EXPECT_NE(raised[0].message.find("rank 1"), std::string::npos) << job;
}

TEST(CompareTraces, RanksThatCalledDifferentThingsRaiseAtTheEndWhereAsked) {
  SKIP_WITHOUT_MPI();
  const std::vector<std::string> command = {
      TESSERA_COMMAND, "launch", "-n",      "2",       "--threads", "1",    TESSERA_RANK_PROGRAM,
      "--rank",        "1",      "--phase", "between", "--action",  "claim"};
  EXPECT_EQ(run_process(command).code(), 0);
  const FinishedProcess job = run_process(command, {{"TESSERA_COMPARE_TRACES", "1"}});
  EXPECT_EQ(job.code(), 1) << job;
  for (const char* rank : {"[0] raised", "[1] raised"}) EXPECT_TRUE(job.printed(rank)) << job;
  EXPECT_TRUE(job.printed("check_equal_traces: on 'world user' rank 0 called all_reduce #2"))
      << job;
}

// AC-E3 with a program that trains: the restarted job, of another size, goes on from the step that
// rank 0 saved last.
TEST(Restart, ACE3ATrainingGoesOnFromItsCheckpointWithAnotherNumberOfRanks) {
  SKIP_WITHOUT_MPI();
  TestFolder folder;
  const FinishedProcess job = run_process({TESSERA_COMMAND,
                                           "launch",
                                           "-n",
                                           "2",
                                           "--threads",
                                           "1",
                                           "--restarts",
                                           "2",
                                           "--restart-ranks",
                                           "3,1",
                                           "--grace",
                                           "2",
                                           TESSERA_RANK_PROGRAM,
                                           "--checkpoint",
                                           folder.path("model.safetensors"),
                                           "--rank",
                                           "0",
                                           "--phase",
                                           "between",
                                           "--action",
                                           "kill",
                                           "--restarts-with-fault",
                                           "1"});
  EXPECT_EQ(job.code(), 0) << job;
  EXPECT_TRUE(job.complained("starting again with 3 ranks")) << job;
  EXPECT_TRUE(job.complained("starting again with 1 ranks")) << job;
  for (const char* start :
       {"steps from 0 of 2 ranks", "steps from 2 of 3 ranks", "steps from 2 of 1 ranks", "done"}) {
    EXPECT_TRUE(job.printed(start)) << job;
  }
}

// Without the launcher there is no promise of who hears what, but none hangs and none says all was
// well.
class BareMpirun : public Failure {};

TEST_P(BareMpirun, NothingHangsAndTheCodeIsNotZero) {
  const launch::Environment root = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                    {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                    {"TESSERA_COLLECTIVE_TIMEOUT", "1.5"}};
  const FinishedProcess job =
      run_process({"mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none",
                   TESSERA_RANK_PROGRAM, "--rank", std::to_string(GetParam().ranks), "--phase",
                   GetParam().phase, "--action", GetParam().action},
                  root);
  EXPECT_NE(job.code(), 0) << job;
  EXPECT_FALSE(job.printed("done")) << job;
}
// `ranks` is the failing rank here: 0 hosts the store.
INSTANTIATE_TEST_SUITE_P(
    Ranks, BareMpirun,
    ::testing::Values(Case{"between", "kill", 0, 0}, Case{"between", "kill", 0, 1},
                      Case{"collective", "exit", 0, 1}, Case{"backward", "throw", 0, 1},
                      Case{"backward", "throw", 0, 0}, Case{"between", "exit", 0, 0}),
    [](const auto& info) {
      return std::string(info.param.phase) + "_" + info.param.action + "_of_rank_" +
             std::to_string(info.param.ranks);
    });

}  // namespace
}  // namespace tessera::test_failures
