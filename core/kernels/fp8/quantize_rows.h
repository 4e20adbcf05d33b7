// The inner loops of quantize.h on pieces of rows, one variant for each instruction set.
#pragma once

#include <cstdint>

#include <tessera/core/dtype.h>
#include <tessera/core/isa.h>

namespace tessera::kernels {

struct QuantizeCounts {
  uint32_t largest = 0;  // the bits of the largest magnitude: they order as magnitudes, NaN on top
  int64_t saturated = 0;
  int64_t underflown = 0;
};

// One piece of a row: n numbers that share a scale, or (`scales`) have one each.
struct QuantizeRun {
  const void* x = nullptr;
  DType dtype = kF32;  // of x: f32, f16, bf16
  uint8_t* q = nullptr;
  DType format = kF8E4M3;
  int64_t n = 0;
  float scale = 1;
  const float* scales = nullptr;  // (n) or null
};

TS_SIMD_DECLARE(uint32_t largest_magnitude(DType dtype, const void* x, int64_t n));
// most[i] = the larger of itself and the bits of |x[i]|.
TS_SIMD_DECLARE(void largest_magnitudes(DType dtype, const void* x, int64_t n, uint32_t* most));
TS_SIMD_DECLARE(void quantize_run(const QuantizeRun& run, QuantizeCounts& counts));
// y = q * scale, y of `dtype`; the other way around than the rest of QuantizeRun says.
TS_SIMD_DECLARE(void dequantize_run(const QuantizeRun& run, void* y));
// y[i] = sums[i] * (row * columns[i]), or * row where columns is null; y of `dtype`.
TS_SIMD_DECLARE(void scale_sums(const float* sums, int64_t n, float row, const float* columns,
                                DType dtype, void* y));

}  // namespace tessera::kernels
