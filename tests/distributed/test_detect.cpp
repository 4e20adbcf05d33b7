// The environments that launchers leave, as recorded from them, and what detect() makes of them.
#include <gtest/gtest.h>

#include <tessera/distributed/rendezvous/detect.h>

#include "message_of.h"

namespace tessera::distributed::test_detect {
namespace {

using namespace std::chrono_literals;

// mpirun (Open MPI 4.1.4) -n 2 on one machine, rank 1.
const Environment kOpenMpi = {
    {"HOME", "/root"},
    {"OMPI_APP_CTX_NUM_PROCS", "2"},
    {"OMPI_COMMAND", "train"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
    {"OMPI_COMM_WORLD_NODE_RANK", "1"},
    {"OMPI_COMM_WORLD_RANK", "1"},
    {"OMPI_COMM_WORLD_SIZE", "2"},
    {"OMPI_MCA_ess_base_vpid", "1"},
    {"OMPI_UNIVERSE_SIZE", "2"},
    {"PMIX_HOSTNAME", "vm"},
    {"PMIX_NAMESPACE", "2107703297"},
    {"PMIX_RANK", "1"},
    {"PMIX_VERSION", "4.2.2rc2"},
};

// srun --mpi=pmix -N 2 -n 5 --cpus-per-task=4, rank 3: the first of the second node.
const Environment kSlurm = {
    {"PMIX_NAMESPACE", "slurm.pmix.71.0"},
    {"PMIX_RANK", "3"},
    {"SLURM_CPUS_PER_TASK", "4"},
    {"SLURM_JOB_ID", "71"},
    {"SLURM_LOCALID", "0"},
    {"SLURM_NNODES", "2"},
    {"SLURM_NODEID", "1"},
    {"SLURM_NPROCS", "5"},
    {"SLURM_NTASKS", "5"},
    {"SLURM_PROCID", "3"},
    {"SLURM_STEP_ID", "0"},
    {"SLURM_STEP_NODELIST", "node[1-2]"},
    {"SLURM_STEP_NUM_NODES", "2"},
    {"SLURM_STEP_NUM_TASKS", "5"},
    {"SLURM_STEP_TASKS_PER_NODE", "3,2"},
    {"SLURM_TASKS_PER_NODE", "3,2"},
};

// torchrun --nnodes 2 --nproc-per-node 4, global rank 5.
const Environment kTorchrun = {
    {"GROUP_RANK", "1"},
    {"GROUP_WORLD_SIZE", "2"},
    {"LOCAL_RANK", "1"},
    {"LOCAL_WORLD_SIZE", "4"},
    {"MASTER_ADDR", "node1"},
    {"MASTER_PORT", "29500"},
    {"OMP_NUM_THREADS", "1"},
    {"RANK", "5"},
    {"ROLE_RANK", "5"},
    {"ROLE_WORLD_SIZE", "8"},
    {"TORCHELASTIC_MAX_RESTARTS", "3"},
    {"TORCHELASTIC_RESTART_COUNT", "2"},
    {"TORCHELASTIC_RUN_ID", "none"},
    {"WORLD_SIZE", "8"},
};

Environment with(Environment environment, const Environment& changes) {
  for (const auto& [name, value] : changes) environment[name] = value;
  return environment;
}

Environment without(Environment environment, const std::string& name) {
  EXPECT_EQ(environment.erase(name), 1u) << name;
  return environment;
}

// The message of the ConfigError that detect() throws.
std::string refusal(const Environment& environment) {
  try {
    detect(environment, {8, 8});
  } catch (const ConfigError& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

TEST(Detect, NoLauncherIsOneProcessWithAllCores) {
  const LaunchInfo info = detect(Environment{{"HOME", "/root"}}, {8, 8});
  EXPECT_EQ(info.launcher, Launcher::kSingle);
  EXPECT_EQ(info.rank, 0);
  EXPECT_EQ(info.world_size, 1);
  EXPECT_EQ(info.threads, 8);
  EXPECT_FALSE(info.under_tessera);
  EXPECT_FALSE(info.store.has_value());
}

TEST(Detect, MpirunGivesRanksAndSharesTheCores) {
  const LaunchInfo info = detect(kOpenMpi, {8, 8});
  EXPECT_EQ(info.launcher, Launcher::kMpi);
  EXPECT_EQ(info.rank, 1);
  EXPECT_EQ(info.world_size, 2);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.local_world_size, 2);
  EXPECT_EQ(info.nodes, 1);
  EXPECT_EQ(info.threads, 4);
}

TEST(Detect, OnSeveralNodesMpirunDoesNotSayWhich) {
  const LaunchInfo info = detect(
      with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}), {8, 8});
  EXPECT_EQ(info.nodes, 0);
}

TEST(Detect, ARankThatMpirunBoundUsesItsOwnCores) {
  const Environment bound = with(kOpenMpi, {{"OMPI_MCA_orte_bound_at_launch", "1"}});
  EXPECT_EQ(detect(bound, {1, 8}).threads, 1);      // to a core
  EXPECT_EQ(detect(bound, {4, 8}).threads, 4);      // to a socket each
  EXPECT_EQ(detect(bound, {8, 8}).threads, 4);      // both to the only socket
  EXPECT_EQ(detect(kOpenMpi, {4, 64}).threads, 2);  // a container with 4 of 64 cores
}

TEST(Detect, MoreRanksThanCoresHaveAThreadEach) { EXPECT_EQ(detect(kOpenMpi, {1, 1}).threads, 1); }

TEST(Detect, AnSrunStepGivesNodesAndCpus) {
  const LaunchInfo info = detect(kSlurm, {4, 16});
  EXPECT_EQ(info.launcher, Launcher::kSlurm);
  EXPECT_EQ(info.rank, 3);
  EXPECT_EQ(info.world_size, 5);
  EXPECT_EQ(info.local_rank, 0);
  EXPECT_EQ(info.local_world_size, 2);
  EXPECT_EQ(info.node, 1);
  EXPECT_EQ(info.nodes, 2);
  EXPECT_EQ(info.threads, 4);
}

TEST(Detect, RepeatedTaskCountsOfSlurmAreRead) {
  const auto on_node = [&](const std::string& tasks, const std::string& node) {
    return detect(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", tasks},
                                {"SLURM_NODEID", node},
                                {"SLURM_STEP_NUM_NODES", "4"}}),
                  {8, 8})
        .local_world_size;
  };
  EXPECT_EQ(on_node("2(x3),1", "0"), 2);
  EXPECT_EQ(on_node("2(x3),1", "2"), 2);
  EXPECT_EQ(on_node("2(x3),1", "3"), 1);
  EXPECT_THROW(on_node("2(x2)", "3"), ConfigError);
  EXPECT_THROW(on_node("2(x", "1"), ConfigError);
  EXPECT_THROW(on_node("two", "0"), ConfigError);
}

