#include <tessera/accelerate/launch/launcher.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tessera/accelerate/launch/process.h>
#include <tessera/accelerate/launch/segment_folder.h>
#include <tessera/accelerate/launch/store_lines.h>
#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/thread.h>
#include <tessera/distributed/transport/watchdog.h>

namespace tessera::launch {
namespace {

using distributed::Clock;
using distributed::FailureKind;
using distributed::RankFailure;
using distributed::StoreAddress;
using distributed::StoreChanges;
using distributed::StoreEntry;
using distributed::TcpStoreServer;

constexpr Milliseconds kNever{int64_t{1} << 40};
// Between the last word of the agents and mpirun's own end, and between a kill and its effect.
constexpr Milliseconds kEndTime{5000};
constexpr Milliseconds kReachTime{15000};  // for a host to answer through the remote agent

void say(const std::string& text) { std::fprintf(stderr, "tessera launch: %s\n", text.c_str()); }

std::string seconds(Milliseconds time) {
  char text[32];
  plain_snprintf(text, sizeof text, "%g", static_cast<double>(time.count()) / 1000.0);
  return text;
}

std::string list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

std::string random_token() {
  std::random_device source;
  char text[33];
  plain_snprintf(text, sizeof text, "%08x%08x%08x%08x", source(), source(), source(), source());
  return text;
}

// This machine's address on the way to `host`: that of the interface that the system would use.
std::string address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  std::string result;
  if (::getaddrinfo(host.c_str(), "9", &hints, &found) == 0) {
    const FileDescriptor socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_in own{};
    socklen_t size = sizeof own;
    char text[INET_ADDRSTRLEN];
    if (::connect(socket.get(), found->ai_addr, found->ai_addrlen) == 0 &&
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
        ::inet_ntop(AF_INET, &own.sin_addr, text, sizeof text) != nullptr) {
      result = text;
    }
    ::freeaddrinfo(found);
  }
  return result;
}

// The first address of an interface that is up, of `name` where it is given; not the loopback.
std::string interface_address(const std::string& name) {
  ifaddrs* all = nullptr;
  std::string result;
  if (::getifaddrs(&all) != 0) return result;
  for (const ifaddrs* at = all; at != nullptr && result.empty(); at = at->ifa_next) {
    if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET) continue;
    const auto& address = reinterpret_cast<const sockaddr_in*>(at->ifa_addr)->sin_addr;
    const bool loopback = (ntohl(address.s_addr) >> 24) == 127;
    char text[INET_ADDRSTRLEN];
    if ((name.empty() ? !loopback : name == at->ifa_name) &&
        ::inet_ntop(AF_INET, &address, text, sizeof text) != nullptr) {
      result = text;
    }
  }
  ::freeifaddrs(all);
  return result;
}

// Where agents on other nodes reach the store.
std::string store_host(const LaunchOptions& options, Manager manager) {
  if (!options.store_host.empty()) return options.store_host;
  if (manager == Manager::kNone || (manager == Manager::kMpirun && options.hosts.empty())) {
    return "127.0.0.1";
  }
  std::string address;
  if (!options.interface.empty()) address = interface_address(options.interface);
  for (const Host& host : options.hosts) {
    if (address.empty()) address = address_towards(host.name);
    if (address.starts_with("127.")) address.clear();
  }
  if (address.empty()) address = interface_address("");
  TS_CHECK_AS(ConfigError, !address.empty(), "tessera launch",
              "this machine has no address that other nodes could reach; give one with "
              "--store-host");
  return address;
}

// The signal that waits to end this launcher; 0: none.
int pending_stop() {
  sigset_t pending;
  ::sigpending(&pending);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    if (::sigismember(&pending, number) == 1) return number;
  }
  return 0;
}

// Whether a host of the file is the machine of this launcher.
bool is_here(const Host& host) {
  char own_name[256] = "";
  ::gethostname(own_name, sizeof own_name - 1);
  return host.name == own_name || host.name == "localhost";
}

