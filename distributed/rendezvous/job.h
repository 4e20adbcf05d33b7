// A rank's connection to its job: the store, and news of failed ranks.
//
// Under `tessera launch` the store and the news come from the launcher, whose agents watch every
// process. Under bare mpirun rank 0 hosts the store, and each rank leaves a will there: the kernel
// closes the socket of a process that ends, so the others learn of it within milliseconds.
//
//     auto job = Job::join(detect());             // or Job::host / Job::join(info, address)
//     if (auto failure = job->failure()) ...      // one atomic load
//
// Keys that ranks, agents and launcher share (all under "job/"):
//     job/failure/RANK  the failure of a rank, as JSON     job/joined/RANK, job/left/RANK
//     job/exit/RANK     how its process ended              job/command, job/agent/RANK
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <tessera/core/thread.h>
#include <tessera/distributed/rendezvous/detect.h>
#include <tessera/distributed/rendezvous/store.h>

namespace tessera::distributed {

// Why a rank failed, most certain cause first.
enum class FailureKind {
  kSignal,       // killed by a signal
  kError,        // its own code threw
  kExit,         // ended before the job's end
  kLost,         // its connection closed: process or machine gone
  kTimeout,      // it waited for others until a deadline
  kConsequence,  // raised because another rank failed
};

struct RankFailure {
  int rank = -1;  // -1: the host of the store
  FailureKind kind = FailureKind::kError;
  int code = 1;         // exit code; 128 + signal
  std::string message;  // one line: "killed by signal 9 (Killed)", or the error's own text
  std::string host;

  // "rank 1 on node7 was killed by signal 9 (Killed)"
  std::string describe() const;
  std::string to_text() const;
  // DistributedError where the text is no failure.
  static RankFailure from_text(std::string_view text);
};

class Job {
 public:
  // Under `tessera launch`: connects to the launcher's store (ConfigError where `info` has none).
  static std::shared_ptr<Job> join(const LaunchInfo& info);
  // Without the launcher: rank 0 hosts; it sends address() to the others, which join it.
  static std::shared_ptr<Job> host(const LaunchInfo& info);
  static std::shared_ptr<Job> join(const LaunchInfo& info, const StoreAddress& address);
  // Leaves the job; if an exception destroys it, publishes that first.
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  const LaunchInfo& info() const { return info_; }
  const std::shared_ptr<Store>& store() const { return store_; }
  // Where others reach the store; the host name is this machine's where rank 0 hosts it.
  const StoreAddress& address() const { return address_; }

  // The first failure of another rank that this one knows; null if there is none. One atomic load,
  // for the waiting loops of collectives.
  const RankFailure* failure() const noexcept { return failure_.load(std::memory_order_acquire); }
  // DistributedError with what(): "rank 0: all_reduce #12: rank 1 on ... was killed by ...".
  void check(std::string_view where) const;
  // Calls back, from the watching thread, when failure() becomes non-null; at once if it is. The
  // callback must not call this Job, except failure(). Returns a number for remove_callback, which
  // returns when no call is running any more.
  int on_failure(std::function<void(const RankFailure&)> callback);
  void remove_callback(int number);

  // Reports this rank's failure to all ranks and the launcher. If it knows of an earlier failure,
  // its own is a consequence. Only the first call counts; never throws.
  void publish(FailureKind kind, std::string_view message) noexcept;

  // Orderly end: afterwards the end of this process is not a failure of the job. Rank 0, if it
  // hosts the store, waits until every rank has left or is lost, at most `timeout`.
  void leave(Milliseconds timeout = Milliseconds(30000)) noexcept;

 private:
  explicit Job(const LaunchInfo& info);
  void connect(const StoreAddress& address);
  void watch();
  void learn(const RankFailure& failure);
  bool everyone_has_ended() const;

  LaunchInfo info_;
  int exceptions_;  // in flight at construction
  StoreAddress address_;
  std::unique_ptr<TcpStoreServer> server_;
  std::shared_ptr<TcpStore> client_;   // also holds the will
  std::shared_ptr<Store> store_;       // what ranks use
  std::shared_ptr<TcpStore> watcher_;  // the watching thread's own, to be interrupted
  Thread thread_;
  std::atomic<bool> leaving_{false};
  std::atomic<bool> published_{false};
  std::unique_ptr<RankFailure> heard_;
  std::atomic<const RankFailure*> failure_{nullptr};
  std::mutex mutex_;  // callbacks, heard_
  std::vector<std::pair<int, std::function<void(const RankFailure&)>>> callbacks_;
  int next_callback_ = 0;
};

// The job of the current Context; null for one process and for rank threads.
std::shared_ptr<Job> current_job();
void set_current_job(std::shared_ptr<Job> job);

}  // namespace tessera::distributed
