// The tessera command with real processes: codes, output, signals, restarts, host files. The ranks
// are shell scripts; test_failures has ranks that train.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "finished_process.h"
#include "message_of.h"

namespace tessera::test_launcher {
namespace {

const std::string kCommand = TESSERA_COMMAND;

FinishedProcess launch_script(
    const std::vector<std::string>& flags, const std::string& script,
    const launch::Environment& changes = {},
    const std::function<void(pid_t, const std::string&)>& meanwhile = {}) {
  std::vector<std::string> command = {kCommand, "launch"};
  command.insert(command.end(), flags.begin(), flags.end());
  command.insert(command.end(), {"sh", "-c", script});
  return run_process(command, changes, meanwhile);
}

std::set<std::string> lines_of(const std::string& text) {
  std::set<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.insert(line);
  return lines;
}

TEST(Launcher, RanksLearnWhoTheyAreAndTheirLinesSayIt) {
  SKIP_WITHOUT_MPI();
  const FinishedProcess job = launch_script(
      {"-n", "3", "--threads", "2"},
      "echo $TESSERA_RANK/$TESSERA_WORLD_SIZE $TESSERA_LOCAL_RANK/$TESSERA_LOCAL_WORLD_SIZE "
      "$TESSERA_NODE/$TESSERA_NODES $TESSERA_NODE_OF_RANK $TESSERA_NUM_THREADS "
      "$TESSERA_RESTART_COUNT; echo on stderr >&2; printf 'no end'");
  EXPECT_EQ(job.code(), 0) << job;
  std::set<std::string> expected;
  for (const std::string rank : {"0", "1", "2"}) {
    expected.insert("[" + rank + "] " + rank + "/3 " + rank + "/3 0/1 0,0,0 2 0");
    expected.insert("[" + rank + "] no end");
    EXPECT_TRUE(job.complained("[" + rank + "] on stderr")) << job;
  }
  EXPECT_EQ(lines_of(job.output), expected);
}

// Lines of each rank on both streams, some of which no pipe takes at once.
const std::string kManyLines =
    "awk 'BEGIN { for (i = 0; i < 9000; ++i) long = long \"x\"; for (i = 0; i < 3000; ++i) { "
    "print \"line \" i; if (i % 500 == 0) print long \" end\"; "
    "print \"error \" i > \"/dev/stderr\" } printf \"no end\" }'";

void expect_many_lines(const FinishedProcess& job, int ranks) {
  EXPECT_EQ(job.code(), 0);
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string prefix = "[" + std::to_string(rank) + "] ";
    std::istringstream output(job.output), errors(job.error);
    std::vector<std::string> lines;
    for (std::string line; std::getline(output, line);) {
      if (line.starts_with(prefix)) lines.push_back(line.substr(prefix.size()));
    }
    size_t at = 0;
    for (int i = 0; i < 3000; ++i) {
      ASSERT_LT(at, lines.size()) << prefix;
      ASSERT_EQ(lines[at++], "line " + std::to_string(i)) << prefix;
      if (i % 500 == 0) {
        ASSERT_LT(at, lines.size()) << prefix;
        ASSERT_EQ(lines[at++], std::string(9000, 'x') + " end") << prefix;
      }
    }
    ASSERT_EQ(at + 1, lines.size()) << prefix;
    EXPECT_EQ(lines[at], "no end") << prefix;
    int number = 0;
    for (std::string line; std::getline(errors, line);) {
      if (!line.starts_with(prefix)) continue;
      ASSERT_EQ(line, prefix + "error " + std::to_string(number++));
    }
    EXPECT_EQ(number, 3000);
  }
}

// Open MPI passes pieces of any length on, in which lines of several ranks stood.
TEST(Launcher, LinesOfRanksStayWholeHoweverFastAndLongTheyAre) {
  SKIP_WITHOUT_MPI();
  expect_many_lines(launch_script({"-n", "3"}, kManyLines), 3);
}

TEST(Launcher, AJobWhoseOutputNobodyReadsGoesOn) {
  SKIP_WITHOUT_MPI();
  TestFolder folder;
  const FinishedProcess job = run_process(
      {"sh", "-c",
       kCommand + " launch -n 2 sh -c 'for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.05; done; " +
           "touch " + folder.path("end") + "$TESSERA_RANK' | head -n 1"});
  EXPECT_TRUE(std::filesystem::exists(folder.path("end0"))) << job;
  EXPECT_TRUE(std::filesystem::exists(folder.path("end1"))) << job;
}

TEST(Launcher, RanksLearnTheirTimes) {
  const std::string script =
      "echo $TESSERA_COLLECTIVE_TIMEOUT/$TESSERA_FIRST_STEP_TIMEOUT/$TESSERA_SAVE_TIMEOUT";
  const FinishedProcess given = launch_script(
      {"--collective-timeout", "30", "--first-step-timeout", "90.5", "--save-timeout=120"}, script);
  EXPECT_EQ(given.output, "30/90.5/120\n") << given;
  const FinishedProcess silent = launch_script({}, script);
  EXPECT_EQ(silent.output, "600//\n") << silent;
}

TEST(Launcher, OneRankNeedsNoMpi) {
  const FinishedProcess job =
      launch_script({}, "echo rank $TESSERA_RANK; exit 4", {{"PATH", "/bin"}});
  EXPECT_EQ(job.code(), 4) << job;
  EXPECT_EQ(job.output, "rank 0\n");
}

TEST(Launcher, TheProgramsOwnOptionsAreItsOwn) {
  const FinishedProcess job = run_process(
      {kCommand, "launch", "--threads", "1", "echo", "--threads", "7", "-n", "9", "--help"});
  EXPECT_EQ(job.output, "--threads 7 -n 9 --help\n") << job;
  const FinishedProcess dashes = run_process({kCommand, "launch", "-n1", "--", "echo", "--", "x"});
  EXPECT_EQ(dashes.output, "-- x\n") << dashes;
}

TEST(Launcher, TheFirstCausesCodeIsReturned) {
  SKIP_WITHOUT_MPI();
  // Rank 0 goes on until the launcher ends it.
  const FinishedProcess killed =
      launch_script({"-n", "2", "--grace", "0.5"},
                    "if [ $TESSERA_RANK = 1 ]; then kill -9 $$; fi; sleep 600; exit 5");
  EXPECT_EQ(killed.code(), 137) << killed;
  EXPECT_TRUE(killed.complained("rank 1 on ")) << killed;
  EXPECT_TRUE(killed.complained("was killed by signal 9 (Killed)")) << killed;
  const FinishedProcess exited =
      launch_script({"-n", "2", "--grace", "0.5"},
                    "test $TESSERA_RANK = 0 || exit 3; trap 'exit 9' TERM; sleep 600");
  EXPECT_EQ(exited.code(), 3) << exited;
  EXPECT_TRUE(exited.complained("first cause: rank 1")) << exited;
}

TEST(Launcher, SurvivorsHaveTheGraceTimeAndAreKilledThen) {
  SKIP_WITHOUT_MPI();
  const FinishedProcess finished =
      launch_script({"-n", "2", "--grace", "20"},
                    "test $TESSERA_RANK = 0 || exit 3; sleep 0.4; echo saved; exit 0");
  EXPECT_TRUE(finished.printed("[0] saved")) << finished;
  EXPECT_EQ(finished.code(), 3);
  const FinishedProcess hung =
      launch_script({"-n", "2", "--grace", "0.2"}, "test $TESSERA_RANK = 0 || exit 3; sleep 600");
  EXPECT_EQ(hung.code(), 3) << hung;
  EXPECT_TRUE(hung.complained("rank 0 killed: still running 0.2 s")) << hung;
}

TEST(Launcher, AJobThatTakesTooLongIsKilledWithItsChildren) {
  SKIP_WITHOUT_MPI();
  TestFolder folder;
  const FinishedProcess job =
      launch_script({"-n", "2", "--job-timeout", "1"},
                    "sleep 600 & echo $! > " + folder.path("child") + "$TESSERA_RANK; wait");
  EXPECT_EQ(job.code(), 124) << job;
  for (const char* name : {"child0", "child1"}) {
    const std::string written = folder.read(name);
    if (written.empty()) continue;  // it was killed before it could start one
    const pid_t child = std::stoi(written);
    // A zombie that nobody reaped yet counts as gone.
    std::ifstream status("/proc/" + std::to_string(child) + "/stat");
    std::string text;
    std::getline(status, text);
    EXPECT_TRUE(text.empty() || text.find(") Z ") != std::string::npos) << text;
  }
}

TEST(Launcher, SignalsReachTheRanks) {
  SKIP_WITHOUT_MPI();
  const std::string script =
      "trap 'echo checkpoint' USR1; trap 'echo saved and stopped; exit 0' TERM; "
      "echo ready; while true; do sleep 0.02; done";
  bool saved = false;
  bool stopped = false;
  const FinishedProcess job =
      launch_script({"-n", "2"}, script, {}, [&](pid_t pid, const std::string& output) {
        const auto times = [&](const std::string& text) {
          int found = 0;
          for (size_t at = output.find(text); at != std::string::npos;
               at = output.find(text, at + 1)) {
            ++found;
          }
          return found;
        };
        if (!saved && times("ready") == 2) {
          saved = true;
          ::kill(pid, SIGUSR1);
        }
        if (!stopped && times("checkpoint") == 2) {
          stopped = true;
          ::kill(pid, SIGTERM);
        }
      });
  EXPECT_EQ(job.code(), 0) << job;
  EXPECT_EQ(lines_of(job.output),
            (std::set<std::string>{"[0] ready", "[1] ready", "[0] checkpoint", "[1] checkpoint",
                                   "[0] saved and stopped", "[1] saved and stopped"}));
}

// Whether the process whose number is in the file is gone; a zombie that nobody reaped counts.
bool is_gone(const std::string& number) {
  std::ifstream status("/proc/" + std::to_string(std::stoi(number)) + "/stat");
  std::string text;
  std::getline(status, text);
  return text.empty() || text.find(") Z ") != std::string::npos;
}

// The longest time that a test's ranks are given and do not take.
const char* const kHours = "9999";

TEST(Launcher, ASecondSignalKillsAtOnce) {
  SKIP_WITHOUT_MPI();
  for (const int signal : {SIGINT, SIGTERM}) {
    int sent = 0;
    const FinishedProcess job = launch_script(
        {"-n", "2", "--grace", kHours},
        "trap 'echo asked' INT TERM; echo ready; while true; do sleep 0.02; done", {},
        [&](pid_t pid, const std::string& output) {
          const size_t asked =
              lines_of(output).count("[0] asked") + lines_of(output).count("[1] asked");
          const size_t ready =
              lines_of(output).count("[0] ready") + lines_of(output).count("[1] ready");
          if ((sent == 0 && ready == 2) || (sent == 1 && asked == 2)) {
            ++sent;
            ::kill(pid, signal);
          }
        });
    EXPECT_EQ(sent, 2);
    EXPECT_EQ(job.code(), 128 + signal) << job;
    EXPECT_TRUE(job.complained("ended by the signal")) << job;
    EXPECT_FALSE(job.complained("first cause")) << "nobody is to blame\n" << job;
  }
}

// What ignores the signal until it is killed was asked to end all the same.
TEST(Launcher, WhatRunsAfterTheGraceOfASignalIsNoFirstCause) {
  SKIP_WITHOUT_MPI();
  bool sent = false;
  const FinishedProcess job = launch_script(
      {"-n", "2", "--grace", "0.2"}, "trap '' TERM; echo ready; while true; do sleep 0.02; done",
      {}, [&](pid_t pid, const std::string& output) {
        if (sent || lines_of(output).size() < 2) return;
        sent = true;
        ::kill(pid, SIGTERM);
      });
  EXPECT_EQ(job.code(), 143) << job;
  EXPECT_TRUE(job.complained("ended by the signal")) << job;
}

TEST(Launcher, CtrlCLeavesNoProcessAndNoFileBehind) {
  SKIP_WITHOUT_MPI();
  TestFolder folder, temporary;
  bool sent = false;
  // A background job of a shell ignores SIGINT: it outlives its rank.
  const FinishedProcess job =
      launch_script({"-n", "2", "--grace", kHours},
                    "sleep " + std::string(kHours) + " & echo $! > " + folder.path("child") +
                        "$TESSERA_RANK; echo ready; wait",
                    {{"TMPDIR", temporary.path("")}}, [&](pid_t pid, const std::string& output) {
                      if (sent || lines_of(output).size() < 2) return;
                      sent = true;
                      ::kill(pid, SIGINT);
                    });
  EXPECT_TRUE(sent);
  EXPECT_EQ(job.code(), 130) << job;
  EXPECT_TRUE(job.complained("ended by the signal")) << job;
  EXPECT_FALSE(job.complained("was killed by")) << job;
  for (const char* name : {"child0", "child1"}) EXPECT_TRUE(is_gone(folder.read(name))) << name;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(temporary.path(""))) {
    EXPECT_TRUE(entry.is_directory()) << entry.path();
  }
}