// Hosts that do not run a command through the remote agent within kReachTime.
std::vector<std::string> unreachable_hosts(const LaunchOptions& options,
                                           const Environment& environment) {
  std::vector<std::string> agent = {"ssh", "-o", "BatchMode=yes"};
  if (!options.remote_agent.empty()) agent = {options.remote_agent};
  std::vector<std::pair<std::string, pid_t>> attempts;
  std::vector<std::string> lost;
  for (const Host& host : options.hosts) {
    if (is_here(host)) continue;
    SpawnOptions spawn_options{
        .command = agent, .environment = environment, .death_signal = SIGKILL};
    spawn_options.command.insert(spawn_options.command.end(), {host.name, "true"});
    attempts.emplace_back(host.name, spawn(spawn_options).pid);
  }
  const Clock::time_point deadline = Clock::now() + kReachTime;
  for (const auto& [name, pid] : attempts) {
    int status = 0;
    pid_t done = 0;
    while ((done = ::waitpid(pid, &status, WNOHANG)) == 0 && Clock::now() < deadline &&
           pending_stop() == 0) {
      std::this_thread::sleep_for(Milliseconds(2));
    }
    if (done == 0) {
      ::kill(-pid, SIGKILL);
      ::waitpid(pid, &status, 0);
    }
    if (done == 0 || !ExitStatus::from_wait(status).success()) lost.push_back(name);
  }
  return lost;
}

// Writes the signals that this process gets into the store: one place to wait at for everything.
class SignalThread {
 public:
  explicit SignalThread(distributed::Store& store)
      : store_(store),
        signals_(signal_descriptor()),
        stop_(::eventfd(0, EFD_CLOEXEC)),
        thread_([this] { run(); }) {}
  ~SignalThread() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t size = ::write(stop_.get(), &one, sizeof one);
    thread_.join();
  }

 private:
  void run() {
    for (int number = 0;;) {
      pollfd entries[2] = {{signals_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
      ::poll(entries, 2, -1);
      if (entries[1].revents != 0) return;
      signalfd_siginfo info;
      while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
        store_.set("job/signal/" + std::to_string(number++), std::to_string(info.ssi_signo));
      }
    }
  }

  distributed::Store& store_;
  FileDescriptor signals_;
  FileDescriptor stop_;
  Thread thread_;
};

// Writes on what the process manager says on stderr, without what Open MPI 4's PMIx says of its own
// whenever a rank ends without MPI: that it could not tell the ranks which are gone. And what
// agents say of their ranks, in pipes of this process (those of other machines through the store):
// process managers pass on pieces of any length, in which lines of several ranks mix.
class OutputRelay {
 public:
  OutputRelay() : stop_(::eventfd(0, EFD_CLOEXEC)) {
    make_pipe(out_, agents_out_);
    make_pipe(error_, agents_error_);
    for (const FileDescriptor* end : {&out_, &error_}) ::fcntl(end->get(), F_SETFL, O_NONBLOCK);
  }
  // Where the agents find the pipes.
  std::string out_path() const { return path_of(agents_out_); }
  std::string error_path() const { return path_of(agents_error_); }
  void receive_from(std::shared_ptr<distributed::Store> store) {
    receiver_.emplace(std::move(store), agents_out_.get(), agents_error_.get());
  }

  void start(FileDescriptor manager_error) {
    const auto output = [](std::string_view lines) { write_all(STDOUT_FILENO, lines); };
    const auto error = [](std::string_view lines) { write_all(STDERR_FILENO, lines); };
    lines_.emplace_back(std::move(manager_error), error, "", is_noise);
    lines_.emplace_back(std::move(out_), output, "");
    lines_.emplace_back(std::move(error_), error, "");
    thread_ = Thread([this] { run(); });
  }
  // What was written before the manager's end is written on; its orphans may hold the pipes open.
  ~OutputRelay() {
    if (!thread_.joinable()) return;
    receiver_.reset();  // its pipes are read until then
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t size = ::write(stop_.get(), &one, sizeof one);
    thread_.join();
    for (LinePrefixer& lines : lines_) {
      lines.pump();
      lines.close();
    }
  }

