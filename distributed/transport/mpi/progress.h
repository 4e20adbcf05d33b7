// The thread of a process that makes MPI calls, and the coroutines it runs.
//
// MPI progresses only inside MPI calls, and a blocking call of a peer that is gone never returns.
// So no call here blocks: an operation is a coroutine that starts requests and awaits them; the
// thread tests the requests of all operations in turn and resumes whose have arrived. Whoever waits
// for a collective may do this instead (drive()), one thread at a time, where MPI allows
// MPI_THREAD_SERIALIZED. Nothing of MPI is called elsewhere, not even MPI_Init and MPI_Finalize.
//
//     Task shift(MPI_Comm communicator, ...) {
//       Requests requests;
//       check(MPI_Isend(..., requests.add()), "MPI_Isend");
//       check(MPI_Irecv(..., requests.add()), "MPI_Irecv");
//       co_await requests;
//     }
//
// Private to the mpi backend: not installed.
#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <coroutine>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <tessera/core/error.h>

namespace tessera::distributed::mpi {

// MPI itself failed: its state is undefined from here on.
class MpiError : public DistributedError {
 public:
  using DistributedError::DistributedError;
};

// Throws MpiError with MPI's own words unless `code` is MPI_SUCCESS.
void check(int code, const char* call);

// Requests that are awaited together. Throws from co_await where one of them failed.
class Requests {
 public:
  // Where the next call puts its request. The pointer is valid until the next add().
  MPI_Request* add() { return &requests_.emplace_back(MPI_REQUEST_NULL); }
  bool empty() const { return requests_.empty(); }
  // True when all have completed; they are then gone. Makes MPI progress.
  bool test();

 private:
  std::vector<MPI_Request> requests_;
};

// A coroutine of whoever drives. It starts suspended and suspends only where it awaits
// requests or another task.
class Task {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;
  struct RequestsAwaiter;
  struct TaskAwaiter;

  Task() = default;
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  // Goes on as far as the requests allow. True when the coroutine has ended; throws its exception.
  bool advance();

 private:
  explicit Task(Handle handle) : handle_(handle) {}
  Handle handle_ = nullptr;
};

struct Task::RequestsAwaiter {
  Requests& requests;
  bool await_ready() { return requests.test(); }
  void await_suspend(Handle handle);
  void await_resume() {}
};

struct Task::TaskAwaiter {
  Task task;
  std::exception_ptr error;
  bool await_ready() { return false; }
  void await_suspend(Handle handle);
  void await_resume() {
    if (error) std::rethrow_exception(error);
  }
};

struct Task::promise_type {
  Requests* requests = nullptr;  // what the suspended coroutine awaits: these,
  TaskAwaiter* inner = nullptr;  // or that
  std::exception_ptr error;

  Task get_return_object() { return Task(Handle::from_promise(*this)); }
  std::suspend_always initial_suspend() noexcept { return {}; }
  std::suspend_always final_suspend() noexcept { return {}; }
  RequestsAwaiter await_transform(Requests& awaited) { return {awaited}; }
  TaskAwaiter await_transform(Task&& awaited) { return {std::move(awaited), nullptr}; }
  void return_void() {}
  void unhandled_exception() { error = std::current_exception(); }
};

inline void Task::RequestsAwaiter::await_suspend(Handle handle) {
  handle.promise().requests = &requests;
}
inline void Task::TaskAwaiter::await_suspend(Handle handle) { handle.promise().inner = this; }

// What was asked of a lane: the coroutine and what to tell whom at its end.
class Operation {
 public:
  // `start` makes the coroutine, on the thread that drives; what it captures (tensors, lists) lives
  // as long as the operation. `done` is called exactly once, from any thread, with the error or
  // null.
  Operation(std::function<Task()> start, std::function<void(std::exception_ptr)> done)
      : start_(std::move(start)), done_(std::move(done)) {}

  bool finished() const { return finished_.load(std::memory_order_acquire); }

