// Kernels of test_cuda_kernels.cu.
#pragma once

#include <cstdint>

#include <tessera/core/kernels/common/strided.h>

namespace tessera::kernels::tests {

inline constexpr int kGroupOfWalk = 4;

// Where the elements from `position` on lie in the first operand of a walk with two: groups[i] as a
// group finds `count` of them, and singles[i] as each is found alone. Both on the device.
void find_places(const Walk& walk, int64_t position, int count, int64_t* groups, int64_t* singles);

}  // namespace tessera::kernels::tests
