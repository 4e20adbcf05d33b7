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
// Rapids). Sums are f32; those of a deep K are added up in stretches, see kDeep.
//
// The tiles flush subnormal numbers, and parts of large numbers are rounded away from zero: a
// stretch of K whose products or sums could come near either end of f32's range is multiplied in
// f32 registers instead, see can_split. An f16 is widened as it is read: its first two parts are
// all of it.
//
// The kernel is independent of who multiplies the tiles: tests/core/test_gemm_split.cpp does it in
// plain C++, in the order of the instruction.
#pragma once

#include <tessera/core/kernels/gemm/gemm_block.h>

namespace tessera::kernels::TS_SIMD {
namespace {

#if defined(TESSERA_AMX_KERNEL)

// The tile registers. Runs only where the processor has AMX.
struct AmxTiles {
  static TS_HD void begin() { AmxKernel::begin(); }
  static TS_HD void end() { AmxKernel::end(); }
  template <int kRegister>
  static TS_HD void clear() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(kRegister));
  }
  // 16 rows of 64 bytes, `stride` bytes apart, from `offset` bytes after `base` on.
  template <int kRegister, int kOffset = 0>
  static TS_HD void load(const void* base, int64_t stride) {
    __asm__ volatile("tileloadd %c3(%0,%1,1), %%tmm%c2"
                     :
                     : "r"(base), "r"(stride), "i"(kRegister), "i"(kOffset)
                     : "memory");
  }
  template <int kRegister, int kOffset = 0>
  static TS_HD void store(void* base, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, %c3(%0,%1,1)"
                     :
                     : "r"(base), "r"(stride), "i"(kRegister), "i"(kOffset)
                     : "memory");
  }
  // c += a b: a is 16 x 32 bf16, b 32 x 16 in pairs along K, c 16 x 16 f32.
  template <int kC, int kA, int kB>
  static TS_HD void multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
};

// What a stretch of an operand holds, as bits of magnitudes: the largest, and the smallest that is
// not zero (kNoneSmall: there is none).
struct Magnitudes {
  static constexpr uint32_t kNoneSmall = 0xffffffffu;
  uint32_t largest = 0, smallest = kNoneSmall;
};

// Its panels are those of AmxKernel with three tiles where that has one; pairs along K are
// (k, k + 16), which costs no shuffle to make. kAddsApart: a product that is added to c begins at
// zero, so that c grows by one sum and not by six for every 32 of K.
template <class Tiles, bool kAddsApart = false>
struct SplitKernel {
  using Value = bf16;
  using Accumulator = float;
  static constexpr int kRows = 32;
  static constexpr int kColumns = 32;
  static constexpr int kParts = 3;
  // A's panel of 36 KiB stays in the L1.
  static constexpr int64_t kBlockDepth = 192;
  static constexpr int kTileDepth = 32;
  static constexpr int kTile = 16 * 32;
  // Magnitude as bits from which operands are not split: 2^59. A stretch of K sums less than 2^8
  // products, each less than 2^118 and a rounding, so that it stays finite; parts of an infinity
  // would give NaN.
  static constexpr uint32_t kLargestSplit = uint32_t{127 + 59} << 23;
  // The third part of x is at least 2^-23 x, subnormal where x is under 2^-103, and what is flushed
  // of a product is at most 2^-126: 2^-30 of the smallest that is let through.
  static constexpr int kLeastExponent = -100, kLeastProductExponent = -96;
  // From this depth on stretches of K are summed apart (kAddsApart). At K = 8192 the largest error
  // of 2048 sums of numbers in [0, 1) was 21.9 roundings of sum |a b| without and is 6.0 with it;
  // in f32 registers it is 5.8 (test_gemm_split).
  static constexpr int64_t kDeep = 1024;

  // Whether products of these operands on tiles keep the precision of f32.
  static bool can_split(const Magnitudes& a, const Magnitudes& b) {
    if (a.largest >= kLargestSplit || b.largest >= kLargestSplit) return false;
    if (a.largest == 0 || b.largest == 0) return true;
    const int of_a = exponent_of(a.smallest), of_b = exponent_of(b.smallest);
    return of_a >= kLeastExponent && of_b >= kLeastExponent && of_a + of_b >= kLeastProductExponent;
  }
  static int exponent_of(uint32_t magnitude) { return static_cast<int>(magnitude >> 23) - 127; }

