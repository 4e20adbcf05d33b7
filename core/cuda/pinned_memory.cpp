#include <tessera/core/cuda/pinned_memory.h>

#include <bit>
#include <string>

#include <tessera/core/cuda/backend.h>
#include <tessera/core/cuda/capture.h>
#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/contexts.h>
#include <tessera/core/error.h>

namespace tessera::gpu {

int PinnedAllocator::size_class(size_t bytes) {
  return bytes <= kSmallest ? 0 : std::bit_width((bytes - 1) / kSmallest);
}

// Forgets the events that have happened.
bool PinnedAllocator::is_over(Block& block) noexcept {
  while (!block.uses.empty()) {
    const cudaError_t state = cudaEventQuery(block.uses.back().event);
    if (state == cudaErrorNotReady) return false;
    if (state != cudaSuccess) cudaGetLastError();  // the device is lost, and with it the copy
    cudaEventDestroy(block.uses.back().event);
    block.uses.pop_back();
  }
  return true;
}

void PinnedAllocator::take_back_finished() noexcept {
  for (Block** place = &waiting_; *place != nullptr;) {
    Block* const block = *place;
    if (!is_over(*block)) {
      place = &block->next;
      continue;
    }
    *place = block->next;
    Block*& list = free_[static_cast<size_t>(size_class(block->size))];
    block->next = list;
    list = block;
  }
}

void* PinnedAllocator::allocate(size_t bytes) {
  TS_CHECK_AS(OutOfMemory, bytes <= kSmallest << 40, "pinned allocator", "cannot allocate ", bytes,
              " bytes of page-locked memory");
  const size_t kind = static_cast<size_t>(size_class(bytes)), size = kSmallest << kind;
  enter_some_device();
  const RelaxedCapture relaxed;
  const std::lock_guard lock(mutex_);
  take_back_finished();
  if (Block* const block = free_[kind]; block != nullptr) {
    free_[kind] = block->next;
    cached_ -= static_cast<int64_t>(size);
    return block->data;
  }
  void* memory = nullptr;
  cudaError_t error = cudaMallocHost(&memory, size);
  if (error != cudaSuccess) {
    release_free();
    error = cudaMallocHost(&memory, size);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // was told; the next call must not see it
    TS_THROW(OutOfMemory, "pinned allocator", "cannot allocate ", bytes,
             " bytes of page-locked memory (", cudaGetErrorName(error),
             "); smaller batches, or fewer ahead, need less\n", memory_stats()->summary());
  }
  try {
    blocks_[static_cast<char*>(memory)] = {static_cast<char*>(memory), size, {}, nullptr};
  } catch (...) {
    cudaFreeHost(memory);
    throw;
  }
  return memory;
}

void PinnedAllocator::deallocate(void* pointer, size_t) noexcept {
  enter_some_device();
  const RelaxedCapture relaxed;
  const std::lock_guard lock(mutex_);
  const auto place = blocks_.find(static_cast<char*>(pointer));
  if (place == blocks_.end()) return;
  Block& block = place->second;
  cached_ += static_cast<int64_t>(block.size);
  block.next = waiting_;
  waiting_ = &block;
  take_back_finished();
}

bool PinnedAllocator::record_use(const void* pointer, cudaStream_t stream) {
  int device = 0;
  TS_CUDA(cudaGetDevice(&device));
  char* const address = static_cast<char*>(const_cast<void*>(pointer));
  const std::lock_guard lock(mutex_);
  auto place = blocks_.upper_bound(address);
  if (place == blocks_.begin()) return false;
  Block& block = (--place)->second;
  if (address >= block.data + block.size) return false;
  for (const Use& use : block.uses) {
    if (use.device != device || use.stream != stream) continue;
    TS_CUDA(cudaEventRecord(use.event, stream));
    return true;
  }
  block.uses.reserve(block.uses.size() + 1);
  cudaEvent_t event = nullptr;
  TS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  block.uses.push_back({device, stream, event});
  TS_CUDA(cudaEventRecord(event, stream));
  return true;
}

void PinnedAllocator::release_cached() {
  enter_some_device();
  const std::lock_guard lock(mutex_);
  for (Block* block = waiting_; block != nullptr; block = block->next) {
    for (const Use& use : block->uses) cudaEventSynchronize(use.event);
  }
  take_back_finished();
  release_free();
}

void PinnedAllocator::release_free() noexcept {
  for (Block*& list : free_) {
    while (list != nullptr) {
      Block* const block = list;
      list = block->next;
      cached_ -= static_cast<int64_t>(block->size);
      cudaFreeHost(block->data);
      blocks_.erase(block->data);
    }
  }
}

int64_t PinnedAllocator::cached_bytes() const {
  const std::lock_guard lock(mutex_);
  return cached_;
}

PinnedAllocator& pinned_memory() {
  static PinnedAllocator* const allocator = new PinnedAllocator;
  return *allocator;
}

}  // namespace tessera::gpu
