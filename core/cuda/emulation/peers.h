// The emulation's part of CUDA for several devices, and what it keeps of memory.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>

// Memory that is not of the device named is refused. All emulated devices reach each other.
cudaError_t cudaMemcpyPeerAsync(void* target, int target_device, const void* source,
                                int source_device, size_t bytes, cudaStream_t stream);

namespace tessera::gpu::emulation {

// Whether the device has a context, as it has from the first call on that works on it or names it
// (cudaSetDevice). On a GPU each costs its process about half a gigabyte.
bool has_context(int device);

// Queues what the emulation keeps of memory: it happens in its turn, or when a failure makes the
// streams forget their work.
void enqueue_always(cudaStream_t stream, std::function<void()> work);

}  // namespace tessera::gpu::emulation
