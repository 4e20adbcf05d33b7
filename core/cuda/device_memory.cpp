#include <tessera/core/cuda/device_memory.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include <tessera/core/cuda/capture.h>
#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/contexts.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/cuda/hooks.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/environment.h>
#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>

namespace tessera::gpu {
namespace {

constexpr size_t kRounding = 512;
constexpr size_t kSmallRequest = size_t{1} << 20, kSmallSegment = size_t{2} << 20;
constexpr size_t kMediumRequest = size_t{10} << 20, kMediumSegment = size_t{20} << 20;

std::atomic<bool>& poison_switch() {
  static std::atomic<bool> on = environment_flag("TESSERA_POISON");
  return on;
}

std::atomic<bool>& plain_switch() {
  static std::atomic<bool> on = environment_flag("TESSERA_PLAIN_MEMORY");
  return on;
}

size_t round_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

struct Block {
  char* data;
  size_t size;
  cudaStream_t stream;
  uint64_t pool;  // of a graph; 0: everybody's
  bool small;     // of a segment for small requests
  bool free = true;
  Block* before = nullptr;  // neighbours in the segment
  Block* after = nullptr;
  std::vector<cudaStream_t> users;  // other streams that used it
  size_t requested = 0;
  bool plain = false;  // memory of its own, which is not handed out again
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
    const bool plain = uses_plain_memory();
    const size_t size = round_up(bytes == 0 ? 1 : bytes, plain ? 1 : kRounding);
    if (size < bytes) out_of_memory(bytes);
    const bool captures = is_captured_here();
    std::lock_guard lock(mutex_);
    const uint64_t pool = captures ? capturing_ : 0;
    if (!captures) {
      take_back_finished();
      // The device is waited for, which nobody may do while a capture is under way.
      if (!over_.empty() && capturing_ == 0) {
        if (const NoCaptureNow gate(device_); gate) free_plain();
      }
    }
    Block* block = plain ? nullptr : find(size, stream, pool);
    if (block == nullptr) block = new_segment(size, stream, pool, bytes, plain);
    if (!plain) split(block, size);
    block->free = false;
    block->requested = bytes;
    owned_[block->data] = block;
    use_.in_use += static_cast<int64_t>(block->size);
    if (poisons_memory()) {
      hook_accessible(block->data, block->size, true, block->stream, /*fills=*/false);
      TS_CUDA(cudaMemsetAsync(block->data, 0xff, block->size, block->stream));
      hook_accessible(block->data, block->size, false, block->stream);
    }
    hook_accessible(block->data, bytes, true, block->stream);
    return block->data;
  }

  void deallocate(void* pointer, size_t) noexcept override {
    // The null stream of a block is that of this device, whichever is the thread's.
    int previous = 0;
    enter_device(device_, previous);
    free_block(pointer);
    leave_device(previous);
  }

  void free_block(void* pointer) noexcept {
    const bool captures = is_captured_here();
    std::lock_guard lock(mutex_);
    const auto place = owned_.find(pointer);
    if (place == owned_.end()) return;
    Block* const block = place->second;
    owned_.erase(place);
    use_.in_use -= static_cast<int64_t>(block->size);
    // Nothing runs during a capture that could be waited for, and what the graph does to memory of
    // others it does at each replay.
    const bool waits = captures && (block->pool != capturing_ || !block->users.empty());
    // Nor does an event of plain memory's own stream belong into the capture of another thread.
    if (waits || (block->plain && capturing_ != 0 && block->pool != capturing_)) {
      try {
        after_capture_.push_back(block);
      } catch (...) {  // the block stays out of use
      }
      return;
    }
    retire(block);
  }

  // Gives back a block that nobody owns, when all that used it came by.
  void retire(Block* block) noexcept {
    if (block->plain && !is_of_open_graph(*block)) {
      try {
        block->users.push_back(block->stream);  // whose work may still use it
      } catch (...) {                           // the block stays out of use
        return;
      }
    }
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
    refuse_in_capture("giving memory back");
    const NoCapture gate(device_);
    std::lock_guard lock(mutex_);
    const CurrentDevice scope(device_);
    release_segments();
  }

  // ---- Pools of graphs ----

  uint64_t open_pool() override {
    std::lock_guard lock(mutex_);
    open_pools_.insert(++last_pool_);
    return last_pool_;
  }
  void close_pool(uint64_t pool) noexcept override {
    std::lock_guard lock(mutex_);
    open_pools_.erase(pool);
    release_segments_of(pool);
  }
  void begin_capture(uint64_t pool) override {
    std::lock_guard lock(mutex_);
    capturing_ = pool;
  }
  void end_capture() noexcept override {
    std::lock_guard lock(mutex_);
    capturing_ = 0;
    for (Block* const block : after_capture_) {
      if (block->pool != 0) block->users.clear();  // the replays join their streams
      retire(block);
    }
    after_capture_.clear();
  }
  int64_t pool_bytes(uint64_t pool) const override {
    std::lock_guard lock(mutex_);
    return bytes_of(pool).reserved;
  }

