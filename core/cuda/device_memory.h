// The caching allocator of a GPU.
//
// Memory comes from cudaMalloc in segments: 2 MiB for requests up to 1 MiB, 20 MiB for those up to
// 10 MiB, else the request rounded to 2 MiB. A request takes the smallest free block of its stream
// that holds it and leaves the rest free; a freed block joins its free neighbors. A block belongs
// to the stream on which it was asked for: work queued there later may overwrite it at once. A
// block that other streams used too (record_use) waits for events on them. Sizes are multiples of
// 512. Thread-safe.
//
// Graphs have pools of their own (core/cuda/graph.h): what a thread allocates while it captures
// comes from the graph's pool, what it frees there goes back to it at any time, and no one else is
// given it; release_cached() passes over it until the graph is gone. What a capture frees of other
// memory is free when it ends.
//
// Plain memory (TESSERA_PLAIN_MEMORY=1, for compute-sanitizer): each request is a cudaMalloc of its
// bytes, and no block is used again. What is freed goes back to the device when its stream and the
// others that used it have come by, at a later request; what a capture frees of its graph's pool,
// when the graph is gone.
//
// On failure: free segments go back to the device, one more attempt, then
// OutOfMemory with the request, the device's state and the context's summary.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include <tessera/core/memory/allocator.h>

namespace tessera::gpu {

struct DeviceMemoryUse {
  int64_t reserved = 0;  // bytes held from the device
  int64_t in_use = 0;    // of them, in live blocks (rounded sizes)
  int64_t segments = 0;
  int64_t splits = 0, merges = 0;  // since the start
  int64_t graph_pools = 0;         // of reserved, in pools of graphs that live
};

class DeviceAllocator : public Allocator {
 public:
  virtual void record_use(void* pointer, cudaStream_t stream) = 0;
  virtual DeviceMemoryUse use() const = 0;
  // "cuda:0: 22 MiB reserved, ...": one line, and one for each pool of a graph.
  virtual std::string summary() const = 0;

  virtual uint64_t open_pool() = 0;  // never 0
  // The graph is gone: free segments go back to the device, the others when they are free.
  virtual void close_pool(uint64_t pool) noexcept = 0;
  // The calling context captures from here to there.
  virtual void begin_capture(uint64_t pool) = 0;
  virtual void end_capture() noexcept = 0;
  virtual int64_t pool_bytes(uint64_t pool) const = 0;
};

DeviceAllocator& caching_allocator(int device);

// Bytes of the device, asked for once.
int64_t total_memory(int device);

// Whether memory is handed out full of bytes 0xff, in stream order: NaN in every floating dtype, so
// that a result shows which depends on what nobody wrote, or on what lies behind the end of a
// tensor: blocks are filled to their end. At first as TESSERA_POISON=1 in the environment says. One
// more write of all that is handed out; a graph keeps what its capture saw.
bool poisons_memory();
void set_poisons_memory(bool on);

// Whether requests from now on are served as plain memory, see above.
bool uses_plain_memory();
void set_uses_plain_memory(bool on);

}  // namespace tessera::gpu
