// Helpers of the `*_simd.cpp` files: blocks between storage and compute type, and sums in lanes.
//
// Everything lives in the namespace of the instruction set and without linkage (see isa.h).
// A kernel works on contiguous blocks of the compute type. Where the storage type is another one or
// the elements are not neighbours, a block is first brought to a buffer in L1, so that a kernel is
// compiled once for float and once for double, not once for every dtype and layout.
#pragma once

#include <cstdint>

#include <tessera/core/dispatch.h>
#include <tessera/core/macros.h>

namespace tessera::kernels::TS_SIMD {
namespace {

inline constexpr int64_t kBlock = 1024;  // elements of a staged block
inline constexpr int kLanes = 32;        // partial sums of a row: four registers of v3

// As dispatch_floating, for dtypes that the caller has checked: the error path of that one would be
// emitted out of line. Anything else is taken for f32.
template <class F>
TS_HD decltype(auto) visit_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f.template operator()<double>();
    case DType::kFloat16:
      return f.template operator()<f16>();
    case DType::kBFloat16:
      return f.template operator()<bf16>();
    default:
      return f.template operator()<float>();
  }
}

// A block [0, n) of x, n <= kBlock: x itself where it is of the compute type, else a converted
// copy.
template <class C, class T>
TS_HD const C* stage_in(const T* x, int64_t n, C* TS_RESTRICT buffer) {
  if constexpr (std::is_same_v<C, T>) {
    return x;
  } else {
    for (int64_t i = 0; i < n; ++i) buffer[i] = load<C>(x[i]);
    return buffer;
  }
}

// Where to write a block that stage_out then stores: y itself or the buffer.
template <class C, class T>
TS_HD C* stage_for_write(T* y, C* buffer) {
  if constexpr (std::is_same_v<C, T>) {
    return y;
  } else {
    return buffer;
  }
}
template <class C, class T>
TS_HD void stage_out(T* TS_RESTRICT y, int64_t n, const C* TS_RESTRICT buffer) {
  if constexpr (!std::is_same_v<C, T>) {
    for (int64_t i = 0; i < n; ++i) y[i] = store<T>(buffer[i]);
  }
}

// The sum of f(i) for i in [0, n) in kLanes partial sums, combined pairwise.
template <class C, class F>
TS_HD C lane_sum(int64_t n, F&& f) {
  C lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] += f(i + l);
  }
  for (int l = 0; i < n; ++i, ++l) lanes[l] += f(i);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  }
  return lanes[0];
}

TS_HD float square_root(float x) { return __builtin_sqrtf(x); }
TS_HD double square_root(double x) { return __builtin_sqrt(x); }
TS_HD float absolute(float x) { return __builtin_fabsf(x); }
TS_HD double absolute(double x) { return __builtin_fabs(x); }

}  // namespace
}  // namespace tessera::kernels::TS_SIMD
