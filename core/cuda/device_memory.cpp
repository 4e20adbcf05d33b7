#include <tessera/core/cuda/device_memory.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/hooks.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/error.h>

namespace tessera::gpu {
namespace {

constexpr size_t kRounding = 512;
constexpr size_t kSmallRequest = size_t{1} << 20, kSmallSegment = size_t{2} << 20;
constexpr size_t kMediumRequest = size_t{10} << 20, kMediumSegment = size_t{20} << 20;

size_t round_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

struct Block {
  char* data;
  size_t size;
  cudaStream_t stream;
  bool small;  // of a segment for small requests
  bool free = true;
  Block* before = nullptr;  // neighbours in the segment
  Block* after = nullptr;
  std::vector<cudaStream_t> users;  // other streams that used it
  size_t requested = 0;
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->data < b->data;
  }
};

class CachingAllocator final : public DeviceAllocator {
 public:
  explicit CachingAllocator(int device) : device_(device) {}

  void* allocate(size_t bytes) override {
    const CurrentDevice scope(device_);
    const cudaStream_t stream = current_stream();
    const size_t size = round_up(bytes == 0 ? 1 : bytes, kRounding);
    if (size < bytes) out_of_memory(bytes);
    std::lock_guard lock(mutex_);
    take_back_finished();
    Block* block = find(size, stream);
    if (block == nullptr) block = new_segment(size, stream, bytes);
    split(block, size);
    block->free = false;
    block->requested = bytes;
    owned_[block->data] = block;
    use_.in_use += static_cast<int64_t>(block->size);
    hook_accessible(block->data, bytes, true, block->stream);
    return block->data;
  }

  void deallocate(void* pointer, size_t) noexcept override {
    // The null stream of a block is that of this device, whichever is the thread's.
    int previous = 0;
    cudaGetDevice(&previous);
    if (previous != device_) cudaSetDevice(device_);
    free_block(pointer);
    if (previous != device_) cudaSetDevice(previous);
  }

  void free_block(void* pointer) noexcept {
    std::lock_guard lock(mutex_);
    const auto place = owned_.find(pointer);
    if (place == owned_.end()) return;
    Block* const block = place->second;
    owned_.erase(place);
    use_.in_use -= static_cast<int64_t>(block->size);
    if (block->users.empty()) {
      give_back(block);
      return;
    }
    // Other streams may still read it: wait for what they have queued by now.
    try {
      for (const cudaStream_t user : block->users) {
        cudaEvent_t event = nullptr;
        if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) continue;
        cudaEventRecord(event, user);
        waiting_.push_back({event, block});
        ++waits_[block];
      }
      block->users.clear();
      if (waits_.find(block) == waits_.end()) give_back(block);
    } catch (...) {  // no memory for the lists: the block stays out of use
    }
  }

  void record_use(void* pointer, cudaStream_t stream) override {
    std::lock_guard lock(mutex_);
    const auto place = owned_.find(pointer);
    if (place == owned_.end() || place->second->stream == stream) return;
    for (const cudaStream_t user : place->second->users) {
      if (user == stream) return;
    }
    place->second->users.push_back(stream);
  }

  void release_cached() override {
    std::lock_guard lock(mutex_);
    const CurrentDevice scope(device_);
    release_segments();
  }

  int64_t cached_bytes() const override {
    std::lock_guard lock(mutex_);
    return use_.reserved - use_.in_use;
  }

  DeviceMemoryUse use() const override {
    std::lock_guard lock(mutex_);
    return use_;
  }

 private:
  struct Pool {
    std::set<Block*, BySize> small, large;
  };
  struct Wait {
    cudaEvent_t event;
    Block* block;
  };

  std::set<Block*, BySize>& pool_of(cudaStream_t stream, bool small) {
    Pool& pool = pools_[stream];
    return small ? pool.small : pool.large;
  }

  Block* find(size_t size, cudaStream_t stream) {
    std::set<Block*, BySize>& pool = pool_of(stream, size <= kSmallRequest);
    Block key{nullptr, size, stream, false, true, nullptr, nullptr, {}, 0};
    const auto place = pool.lower_bound(&key);
    if (place == pool.end()) return nullptr;
    Block* const block = *place;
    pool.erase(place);
    return block;
  }