TEST(Launcher, AFailedRankTakesItsBackgroundProcessesAlong) {
  TestFolder folder;
  const FinishedProcess job = launch_script(
      {}, "sleep " + std::string(kHours) + " & echo $! > " + folder.path("child") + "; exit 3");
  EXPECT_EQ(job.code(), 3) << job;
  EXPECT_TRUE(is_gone(folder.read("child")));
}

// A script that starts a service and ends in `exec tessera launch` makes it a child of the
// launcher.
TEST(Launcher, WhatRanBesideItBeforeIsLeftAlone) {
  TestFolder folder;
  const std::string rest = "sleep " + std::string(kHours);
  const FinishedProcess job =
      run_process({"sh", "-c",
                   rest + " > /dev/null 2>&1 & echo $! > " + folder.path("service") + "; exec " +
                       kCommand + " launch --job-timeout 0.5 " + rest});
  EXPECT_EQ(job.code(), 124) << job;
  const std::string service = folder.read("service");
  EXPECT_FALSE(is_gone(service));
  ::kill(std::stoi(service), SIGKILL);
}

// What ranks share lies in a folder of the launcher's, which does not outlive a killed mpirun, nor
// for long a killed launcher.
TEST(Launcher, KilledJobsLeaveNoSharedMemoryBehind) {
  SKIP_WITHOUT_MPI();
  TestFolder folder;
  const std::string script = "echo $OMPI_MCA_btl_vader_backing_directory > " +
                             folder.path("place") + "$TESSERA_RANK.new; mv " +
                             folder.path("place") + "$TESSERA_RANK.new " + folder.path("place") +
                             "$TESSERA_RANK; cut -d' ' -f4 /proc/$PPID/stat > " +
                             folder.path("mpirun") +
                             "; touch $OMPI_MCA_btl_vader_backing_directory/segment; echo ready; " +
                             "exec sleep " + kHours;
  for (const std::string victim : {"mpirun", "launcher"}) {
    bool sent = false;
    const FinishedProcess job = launch_script(
        {"-n", "2", "--grace", "0.1"}, script, {}, [&](pid_t pid, const std::string& output) {
          if (sent || lines_of(output).size() < 2) return;
          sent = true;
          ::kill(victim == "mpirun" ? std::stoi(folder.read("mpirun")) : pid, SIGKILL);
        });
    EXPECT_NE(job.code(), 0) << job;
    std::string place = folder.read("place0");
    place.pop_back();
    EXPECT_TRUE(mentions(place, "tessera-segments-")) << place;
    EXPECT_EQ(std::filesystem::exists(place), victim == "launcher") << place;
    EXPECT_EQ(launch_script({"-n", "2"}, "true").code(), 0);
    EXPECT_FALSE(std::filesystem::exists(place)) << place;
  }
}

