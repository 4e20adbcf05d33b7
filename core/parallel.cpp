#include <tessera/core/parallel.h>

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <tessera/core/block_signals.h>
#include <tessera/core/context.h>
#include <tessera/core/cpu_quota.h>
#include <tessera/core/error.h>
#include <tessera/core/thread.h>

namespace tessera {
namespace {

// [Note: waiting] A worker that has nothing to do looks for work for a short while and then sleeps
// in the kernel. Looking is what makes a loop of 20 us worth cutting in two; sleeping is what keeps
// a machine usable that runs other things beside the training. OpenMP's runtime offers one or the
// other: with its default, a step of a small GPT took 10 times as long as with one thread while
// compilers ran on the same two cores; with passive waiting, short loops pay a wake-up each.
constexpr int kLooks = 2000;  // about 50 us on current x86

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns once `value` differs from `old`.
template <class T>
void wait_while(const std::atomic<T>& value, T old) {
  for (int i = 0; i < kLooks; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause_briefly();
  }
  while (value.load(std::memory_order_acquire) == old) {
    value.wait(old, std::memory_order_acquire);
  }
}

thread_local bool inside_loop = false;
// Its team ended with the thread's thread_local objects. Loops of destructors that come later (see
// [Note: after main]) stay on the thread.
thread_local bool team_ended = false;

struct Loop {
  detail::ParallelBody body;
  void* function;
  int64_t size, grain, blocks;
  int parts;

  // Static partition in whole blocks: the same elements on the same core in every call, so that a
  // core finds in its cache what it wrote before.
  void run_part(int part) const {
    const int64_t begin = std::min(size, blocks * part / parts * grain);
    const int64_t end = std::min(size, blocks * (part + 1) / parts * grain);
    if (begin < end) body(function, begin, end);
  }
};

// The workers of one calling thread: loops of several callers never wait for each other.
class Team {
 public:
  ~Team() {
    team_ended = true;
    for (auto& worker : workers_) {
      worker->ticket.store(kStop, std::memory_order_release);
      worker->ticket.notify_one();
    }
    for (auto& worker : workers_) worker->thread.join();
  }

  // Throws IoError where a worker cannot be started: those that there are go on.
  void run(const Loop& loop) {
    const int helpers = loop.parts - 1;
    if (generation_ != process_generation()) {  // fork() took the workers away
      workers_.clear();
      generation_ = process_generation();
    }
    while (static_cast<int>(workers_.size()) < helpers) add_worker();
    loop_ = loop;
    unfinished_.store(helpers, std::memory_order_relaxed);
    for (int i = 0; i < helpers; ++i) {
      std::atomic<uint32_t>& ticket = workers_[static_cast<size_t>(i)]->ticket;
      const uint32_t next = ticket.load(std::memory_order_relaxed) + 1;
      ticket.store(next == kStop ? 0 : next, std::memory_order_release);
      ticket.notify_one();
    }
    inside_loop = true;
    loop.run_part(0);
    inside_loop = false;
    for (int left = unfinished_.load(std::memory_order_acquire); left != 0;
         left = unfinished_.load(std::memory_order_acquire)) {
      wait_while(unfinished_, left);
    }
  }

 private:
  static constexpr uint32_t kStop = UINT32_MAX;
  struct alignas(64) Worker {
    std::atomic<uint32_t> ticket{0};  // changes when there is work
    Thread thread;
  };

  void add_worker() {
    const int part = static_cast<int>(workers_.size()) + 1;
    auto made = std::make_unique<Worker>();
    Worker* const worker = made.get();
    workers_.reserve(workers_.size() + 1);  // nothing may fail once it runs
    worker->thread = Thread([this, worker, part] {
      BlockSignalsGuard::block_for_good();  // they are for the program's threads
      inside_loop = true;
      uint32_t seen = 0;
      while (true) {
        wait_while(worker->ticket, seen);
        seen = worker->ticket.load(std::memory_order_acquire);
        if (seen == kStop) return;
        loop_.run_part(part);
        if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_one();
      }
    });
    workers_.push_back(std::move(made));
  }

  Loop loop_{};
  alignas(64) std::atomic<int> unfinished_{0};
  std::vector<std::unique_ptr<Worker>> workers_;
  uint64_t generation_ = process_generation();  // of the process whose threads they are
};

// OMP_NUM_THREADS where it is set, as users of other libraries expect; else the cores that this
// process may run on, and no more than its container's share of time keeps busy.
int default_num_threads() {
  static const int count = [] {
    if (const char* text = std::getenv("OMP_NUM_THREADS")) {
      const int wanted = std::atoi(text);
      if (wanted >= 1) return wanted;
    }
    cpu_set_t set;
    const int cores = sched_getaffinity(0, sizeof set, &set) == 0
                          ? CPU_COUNT(&set)
                          : static_cast<int>(std::thread::hardware_concurrency());
    return std::max(
        1, static_cast<int>(std::min<double>(cores, std::ceil(cpu_quota().value_or(cores)))));
  }();
  return count;
}

struct Threads {
  int count = default_num_threads();
};

}  // namespace

int num_threads() { return Context::current().slot<Threads>().count; }

void set_num_threads(int count) {
  TS_CHECK(count >= 1, "set_num_threads", "expects at least 1; got ", count);
  Context::current().slot<Threads>().count = count;
}

bool in_parallel_region() { return inside_loop; }

namespace detail {

void parallel_run(int64_t size, int64_t grain, ParallelBody body, void* function) {
  const int64_t blocks = (size + grain - 1) / grain;
  const int64_t threads = std::min<int64_t>(inside_loop || team_ended ? 1 : num_threads(), blocks);
  if (threads <= 1) {
    body(function, 0, size);
    return;
  }
  thread_local Team team;
  team.run({body, function, size, grain, blocks, static_cast<int>(threads)});
}

}  // namespace detail
}  // namespace tessera
