// The inside of a matrix product: panels and micro-kernels. Included by *_simd.cpp files only, once
// for each instruction set; everything here has internal linkage.
//
// A panel holds kRows rows of A (or kColumns columns of B) for a stretch of K, laid out in the
// order in which the micro-kernel reads: one pass, no stride. Edges are filled with zeros, so that
// a micro-kernel always works on a whole kRows x kColumns block of C.
//
//   FmaKernel<float>   14 x 32 (AVX-512), 6 x 16 (AVX2), 5 x 16 (NEON): the accumulators fill the
//                      registers
//   FmaKernel<double>  14 x 16, 6 x 8, 5 x 8
//   AmxKernel          32 x 32 in four tile registers, bf16 in pairs along K
//   DotKernel          8 x 48, bf16 in pairs along K (gemm_dot.h)
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <tessera/core/dispatch.h>
#include <tessera/core/half.h>
#include <tessera/core/kernels/common/transpose.h>
#include <tessera/core/kernels/gemm/gemm_tile.h>

namespace tessera::kernels::TS_SIMD {
namespace {

// ---- Vectors
// -------------------------------------------------------------------------------------

template <class T>
struct Vec;

#if defined(__AVX512F__)
template <>
struct Vec<float> {
  static constexpr int kWidth = 16;
  __m512 v;
  static TS_HD Vec zero() { return {_mm512_setzero_ps()}; }
  static TS_HD Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static TS_HD Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
  TS_HD void store(float* p) const { _mm512_storeu_ps(p, v); }
  static TS_HD Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static TS_HD Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
};
template <>
struct Vec<double> {
  static constexpr int kWidth = 8;
  __m512d v;
  static TS_HD Vec zero() { return {_mm512_setzero_pd()}; }
  static TS_HD Vec load(const double* p) { return {_mm512_loadu_pd(p)}; }
  static TS_HD Vec broadcast(double x) { return {_mm512_set1_pd(x)}; }
  TS_HD void store(double* p) const { _mm512_storeu_pd(p, v); }
  static TS_HD Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
  static TS_HD Vec add(Vec a, Vec b) { return {_mm512_add_pd(a.v, b.v)}; }
};
constexpr int kMicroRows = 14;
#elif defined(__AVX2__)
template <>
struct Vec<float> {
  static constexpr int kWidth = 8;
  __m256 v;
  static TS_HD Vec zero() { return {_mm256_setzero_ps()}; }
  static TS_HD Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static TS_HD Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
  TS_HD void store(float* p) const { _mm256_storeu_ps(p, v); }
  static TS_HD Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static TS_HD Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
};
template <>
struct Vec<double> {
  static constexpr int kWidth = 4;
  __m256d v;
  static TS_HD Vec zero() { return {_mm256_setzero_pd()}; }
  static TS_HD Vec load(const double* p) { return {_mm256_loadu_pd(p)}; }
  static TS_HD Vec broadcast(double x) { return {_mm256_set1_pd(x)}; }
  TS_HD void store(double* p) const { _mm256_storeu_pd(p, v); }
  static TS_HD Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
  static TS_HD Vec add(Vec a, Vec b) { return {_mm256_add_pd(a.v, b.v)}; }
};
constexpr int kMicroRows = 6;
#elif defined(__aarch64__)
// Two registers where AVX2 has one: sums of the same elements in the same order, the same bits.
template <>
struct Vec<float> {
  static constexpr int kWidth = 8;
  float32x4_t low, high;
  static TS_HD Vec zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
  static TS_HD Vec load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static TS_HD Vec broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  TS_HD void store(float* p) const {
    vst1q_f32(p, low);
    vst1q_f32(p + 4, high);
  }
  static TS_HD Vec fma(Vec a, Vec b, Vec c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
  }
  static TS_HD Vec add(Vec a, Vec b) {
    return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
  }
};
template <>
struct Vec<double> {
  static constexpr int kWidth = 4;
  float64x2_t low, high;
  static TS_HD Vec zero() { return {vdupq_n_f64(0), vdupq_n_f64(0)}; }
  static TS_HD Vec load(const double* p) { return {vld1q_f64(p), vld1q_f64(p + 2)}; }
  static TS_HD Vec broadcast(double x) { return {vdupq_n_f64(x), vdupq_n_f64(x)}; }
  TS_HD void store(double* p) const {
    vst1q_f64(p, low);
    vst1q_f64(p + 2, high);
  }
  static TS_HD Vec fma(Vec a, Vec b, Vec c) {
    return {vfmaq_f64(c.low, a.low, b.low), vfmaq_f64(c.high, a.high, b.high)};
  }
  static TS_HD Vec add(Vec a, Vec b) {
    return {vaddq_f64(a.low, b.low), vaddq_f64(a.high, b.high)};
  }
};
constexpr int kMicroRows = 5;  // g++ 12 spills 6
#else
template <class T>
struct Vec {
  static constexpr int kWidth = 16 / sizeof(T);
  typedef T Register __attribute__((vector_size(16)));
  Register v;
  static TS_HD Vec zero() { return {Register{}}; }
  static TS_HD Vec load(const T* p) {
    Vec result;
    __builtin_memcpy(&result.v, p, sizeof(Register));
    return result;
  }
  static TS_HD Vec broadcast(T x) { return {Register{} + x}; }
  TS_HD void store(T* p) const { __builtin_memcpy(p, &v, sizeof(Register)); }
  static TS_HD Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
  static TS_HD Vec add(Vec a, Vec b) { return {a.v + b.v}; }
};
constexpr int kMicroRows = 6;
#endif

// ---- Panels
// --------------------------------------------------------------------------------------

#if defined(__AVX512F__)
// Transposes 16 rows of 16 32-bit words.
TS_HD void transpose_16x16(__m512i (&rows)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    rows[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    rows[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

TS_HD __m512i load_16_as_f32(const float* p) { return _mm512_loadu_si512(p); }
TS_HD __m512i load_16_as_f32(const bf16* p) {
  return _mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
}
TS_HD __m512i load_16_as_f32(const f16* p) {
  return _mm512_castps_si512(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
TS_HD __m512i load_16_as_f32(const uint8_t* p) {
  return _mm512_castps_si512(_mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
}
TS_HD __m512i load_16_as_f32(const int8_t* p) {
  return _mm512_castps_si512(_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
}
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
TS_HD __m256 load_8_as_f32(const float* p) { return _mm256_loadu_ps(p); }
TS_HD __m256 load_8_as_f32(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
TS_HD __m256 load_8_as_f32(const f16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
TS_HD __m256 load_8_as_f32(const uint8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
TS_HD __m256 load_8_as_f32(const int8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
#endif

#if defined(__aarch64__)
TS_HD float32x4_t load_4_as_f32(const float* p) { return vld1q_f32(p); }
TS_HD float32x4_t load_4_as_f32(const bf16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16));
}
TS_HD float32x4_t load_4_as_f32(const f16* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
}
TS_HD uint8x8_t load_4_bytes(const void* p) {
  uint32_t four;
  __builtin_memcpy(&four, p, sizeof(four));
  return vcreate_u8(four);
}
TS_HD float32x4_t load_4_as_f32(const uint8_t* p) {
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_4_bytes(p)))));
}
TS_HD float32x4_t load_4_as_f32(const int8_t* p) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_4_bytes(p))))));
}
TS_HD void transpose_4x4(float32x4_t (&rows)[4]) {
  const float32x4x2_t top = vtrnq_f32(rows[0], rows[1]), bottom = vtrnq_f32(rows[2], rows[3]);
  rows[0] = vcombine_f32(vget_low_f32(top.val[0]), vget_low_f32(bottom.val[0]));
  rows[1] = vcombine_f32(vget_low_f32(top.val[1]), vget_low_f32(bottom.val[1]));
  rows[2] = vcombine_f32(vget_high_f32(top.val[0]), vget_high_f32(bottom.val[0]));
  rows[3] = vcombine_f32(vget_high_f32(top.val[1]), vget_high_f32(bottom.val[1]));
}
#endif

// Fills a panel of kWidth lanes x depth: panel[k * kWidth + lane] = source of (lane, k); lanes from
// `lanes` on are zero.
template <int kWidth, class Value, class Source>
inline void pack_panel(const Source* source, int64_t lane_stride, int64_t k_stride, int64_t lanes,
                       int64_t depth, Value* panel) {
  int64_t k = 0;
  if (lane_stride == 1 && lanes == kWidth) {
    for (; k < depth; ++k) {
      const Source* row = source + k * k_stride;
      if constexpr (std::is_same_v<Source, Value>) {
        __builtin_memcpy(panel + k * kWidth, row, kWidth * sizeof(Value));
      } else {
        int lane = 0;
#if defined(__aarch64__)
        if constexpr (std::is_same_v<Value, float>) {
          for (; lane + 4 <= kWidth; lane += 4) {
            vst1q_f32(panel + k * kWidth + lane, load_4_as_f32(row + lane));
          }
        }
#endif
        for (; lane < kWidth; ++lane) panel[k * kWidth + lane] = load<Value>(row[lane]);
      }
    }
    return;
  }
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Value, float> && !std::is_same_v<Source, double>) {
    if (k_stride == 1) {
      for (; k + 16 <= depth; k += 16) {
        for (int first = 0; first < kWidth; first += 16) {
          const int count = kWidth - first < 16 ? kWidth - first : 16;
          __m512i rows[16];
          if (lanes == kWidth) {
            for (int i = 0; i < 16; ++i) {
              rows[i] = i < count ? load_16_as_f32(source + (first + i) * lane_stride + k)
                                  : _mm512_setzero_si512();
            }
          } else {
            for (int i = 0; i < 16; ++i) {
              rows[i] = i < count && first + i < lanes
                            ? load_16_as_f32(source + (first + i) * lane_stride + k)
                            : _mm512_setzero_si512();
            }
          }
          transpose_16x16(rows);
          const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
          for (int i = 0; i < 16; ++i) {
            _mm512_mask_storeu_epi32(panel + (k + i) * kWidth + first, mask, rows[i]);
          }
        }
      }
    }
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<Value, float> && !std::is_same_v<Source, double>) {
    if (k_stride == 1) {
      constexpr int kSize = 8;
      // Whole registers are stored where what lies behind is written later.
      for (; k + kSize <= depth; k += kSize) {
#pragma GCC unroll 2
        for (int first = 0; first < kWidth; first += kSize) {
          __m256 rows[kSize];
#pragma GCC unroll 8
          for (int i = 0; i < kSize; ++i) {
            rows[i] = first + i < kWidth && first + i < lanes
                          ? load_8_as_f32(source + (first + i) * lane_stride + k)
                          : _mm256_setzero_ps();
          }
          transpose_8x8(rows);
          float* const to = panel + k * kWidth + first;
          if constexpr (kWidth % kSize == 0) {
#pragma GCC unroll 8
            for (int i = 0; i < kSize; ++i) _mm256_storeu_ps(to + i * kWidth, rows[i]);
          } else {
            static_assert(kWidth < kSize);
#pragma GCC unroll 8
            for (int i = 0; i + 1 < kSize; ++i) _mm256_storeu_ps(to + i * kWidth, rows[i]);
            __builtin_memcpy(to + (kSize - 1) * kWidth, &rows[kSize - 1], kWidth * sizeof(float));
          }
        }
      }
    }
  }
#elif defined(__aarch64__)
  if constexpr (std::is_same_v<Value, float> && !std::is_same_v<Source, double>) {
    if (k_stride == 1) {
      constexpr int kWhole = kWidth / 4 * 4;
      for (; k + 4 <= depth; k += 4) {
        for (int first = 0; first < kWhole; first += 4) {
          float32x4_t rows[4];
          for (int i = 0; i < 4; ++i) {
            rows[i] = first + i < lanes ? load_4_as_f32(source + (first + i) * lane_stride + k)
                                        : vdupq_n_f32(0);
          }
          transpose_4x4(rows);
          for (int i = 0; i < 4; ++i) vst1q_f32(panel + (k + i) * kWidth + first, rows[i]);
        }
        for (int lane = kWhole; lane < kWidth; ++lane) {
          for (int i = 0; i < 4; ++i) {
            panel[(k + i) * kWidth + lane] =
                lane < lanes ? load<float>(source[lane * lane_stride + k + i]) : 0.0f;
          }
        }
      }
    }
  }
#endif
  for (; k < depth; ++k) {
    for (int64_t lane = 0; lane < kWidth; ++lane) {
      panel[k * kWidth + lane] =
          lane < lanes ? load<Value>(source[lane * lane_stride + k * k_stride]) : Value(0);
    }
  }
}