 private:
  static std::string path_of(const FileDescriptor& end) {
    return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(end.get());
  }
  static bool is_noise(std::string_view line) {
    return line.find("PMIX ERROR: BAD-PARAM in file") != line.npos &&
           line.find("pmix_event_notification.c") != line.npos;
  }
  void run() {
    while (true) {
      std::vector<pollfd> entries = {{stop_.get(), POLLIN, 0}};
      for (const LinePrefixer& lines : lines_) entries.push_back({lines.descriptor(), POLLIN, 0});
      ::poll(entries.data(), entries.size(), -1);
      for (size_t i = 0; i < lines_.size(); ++i) {
        if (entries[i + 1].revents != 0) lines_[i].pump();
      }
      if (entries[0].revents != 0) return;
    }
  }

  FileDescriptor out_, agents_out_, error_, agents_error_;
  std::vector<LinePrefixer> lines_;
  FileDescriptor stop_;
  Thread thread_;
  std::optional<LineReceiver> receiver_;
};

std::vector<pid_t> children() {
  const std::string own = std::to_string(::getpid());
  std::vector<pid_t> result;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0) continue;
    PlainText<std::ifstream> file(entry.path() / "stat");
    std::string stat;
    std::getline(file, stat);
    // pid (name) state parent ...; a name may have spaces and brackets.
    PlainText<std::istringstream> rest(stat.substr(std::min(stat.rfind(')') + 1, stat.size())));
    std::string state, parent;
    rest >> state >> parent;
    if (parent == own) result.push_back(pid);
  }
  return result;
}

// Kills what the process manager left when it ended: as its reaper this process has become the
// parent. One that is killed may leave children of its own. Those that were there `before` are
// somebody else's: of a shell script that ended in `exec tessera launch`, say.
void kill_orphans(const std::vector<pid_t>& before) {
  for (bool found = true; found;) {
    found = false;
    for (const pid_t pid : children()) {
      if (std::ranges::find(before, pid) != before.end()) continue;
      found = true;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
}

struct TemporaryFile {
  std::string path;
  TemporaryFile() = default;
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (!path.empty()) ::unlink(path.c_str());
  }
  void write(const std::string& folder, const std::string& text) {
    path = folder + "/tessera-hosts-XXXXXX";
    const FileDescriptor file(::mkstemp(path.data()));
    TS_CHECK_AS(
        IoError,
        file && ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()),
        "tessera launch", "cannot write a host file to ", folder);
  }
};

// One run of the job.
class Attempt {
 public:
  Attempt(const LaunchOptions& options, const Machine& machine, const Environment& environment,
          const std::vector<pid_t>& children_before, int number)
      : options_(options),
        machine_(machine),
        environment_(environment),
        children_before_(children_before),
        number_(number),
        ranks_(ranks_of_attempt(options, number)),
        record_(ranks_),
        facts_(static_cast<size_t>(ranks_)) {}

  int run();
  bool interrupted() const { return interrupted_; }

 private:
  Milliseconds now() const {
    return std::chrono::duration_cast<Milliseconds>(Clock::now() - start_);
  }
  void start_manager();
  void take(const StoreEntry& entry);
  void take_ready(int rank, const std::string& text);
  void take_signal(int number);
  std::vector<int> missing() const;
  void tell_news();
  bool is_news(const RankFailure& failure) const;
  void check_deadlines();
  void take_wait(int rank, const std::string& text);
  void say_positions();
  void command(int signal);
  void kill_job();
  void end_manager();
  Milliseconds next_deadline() const;
  bool over() const { return record_.all_exited() || refused_ || manager_lost_; }
  int conclude();