  static TS_HD int64_t padded_depth(int64_t depth) {
    return kParts * ((depth + kTileDepth - 1) / kTileDepth * kTileDepth);
  }
  static TS_HD void begin() { Tiles::begin(); }
  static TS_HD void end() { Tiles::end(); }

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
  struct Extremes {  // lane by lane; less 1, so that zero is no small number
    __m512i largest = _mm512_setzero_si512(), smallest = _mm512_set1_epi32(-1);
    TS_HD void add(__m512 x) {
      const __m512i magnitude =
          _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
      largest = _mm512_max_epu32(largest, magnitude);
      smallest = _mm512_min_epu32(smallest, _mm512_sub_epi32(magnitude, _mm512_set1_epi32(1)));
    }
    TS_HD Magnitudes all() const {
      alignas(64) uint32_t large[16], small[16];
      _mm512_store_si512(large, largest);
      _mm512_store_si512(small, smallest);
      Magnitudes result;
      for (int i = 0; i < 16; ++i) {
        result.largest = large[i] > result.largest ? large[i] : result.largest;
        const uint32_t own = small[i] == 0xffffffffu ? Magnitudes::kNoneSmall : small[i] + 1;
        result.smallest = own < result.smallest ? own : result.smallest;
      }
      return result;
    }
  };

  // Tiles of 16 lanes x 32 k, 2 kTile apart. kPairsFirst as in AmxKernel.
  template <bool kPairsFirst, class Source>
  static TS_HD void pack_tile(const Source* source, int64_t lane_stride, int64_t k_stride,
                              int64_t lanes, int64_t depth, bf16* tile, Extremes& extremes) {
    alignas(64) Source gathered[16][32];
    bool pairs_first = false;
    if (k_stride != 1 && lane_stride == 1) {
      const __mmask16 mask = first_lanes(lanes);
      for (int p = 0; p < 16; ++p) {
        const __m512 low = load_lanes(p < depth ? mask : __mmask16(0), source + p * k_stride);
        const __m512 high =
            load_lanes(p + 16 < depth ? mask : __mmask16(0), source + (p + 16) * k_stride);
        extremes.add(low);
        extremes.add(high);
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
        extremes.add(low);
        extremes.add(high);
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

  // All panels of `lanes` rows of A (kPairsFirst = false) or columns of B. Returns what
  // they hold.
  template <bool kPairsFirst, class Source>
  static Magnitudes pack(const Source* source, int64_t lane_stride, int64_t k_stride, int64_t lanes,
                         int64_t depth, bf16* panels) {
    Extremes extremes;
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
                                 lanes - lane, depth - k, tiles + half * kTile, extremes);
        }
      }
    }
    return extremes.all();
  }

  // One panel of numbers that are known to be split without loss.
  static void pack_a(const float* source, int64_t row_stride, int64_t k_stride, int64_t rows,
                     int64_t depth, Value* panel) {
    pack<false>(source, row_stride, k_stride, rows, depth, panel);
  }
  static void pack_b(const float* source, int64_t k_stride, int64_t column_stride, int64_t columns,
                     int64_t depth, Value* panel) {
    pack<true>(source, column_stride, k_stride, columns, depth, panel);
  }

  // c: (kRows, kColumns) with row stride ldc; set, or added to where accumulate.
  static TS_HD void multiply(int64_t depth, const Value* a, const Value* b, Accumulator* c,
                             int64_t ldc, bool accumulate) {
    if (!kAddsApart || !accumulate) return multiply_tiles(depth, a, b, c, ldc, accumulate);
    alignas(64) Accumulator sums[kRows * kColumns];
    multiply_tiles(depth, a, b, sums, kColumns, false);
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kColumns; j += 16) {
        float* const target = c + i * ldc + j;
        _mm512_storeu_ps(target, _mm512_add_ps(_mm512_loadu_ps(target),
                                               _mm512_load_ps(sums + i * kColumns + j)));
      }
    }
  }

 private:
  // Tiles 0 to 3 hold c, 4 and 5 a part of A, 6 and 7 one of B.
  static TS_HD void multiply_tiles(int64_t depth, const Value* a, const Value* b, Accumulator* c,
                                   int64_t ldc, bool accumulate) {
    constexpr int kHalf = 64;             // bytes of 16 f32
    constexpr int kPart = 2 * 2 * kTile;  // bytes of two tiles
    const int64_t stride = ldc * 4, row = 64;
    float* const lower = c + 16 * ldc;
    if (accumulate) {
      Tiles::template load<0>(c, stride);
      Tiles::template load<1, kHalf>(c, stride);
      Tiles::template load<2>(lower, stride);
      Tiles::template load<3, kHalf>(lower, stride);
    } else {
      Tiles::template clear<0>();
      Tiles::template clear<1>();
      Tiles::template clear<2>();
      Tiles::template clear<3>();
    }
    for (int64_t k = 0; k < depth; k += kParts * kTileDepth) {
      load_b<2 * kPart>(b, row);
      load_a<0>(a, row);
      multiply_parts();
      load_b<0>(b, row);
      multiply_parts();
      load_b<kPart>(b, row);
      multiply_parts();
      load_a<kPart>(a, row);
      multiply_parts();
      load_b<0>(b, row);
      multiply_parts();
      load_a<2 * kPart>(a, row);
      multiply_parts();
      a += 2 * kParts * kTile;
      b += 2 * kParts * kTile;
    }
    Tiles::template store<0>(c, stride);
    Tiles::template store<1, kHalf>(c, stride);
    Tiles::template store<2>(lower, stride);
    Tiles::template store<3, kHalf>(lower, stride);
  }
  template <int kOffset>
  static TS_HD void load_a(const Value* a, int64_t row) {
    Tiles::template load<4, kOffset>(a, row);
    Tiles::template load<5, kOffset + 2 * kTile>(a, row);
  }
  template <int kOffset>
  static TS_HD void load_b(const Value* b, int64_t row) {
    Tiles::template load<6, kOffset>(b, row);
    Tiles::template load<7, kOffset + 2 * kTile>(b, row);
  }
  static TS_HD void multiply_parts() {
    Tiles::template multiply<0, 4, 6>();
    Tiles::template multiply<1, 4, 7>();
    Tiles::template multiply<2, 5, 6>();
    Tiles::template multiply<3, 5, 7>();
  }
};
using SplitAmxKernel = SplitKernel<AmxTiles>;