// The others would wait for it as long as for one that is slow to come.
TEST(Launcher, AnAgentThatIsKilledBeforeTheStartEndsIt) {
  TestFolder folder;
  folder.write("mpirun",
               "#!/bin/sh\nfor word; do case $word in */tessera) break;; esac; shift; done\n"
               "export OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 "
               "OMPI_COMM_WORLD_LOCAL_SIZE=2\n\"$@\" &\nsleep 1; kill -9 $!; exec sleep " +
                   std::string(kHours) + "\n",
               true);
  const FinishedProcess job =
      launch_script({"-n", "2", "--grace", kHours, "--start-timeout", kHours}, "true",
                    {{"PATH", folder.path("") + ":/usr/bin:/bin"}});
  EXPECT_EQ(job.code(), 1) << job;
  EXPECT_TRUE(job.complained("cannot start: the agent of rank 0 is gone")) << job;
}

// It has left no word in the store; the agents beside it see that it is gone, or never was there.
TEST(Launcher, AnAgentThatIsKilledBeforeItReachesTheStoreIsSeenByTheOthers) {
  const std::string begin =
      "#!/bin/sh\nfor word; do case $word in */tessera) break;; esac; shift; done\n"
      "export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2\n"
      "agent() { export OMPI_COMM_WORLD_RANK=$1 OMPI_COMM_WORLD_LOCAL_RANK=$1; }\n"
      "agent 0; \"$@\" &\n";
  const std::string hours(kHours);
  const struct {
    std::string other, message;
  } cases[] = {
      {"agent 1; sleep " + hours + " & sleep 1.5; kill -9 $!; wait $!\n",
       "cannot start: the agent of rank 1 is gone"},
      {"", "lacks an agent, which ended before it reported; not there: rank 1"},
  };
  for (const auto& c : cases) {
    TestFolder folder;
    folder.write("mpirun", begin + c.other + "wait\n", true);
    const FinishedProcess job =
        launch_script({"-n", "2", "--grace", kHours, "--start-timeout", kHours}, "true",
                      {{"PATH", folder.path("") + ":/usr/bin:/bin"}});
    EXPECT_EQ(job.code(), 1) << job;
    EXPECT_TRUE(job.complained(c.message)) << job;
  }
}

