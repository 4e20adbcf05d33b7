// The stream that this thread's kernels go to, for files that know CUDA's types.
#pragma once

#include <cuda_runtime.h>

#include <tessera/core/gpu/backend.h>

namespace tessera::gpu {

// For the current device in the current context: the null stream unless a CurrentStream lives.
cudaStream_t current_stream();
cudaStream_t native(const StreamHandle& stream);

}  // namespace tessera::gpu
