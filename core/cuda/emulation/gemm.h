// The place of the library of matrix products in the emulation: empty, or a model that a test
// gives.
#pragma once

#include <tessera/core/cuda/libraries/gemm.h>

namespace tessera::gpu::emulation {

// Called within a kernel, where device memory is in reach, for products that validate() allows.
using GemmModel = void (*)(const GemmProblem& problem, const LibraryCall& call);
void set_gemm_model(GemmModel model);  // null for none
// Products that the library has no algorithm for, though validate() allows them.
using GemmLack = bool (*)(const GemmProblem& problem);
void set_gemm_lack(GemmLack lack);  // null for none

}  // namespace tessera::gpu::emulation
