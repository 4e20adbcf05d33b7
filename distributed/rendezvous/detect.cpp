#include <tessera/distributed/rendezvous/detect.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include <sched.h>
#include <unistd.h>

#include <tessera/core/cpu_quota.h>

namespace tessera::distributed {
namespace {

constexpr std::string_view kLaunchEnvironment = "launch environment";

const std::string* find(const Environment& environment, std::string_view name) {
  const auto at = environment.find(name);
  return at == environment.end() || at->second.empty() ? nullptr : &at->second;
}

int parse_number(std::string_view name, std::string_view text, int least) {
  int number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, problem] = std::from_chars(text.data(), last, number);
  TS_CHECK_AS(ConfigError, problem == std::errc() && end == last && number >= least,
              kLaunchEnvironment, name, " has to be a whole number of at least ", least,
              "; it is \"", text, "\"; unset it or start through tessera launch");
  return number;
}

// A number that a variable may give.
std::optional<int> number(const Environment& environment, std::string_view name, int least = 0) {
  const std::string* text = find(environment, name);
  if (text == nullptr) return std::nullopt;
  return parse_number(name, *text, least);
}

// A number that a set of variables has to give.
int required(const Environment& environment, std::string_view name, std::string_view set,
             int least = 0) {
  const std::string* text = find(environment, name);
  TS_CHECK_AS(ConfigError, text != nullptr, kLaunchEnvironment, set, " is set but ", name,
              " is not; both come from one launcher, so a variable was lost or left over; unset ",
              set, " to run one process");
  return parse_number(name, *text, least);
}

void check_agree(const Environment& environment, std::string_view a, std::string_view b) {
  const std::optional<int> first = number(environment, a);
  const std::optional<int> second = number(environment, b);
  TS_CHECK_AS(ConfigError, !first || !second || *first == *second, kLaunchEnvironment, a, "=",
              first.value_or(0), " contradicts ", b, "=", second.value_or(0),
              "; two launchers are active at once: start the program by one of them, or unset the "
              "variables of the other");
}

void check_range(std::string_view what, int index, std::string_view of, int count) {
  TS_CHECK_AS(ConfigError, index < count, kLaunchEnvironment, what, " ", index, " is outside ", of,
              " ", count, "; the variables do not come from one launcher");
}

LaunchInfo from_mpi(const Environment& environment) {
  LaunchInfo info;
  info.launcher = Launcher::kMpi;
  constexpr std::string_view kSet = "OMPI_COMM_WORLD_RANK";
  check_agree(environment, kSet, "PMIX_RANK");
  info.rank = required(environment, kSet, kSet);
  info.world_size = required(environment, "OMPI_COMM_WORLD_SIZE", kSet, 1);
  info.local_rank = required(environment, "OMPI_COMM_WORLD_LOCAL_RANK", kSet);
  info.local_world_size = required(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", kSet, 1);
  info.nodes = info.local_world_size == info.world_size ? 1 : 0;
  return info;
}

// Ranks on node `node` of a SLURM_TASKS_PER_NODE such as "4(x2),3".
int slurm_tasks_on(std::string_view list, int node) {
  constexpr std::string_view kName = "SLURM_STEP_TASKS_PER_NODE";
  int first = 0;
  while (!list.empty()) {
    const std::string_view item = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), item.size() + 1));
    const size_t open = item.find("(x");
    const int tasks = parse_number(kName, item.substr(0, open), 1);
    int repeat = 1;
    if (open != std::string_view::npos) {
      const size_t close = item.find(')', open);
      TS_CHECK_AS(ConfigError, close != std::string_view::npos, kLaunchEnvironment, kName,
                  " item \"", item, "\" has no closing bracket");
      repeat = parse_number(kName, item.substr(open + 2, close - open - 2), 1);
    }
    if (node < first + repeat) return tasks;
    first += repeat;
  }
  TS_THROW(ConfigError, kLaunchEnvironment, kName, " names ", first, " nodes; this is node ", node);
}