// ---- Micro-kernels -----------------------------------------------------------------------------

// Panels of T, multiplied by fma. Value: what they hold. Accumulator: what C blocks hold. depth
// counts k after padding.
template <class T, int kPanelRows, int kPanelVectors>
struct FmaPanels {
  using Value = T;
  using Accumulator = T;
  static constexpr int kRows = kPanelRows;
  static constexpr int kVectors = kPanelVectors;
  static constexpr int kColumns = kVectors * Vec<T>::kWidth;

  static TS_HD int64_t padded_depth(int64_t depth) { return depth; }

  template <class Source>
  static void pack_a(const Source* source, int64_t row_stride, int64_t k_stride, int64_t rows,
                     int64_t depth, Value* panel) {
    pack_panel<kRows>(source, row_stride, k_stride, rows, depth, panel);
  }
  template <class Source>
  static void pack_b(const Source* source, int64_t k_stride, int64_t column_stride, int64_t columns,
                     int64_t depth, Value* panel) {
    pack_panel<kColumns>(source, column_stride, k_stride, columns, depth, panel);
  }

  // The panel's first kCount rows. c: (kCount, kColumns) with row stride ldc; set, or added to
  // where accumulate.
  template <int kCount>
  static TS_HD void multiply_rows(int64_t depth, const Value* a, const Value* b, Accumulator* c,
                                  int64_t ldc, bool accumulate) {
    Vec<T> sum[kCount][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Vec<T>::zero();
    }
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; ++k) {
      Vec<T> right[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) right[j] = Vec<T>::load(b + j * Vec<T>::kWidth);
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) {
        const Vec<T> left = Vec<T>::broadcast(a[i]);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sum[i][j] = Vec<T>::fma(left, right[j], sum[i][j]);
      }
      a += kRows;
      b += kColumns;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        T* target = c + i * ldc + j * Vec<T>::kWidth;
        (accumulate ? Vec<T>::add(Vec<T>::load(target), sum[i][j]) : sum[i][j]).store(target);
      }
    }
  }
};

