#include <tessera/core/memory/allocator.h>

#include <cstdlib>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <pthread.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <tessera/core/asan.h>
#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/memory/block_arena.h>
#include <tessera/core/memory/return_pages.h>
#include <tessera/core/plain_text.h>

namespace tessera {
namespace {

struct StatsSlot {
  std::shared_ptr<MemoryStats> stats = std::make_shared<MemoryStats>();
};
struct CategorySlot {
  MemoryCategory category = MemoryCategory::kActivation;
};

void raise(std::atomic<int64_t>& peak, int64_t value) {
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (seen < value && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

constexpr size_t kAlignment = 64;
constexpr size_t kLarge = size_t{1} << 20;
constexpr size_t kLeastReturned = size_t{32} << 20;

// Where the system refuses, the pages stay: a matter of memory alone.
void return_pages([[maybe_unused]] void* block, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;  // a huge page: parts of one are kept
  const auto begin = reinterpret_cast<uintptr_t>(block);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t end = (begin + bytes) / kPage * kPage;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
#endif
}

// What is taken for `bytes`. Small blocks: one of 8 steps between powers of two, at most 12.5%
// slack and few classes. Large ones: the arena's grain. Wraps to less than `bytes` at the end of
// the address space.
size_t rounded_size(size_t bytes) {
  if (bytes >= kLarge) {
    return (bytes + detail::BlockArena::kGrain - 1) / detail::BlockArena::kGrain *
           detail::BlockArena::kGrain;
  }
  if (bytes <= 512) return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const int log2 = 63 - __builtin_clzll(bytes - 1);
  const size_t step = size_t{1} << (log2 - 3);
  return (bytes + step - 1) / step * step;
}

class CpuAllocator final : public Allocator {
 public:
  // Around fork(): the child is not to find the mutex held by a thread that it has not.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  void* allocate(size_t bytes) override {
    const size_t rounded = rounded_size(bytes);
    void* pointer = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (limit_ > 0 && in_use_ + static_cast<int64_t>(rounded) > limit_) {
        out_of_memory(bytes, "the limit of set_cpu_memory_limit is reached");
      }
      pointer = rounded < bytes ? nullptr : take(rounded);
      if (pointer == nullptr) {
        release_locked();
        pointer = rounded < bytes ? nullptr : take(rounded);
        if (pointer == nullptr) out_of_memory(bytes, "the system has no more memory");
      }
      in_use_ += static_cast<int64_t>(rounded);
    }
    ASAN_UNPOISON_MEMORY_REGION(pointer, bytes);
    return pointer;
  }

  void deallocate(void* pointer, size_t bytes) noexcept override {
    const size_t rounded = rounded_size(bytes);
    ASAN_POISON_MEMORY_REGION(pointer, rounded);
    std::lock_guard lock(mutex_);
    in_use_ -= static_cast<int64_t>(rounded);
    if (rounded >= kLarge) {
      if (returned_.erase(pointer) > 0) return_pages(pointer, bytes);
      return arena_.deallocate(pointer, rounded);
    }
    try {
      free_[rounded].push_back(pointer);
      cached_ += static_cast<int64_t>(rounded);
    } catch (...) {  // no memory for the list: give the block back
      ASAN_UNPOISON_MEMORY_REGION(pointer, rounded);
      std::free(pointer);
    }
  }

  void release_cached() override {
    std::lock_guard lock(mutex_);
    release_locked();
  }

  int64_t cached_bytes() const override {
    std::lock_guard lock(mutex_);
    return cached_ + arena_.cached_bytes();
  }

  void return_pages_when_freed(void* block, size_t bytes) {
    if (bytes < kLeastReturned) return;
    std::lock_guard lock(mutex_);
    returned_.insert(block);
  }

  void set_limit(int64_t bytes) {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
  }

 private:
  [[noreturn]] static void out_of_memory(size_t bytes, const char* reason) {
    TS_THROW(OutOfMemory, "cpu allocator", "cannot allocate ", bytes, " bytes: ", reason, "\n",
             memory_stats()->summary());
  }

  // A block of `rounded` bytes, poisoned; nullptr where the system has none.
  void* take(size_t rounded) {
    if (rounded >= kLarge) {
      void* block = arena_.allocate(rounded);
      if (block != nullptr) ASAN_POISON_MEMORY_REGION(block, rounded);
      return block;
    }
    std::vector<void*>& free = free_[rounded];
    if (!free.empty()) {
      void* block = free.back();
      free.pop_back();
      cached_ -= static_cast<int64_t>(rounded);
      return block;
    }
    void* block = nullptr;
    if (posix_memalign(&block, kAlignment, rounded) != 0) return nullptr;
    ASAN_POISON_MEMORY_REGION(block, rounded);
    return block;
  }

  void release_locked() {
    for (auto& [size, blocks] : free_) {
      for (void* block : blocks) {
        ASAN_UNPOISON_MEMORY_REGION(block, size);
        std::free(block);
      }
    }
    free_.clear();
    cached_ = 0;
    arena_.release_free();
  }

  mutable std::mutex mutex_;
  std::unordered_map<size_t, std::vector<void*>> free_;
  detail::BlockArena arena_;
  std::unordered_set<void*> returned_;           // blocks in use whose pages go back
  int64_t cached_ = 0, in_use_ = 0, limit_ = 0;  // cached_: without the arena
};

CpuAllocator& the_cpu_allocator() {
  // Never destroyed: storages with static lifetime may outlive every other object.
  static CpuAllocator* const allocator = [] {
    const auto lock = [] { the_cpu_allocator().lock(); };
    const auto unlock = [] { the_cpu_allocator().unlock(); };
    ::pthread_atfork(lock, unlock, unlock);
    return new CpuAllocator;
  }();
  return *allocator;
}

}  // namespace

const char* name_of(MemoryCategory category) {
  constexpr const char* names[kNumMemoryCategories] = {"parameter", "gradient",     "optimizer",
                                                       "unsharded", "weight cache", "communication",
                                                       "staging",   "activation"};
  return names[static_cast<int>(category)];
}

void MemoryStats::allocated(MemoryCategory category, int64_t bytes) {
  const int c = static_cast<int>(category);
  raise(peak_[c], current_[c].fetch_add(bytes, std::memory_order_relaxed) + bytes);
  raise(total_peak_, total_.fetch_add(bytes, std::memory_order_relaxed) + bytes);
  allocations_.fetch_add(1, std::memory_order_relaxed);
}

void MemoryStats::freed(MemoryCategory category, int64_t bytes) {
  current_[static_cast<int>(category)].fetch_sub(bytes, std::memory_order_relaxed);
  total_.fetch_sub(bytes, std::memory_order_relaxed);
}

int64_t MemoryStats::current(MemoryCategory category) const {
  return current_[static_cast<int>(category)].load(std::memory_order_relaxed);
}
int64_t MemoryStats::peak(MemoryCategory category) const {
  return peak_[static_cast<int>(category)].load(std::memory_order_relaxed);
}

void MemoryStats::reset_peak() {
  total_peak_.store(total_.load());
  for (int c = 0; c < kNumMemoryCategories; ++c) peak_[c].store(current_[c].load());
}

MemoryStats::Peaks MemoryStats::begin_peaks() {
  Peaks before{peak(), {}};
  for (size_t c = 0; c < kNumMemoryCategories; ++c) before.categories[c] = peak_[c].load();
  reset_peak();
  return before;
}

MemoryStats::Peaks MemoryStats::end_peaks(const Peaks& before) {
  Peaks now{peak(), {}};
  raise(total_peak_, before.total);
  for (size_t c = 0; c < kNumMemoryCategories; ++c) {
    now.categories[c] = peak_[c].load();
    raise(peak_[c], before.categories[c]);
  }
  return now;
}

std::string MemoryStats::summary() const {
  PlainText<std::ostringstream> out;
  out << "memory in bytes (current, peak):\n";
  for (int c = 0; c < kNumMemoryCategories; ++c) {
    const auto category = static_cast<MemoryCategory>(c);
    if (peak(category) == 0) continue;
    out << "  " << name_of(category) << ": " << current(category) << ", " << peak(category) << "\n";
  }
  out << "  total: " << current() << ", " << peak();
  return out.str();
}

std::shared_ptr<MemoryStats> memory_stats() { return Context::current().slot<StatsSlot>().stats; }
void share_memory_stats(Context& other) { Context::current().share_slot<StatsSlot>(other); }

MemoryCategoryGuard::MemoryCategoryGuard(MemoryCategory category)
    : previous_(std::exchange(Context::current().slot<CategorySlot>().category, category)) {}
MemoryCategoryGuard::~MemoryCategoryGuard() {
  Context::current().slot<CategorySlot>().category = previous_;
}
MemoryCategory MemoryCategoryGuard::current() {
  return Context::current().slot<CategorySlot>().category;
}

Allocator& cpu_allocator() { return the_cpu_allocator(); }

Allocator& allocator_for(const Device& device) {
  if (device.is_cuda()) return gpu::device_allocator(device.index);
  TS_CHECK_DEVICE(device.is_cpu(), "allocator", "there are no bytes on ", device);
  return the_cpu_allocator();
}

void return_pages_when_freed(void* block, size_t bytes) {
  the_cpu_allocator().return_pages_when_freed(block, bytes);
}

void set_cpu_memory_limit(int64_t bytes) { the_cpu_allocator().set_limit(bytes); }

}  // namespace tessera