  const LaunchOptions& options_;
  const Machine& machine_;
  const Environment& environment_;
  const std::vector<pid_t>& children_before_;
  const int number_;
  const int ranks_;
  JobRecord record_;
  std::vector<std::optional<AgentFacts>> facts_;
  size_t ready_ = 0;
  Clock::time_point start_ = Clock::now();
  std::unique_ptr<TcpStoreServer> server_;
  TemporaryFile host_file_;
  Child manager_;
  std::optional<OutputRelay> output_;
  std::optional<ExitStatus> manager_status_;
  Milliseconds manager_end_{0};
  std::optional<Milliseconds> kill_at_;  // after a failure or an interruption
  std::optional<Milliseconds> killed_at_;
  std::optional<Milliseconds> waited_at_;  // the last report of a rank that waits
  int commands_ = 0;
  bool interrupted_ = false;
  int interruption_ = 0;       // the signal
  bool refused_ = false;       // it cannot start
  bool manager_lost_ = false;  // mpirun ended without its agents' reports
  bool timed_out_ = false;
};

void Attempt::start_manager() {
  const Manager manager = choose_manager(options_, machine_, ranks_);
  const bool one_machine = store_host(options_, manager) == "127.0.0.1";
  const StoreAddress address{one_machine ? "127.0.0.1" : "0.0.0.0", options_.store_port,
                             random_token()};
  server_ = std::make_unique<TcpStoreServer>(address);
  Environment job = {
      {"TESSERA_STORE", store_host(options_, manager) + ":" + std::to_string(server_->port())},
      {"TESSERA_STORE_TOKEN", address.token},
      {"TESSERA_RESTART_COUNT", std::to_string(number_)},
      {"TESSERA_COLLECTIVE_TIMEOUT", seconds(options_.collective_timeout)},
      {"TESSERA_INIT_TIMEOUT", seconds(options_.init_timeout)},
      {"TESSERA_GRACE", seconds(options_.grace)},
      {"TESSERA_WAIT_WARNING", seconds(options_.wait_warning)},
  };
  if (options_.first_step_timeout) {
    job["TESSERA_FIRST_STEP_TIMEOUT"] = seconds(*options_.first_step_timeout);
  }
  if (options_.save_timeout) job["TESSERA_SAVE_TIMEOUT"] = seconds(*options_.save_timeout);
  if (!options_.dump_dir.empty()) job["TESSERA_DUMP_DIR"] = options_.dump_dir;
  if (options_.threads > 0) job["TESSERA_NUM_THREADS"] = std::to_string(options_.threads);
  if (options_.transport != Transport::kAuto) {
    job["TESSERA_TRANSPORT"] = options_.transport == Transport::kTcp ? "tcp" : "shared";
  }
  job.merge(settings_for_ranks(options_, job));
  if (manager == Manager::kMpirun && !options_.hosts.empty()) {
    host_file_.write(machine_.temporary, format_hosts(options_.hosts));
  }
  if (manager != Manager::kNone) {
    output_.emplace();
    const bool here = manager == Manager::kMpirun && std::ranges::all_of(options_.hosts, is_here);
    const std::string through_store(kThroughStore);
    job["TESSERA_RANK_OUTPUT"] = here ? output_->out_path() : through_store;
    job["TESSERA_RANK_ERRORS"] = here ? output_->error_path() : through_store;
    if (!here) output_->receive_from(server_->store());
  }
  const ManagerCommand command =
      manager_command(manager, options_, machine_, ranks_, host_file_.path, environment_, job);
  // Its input is rank 0's; without a process manager its output is the rank's.
  manager_ = spawn({.command = command.command,
                    .environment = command.environment,
                    .capture_error = manager != Manager::kNone,
                    .death_signal = SIGTERM});
  if (output_) output_->start(std::move(manager_.error));
}

void Attempt::command(int signal) {
  server_->store()->set("job/command/" + std::to_string(commands_++), std::to_string(signal));
}

