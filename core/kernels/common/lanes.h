// Helpers of the `*_simd.cpp` files: blocks between storage and compute type, and sums in lanes.
//
// Everything lives in the namespace of the instruction set and without linkage (see isa.h).
// A kernel works on contiguous blocks of the compute type. Where the storage type is another one or
// the elements are not neighbors, a block is first brought to a buffer in L1, so that a kernel is
// compiled once for float and once for double, not once for every dtype and layout.
#pragma once

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include <cstdint>

#include <tessera/core/dispatch.h>
#include <tessera/core/macros.h>

// For lambdas of inner loops: inlined, so that packs stay in registers.
#define TS_LANES __attribute__((always_inline))

namespace tessera::kernels::TS_SIMD {
namespace {

inline constexpr int64_t kBlock = 1024;  // elements of a staged block
inline constexpr int kLanes = 32;        // partial sums of a row: four registers of v3

// As dispatch_floating, for dtypes that the caller has checked, because the error path of
// dispatch_floating would be emitted out of line. Any other dtype is taken for f32.
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

// A block [0, n) of x, n <= kBlock: x itself if it has the compute type, else a converted copy.
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

// A register of numbers. The compiler's vector types give arithmetic, comparison and ?: where a
// plain loop would not vectorize, in reductions that must not drop a NaN.
#if defined(__AVX512F__)
inline constexpr int kPackBytes = 64;
#else
inline constexpr int kPackBytes = 32;
#endif
template <class C>
struct PackOf {
  static constexpr int kSize = kPackBytes / static_cast<int>(sizeof(C));
  typedef C type __attribute__((vector_size(kPackBytes)));
};
template <class C, int kBytes>
struct UnalignedOf {
  typedef C type __attribute__((vector_size(kBytes), aligned(alignof(C)), may_alias));
};
template <class C>
using Pack = typename PackOf<C>::type;

template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, bf16> || std::is_same_v<T, f16>;

template <class L, class C>
TS_HD L convert_one(C x) {
  if constexpr (kIsHalf<C>) {
    return static_cast<L>(to_float(x));
  } else {
    return static_cast<L>(x);
  }
}

// PackOf<L>::kSize elements from x, converted to L. 16-bit floats become packs of double only.
template <class L, class C>
TS_HD Pack<L> load_pack(const C* x) {
  if constexpr (kIsHalf<C>) {
    static_assert(std::is_same_v<L, double>);
#if defined(__AVX512F__)
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    if constexpr (std::is_same_v<C, bf16>) {
      return reinterpret_cast<Pack<L>>(
          _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))));
    } else {
      return reinterpret_cast<Pack<L>>(_mm512_cvtps_pd(_mm256_cvtph_ps(bits)));
    }
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
    if constexpr (std::is_same_v<C, bf16>) {
      return reinterpret_cast<Pack<L>>(
          _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(bits), 16))));
    } else {
      return reinterpret_cast<Pack<L>>(_mm256_cvtps_pd(_mm_cvtph_ps(bits)));
    }
#else
    float wide[PackOf<L>::kSize];
    for (int i = 0; i < PackOf<L>::kSize; ++i) wide[i] = to_float(x[i]);
    return load_pack<L>(static_cast<const float*>(wide));
#endif
  } else {
#if defined(__AVX__)  // g++ 12 converts halves and joins them
    if constexpr (std::is_same_v<L, double> && std::is_same_v<C, float>) {
#if defined(__AVX512F__)
      return reinterpret_cast<Pack<L>>(_mm512_cvtps_pd(_mm256_loadu_ps(x)));
#else
      return reinterpret_cast<Pack<L>>(_mm256_cvtps_pd(_mm_loadu_ps(x)));
#endif
    }
#endif
    constexpr int kBytes = PackOf<L>::kSize * static_cast<int>(sizeof(C));
    const auto packed = *reinterpret_cast<const typename UnalignedOf<C, kBytes>::type*>(x);
    return __builtin_convertvector(packed, Pack<L>);
  }
}
template <class C>
TS_HD void store_pack(C* y, Pack<C> value) {
  *reinterpret_cast<typename UnalignedOf<C, kPackBytes>::type*>(y) = value;
}

// step(...step(init, x[0])..., x[n - 1]) in kLanes partial results of type L, which are combined
// pairwise with join. Element i belongs to lane i % kLanes on every instruction set, so that all
// give the same bits. step and join take numbers and packs.
template <class L, class C, class Step, class Join>
TS_HD L fold_lanes(const C* x, int64_t n, L init, Step step, Join join) {
  L lanes[kLanes];
  int64_t i = 0;
  if (n < kLanes / 2) {
    L result = init;
    for (; i < n; ++i) result = step(result, convert_one<L>(x[i]));
    return result;
  }
  constexpr int kSize = PackOf<L>::kSize, kPacks = kLanes / kSize;
  Pack<L> packs[kPacks];
#pragma GCC unroll 16
  for (int k = 0; k < kPacks; ++k) packs[k] = Pack<L>{} + init;
  for (; i + kLanes <= n; i += kLanes) {
#pragma GCC unroll 16
    for (int k = 0; k < kPacks; ++k) packs[k] = step(packs[k], load_pack<L>(x + i + k * kSize));
  }
#pragma GCC unroll 16
  for (int k = 0; k < kPacks; ++k) store_pack(lanes + k * kSize, packs[k]);
  for (int l = 0; i < n; ++i, ++l) lanes[l] = step(lanes[l], convert_one<L>(x[i]));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lanes[l] = join(lanes[l], lanes[l + width]);
  }
  return lanes[0];
}

TS_HD float absolute(float x) { return __builtin_fabsf(x); }
TS_HD double absolute(double x) { return __builtin_fabs(x); }

}  // namespace
}  // namespace tessera::kernels::TS_SIMD
