// Blocks of f32, f16 and bf16 numbers as floats, for `*_simd.cpp` files (see lanes.h).
#pragma once

#include <cstdint>

#include <tessera/core/half.h>
#include <tessera/core/kernels/common/lanes.h>

namespace tessera::kernels::TS_SIMD {
namespace {

// Calls f<T>() with the type of a dtype. Any other dtype is taken for f32.
template <class F>
TS_HD void visit_up_to_f32(DType dtype, F&& f) {
  switch (dtype) {
    case kF16:
      return f.template operator()<f16>();
    case kBF16:
      return f.template operator()<bf16>();
    default:
      return f.template operator()<float>();
  }
}

// Calls f(first, values, count) for blocks of x as floats.
template <class T, class F>
TS_HD void for_blocks(const void* x, int64_t n, F&& f) {
  float buffer[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    f(begin, stage_in<float>(static_cast<const T*>(x) + begin, count, buffer), count);
  }
}

}  // namespace
}  // namespace tessera::kernels::TS_SIMD
