// The launcher: `tessera launch` hosts the job's store, starts an agent for each rank, watches the
// job and returns the exit code of the first cause if it fails.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <tessera/accelerate/launch/command.h>
#include <tessera/accelerate/launch/options.h>
#include <tessera/accelerate/launch/protocol.h>
#include <tessera/distributed/rendezvous/job.h>

namespace tessera::launch {

// The code that `timeout` returns too.
constexpr int kTimeoutCode = 124;

// The launcher's knowledge of a job, and its conclusions; no sockets, no clock.
//
// The first cause is the earliest failure; one that is a consequence of another never is, and a
// rank killed by a signal comes before an error that another rank published up to 0.5 s earlier:
// a transport may notice a dead peer before its agent has reported.
class JobRecord {
 public:
  explicit JobRecord(int world_size);

  void joined(int rank, Milliseconds now);
  void left(int rank);
  // A rank's own report, or a will.
  void failed(const distributed::RankFailure& failure, Milliseconds now);
  void exited(int rank, const ExitReport& report, Milliseconds now);
  // From now on the launcher itself kills ranks by signals.
  void killing() { killing_ = true; }

  bool all_exited() const;
  std::vector<int> running() const;
  std::optional<distributed::RankFailure> first_cause() const;
  std::optional<Milliseconds> failed_since() const;
  // Failures that ranks were not told yet: each is returned once.
  std::vector<distributed::RankFailure> take_news();
  int exit_code() const;  // 0 where nothing failed

 private:
  struct Entry {
    distributed::RankFailure failure;
    Milliseconds when{0};
  };
  struct Rank {
    bool joined = false;
    bool left = false;
    bool failed = false;
    std::optional<ExitReport> exit;
  };
  void add(const distributed::RankFailure& failure, Milliseconds now);
  void check_early_end(int rank, Milliseconds now);

  std::vector<Rank> ranks_;
  std::vector<Entry> failures_;
  size_t told_ = 0;
  bool anyone_joined_ = false;
  bool killing_ = false;
};

// Runs the job, again after failures up to options.restarts times. Returns 0, or the exit code of
// the first cause: 128 + signal, the program's own, kTimeoutCode. ConfigError and similar errors if
// the job cannot start.
int run_launcher(const LaunchOptions& options);

}  // namespace tessera::launch