// What waits for its start is not to be waited for.
TEST(Launcher, CtrlCBeforeTheRanksHaveStartedEndsTheStart) {
  SKIP_WITHOUT_MPI();
  TestFolder folder, temporary;
  const std::string hosts = folder.write("hosts", "nodea slots=1\n");
  const std::string agent =
      folder.write("agent",
                   "#!/bin/sh\ncase \"$*\" in *true) exit 0;; esac\necho $$ > " +
                       folder.path("waits.new") + "; mv " + folder.path("waits.new") + " " +
                       folder.path("waits") + "; exec sleep " + kHours + "\n",
                   true);
  bool sent = false;
  const FinishedProcess job =
      run_process({kCommand, "launch", "--hostfile", hosts, "--remote-agent", agent, "--grace",
                   kHours, "--start-timeout", kHours, "true"},
                  {{"TMPDIR", temporary.path("")}}, [&](pid_t pid, const std::string&) {
                    if (sent || !std::filesystem::exists(folder.path("waits"))) return;
                    sent = true;
                    ::kill(pid, SIGINT);
                  });
  EXPECT_TRUE(sent);
  EXPECT_EQ(job.code(), 130) << job;
  EXPECT_TRUE(job.complained("the job does not start")) << job;
  EXPECT_TRUE(is_gone(folder.read("waits")));
  for (const auto& entry : std::filesystem::directory_iterator(temporary.path(""))) {
    EXPECT_EQ(entry.path().filename().string().find("tessera-hosts"), std::string::npos);
  }
}

