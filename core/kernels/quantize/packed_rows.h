// The inner loops of packed_weight.h on runs of numbers, one variant for each instruction set.
#pragma once

#include <cstdint>

#include <tessera/core/dtype.h>
#include <tessera/core/isa.h>

namespace tessera::kernels {

// n numbers that share a scale.
struct PackRun {
  const void* x = nullptr;
  DType dtype = kF32;  // of x: f32, f16, bf16
  int64_t n = 0;
  // x * factor, or x / divisor where `divides`: the last, incomplete block of bitsandbytes divides.
  float factor = 1;
  bool divides = false;
  const float* bounds = nullptr;   // (15) between neighbouring codes, ascending
  const uint8_t* order = nullptr;  // (16) codes, ascending by number
};
// codes (n): one a byte. A NaN becomes the largest.
TS_SIMD_DECLARE(void codes_of_run(const PackRun& run, uint8_t* codes));
// bytes (n): signed, rounded to nearest with ties to even; what is not finite becomes 0.
TS_SIMD_DECLARE(void bytes_of_run(const PackRun& run, uint8_t* bytes));

// y[i] = numbers[code] * scale for n codes that begin at the upper half of bytes[0]; y of `dtype`.
TS_SIMD_DECLARE(void unpack_codes(const uint8_t* bytes, int64_t n, const float* numbers,
                                  float scale, DType dtype, void* y));
// y[i] = signed byte * scale.
TS_SIMD_DECLARE(void unpack_bytes(const uint8_t* bytes, int64_t n, float scale, DType dtype,
                                  void* y));

}  // namespace tessera::kernels
