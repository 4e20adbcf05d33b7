// Few rows times a weight of 8 bits, as of a token and a frozen layer: the bytes are read once, where they
// lie, at memory's speed, and no part of the weight is ever widened in memory.
//
// Number (i, j) of the weight is its signed byte times int8_scale(absmax[i]): a row's largest magnitude is 127 steps.
// Sums of byte * x are f32 in the order of gemm_rows.h, which rows beside one do not change, times the scale,
// with one rounding to y's dtype at the end: within (k + 3) eps sum|x W| of the product of the numbers.
#pragma once

#include <cstdint>

#include <tessera/core/dtype.h>
#include <tessera/core/isa.h>

namespace tessera::kernels {

// As bitsandbytes multiplies for products; dividing by 127 differs in the last bit.
inline float int8_scale(float absmax) { return absmax * static_cast<float>(1.0 / 127.0); }

// y = x W^T + bias
struct Int8Rows {
  int64_t m = 0, n = 0, k = 0;
  DType dtype = kF32;       // of x, bias and y: f32, f16, bf16
  const void* x = nullptr;  // (m, k), numbers of a row in one piece
  int64_t x_row_stride = 0;
  const int8_t* weight = nullptr;  // (n, k), a row's bytes in one piece
  int64_t weight_row_stride = 0;
  const float* absmax = nullptr;  // (n)
  const void* bias = nullptr;     // (n), or null
  void* y = nullptr;              // (m, n), numbers of a row in one piece; must not overlap x
  int64_t y_row_stride = 0;
};

// From 17 rows on unpacked tiles and gemm.h are as fast: it is meant for at most so many.
inline constexpr int64_t kMostInt8Rows = 16;

// Runs on num_threads() cores; on this thread alone inside a parallel loop. ValueError: more rows than
// kMostInt8Rows; DTypeError, OutOfMemory.
void int8_rows(const Int8Rows& problem);

// sums (m, n) = x bytes^T. Internal.
struct Int8Sums {
  int64_t m, n, k;
  const float* x;  // (m, k)
  int64_t x_row_stride;
  const int8_t* weight;
  int64_t weight_row_stride;
  float* sums;
  int64_t sums_row_stride;
};
TS_SIMD_DECLARE(void int8_sums(const Int8Sums& problem));

}  // namespace tessera::kernels
