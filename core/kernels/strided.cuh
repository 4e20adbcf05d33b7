// How kernels of a GPU walk tensors of any layout: a Walk (strided.h) as a kernel's parameter.
#pragma once

#include <cstdint>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/strided.h>

namespace tessera::kernels {

// Division by a number that is known before the launch: a product and a shift.
struct Divisor {
  uint32_t value = 1, magic = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : value(divisor) {  // 1 <= divisor < 2^31
    while ((uint64_t{1} << shift) < divisor) ++shift;
    magic = static_cast<uint32_t>(
        ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }
  TS_DEVICE uint32_t quotient(uint32_t n) const {  // n < 2^31
    return (__umulhi(n, magic) + n) >> shift;
  }
};

template <int kOperands>
struct DeviceWalk {
  int dims;
  bool wide;  // 2^31 elements or more: divisions of 64 bits
  int64_t numel;
  int64_t sizes[kMaxDims];
  Divisor divisors[kMaxDims];
  int64_t strides[kOperands][kMaxDims];

  explicit DeviceWalk(const Walk& walk)
      : dims(walk.dims), wide(walk.numel > INT32_MAX), numel(walk.numel) {
    for (int d = 0; d < dims; ++d) {
      sizes[d] = walk.sizes[d];
      // A walk of nothing is never stepped.
      if (!wide && walk.sizes[d] > 0) divisors[d] = Divisor(static_cast<uint32_t>(walk.sizes[d]));
      for (int k = 0; k < kOperands; ++k) strides[k][d] = walk.strides[k][d];
    }
  }

  // Where element `position` lies in each operand.
  TS_DEVICE void offsets(int64_t position, int64_t (&offset)[kOperands]) const {
    for (int k = 0; k < kOperands; ++k) offset[k] = 0;
    if (wide) {
      for (int d = dims - 1; d >= 0; --d) {
        const int64_t rest = position / sizes[d];
        for (int k = 0; k < kOperands; ++k)
          offset[k] += (position - rest * sizes[d]) * strides[k][d];
        position = rest;
      }
      return;
    }
    uint32_t left = static_cast<uint32_t>(position);
    for (int d = dims - 1; d >= 0; --d) {
      const uint32_t rest = divisors[d].quotient(left);
      const uint32_t index = left - rest * divisors[d].value;
      for (int k = 0; k < kOperands; ++k) offset[k] += index * strides[k][d];
      left = rest;
    }
  }
};

// Calls f.template operator()<T>() for the dtypes that lane C reads directly (detail::is_direct).
template <class C, class F>
TS_DEVICE void with_lane_dtype(DType dtype, const F& f) {
  if constexpr (std::is_same_v<C, float>) {
    if (dtype == kF32) {
      f.template operator()<float>();
    } else if (dtype == kBF16) {
      f.template operator()<bf16>();
    } else {
      f.template operator()<f16>();
    }
  } else if constexpr (std::is_same_v<C, double>) {
    f.template operator()<double>();
  } else if constexpr (std::is_same_v<C, int64_t>) {
    if (dtype == kI64) {
      f.template operator()<int64_t>();
    } else if (dtype == kI32) {
      f.template operator()<int32_t>();
    } else if (dtype == kU8) {
      f.template operator()<uint8_t>();
    } else {
      f.template operator()<bool>();
    }
  } else {
    f.template operator()<bool>();
  }
}

// The same for every dtype: for results.
template <class F>
TS_DEVICE void with_any_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case kF64:
      return f.template operator()<double>();
    case kF32:
      return f.template operator()<float>();
    case kF16:
      return f.template operator()<f16>();
    case kBF16:
      return f.template operator()<bf16>();
    case kF8E4M3:
      return f.template operator()<f8e4m3>();
    case kF8E5M2:
      return f.template operator()<f8e5m2>();
    case kI64:
      return f.template operator()<int64_t>();
    case kI32:
      return f.template operator()<int32_t>();
    case kU8:
      return f.template operator()<uint8_t>();
    case kBool:
      return f.template operator()<bool>();
  }
}

inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace tessera::kernels