template <class T>
struct FmaKernel : FmaPanels<T, kMicroRows, 2> {
  static constexpr int64_t kBlockDepth = sizeof(T) == 4 ? 384 : 256;

  static TS_HD void begin() {}
  static TS_HD void end() {}

  // c: (kRows, kColumns) with row stride ldc; set, or added to where accumulate.
  static TS_HD void multiply(int64_t depth, const T* a, const T* b, T* c, int64_t ldc,
                             bool accumulate) {
    FmaKernel::template multiply_rows<kMicroRows>(depth, a, b, c, ldc, accumulate);
  }
};

#if defined(__AVX512F__)
// bf16 in pairs along K, a 32-bit word each, as instructions that multiply two at once read them.
// f32 is rounded; kNative: by AVX-512 BF16, which makes zeros of subnormal numbers.
template <bool kNative>
struct Bf16Pairs {
  static TS_HD __m512i load_32(const bf16* p, int64_t valid) {
    if (valid >= 32) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi16(valid <= 0 ? 0 : (__mmask32{1} << valid) - 1, p);
  }
  // 16 pairs (x[i], y[i]) of two rows.
  static TS_HD __m512i interleave(const bf16* x, const bf16* y, int64_t valid) {
    const __mmask16 mask = valid >= 16
                               ? __mmask16(0xffff)
                               : static_cast<__mmask16>((1u << (valid < 0 ? 0 : valid)) - 1);
    const __m512i low = _mm512_cvtepu16_epi32(x == nullptr ? _mm256_setzero_si256()
                                                           : _mm256_maskz_loadu_epi16(mask, x));
    const __m512i high = _mm512_cvtepu16_epi32(y == nullptr ? _mm256_setzero_si256()
                                                            : _mm256_maskz_loadu_epi16(mask, y));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }

