// Running results over the threads of a block: what sums along lines, places of kept elements and
// digits of keys stand on. Sums of floats have an order that depends on the block's size alone.
#pragma once

#include <tessera/core/cuda/launch.h>

namespace tessera::kernels {

// Every thread gets op over the values of the threads up to its own; the block is one-dimensional
// and a multiple of 32. `slot`: shared memory for 32 values, free for other use after the next
// barrier; slot[warps - 1] is op over the whole block until then.
template <class V, class Op>
TS_DEVICE V block_scan(V value, const Op& op, V* slot) {
  const unsigned warp = threadIdx.x / gpu::kWarp, lane = threadIdx.x % gpu::kWarp;
  const unsigned warps = blockDim.x / gpu::kWarp;
  for (unsigned step = 1; step < gpu::kWarp; step *= 2) {
    const V before = __shfl_up_sync(gpu::kAllLanes, value, step);
    if (lane >= step) value = op(before, value);
  }
  if (lane == gpu::kWarp - 1) slot[warp] = value;
  __syncthreads();
  if (warp == 0) {
    V total = lane < warps ? slot[lane] : V{};
    for (unsigned step = 1; step < gpu::kWarp; step *= 2) {
      const V before = __shfl_up_sync(gpu::kAllLanes, total, step);
      if (lane >= step) total = op(before, total);
    }
    if (lane < warps) slot[lane] = total;
  }
  __syncthreads();
  return warp > 0 ? op(slot[warp - 1], value) : value;
}

}  // namespace tessera::kernels
