// How the parts of the dry library note launches.
#pragma once

#include <cuda_runtime.h>

#include <tessera/core/cuda/dry/launches.h>

namespace tessera::gpu::dry {

// On the current device; into the graph that the stream captures, or into the list.
void record(Launch launch, cudaStream_t stream);

}  // namespace tessera::gpu::dry
