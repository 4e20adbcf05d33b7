#include "test_cuda_kernels.h"

#include <tessera/core/kernels/common/strided.cuh>
#include <tessera/core/kernels/gemm/matmul_tiles.cuh>

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

__global__ void find_tiles_kernel(const Product p, int64_t* places) {
  const TilePlace place = tile_place(p);
  places[3 * int64_t{blockIdx.x}] = place.matrix;
  places[3 * int64_t{blockIdx.x} + 1] = place.row;
  places[3 * int64_t{blockIdx.x} + 2] = place.column;
}

}  // namespace

int64_t find_tiles(int64_t M, int64_t N, int64_t side, int64_t matrices, int64_t* places) {
  Product p{};
  p.M = M;
  p.N = N;
  const unsigned grid = cut_into_tiles("matmul", p, side, matrices);
  if (places != nullptr) gpu::launch({.name = "tiles", .grid = grid}, find_tiles_kernel, p, places);
  return grid;
}

void find_places(const Walk& walk, int64_t position, int count, int64_t* groups, int64_t* singles) {
  gpu::launch({.name = "find_places"}, find_places_kernel, DeviceWalk<2>(walk), position, count,
              groups, singles);
}

}  // namespace tessera::kernels::tests
