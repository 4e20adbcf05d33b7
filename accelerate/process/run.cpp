#include <tessera/accelerate/process/run.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <vector>

#include <tessera/accelerate/process/process_control.h>
#include <tessera/core/error.h>
#include <tessera/core/parallel.h>
#include <tessera/distributed/rendezvous/job.h>

namespace tessera {
namespace {

// Signals are the process's, so this is too.
std::atomic<bool> stop_requested{false};
std::atomic<bool> save_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);  // as signal handlers need

// So are the flags of its launch.
std::atomic<bool> settings_are_read{false};

// ConfigError where the launch has flags for an Accelerator and the program made none.
void check_flags_were_read() {
  const char* const text = std::getenv("TESSERA_LAUNCH_SETTINGS");
  if (settings_are_read || text == nullptr) return;
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("for_accelerator")) return;
  std::string flags;
  for (const auto& flag : json.at("for_accelerator")) {
    flags += (flags.empty() ? "" : ", ") + flag.get<std::string>();
  }
  TS_CHECK_AS(ConfigError, flags.empty(), "tessera::run",
              "flags of tessera launch reach a program through its Accelerator; ", flags,
              " was given and the program made none; make one (accelerate/accelerator.h), or give "
              "the program a flag of its own");
}

extern "C" void note_signal(int signal) {
  (signal == SIGTERM ? stop_requested : save_requested) = true;
}

// Leaves a handler that the program has installed itself.
void handle(int signal) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  if (action.sa_handler != SIG_DFL) return;
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal, &action, nullptr);
}

// The rank's tie to its job for the time of the body.
class JobScope {
 public:
  explicit JobScope(const distributed::LaunchInfo& info) {
    if (info.under_tessera) distributed::set_current_job(distributed::Job::join(info));
  }
  ~JobScope() {
    if (const auto job = distributed::current_job()) job->leave();
    distributed::set_current_job(nullptr);
  }
  JobScope(const JobScope&) = delete;
  JobScope& operator=(const JobScope&) = delete;
};

// Ranks that the body has joined stay together to its end. An exception that passes breaks their
// group: the others must not wait for this one.
class ProcessesScope {
 public:
  ProcessesScope() { detail::keep_processes(); }
  ~ProcessesScope() { detail::end_processes(); }
  ProcessesScope(const ProcessesScope&) = delete;
  ProcessesScope& operator=(const ProcessesScope&) = delete;
};

// Another rank's failure, which its own rank and the launcher tell in full, is but named.
std::string without_other_causes(std::string message, const distributed::Job& job) {
  const distributed::RankFailure* const failure = job.failure();
  if (failure == nullptr || !job.info().under_tessera || failure->rank < 0) return message;
  const std::string words = failure->describe();
  const size_t at = message.find(words);
  if (at == message.npos) return message;
  return message.replace(at, words.size(), "rank " + std::to_string(failure->rank) + " failed");
}

void report(const char* message) {
  const auto job = distributed::current_job();
  std::fprintf(stderr, "%s\n", job ? without_other_causes(message, *job).c_str() : message);
  if (job) job->publish(distributed::FailureKind::kError, message);
}

}  // namespace

namespace detail {
void note_settings_are_read() { settings_are_read = true; }
}  // namespace detail

RunRequest requested() {
  if (stop_requested) return RunRequest::kCheckpointAndStop;
  return save_requested ? RunRequest::kCheckpoint : RunRequest::kNone;
}

void clear_request() { save_requested = false; }

int run(int argc, char** argv, const std::function<void(std::span<const std::string>)>& body) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    const distributed::LaunchInfo info = distributed::detect();
    if (info.world_size > 1) set_num_threads(info.threads);
    handle(SIGTERM);
    handle(SIGUSR1);
    const JobScope job(info);
    try {
      const ProcessesScope processes;
      settings_are_read = false;
      body(arguments);
      check_flags_were_read();
      return 0;
    } catch (const std::exception& error) {
      report(error.what());
    } catch (...) {
      report("an exception that is no std::exception");
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}

}  // namespace tessera