  // The same for f32, rounded.
  static TS_HD __m512i rounded(__m512i bits) {  // bf16 in the low halves
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_srli_epi32(
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512 value = _mm512_castsi512_ps(bits);
    return _mm512_mask_mov_epi32(nearest, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                                 _mm512_set1_epi32(0x7fc0));
  }
  static TS_HD __m512i rounded(__m512i low, __m512i high) {  // 32 bf16
    if constexpr (kNative) {
      __m512i result;
      __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(result) : "v"(low), "v"(high));
      return result;
    } else {
      return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(rounded(low))),
                                _mm512_cvtepi32_epi16(rounded(high)), 1);
    }
  }
  static TS_HD __m512i load_16(const float* p, int64_t valid) {
    const __mmask16 mask = valid >= 16
                               ? __mmask16(0xffff)
                               : static_cast<__mmask16>((1u << (valid < 0 ? 0 : valid)) - 1);
    return _mm512_maskz_loadu_epi32(p == nullptr ? __mmask16(0) : mask, p);
  }
  static TS_HD __m512i load_32(const float* p, int64_t valid) {
    return rounded(load_16(p, valid), load_16(p + 16, valid - 16));
  }
  static TS_HD __m512i interleave(const float* x, const float* y, int64_t valid) {
    const __m512i low = load_16(x, valid), high = load_16(y, valid);
    if constexpr (kNative) {
      const __m512i order = _mm512_or_si512(
          _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
          _mm512_slli_epi32(
              _mm512_set_epi32(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16),
              16));
      return _mm512_permutexvar_epi16(order, rounded(low, high));
    } else {
      return _mm512_or_si512(rounded(low), _mm512_slli_epi32(rounded(high), 16));
    }
  }

  // 16 lanes x 32 k. kPairsFirst: pair p of all 16 lanes is one row; otherwise a lane's 32 k are
  // one row. Both are the same 32-bit words, transposed.
  template <bool kPairsFirst, class Source>
  static TS_HD void load_tile(const Source* source, int64_t lane_stride, int64_t k_stride,
                              int64_t lanes, int64_t depth, __m512i (&rows)[16]) {
    bool pairs_first = kPairsFirst;
    bool done = false;
    if constexpr (std::is_same_v<Source, bf16> || std::is_same_v<Source, float>) {
      if (k_stride == 1) {
        for (int i = 0; i < 16; ++i) {
          rows[i] = i < lanes ? load_32(source + i * lane_stride, depth) : _mm512_setzero_si512();
        }
        pairs_first = false;
        done = true;
      } else if (lane_stride == 1) {
        for (int p = 0; p < 16; ++p) {
          rows[p] =
              interleave(2 * p < depth ? source + 2 * p * k_stride : nullptr,
                         2 * p + 1 < depth ? source + (2 * p + 1) * k_stride : nullptr, lanes);
        }
        pairs_first = true;
        done = true;
      }
    }
    if (!done) {
      alignas(64) bf16 words[16][32];
      for (int i = 0; i < 16; ++i) {
        for (int k = 0; k < 32; ++k) {
          words[i][k] = i < lanes && k < depth
                            ? store<bf16>(load<float>(source[i * lane_stride + k * k_stride]))
                            : bf16::from_bits(0);
        }
      }
      for (int i = 0; i < 16; ++i) rows[i] = _mm512_load_si512(words[i]);
      pairs_first = false;
    }
    if (pairs_first != kPairsFirst) transpose_16x16(rows);
  }
};
#endif

