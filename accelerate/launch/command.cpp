#include <tessera/accelerate/launch/command.h>

#include <algorithm>
#include <cstdlib>

#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tessera/accelerate/launch/process.h>
#include <tessera/core/error.h>

namespace tessera::launch {
namespace {

// What MPI's shared memory takes for each rank: a 4 MiB segment and its queues, with as much spare.
constexpr int64_t kSharedMemoryPerRank = int64_t{16} << 20;

constexpr std::string_view kLauncherPrefixes[] = {"OMPI_COMM_WORLD_", "OMPI_MCA_ess",
                                                  "OMPI_MCA_orte_", "PMIX_", "PMI_"};
constexpr std::string_view kAgentVariables[] = {
    "TESSERA_RANK",          "TESSERA_WORLD_SIZE",      "TESSERA_LOCAL_RANK",
    "TESSERA_NODE",          "TESSERA_NODES",           "TESSERA_LOCAL_WORLD_SIZE",
    "TESSERA_NODE_OF_RANK",  "TESSERA_STORE",           "TESSERA_STORE_TOKEN",
    "TESSERA_RESTART_COUNT", "TESSERA_LAUNCH_SETTINGS", "TESSERA_RANK_OUTPUT",
    "TESSERA_RANK_ERRORS"};

// Whether a process may read its sibling's memory, as MPI does to copy large messages once.
bool siblings_can_read() {
  int pipe_ends[2];
  if (::pipe(pipe_ends) != 0) return false;
  char value = 'x';
  const pid_t target = ::fork();
  if (target == 0) {
    ::close(pipe_ends[1]);
    char end;
    [[maybe_unused]] const ssize_t size = ::read(pipe_ends[0], &end, 1);  // until the parent closes
    ::_exit(0);
  }
  const pid_t reader = ::fork();
  if (reader == 0) {
    char copy = 0;
    iovec local{&copy, 1};
    iovec remote{&value, 1};
    ::_exit(::process_vm_readv(target, &local, 1, &remote, 1, 0) == 1 ? 0 : 1);
  }
  int status = 1;
  if (reader > 0) ::waitpid(reader, &status, 0);
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
  if (target > 0) ::waitpid(target, nullptr, 0);
  return target > 0 && reader > 0 && status == 0;
}

void append(std::vector<std::string>& command, std::initializer_list<std::string> words) {
  command.insert(command.end(), words);
}

std::vector<std::string> agent_command(const LaunchOptions& options, const Machine& machine) {
  std::vector<std::string> command = {machine.executable, "agent"};
  if (!options.prefix_output) command.push_back("--no-prefix");
  command.push_back("--");
  command.insert(command.end(), options.command.begin(), options.command.end());
  return command;
}

// Most ranks that a host of the job gets.
int densest(const LaunchOptions& options, int ranks) {
  if (options.hosts.empty()) return ranks;
  int most = 1;
  for (const Host& host : options.hosts) most = std::max(most, host.slots);
  return std::min(most, ranks);
}

// Whether ranks share files where /dev/shm is too small.
bool needs_files(const LaunchOptions& options, const Machine& machine, int ranks) {
  return options.transport != Transport::kTcp &&
         machine.shared_memory < densest(options, ranks) * kSharedMemoryPerRank;
}

std::vector<std::string> mpirun_command(const LaunchOptions& options, const Machine& machine,
                                        int ranks, const std::string& host_file,
                                        const Environment& environment, const Environment& job) {
  std::vector<std::string> command = {machine.mpirun};
  append(command, {"-n", std::to_string(ranks)});
  // The other ranks live on when one dies: they raise, clean up and write checkpoints. mpirun then
  // returns 0 whatever happened; the agents tell the truth.
  append(command, {"--enable-recovery", "--oversubscribe", "--bind-to", "none"});
  if (!host_file.empty()) append(command, {"--hostfile", host_file});
  if (options.nodes > 0) {
    append(command,
           {"--map-by",
            "ppr:" + std::to_string((ranks + options.nodes - 1) / options.nodes) + ":node"});
  }
  const auto parameter = [&](const std::string& name, const std::string& value) {
    append(command, {"--mca", name, value});
  };
  // MPI's TCP listens on every interface, without a token: where ranks share a machine they do
  // without. (mpirun's own channel listens there, too, and has no parameter for that.)
  const bool shares = options.transport == Transport::kShared ||
                      (options.transport == Transport::kAuto && options.hosts.size() <= 1);
  if (shares || options.transport == Transport::kTcp) {
    parameter("pml", "ob1");  // the others choose their own transport
    parameter("btl", shares ? "vader,self" : "tcp,self");
  }
  if (!options.interface.empty()) {
    parameter("btl_tcp_if_include", options.interface);
    parameter("oob_tcp_if_include", options.interface);
  }
  if (!machine.reads_other_processes) parameter("btl_vader_single_copy_mechanism", "none");
  const int local = densest(options, ranks);
  if (!machine.segments.empty()) {
    parameter("btl_vader_backing_directory", machine.segments);
  } else if (needs_files(options, machine, ranks)) {
    parameter("btl_vader_backing_directory", machine.temporary);
  }
  if (local > machine.cores) parameter("mpi_yield_when_idle", "1");
  if (!options.remote_agent.empty()) parameter("plm_rsh_agent", options.remote_agent);
  for (const auto& [name, value] : job) append(command, {"-x", name});
  for (const auto& [name, value] : environment) {
    const bool ours = name.starts_with("TESSERA_") || name.starts_with("ACCELERATE_");
    if (ours && job.find(name) == job.end()) append(command, {"-x", name});
  }
  for (const std::string& name : options.exported) append(command, {"-x", name});
  return command;
}

std::vector<std::string> srun_command(const LaunchOptions& options, int ranks) {
  std::vector<std::string> command = {"srun", "--mpi=pmix", "--ntasks=" + std::to_string(ranks)};
  if (options.nodes > 0) command.push_back("--nodes=" + std::to_string(options.nodes));
  // The other tasks live on when one ends, and output comes line by line. --overlap: the shell of
  // an interactive allocation is a step too, which holds the cores.
  append(command, {"--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--unbuffered", "--overlap",
                   "--cpu-bind=none", "--export=ALL"});
  return command;
}

}  // namespace

Machine this_machine(const Environment& environment) {
  Machine machine;
  char path[4096];
  const ssize_t size = ::readlink("/proc/self/exe", path, sizeof path);
  TS_CHECK_AS(IoError, size > 0, "tessera launch", "cannot find its own program in /proc/self/exe");
  machine.executable.assign(path, static_cast<size_t>(size));
  machine.mpirun = find_program("mpirun", environment);
  machine.root = ::geteuid() == 0;
  machine.cores = distributed::available_cores().node;
  struct statvfs status {};
  if (::statvfs("/dev/shm", &status) == 0) {
    machine.shared_memory = static_cast<int64_t>(status.f_bavail * status.f_frsize);
  }
  machine.reads_other_processes = siblings_can_read();
  const auto temporary = environment.find("TMPDIR");
  if (temporary != environment.end() && !temporary->second.empty()) {
    machine.temporary = temporary->second;
  }
  machine.in_slurm = environment.find("SLURM_JOB_ID") != environment.end() &&
                     !find_program("srun", environment).empty();
  return machine;
}

std::string segments_parent(const LaunchOptions& options, const Machine& machine, int ranks) {
  if (options.transport == Transport::kTcp || !options.hosts.empty()) return "";
  return needs_files(options, machine, ranks) ? machine.temporary : "/dev/shm";
}

Manager choose_manager(const LaunchOptions& options, const Machine& machine, int ranks) {
  if (options.hosts.empty() && machine.in_slurm && (ranks > 1 || options.nodes > 1)) {
    return Manager::kSrun;
  }
  // MPI's own words would be of slots and "ppr".
  if (options.nodes > 1) {
    const auto at = options.provenance.find("nodes");
    const std::string asked = "nodes=" + std::to_string(options.nodes) + " (" +
                              (at == options.provenance.end() ? "code" : at->second) + ")";
    TS_CHECK_AS(
        ConfigError, !options.hosts.empty(), "tessera launch", asked,
        ": the machines have to be named: give --hostfile FILE with a line for each of them "
        "(node1 slots=8), on one machine, whose tessera launch starts the ranks of all; or "
        "launch inside a Slurm allocation");
    TS_CHECK_AS(ConfigError, std::ssize(options.hosts) >= options.nodes, "tessera launch", asked,
                ": the host file ", options.host_file, " names ", options.hosts.size(),
                "; add the others to it");
  }
  if (ranks == 1 && options.hosts.empty()) return Manager::kNone;
  TS_CHECK_AS(
      ConfigError, !machine.mpirun.empty(), "tessera launch", ranks,
      " ranks need mpirun, which is not in PATH; apt install openmpi-bin libopenmpi-dev and "
      "build tessera again");
  return Manager::kMpirun;
}

Environment without_launchers(Environment environment) {
  std::erase_if(environment, [](const auto& entry) {
    const std::string_view name = entry.first;
    return std::any_of(std::begin(kLauncherPrefixes), std::end(kLauncherPrefixes),
                       [&](std::string_view prefix) { return name.starts_with(prefix); }) ||
           std::find(std::begin(kAgentVariables), std::end(kAgentVariables), name) !=
               std::end(kAgentVariables);
  });
  return environment;
}

ManagerCommand manager_command(Manager manager, const LaunchOptions& options,
                               const Machine& machine, int ranks, const std::string& host_file,
                               const Environment& environment, const Environment& job) {
  ManagerCommand result;
  result.environment = without_launchers(environment);
  if (manager == Manager::kMpirun) {
    result.command = mpirun_command(options, machine, ranks, host_file, result.environment, job);
    if (machine.root) {  // in containers everything is root's
      result.environment["OMPI_ALLOW_RUN_AS_ROOT"] = "1";
      result.environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1";
    }
  } else if (manager == Manager::kSrun) {
    result.command = srun_command(options, ranks);
  }
  for (const auto& [name, value] : job) result.environment[name] = value;
  const std::vector<std::string> agent = agent_command(options, machine);
  result.command.insert(result.command.end(), agent.begin(), agent.end());
  return result;
}

std::string printable(const std::vector<std::string>& command) {
  std::string text;
  for (const std::string& word : command) {
    if (!text.empty()) text += ' ';
    const bool plain = !word.empty() && word.find_first_not_of(
                                            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                            "0123456789@%+=:,./_-") == std::string::npos;
    if (plain) {
      text += word;
      continue;
    }
    text += '\'';
    for (const char letter : word) {
      if (letter == '\'') {
        text += "'\\''";
      } else {
        text += letter;
      }
    }
    text += '\'';
  }
  return text;
}

}  // namespace tessera::launch
