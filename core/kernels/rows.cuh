// Rows for blocks: how the kernels that normalise, reduce and compare walk a tensor of (rows, n).
//
// A block of 32 to 1024 threads works on one row; the number depends on n alone, so that the order
// of every sum is a function of the shape. Threads add up in float lanes (double for f64), blocks
// of partial sums are joined in a fixed tree in the wide type.
#pragma once

#include <cstdint>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>

namespace tessera::kernels {

// f32 statistics are joined in double, as on the CPU.
template <class C>
using Joined = std::conditional_t<std::is_floating_point_v<C>, double, int64_t>;

// Threads for a row of n elements: 4 elements a thread, a whole number of warps.
inline unsigned row_threads(int64_t n) {
  unsigned threads = 32;
  while (threads < 1024 && int64_t{threads} * 4 < n) threads *= 2;
  return threads;
}

// Shared memory that block_reduce needs.
#define TS_REDUCE_SLOT(T, name) TS_SHARED(T, name, ::tessera::gpu::kWarp)

}  // namespace tessera::kernels
