#include <tessera/core/allocator.h>

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <utility>
#include <vector>

#include <tessera/core/error.h>

#if defined(__SANITIZE_ADDRESS__)
#define TS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TS_ASAN 1
#endif
#endif
#if defined(TS_ASAN)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(pointer, size) ((void)(pointer), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(pointer, size) ((void)(pointer), (void)(size))
#endif

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
constexpr size_t kHugePage = size_t{2} << 20;

// Rounds up to one of 8 steps between powers of two: at most 12.5% slack, few classes.
size_t size_class(size_t bytes) {
  if (bytes <= 512) return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const int log2 = 63 - __builtin_clzll(bytes - 1);
  const size_t step = size_t{1} << (log2 - 3);
  return (bytes + step - 1) / step * step;
}

class CpuAllocator final : public Allocator {
 public:
  void* allocate(size_t bytes) override {
    const size_t rounded = size_class(bytes);
    void* pointer = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (limit_ > 0 && in_use_ + static_cast<int64_t>(rounded) > limit_) {
        out_of_memory(bytes, "the limit of set_cpu_memory_limit is reached");
      }
      std::vector<void*>& free = free_[rounded];
      if (!free.empty()) {
        pointer = free.back();
        free.pop_back();
        cached_ -= static_cast<int64_t>(rounded);
      }
      in_use_ += static_cast<int64_t>(rounded);
    }
    if (pointer == nullptr) pointer = from_system(bytes, rounded);
    ASAN_UNPOISON_MEMORY_REGION(pointer, bytes);
    return pointer;
  }

  void deallocate(void* pointer, size_t bytes) noexcept override {
    const size_t rounded = size_class(bytes);
    ASAN_POISON_MEMORY_REGION(pointer, rounded);
    std::lock_guard lock(mutex_);
    in_use_ -= static_cast<int64_t>(rounded);
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
    for (auto& [size, blocks] : free_) {
      for (void* block : blocks) {
        ASAN_UNPOISON_MEMORY_REGION(block, size);
        std::free(block);
      }
    }
    free_.clear();
    cached_ = 0;
  }

  int64_t cached_bytes() const override {
    std::lock_guard lock(mutex_);
    return cached_;
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

  void* from_system(size_t bytes, size_t rounded) {
    // Blocks of several huge pages are aligned to them: far fewer TLB misses in large products.
    const size_t alignment = rounded >= 2 * kHugePage ? kHugePage : kAlignment;
    void* pointer = nullptr;
    if (rounded < bytes || posix_memalign(&pointer, alignment, rounded) != 0) {
      release_cached();
      if (rounded < bytes || posix_memalign(&pointer, alignment, rounded) != 0) {
        {
          std::lock_guard lock(mutex_);
          in_use_ -= static_cast<int64_t>(rounded);
        }
        out_of_memory(bytes, "the system has no more memory");
      }
    }
    if (alignment == kHugePage) madvise(pointer, rounded, MADV_HUGEPAGE);
    ASAN_POISON_MEMORY_REGION(pointer, rounded);
    return pointer;
  }

  mutable std::mutex mutex_;
  std::unordered_map<size_t, std::vector<void*>> free_;
  int64_t cached_ = 0, in_use_ = 0, limit_ = 0;
};

CpuAllocator& the_cpu_allocator() {
  // Never destroyed: storages with static lifetime may outlive every other object.
  static CpuAllocator* allocator = new CpuAllocator;
  return *allocator;
}

}  // namespace

const char* name_of(MemoryCategory category) {
  constexpr const char* names[kNumMemoryCategories] = {
      "parameter", "gradient", "optimizer", "unsharded", "communication", "staging", "activation"};
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

std::string MemoryStats::summary() const {
  std::ostringstream out;
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
  TS_CHECK_DEVICE(device.is_cpu(), "allocator", "this program has no backend for ", device,
                  "; use cpu, or build with CUDA");
  return the_cpu_allocator();
}

void set_cpu_memory_limit(int64_t bytes) { the_cpu_allocator().set_limit(bytes); }

}  // namespace tessera
