#include <tessera/core/cuda/pinned_memory.h>

#include <algorithm>
#include <bit>
#include <string>

#include <tessera/core/cuda/capture.h>
#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/contexts.h>
#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>

namespace tessera::gpu {

size_t PinnedAllocator::size_class(size_t bytes) {
  if (bytes <= kSmallest) return 0;
  if (bytes <= kSmallest << kWholeClasses) {
    return static_cast<size_t>(std::bit_width((bytes - 1) / kSmallest));
  }
  // Between 2^e and 2^(e + 1): the first to the last eighth.
  const int e = std::bit_width(bytes - 1) - 1;
  const size_t eighth = size_t{1} << (e - 3);
  const size_t part = (bytes - (size_t{1} << e) + eighth - 1) / eighth;
  const int first = std::bit_width(kSmallest << kWholeClasses) - 1;
  return kWholeClasses + static_cast<size_t>(e - first) * 8 + part;
}

size_t PinnedAllocator::size_of_class(size_t kind) {
  if (kind <= kWholeClasses) return kSmallest << kind;
  const size_t above = kind - kWholeClasses - 1;
  const size_t whole = (kSmallest << kWholeClasses) << (above / 8);
  return whole + whole / 8 * (above % 8 + 1);
}

// Where a block belongs that nobody owns.
void PinnedAllocator::set_aside(Block& block) noexcept {
  block.next = nullptr;
  if (block.uses.empty()) {
    Block*& list = free_[size_class(block.size)];
    block.next = list;
    list = &block;
    return;
  }
  const Use& last = block.uses.back();
  Queue& queue = waiting_.find({last.device, last.stream})->second;  // of record_use()
  (queue.first == nullptr ? queue.first : queue.last->next) = &block;
  queue.last = &block;
}

void PinnedAllocator::forget_last_use(Block& block) noexcept {
  const Use& use = block.uses.back();
  try {
    events_[use.device].push_back(use.event);
  } catch (...) {  // no memory for the list
    cudaEventDestroy(use.event);
  }
  block.uses.pop_back();
}

void PinnedAllocator::take_back_finished() noexcept {
  for (auto& [stream, queue] : waiting_) {
    while (queue.first != nullptr) {
      Block& block = *queue.first;
      const cudaError_t state = cudaEventQuery(block.uses.back().event);
      if (state == cudaErrorNotReady) break;
      if (state != cudaSuccess) cudaGetLastError();  // the device is lost, and with it the copy
      queue.first = block.next;
      forget_last_use(block);
      set_aside(block);  // where it waits for another stream, that one's turn comes
    }
  }
}

void* PinnedAllocator::allocate(size_t bytes) {
  TS_CHECK_AS(OutOfMemory, bytes <= kSmallest << 40, "pinned allocator", "cannot allocate ", bytes,
              " bytes of page-locked memory");
  const size_t kind = size_class(bytes), size = size_of_class(kind);
  enter_some_device();
  const RelaxedCapture relaxed;
  const std::lock_guard lock(mutex_);
  take_back_finished();
  if (Block* const block = free_[kind]; block != nullptr) {
    free_[kind] = block->next;
    cached_ -= static_cast<int64_t>(size);
    in_use_ += static_cast<int64_t>(size);
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
  in_use_ += static_cast<int64_t>(size);
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
  in_use_ -= static_cast<int64_t>(block.size);
  set_aside(block);
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
  waiting_.try_emplace({device, stream});
  std::vector<cudaEvent_t>& unused = events_[device];
  cudaEvent_t event = nullptr;
  if (unused.empty()) {
    TS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  } else {
    event = unused.back();
    unused.pop_back();
  }
  block.uses.push_back({device, stream, event});
  TS_CUDA(cudaEventRecord(event, stream));
  return true;
}

void PinnedAllocator::release_cached() {
  enter_some_device();
  const std::lock_guard lock(mutex_);
  for (const auto& [stream, queue] : waiting_) {
    for (Block* block = queue.first; block != nullptr; block = block->next) {
      for (const Use& use : block->uses) cudaEventSynchronize(use.event);
    }
  }
  // Once for each stream that a block was used on.
  const auto waits = [](const auto& entry) { return entry.second.first != nullptr; };
  while (std::ranges::any_of(waiting_, waits)) take_back_finished();
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

int64_t PinnedAllocator::bytes_in_use() const {
  const std::lock_guard lock(mutex_);
  return in_use_;
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
