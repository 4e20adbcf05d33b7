// `tessera launch` inside a real Slurm allocation, and programs that srun starts directly. Skipped,
// with the reason, where Slurm is missing, does not answer or cannot start MPI's ranks; test_launch
// has the command line that srun gets.
#include <gtest/gtest.h>

#include "finished_process.h"
#include "message_of.h"

namespace tessera::test_srun {
namespace {

// Why srun cannot start two ranks here; empty where it can.
std::string reason_to_skip() {
  if (!TESSERA_TEST_HAS_MPI) return "built without MPI";
  const launch::Environment environment = distributed::process_environment();
  if (launch::find_program("srun", environment).empty()) return "Slurm's srun is not installed";
  const FinishedProcess plugins = run_process({"srun", "--mpi=list"});
  if (!mentions(plugins.output + plugins.error, "pmix")) {
    return "this Slurm cannot start MPI's ranks, it has no PMIx: " + plugins.error;
  }
  if (environment.count("SLURM_JOB_ID") != 0) return "";
  const FinishedProcess granted = run_process(
      {"salloc", "--quiet", "--immediate=30", "--ntasks=2", "--time=5", "srun", "true"});
  return granted.code() == 0 ? "" : "Slurm grants no two tasks: " + granted.error;
}

class Srun : public ::testing::Test {
 protected:
  void SetUp() override {
    static const std::string reason = reason_to_skip();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }

  // Inside the allocation that the test runs in, or one of its own.
  FinishedProcess run(const std::vector<std::string>& command) {
    std::vector<std::string> all;
    if (distributed::process_environment().count("SLURM_JOB_ID") == 0) {
      all = {"salloc", "--quiet", "--ntasks=2", "--time=5"};
    }
    all.insert(all.end(), command.begin(), command.end());
    return run_process(all);
  }
};

TEST_F(Srun, TheLauncherStartsItsAgentsAndRanksTrainTogether) {
  const FinishedProcess job = run({"env", "TESSERA_COMPARE_TRACES=1", TESSERA_COMMAND, "launch",
                                   "-n", "2", "--threads", "1", TESSERA_RANK_PROGRAM});
  EXPECT_EQ(job.code(), 0) << job;
  for (const char* line :
       {"[0] steps from 0 of 2 ranks", "[1] steps from 0 of 2 ranks", "[0] done", "[1] done"}) {
    EXPECT_TRUE(job.printed(line)) << line << "\n" << job;
  }
  const FinishedProcess shown =
      run({TESSERA_COMMAND, "launch", "-n", "2", "--dry-run", TESSERA_RANK_PROGRAM});
  EXPECT_TRUE(shown.printed("srun --mpi=pmix --ntasks=2")) << shown;
}

TEST_F(Srun, AKilledRankIsTheFirstCauseAndTheOtherRaises) {
  const FinishedProcess job =
      run({TESSERA_COMMAND, "launch", "-n", "2", "--threads", "1", "--grace", "5",
           TESSERA_RANK_PROGRAM, "--rank", "1", "--phase", "between", "--action", "kill"});
  EXPECT_EQ(job.code(), 137) << job;
  EXPECT_TRUE(job.printed("[0] raised ")) << job;
  EXPECT_TRUE(job.printed("was killed by signal 9")) << job;
  EXPECT_TRUE(job.complained("first cause: rank 1 on ")) << job;
}

TEST_F(Srun, AProgramThatSrunStartsDirectlyFindsItsRanks) {
  const FinishedProcess job = run({"srun", "--mpi=pmix", "--ntasks=2", TESSERA_RANK_PROGRAM});
  EXPECT_EQ(job.code(), 0) << job;
  EXPECT_TRUE(job.printed("steps from 0 of 2 ranks")) << job;
  EXPECT_TRUE(job.printed("done")) << job;
}

}  // namespace
}  // namespace tessera::test_srun
