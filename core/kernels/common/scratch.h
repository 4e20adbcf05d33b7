// Workspace of a parallel loop, taken from the allocator before the loop begins.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include <tessera/core/memory/allocator.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {

// One slice for each thread that can take part in a loop over `tasks` pieces.
class Scratch {
 public:
  Scratch(int64_t tasks, int64_t slice_bytes)
      : slice_bytes_((slice_bytes + 63) / 64 * 64),
        bytes_(static_cast<size_t>(
            slice_bytes_ * std::min<int64_t>(in_parallel_region() ? 1 : num_threads(), tasks))),
        data_(static_cast<char*>(bytes_ > 0 ? cpu_allocator().allocate(bytes_) : nullptr)) {}
  ~Scratch() {
    if (data_ != nullptr) cpu_allocator().deallocate(data_, bytes_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // A slice that no other range has. Called once for each range of the loop.
  char* take() { return data_ + next_.fetch_add(1, std::memory_order_relaxed) * slice_bytes_; }

 private:
  int64_t slice_bytes_;
  size_t bytes_;
  char* data_;
  std::atomic<int64_t> next_{0};
};

}  // namespace tessera::kernels