// f32, or f16 widened, in three parts. A stretch of K that cannot be split goes through f32
// registers instead.
template <class Kernel, class Source>
inline void run_split_stretches(const GemmTile& tile) {
  const auto* a = static_cast<const Source*>(tile.a);
  const auto* b = static_cast<const Source*>(tile.b);
  auto* sums = static_cast<float*>(tile.sums);
  const int64_t blocks = (tile.k + Kernel::kBlockDepth - 1) / Kernel::kBlockDepth;
  const int64_t step = round_up((tile.k + blocks - 1) / blocks, 32);
  auto* packed_a = static_cast<bf16*>(tile.scratch);
  auto* packed_b = packed_a + round_up(tile.m, Kernel::kRows) * Kernel::padded_depth(step);
  Kernel::begin();
  for (int64_t k = 0; k < tile.k; k += step) {
    const int64_t depth = tile.k - k < step ? tile.k - k : step;
    const Source* a_block = a + k * tile.a_column_stride;
    const Source* b_block = b + k * tile.b_row_stride;
    const bool accumulate = tile.accumulate || k > 0;
    const Magnitudes of_a = Kernel::template pack<false>(
        a_block, tile.a_row_stride, tile.a_column_stride, tile.m, depth, packed_a);
    const Magnitudes of_b = Kernel::template pack<true>(b_block, tile.b_column_stride,
                                                        tile.b_row_stride, tile.n, depth, packed_b);
    if (Kernel::can_split(of_a, of_b)) {
      multiply_panels<Kernel>(tile.m, tile.n, depth, packed_a, packed_b, sums, tile.sums_row_stride,
                              accumulate);
      continue;
    }
    GemmTile block = tile;
    block.k = depth;
    block.a = a_block;
    block.b = b_block;
    block.accumulate = accumulate;
    run_tile<FmaKernel<float>, Source>(block);
  }
  Kernel::end();
}

template <class Tiles, class Source>
inline void run_split_tile(const GemmTile& tile) {
  if (tile.k < SplitKernel<Tiles>::kDeep) {
    run_split_stretches<SplitKernel<Tiles, false>, Source>(tile);
  } else {
    run_split_stretches<SplitKernel<Tiles, true>, Source>(tile);
  }
}

#endif

}  // namespace
}  // namespace tessera::kernels::TS_SIMD
