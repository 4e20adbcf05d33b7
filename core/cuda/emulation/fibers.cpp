#include <tessera/core/cuda/emulation/simt.h>

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <boost/context/detail/fcontext.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <vector>

#include <tessera/core/cuda/emulation/arena.h>
#include <tessera/core/cuda/emulation/race.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define TS_START_SWITCH(save, bottom, size) __sanitizer_start_switch_fiber(save, bottom, size)
#define TS_FINISH_SWITCH(save, bottom, size) __sanitizer_finish_switch_fiber(save, bottom, size)
#define TS_UNPOISON(pointer, size) ASAN_UNPOISON_MEMORY_REGION(pointer, size)
#else
#define TS_START_SWITCH(save, bottom, size) ((void)(save), (void)(bottom), (void)(size))
#define TS_FINISH_SWITCH(save, bottom, size) ((void)(save), (void)(bottom), (void)(size))
#define TS_UNPOISON(pointer, size) ((void)(pointer), (void)(size))
#endif

#if defined(__SANITIZE_ADDRESS__)
// A kernel that fails leaves its fibers where they stand, with the text of its report on a stack
// that nobody unwinds. All that ran there is below fiber_loop.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:fiber_loop\n"; }
#endif

namespace tessera::gpu::emulation {

constinit thread_local Thread* current_thread = nullptr;
constinit thread_local Grid current_grid{};

namespace {

namespace context = boost::context::detail;

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 256u << 10;
#else
constexpr size_t kStackBytes = 64u << 10;
#endif

std::atomic<uint64_t> random_state{[] {
  const char* text = std::getenv("TESSERA_EMULATION_SEED");
  return text == nullptr ? uint64_t{0} : std::strtoull(text, nullptr, 10);
}()};

uint64_t mixed(uint64_t z) {  // splitmix64
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// A permutation of [0, n): i -> (a i + b) mod n with a prime to n.
class Order {
 public:
  Order(uint64_t n, uint64_t seed) : n_(n), b_(n == 0 ? 0 : mixed(seed) % n) {
    if (n < 3) return;
    a_ = 1 + mixed(seed + 1) % (n - 1);
    while (gcd(a_, n) != 1) a_ = a_ % (n - 1) + 1;
  }
  uint64_t operator[](uint64_t i) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(a_) * i + b_) % n_);
  }

 private:
  static uint64_t gcd(uint64_t a, uint64_t b) { return b == 0 ? a : gcd(b, a % b); }
  uint64_t n_, b_, a_ = 1;
};

constexpr size_t kGuard = 4096;  // below each stack, out of reach

struct Fiber {
  context::fcontext_t where = nullptr;
  char* bottom = nullptr;              // of its stack, which is the lowest address
  const void* known_bottom = nullptr;  // the same as AddressSanitizer sees it
  size_t known_size = 0;
  void* fake_stack = nullptr;
  int thread = -1;  // the thread whose kernel it runs
};

enum class State : uint8_t { kNew, kReady, kRunning, kAtBarrier, kInWarp, kLeft };

struct ThreadState {
  Thread self;
  State state;
  Fiber* fiber;
};

// Lanes of a warp that wait for each other.
struct Meeting {
  unsigned mask = 0, arrived = 0;
  const char* name = nullptr;
  void* payloads[kWarpSize];
};

struct Warp {
  unsigned lanes = 0, left = 0;
  std::vector<Meeting> meetings;
};

struct StaticArray {
  const void* site;
  void* data;
};

// One for each OS thread that runs kernels; keeps its stacks.
class Machine {
 public:
  Machine() : threads_(kMaxThreads), warps_(kMaxThreads / kWarpSize) {}
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  std::string run(const Launch& launch, const std::function<void()>& kernel);
  void leave_with(const std::string& what);
  void sync_threads();
  void collective(unsigned mask, const char* name, void* payload, Combine combine,
                  bool orders_memory);
  void* dynamic_shared(size_t alignment);
  void* static_shared(const void* site, size_t bytes, size_t alignment);

 private:
  static void entry(context::transfer_t from);
  void run_block(uint64_t linear);
  [[noreturn]] void fiber_loop(Fiber* fiber);
  int take_next();  // a thread to run, -1 where there is none
  void go_to(int thread);
  void switch_from(Fiber& from, Fiber& to);
  void arrived_from(context::transfer_t from, Fiber& self);
  Fiber* take_fiber();
  void release_barrier();
  void leave(int thread);
  std::string standstill() const;
  std::string where(const Thread& thread) const;

