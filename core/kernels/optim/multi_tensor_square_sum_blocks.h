// What multi_tensor_square_sum_cpu.cpp and multi_tensor_square_sum_simd.cpp share.
#pragma once

#include <cstdint>

#include <tessera/core/dtype.h>
#include <tessera/core/isa.h>

namespace tessera::kernels {

// Adds the squares of a block of any floating dtype to a sum of multi_tensor_square_sum.h.
TS_SIMD_DECLARE(void square_sum_block(DType dtype, const void* x, int64_t n, int64_t* sum));

}  // namespace tessera::kernels