void Attempt::take_ready(int rank, const std::string& text) {
  AgentFacts facts = AgentFacts::from_text(text);
  facts.received = wall_clock();
  TS_CHECK_AS(DistributedError, facts.world_size == ranks_, "tessera launch", "rank ", rank,
              " sees ", facts.world_size, " ranks where ", ranks_,
              " were asked for; mpirun and the MPI library differ");
  ready_ += facts_[static_cast<size_t>(rank)] ? 0 : 1;
  facts_[static_cast<size_t>(rank)] = std::move(facts);
  if (ready_ < facts_.size()) return;
  std::vector<AgentFacts> all;
  for (const auto& fact : facts_) all.push_back(*fact);
  const PreflightResult result = preflight(all);
  for (const std::string& warning : result.warnings) say("warning: " + warning);
  for (const std::string& error : result.errors) say("cannot start: " + error);
  if (result.errors.empty()) {
    server_->store()->set("job/go", lay_out(all).text());
  } else {
    refused_ = true;
  }
}

void Attempt::take_signal(int number) {
  if (number == SIGCHLD) {
    int status = 0;
    if (!manager_status_ && ::waitpid(manager_.pid, &status, WNOHANG) == manager_.pid) {
      manager_status_ = ExitStatus::from_wait(status);
      manager_end_ = now();
    }
    return;
  }
  if (number == SIGINT || number == SIGTERM || number == SIGHUP) {
    if (interrupted_) {  // asked twice
      kill_job();
      return;
    }
    interrupted_ = true;
    interruption_ = number;
    if (ready_ < facts_.size()) {  // no rank has begun
      say(std::string(::strsignal(number)) + ": the job does not start");
      refused_ = true;
      return;
    }
    if (!kill_at_) kill_at_ = now() + options_.grace;
    say(std::string(::strsignal(number)) + ": passed on to the ranks, which are killed after " +
        seconds(options_.grace) + " s");
  }
  command(number);
}

void Attempt::take(const StoreEntry& entry) {
  // job/PART/NUMBER
  const size_t slash = entry.key.find('/', 4);
  if (slash == std::string::npos) return;  // job/go
  const std::string part = entry.key.substr(4, slash - 4);
  const int rank = std::atoi(entry.key.c_str() + slash + 1);
  if (part == "signal") {
    take_signal(std::stoi(entry.value));
    return;
  }
  if (rank < 0 || rank >= ranks_) return;
  if (part == "waiting") {
    take_wait(rank, entry.value);
  } else if (part == "ready") {
    take_ready(rank, entry.value);
  } else if (part == "alone") {
    if (ready_ == facts_.size() || refused_) return;
    const auto& facts = facts_[static_cast<size_t>(rank)];
    say("cannot start: " + (facts ? facts->host : std::string("a machine")) +
        " lacks an agent, which ended before it reported; not there: " + list(missing()));
    refused_ = true;
  } else if (part == "joined") {
    record_.joined(rank, now());
  } else if (part == "left") {
    record_.left(rank);
  } else if (part == "failure") {
    RankFailure failure = RankFailure::from_text(entry.value);
    failure.rank = rank;  // whose key it is
    record_.failed(failure, now());
  } else if (part == "exit") {
    record_.exited(rank, ExitReport::from_text(entry.value), now());
  } else if (part == "agent") {
    ExitReport lost;
    lost.status.signal = SIGKILL;
    const auto& facts = facts_[static_cast<size_t>(rank)];
    if (facts) lost.host = facts->host;
    RankFailure failure;
    failure.rank = rank;
    failure.kind = FailureKind::kLost;
    failure.code = 128 + SIGKILL;
    failure.host = lost.host;
    failure.message = "lost its agent (killed, or its machine is gone)";
    record_.failed(failure, now());
    record_.exited(rank, lost, now());
    if (ready_ < facts_.size() && !refused_) {  // the others would wait for it
      say("cannot start: the agent of rank " + std::to_string(rank) + " is gone");
      refused_ = true;
    }
  }
}