TEST(Launcher, ARankHasItsGraceWhenTheLauncherIsKilled) {
  TestFolder folder;
  bool killed = false;
  launch_script({"--grace", kHours},
                "trap 'sleep 0.3; echo saved > " + folder.path("saved") +
                    "; exit 0' TERM; echo ready; while true; do sleep 0.02; done",
                {}, [&](pid_t pid, const std::string& output) {
                  if (killed || output.empty()) return;
                  killed = true;
                  ::kill(pid, SIGKILL);
                });
  EXPECT_TRUE(killed);
  EXPECT_EQ(folder.read("saved"), "saved\n");
}

TEST(Launcher, RanksEndWhenTheLauncherIsKilled) {
  SKIP_WITHOUT_MPI();
  TestFolder folder;
  bool killed = false;
  launch_script({"-n", "2", "--grace", "0.2"},
                "trap 'echo end >> " + folder.path("ends") +
                    "; exit 0' TERM; echo ready; while true; do sleep 0.02; done",
                {}, [&](pid_t pid, const std::string& output) {
                  if (killed || std::count(output.begin(), output.end(), '\n') < 2) return;
                  killed = true;
                  ::kill(pid, SIGKILL);
                });
  // run_process returns when the ranks have closed their output.
  EXPECT_TRUE(killed);
}

