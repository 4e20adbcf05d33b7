#include "test_cuda_kernels.h"

#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels::tests {
namespace {

__global__ void find_places_kernel(const DeviceWalk<2> walk, int64_t position, int count,
                                   int64_t* groups, int64_t* singles) {
  int64_t at[kGroupOfWalk];
  walk.group_offsets(0, position, count, at);
  for (int i = 0; i < kGroupOfWalk; ++i) groups[i] = at[i];
  for (int i = 0; i < count; ++i) {
    int64_t offsets[2];
    walk.offsets(position + i, offsets);
    singles[i] = offsets[0];
  }
}

}  // namespace

void find_places(const Walk& walk, int64_t position, int count, int64_t* groups, int64_t* singles) {
  gpu::launch({.name = "find_places"}, find_places_kernel, DeviceWalk<2>(walk), position, count,
              groups, singles);
}

}  // namespace tessera::kernels::tests
