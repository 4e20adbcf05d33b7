// What the launcher decides: host files, settings, command lines, preflight, the first cause. No
// process is started here (test_launcher does).
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include <tessera/accelerate/launch/command.h>
#include <tessera/accelerate/launch/launcher.h>
#include <tessera/accelerate/launch/options.h>
#include <tessera/accelerate/launch/protocol.h>

#include "finished_process.h"
#include "message_of.h"

namespace tessera::launch::test_launch {
namespace {

using namespace std::chrono_literals;
using distributed::FailureKind;
using distributed::RankFailure;

class TextFile {
 public:
  explicit TextFile(const std::string& text) {
    path_ = (std::filesystem::temp_directory_path() / "tessera-launch-XXXXXX").string();
    ::close(::mkstemp(path_.data()));
    std::ofstream(path_) << text;
  }
  ~TextFile() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// --- host files ---

TEST(HostFile, NamesSlotsAndCommentsAreRead) {
  const std::vector<Host> hosts = parse_hosts(
      "# the cluster\n\nnode1 slots=4\nnode2:2   # new\n  node3\nuser@10.0.0.4 slots=1 "
      "max_slots=8\r\n",
      "hosts");
  EXPECT_EQ(hosts,
            (std::vector<Host>{{"node1", 4}, {"node2", 2}, {"node3", 1}, {"user@10.0.0.4", 1}}));
  EXPECT_EQ(parse_hosts(format_hosts(hosts), "again"), hosts);
  EXPECT_EQ(parse_hosts("\xef\xbb\xbf" + format_hosts(hosts), "with the mark of an editor"), hosts);
}

TEST(HostFile, EveryMistakeIsNamedWithItsLine) {
  const std::pair<const char*, const char*> kMistakes[] = {
      {"a\nb slots=0\n", "hosts:2"},
      {"a\nb slots=two\n", "two"},
      {"a slots=-1", "hosts:1"},
      {"a slots=4x", "4x"},
      {"a slots=", "hosts:1"},
      {"a:", "hosts:1"},
      {"a:3 slots=3", "twice"},
      {"a cores=3", "cores=3"},
      {"a\n\na\n", "hosts:3"},
      {"--help slots=1", "--help"},
      {"a;rm slots=1", "a;rm"},
      {"$(x)", "$(x)"},
      {"a slots=99999999999", "999"},
      {"", "no host"},
      {"# nothing\n", "no host"},
      {"fe80::1 slots=2", "fe80::1"},
      {"::1", "IPv6"},
      {"[fe80::1]:2", "IPv6"},
      {"a\xc2\xa0slots=2", "a\\xc2\\xa0slots=2"},
      {"a\xe2\x80\x8b", "a\\xe2\\x80\\x8b"},
      {"a slots=2\xc2\xa0", "2\\xc2\\xa0"},
      {"a\n\xef\xbb\xbf"
       "b slots=2",
       "hosts:2"},
  };
  for (const auto& [text, expected] : kMistakes) {
    const std::string message = message_of<FormatError>([&] { parse_hosts(text, "hosts"); });
    EXPECT_TRUE(mentions(message, expected)) << text << " -> " << message;
  }
}

TEST(HostFile, AMissingFileIsAnErrorThatNamesIt) {
  EXPECT_TRUE(
      mentions(message_of<IoError>([] { read_host_file("/nowhere/hosts"); }), "/nowhere/hosts"));
}

TEST(HostFile, RanksHaveToFitIntoTheSlots) {
  const std::vector<Host> hosts = {{"a", 2}, {"b", 1}};
  check_slots(hosts, 3, false);
  check_slots(hosts, 7, true);
  const std::string message = message_of<ConfigError>([&] { check_slots(hosts, 4, false); });
  EXPECT_TRUE(mentions(message, "4 ranks")) << message;
  EXPECT_TRUE(mentions(message, "3 slots")) << message;
}

// --- settings ---

LaunchOptions resolve(const Flags& flags, const Environment& environment = {},
                      const std::string& file = "") {
  return resolve_options(flags, environment, file, {"train"});
}

TEST(LaunchSettings, FlagBeatsTesseraBeatsAccelerateBeatsFileBeatsDefault) {
  const TextFile file(R"({"ranks": 5, "grace": 7.5, "transport": "tcp"})");
  Flags flags = {{"ranks", "2"}};
  Environment environment = {{"TESSERA_RANKS", "3"}, {"ACCELERATE_NUM_PROCESSES", "3"}};
  LaunchOptions options = resolve(flags, environment, file.path());
  EXPECT_EQ(options.ranks, 2);
  EXPECT_EQ(options.provenance["ranks"], "--ranks");
  EXPECT_EQ(options.grace, 7500ms);
  EXPECT_EQ(options.transport, Transport::kTcp);
  EXPECT_EQ(options.provenance["grace"], "file " + file.path());
  EXPECT_EQ(options.provenance["restarts"], "default");

  flags.clear();
  EXPECT_EQ(resolve(flags, environment, file.path()).ranks, 3);
  // Two variables for one setting, which say two things, are a mistake.
  environment["ACCELERATE_NUM_PROCESSES"] = "4";
  EXPECT_TRUE(mentions(message_of<ConfigError>([&] { resolve(flags, environment); }),
                       "TESSERA_RANKS=3 contradicts ACCELERATE_NUM_PROCESSES=4"));
  environment.erase("TESSERA_RANKS");
  options = resolve(flags, environment, file.path());
  EXPECT_EQ(options.ranks, 4);
  EXPECT_EQ(options.provenance["ranks"], "ACCELERATE_NUM_PROCESSES");
  environment.clear();
  EXPECT_EQ(resolve(flags, environment, file.path()).ranks, 5);
  EXPECT_EQ(resolve(flags, environment).ranks, 1);
  EXPECT_EQ(resolve(flags, environment).collective_timeout, 600s);
}

TEST(LaunchSettings, TimesOfTheFirstStepAndOfSavesAreFlagsToo) {
  EXPECT_FALSE(resolve({}).first_step_timeout);
  EXPECT_FALSE(resolve({}).save_timeout);
  const LaunchOptions options =
      resolve({{"first_step_timeout", "900"}}, {{"TESSERA_SAVE_TIMEOUT", "1200.5"}});
  EXPECT_EQ(options.first_step_timeout, 900s);
  EXPECT_EQ(options.provenance.at("first_step_timeout"), "--first-step-timeout");
  EXPECT_EQ(options.save_timeout, 1200500ms);
  EXPECT_EQ(options.provenance.at("save_timeout"), "TESSERA_SAVE_TIMEOUT");
  EXPECT_EQ(resolve({{"save_timeout", "7"}}, {{"TESSERA_SAVE_TIMEOUT", "9"}}).save_timeout, 7s);
}

TEST(LaunchSettings, ValuesThatCannotBeAreRefusedWithTheirSource) {
  const std::pair<const char*, const char*> kMistakes[] = {
      {"ranks", "0"},
      {"ranks", "-2"},
      {"ranks", "two"},
      {"ranks", "2.5"},
      {"ranks", "99999999"},
      {"nodes", "0"},
      {"threads", "0"},
      {"restarts", "-1"},
      {"grace", "0"},
      {"grace", "soon"},
      {"grace", "1e99"},
      {"job_timeout", "-1"},
      {"transport", "ucx"},
      {"restart_ranks", "2"},  // without restarts
      {"collective_timeout", "nan"},
      {"first_step_timeout", "0"},
      {"save_timeout", "later"},
      {"oversubscribe", "perhaps"}};
  for (const auto& [name, value] : kMistakes) {
    const std::string message = message_of<ConfigError>([&] { resolve({{name, value}}); });
    std::string flag = name;
    std::replace(flag.begin(), flag.end(), '_', '-');
    EXPECT_TRUE(mentions(message, "--" + flag)) << message;
  }
  EXPECT_TRUE(mentions(message_of<ConfigError>([] {
                         resolve({}, {{"TESSERA_RANKS", "x"}});
                       }),
                       "TESSERA_RANKS"));
  EXPECT_THROW(resolve({{"restart_ranks", "2,,1"}, {"restarts", "1"}}), ConfigError);
  EXPECT_THROW(resolve_options({}, {}, "", {}), ConfigError);
}

TEST(LaunchSettings, AFileWithUnknownNamesOrOtherContentIsRefused) {
  const TextFile unknown(R"({"rank": 5})");
  EXPECT_TRUE(
      mentions(message_of<ConfigError>([&] { resolve({}, {}, unknown.path()); }), "\"rank\""));
  const TextFile list("[1, 2]");
  EXPECT_THROW(resolve({}, {}, list.path()), FormatError);
  const TextFile broken("{\"ranks\": ");
  EXPECT_THROW(resolve({}, {}, broken.path()), FormatError);
  EXPECT_THROW(resolve({}, {}, "/nowhere/job.json"), IoError);
}

TEST(LaunchSettings, AHostFileGivesTheRanksAndLimitsThem) {
  const TextFile hosts("a slots=2\nb slots=3\n");
  EXPECT_EQ(resolve({{"hostfile", hosts.path()}}).ranks, 5);
  EXPECT_EQ(resolve({{"hostfile", hosts.path()}, {"ranks", "4"}}).ranks, 4);
  EXPECT_THROW(resolve({{"hostfile", hosts.path()}, {"ranks", "6"}}), ConfigError);
  EXPECT_EQ(resolve({{"hostfile", hosts.path()}, {"ranks", "6"}, {"oversubscribe", "true"}}).ranks,
            6);
  EXPECT_THROW(resolve({{"hostfile", hosts.path()}, {"transport", "shared"}}), ConfigError);
  EXPECT_THROW(
      resolve(
          {{"hostfile", hosts.path()}, {"ranks", "2"}, {"restarts", "1"}, {"restart_ranks", "6"}}),
      ConfigError);
}

TEST(LaunchSettings, RestartsMayChangeTheWorld) {
  const LaunchOptions options =
      resolve({{"ranks", "4"}, {"restarts", "5"}, {"restart_ranks", "3,2"}});
  EXPECT_EQ(ranks_of_attempt(options, 0), 4);
  EXPECT_EQ(ranks_of_attempt(options, 1), 3);
  EXPECT_EQ(ranks_of_attempt(options, 2), 2);
  EXPECT_EQ(ranks_of_attempt(options, 5), 2);
  EXPECT_EQ(ranks_of_attempt(resolve({{"ranks", "4"}, {"restarts", "1"}}), 1), 4);
}

// --- command lines ---

const Machine kMachine = {.executable = "/opt/tessera",
                          .mpirun = "/usr/bin/mpirun",
                          .root = false,
                          .cores = 8,
                          .shared_memory = int64_t{8} << 30,
                          .reads_other_processes = true,
                          .temporary = "/scratch",
                          .in_slurm = false};

ManagerCommand command_for(Manager manager, const LaunchOptions& options, const Machine& machine,
                           const std::string& host_file = "", const Environment& environment = {}) {
  return manager_command(manager, options, machine, options.ranks, host_file, environment,
                         {{"TESSERA_STORE", "10.0.0.1:99"}});
}

std::string line_for(Manager manager, const Flags& flags, const Machine& machine = kMachine,
                     const std::string& host_file = "") {
  const LaunchOptions options = resolve_options(flags, {}, "", {"train", "--lr", "0.1"});
  return printable(command_for(manager, options, machine, host_file).command);
}

TEST(CommandLine, MpirunOnOneMachine) {
  EXPECT_EQ(
      line_for(Manager::kMpirun, {{"ranks", "2"}}),
      "/usr/bin/mpirun -n 2 --enable-recovery --oversubscribe --bind-to none "
      "--mca pml ob1 --mca btl vader,self -x TESSERA_STORE /opt/tessera agent -- train --lr 0.1");
}

// MPI's TCP listens on every interface: only ranks of several machines need it.
TEST(CommandLine, RanksOfOneMachineListenOnNothing) {
  const TextFile one("a slots=4\n"), two("a\nb\n");
  const std::string within = "--mca btl vader,self";
  EXPECT_TRUE(mentions(line_for(Manager::kMpirun, {{"ranks", "2"}}), within));
  EXPECT_TRUE(mentions(line_for(Manager::kMpirun, {{"hostfile", one.path()}}), within));
  EXPECT_FALSE(mentions(line_for(Manager::kMpirun, {{"hostfile", two.path()}}), "--mca btl "));
  EXPECT_TRUE(mentions(line_for(Manager::kMpirun, {{"ranks", "2"}, {"transport", "tcp"}}),
                       "--mca btl tcp,self"));
}

TEST(CommandLine, MpirunOverTcpOnTwoHosts) {
  const TextFile hosts("a\nb\n");
  EXPECT_EQ(line_for(Manager::kMpirun,
                     {{"hostfile", hosts.path()},
                      {"transport", "tcp"},
                      {"interface", "eth1"},
                      {"nodes", "2"},
                      {"remote_agent", "/opt/agent"}},
                     kMachine, "/scratch/hosts"),
            "/usr/bin/mpirun -n 2 --enable-recovery --oversubscribe --bind-to none "
            "--hostfile /scratch/hosts --map-by ppr:1:node --mca pml ob1 --mca btl tcp,self "
            "--mca btl_tcp_if_include eth1 --mca oob_tcp_if_include eth1 "
            "--mca plm_rsh_agent /opt/agent -x TESSERA_STORE /opt/tessera agent -- train --lr 0.1");
}

TEST(CommandLine, ContainersGetWhatTheyLack) {
  Machine container = kMachine;
  container.root = true;
  container.cores = 2;
  container.shared_memory = int64_t{64} << 20;  // Docker's default
  container.reads_other_processes = false;
  const LaunchOptions options = resolve({{"ranks", "8"}});
  const ManagerCommand command = command_for(Manager::kMpirun, options, container);
  EXPECT_EQ(command.environment.at("OMPI_ALLOW_RUN_AS_ROOT"), "1");
  EXPECT_EQ(command.environment.at("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1");
  const std::string line = printable(command.command);
  EXPECT_TRUE(mentions(line, "--mca btl_vader_backing_directory /scratch")) << line;
  EXPECT_TRUE(mentions(line, "--mca btl_vader_single_copy_mechanism none")) << line;
  EXPECT_TRUE(mentions(line, "--mca mpi_yield_when_idle 1")) << line;
  EXPECT_EQ(
      command_for(Manager::kMpirun, options, kMachine).environment.count("OMPI_ALLOW_RUN_AS_ROOT"),
      0u);
  // Two ranks have room enough in 64 MiB.
  EXPECT_FALSE(mentions(
      printable(command_for(Manager::kMpirun, resolve({{"ranks", "2"}}), container).command),
      "backing_directory"));
}

TEST(CommandLine, SrunInsideAnAllocation) {
  EXPECT_EQ(line_for(Manager::kSrun, {{"ranks", "16"}, {"nodes", "2"}}),
            "srun --mpi=pmix --ntasks=16 --nodes=2 --kill-on-bad-exit=0 --wait=0 --no-kill "
            "--unbuffered --overlap --cpu-bind=none --export=ALL /opt/tessera agent -- train --lr "
            "0.1");
}

TEST(CommandLine, TheManagerFitsTheMachine) {
  Machine slurm = kMachine;
  slurm.in_slurm = true;
  Machine bare = kMachine;
  bare.mpirun.clear();
  const TextFile hosts("a\nb\n");
  EXPECT_EQ(choose_manager(resolve({}), kMachine, 1), Manager::kNone);
  EXPECT_EQ(choose_manager(resolve({}), bare, 1), Manager::kNone);
  EXPECT_EQ(choose_manager(resolve({{"ranks", "2"}}), kMachine, 2), Manager::kMpirun);
  EXPECT_EQ(choose_manager(resolve({{"ranks", "2"}}), slurm, 2), Manager::kSrun);
  EXPECT_EQ(choose_manager(resolve({{"hostfile", hosts.path()}}), slurm, 2), Manager::kMpirun);
  EXPECT_TRUE(mentions(message_of<ConfigError>([&] {
                         choose_manager(resolve({{"ranks", "2"}}), bare, 2);
                       }),
                       "openmpi-bin"));
}

TEST(CommandLine, SettingsOfTheUserTravelAndTracesOfOtherLaunchersDoNot) {
  const Environment environment = {
      {"TESSERA_DATA_DIR", "/data"},  {"ACCELERATE_MIXED_PRECISION", "bf16"},
      {"OMPI_COMM_WORLD_RANK", "3"},  {"PMIX_RANK", "3"},
      {"TESSERA_RANK", "3"},          {"TESSERA_STORE_TOKEN", "other job's"},
      {"OMPI_MCA_orte_hnp_uri", "x"}, {"OMPI_MCA_btl", "tcp,self"},
      {"PATH", "/usr/bin"},
  };
  LaunchOptions options = resolve({{"ranks", "2"}});
  options.exported = {"PATH"};
  const ManagerCommand command = command_for(Manager::kMpirun, options, kMachine, "", environment);
  const std::string line = printable(command.command);
  for (const char* name : {"TESSERA_DATA_DIR", "ACCELERATE_MIXED_PRECISION", "PATH"}) {
    EXPECT_TRUE(mentions(line, std::string("-x ") + name)) << line;
  }
  EXPECT_EQ(command.environment, (Environment{{"TESSERA_DATA_DIR", "/data"},
                                              {"ACCELERATE_MIXED_PRECISION", "bf16"},
                                              {"OMPI_MCA_btl", "tcp,self"},
                                              {"TESSERA_STORE", "10.0.0.1:99"},
                                              {"PATH", "/usr/bin"}}));
}

TEST(CommandLine, WordsAreQuotedForAShell) {
  EXPECT_EQ(printable({"a", "", "b c", "it's", "$HOME"}), "a '' 'b c' 'it'\\''s' '$HOME'");
}

// --- preflight ---

std::vector<AgentFacts> four_ranks() {
  std::vector<AgentFacts> facts;
  for (int rank = 0; rank < 4; ++rank) {
    AgentFacts fact;
    fact.rank = rank;
    fact.world_size = 4;
    fact.host = rank < 2 ? "node1" : "node2";
    fact.version = "0.1.0";
    fact.program = "/bin/train";
    fact.program_hash = 77;
    fact.clock = 1'000'000 + rank;
    fact.received = 1'000'010;
    facts.push_back(fact);
  }
  return facts;
}

TEST(Preflight, EqualNodesPass) {
  const PreflightResult result = preflight(four_ranks());
  EXPECT_TRUE(result.errors.empty());
  EXPECT_TRUE(result.warnings.empty());
}

TEST(Preflight, AMissingProgramNamesNodeAndRanks) {
  auto facts = four_ranks();
  facts[2].program.clear();
  facts[3].program.clear();
  const PreflightResult result = preflight(facts);
  ASSERT_EQ(result.errors.size(), 1u);
  EXPECT_TRUE(mentions(result.errors[0], "node2 (ranks 2, 3)")) << result.errors[0];
}

// Every byte counts, and how many there are; a file of none hashes to 0.
TEST(Preflight, ProgramsOfOtherBytesHaveOtherHashes) {
  TestFolder folder;
  int files = 0;
  const auto hash_of = [&](const std::string& bytes) {
    const std::string path = folder.write(std::to_string(files++), bytes, true);
    const AgentFacts facts = gather_facts(0, 1, path, {}, {});
    EXPECT_EQ(facts.program, path);
    return facts.program_hash;
  };
  EXPECT_EQ(hash_of(""), 0u);
  const std::string program((1 << 20) + 13, 'x');  // the buffer once, one word, and part of one
  std::vector<uint64_t> hashes = {hash_of(program), hash_of(std::string(1, '\0')),
                                  hash_of(std::string(8, '\0')), hash_of(program + '\0')};
  for (const size_t at : {size_t{0}, size_t{7}, size_t{8}, program.size() / 2,
                          size_t{(1 << 20) - 1}, size_t{1 << 20}, program.size() - 1}) {
    std::string other = program;
    other[at] = 'y';
    hashes.push_back(hash_of(other));
  }
  EXPECT_EQ(hash_of(program), hashes[0]);
  std::ranges::sort(hashes);
  EXPECT_EQ(std::ranges::adjacent_find(hashes), hashes.end());
  EXPECT_NE(hashes[0], 0u);
}

TEST(Preflight, AnotherBuildOfTheProgramOrTheLibraryIsRefused) {
  auto facts = four_ranks();
  facts[3].program_hash = 78;
  facts[1].version = "0.2.0";
  const PreflightResult result = preflight(facts);
  ASSERT_EQ(result.errors.size(), 2u);
  EXPECT_TRUE(mentions(result.errors[0], "on rank 3")) << result.errors[0];
  EXPECT_TRUE(mentions(result.errors[1], "tessera 0.2.0 on rank 1")) << result.errors[1];
}

TEST(Preflight, AClockThatIsOffIsAWarning) {
  auto facts = four_ranks();
  facts[0].clock += 3'600'000;
  facts[3].clock -= 60'000;
  const PreflightResult result = preflight(facts);
  EXPECT_TRUE(result.errors.empty());
  ASSERT_EQ(result.warnings.size(), 2u);
  EXPECT_TRUE(mentions(result.warnings[0], "3599 s ahead")) << result.warnings[0];
  EXPECT_TRUE(mentions(result.warnings[1], "behind")) << result.warnings[1];
}

TEST(Preflight, ReportsTravelAsText) {
  AgentFacts facts = four_ranks()[2];
  facts.host = "a \"quoted\"\nname \xff";
  const AgentFacts copy = AgentFacts::from_text(facts.to_text());
  EXPECT_EQ(copy.rank, 2);
  EXPECT_EQ(copy.program_hash, 77u);
  EXPECT_EQ(copy.clock, facts.clock);
  for (const char* text : {"", "{", "[]", "{\"rank\": 1}", "{\"rank\": \"one\"}"}) {
    EXPECT_THROW(AgentFacts::from_text(text), DistributedError) << text;
    EXPECT_THROW(ExitReport::from_text(text), DistributedError) << text;
    EXPECT_THROW(RankFailure::from_text(text), DistributedError) << text;
  }
  EXPECT_THROW(Layout::from_text("0,x"), DistributedError);
}

// Of another version, or of a stranger: what cannot be is refused before anybody counts with it.
TEST(Preflight, NumbersThatCannotBeAreRefused) {
  for (const char* text : {"2147483647", "-1", "0,2", "1.5", "[0]", "0,0,99999999999999999999"}) {
    EXPECT_THROW(Layout::from_text(text), DistributedError) << text;
  }
  EXPECT_EQ(Layout::from_text("0,1,1").nodes, 2);
  const ExitReport last = ExitReport::from_text(R"({"code": 255, "signal": 127, "host": "a"})");
  EXPECT_TRUE(last.status.code == 255 && last.status.signal == 127);
  for (const char* text :
       {R"({"code": 256, "signal": 0, "host": "a"})", R"({"code": 0, "signal": 128, "host": "a"})",
        R"({"code": 0, "signal": 2147483647, "host": "a"})",
        R"({"code": -1, "signal": 0, "host": "a"})",
        R"({"code": 1e300, "signal": 0, "host": "a"})"}) {
    EXPECT_THROW(ExitReport::from_text(text), DistributedError) << text;
  }
  const std::string facts =
      R"({"rank": 0, "world_size": 2, "host": "a", "version": "1", "program": "p", )"
      R"("program_hash": 7, "clock": 1, "cores": )";
  EXPECT_EQ(AgentFacts::from_text(facts + "2}").cores, 2);
  EXPECT_THROW(AgentFacts::from_text(facts + "-2}"), DistributedError);
  EXPECT_THROW(AgentFacts::from_text(facts + "4294967298}"), DistributedError);
}

TEST(Preflight, RanksAreNumberedOnTheirNodes) {
  auto facts = four_ranks();
  std::swap(facts[1].host, facts[2].host);  // node1, node2, node1, node2
  const Layout layout = Layout::from_text(lay_out(facts).text());
  EXPECT_EQ(layout.text(), "0,1,0,1");
  EXPECT_EQ(layout.nodes, 2);
  EXPECT_EQ(layout.local_rank(2), 1);
  EXPECT_EQ(layout.local_rank(1), 0);
  EXPECT_EQ(layout.local_world_size(3), 2);
}

// --- the first cause ---

ExitReport ended(int code, int signal = 0) {
  ExitReport report;
  report.status.code = code;
  report.status.signal = signal;
  report.host = "node1";
  return report;
}

RankFailure failure(int rank, FailureKind kind, const std::string& message) {
  RankFailure result;
  result.rank = rank;
  result.kind = kind;
  result.message = message;
  return result;
}

TEST(JobRecord, AJobWithoutFailuresReturnsZero) {
  JobRecord record(2);
  for (int rank = 0; rank < 2; ++rank) record.joined(rank, 1ms);
  for (int rank = 0; rank < 2; ++rank) {
    record.left(rank);
    record.exited(rank, ended(0), 5ms);
  }
  EXPECT_TRUE(record.all_exited());
  EXPECT_EQ(record.exit_code(), 0);
  EXPECT_TRUE(record.take_news().empty());
}

TEST(JobRecord, ASignalIsOneHundredAndTwentyEightPlusIt) {
  JobRecord record(2);
  record.exited(1, ended(0, 9), 1ms);
  EXPECT_EQ(record.exit_code(), 137);
  EXPECT_EQ(record.first_cause()->rank, 1);
  EXPECT_EQ(record.running(), std::vector<int>{0});
}

TEST(JobRecord, EachFailureIsNewsOnce) {
  JobRecord record(3);
  record.failed(failure(2, FailureKind::kError, "failed: x"), 1ms);
  EXPECT_EQ(record.take_news().size(), 1u);
  record.exited(2, ended(3), 2ms);  // the same failure, with its code
  EXPECT_TRUE(record.take_news().empty());
  EXPECT_EQ(record.exit_code(), 3);
  EXPECT_EQ(record.first_cause()->message, "failed: x");
  record.exited(0, ended(4), 3ms);
  EXPECT_EQ(record.take_news().size(), 1u);
  EXPECT_EQ(record.exit_code(), 3);
}

TEST(JobRecord, AConsequenceIsNeverTheFirstCause) {
  JobRecord record(3);
  record.failed(failure(0, FailureKind::kConsequence, "raised"), 1ms);
  record.exited(0, ended(1), 2ms);
  record.exited(2, ended(7), 900ms);
  EXPECT_EQ(record.first_cause()->rank, 2);
  EXPECT_EQ(record.exit_code(), 7);
}

TEST(JobRecord, AKilledRankComesBeforeTheErrorThatItsPeerNoticedFirst) {
  JobRecord record(2);
  record.failed(failure(0, FailureKind::kError, "connection reset by peer"), 100ms);
  record.exited(1, ended(0, 9), 130ms);
  EXPECT_EQ(record.first_cause()->rank, 1);
  EXPECT_EQ(record.exit_code(), 137);

  JobRecord later(2);
  later.failed(failure(0, FailureKind::kError, "out of memory"), 100ms);
  later.exited(1, ended(0, 6), 5000ms);
  EXPECT_EQ(later.first_cause()->rank, 0);
}

TEST(JobRecord, RanksThatTheLauncherKilledAreNoCause) {
  JobRecord record(2);
  record.failed(failure(0, FailureKind::kTimeout, "waited 60 s for rank 1"), 1ms);
  record.exited(0, ended(1), 2ms);
  record.killing();
  record.exited(1, ended(0, 9), 3ms);
  EXPECT_EQ(record.first_cause()->rank, 0);
  EXPECT_EQ(record.exit_code(), 1);
}

TEST(JobRecord, ARankThatPublishedItsErrorAndHadToBeKilledKeepsItsCode) {
  JobRecord record(1);
  record.failed(failure(0, FailureKind::kError, "failed: x"), 1ms);
  record.killing();
  record.exited(0, ended(0, 9), 3ms);
  EXPECT_EQ(record.exit_code(), 1);
}

TEST(JobRecord, ExitingWithZeroInTheMiddleOfAJobIsAFailure) {
  JobRecord joined(2);
  joined.joined(0, 1ms);
  joined.joined(1, 1ms);
  joined.exited(1, ended(0), 2ms);
  EXPECT_EQ(joined.exit_code(), 1);
  EXPECT_TRUE(mentions(joined.first_cause()->message, "before the end of the job"));

  JobRecord before(2);  // it never joined; the other one does, later
  before.exited(1, ended(0), 1ms);
  EXPECT_EQ(before.exit_code(), 0);
  before.joined(0, 2ms);
  EXPECT_EQ(before.exit_code(), 1);

  JobRecord programs(2);  // that know nothing of the library
  programs.exited(0, ended(0), 1ms);
  programs.exited(1, ended(0), 2ms);
  EXPECT_EQ(programs.exit_code(), 0);
}

}  // namespace
}  // namespace tessera::launch::test_launch
