// bf16 products in AVX-512 registers, two of K at a time. Included by *_simd.cpp files only, after
// gemm_block.h.
//
// vdpbf16ps takes 16 pairs of bf16 from each operand and adds the two products of a pair to an f32,
// one after the other: twice the multiplications of an f32 fma, and nothing is widened. It rounds
// to nearest whatever MXCSR says and takes and gives subnormal numbers as zeros, so that sums may
// differ in their last bits from those of the other instruction sets.
#pragma once

#include <tessera/core/kernels/gemm/gemm_block.h>

namespace tessera::kernels::TS_SIMD {
namespace {

#if defined(__AVX512F__)
#define TESSERA_DOT_KERNEL 1

// kRows x 16 kVectors of C in registers; a panel holds words of pairs: word p * kRows + row of A,
// word p * kColumns + column of B. Runs only where the processor has AVX-512 BF16: the instructions
// are written as assembly, so that the file needs no flags beyond AVX-512.
template <int kVectors>
struct DotKernel {
  using Value = bf16;
  using Accumulator = float;
  using Pairs = Bf16Pairs<true>;
  static constexpr int kRows = 8;
  static constexpr int kColumns = 16 * kVectors;
  // B's panels of 768 columns are 576 KiB: they stay in an L2 of 1 MiB while A's and C pass through
  // it.
  static constexpr int64_t kBlockDepth = 384;

  static TS_HD int64_t padded_depth(int64_t depth) { return (depth + 1) / 2 * 2; }
  static TS_HD void begin() {}
  static TS_HD void end() {}

  static TS_HD void store_8(bf16* words, __m256i values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), values);
  }

  // Four panels of A at once, where a register of `source` holds rows of all of them or K of one.
  static constexpr int kGroup = 4;
  template <class Source>
  static bool packs_group(int64_t row_stride, int64_t k_stride) {
    return k_stride == 1 || (row_stride == 1 && std::is_same_v<Source, bf16>);
  }
  template <class Source>
  static void pack_a_group(const Source* source, int64_t row_stride, int64_t k_stride,
                           int64_t depth, Value* panels) {
    if (k_stride == 1) {
      const int64_t two_panels = 2 * kRows * padded_depth(depth);
      pack_a_two(source, row_stride, depth, panels);
      pack_a_two(source + 2 * kRows * row_stride, row_stride, depth, panels + two_panels);
    } else if constexpr (std::is_same_v<Source, bf16>) {
      pack_a_rows_inside(source, k_stride, depth, panels);
    }
  }

  template <class Source>
  static void pack_a(const Source* source, int64_t row_stride, int64_t k_stride, int64_t rows,
                     int64_t depth, Value* panel) {
    const int64_t pairs = padded_depth(depth) / 2;
    for (int64_t k = 0; k < depth; k += 32) {
      __m512i words[16];
      Pairs::template load_tile<true>(source + k * k_stride, row_stride, k_stride, rows, depth - k,
                                      words);
      for (int64_t p = 0; p < 16 && k / 2 + p < pairs; ++p) {
        store_8(panel + (k + 2 * p) * kRows, _mm512_castsi512_si256(words[p]));
      }
    }
  }

  template <class Source>
  static void pack_b(const Source* source, int64_t k_stride, int64_t column_stride, int64_t columns,
                     int64_t depth, Value* panel) {
    const int64_t pairs = padded_depth(depth) / 2;
    for (int64_t k = 0; k < depth; k += 32) {
      for (int first = 0; first < kColumns; first += 16) {
        __m512i words[16];
        Pairs::template load_tile<true>(source + first * column_stride + k * k_stride,
                                        column_stride, k_stride, columns - first, depth - k, words);
        for (int64_t p = 0; p < 16 && k / 2 + p < pairs; ++p) {
          _mm512_storeu_si512(panel + (k + 2 * p) * kColumns + 2 * first, words[p]);
        }
      }
    }
  }

  // c: (kRows, kColumns) with row stride ldc; set, or added to where accumulate. Inlined into a
  // long function its sums are kept in memory.
  __attribute__((noinline)) static void multiply(int64_t depth, const Value* a, const Value* b,
                                                 Accumulator* c, int64_t ldc, bool accumulate) {
    __m512 sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = _mm512_setzero_ps();
        __builtin_prefetch(c + i * ldc + 16 * j, 1);
      }
    }
    for (int64_t k = 0; k < depth; k += 2) {
      __m512i right[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) right[j] = _mm512_loadu_si512(b + 32 * j);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const __m512i left = both_of(a + 2 * i);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sum[i][j] = add_products(sum[i][j], left, right[j]);
      }
      a += 2 * kRows;
      b += 2 * kColumns;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        float* const target = c + i * ldc + 16 * j;
        if (accumulate) sum[i][j] = _mm512_add_ps(_mm512_loadu_ps(target), sum[i][j]);
        _mm512_storeu_ps(target, sum[i][j]);
      }
    }
  }

 private:
  template <class Source>
  static TS_HD void pack_a_two(const Source* source, int64_t row_stride, int64_t depth,
                               Value* panels) {
    const int64_t panel = kRows * padded_depth(depth), pairs = padded_depth(depth) / 2;
    for (int64_t k = 0; k < depth; k += 32) {
      __m512i words[16];
      Pairs::template load_tile<true>(source + k, row_stride, 1, 2 * kRows, depth - k, words);
      for (int64_t p = 0; p < 16 && k / 2 + p < pairs; ++p) {
        bf16* const target = panels + (k + 2 * p) * kRows;
        store_8(target, _mm512_castsi512_si256(words[p]));
        store_8(target + panel, _mm512_extracti64x4_epi64(words[p], 1));
      }
    }
  }
  static TS_HD void pack_a_rows_inside(const bf16* source, int64_t k_stride, int64_t depth,
                                       Value* panels) {
    const int64_t panel = kRows * padded_depth(depth);
    // Words of rows 8q to 8q + 3 and of 8q + 4 to 8q + 7 are the lanes q of two registers.
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int64_t k = 0; k < depth; k += 2) {
      const __m512i even = _mm512_loadu_si512(source + k * k_stride);
      const __m512i odd =
          k + 1 < depth ? _mm512_loadu_si512(source + (k + 1) * k_stride) : _mm512_setzero_si512();
      const __m512i low = _mm512_unpacklo_epi16(even, odd);
      const __m512i high = _mm512_unpackhi_epi16(even, odd);
      const __m512i panels_01 = _mm512_permutex2var_epi64(low, first, high);
      const __m512i panels_23 = _mm512_permutex2var_epi64(low, second, high);
      bf16* const words = panels + k * kRows;
      store_8(words, _mm512_castsi512_si256(panels_01));
      store_8(words + panel, _mm512_extracti64x4_epi64(panels_01, 1));
      store_8(words + 2 * panel, _mm512_castsi512_si256(panels_23));
      store_8(words + 3 * panel, _mm512_extracti64x4_epi64(panels_23, 1));
    }
  }

  static TS_HD __m512i both_of(const Value* pair) {
    int word;
    __builtin_memcpy(&word, pair, sizeof(word));
    return _mm512_set1_epi32(word);
  }
  static TS_HD __m512 add_products(__m512 sum, __m512i a, __m512i b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
};
// For a large matrix: 24 chains of sums hide the latency of an instruction that starts twice a
// cycle, and 11 loads feed 24 of them.
using GemmDotKernel = DotKernel<3>;
// For attention, whose blocks are 32 queries or keys wide.
using AttentionDotKernel = DotKernel<2>;

#endif

}  // namespace
}  // namespace tessera::kernels::TS_SIMD