  const Launch* launch_ = nullptr;
  const std::function<void()>* kernel_ = nullptr;
  std::vector<ThreadState> threads_;
  std::vector<Warp> warps_;
  std::vector<int> ready_;
  size_t ready_front_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> free_fibers_;
  Fiber main_;
  int count_ = 0, started_ = 0, alive_ = 0, at_barrier_ = 0;
  bool new_first_ = false;
  Order order_{0, 0};
  uint64_t thread_seed_ = 0;
  std::vector<StaticArray> statics_;
  size_t shared_used_ = 0;
  std::string failure_;
  Fiber* running_ = nullptr;
  Fiber* starting_ = nullptr;
};

thread_local Machine* machine = nullptr;

Machine& this_machine() {
  static thread_local std::unique_ptr<Machine> owned;
  if (!owned) owned = std::make_unique<Machine>();
  return *owned;
}

// A process has room for some tens of thousands of mappings, and tests start many threads.
Machine::~Machine() {
  for (const auto& fiber : fibers_) {
    TS_UNPOISON(fiber->bottom, kStackBytes);
    munmap(fiber->bottom - kGuard, kStackBytes + kGuard);
  }
}

Fiber* Machine::take_fiber() {
  if (!free_fibers_.empty()) {
    Fiber* fiber = free_fibers_.back();
    free_fibers_.pop_back();
    return fiber;
  }
  // Kept as long as the thread of the host: a machine has at most as many as a block has threads.
  void* memory = mmap(nullptr, kStackBytes + kGuard, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  mprotect(memory, kGuard, PROT_NONE);
  auto fiber = std::make_unique<Fiber>();
  fiber->bottom = static_cast<char*>(memory) + kGuard;
  fiber->known_bottom = fiber->bottom;
  fiber->known_size = kStackBytes;
  fibers_.push_back(std::move(fiber));
  return fibers_.back().get();
}

void Machine::arrived_from(context::transfer_t from, Fiber& self) {
  Fiber& other = *static_cast<Fiber*>(from.data);
  other.where = from.fctx;
  TS_FINISH_SWITCH(self.fake_stack, &other.known_bottom, &other.known_size);
  running_ = &self;
}

void Machine::switch_from(Fiber& from, Fiber& to) {
  TS_START_SWITCH(&from.fake_stack, to.known_bottom, to.known_size);
  arrived_from(context::jump_fcontext(to.where, &from), from);
}

void Machine::entry(context::transfer_t from) {
  Machine* self = machine;
  Fiber* const fiber = self->starting_;
  fiber->fake_stack = nullptr;
  self->arrived_from(from, *fiber);
  self->fiber_loop(fiber);
}

void Machine::fiber_loop(Fiber* fiber) {
  while (true) {
    ThreadState& thread = threads_[static_cast<size_t>(fiber->thread)];
    thread.state = State::kRunning;
    current_thread = &thread.self;
    (*kernel_)();
    leave(fiber->thread);
    const int next = take_next();
    if (next >= 0 && threads_[static_cast<size_t>(next)].fiber == nullptr) {
      fiber->thread = next;  // the same stack for the next thread
      threads_[static_cast<size_t>(next)].fiber = fiber;
      continue;
    }
    free_fibers_.push_back(fiber);
    if (next < 0) {
      if (alive_ > 0) failure_ = standstill();
      current_thread = nullptr;
      switch_from(*fiber, main_);
    } else {
      ThreadState& other = threads_[static_cast<size_t>(next)];
      other.state = State::kRunning;
      current_thread = &other.self;
      switch_from(*fiber, *other.fiber);
    }
  }
}

int Machine::take_next() {
  const bool has_new = started_ < count_, has_ready = ready_front_ < ready_.size();
  if (has_new && (new_first_ || !has_ready)) {
    return static_cast<int>(order_[static_cast<uint64_t>(started_++)]);
  }
  if (!has_ready) return -1;
  const int next = ready_[ready_front_++];
  if (ready_front_ == ready_.size()) {
    ready_.clear();
    ready_front_ = 0;
  }
  return next;
}

// The running thread waits: another one goes on.
void Machine::go_to(int next) {
  Fiber& from = *running_;
  if (next < 0) {
    failure_ = standstill();
    current_thread = nullptr;
    switch_from(from, main_);  // does not come back
    return;
  }
  ThreadState& other = threads_[static_cast<size_t>(next)];
  if (other.fiber == nullptr) {
    other.fiber = take_fiber();
    other.fiber->thread = next;
    if (other.fiber->where == nullptr) {
      TS_UNPOISON(other.fiber->bottom, kStackBytes);
      other.fiber->where =
          context::make_fcontext(other.fiber->bottom + kStackBytes, kStackBytes, &Machine::entry);
      starting_ = other.fiber;
    }
  }
  other.state = State::kRunning;
  current_thread = &other.self;
  switch_from(from, *other.fiber);
}

void Machine::release_barrier() {
  at_barrier_ = 0;
  race::barrier();
  // In another order than they came in.
  const size_t before = ready_.size();
  for (int i = 0; i < count_; ++i) {
    ThreadState& thread = threads_[static_cast<size_t>(i)];
    if (thread.state != State::kAtBarrier) continue;
    thread.state = State::kReady;
    ready_.push_back(i);
  }
  const auto begin = ready_.begin() + static_cast<int64_t>(before);
  if (begin == ready_.end()) return;
  thread_seed_ = mixed(thread_seed_ + 7);
  std::rotate(begin, begin + static_cast<int64_t>(thread_seed_ % (ready_.size() - before)),
              ready_.end());
  if (thread_seed_ & 1) std::reverse(ready_.begin() + static_cast<int64_t>(before), ready_.end());
}

void Machine::leave(int index) {
  ThreadState& thread = threads_[static_cast<size_t>(index)];
  thread.state = State::kLeft;
  thread.fiber = nullptr;
  --alive_;
  Warp& warp = warps_[static_cast<size_t>(thread.self.warp)];
  warp.left |= 1u << thread.self.lane;
  for (const Meeting& meeting : warp.meetings) {
    if (meeting.arrived != 0 && (meeting.mask >> thread.self.lane & 1) != 0) {
      leave_with(where(thread.self) + " leaves the kernel while lanes of its warp wait for it in " +
                 meeting.name);
    }
  }
  if (at_barrier_ > 0 && at_barrier_ == alive_) release_barrier();
}

void Machine::sync_threads() {
  const int self = running_->thread;
  if (++at_barrier_ == alive_) {
    release_barrier();
    return;
  }
  threads_[static_cast<size_t>(self)].state = State::kAtBarrier;
  go_to(take_next());
}

void Machine::collective(unsigned mask, const char* name, void* payload, Combine combine,
                         bool orders_memory) {
  const int self = running_->thread;
  const Thread& thread = threads_[static_cast<size_t>(self)].self;
  Warp& warp = warps_[static_cast<size_t>(thread.warp)];
  const unsigned own = 1u << thread.lane;
  const auto hexadecimal = [](unsigned value) {
    char text[16];
    std::snprintf(text, sizeof text, "0x%08x", value);
    return std::string(text);
  };
  const auto here = [&] { return where(thread) + " in " + name + ": "; };
  if ((mask & own) == 0) {
    leave_with(here() + "its lane mask " + hexadecimal(mask) + " does not name lane " +
               std::to_string(thread.lane) + ", which calls");
  }
  if ((mask & ~warp.lanes) != 0) {
    leave_with(here() + "the lane mask " + hexadecimal(mask) +
               " names lanes that the warp lacks; " + "it has " + hexadecimal(warp.lanes));
  }
  if ((mask & warp.left) != 0) {
    leave_with(here() + "the lane mask " + hexadecimal(mask) +
               " names lanes that left the kernel: " + hexadecimal(mask & warp.left));
  }
  Meeting* meeting = nullptr;
  for (Meeting& candidate : warp.meetings) {
    if (candidate.arrived == 0) continue;
    if (candidate.mask == mask) {
      meeting = &candidate;
    } else if ((candidate.mask & own) != 0) {
      leave_with(here() + "gives the lane mask " + hexadecimal(mask) + ", and lanes " +
                 hexadecimal(candidate.arrived) + " wait for it with the mask " +
                 hexadecimal(candidate.mask));
    }
  }
  if (meeting == nullptr) {
    for (Meeting& candidate : warp.meetings) {
      if (candidate.arrived == 0) meeting = &candidate;
    }
    if (meeting == nullptr) meeting = &warp.meetings.emplace_back();
    meeting->mask = mask;
    meeting->name = name;
  } else if (std::strcmp(meeting->name, name) != 0) {
    leave_with(here() + "other lanes of the mask are in " + meeting->name);
  }
  meeting->payloads[thread.lane] = payload;
  meeting->arrived |= own;
  if (meeting->arrived != mask) {
    threads_[static_cast<size_t>(self)].state = State::kInWarp;
    go_to(take_next());
    return;
  }
  if (orders_memory) race::join_lanes(thread.warp, mask);
  combine(meeting->payloads, mask);
  meeting->arrived = 0;
  const int first = thread.warp * kWarpSize;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1) == 0 || lane == thread.lane) continue;
    threads_[static_cast<size_t>(first + lane)].state = State::kReady;
    ready_.push_back(first + lane);
  }
}

