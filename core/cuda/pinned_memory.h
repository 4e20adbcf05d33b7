// Page-locked host memory, kept and reused.
//
// A block is reused when its owner has released it and the copies that were queued from it or into
// it are over, which events on their streams tell without a wait. Of the blocks that wait for one
// stream only the oldest is queried, since copies end in their order. Sizes are powers of two from
// 4096 on, above 1 MiB in eighths between. Thread-safe.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <tessera/core/memory/allocator.h>

namespace tessera::gpu {

class PinnedAllocator final : public Allocator {
 public:
  void* allocate(size_t bytes) override;
  void deallocate(void* pointer, size_t bytes) noexcept override;
  void release_cached() override;  // waits for the copies under way
  int64_t cached_bytes() const override;
  int64_t bytes_in_use() const;  // in live blocks (rounded sizes)

  // What is queued on `stream` of the current device by now uses the block that `pointer` lies in.
  // False for memory of other origin, which its owner has to keep.
  bool record_use(const void* pointer, cudaStream_t stream);

 private:
  struct Use {
    int device;
    cudaStream_t stream;
    cudaEvent_t event;
  };
  struct Block {
    char* data = nullptr;
    size_t size = 0;
    std::vector<Use> uses;
    Block* next = nullptr;  // in the list of free or of waiting blocks
  };
  struct Queue {
    Block* first = nullptr;
    Block* last = nullptr;
  };
  static constexpr size_t kSmallest = 4096;
  static constexpr int kWholeClasses = 8;  // up to kSmallest << 8, 1 MiB
  static size_t size_class(size_t bytes);
  static size_t size_of_class(size_t kind);
  void set_aside(Block& block) noexcept;
  void forget_last_use(Block& block) noexcept;
  void take_back_finished() noexcept;
  void release_free() noexcept;

  mutable std::mutex mutex_;
  std::map<char*, Block> blocks_;   // all, by address
  std::array<Block*, 272> free_{};  // by size class
  // Nobody's, with copies under way: by the device and the stream of their last use.
  std::map<std::pair<int, cudaStream_t>, Queue> waiting_;
  std::map<int, std::vector<cudaEvent_t>> events_;  // unused ones, by device
  int64_t cached_ = 0;                              // bytes of both
  int64_t in_use_ = 0;
};

// Never destroyed: storages with static lifetime may outlive every other object.
PinnedAllocator& pinned_memory();

}  // namespace tessera::gpu
