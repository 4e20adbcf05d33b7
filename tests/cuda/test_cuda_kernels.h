// Kernels of test_cuda_kernels.cu.
#pragma once

#include <cstdint>

#include <tessera/core/kernels/common/strided.h>

namespace tessera::kernels::tests {

inline constexpr int kGroupOfWalk = 4;

// Where the elements from `position` on lie in the first operand of a walk with two: groups[i] as a
// group finds `count` of them, and singles[i] as each is found alone. Both on the device.
void find_places(const Walk& walk, int64_t position, int count, int64_t* groups, int64_t* singles);

// How products on own kernels are cut: for block i of the launch, places[3 i ...] is the matrix and
// the tile's row and column; on the device. Returns the number of blocks; queues nothing where
// `places` is null.
int64_t find_tiles(int64_t M, int64_t N, int64_t side, int64_t matrices, int64_t* places);

}  // namespace tessera::kernels::tests