void Machine::leave_with(const std::string& what) {
  failure_ = what;
  current_thread = nullptr;
  switch_from(*running_, main_);  // the block is given up: nobody comes back
}

std::string Machine::where(const Thread& thread) const {
  std::ostringstream out;
  const Grid& grid = current_grid;
  out << launch_->name << ": thread (" << thread.index.x << ", " << thread.index.y << ", "
      << thread.index.z << ") of block (" << grid.block_index.x << ", " << grid.block_index.y
      << ", " << grid.block_index.z << ")";
  return out.str();
}

std::string Machine::standstill() const {
  std::ostringstream out;
  out << launch_->name << ": block (" << current_grid.block_index.x << ", "
      << current_grid.block_index.y << ", " << current_grid.block_index.z << ") stands still: ";
  int waiting = 0;
  for (int i = 0; i < count_; ++i) {
    waiting += threads_[static_cast<size_t>(i)].state == State::kAtBarrier;
  }
  out << waiting << " of " << alive_ << " threads wait at __syncthreads";
  for (size_t w = 0; w < warps_.size() && static_cast<int>(w) * kWarpSize < count_; ++w) {
    for (const Meeting& meeting : warps_[w].meetings) {
      if (meeting.arrived == 0) continue;
      out << "; lanes " << std::hex << "0x" << meeting.arrived << " of warp " << std::dec << w
          << " wait in " << meeting.name << " for lanes 0x" << std::hex
          << (meeting.mask & ~meeting.arrived) << std::dec;
    }
  }
  return out.str();
}