LaunchInfo from_slurm(const Environment& environment) {
  LaunchInfo info;
  info.launcher = Launcher::kSlurm;
  constexpr std::string_view kSet = "SLURM_STEP_ID";
  check_agree(environment, "SLURM_PROCID", "PMIX_RANK");
  check_agree(environment, "SLURM_PROCID", "PMI_RANK");
  info.rank = required(environment, "SLURM_PROCID", kSet);
  const std::optional<int> step_tasks = number(environment, "SLURM_STEP_NUM_TASKS", 1);
  info.world_size = step_tasks ? *step_tasks : required(environment, "SLURM_NTASKS", kSet, 1);
  info.local_rank = required(environment, "SLURM_LOCALID", kSet);
  info.node = required(environment, "SLURM_NODEID", kSet);
  const std::optional<int> step_nodes = number(environment, "SLURM_STEP_NUM_NODES", 1);
  info.nodes = step_nodes ? *step_nodes : required(environment, "SLURM_NNODES", kSet, 1);
  const std::string* tasks = find(environment, "SLURM_STEP_TASKS_PER_NODE");
  if (tasks == nullptr) tasks = find(environment, "SLURM_TASKS_PER_NODE");
  TS_CHECK_AS(ConfigError, tasks != nullptr, kLaunchEnvironment, kSet,
              " is set but SLURM_STEP_TASKS_PER_NODE is not; start the program with srun");
  info.local_world_size = slurm_tasks_on(*tasks, info.node);
  check_range("SLURM_NODEID", info.node, "SLURM_STEP_NUM_NODES", info.nodes);
  return info;
}

LaunchInfo from_torchrun(const Environment& environment) {
  LaunchInfo info;
  info.launcher = Launcher::kTorchrun;
  info.rank = required(environment, "RANK", "RANK");
  info.world_size = required(environment, "WORLD_SIZE", "RANK", 1);
  info.local_rank = required(environment, "LOCAL_RANK", "RANK");
  info.local_world_size = required(environment, "LOCAL_WORLD_SIZE", "RANK", 1);
  info.node = number(environment, "GROUP_RANK").value_or(info.rank / info.local_world_size);
  info.nodes = number(environment, "GROUP_WORLD_SIZE", 1)
                   .value_or((info.world_size + info.local_world_size - 1) / info.local_world_size);
  info.restart_count = number(environment, "TORCHELASTIC_RESTART_COUNT").value_or(0);
  return info;
}

// All variables by which torchrun tells a process who it is. RANK or WORLD_SIZE alone are common
// names, which other programs set for purposes of their own.
bool has_torchrun_set(const Environment& environment) {
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    if (find(environment, name) == nullptr) return false;
  }
  return true;
}

bool has_pmi(const Environment& environment) {
  return find(environment, "PMIX_RANK") != nullptr || find(environment, "PMI_RANK") != nullptr;
}

LaunchInfo from_source(const Environment& environment) {
  if (find(environment, "OMPI_COMM_WORLD_RANK") != nullptr) return from_mpi(environment);
  // A shell inside an allocation has a step too, of one task.
  if (find(environment, "SLURM_STEP_ID") != nullptr &&
      find(environment, "SLURM_PROCID") != nullptr) {
    if (has_pmi(environment)) return from_slurm(environment);
    const int tasks = number(environment, "SLURM_STEP_NUM_TASKS").value_or(1);
    TS_CHECK_AS(ConfigError, tasks == 1 || has_torchrun_set(environment), kLaunchEnvironment,
                "this srun step has ", tasks,
                " tasks but no PMI, through which they would find each other; use srun "
                "--mpi=pmix, or tessera launch");
  }
  if (has_torchrun_set(environment)) return from_torchrun(environment);
  return {};
}

void read_launcher_settings(const Environment& environment, LaunchInfo& info) {
  const std::string* store = find(environment, "TESSERA_STORE");
  info.under_tessera = store != nullptr;
  if (store != nullptr) {
    const size_t colon = store->rfind(':');
    TS_CHECK_AS(ConfigError, colon != std::string::npos, kLaunchEnvironment,
                "TESSERA_STORE has to be HOST:PORT; it is \"", *store, "\"");
    StoreAddress address;
    address.host = store->substr(0, colon);
    address.port =
        parse_number("the port of TESSERA_STORE", std::string_view(*store).substr(colon + 1), 1);
    if (const std::string* token = find(environment, "TESSERA_STORE_TOKEN")) address.token = *token;
    info.store = address;
  }
  const std::pair<const char*, std::optional<Milliseconds>*> times[] = {
      {"TESSERA_COLLECTIVE_TIMEOUT", &info.collective_timeout},
      {"TESSERA_INIT_TIMEOUT", &info.init_timeout},
      {"TESSERA_FIRST_STEP_TIMEOUT", &info.first_step_timeout},
      {"TESSERA_SAVE_TIMEOUT", &info.save_timeout},
      {"TESSERA_GRACE", &info.grace},
      {"TESSERA_WAIT_WARNING", &info.wait_warning}};
  for (const auto& [name, time] : times) {
    if (const std::string* text = find(environment, name)) *time = parse_seconds(name, *text);
  }
  if (const std::string* text = find(environment, "TESSERA_TRANSPORT")) info.transport = *text;
  if (const std::string* text = find(environment, "TESSERA_NODE_OF_RANK")) info.node_groups = *text;
  if (const auto nodes = number(environment, "TESSERA_NODES", 1)) info.nodes = *nodes;
  if (const auto node = number(environment, "TESSERA_NODE")) info.node = *node;
  if (const auto count = number(environment, "TESSERA_RESTART_COUNT")) info.restart_count = *count;
  // The agent's own numbers: of fake or shared nodes it knows better than the process manager.
  if (const auto local = number(environment, "TESSERA_LOCAL_RANK")) info.local_rank = *local;
  if (const auto size = number(environment, "TESSERA_LOCAL_WORLD_SIZE", 1)) {
    info.local_world_size = *size;
  }
}