  std::string summary() const override {
    std::lock_guard lock(mutex_);
    PlainText<std::ostringstream> out;
    const int64_t in_use = use_.in_use;
    out << Device{Device::Type::kCuda, device_} << ": " << use_.reserved << " bytes reserved in "
        << use_.segments << " segments, " << in_use << " in use";
    for (const uint64_t pool : open_pools_) {
      const PoolBytes bytes = bytes_of(pool);
      out << "\n  pool of graph " << pool << ": " << bytes.reserved << " bytes reserved, "
          << bytes.in_use << " in use";
    }
    return out.str();
  }

  int64_t cached_bytes() const override {
    std::lock_guard lock(mutex_);
    return use_.reserved - use_.in_use;
  }

  DeviceMemoryUse use() const override {
    std::lock_guard lock(mutex_);
    DeviceMemoryUse use = use_;
    for (const uint64_t pool : open_pools_) use.graph_pools += bytes_of(pool).reserved;
    return use;
  }

 private:
  struct Pool {
    std::set<Block*, BySize> small, large;
  };
  struct Wait {
    cudaEvent_t event;
    Block* block;
  };

  struct PoolKey {
    uint64_t graph;
    cudaStream_t stream;
    bool operator<(const PoolKey& other) const {
      return graph != other.graph ? graph < other.graph
                                  : std::less<cudaStream_t>{}(stream, other.stream);
    }
  };
  struct PoolBytes {
    int64_t reserved = 0, in_use = 0;
  };

  bool is_captured_here() const {
    const Capture* const capture = Capture::current();
    return capture != nullptr && capture->device() == device_;
  }

  PoolBytes bytes_of(uint64_t pool) const {
    PoolBytes bytes;
    for (const auto& [block, owner] : blocks_) {
      if (block->pool != pool) continue;
      bytes.reserved += static_cast<int64_t>(block->size);
      if (!block->free) bytes.in_use += static_cast<int64_t>(block->size);
    }
    return bytes;
  }

  std::set<Block*, BySize>& pool_of(const Block& block) {
    Pool& pool = pools_[{block.pool, block.stream}];
    return block.small ? pool.small : pool.large;
  }

  Block* find(size_t size, cudaStream_t stream, uint64_t graph) {
    Block key{nullptr, size, stream, graph, size <= kSmallRequest, true, nullptr,
              nullptr, {},   0,      false};
    std::set<Block*, BySize>& pool = pool_of(key);
    const auto place = pool.lower_bound(&key);
    if (place == pool.end()) return nullptr;
    Block* const block = *place;
    pool.erase(place);
    return block;
  }

  bool is_of_open_graph(const Block& block) const {
    return block.pool != 0 && open_pools_.contains(block.pool);
  }

  Block* new_segment(size_t size, cudaStream_t stream, uint64_t pool, size_t requested,
                     bool plain) {
    const bool small = !plain && size <= kSmallRequest;
    const size_t segment = plain                    ? size
                           : small                  ? kSmallSegment
                           : size <= kMediumRequest ? kMediumSegment
                                                    : round_up(size, kSmallSegment);
    void* memory = nullptr;
    const RelaxedCapture relaxed;
    if (cudaMalloc(&memory, segment) != cudaSuccess) {
      cudaGetLastError();                       // was told; the next call must not see it
      if (pool != 0) out_of_memory(requested);  // a capture cannot wait for what is to be released
      release_segments();
      if (cudaMalloc(&memory, segment) != cudaSuccess) {
        cudaGetLastError();
        out_of_memory(requested);
      }
    }
    hook_segment(memory, segment);
    use_.reserved += static_cast<int64_t>(segment);
    ++use_.segments;
    auto block = std::make_unique<Block>(Block{static_cast<char*>(memory),
                                               segment,
                                               stream,
                                               pool,
                                               small,
                                               true,
                                               nullptr,
                                               nullptr,
                                               {},
                                               0,
                                               plain});
    Block* const result = block.get();
    blocks_[result] = std::move(block);
    return result;
  }