void Machine::run_block(uint64_t linear) {
  const Index3& grid = launch_->grid;
  current_grid.block_index = {static_cast<unsigned>(linear % grid.x),
                              static_cast<unsigned>(linear / grid.x % grid.y),
                              static_cast<unsigned>(linear / grid.x / grid.y)};
  for (int i = 0; i < count_; ++i) {
    threads_[static_cast<size_t>(i)].state = State::kNew;
    threads_[static_cast<size_t>(i)].fiber = nullptr;
  }
  for (size_t w = 0; w < warps_.size(); ++w) {
    warps_[w].left = 0;
    for (Meeting& meeting : warps_[w].meetings) meeting.arrived = 0;
  }
  ready_.clear();
  ready_front_ = 0;
  started_ = 0;
  at_barrier_ = 0;
  alive_ = count_;
  statics_.clear();
  shared_used_ = (launch_->shared_bytes + 127) / 128 * 128;
  std::memset(arena::shared_memory(), 0xff, shared_used_);
  race::begin_block();
  running_ = &main_;
  go_to(take_next());
  if (!failure_.empty()) {  // stacks that stopped in the middle start anew
    free_fibers_.clear();
    for (const auto& fiber : fibers_) {
      fiber->where = nullptr;
      free_fibers_.push_back(fiber.get());
    }
  }
}

std::string Machine::run(const Launch& launch, const std::function<void()>& kernel) {
  launch_ = &launch;
  kernel_ = &kernel;
  failure_.clear();
  const Index3& block = launch.block;
  count_ = static_cast<int>(block.x * block.y * block.z);
  for (int i = 0; i < count_; ++i) {
    const auto u = static_cast<unsigned>(i);
    threads_[static_cast<size_t>(i)].self = {
        {u % block.x, u / block.x % block.y, u / block.x / block.y},
        i,
        i % kWarpSize,
        i / kWarpSize};
  }
  for (size_t w = 0; w < warps_.size(); ++w) {
    const int rest = count_ - static_cast<int>(w) * kWarpSize;
    warps_[w].lanes = rest >= kWarpSize ? 0xffffffffu : rest > 0 ? (1u << rest) - 1 : 0;
  }
  current_grid.block_size = launch.block;
  current_grid.grid_size = launch.grid;
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  const uint64_t seed = next_random();
  race::begin_launch();
  const Order order(blocks, seed);
  Machine* const previous = machine;
  machine = this;
  for (uint64_t i = 0; i < blocks && failure_.empty(); ++i) {
    thread_seed_ = mixed(seed + i);
    new_first_ = (thread_seed_ & 1) != 0;
    order_ = Order(static_cast<uint64_t>(count_), thread_seed_);
    run_block(order[i]);
  }
  machine = previous;
  current_thread = nullptr;
  return failure_;
}

