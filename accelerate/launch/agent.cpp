#include <tessera/accelerate/launch/agent.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <optional>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tessera/accelerate/launch/protocol.h>
#include <tessera/accelerate/launch/siblings.h>
#include <tessera/accelerate/launch/store_lines.h>
#include <tessera/core/error.h>
#include <tessera/core/thread.h>

namespace tessera::launch {
namespace {

using distributed::Clock;
using distributed::LaunchInfo;
using distributed::StoreChanges;
using distributed::StoreEntry;
using distributed::TcpStore;

// After the program's end its own children may hold the pipes open.
constexpr Milliseconds kDrainTime{500};

std::string key(std::string_view part, int rank) {
  return "job/" + std::string(part) + "/" + std::to_string(rank);
}

Environment rank_environment(Environment environment, const LaunchInfo& info, const Layout& layout,
                             distributed::Cores cores) {
  const auto rank = static_cast<size_t>(info.rank);
  const int local_size = layout.local_world_size(info.rank);
  environment["TESSERA_RANK"] = std::to_string(info.rank);
  environment["TESSERA_WORLD_SIZE"] = std::to_string(info.world_size);
  environment["TESSERA_LOCAL_RANK"] = std::to_string(layout.local_rank(info.rank));
  environment["TESSERA_LOCAL_WORLD_SIZE"] = std::to_string(local_size);
  environment["TESSERA_NODE"] = std::to_string(layout.node_of_rank.at(rank));
  environment["TESSERA_NODES"] = std::to_string(layout.nodes);
  environment["TESSERA_NODE_OF_RANK"] = layout.text();
  for (const char* name : {"TESSERA_RANK_OUTPUT", "TESSERA_RANK_ERRORS"}) environment.erase(name);
  // What was asked for, else what a rank's share of the cores is; idle threads sleep.
  const int threads = std::max(1, cores.allowed / local_size);
  environment.emplace("TESSERA_NUM_THREADS", std::to_string(threads));
  environment.emplace("OMP_NUM_THREADS", environment["TESSERA_NUM_THREADS"]);
  environment.emplace("OMP_WAIT_POLICY", "passive");
  return environment;
}

// Where a stream of the program goes: into the launcher's pipe if that is on this machine, through the
// store if `variable` says so, else to what this process has from the process manager.
class LineTarget {
 public:
  LineTarget(const Environment& environment, const char* variable, int standard,
             const std::shared_ptr<TcpStore>& store, int rank) {
    const auto path = environment.find(variable);
    const bool given = path != environment.end();
    if (given && path->second == kThroughStore) {
      sender_.emplace(store, rank, standard == STDOUT_FILENO ? "out" : "error");
      return;
    }
    if (given) file_ = FileDescriptor(::open(path->second.c_str(), O_WRONLY | O_CLOEXEC));
    if (!file_) file_ = FileDescriptor(::fcntl(standard, F_DUPFD_CLOEXEC, 0));
    shared_ = given;
  }

  void write(std::string_view lines) {
    if (sender_) {
      sender_->send(lines);
      return;
    }
    // Agents of other ranks write to it too: each write holds its lock, so lines do not mix.
    const bool locked = shared_ && ::flock(file_.get(), LOCK_EX) == 0;
    write_all(file_.get(), lines);
    if (locked) ::flock(file_.get(), LOCK_UN);
  }

 private:
  std::optional<LineSender> sender_;
  FileDescriptor file_;
  bool shared_ = false;
};

// The running program of this rank.
class RankProcess {
 public:
  RankProcess(const SpawnOptions& options, const std::string& prefix,
              const Environment& environment, const std::shared_ptr<TcpStore>& store, int rank)
      : child_(spawn(options)),
        output_target_(environment, "TESSERA_RANK_OUTPUT", STDOUT_FILENO, store, rank),
        error_target_(environment, "TESSERA_RANK_ERRORS", STDERR_FILENO, store, rank),
        output_(
            std::move(child_.output),
            [this](std::string_view lines) { output_target_.write(lines); }, prefix),
        error_(
            std::move(child_.error), [this](std::string_view lines) { error_target_.write(lines); },
            prefix) {}

  void signal_group(int number) const { ::kill(-child_.pid, number); }

  // Forwards signals and output until the program has ended and its output is written.
  ExitStatus run(const FileDescriptor& signals) {
    ExitStatus status;
    bool ended = false;
    Clock::time_point drained;
    while (!ended || ((output_.open() || error_.open()) && Clock::now() < drained)) {
      pollfd entries[3] = {{signals.get(), POLLIN, 0},
                           {output_.descriptor(), POLLIN, 0},
                           {error_.descriptor(), POLLIN, 0}};
      ::poll(entries, 3, ended ? 20 : -1);
      if (entries[1].revents != 0) output_.pump();
      if (entries[2].revents != 0) error_.pump();
      if (entries[0].revents != 0) forward_signals(signals);
      int wait_status = 0;
      if (!ended && ::waitpid(child_.pid, &wait_status, WNOHANG) == child_.pid) {
        ended = true;
        status = ExitStatus::from_wait(wait_status);
        drained = Clock::now() + kDrainTime;
      }
    }
    // What a failed rank started is not left behind: in its group, and without a parent.
    if (!status.success()) signal_group(SIGKILL);
    output_.close();
    error_.close();
    return status;
  }