TEST(Launcher, AKilledAgentIsALostRankAndTakesItsProgramAlong) {
  SKIP_WITHOUT_MPI();
  const FinishedProcess job =
      launch_script({"-n", "2", "--grace", "5"},
                    "if [ $TESSERA_RANK = 1 ]; then kill -9 $PPID; sleep 600; fi; sleep 0.3");
  EXPECT_EQ(job.code(), 137) << job;
  EXPECT_TRUE(job.complained("rank 1")) << job;
  EXPECT_TRUE(job.complained("lost its agent")) << job;
}

TEST(Launcher, ACE3RestartsGoOnFromTheCheckpointInAChangedWorld) {
  SKIP_WITHOUT_MPI();
  TestFolder folder;
  // Every attempt but the third fails after a step of rank 0 that it saved.
  const FinishedProcess job =
      launch_script({"-n", "3", "--restarts", "4", "--restart-ranks", "2,1", "--grace", "5"},
                    "cd " + folder.path("") +
                        "; if [ $TESSERA_RANK = 0 ]; then cat step; echo x >> step; "
                        "echo attempt $TESSERA_RESTART_COUNT of $TESSERA_WORLD_SIZE ranks; "
                        "test $TESSERA_RESTART_COUNT = 2 || exit 6; fi");
  EXPECT_EQ(job.code(), 0) << job;
  EXPECT_TRUE(job.printed("attempt 0 of 3 ranks")) << job;
  EXPECT_TRUE(job.printed("attempt 1 of 2 ranks")) << job;
  EXPECT_TRUE(job.printed("attempt 2 of 1 ranks")) << job;
  EXPECT_TRUE(job.complained("starting again with 2 ranks (restart 1 of 4)")) << job;
  EXPECT_EQ(folder.read("step"), "x\nx\nx\n");
}

TEST(Launcher, WhenAllRestartsFailTheLastCodeIsReturned) {
  const FinishedProcess job = launch_script({"--restarts", "2"},
                                            "echo $TESSERA_RESTART_COUNT; exit $((10 + "
                                            "TESSERA_RESTART_COUNT))");
  EXPECT_EQ(job.code(), 12) << job;
  EXPECT_EQ(job.output, "0\n1\n2\n");
}

// --- several nodes, on this machine: an agent that runs the command here, under the node's name
// ---