void* Machine::dynamic_shared(size_t alignment) {
  char* const memory = arena::shared_memory();
  (void)alignment;
  return memory;
}

void* Machine::static_shared(const void* site, size_t bytes, size_t alignment) {
  for (const StaticArray& array : statics_) {
    if (array.site == site) return array.data;
  }
  const size_t begin = (shared_used_ + alignment - 1) / alignment * alignment;
  if (begin + bytes > launch_->shared_limit) {
    leave_with(
        std::string(launch_->name) + ": the block's shared memory, " +
        std::to_string(launch_->shared_bytes) + " bytes and arrays of fixed size, exceeds " +
        std::to_string(launch_->shared_limit) +
        (launch_->shared_limit < kMaxSharedBytes ? " bytes, and nobody asked for more" : " bytes"));
  }
  shared_used_ = begin + bytes;
  char* const data = arena::shared_memory() + begin;
  std::memset(data, 0xff, bytes);
  statics_.push_back({site, data});
  return data;
}

}  // namespace

void fail(const std::string& what) {
  machine->leave_with(what);
  std::abort();  // not reached
}

void sync_threads() { machine->sync_threads(); }

void warp_collective(unsigned mask, const char* name, void* payload, Combine combine,
                     bool orders_memory) {
  machine->collective(mask, name, payload, combine, orders_memory);
}

void* dynamic_shared(size_t alignment) { return machine->dynamic_shared(alignment); }

void* static_shared(const void* site, size_t bytes, size_t alignment) {
  return machine->static_shared(site, bytes, alignment);
}

void check_alignment(const void* pointer, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes == 0) return;
  char text[160];
  fail("an access of " + std::to_string(bytes) +
       " bytes at once is not aligned to them: " + arena::describe(pointer, text, sizeof text));
}

void check_space(const void* pointer, bool shared) {
  const char* const begin = arena::shared_memory();
  const bool is_shared = pointer >= begin && pointer < begin + kMaxSharedBytes;
  if (is_shared == shared) return;
  fail(shared ? "store_shared_vector writes to an address that is not in shared memory"
              : "store_vector writes to shared memory; store_shared_vector does that");
}

namespace {

struct Tile {
  const void* pointer;
  unsigned leading;
};

}  // namespace

void check_tile(const char* name, const void* pointer, unsigned leading, size_t element_bytes) {
  check_alignment(pointer, 32);
  if (leading < 16 || leading * element_bytes % 16 != 0) {
    fail(std::string(name) + ": rows of a tile must lie a multiple of 16 bytes apart, they lie " +
         std::to_string(leading * element_bytes));
  }
  Tile own{pointer, leading};
  const Combine compare = [](void* const* payloads, unsigned) {
    const Tile& first = *static_cast<const Tile*>(payloads[0]);
    for (int lane = 1; lane < kWarpSize; ++lane) {
      const Tile& other = *static_cast<const Tile*>(payloads[lane]);
      if (other.pointer != first.pointer || other.leading != first.leading) {
        fail("lanes of a warp ask for different tiles: lane 0 and lane " + std::to_string(lane));
      }
    }
  };
  machine->collective(0xffffffffu, name, &own, compare, false);
}

void check_operands(bool are_set) {
  if (!are_set) fail("mma_sync: a tile is multiplied that nothing was loaded into");
}

void multiply_tiles(const float* a, const float* b, float* c) {
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      const float left = a[row * 16 + k];
      for (int column = 0; column < 16; ++column) {
        c[row * 16 + column] += left * b[k * 16 + column];
      }
    }
  }
}

std::string run_grid(const Launch& launch, const std::function<void()>& kernel) {
  return this_machine().run(launch, kernel);
}

void set_seed(uint64_t seed) { random_state.store(seed); }

uint64_t next_random() { return mixed(random_state.fetch_add(0x9e3779b97f4a7c15u)); }

}  // namespace tessera::gpu::emulation
