// Memory: the allocator interface, the caching CPU allocator, and statistics by category.
//
// Every block belongs to a category and to the MemoryStats of the context that requested it, so
// that "activations: 1.2 GiB, peak 3.4 GiB" is known for each of several trainings in a process.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <tessera/core/context.h>
#include <tessera/core/device.h>

namespace tessera {

enum class MemoryCategory : uint8_t {
  kParameter,
  kGradient,
  kOptimizer,
  kUnsharded,      // unsharded parameters
  kWeightCache,    // copies of parameters in other forms (autograd/weight_cache.h)
  kCommunication,  // buffers of collectives
  kStaging,        // host copies on their way to or from a device or a file
  kActivation,     // everything else
};
inline constexpr int kNumMemoryCategories = 8;
const char* name_of(MemoryCategory category);

// Bytes in use and their high-water marks. Thread-safe.
class MemoryStats {
 public:
  void allocated(MemoryCategory category, int64_t bytes);
  void freed(MemoryCategory category, int64_t bytes);
  int64_t current() const { return total_.load(std::memory_order_relaxed); }
  int64_t peak() const { return total_peak_.load(std::memory_order_relaxed); }
  int64_t current(MemoryCategory category) const;
  int64_t peak(MemoryCategory category) const;
  int64_t allocations() const { return allocations_.load(std::memory_order_relaxed); }
  void reset_peak();  // peaks become the current values
  // For nested measurements: begin_peaks() returns the marks and starts new ones from the current
  // values; end_peaks() returns the new ones and restores the higher of both.
  struct Peaks {
    int64_t total = 0;
    std::array<int64_t, kNumMemoryCategories> categories{};
  };
  Peaks begin_peaks();
  Peaks end_peaks(const Peaks& before);
  std::string summary() const;  // a table: category, current, peak

 private:
  std::atomic<int64_t> total_{0}, total_peak_{0}, allocations_{0};
  std::array<std::atomic<int64_t>, kNumMemoryCategories> current_{}, peak_{};
};

// The statistics of the current context.
std::shared_ptr<MemoryStats> memory_stats();
// Makes `other` count into the statistics of the current context, for the context of a worker
// thread.
void share_memory_stats(Context& other);

// Storages made in the scope are counted under `category`.
class MemoryCategoryGuard {
 public:
  explicit MemoryCategoryGuard(MemoryCategory category);
  ~MemoryCategoryGuard();
  MemoryCategoryGuard(const MemoryCategoryGuard&) = delete;
  MemoryCategoryGuard& operator=(const MemoryCategoryGuard&) = delete;
  static MemoryCategory current();

 private:
  MemoryCategory previous_;
};

class Allocator {
 public:
  virtual ~Allocator() = default;
  // Memory is uninitialized and aligned to at least 64 bytes. Throws OutOfMemory, whose text holds
  // the request and the summary of the context.
  virtual void* allocate(size_t bytes) = 0;
  virtual void deallocate(void* pointer, size_t bytes) noexcept = 0;
  virtual void release_cached() = 0;         // gives unused blocks back to the system
  virtual int64_t cached_bytes() const = 0;  // held but unused
};

// Keeps freed blocks and reuses them: a training step after the first requests nothing from the
// system. Blocks under 1 MiB are in lists by size class (powers of two split in 8); larger ones are
// split from and joined in an arena (core/memory/block_arena.h), so that little more is held than
// was in use at a time. Under ASan, slack and free blocks are poisoned.
Allocator& cpu_allocator();

// The allocator of a device. Throws DeviceError for a device without one in this program.
Allocator& allocator_for(const Device& device);

// Upper limit for bytes in use by the CPU allocator of this process (0: none); allocations beyond
// throw OutOfMemory. Meant for tests and for sharing a machine.
void set_cpu_memory_limit(int64_t bytes);

}  // namespace tessera