#if defined(__AVX512F__) && defined(__linux__)
#define TESSERA_AMX_KERNEL 1

// bf16 x bf16 -> f32 on AMX tiles. Runs only where the processor has AMX: the instructions are
// written as assembly, so that the file needs no flags beyond AVX-512. Subnormal inputs count as
// zero.
struct AmxKernel {
  using Value = bf16;
  using Accumulator = float;
  static constexpr int kRows = 32;
  static constexpr int kColumns = 32;
  static constexpr int64_t kBlockDepth = 512;
  static constexpr int kTileDepth = 32;  // k of one tile: 64 bytes of bf16
  static constexpr int kTile = 16 * 32;  // elements of a tile

  static TS_HD int64_t padded_depth(int64_t depth) {
    return (depth + kTileDepth - 1) / kTileDepth * kTileDepth;
  }
  // Configures the eight tile registers as 16 rows of 64 bytes; end() gives them back, so that a
  // context switch need not save them.
  static TS_HD void begin() {
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;
    for (int i = 0; i < 8; ++i) {
      config[16 + 2 * i] = 64;
      config[48 + i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  static TS_HD void end() { __asm__ volatile("tilerelease"); }

  template <bool kPairsFirst, class Source>
  static TS_HD void pack(const Source* source, int64_t lane_stride, int64_t k_stride, int64_t lanes,
                         int64_t depth, Value* panel) {
    for (int64_t k = 0; k < depth; k += kTileDepth) {
      for (int half = 0; half < 2; ++half) {
        __m512i rows[16];
        Bf16Pairs<false>::load_tile<kPairsFirst>(source + 16 * half * lane_stride + k * k_stride,
                                                 lane_stride, k_stride, lanes - 16 * half,
                                                 depth - k, rows);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(panel + i * 32, rows[i]);
        panel += kTile;
      }
    }
  }
  template <class Source>
  static void pack_a(const Source* source, int64_t row_stride, int64_t k_stride, int64_t rows,
                     int64_t depth, Value* panel) {
    pack<false>(source, row_stride, k_stride, rows, depth, panel);
  }
  template <class Source>
  static void pack_b(const Source* source, int64_t k_stride, int64_t column_stride, int64_t columns,
                     int64_t depth, Value* panel) {
    pack<true>(source, column_stride, k_stride, columns, depth, panel);
  }

  static TS_HD void multiply(int64_t depth, const Value* a, const Value* b, Accumulator* c,
                             int64_t ldc, bool accumulate) {
    const int64_t stride = ldc * 4;
    float* lower = c + 16 * ldc;
    if (accumulate) {
      __asm__ volatile(
          "tileloadd (%0,%2,1), %%tmm0\n\ttileloadd 64(%0,%2,1), %%tmm1\n\t"
          "tileloadd (%1,%2,1), %%tmm2\n\ttileloadd 64(%1,%2,1), %%tmm3"
          :
          : "r"(c), "r"(lower), "r"(stride)
          : "memory");
    } else {
      __asm__ volatile(
          "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" ::);
    }
    const int64_t row = 64;
    for (int64_t k = 0; k < depth; k += kTileDepth) {
      __asm__ volatile(
          "tileloadd (%1,%2,1), %%tmm6\n\t"
          "tileloadd (%0,%2,1), %%tmm4\n\t"
          "tileloadd 1024(%1,%2,1), %%tmm7\n\t"
          "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
          "tileloadd 1024(%0,%2,1), %%tmm5\n\t"
          "tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
          "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\t"
          "tdpbf16ps %%tmm7, %%tmm5, %%tmm3"
          :
          : "r"(a), "r"(b), "r"(row)
          : "memory");
      a += 2 * kTile;
      b += 2 * kTile;
    }
    __asm__ volatile(
        "tilestored %%tmm0, (%0,%2,1)\n\ttilestored %%tmm1, 64(%0,%2,1)\n\t"
        "tilestored %%tmm2, (%1,%2,1)\n\ttilestored %%tmm3, 64(%1,%2,1)"
        :
        : "r"(c), "r"(lower), "r"(stride)
        : "memory");
  }
};
#endif

// ---- Blocks
// --------------------------------------------------------------------------------------

TS_HD int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// target (columns, rows) = source^T; source: (rows, columns). Row strides in elements.
template <class T>
inline void transpose_block(const T* source, int64_t source_stride, int64_t rows, int64_t columns,
                            T* target, int64_t target_stride) {
  int64_t i = 0;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    for (; columns % 16 == 0 && i + 16 <= rows; i += 16) {
      for (int64_t j = 0; j < columns; j += 16) {
        __m512i block[16];
        for (int q = 0; q < 16; ++q) {
          block[q] = _mm512_loadu_si512(source + (i + q) * source_stride + j);
        }
        transpose_16x16(block);
        for (int q = 0; q < 16; ++q) {
          _mm512_storeu_si512(target + (j + q) * target_stride + i, block[q]);
        }
      }
    }
  }
#endif
  for (; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      target[j * target_stride + i] = source[i * source_stride + j];
    }
  }
}

// All panels of `rows` rows; each takes kRows * padded depth elements.
template <class Kernel, class Source>
inline void pack_rows(const Source* source, int64_t row_stride, int64_t k_stride, int64_t rows,
                      int64_t depth, typename Kernel::Value* panels) {
  const int64_t size = Kernel::kRows * Kernel::padded_depth(depth);
  int64_t i = 0;
  if constexpr (requires { Kernel::kGroup; }) {
    constexpr int64_t kRows = Kernel::kGroup * Kernel::kRows;
    if (Kernel::template packs_group<Source>(row_stride, k_stride)) {
      for (; i + kRows <= rows; i += kRows, panels += Kernel::kGroup * size) {
        Kernel::pack_a_group(source + i * row_stride, row_stride, k_stride, depth, panels);
      }
    }
  }
  for (; i < rows; i += Kernel::kRows, panels += size) {
    const int64_t count = rows - i < Kernel::kRows ? rows - i : Kernel::kRows;
    Kernel::pack_a(source + i * row_stride, row_stride, k_stride, count, depth, panels);
  }
}
template <class Kernel, class Source>
inline void pack_columns(const Source* source, int64_t k_stride, int64_t column_stride,
                         int64_t columns, int64_t depth, typename Kernel::Value* panels) {
  const int64_t size = Kernel::kColumns * Kernel::padded_depth(depth);
  for (int64_t j = 0; j < columns; j += Kernel::kColumns, panels += size) {
    const int64_t count = columns - j < Kernel::kColumns ? columns - j : Kernel::kColumns;
    Kernel::pack_b(source + j * column_stride, k_stride, column_stride, count, depth, panels);
  }
}

// c (+)= a b for packed operands; c: (rows, columns), row stride ldc. Between begin() and end().
// Where a's panels are deeper than this product, a_depth is their depth; position d of their depth
// lies kRows * padded_depth(d) elements on (on AMX tiles d is a multiple of 32).
template <class Kernel>
inline void multiply_panels(int64_t rows, int64_t columns, int64_t depth,
                            const typename Kernel::Value* a, const typename Kernel::Value* b,
                            typename Kernel::Accumulator* c, int64_t ldc, bool accumulate,
                            int64_t a_depth = 0) {
  constexpr int kRows = Kernel::kRows, kColumns = Kernel::kColumns;
  const int64_t padded = Kernel::padded_depth(depth);
  const int64_t a_padded = a_depth > 0 ? Kernel::padded_depth(a_depth) : padded;
  // A's panel stays in L1, B's come from L2 one after the other, and rows of C are written along.
  for (int64_t i = 0; i < rows; i += kRows) {
    for (int64_t j = 0; j < columns; j += kColumns) {
      const auto* left = a + i * a_padded;
      const auto* right = b + j * padded;
      typename Kernel::Accumulator* target = c + i * ldc + j;
      const int64_t count_rows = rows - i, count_columns = columns - j;
      if (count_rows >= kRows && count_columns >= kColumns) {
        Kernel::multiply(padded, left, right, target, ldc, accumulate);
        continue;
      }
      alignas(64) typename Kernel::Accumulator edge[kRows * kColumns];
      Kernel::multiply(padded, left, right, edge, kColumns, false);
      const int edge_rows = static_cast<int>(count_rows < kRows ? count_rows : kRows);
      const int edge_columns =
          static_cast<int>(count_columns < kColumns ? count_columns : kColumns);
      for (int r = 0; r < edge_rows; ++r) {
        for (int q = 0; q < edge_columns; ++q) {
          target[r * ldc + q] =
              accumulate ? target[r * ldc + q] + edge[r * kColumns + q] : edge[r * kColumns + q];
        }
      }
    }
  }
}

// ---- Tiles of C
// ---------------------------------------------------------------------------------

// finish(row, rows, sums) is called once for all rows of the tile, a few at a time: while their
// sums are in the L1. Where K is one block and sums_are_scratch, the rows share the sums' first
// lines.
template <class Kernel, class Source, class Finish>
inline void run_tile(const GemmTile& tile, Finish&& finish) {
  using Value = typename Kernel::Value;
  using Sum = typename Kernel::Accumulator;
  constexpr int64_t kFinished = (Kernel::kRows < 32 ? 32 / Kernel::kRows : 1) * Kernel::kRows;
  const auto* a = static_cast<const Source*>(tile.a);
  const auto* b = static_cast<const Source*>(tile.b);
  auto* sums = static_cast<Sum*>(tile.sums);
  // Equal stretches of K, not a full one and a rest.
  const int64_t blocks = (tile.k + Kernel::kBlockDepth - 1) / Kernel::kBlockDepth;
  const int64_t step = round_up((tile.k + blocks - 1) / blocks, 32);
  auto* packed_a = static_cast<Value*>(tile.scratch);
  auto* packed_b = packed_a + round_up(tile.m, Kernel::kRows) * round_up(Kernel::kBlockDepth, 32);
  const int64_t stride = tile.sums_row_stride;
  const int64_t sums_step = step >= tile.k && tile.sums_are_scratch ? 0 : stride;
  Kernel::begin();
  for (int64_t k = 0; k < tile.k; k += step) {
    const int64_t depth = tile.k - k < step ? tile.k - k : step;
    const bool accumulate = tile.accumulate || k > 0, is_last = k + step >= tile.k;
    pack_rows<Kernel>(a + k * tile.a_column_stride, tile.a_row_stride, tile.a_column_stride, tile.m,
                      depth, packed_a);
    pack_columns<Kernel>(b + k * tile.b_row_stride, tile.b_row_stride, tile.b_column_stride, tile.n,
                         depth, packed_b);
    for (int64_t row = 0; row < tile.m; row += kFinished) {
      const int64_t rows = tile.m - row < kFinished ? tile.m - row : kFinished;
      Sum* const target = sums + row * sums_step;
      multiply_panels<Kernel>(rows, tile.n, depth, packed_a + row * Kernel::padded_depth(depth),
                              packed_b, target, stride, accumulate);
      if (is_last) finish(row, rows, target);
    }
  }
  Kernel::end();
}

template <class Kernel, class Source>
inline void run_tile(const GemmTile& tile) {
  run_tile<Kernel, Source>(tile, [](int64_t, int64_t, const typename Kernel::Accumulator*) {});
}

}  // namespace
}  // namespace tessera::kernels::TS_SIMD
