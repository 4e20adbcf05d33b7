// How the parts of the dry library note launches.
#pragma once

#include <cuda_runtime.h>

#include <tessera/core/cuda/dry/launches.h>

namespace tessera::gpu::dry {

// On the current device; into the graph that the stream captures, or into the list.
void note(Launch launch, cudaStream_t stream);

// Writes the op and the layer that the calling thread is in.
void sign(Launch& launch);

}  // namespace tessera::gpu::dry