class FakeNodes : public ::testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_MPI();
    hosts_ = folder_.write("hosts", "nodea slots=2\nnodeb slots=1\n");
    // Node names of this cluster are nodea and nodeb. PATH begins with a folder of the node, and
    // MPI's daemons need one each for their files.
    agent_ = folder_.write("agent",
                           "#!/bin/sh\ncase $1 in nodea|nodeb) ;; *) exit 255;; esac\n"
                           "export TESSERA_NODE_NAME=$1 PATH=" +
                               folder_.path("bin-") + "$1:$PATH TMPDIR=" + folder_.path("tmp-") +
                               "$1\nmkdir -p $TMPDIR\nshift\nexec sh -c \"$*\"\n",
                           true);
  }
  FinishedProcess launch(std::vector<std::string> flags, const std::string& script) {
    flags.insert(flags.end(),
                 {"--hostfile", hosts_, "--remote-agent", agent_, "--transport", "tcp"});
    return launch_script(flags, script);
  }
  TestFolder folder_;
  std::string hosts_;
  std::string agent_;
};

TEST_F(FakeNodes, RanksKnowTheirNodesAndTheirPlaceThere) {
  const FinishedProcess job =
      launch({},
             "echo $TESSERA_RANK on $TESSERA_NODE_NAME node $TESSERA_NODE/$TESSERA_NODES "
             "local $TESSERA_LOCAL_RANK/$TESSERA_LOCAL_WORLD_SIZE of $TESSERA_NODE_OF_RANK");
  EXPECT_EQ(job.code(), 0) << job;
  EXPECT_EQ(lines_of(job.output),
            (std::set<std::string>{"[0] 0 on nodea node 0/2 local 0/2 of 0,0,1",
                                   "[1] 1 on nodea node 0/2 local 1/2 of 0,0,1",
                                   "[2] 2 on nodeb node 1/2 local 0/1 of 0,0,1"}));
}

TEST_F(FakeNodes, LinesOfOtherMachinesStayWholeToo) {
  expect_many_lines(launch({}, kManyLines), 3);
}

TEST_F(FakeNodes, WhatARankSaidBeforeItDiedArrivesBeforeTheConclusion) {
  const FinishedProcess job = launch({"--grace", "5"},
                                     "echo last words >&2; test $TESSERA_RANK != 2 || { "
                                     "printf 'half a line' >&2; kill -9 $$; }; sleep 0.2");
  EXPECT_EQ(job.code(), 137) << job;
  const size_t half = job.error.find("[2] half a line\n");
  ASSERT_NE(half, std::string::npos) << job;
  EXPECT_LT(job.error.find("[2] last words\n"), half) << job;
  EXPECT_LT(half, job.error.find("first cause")) << job;
}

TEST_F(FakeNodes, AJobWhoseOutputNobodyReadsGoesOn) {
  const FinishedProcess job =
      run_process({"sh", "-c",
                   kCommand + " launch --hostfile " + hosts_ + " --remote-agent " + agent_ +
                       " --transport tcp sh -c 'for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.05; "
                       "done; touch " +
                       folder_.path("end") + "$TESSERA_RANK' | head -n 1"});
  for (const char* rank : {"0", "1", "2"}) {
    EXPECT_TRUE(std::filesystem::exists(folder_.path("end") + rank)) << job;
  }
}

TEST_F(FakeNodes, AFailureNamesItsNode) {
  const FinishedProcess job =
      launch({"--grace", "5"}, "test $TESSERA_RANK != 2 || kill -11 $$; sleep 0.2");
  EXPECT_EQ(job.code(), 139) << job;
  EXPECT_TRUE(job.complained("rank 2 on nodeb was killed by signal 11")) << job;
}

TEST_F(FakeNodes, AHostThatCannotBeReachedIsNamedBeforeAnythingStarts) {
  folder_.write("hosts", "nodea slots=2\nnodec slots=1\n");
  const FinishedProcess job = launch({}, "echo started");
  EXPECT_NE(job.code(), 0);
  EXPECT_TRUE(job.complained("no command runs on nodec")) << job;
  EXPECT_FALSE(job.printed("started"));
}

