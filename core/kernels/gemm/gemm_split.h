// f32 and f16 products on AMX tiles that only multiply bf16. Included by *_simd.cpp files only,
// after gemm_block.h.
//
// An f32 is the exact sum of three bf16, x = x1 + x2 + x3, each at most 2^-8 of the one before: 8
// significant bits three times. Of the nine products of x y the six largest are made,
//
//     x1 y1 + x1 y2 + x2 y1 + x1 y3 + x2 y2 + x3 y1,
//
// and what is left out is at most about 2^-24 |x y|, the rounding of an f32 product. With packing
// they take a little over half of the time of sgemm in AVX-512 registers (bench_gemm, Sapphire
// Rapids). Sums are f32.
//
// The tiles flush subnormal numbers: an element under 2^-100 counts to within 2^-126. Numbers from
// 2^62 on, infinities and NaN are not split; see kLargestSplit. An f16 is widened as it is read:
// its first two parts are all of it.
#pragma once

#include <tessera/core/kernels/gemm/gemm_block.h>

namespace tessera::kernels::TS_SIMD {
namespace {

#if defined(TESSERA_AMX_KERNEL)

// Runs only where has_amx(). Its panels are those of AmxKernel with three tiles where that has one;
// pairs along K are (k, k + 16), which costs no shuffle to make.
struct SplitAmxKernel {
  using Value = bf16;
  using Accumulator = float;
  static constexpr int kRows = 32;
  static constexpr int kColumns = 32;
  static constexpr int kParts = 3;
  // A's panel of 36 KiB stays in the L1.
  static constexpr int64_t kBlockDepth = 192;
  static constexpr int kTileDepth = 32;
  static constexpr int kTile = 16 * 32;
  // Magnitude as bits from which panels must not be multiplied: 2^62. Products and their sums stay
  // finite below it, and parts of an infinity would give NaN.
  static constexpr uint32_t kLargestSplit = uint32_t{127 + 62} << 23;

  static TS_HD int64_t padded_depth(int64_t depth) {
    return kParts * ((depth + kTileDepth - 1) / kTileDepth * kTileDepth);
  }
  static TS_HD void begin() { AmxKernel::begin(); }
  static TS_HD void end() { AmxKernel::end(); }

  static TS_HD __mmask16 first_lanes(int64_t count) {
    return count >= 16 ? __mmask16(0xffff)
                       : static_cast<__mmask16>((1u << (count < 0 ? 0 : count)) - 1);
  }