// Ranks whose agents have not reported.
std::vector<int> Attempt::missing() const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < facts_.size(); ++rank) {
    if (!facts_[rank]) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

// Once for the many ranks that wait for the same one.
void Attempt::take_wait(int rank, const std::string& text) {
  if (killed_at_ || (waited_at_ && now() < *waited_at_ + options_.wait_warning)) return;
  waited_at_ = now();
  say("warning: rank " + std::to_string(rank) + " waits for other ranks for " + text +
      "; the job goes on until --collective-timeout");
  say_positions();
}

// The last call of each rank that is in the job, on each of its channels: see watchdog.h.
void Attempt::say_positions() {
  std::vector<int> joined;
  for (const int rank : record_.running()) {
    if (server_->store()->get("job/joined/" + std::to_string(rank))) joined.push_back(rank);
  }
  const auto positions =
      distributed::describe_positions(*server_->store(), joined, Milliseconds(1000));
  for (const std::string& line : positions) say("  " + line);
}

// Ranks hear of failures that the launcher found; the user of all first hand.
void Attempt::tell_news() {
  for (const RankFailure& failure : record_.take_news()) {
    server_->store()->compare_set("job/failure/" + std::to_string(failure.rank), std::nullopt,
                                  failure.to_text());
    if (is_news(failure)) say(failure.describe());
    if (!kill_at_) kill_at_ = now() + options_.grace;
  }
}

// A rank that has thrown has said so itself, and who was asked to end and did has done as told.
bool Attempt::is_news(const RankFailure& failure) const {
  const bool as_told =
      interrupted_ && failure.kind == FailureKind::kSignal && failure.code == 128 + interruption_;
  return !killed_at_ && !as_told && failure.kind != FailureKind::kConsequence &&
         failure.kind != FailureKind::kError;
}

void Attempt::kill_job() {
  if (killed_at_) return;
  killed_at_ = now();
  record_.killing();
  command(SIGKILL);
}

void Attempt::check_deadlines() {
  const Milliseconds time = now();
  if (ready_ < facts_.size() && time >= options_.start_timeout && !refused_) {
    say("cannot start: the agents of " + list(missing()) + " did not report within " +
        seconds(options_.start_timeout) +
        " s; check that their nodes reach this one (--store-host, --interface, firewalls)");
    refused_ = true;
    return;
  }
  if (options_.job_timeout && time >= *options_.job_timeout && !killed_at_) {
    say("the job did not end within " + seconds(*options_.job_timeout) + " s (--job-timeout); " +
        list(record_.running()) + " killed");
    if (ready_ == facts_.size()) say_positions();
    timed_out_ = true;
    kill_job();
  }
  if (kill_at_ && time >= *kill_at_ && !killed_at_) {
    say(list(record_.running()) + " killed: still running " + seconds(options_.grace) +
        " s after the first failure (--grace)");
    kill_job();
  }
  if (killed_at_ && time >= *killed_at_ + kEndTime) manager_lost_ = true;
  // The agents' last words are on their way when it ends.
  if (manager_status_ && time >= manager_end_ + Milliseconds(1000) && !over()) {
    say("the process manager " + manager_status_->describe() + " without a word of " +
        list(record_.running()) + "; see its output above");
    manager_lost_ = true;
  }
}

Milliseconds Attempt::next_deadline() const {
  Milliseconds next = kNever;
  if (ready_ < facts_.size()) next = std::min(next, options_.start_timeout);
  if (options_.job_timeout && !killed_at_) next = std::min(next, *options_.job_timeout);
  if (kill_at_ && !killed_at_) next = std::min(next, *kill_at_);
  if (killed_at_) next = std::min(next, *killed_at_ + kEndTime);
  if (manager_status_) next = std::min(next, manager_end_ + Milliseconds(1000));
  return next;
}

// Waits for mpirun; what does not end by itself is killed.
void Attempt::end_manager() {
  if (refused_) server_->store()->set("job/go", kStop);
  if (refused_ ? interrupted_ : !record_.all_exited()) ::kill(manager_.pid, SIGTERM);
  const Clock::time_point deadline = Clock::now() + kEndTime;
  int status = 0;
  while (!manager_status_) {
    if (::waitpid(manager_.pid, &status, WNOHANG) == manager_.pid) {
      manager_status_ = ExitStatus::from_wait(status);
    } else if (Clock::now() >= deadline) {
      ::kill(-manager_.pid, SIGKILL);
      ::waitpid(manager_.pid, &status, 0);
      manager_status_ = ExitStatus::from_wait(status);
    } else {
      std::this_thread::sleep_for(Milliseconds(2));
    }
  }
  if (interrupted_ || refused_ || killed_at_ || manager_lost_) kill_orphans(children_before_);
  output_.reset();  // what it still had to say comes before the conclusion
}

int Attempt::conclude() {
  if (refused_) return interrupted_ ? 128 + interruption_ : 1;
  if (timed_out_) return kTimeoutCode;
  const auto cause = record_.first_cause();
  if (!cause) return manager_lost_ ? std::max(1, manager_status_->shell_code()) : 0;
  const int code = record_.exit_code(), told = 128 + interruption_;
  // Who did not end as it was told was killed for it: that is no cause.
  if (interrupted_ && (code == told || cause->kind == FailureKind::kConsequence)) {
    say("ended by the signal; exit code " + std::to_string(told));
    return told;
  }
  say("the job failed; first cause: " + cause->describe() + "; exit code " + std::to_string(code));
  return code;
}

int Attempt::run() {
  start_manager();
  {
    const SignalThread signals(*server_->store());
    int64_t revision = 0;
    while (!over()) {
      const Milliseconds left = std::clamp(next_deadline() - now(), Milliseconds(0), kNever);
      const StoreChanges changes = server_->store()->watch("job/", revision, left);
      revision = changes.revision;
      for (const StoreEntry& entry : changes.entries) take(entry);
      tell_news();
      check_deadlines();
    }
  }
  end_manager();
  return conclude();
}

}  // namespace