int thread_share(const Environment& environment, const LaunchInfo& info, Cores cores) {
  if (info.launcher == Launcher::kSlurm) {
    if (const auto cpus = number(environment, "SLURM_CPUS_PER_TASK", 1)) return *cpus;
  }
  // A rank that mpirun bound has its own mask, which it may still share with some (a socket).
  const bool bound = find(environment, "OMPI_MCA_orte_bound_at_launch") != nullptr;
  const int share = bound ? std::min(cores.allowed, cores.node / info.local_world_size)
                          : cores.allowed / info.local_world_size;
  return std::max(1, share);
}

}  // namespace

std::string_view launcher_name(Launcher launcher) {
  switch (launcher) {
    case Launcher::kMpi:
      return "mpirun";
    case Launcher::kSlurm:
      return "srun";
    case Launcher::kTorchrun:
      return "torchrun";
    case Launcher::kSingle:
      break;
  }
  return "none";
}

Environment process_environment() {
  Environment environment;
  for (char** at = ::environ; at != nullptr && *at != nullptr; ++at) {
    const std::string_view entry = *at;
    const size_t equals = entry.find('=');
    if (equals == std::string_view::npos) continue;
    environment.emplace(entry.substr(0, equals), entry.substr(equals + 1));
  }
  return environment;
}

Cores available_cores() {
  Cores cores;
  cores.node = static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  // Containers limit time instead of cores.
  const double quota = std::ceil(cpu_quota().value_or(cores.node));
  cores.node = static_cast<int>(std::clamp<double>(quota, 1, cores.node));
  cpu_set_t set;
  CPU_ZERO(&set);
  cores.allowed = cores.node;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) {
    cores.allowed = std::clamp(CPU_COUNT(&set), 1, cores.node);
  }
  return cores;
}

Milliseconds parse_seconds(std::string_view name, std::string_view text) {
  double seconds = 0;
  const char* const last = text.data() + text.size();
  const auto [end, problem] = std::from_chars(text.data(), last, seconds);
  TS_CHECK_AS(ConfigError, problem == std::errc() && end == last && seconds > 0 && seconds <= 1e9,
              kLaunchEnvironment, name, " has to be a number of seconds above 0; it is \"", text,
              "\"");
  return Milliseconds(std::max<int64_t>(1, std::llround(seconds * 1000)));
}

LaunchInfo detect(const Environment& environment, Cores cores) {
  check_agree(environment, "TESSERA_RANK", "OMPI_COMM_WORLD_RANK");
  check_agree(environment, "TESSERA_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE");
  LaunchInfo info = from_source(environment);
  read_launcher_settings(environment, info);
  TS_CHECK_AS(ConfigError,
              !info.under_tessera || info.launcher != Launcher::kSingle ||
                  number(environment, "TESSERA_WORLD_SIZE").value_or(1) == 1,
              kLaunchEnvironment,
              "TESSERA_STORE is set but there is no process manager's rank "
              "(OMPI_COMM_WORLD_RANK, SLURM_PROCID); the program cleared its environment");
  check_range("rank", info.rank, "world size", info.world_size);
  check_range("local rank", info.local_rank, "local world size", info.local_world_size);
  check_range("local world size", info.local_world_size - 1, "world size", info.world_size);
  info.threads = number(environment, "TESSERA_NUM_THREADS", 1)
                     .value_or(thread_share(environment, info, cores));
  return info;
}

LaunchInfo detect() { return detect(process_environment(), available_cores()); }

}  // namespace tessera::distributed