 private:
  void forward_signals(const FileDescriptor& signals) {
    signalfd_siginfo info;
    while (::read(signals.get(), &info, sizeof info) == sizeof info) {
      if (info.ssi_signo != SIGCHLD) signal_group(static_cast<int>(info.ssi_signo));
    }
  }

  Child child_;
  LineTarget output_target_, error_target_;
  LinePrefixer output_;
  LinePrefixer error_;
};

// Obeys the launcher's commands on a thread of its own, for as long as the program runs.
class CommandWatch {
 public:
  CommandWatch(const LaunchInfo& info, const RankProcess& process)
      : store_(TcpStore::connect(*info.store, Milliseconds(20000))),
        grace_(info.grace.value_or(Milliseconds(30000))),
        thread_([this, &process] { watch(process); }) {}
  ~CommandWatch() {
    stopping_ = true;
    store_->interrupt();
    thread_.join();
  }

 private:
  void watch(const RankProcess& process) {
    int64_t revision = 0;
    while (!stopping_) {
      try {
        const StoreChanges changes = store_->watch("job/command/", revision, std::chrono::hours(1));
        revision = changes.revision;
        for (const StoreEntry& entry : changes.entries) {
          process.signal_group(std::stoi(entry.value));
        }
      } catch (const std::exception&) {
        if (stopping_) return;
        // The launcher is gone, and with it whoever waits for this job.
        process.signal_group(SIGTERM);
        const Clock::time_point deadline = Clock::now() + grace_;
        while (!stopping_ && Clock::now() < deadline) {
          std::this_thread::sleep_for(Milliseconds(10));
        }
        if (!stopping_) process.signal_group(SIGKILL);
        return;
      }
    }
  }

  std::shared_ptr<TcpStore> store_;
  Milliseconds grace_;
  std::atomic<bool> stopping_{false};
  Thread thread_;
};

// job/go. What this agent sees of the others of its machine meanwhile, the launcher hears.
std::string wait_for_go(TcpStore& store, const LaunchInfo& info) {
  constexpr Milliseconds kLook{100};
  Siblings siblings(info);
  int64_t revision = 0;
  bool told = false;
  while (true) {
    const StoreChanges changes =
        store.watch("job/go", revision, siblings.looks() ? kLook : std::chrono::hours(1));
    revision = changes.revision;
    for (const StoreEntry& entry : changes.entries) return entry.value;
    const std::vector<int> lost = siblings.lost();
    const bool lacks = siblings.lacks() && !told;
    if (lost.empty() && !lacks) continue;
    // An agent may end once all have come.
    if (const auto go = store.get("job/go")) return *go;
    for (const int rank : lost) store.set(key("agent", rank), "gone");
    if (lacks) store.set(key("alone", info.rank), "");
    told = told || lacks;
  }
}

int run(const AgentOptions& options) {
  const Environment environment = distributed::process_environment();
  const distributed::Cores cores = distributed::available_cores();
  const LaunchInfo info = distributed::detect(environment, cores);
  TS_CHECK_AS(ConfigError, info.store.has_value(), "tessera agent",
              "TESSERA_STORE is not set; agents are started by tessera launch");
  TS_CHECK_AS(ConfigError, !options.command.empty(), "tessera agent",
              "there is no program to start");

  const auto store = TcpStore::connect(*info.store, Milliseconds(60000));
  store->leave_will(key("agent", info.rank), "gone");
  const AgentFacts facts =
      gather_facts(info.rank, info.world_size, options.command[0], environment, cores);
  store->set(key("ready", info.rank), facts.to_text());
  const std::string go = wait_for_go(*store, info);
  if (go == kStop) {
    store->withdraw_will();
    return 0;
  }
  const Layout layout = Layout::from_text(go);

  ExitReport report;
  report.host = facts.host;
  try {
    const FileDescriptor signals = signal_descriptor();
    const std::string prefix =
        options.prefix_output && info.world_size > 1 ? "[" + std::to_string(info.rank) + "] " : "";
    RankProcess process({.command = options.command,
                         .environment = rank_environment(environment, info, layout, cores),
                         .capture = true,
                         .death_signal = SIGKILL},
                        prefix, environment, store, info.rank);
    const CommandWatch watch(info, process);
    report.status = process.run(signals);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera agent of rank %d: %s\n", info.rank, error.what());
    report.status.code = 127;
  }
  store->set(key("exit", info.rank), report.to_text());
  store->withdraw_will();
  return 0;
}

}  // namespace

int run_agent(const AgentOptions& options) {
  block_signals();
  try {
    return run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera agent: %s\n", error.what());
    return 1;
  }
}

}  // namespace tessera::launch