int run_launcher(const LaunchOptions& given) {
  block_signals();
  sigset_t pipe;  // a job goes on where nobody reads its output any more
  ::sigemptyset(&pipe);
  ::sigaddset(&pipe, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // see kill_orphans()
  const std::vector<pid_t> children_before = children();
  const Environment environment = distributed::process_environment();
  Machine machine = this_machine(environment);
  const std::string parent = segments_parent(given, machine, given.ranks);
  remove_left_segments(parent);
  const SegmentFolder segments(given.ranks > 1 ? parent : "");
  machine.segments = segments.path();
  LaunchOptions options = given;
  for (int number = 0;; ++number) {
    if (number > 0 && !options.host_file.empty()) options.hosts = read_host_file(options.host_file);
    const std::vector<std::string> lost = unreachable_hosts(options, environment);
    if (const int number = pending_stop()) {
      say(std::string(::strsignal(number)) + ": the job does not start");
      return 128 + number;
    }
    if (!lost.empty()) {
      std::string names;
      for (const std::string& name : lost) names += (names.empty() ? "" : ", ") + name;
      TS_THROW(ConfigError, "tessera launch", "no command runs on ", names, " through ",
               options.remote_agent.empty() ? "ssh" : options.remote_agent,
               "; check names and keys, or take them out of ", options.host_file);
    }
    const int ranks = ranks_of_attempt(options, number);
    if (!options.hosts.empty()) check_slots(options.hosts, ranks, options.oversubscribe);
    Attempt attempt(options, machine, environment, children_before, number);
    const int code = attempt.run();
    if (code == 0 || attempt.interrupted() || number >= options.restarts) return code;
    say("starting again with " + std::to_string(ranks_of_attempt(options, number + 1)) +
        " ranks (restart " + std::to_string(number + 1) + " of " +
        std::to_string(options.restarts) + ")");
  }
}

}  // namespace tessera::launch