  void split(Block* block, size_t size) {
    const size_t rest = block->size - size;
    if (rest < (block->small ? kRounding : kSmallRequest)) return;
    auto remainder = std::make_unique<Block>(Block{block->data + size,
                                                   rest,
                                                   block->stream,
                                                   block->pool,
                                                   block->small,
                                                   true,
                                                   block,
                                                   block->after,
                                                   {},
                                                   0,
                                                   false});
    Block* const second = remainder.get();
    blocks_[second] = std::move(remainder);
    if (block->after != nullptr) block->after->before = second;
    block->after = second;
    block->size = size;
    pool_of(*block).insert(second);
    ++use_.splits;
  }

  // A free block joins its free neighbours and is found again.
  void give_back(Block* block) noexcept {
    hook_accessible(block->data, block->requested, false, block->stream);
    block->free = true;
    if (block->plain) {
      over_.push_back(block);
      return;
    }
    for (Block* neighbour : {block->before, block->after}) {
      if (neighbour == nullptr || !neighbour->free) continue;
      pool_of(*block).erase(neighbour);
      Block* const first = neighbour->data < block->data ? neighbour : block;
      Block* const second = first == block ? neighbour : block;
      first->size += second->size;
      first->after = second->after;
      if (second->after != nullptr) second->after->before = first;
      blocks_.erase(second);
      block = first;
      ++use_.merges;
    }
    pool_of(*block).insert(block);
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
    free_plain();
    std::set<uint64_t> graphs;
    for (const auto& [key, pool] : pools_) graphs.insert(key.graph);
    for (const uint64_t graph : graphs) {
      if (!open_pools_.contains(graph)) release_segments_of(graph);
    }
  }

  // What is over of plain memory, but for what the replays of graphs use.
  void free_plain() {
    const RelaxedCapture relaxed;
    std::erase_if(over_, [&](Block* block) {
      if (is_of_open_graph(*block)) return false;
      give_to_device(block);
      return true;
    });
  }

  void give_to_device(Block* block) {
    use_.reserved -= static_cast<int64_t>(block->size);
    --use_.segments;
    cudaFree(block->data);
    blocks_.erase(block);
  }

  // The free segments of a graph's pool, or of everybody's (0).
  void release_segments_of(uint64_t graph) {
    for (auto& [key, pool] : pools_) {
      if (key.graph != graph) continue;
      for (std::set<Block*, BySize>* blocks : {&pool.small, &pool.large}) {
        for (auto place = blocks->begin(); place != blocks->end();) {
          Block* const block = *place;
          if (block->before != nullptr || block->after != nullptr) {
            ++place;
            continue;
          }
          place = blocks->erase(place);
          give_to_device(block);
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
             " are in use", pool_text(), "\n", memory_stats()->summary());
  }

  std::string pool_text() const {
    int64_t bytes = 0;
    for (const uint64_t pool : open_pools_) bytes += bytes_of(pool).reserved;
    return bytes == 0 ? "" : "; graphs keep " + std::to_string(bytes) + " for themselves";
  }

  const int device_;
  mutable std::mutex mutex_;
  std::map<PoolKey, Pool> pools_;
  std::set<uint64_t> open_pools_;
  uint64_t last_pool_ = 0;
  uint64_t capturing_ = 0;             // the pool of the capture on this device, or 0
  std::vector<Block*> after_capture_;  // freed while a capture is under way
  std::vector<Block*> over_;           // plain, used by nobody any more but by graphs
  std::unordered_map<void*, Block*> owned_;
  std::unordered_map<Block*, std::unique_ptr<Block>> blocks_;
  std::vector<Wait> waiting_;
  std::unordered_map<Block*, int> waits_;
  DeviceMemoryUse use_;
};

}  // namespace

bool poisons_memory() { return poison_switch().load(std::memory_order_relaxed); }
void set_poisons_memory(bool on) { poison_switch().store(on); }

bool uses_plain_memory() { return plain_switch().load(std::memory_order_relaxed); }
void set_uses_plain_memory(bool on) { plain_switch().store(on); }

int64_t total_memory(int device) {
  static std::mutex mutex;
  static std::map<int, int64_t> known;
  const std::lock_guard lock(mutex);
  const auto place = known.find(device);
  if (place != known.end()) return place->second;
  const CurrentDevice scope(device);
  size_t free = 0, total = 0;
  TS_CUDA(cudaMemGetInfo(&free, &total));
  return known[device] = static_cast<int64_t>(total);
}

DeviceAllocator& caching_allocator(int device) {
  // Never destroyed: storages with static lifetime may outlive every other object.
  static std::mutex* const mutex = new std::mutex;
  static auto* const allocators = new std::map<int, CachingAllocator>;
  std::lock_guard lock(*mutex);
  return allocators->try_emplace(device, device).first->second;
}

}  // namespace tessera::gpu