TEST(Detect, AnSrunStepWithoutPmiIsRefusedBecauseEachTaskWouldBeAlone) {
  Environment environment = without(kSlurm, "PMIX_RANK");
  EXPECT_TRUE(mentions(refusal(environment), "--mpi=pmix"));
  environment["SLURM_STEP_NUM_TASKS"] = "1";  // a shell in an allocation
  EXPECT_EQ(detect(environment, {8, 8}).launcher, Launcher::kSingle);
}

TEST(Detect, ABatchScriptOfSlurmIsOneProcess) {
  const LaunchInfo info = detect(
      Environment{{"SLURM_JOB_ID", "71"}, {"SLURM_NTASKS", "64"}, {"SLURM_PROCID", "0"}}, {8, 8});
  EXPECT_EQ(info.launcher, Launcher::kSingle);
}

TEST(Detect, MpirunInsideAnSrunStepIsMpirun) {
  Environment both = kSlurm;
  both.erase("PMIX_RANK");
  const LaunchInfo info = detect(with(both, kOpenMpi), {8, 8});
  EXPECT_EQ(info.launcher, Launcher::kMpi);
  EXPECT_EQ(info.rank, 1);
}

TEST(Detect, TorchrunNeedsItsFullSet) {
  const LaunchInfo info = detect(kTorchrun, {8, 8});
  EXPECT_EQ(info.launcher, Launcher::kTorchrun);
  EXPECT_EQ(info.rank, 5);
  EXPECT_EQ(info.world_size, 8);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.node, 1);
  EXPECT_EQ(info.nodes, 2);
  EXPECT_EQ(info.restart_count, 2);
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    EXPECT_EQ(detect(without(kTorchrun, name), {8, 8}).launcher, Launcher::kSingle) << name;
  }
}

TEST(Detect, SourcesOfOneLevelThatDisagreeAreShownTogether) {
  const std::string message = refusal(with(kOpenMpi, {{"PMIX_RANK", "0"}}));
  EXPECT_TRUE(mentions(message, "OMPI_COMM_WORLD_RANK=1")) << message;
  EXPECT_TRUE(mentions(message, "PMIX_RANK=0")) << message;
  EXPECT_TRUE(mentions(refusal(with(kSlurm, {{"PMIX_RANK", "2"}})), "SLURM_PROCID=3"));
  EXPECT_TRUE(mentions(refusal(with(kSlurm, {{"PMI_RANK", "2"}})), "PMI_RANK=2"));
  EXPECT_TRUE(mentions(refusal(with(kOpenMpi, {{"TESSERA_RANK", "0"}})), "TESSERA_RANK=0"));
  EXPECT_TRUE(
      mentions(refusal(with(kOpenMpi, {{"TESSERA_WORLD_SIZE", "3"}})), "TESSERA_WORLD_SIZE=3"));
}

