#include <tessera/distributed/transport/mpi/progress.h>

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <optional>

#include <tessera/core/error.h>
#include <tessera/core/thread.h>

namespace tessera::distributed::mpi {
namespace {

using Clock = std::chrono::steady_clock;

// Buffers and coroutines that MPI may still touch: kept until the process ends. A global, as MPI
// itself is.
void retain_forever(OperationPtr operation) {
  static std::mutex mutex;
  static auto& retained = *new std::vector<OperationPtr>;
  std::lock_guard lock(mutex);
  retained.push_back(std::move(operation));
}

// Sleeps of 20 us last 20 us, not the 70 that the usual slack of timers makes of them.
class FineSleep {
 public:
  FineSleep() : slack_(prctl(PR_GET_TIMERSLACK)) { prctl(PR_SET_TIMERSLACK, 1000UL); }
  ~FineSleep() {
    if (slack_ > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_));
  }
  FineSleep(const FineSleep&) = delete;
  FineSleep& operator=(const FineSleep&) = delete;

 private:
  const int slack_;
};

// Waiting that costs little: a peer that computes on the same cores needs them more.
// Spinning catches short collectives, yielding lets a thread of another rank run where cores are
// shared, and sleeping leaves the cores to backward during long ones.
class Backoff {
 public:
  void reset() { idle_ = false; }
  void pause() {
    const Clock::time_point now = Clock::now();
    // What took MPI so long was a copy: the waiting begins after it.
    if (!idle_ || now - last_ > kCopy) {
      idle_ = true;
      since_ = now;
    }
    last_ = now;
    const auto waited = now - since_;
    if (waited < kSpin) return;
    if (waited < kYield) {
      sched_yield();
    } else {
      if (!fine_sleep_) fine_sleep_.emplace();  // short collectives never come here
      std::this_thread::sleep_for(kSleep);
    }
    last_ = Clock::now();
  }

 private:
  static constexpr auto kCopy = std::chrono::microseconds(10);
  static constexpr auto kSpin = std::chrono::microseconds(2);
  static constexpr auto kYield = std::chrono::microseconds(200);
  static constexpr auto kSleep = std::chrono::microseconds(20);
  bool idle_ = false;
  Clock::time_point since_, last_;
  std::optional<FineSleep> fine_sleep_;
};

}  // namespace

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) [[likely]]
    return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw MpiError(detail::concatenate(
      call, ": must succeed; MPI says: ", std::string_view(text, static_cast<size_t>(length)),
      "; the group is broken, start the job again"));
}

bool Requests::test() {
  if (requests_.empty()) return true;
  int completed = 0;
  const int count = static_cast<int>(requests_.size());
  if (count == 1) {
    check(MPI_Test(requests_.data(), &completed, MPI_STATUS_IGNORE), "MPI_Test");
  } else {
    // MPI_Testall says only that some request failed; its statuses say which and why.
    std::vector<MPI_Status> statuses(static_cast<size_t>(count));
    const int code = MPI_Testall(count, requests_.data(), &completed, statuses.data());
    if (code == MPI_ERR_IN_STATUS) {
      for (const MPI_Status& status : statuses) {
        if (status.MPI_ERROR != MPI_ERR_PENDING) check(status.MPI_ERROR, "MPI_Testall");
      }
    }
    check(code, "MPI_Testall");
  }
  if (completed) requests_.clear();
  return completed != 0;
}

bool Task::advance() {
  promise_type& promise = handle_.promise();
  while (!handle_.done()) {
    if (promise.requests) {
      if (!promise.requests->test()) return false;
      promise.requests = nullptr;
    } else if (promise.inner) {
      try {
        if (!promise.inner->task.advance()) return false;
      } catch (...) {
        promise.inner->error = std::current_exception();
      }
      promise.inner = nullptr;
    }
    handle_.resume();
    if (promise.error) std::rethrow_exception(promise.error);
    if (promise.requests) return false;  // tested just now
  }
  return true;
}

void Operation::finish(std::exception_ptr error) {
  if (!finished_.exchange(true, std::memory_order_acq_rel)) done_(std::move(error));
}

std::shared_ptr<Progress> Progress::start(double timeout_seconds) {
  std::shared_ptr<Progress> progress(new Progress);
  Thread([progress] { progress->run(); }).detach();
  std::unique_lock lock(progress->mutex_);
  const bool in_time =
      progress->changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                                  [&] { return progress->state_ != State::kStarting; });
  TS_CHECK_AS(DistributedError, in_time, "MPI_Init_thread",
              "must return within the timeout of initialisation; ", timeout_seconds,
              " s have passed; a rank that never starts holds all others, see whether each "
              "process of mpirun comes to its ProcessGroup");
  TS_CHECK_AS(DistributedError, progress->state_ == State::kRunning, "MPI_Init_thread",
              progress->start_error_);
  return progress;
}

