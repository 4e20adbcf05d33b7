// What the current thread's Context knows of ranks: which one it is, its groups, its timeouts.
//
// A process that was not initialised is rank 0 of 1. Rank threads get their own from run_ranks();
// processes from init_process_group().
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <tessera/distributed/transport/trace.h>

namespace tessera::gpu {
struct StreamHandle;
}

namespace tessera::distributed {

class Backend;
class Group;
class Store;
class Watchdog;

// Seconds that a collective may take, from its issue on this rank.
struct Timeouts {
  double init = 600;        // start of a group, which needs every rank
  double collective = 600;  // everything else
  // Where ranks may legitimately be far apart; 0, or less than `collective`: as collective.
  double first_step = 0;  // replicate(): until the first gradients are reduced
  double save = 0;        // checkpoints: waits for the other ranks' writing
};

// Deliberate bugs, for tests that prove that tests would see them.
enum class Mutation : uint8_t {
  kNone,
  kSkipWait,         // Work::wait() returns at once
  kSkipStreamOrder,  // a collective of a GPU does not wait for what was calculated before
  kOtherStream,      // memory for a result is asked for on `other_stream`, which nobody tells of it
};

// Around every collective of this rank; for tests that delay, drop and break. May sleep and throw.
struct CommHooks {
  // Before the call reaches the backend. False: it never does (the others wait for it).
  std::function<bool(const CommRecord&)> before_issue;
  std::function<void(const CommRecord&)> before_wait, after_wait;
};

// Time that tests make: compute adds to `now`, collectives of a channel follow one another and take
// `latency(record)` from when the last rank issued them, wait() moves `now` to their end. Served by
// the thread backend.
struct VirtualClock {
  double now = 0;
  std::function<double(const CommRecord&)> latency;
};

struct RankContext {
  RankContext();
  ~RankContext();

  int rank = 0, world_size = 1;
  int local_rank = 0, local_world_size = 1;
  std::shared_ptr<Store> store;        // null for one process
  std::shared_ptr<Watchdog> watchdog;  // of processes
  std::shared_ptr<Group> world;
  std::shared_ptr<CommTrace> trace;
  Timeouts timeouts;
  ReductionMode reduction_mode = ReductionMode::kDeterministic;
  std::string phase;           // "forward", "backward", "save": goes into records
  std::string dump_directory;  // where a failing wait writes its trace; empty: nowhere

  CommHooks hooks;
  std::shared_ptr<VirtualClock> clock;
  Mutation mutation = Mutation::kNone;
  std::shared_ptr<gpu::StreamHandle> other_stream;  // for Mutation::kOtherStream

  // Ends every call under way of all groups of this rank, and every later one, with `error`. Any
  // thread: watchdogs call it.
  void fail(std::exception_ptr error);
  std::exception_ptr failure();  // what fail() was told; null where nothing failed. Any thread.
  void watch(const std::shared_ptr<Backend>& backend);  // groups register theirs

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Backend>> backends_;
  std::exception_ptr failure_;
};

// Of the current Context.
RankContext& rank_context();

// The phase of records, and the timeout of collectives, for a scope.
class PhaseScope {
 public:
  explicit PhaseScope(std::string phase);
  ~PhaseScope();
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  std::string previous_;
};
class TimeoutScope {
 public:
  explicit TimeoutScope(double seconds);  // ValueError unless positive
  // One of the context's, where it is longer than what holds now.
  explicit TimeoutScope(double Timeouts::*timeout);
  ~TimeoutScope();
  TimeoutScope(const TimeoutScope&) = delete;
  TimeoutScope& operator=(const TimeoutScope&) = delete;

 private:
  double previous_;
};

}  // namespace tessera::distributed