TEST_F(FakeNodes, ANodeWithoutTheProgramOrWithAnotherBuildIsNamed) {
  std::filesystem::create_directory(folder_.path("bin-nodea"));
  std::filesystem::create_directory(folder_.path("bin-nodeb"));
  folder_.write("bin-nodea/train", "#!/bin/sh\necho started\n", true);
  const std::vector<std::string> command = {kCommand,         "launch", "--hostfile", hosts_,
                                            "--remote-agent", agent_,   "train"};
  const FinishedProcess missing = run_process(command);
  EXPECT_EQ(missing.code(), 1) << missing;
  EXPECT_TRUE(missing.complained("not found, or cannot be executed, on nodeb (rank 2)")) << missing;

  folder_.write("bin-nodeb/train", "#!/bin/sh\necho started, but another one\n", true);
  const FinishedProcess other = run_process(command);
  EXPECT_EQ(other.code(), 1) << other;
  EXPECT_TRUE(other.complained("bytes differ")) << other;
  EXPECT_FALSE(other.printed("started"));

  folder_.write("bin-nodeb/train", "#!/bin/sh\necho started\n", true);
  const FinishedProcess equal = run_process(command);
  EXPECT_EQ(equal.code(), 0) << equal;
}

TEST_F(FakeNodes, ARestartReadsTheHostFileAgain) {
  const FinishedProcess job =
      launch({"--restarts", "1", "--restart-ranks", "1", "--grace", "5"},
             "echo $TESSERA_RESTART_COUNT $TESSERA_NODE_NAME; test $TESSERA_RESTART_COUNT = 1 || { "
             "echo 'nodeb slots=1' > " +
                 hosts_ + "; exit 1; }");
  EXPECT_EQ(job.code(), 0) << job;
  EXPECT_TRUE(job.printed("1 nodeb")) << job;
}

// --- what cannot start ---

TEST(LauncherInput, MistakesAreToldWithoutStartingAnything) {
  const auto complaint = [](const std::vector<std::string>& flags) {
    std::vector<std::string> command = {kCommand, "launch"};
    command.insert(command.end(), flags.begin(), flags.end());
    const FinishedProcess job = run_process(command);
    EXPECT_NE(job.code(), 0) << job;
    return job.error;
  };
  const auto mentions = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(mentions(complaint({}), "no program"));
  EXPECT_TRUE(mentions(complaint({"-n", "0", "true"}), "--ranks"));
  EXPECT_TRUE(mentions(complaint({"-n", "x", "true"}), "--ranks"));
  EXPECT_TRUE(mentions(complaint({"--hostfile", "/nowhere/hosts", "true"}), "/nowhere/hosts"));
  EXPECT_TRUE(mentions(complaint({"--no-such-flag", "true"}), "no-such-flag is unknown"));
  EXPECT_TRUE(mentions(complaint({"/nowhere/program"}), "not found"));
  TestFolder folder;
  const std::string hosts = folder.write("hosts", "a slots=1\nb slots=none\n");
  EXPECT_TRUE(mentions(complaint({"--hostfile", hosts, "true"}), "hosts:2"));
}

TEST(LauncherInput, ADryRunShowsTheCommandAndWhereSettingsCameFrom) {
  SKIP_WITHOUT_MPI();
  const FinishedProcess shown = run_process(
      {kCommand, "launch", "-n", "2", "--dry-run", "train", "--x"}, {{"TESSERA_GRACE", "3"}});
  EXPECT_EQ(shown.code(), 0) << shown;
  EXPECT_TRUE(shown.printed("--enable-recovery")) << shown;
  EXPECT_TRUE(shown.printed("agent -- train --x")) << shown;
  EXPECT_TRUE(shown.printed("grace = 3  (TESSERA_GRACE)")) << shown;
  EXPECT_TRUE(shown.printed("ranks = 2  (--ranks)")) << shown;
}

}  // namespace
}  // namespace tessera::test_launcher
