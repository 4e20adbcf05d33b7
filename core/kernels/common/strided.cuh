// How kernels of a GPU walk tensors of any layout: a Walk (strided.h) as a kernel's parameter.
#pragma once

#include <cstdint>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/common/strided.h>

namespace tessera::kernels {

// Division by a number that is known before the launch: a product and a shift.
template <class Word>
struct DivisorOf {
  static constexpr int kBits = 8 * sizeof(Word);
  Word value = 1, magic = 0;
  uint32_t shift = 0;

  DivisorOf() = default;
  explicit DivisorOf(Word divisor) : value(divisor) {  // 1 <= divisor < 2^(kBits - 1)
    while ((Word{1} << shift) < divisor) ++shift;
    // floor(2^kBits (2^shift - divisor) / divisor) + 1, digit by digit.
    Word rest = (Word{1} << shift) - divisor;  // < divisor
    for (int bit = 0; bit < kBits; ++bit) {
      rest *= 2;
      magic = 2 * magic + (rest >= divisor);
      if (rest >= divisor) rest -= divisor;
    }
    ++magic;
  }
  TS_DEVICE Word quotient(Word n) const {  // n < 2^(kBits - 1)
    if constexpr (kBits == 32) {
      return (__umulhi(n, magic) + n) >> shift;
    } else {
      return (__umul64hi(n, magic) + n) >> shift;
    }
  }
};
using Divisor = DivisorOf<uint32_t>;

template <int kOperands>
struct DeviceWalk {
  int dims;
  bool wide;  // 2^31 elements or more: indices of 64 bits
  int64_t numel;
  Divisor divisors[kMaxDims];  // the sizes
  DivisorOf<uint64_t> wide_divisors[kMaxDims];
  int64_t strides[kOperands][kMaxDims];

  explicit DeviceWalk(const Walk& walk)
      : dims(walk.dims), wide(walk.numel > INT32_MAX), numel(walk.numel) {
    for (int d = 0; d < dims; ++d) {
      if (walk.sizes[d] > 0) {  // a walk of nothing is never stepped
        if (wide) {
          wide_divisors[d] = DivisorOf<uint64_t>(static_cast<uint64_t>(walk.sizes[d]));
        } else {
          divisors[d] = Divisor(static_cast<uint32_t>(walk.sizes[d]));
        }
      }
      for (int k = 0; k < kOperands; ++k) strides[k][d] = walk.strides[k][d];
    }
  }

  // Where element `position` lies in each operand.
  TS_DEVICE void offsets(int64_t position, int64_t (&offset)[kOperands]) const {
    TS_UNROLL
    for (int k = 0; k < kOperands; ++k) offset[k] = 0;
    if (wide) {
      step(wide_divisors, static_cast<uint64_t>(position), offset);
    } else {
      step(divisors, static_cast<uint32_t>(position), offset);
    }
  }
  // Where the elements from `position` on lie in one operand; `count` of them are asked for, and
  // the others are the first again.
  template <int kCount>
  TS_DEVICE void group_offsets(int operand, int64_t position, int count,
                               int64_t (&offsets)[kCount]) const {
    if (wide) {
      step_group(wide_divisors, operand, static_cast<uint64_t>(position), count, offsets);
    } else {
      step_group(divisors, operand, static_cast<uint32_t>(position), count, offsets);
    }
  }

 private:
  template <class Word>
  TS_DEVICE void step(const DivisorOf<Word>* sizes, Word left, int64_t (&offset)[kOperands]) const {
    for (int d = dims - 1; d >= 0; --d) {
      const Word rest = sizes[d].quotient(left);
      const Word index = left - rest * sizes[d].value;
      TS_UNROLL
      for (int k = 0; k < kOperands; ++k) {
        offset[k] += static_cast<int64_t>(index) * strides[k][d];
      }
      left = rest;
    }
  }
  template <class Word, int kCount>
  TS_DEVICE void step_group(const DivisorOf<Word>* sizes, int operand, Word position, int count,
                            int64_t (&offsets)[kCount]) const {
    Word left[kCount];
    TS_UNROLL
    for (int i = 0; i < kCount; ++i) {
      left[i] = position + static_cast<Word>(i < count ? i : 0);
      offsets[i] = 0;
    }
    TS_ROLLED
    for (int d = dims - 1; d >= 0; --d) {
      const Word size = sizes[d].value;
      const int64_t stride = strides[operand][d];
      TS_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const Word rest = sizes[d].quotient(left[i]);
        offsets[i] += static_cast<int64_t>(left[i] - rest * size) * stride;
        left[i] = rest;
      }
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
