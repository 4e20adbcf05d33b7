// Which GPUs the device code of a program runs on. Pure functions.
#pragma once

#include <string_view>

namespace tessera::gpu {

// Whether code for one of these architectures, as TESSERA_CUDA_ARCHITECTURES lists them
// ("90a;100"), runs on a GPU of compute capability major.minor. Code for 90 runs from 9.0 on within
// major 9, for 90a on 9.0 alone, for 100f from 10.0 on within major 10.
bool runs_on(std::string_view architectures, int major, int minor);

}  // namespace tessera::gpu