void Progress::submit(const LanePtr& lane, OperationPtr operation, bool driven) {
  std::exception_ptr broken;
  {
    std::lock_guard lock(mutex_);
    broken = lane->broken_;
    if (!broken && (stopping_ || state_ == State::kEnded)) {
      broken = std::make_exception_ptr(DistributedError(
          "mpi: a collective needs a running backend; it has been shut down; issue it before"));
    }
    if (!broken) {
      lane->unfinished_.push_back(operation);
      inbox_.emplace_back(lane, operation);
      mail_.store(true, std::memory_order_release);
    }
  }
  if (broken) {
    operation->finish(broken);
  } else if (!driven) {
    changed_.notify_all();
  }
}

void Progress::wake() {
  {
    std::lock_guard lock(mutex_);
    mail_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void Progress::drive(const Operation& operation, Clock::time_point deadline) {
  std::unique_lock driving(driver_, std::defer_lock);
  if (thread_level_ < MPI_THREAD_SERIALIZED || !driving.try_lock()) return wake();
  bool stopping;
  {
    Backoff backoff;
    while (!operation.finished() && Clock::now() < deadline) {
      if (step()) {
        backoff.reset();
      } else {
        backoff.pause();
      }
    }
    std::lock_guard lock(mutex_);
    stopping = stopping_;  // step() took the note of it
  }
  const bool left = !active_.empty() || stopping;
  driving.unlock();
  if (left) wake();
}

// One round over everything that was asked for; true where something moved.
bool Progress::step() {
  bool moved = take_submissions();
  for (size_t i = 0; i < active_.size();) {
    const LanePtr lane = active_[i];
    moved |= advance(lane);
    if (lane->queue_.empty() && lane->running_.empty()) {
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  return moved;
}

void Progress::fail(const LanePtr& lane, std::exception_ptr error) {
  std::vector<OperationPtr> operations;
  {
    std::lock_guard lock(mutex_);
    if (!lane->broken_) lane->broken_ = error;
    operations.swap(lane->unfinished_);
    for (const OperationPtr& operation : operations) damaged_ |= operation->begun_;
  }
  for (OperationPtr& operation : operations) {
    retain_forever(operation);
    operation->finish(error);
  }
}

std::string Progress::stop(double timeout_seconds) {
  std::unique_lock lock(mutex_);
  const auto timeout = std::chrono::duration<double>(timeout_seconds);
  if (!stopping_) {
    stopping_ = true;
    stop_deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
    mail_.store(true, std::memory_order_release);
    changed_.notify_all();
  }
  // MPI_Finalize comes after the meeting of all ranks, so that only a dying peer can hold it.
  const bool ended = changed_.wait_for(lock, timeout + std::chrono::seconds(1),
                                       [&] { return state_ == State::kEnded; });
  return ended ? stop_report_ : "the progress thread does not come back from MPI; it is left alone";
}

void Progress::run() {
  prctl(PR_SET_NAME, "tessera-mpi");
  prctl(PR_SET_TIMERSLACK, 1000UL);  // 1 us: the default of 50 us would triple each sleep
  try {
    initialize();
  } catch (const std::exception& error) {
    start_error_ = error.what();
  }
  {
    std::lock_guard lock(mutex_);
    state_ = start_error_.empty() ? State::kRunning : State::kEnded;
  }
  changed_.notify_all();
  if (!start_error_.empty()) return;

  Backoff backoff;
  while (true) {
    bool moved, active;
    {
      std::lock_guard driving(driver_);
      moved = step();
      active = !active_.empty();
    }
    if (moved) {
      backoff.reset();
    } else if (active) {
      backoff.pause();
    } else {
      {
        std::lock_guard lock(mutex_);
        if (stopping_ && inbox_.empty()) break;
      }
      wait_for_work();
      backoff.reset();
    }
  }
  finalize();
  {
    std::lock_guard lock(mutex_);
    state_ = State::kEnded;
  }
  changed_.notify_all();
}

void Progress::initialize() {
  int initialized = 0, finalized = 0;
  MPI_Finalized(&finalized);
  TS_CHECK_AS(DistributedError, !finalized, "mpi",
              "MPI can be started once in a process; it has already been finalized; keep the "
              "process group until the end of the program");
  MPI_Initialized(&initialized);
  TS_CHECK_AS(DistributedError, !initialized, "mpi",
              "the backend starts MPI on its own thread; MPI has already been started by other "
              "code of this process; make the ProcessGroup first, and leave MPI_Init to it");
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &thread_level_), "MPI_Init_thread");
  TS_CHECK_AS(DistributedError, thread_level_ >= MPI_THREAD_FUNNELED, "MPI_Init_thread",
              "needs MPI_THREAD_FUNNELED at least; this MPI gives level ", thread_level_,
              "; use an MPI that was built with threads");
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  check(MPI_Get_library_version(text, &length), "MPI_Get_library_version");
  version_.assign(text, static_cast<size_t>(length));
  version_.resize(std::min(version_.find(','), version_.size()));
}

bool Progress::take_submissions() {
  if (!mail_.load(std::memory_order_acquire)) return false;
  std::vector<std::pair<LanePtr, OperationPtr>> mail;
  {
    std::lock_guard lock(mutex_);
    mail.swap(inbox_);
    mail_.store(false, std::memory_order_relaxed);
  }
  for (auto& [lane, operation] : mail) {
    if (std::find(active_.begin(), active_.end(), lane) == active_.end()) active_.push_back(lane);
    lane->queue_.push_back(std::move(operation));
  }
  return !mail.empty();
}

// Moves the lane's operations on; true where one of them did.
bool Progress::advance(const LanePtr& lane) {
  bool moved = false;
  const bool at_once = lane->order_ == Lane::Order::kAtOnce;
  while (!lane->queue_.empty() && (at_once || lane->running_.empty())) {
    OperationPtr operation = std::move(lane->queue_.front());
    lane->queue_.pop_front();
    {
      std::lock_guard lock(mutex_);
      if (lane->broken_) continue;  // fail() has seen to it
      operation->begun_ = true;
    }
    moved = true;
    lane->running_.push_back(operation);
    try {
      operation->task_ = operation->start_();
    } catch (...) {
      end_operation(lane, operation, std::current_exception());
    }
  }
  const std::vector<OperationPtr> running = lane->running_;
  for (const OperationPtr& operation : running) {
    if (operation->finished()) {  // by fail(): its requests stay open, its frame is retained
      std::erase(lane->running_, operation);
      continue;
    }
    try {
      if (!operation->task_.advance()) continue;
      end_operation(lane, operation, nullptr);
    } catch (...) {
      end_operation(lane, operation, std::current_exception());
    }
    moved = true;
  }
  return moved;
}

void Progress::end_operation(const LanePtr& lane, const OperationPtr& operation,
                             std::exception_ptr error) {
  std::erase(lane->running_, operation);
  bool damaged = false;
  if (error) {
    try {
      std::rethrow_exception(error);
    } catch (const MpiError&) {
      damaged = true;
    } catch (...) {  // its requests had completed
    }
  }
  if (damaged) return fail(lane, error);
  {
    std::lock_guard lock(mutex_);
    std::erase(lane->unfinished_, operation);
  }
  operation->task_ = Task();
  operation->start_ = nullptr;
  operation->finish(error);
}

// Sleeps until there is mail. Collectives come in rows, so it first looks for a while; and what
// MPI has accepted for sending may still wait in its queues, so it is given a hand now and then.
void Progress::wait_for_work() {
  const Clock::time_point begin = Clock::now();
  auto pause = std::chrono::milliseconds(1);
  Backoff backoff;
  while (!mail_.load(std::memory_order_acquire)) {
    if (Clock::now() - begin < std::chrono::microseconds(100)) {
      backoff.pause();
      continue;
    }
    int waiting = 0;
    if (std::unique_lock driving(driver_, std::try_to_lock); driving) {
      MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_SELF, &waiting, MPI_STATUS_IGNORE);
    }
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, pause, [&] { return mail_.load(std::memory_order_relaxed); });
    pause = std::min(pause * 2, std::chrono::milliseconds(10));
  }
}

void Progress::finalize() {
  bool damaged;
  Clock::time_point deadline;
  {
    std::lock_guard lock(mutex_);
    damaged = damaged_;
    deadline = stop_deadline_;
  }
  std::string report;
  if (damaged) {
    report = "collectives were left unfinished, so MPI is not finalized";
  } else {
    try {
      Requests requests;
      check(MPI_Ibarrier(MPI_COMM_WORLD, requests.add()), "MPI_Ibarrier");
      Backoff backoff;
      while (!requests.test()) {
        if (Clock::now() > deadline) {
          report = "some rank has not come to the end within the time, so MPI is not finalized";
          break;
        }
        backoff.pause();
      }
      if (report.empty()) check(MPI_Finalize(), "MPI_Finalize");
    } catch (const std::exception& error) {
      report = error.what();
    }
  }
  std::lock_guard lock(mutex_);
  stop_report_ = std::move(report);
}

}  // namespace tessera::distributed::mpi