TEST(Detect, ASetWithAHoleNamesWhatIsMissing) {
  for (const char* name :
       {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
    EXPECT_TRUE(mentions(refusal(without(kOpenMpi, name)), name));
  }
  for (const char* name : {"SLURM_LOCALID", "SLURM_NODEID"}) {
    EXPECT_TRUE(mentions(refusal(without(kSlurm, name)), name));
  }
}

TEST(Detect, NumbersThatAreNoneAndRanksOutsideTheirWorldAreRefused) {
  for (const char* text : {"-1", "1x", "0x1", "99999999999", " 1"}) {
    EXPECT_TRUE(mentions(
        refusal(with(without(kOpenMpi, "PMIX_RANK"), {{"OMPI_COMM_WORLD_RANK", text}})), text));
  }
  const Environment no_pmix = without(kOpenMpi, "PMIX_RANK");
  EXPECT_TRUE(mentions(refusal(with(no_pmix, {{"OMPI_COMM_WORLD_RANK", "2"}})), "rank 2"));
  EXPECT_TRUE(mentions(refusal(with(no_pmix, {{"OMPI_COMM_WORLD_SIZE", "0"}})), "SIZE"));
  EXPECT_TRUE(mentions(refusal(with(no_pmix, {{"OMPI_COMM_WORLD_LOCAL_RANK", "2"}})), "local"));
  EXPECT_TRUE(mentions(refusal(with(no_pmix, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "3"}})), "local"));
  EXPECT_TRUE(mentions(refusal(with(kSlurm, {{"SLURM_NODEID", "2"}})), "node"));
  EXPECT_TRUE(mentions(refusal(with(kTorchrun, {{"RANK", "8"}})), "8"));
}

TEST(Detect, TesseraLaunchAddsStoreTimeoutsNodesAndThreads) {
  const LaunchInfo info = detect(with(kOpenMpi, {{"TESSERA_STORE", "10.0.0.7:4711"},
                                                 {"TESSERA_STORE_TOKEN", "c0ffee"},
                                                 {"TESSERA_RANK", "1"},
                                                 {"TESSERA_WORLD_SIZE", "2"},
                                                 {"TESSERA_LOCAL_RANK", "0"},
                                                 {"TESSERA_LOCAL_WORLD_SIZE", "1"},
                                                 {"TESSERA_NODE", "1"},
                                                 {"TESSERA_NODES", "2"},
                                                 {"TESSERA_NODE_OF_RANK", "0,1"},
                                                 {"TESSERA_RESTART_COUNT", "3"},
                                                 {"TESSERA_NUM_THREADS", "5"},
                                                 {"TESSERA_COLLECTIVE_TIMEOUT", "2.5"},
                                                 {"TESSERA_FIRST_STEP_TIMEOUT", "900"},
                                                 {"TESSERA_SAVE_TIMEOUT", "60"},
                                                 {"TESSERA_GRACE", "30"},
                                                 {"TESSERA_WAIT_WARNING", "0.25"},
                                                 {"TESSERA_TRANSPORT", "mpi"}}),
                                 {8, 8});
  EXPECT_TRUE(info.under_tessera);
  ASSERT_TRUE(info.store.has_value());
  EXPECT_EQ(info.store->host, "10.0.0.7");
  EXPECT_EQ(info.store->port, 4711);
  EXPECT_EQ(info.store->token, "c0ffee");
  EXPECT_EQ(info.local_rank, 0);
  EXPECT_EQ(info.local_world_size, 1);
  EXPECT_EQ(info.node, 1);
  EXPECT_EQ(info.nodes, 2);
  EXPECT_EQ(info.node_groups, "0,1");
  EXPECT_EQ(info.restart_count, 3);
  EXPECT_EQ(info.threads, 5);
  EXPECT_EQ(info.collective_timeout, 2500ms);
  EXPECT_EQ(info.first_step_timeout, 900s);
  EXPECT_EQ(info.save_timeout, 60s);
  EXPECT_EQ(info.grace, 30s);
  EXPECT_EQ(info.wait_warning, 250ms);
  EXPECT_EQ(info.transport, "mpi");
}

TEST(Detect, SettingsThatCannotBeReadAreRefusedByName) {
  for (const Environment& bad :
       {Environment{{"TESSERA_STORE", "nowhere"}}, Environment{{"TESSERA_STORE", "host:port"}},
        Environment{{"TESSERA_COLLECTIVE_TIMEOUT", "soon"}},
        Environment{{"TESSERA_COLLECTIVE_TIMEOUT", "0"}}, Environment{{"TESSERA_GRACE", "-3"}},
        Environment{{"TESSERA_WAIT_WARNING", "nan"}}, Environment{{"TESSERA_WAIT_WARNING", "x"}},
        Environment{{"TESSERA_NUM_THREADS", "0"}},
        Environment{{"TESSERA_RESTART_COUNT", "many"}}}) {
    EXPECT_TRUE(mentions(refusal(with(kOpenMpi, bad)), bad.begin()->first))
        << bad.begin()->first << "=" << bad.begin()->second;
  }
}

TEST(Detect, ARankThatLostItsLaunchersVariablesIsNoSingleProcess) {
  EXPECT_TRUE(mentions(
      refusal(Environment{{"TESSERA_STORE", "host:1"}, {"TESSERA_WORLD_SIZE", "2"}}), "cleared"));
}

TEST(Detect, ThisProcessHasCores) {
  const Cores cores = available_cores();
  EXPECT_GE(cores.allowed, 1);
  EXPECT_LE(cores.allowed, cores.node);
  EXPECT_GT(process_environment().size(), 0u);
}

}  // namespace
}  // namespace tessera::distributed::test_detect