 private:
  friend class Progress;
  void finish(std::exception_ptr error);

  std::function<Task()> start_;
  std::function<void(std::exception_ptr)> done_;
  Task task_;
  bool begun_ = false;  // under Progress::mutex_: MPI may know its buffers
  std::atomic<bool> finished_{false};
};
using OperationPtr = std::shared_ptr<Operation>;

// A communicator and what is to happen on it. An exception of a coroutine that leaves no request
// open (a mismatch, which all ranks see) ends that operation alone. A failure of MPI and fail()
// break the lane: what is under way or comes later ends with that error.
class Lane {
 public:
  enum class Order {
    kOneByOne,  // the next begins where the one before has ended
    kAtOnce,    // each begins where it is submitted
  };
  Lane(MPI_Comm communicator, Order order) : communicator(communicator), order_(order) {}

  const MPI_Comm communicator;

 private:
  friend class Progress;
  const Order order_;
  std::deque<OperationPtr> queue_;        // under Progress::driver_: those that have not begun
  std::vector<OperationPtr> running_;     // under Progress::driver_
  std::vector<OperationPtr> unfinished_;  // under Progress::mutex_: all of them
  std::exception_ptr broken_;             // under Progress::mutex_
};
using LanePtr = std::shared_ptr<Lane>;

class Progress : public std::enable_shared_from_this<Progress> {
 public:
  // Starts the thread and MPI. Throws DistributedError where MPI fails, does not start within the
  // time (a rank is missing), or has already been started by someone else or finalized: MPI can
  // be started once in a process.
  static std::shared_ptr<Progress> start(double timeout_seconds);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int thread_level() const { return thread_level_; }  // MPI_THREAD_...
  const std::string& version() const { return version_; }

  // Returns at once; `done` of the operation tells the rest. Any thread. With `driven` the caller
  // comes to drive() next, and the progress thread is left asleep.
  void submit(const LanePtr& lane, OperationPtr operation, bool driven = false);
  // Does the progress thread's work on this one until the operation has ended or the deadline has
  // come; returns at once where another thread is at it. What is then left over the progress thread
  // takes. Saves the two wake-ups of a blocking collective.
  void drive(const Operation& operation, std::chrono::steady_clock::time_point deadline);
  // Breaks the lane: its operations end with `error` before this returns, whatever the thread is
  // doing. MPI may go on writing to their buffers, which are therefore never freed. Any thread.
  void fail(const LanePtr& lane, std::exception_ptr error);
  // Ends the thread. Where nothing has failed all ranks meet and MPI is finalized; otherwise, and
  // where they do not meet within the time, MPI is left as it is and the message says why; empty
  // where all is well. A thread that does not come back from MPI is left alone.
  std::string stop(double timeout_seconds);

 private:
  Progress() = default;
  void run();
  void initialize();
  bool step();
  void wake();
  bool take_submissions();
  bool advance(const LanePtr& lane);
  void end_operation(const LanePtr& lane, const OperationPtr& operation, std::exception_ptr error);
  void wait_for_work();
  void finalize();

  int rank_ = 0;
  int size_ = 1;
  int thread_level_ = 0;
  std::string version_;

  std::mutex mutex_;
  std::condition_variable changed_;  // mail for the thread, or news of its start and end
  enum class State { kStarting, kRunning, kEnded } state_ = State::kStarting;
  std::vector<std::pair<LanePtr, OperationPtr>> inbox_;
  bool stopping_ = false;
  std::chrono::steady_clock::time_point stop_deadline_;
  bool damaged_ = false;  // requests were left open, or MPI failed
  std::string start_error_, stop_report_;

  std::atomic<bool> mail_{false};  // inbox_ or stopping_ changed, or active_ was left over
  std::mutex driver_;              // of whoever makes MPI calls: the progress thread, or in drive()
  std::vector<LanePtr> active_;    // under driver_: lanes with operations
};

}  // namespace tessera::distributed::mpi