  // The three bf16 of 16 numbers, in the upper halves; ties away from zero.
  static TS_HD void split(__m512 x, __m512i (&parts)[kParts]) {
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(-0x10000);
    parts[0] = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x), half), upper);
    const __m512 rest = _mm512_sub_ps(x, _mm512_castsi512_ps(parts[0]));
    parts[1] = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(rest), half), upper);
    parts[2] = _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(parts[1])));
  }
  // 16 pairs (low, high) of each part to its tile.
  static TS_HD void store_pairs(__m512 low, __m512 high, int row, bf16* tile) {
    __m512i lows[kParts], highs[kParts];
    split(low, lows);
    split(high, highs);
    for (int part = 0; part < kParts; ++part) {
      _mm512_storeu_si512(
          tile + 2 * kTile * part + 32 * row,
          _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(lows[part], 16), highs[part]));
    }
  }
  static TS_HD __m512 load_lanes(__mmask16 mask, const float* source) {
    return _mm512_maskz_loadu_ps(mask, source);
  }
  static TS_HD __m512 load_lanes(__mmask16 mask, const f16* source) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, source));
  }
  static TS_HD void raise(__m512 x, __m512i& largest) {
    largest = _mm512_max_epu32(
        largest, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
  }

  // Tiles of 16 lanes x 32 k, 2 kTile apart. kPairsFirst as in AmxKernel.
  template <bool kPairsFirst, class Source>
  static TS_HD void pack_tile(const Source* source, int64_t lane_stride, int64_t k_stride,
                              int64_t lanes, int64_t depth, bf16* tile, __m512i& largest) {
    alignas(64) Source gathered[16][32];
    bool pairs_first = false;
    if (k_stride != 1 && lane_stride == 1) {
      const __mmask16 mask = first_lanes(lanes);
      for (int p = 0; p < 16; ++p) {
        const __m512 low = load_lanes(p < depth ? mask : __mmask16(0), source + p * k_stride);
        const __m512 high =
            load_lanes(p + 16 < depth ? mask : __mmask16(0), source + (p + 16) * k_stride);
        raise(low, largest);
        raise(high, largest);
        store_pairs(low, high, p, tile);
      }
      pairs_first = true;
    } else {
      if (k_stride != 1) {
        for (int i = 0; i < 16 && i < lanes; ++i) {
          for (int k = 0; k < 32 && k < depth; ++k) {
            gathered[i][k] = source[i * lane_stride + k * k_stride];
          }
        }
        source = gathered[0];
        lane_stride = 32;
      }
      const __mmask16 low_mask = first_lanes(depth), high_mask = first_lanes(depth - 16);
      for (int i = 0; i < 16; ++i) {
        const Source* row = source + i * lane_stride;
        const __m512 low = load_lanes(i < lanes ? low_mask : __mmask16(0), row);
        const __m512 high = load_lanes(i < lanes ? high_mask : __mmask16(0), row + 16);
        raise(low, largest);
        raise(high, largest);
        store_pairs(low, high, i, tile);
      }
    }
    if (pairs_first == kPairsFirst) return;
    for (int part = 0; part < kParts; ++part) {
      bf16* words = tile + 2 * kTile * part;
      __m512i rows[16];
      for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(words + 32 * i);
      transpose_16x16(rows);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(words + 32 * i, rows[i]);
    }
  }

  // All panels of `lanes` rows of A (kPairsFirst = false) or columns of B. Returns the largest
  // magnitude in them, as bits.
  template <bool kPairsFirst, class Source>
  static uint32_t pack(const Source* source, int64_t lane_stride, int64_t k_stride, int64_t lanes,
                       int64_t depth, bf16* panels) {
    __m512i largest = _mm512_setzero_si512();
    // Source is read along its contiguous side: a panel after the other, or a stretch of K.
    const int64_t panel = kRows * padded_depth(depth);
    const bool lanes_inside = lane_stride == 1 && k_stride != 1;
    const int64_t outer_end = lanes_inside ? depth : lanes,
                  inner_end = lanes_inside ? lanes : depth;
    for (int64_t outer = 0; outer < outer_end; outer += 32) {
      for (int64_t inner = 0; inner < inner_end; inner += 32) {
        const int64_t first = lanes_inside ? inner : outer, k = lanes_inside ? outer : inner;
        bf16* tiles = panels + first / kRows * panel + k * kParts * kRows;
        for (int half = 0; half < 2; ++half) {
          const int64_t lane = first + 16 * half;
          pack_tile<kPairsFirst>(source + lane * lane_stride + k * k_stride, lane_stride, k_stride,
                                 lanes - lane, depth - k, tiles + half * kTile, largest);
        }
      }
    }
    alignas(64) uint32_t magnitudes[16];
    _mm512_store_si512(magnitudes, largest);
    uint32_t result = 0;
    for (uint32_t magnitude : magnitudes) result = magnitude > result ? magnitude : result;
    return result;
  }

  // One panel of numbers that are known to be under kLargestSplit.
  static void pack_a(const float* source, int64_t row_stride, int64_t k_stride, int64_t rows,
                     int64_t depth, Value* panel) {
    pack<false>(source, row_stride, k_stride, rows, depth, panel);
  }
  static void pack_b(const float* source, int64_t k_stride, int64_t column_stride, int64_t columns,
                     int64_t depth, Value* panel) {
    pack<true>(source, column_stride, k_stride, columns, depth, panel);
  }

  // c: (kRows, kColumns) with row stride ldc; set, or added to where accumulate. Tiles 0 to 3 hold
  // c, 4 and 5 a part of A, 6 and 7 one of B.
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
#define TESSERA_MULTIPLY_PARTS           \
  "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t" \
  "tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t" \
  "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\t" \
  "tdpbf16ps %%tmm7, %%tmm5, %%tmm3\n\t"
#define TESSERA_LOAD_A(first, second) \
  "tileloadd " first                  \
  "(%0,%2,1), %%tmm4\n\t"             \
  "tileloadd " second "(%0,%2,1), %%tmm5\n\t"
#define TESSERA_LOAD_B(first, second) \
  "tileloadd " first                  \
  "(%1,%2,1), %%tmm6\n\t"             \
  "tileloadd " second "(%1,%2,1), %%tmm7\n\t"
    const int64_t row = 64;
    for (int64_t k = 0; k < depth; k += kParts * kTileDepth) {
      __asm__ volatile(TESSERA_LOAD_B("4096", "5120") TESSERA_LOAD_A("0", "1024")
                           TESSERA_MULTIPLY_PARTS TESSERA_LOAD_B("0", "1024")
                               TESSERA_MULTIPLY_PARTS TESSERA_LOAD_B("2048", "3072")
                                   TESSERA_MULTIPLY_PARTS TESSERA_LOAD_A("2048", "3072")
                                       TESSERA_MULTIPLY_PARTS TESSERA_LOAD_B("0", "1024")
                                           TESSERA_MULTIPLY_PARTS TESSERA_LOAD_A("4096", "5120")
                                               TESSERA_MULTIPLY_PARTS
                       :
                       : "r"(a), "r"(b), "r"(row)
                       : "memory");
      a += 2 * kParts * kTile;
      b += 2 * kParts * kTile;
    }
#undef TESSERA_MULTIPLY_PARTS
#undef TESSERA_LOAD_A
#undef TESSERA_LOAD_B
    __asm__ volatile(
        "tilestored %%tmm0, (%0,%2,1)\n\ttilestored %%tmm1, 64(%0,%2,1)\n\t"
        "tilestored %%tmm2, (%1,%2,1)\n\ttilestored %%tmm3, 64(%1,%2,1)"
        :
        : "r"(c), "r"(lower), "r"(stride)
        : "memory");
  }
};

#endif

}  // namespace
}  // namespace tessera::kernels::TS_SIMD
