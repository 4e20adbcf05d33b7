// The ranks' state in the current thread's Context: the rank, its groups, its timeouts.
//
// A process that was not initialized is rank 0 of 1. Rank threads get their own from run_ranks();
// processes from init_process_group().
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <tessera/distributed/transport/trace.h>

namespace tessera::distributed {

class Backend;
class Group;
class Store;
class Watchdog;

// Seconds that a collective may take, counted from its call on this rank.
struct Timeouts {
  double init = 600;        // start of a group, which needs every rank
  double collective = 600;  // everything else
  // Where ranks may legitimately be far apart; 0, or less than `collective`: `collective` holds.
  double first_step = 0;  // replicate(): until the first gradients are reduced
  double save = 0;        // checkpoints: waits for the other ranks' writing
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
  std::string phase;                        // "forward", "backward", "save": goes into records
  std::string dump_directory;               // where a failing wait writes its trace; empty: nowhere
  std::vector<std::weak_ptr<Group>> parts;  // of the world, by split() and subgroup()

  // Ends every running and later call of all groups of this rank with `error`. May be called from
  // any thread: watchdogs do.
  void fail(std::exception_ptr error);
  std::exception_ptr failure();  // the error of fail(); null if nothing failed. Any thread.
  void watch(const std::shared_ptr<Backend>& backend);  // groups register theirs

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Backend>> backends_;
  std::exception_ptr failure_;
};

// That of the current Context.
RankContext& rank_context();

// Sets the phase of records, and the timeout of collectives, for a scope.
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
  // One of the context's timeouts, if it is longer than the current one.
  explicit TimeoutScope(double Timeouts::*timeout);
  ~TimeoutScope();
  TimeoutScope(const TimeoutScope&) = delete;
  TimeoutScope& operator=(const TimeoutScope&) = delete;

 private:
  double previous_;
};

}  // namespace tessera::distributed