  Block* new_segment(size_t size, cudaStream_t stream, size_t requested) {
    const bool small = size <= kSmallRequest;
    const size_t segment = small                    ? kSmallSegment
                           : size <= kMediumRequest ? kMediumSegment
                                                    : round_up(size, kSmallSegment);
    void* memory = nullptr;
    if (cudaMalloc(&memory, segment) != cudaSuccess) {
      cudaGetLastError();  // was told; the next call must not see it
      release_segments();
      if (cudaMalloc(&memory, segment) != cudaSuccess) {
        cudaGetLastError();
        out_of_memory(requested);
      }
    }
    hook_segment(memory, segment);
    use_.reserved += static_cast<int64_t>(segment);
    ++use_.segments;
    auto block = std::make_unique<Block>(
        Block{static_cast<char*>(memory), segment, stream, small, true, nullptr, nullptr, {}, 0});
    Block* const result = block.get();
    blocks_[result] = std::move(block);
    return result;
  }

  void split(Block* block, size_t size) {
    const size_t rest = block->size - size;
    if (rest < (block->small ? kRounding : kSmallRequest)) return;
    auto remainder = std::make_unique<Block>(Block{
        block->data + size, rest, block->stream, block->small, true, block, block->after, {}, 0});
    Block* const second = remainder.get();
    blocks_[second] = std::move(remainder);
    if (block->after != nullptr) block->after->before = second;
    block->after = second;
    block->size = size;
    pool_of(block->stream, block->small).insert(second);
    ++use_.splits;
  }

  // A free block joins its free neighbours and is found again.
  void give_back(Block* block) noexcept {
    hook_accessible(block->data, block->requested, false, block->stream);
    block->free = true;
    for (Block* neighbour : {block->before, block->after}) {
      if (neighbour == nullptr || !neighbour->free) continue;
      pool_of(block->stream, block->small).erase(neighbour);
      Block* const first = neighbour->data < block->data ? neighbour : block;
      Block* const second = first == block ? neighbour : block;
      first->size += second->size;
      first->after = second->after;
      if (second->after != nullptr) second->after->before = first;
      blocks_.erase(second);
      block = first;
      ++use_.merges;
    }
    pool_of(block->stream, block->small).insert(block);
  }

  void take_back_finished() {
    for (size_t i = 0; i < waiting_.size();) {
      if (cudaEventQuery(waiting_[i].event) != cudaSuccess) {
        ++i;
        continue;
      }
      cudaEventDestroy(waiting_[i].event);
      Block* const block = waiting_[i].block;
      waiting_[i] = waiting_.back();
      waiting_.pop_back();
      if (--waits_[block] == 0) {
        waits_.erase(block);
        give_back(block);
      }
    }
  }

  void release_segments() {
    for (const Wait& wait : waiting_) cudaEventSynchronize(wait.event);
    take_back_finished();
    for (auto& [stream, pool] : pools_) {
      for (std::set<Block*, BySize>* blocks : {&pool.small, &pool.large}) {
        for (auto place = blocks->begin(); place != blocks->end();) {
          Block* const block = *place;
          if (block->before != nullptr || block->after != nullptr) {
            ++place;
            continue;
          }
          place = blocks->erase(place);
          use_.reserved -= static_cast<int64_t>(block->size);
          --use_.segments;
          cudaFree(block->data);
          blocks_.erase(block);
        }
      }
    }
  }

  [[noreturn]] void out_of_memory(size_t bytes) const {
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    TS_THROW(OutOfMemory, "cuda allocator", "cannot allocate ", bytes, " bytes on ",
             Device{Device::Type::kCuda, device_}, ": the device has ", free, " of ", total,
             " bytes free, this process holds ", use_.reserved, ", of which ", use_.in_use,
             " are in use\n", memory_stats()->summary());
  }

  const int device_;
  mutable std::mutex mutex_;
  std::unordered_map<cudaStream_t, Pool> pools_;
  std::unordered_map<void*, Block*> owned_;
  std::unordered_map<Block*, std::unique_ptr<Block>> blocks_;
  std::vector<Wait> waiting_;
  std::unordered_map<Block*, int> waits_;
  DeviceMemoryUse use_;
};

}  // namespace

DeviceAllocator& caching_allocator(int device) {
  // Never destroyed: storages with static lifetime may outlive every other object.
  static std::mutex* const mutex = new std::mutex;
  static auto* const allocators = new std::map<int, CachingAllocator>;
  std::lock_guard lock(*mutex);
  return allocators->try_emplace(device, device).first->second;
}

}  // namespace tessera::gpu
