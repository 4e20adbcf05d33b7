// Products of few rows, whose time is the reading of the matrix: it is read once, where it lies,
// by registers that serve all rows. Included by *_simd.cpp files only.
//
//   dot_rows     columns of B lie in one piece (the weights of a linear layer): dot products, four
//                columns of some rows at a time
//   spread_rows  rows of B lie in one piece: some of them, times their elements of A, onto the sums
//
// An element's bits depend on k and the layout alone, not on the rows and columns beside it.
#pragma once

#include <tessera/core/kernels/common/lanes.h>
#include <tessera/core/kernels/gemm/gemm_block.h>

namespace tessera::kernels::TS_SIMD {
namespace {

// ---- Registers
// ------------------------------------------------------------------------------------

// A register of T's, widened.
TS_HD Vec<float> load_wide(const float* x) { return Vec<float>::load(x); }
TS_HD Vec<double> load_wide(const double* x) { return Vec<double>::load(x); }
#if defined(__AVX512F__)
template <class T>
TS_HD Vec<float> load_wide(const T* x) {
  return {_mm512_castsi512_ps(load_16_as_f32(x))};
}
#elif defined(__AVX2__)
template <class T>
TS_HD Vec<float> load_wide(const T* x) {
  return {load_8_as_f32(x)};
}
#elif defined(__aarch64__)
template <class T>
TS_HD Vec<float> load_wide(const T* x) {
  return {load_4_as_f32(x), load_4_as_f32(x + 4)};
}
#else
template <class T>
TS_HD Vec<float> load_wide(const T* x) {
  float wide[Vec<float>::kWidth];
  for (int i = 0; i < Vec<float>::kWidth; ++i) wide[i] = load<float>(x[i]);
  return Vec<float>::load(wide);
}
#endif

// Keeps the compiler from loading a value anew for each use.
#if defined(__AVX512F__)
TS_HD void keep_in_register(__m512i& x) { __asm__("" : "+v"(x)); }
#endif
template <class C>
TS_HD void keep_in_register(Vec<C>& x) {
#if defined(__AVX2__)
  __asm__("" : "+v"(x.v));
#else
  static_cast<void>(x);
#endif
}

// Its first `count` lanes; the others are zero.
template <class C, class T>
TS_HD Vec<C> load_wide(const T* x, int64_t count) {
  alignas(64) T part[Vec<C>::kWidth] = {};
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (sizeof(T) == 4) {
    return {_mm512_maskz_loadu_ps(mask, x)};
  } else if constexpr (sizeof(T) == 2) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(part), _mm256_maskz_loadu_epi16(mask, x));
    return load_wide(part);
  } else if constexpr (sizeof(T) == 1) {
    _mm_store_si128(reinterpret_cast<__m128i*>(part), _mm_maskz_loadu_epi8(mask, x));
    return load_wide(part);
  }
#endif
  for (int64_t i = 0; i < count; ++i) part[i] = x[i];
  return load_wide(part);
}

// sums[j] = the sum of v[j]'s lanes, of four.
template <class C>
TS_HD void add_lanes(const Vec<C>* v, C* sums) {
  constexpr int kWidth = Vec<C>::kWidth;
  for (int j = 0; j < 4; ++j) {
    C lanes[kWidth];
    v[j].store(lanes);
    for (int width = kWidth / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    sums[j] = lanes[0];
  }
}
#if defined(__AVX2__)
TS_HD __m128 add_quarters(__m256 x) {
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
TS_HD void add_lanes(const Vec<float>* v, float* sums) {
#if defined(__AVX512F__)
  const __m512 v01 =
      _mm512_add_ps(_mm512_unpacklo_ps(v[0].v, v[1].v), _mm512_unpackhi_ps(v[0].v, v[1].v));
  const __m512 v23 =
      _mm512_add_ps(_mm512_unpacklo_ps(v[2].v, v[3].v), _mm512_unpackhi_ps(v[2].v, v[3].v));
  const __m512d w01 = _mm512_castps_pd(v01), w23 = _mm512_castps_pd(v23);
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(w01, w23)),
                                   _mm512_castpd_ps(_mm512_unpackhi_pd(w01, w23)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(sums, add_quarters(half));
#else
  const __m256 v01 = _mm256_hadd_ps(v[0].v, v[1].v), v23 = _mm256_hadd_ps(v[2].v, v[3].v);
  _mm_storeu_ps(sums, add_quarters(_mm256_hadd_ps(v01, v23)));
#endif
}
#endif

// ---- How two registers are multiplied
// -------------------------------------------------------------

// B is widened as it is read; A is wide.
template <class C, class T>
struct WideProducts {
  using Left = C;
  using Right = T;
  using Sum = C;
  using Register = Vec<C>;
  static constexpr int kDepth = Vec<C>::kWidth;  // K of a register of a dot product
  static constexpr int kSpread = 1;              // K of a register of columns

  static TS_HD Vec<C> add(Vec<C> sum, Register a, Register b) { return Vec<C>::fma(a, b, sum); }

  template <class Value>
  static TS_HD Register along(const Value* x) {
    return load_wide(x);
  }
  template <class Value>
  static TS_HD Register along(const Value* x, int64_t count) {
    return load_wide<C>(x, count);
  }
  static TS_HD Register across(const T* b, int64_t, int64_t, int64_t columns) {
    return columns >= Vec<C>::kWidth ? load_wide(b) : load_wide<C>(b, columns < 0 ? 0 : columns);
  }
  static TS_HD Register everywhere(const C* a, int64_t) { return Vec<C>::broadcast(*a); }
};

#if defined(TESSERA_DOT_KERNEL)
// bf16 two of K at a time (gemm_dot.h).
struct PairProducts {
  using Left = bf16;
  using Right = bf16;
  using Sum = float;
  using Register = __m512i;
  using Pairs = Bf16Pairs<true>;
  static constexpr int kDepth = 32;
  static constexpr int kSpread = 2;

  static TS_HD Vec<float> add(Vec<float> sum, Register a, Register b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum.v) : "v"(a), "v"(b));
    return sum;
  }

  // Rounds a multiple of 32 sums.
  static TS_HD void narrow(const float* sums, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; i += 32) {
      _mm512_storeu_si512(to + i, Pairs::load_32(sums + i, 32));
    }
  }

  static TS_HD Register along(const bf16* x) { return _mm512_loadu_si512(x); }
  static TS_HD Register along(const bf16* x, int64_t count) { return Pairs::load_32(x, count); }
  static TS_HD Register across(const bf16* b, int64_t row_stride, int64_t depth, int64_t columns) {
    return Pairs::interleave(b, depth > 1 ? b + row_stride : nullptr, columns);
  }
  static TS_HD Register everywhere(const bf16* a, int64_t depth) {
    const uint32_t low = a[0].bits, high = depth > 1 ? a[1].bits : 0u;
    return _mm512_set1_epi32(static_cast<int>(low | high << 16));
  }
};
#endif

// ---- Columns in one piece
// -------------------------------------------------------------------------

// Rows whose sums with four columns fill the registers, and those with two, which meet a matrix that
// comes from memory once: 8 rows of bf16 times 384 to 50257 take 2.2 ms so, in two groups 5.2 (Zen 4).
#if defined(__AVX512F__)
constexpr int kDotRows = 6, kMostDotRows = 8;
#else
constexpr int kDotRows = 3, kMostDotRows = 3;
#endif
// Columns that meet a stretch of K of all rows while it is in L2.
constexpr int64_t kDotColumns = 64;
// What is asked of memory before it is needed, by steps of all rows: the processor follows one
// stream a page by itself, and here are four. 50257 columns of 384 bf16 times 8 rows take 1.0 ms
// with 9 KiB, 1.8 ms with 3 (Zen 5).
constexpr int64_t kBytesAhead = 8192;
// Bytes of a matrix above which it is taken to lie in memory.
constexpr int64_t kMostCached = 32 << 20;

// What tiles ask of memory, in bytes: a line at `at` and at each `stride` behind it for its columns
// with each line of a column that one reads, `step` further with the next, and `tile` further for
// the next tile.
struct Ahead {
  const char* at;
  int64_t stride, step, tile;
};

// K between two lines that are asked for: a line's, unless rows leave no registers for that.
template <class P, int kRows>
constexpr int64_t kDotStep =
    (kDotRows > 3 || kRows == 1) && int64_t{64 / sizeof(typename P::Right)} > P::kDepth
        ? int64_t{64 / sizeof(typename P::Right)}
        : P::kDepth;

// `count` tiles of kRows x kColumns sums, one beside the other. Sums of each `piece` of K are added.
template <class P, int kRows, int kColumns>
__attribute__((noinline)) void dot_tiles(int64_t count, int64_t k, int64_t piece,
                                         const typename P::Left* a, int64_t a_stride,
                                         const typename P::Right* b, int64_t b_stride,
                                         const Ahead& ahead, typename P::Sum* sums,
                                         int64_t sums_stride, bool accumulate) {
  using Sum = typename P::Sum;
  using Register = typename P::Register;
  constexpr int64_t kStep = kDotStep<P, kRows>;
  constexpr int kSumRows = kColumns == 2 ? (kRows + 1) / 2 * 2 : kRows;
  constexpr int kSumColumns = kColumns == 2 ? 2 : 4;
  const char* asked = ahead.at;
  for (int64_t tile = 0; tile < count; ++tile) {
    const char* next = asked;
    for (int64_t i = 0; i < k;) {
      const int64_t first = i, last = k - first < piece ? k : first + piece;
      Vec<Sum> sum[kSumRows][kSumColumns];
#pragma GCC unroll 8
      for (int r = 0; r < kSumRows; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < kSumColumns; ++j) sum[r][j] = Vec<Sum>::zero();
      }
      const auto add = [&](int64_t at) TS_LANES {
        Register left[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          left[r] = P::along(a + r * a_stride + at);
          if (kColumns == 2) keep_in_register(left[r]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; ++j) {
          Register right = P::along(b + j * b_stride + at);
          if (kRows > 1 && kDotRows > 3) keep_in_register(right);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sum[r][j] = P::add(sum[r][j], left[r], right);
        }
      };
      for (; i + kStep <= last; i += kStep) {
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; ++j) __builtin_prefetch(next + j * ahead.stride);
        next += ahead.step;
#pragma GCC unroll 4
        for (int64_t part = 0; part < kStep; part += P::kDepth) add(i + part);
      }
      for (; i + P::kDepth <= last; i += P::kDepth) add(i);
      if (i < last) {
        Register left[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) left[r] = P::along(a + r * a_stride + i, last - i);
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; ++j) {
          const Register right = P::along(b + j * b_stride + i, last - i);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sum[r][j] = P::add(sum[r][j], left[r], right);
        }
        i = last;
      }
      constexpr int kRowsOfFour = 4 / kSumColumns;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r += kRowsOfFour) {
        Sum four[4];
        add_lanes(sum[r], four);
        for (int q = 0; q < kRowsOfFour && r + q < kRows; ++q) {
          Sum* const target = sums + (r + q) * sums_stride;
          for (int j = 0; j < kColumns; ++j) {
            const Sum fresh = four[q * kSumColumns + j];
            target[j] = accumulate || first > 0 ? target[j] + fresh : fresh;
          }
        }
      }
    }
    b += kColumns * b_stride;
    sums += kColumns;
    asked += ahead.tile;
  }
}

// dot_tiles of kLeast to kRows rows.
template <class P, int kColumns, int kRows, int kLeast = 1, class... Arguments>
TS_HD void dot_tiles_of(int64_t rows, Arguments... arguments) {
  if (kRows == kLeast || rows == kRows) return dot_tiles<P, kRows, kColumns>(arguments...);
  if constexpr (kRows > kLeast) dot_tiles_of<P, kColumns, kRows - 1, kLeast>(rows, arguments...);
}

// sums (m, n) = a (m, k) b; b's columns are b_stride apart.
template <class P>
void dot_rows(int64_t m, int64_t n, int64_t k, const typename P::Left* a, int64_t a_stride,
              const typename P::Right* b, int64_t b_stride, typename P::Sum* sums,
              int64_t sums_stride) {
  constexpr int64_t kSize = sizeof(*b);
  // Four columns of this depth and the rows beside them stay in L1.
  constexpr int64_t kMostDepth = 2048 / sizeof(typename P::Left);
  constexpr int64_t kMostWhole = 16384 / sizeof(typename P::Left);
  constexpr int64_t kRunBytes = 16384;
  const int64_t step = (m == 1 ? kDotStep<P, 1> : kDotStep<P, 2>)*kSize;
  const int64_t piece = k < kMostDepth ? k : kMostDepth;
  // More of the rows would leave L1 to columns and what is asked for: 8 rows of f32 times 768 to 50257
  // take 13.9 ms in two groups, 16.8 in one (Zen 4).
  constexpr int64_t kMostRowBytes = 12288;
  const int64_t row_bytes = piece * static_cast<int64_t>(sizeof(*a));
  const int64_t most_rows = kMostDotRows * row_bytes <= kMostRowBytes ? kMostDotRows : kDotRows;
  const int64_t groups = (m + most_rows - 1) / most_rows;
  // Columns meet all pieces of the rows one after the other if these are near: a matrix that no
  // cache holds is then read from its beginning to its end.
  const int64_t deep = m * k <= kMostWhole ? k : piece;
  const int64_t stretch = deep == k ? n : kDotColumns;
  // Columns that stay in L1 while all groups of rows meet them.
  const int64_t fit = kRunBytes / (deep * kSize) / 4 * 4;
  const int64_t run = groups == 1 ? stretch : fit > 4 ? fit : 4;
  const int64_t four_bytes = 4 * deep * kSize;
  const int64_t ahead_columns = 4 * ((kBytesAhead + four_bytes - 1) / four_bytes);
  for (int64_t first = 0; first < n; first += stretch) {
    const int64_t last = first + stretch < n ? first + stretch : n;
    for (int64_t at = 0; at < k; at += deep) {
      const int64_t depth = k - at < deep ? k - at : deep;
      for (int64_t j = first; j < last; j += run) {
        const int64_t columns = j + run < last ? run : last - j;
        const auto* const right = b + j * b_stride + at;
        for (int64_t group = 0; group < groups; ++group) {
          const int64_t row = m * group / groups, rows = m * (group + 1) / groups - row;
          const auto* const left = a + row * a_stride + at;
          typename P::Sum* const target = sums + row * sums_stride + j;
          const int64_t width = rows > kDotRows ? 2 : 4;
          // Each group asks for its share.
          Ahead ahead{reinterpret_cast<const char*>(right + ahead_columns * b_stride) +
                          depth * kSize * group / groups,
                      b_stride * kSize, step / groups, width * b_stride * kSize};
          if (b_stride == k && deep == k) {  // one line after the other
            ahead.stride = 64;
            ahead.step = width * step / groups;
            if (groups > 1) {
              const int64_t bytes = columns * k * kSize;
              ahead.at = reinterpret_cast<const char*>(right) + bytes + bytes * group / groups;
              ahead.tile = width * k * kSize / groups;
            }
          }
          const int64_t tiles = columns / width, rest = columns % width;
          if (tiles > 0 && width == 2) {
            if constexpr (kMostDotRows > kDotRows) {
              dot_tiles_of<P, 2, kMostDotRows, kDotRows + 1>(rows, tiles, depth, piece, left,
                                                             a_stride, right, b_stride, ahead,
                                                             target, sums_stride, at > 0);
            }
          } else if (tiles > 0) {
            dot_tiles_of<P, 4, kDotRows>(rows, tiles, depth, piece, left, a_stride, right, b_stride,
                                         ahead, target, sums_stride, at > 0);
          }
          if (rest > 0) {
            ahead.tile = b_stride * kSize;
            dot_tiles_of<P, 1, kMostDotRows>(rows, rest, depth, piece, left, a_stride,
                                             right + width * tiles * b_stride, b_stride, ahead,
                                             target + width * tiles, sums_stride, at > 0);
          }
        }
      }
    }
  }
}

// ---- Rows in one piece
// ----------------------------------------------------------------------------

// kSteps registers of K; the last one has `depth` of it. Whole pairs of registers of sums are
// written.
template <class P, int kSteps>
__attribute__((noinline)) void spread_tile(int64_t m, int64_t n, const typename P::Left* a,
                                           int64_t a_stride, const typename P::Right* b,
                                           int64_t b_stride, int64_t depth, int64_t ahead,
                                           typename P::Sum* sums, int64_t sums_stride,
                                           bool accumulate) {
  using V = Vec<typename P::Sum>;
  for (int64_t j = 0; j < n; j += 2 * V::kWidth) {
    typename P::Register right[kSteps][2];
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; ++s) {
      const auto* rows = b + s * P::kSpread * b_stride + j;
      const int64_t row_count = kSteps > 1 ? P::kSpread : depth;
      right[s][0] = P::across(rows, b_stride, row_count, n - j);
      right[s][1] = P::across(rows + V::kWidth, b_stride, row_count, n - j - V::kWidth);
      for (int q = 0; q < P::kSpread; ++q) {
        __builtin_prefetch(rows + (ahead + q) * b_stride);
        if (sizeof(*b) * V::kWidth > 32) {
          __builtin_prefetch(rows + (ahead + q) * b_stride + V::kWidth);
        }
      }
    }
    for (int64_t i = 0; i < m; ++i) {
      typename P::Sum* const target = sums + i * sums_stride + j;
      V low = accumulate ? V::load(target) : V::zero();
      V high = accumulate ? V::load(target + V::kWidth) : V::zero();
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {
        const auto left =
            P::everywhere(a + i * a_stride + s * P::kSpread, kSteps > 1 ? P::kSpread : depth);
        low = P::add(low, left, right[s][0]);
        high = P::add(high, left, right[s][1]);
      }
      low.store(target);
      high.store(target + V::kWidth);
    }
  }
}

// kRows x kVectors registers of sums, which stay there over all of K.
template <class P, int kRows, int kVectors>
__attribute__((noinline)) void block_tile(int64_t k, const typename P::Left* a, int64_t a_stride,
                                          const typename P::Right* b, int64_t b_stride,
                                          int64_t ahead, typename P::Sum* sums,
                                          int64_t sums_stride) {
  using V = Vec<typename P::Sum>;
  using Register = typename P::Register;
  constexpr int kOfLine = 64 / static_cast<int>(V::kWidth * sizeof(*b));  // registers
  V sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) sum[r][j] = V::zero();
  }
  const auto add = [&](int64_t i, int64_t depth) TS_LANES {
    const auto* const row = b + i * b_stride;
    Register left[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) left[r] = P::everywhere(a + r * a_stride + i, depth);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      if (kOfLine <= 1 || j % kOfLine == 0) {
#pragma GCC unroll 2
        for (int q = 0; q < P::kSpread; ++q) {
          __builtin_prefetch(row + (ahead + q) * b_stride + j * V::kWidth);
        }
      }
      Register right = P::across(row + j * V::kWidth, b_stride, depth, V::kWidth);
      if (kRows > 1) keep_in_register(right);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r][j] = P::add(sum[r][j], left[r], right);
    }
  };
  int64_t i = 0;
  for (; i + P::kSpread <= k; i += P::kSpread) add(i, P::kSpread);
  if (i < k) add(i, k - i);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) sum[r][j].store(sums + r * sums_stride + j * V::kWidth);
  }
}

// The first columns of spread_rows, of few rows; gives their number.
template <class P, int kRows = kDotRows>
int64_t multiply_blocks(int64_t m, int64_t n, int64_t k, const typename P::Left* a,
                        int64_t a_stride, const typename P::Right* b, int64_t b_stride,
                        typename P::Sum* sums, int64_t sums_stride) {
  if constexpr (kRows > 1) {
    if (m < kRows) {
      return multiply_blocks<P, kRows - 1>(m, n, k, a, a_stride, b, b_stride, sums, sums_stride);
    }
  }
  constexpr int kVectors = 2 * kRows <= kDotRows ? 8 : 4;  // they fill the registers
  constexpr int64_t kWidth = Vec<typename P::Sum>::kWidth;
  const auto ahead_of = [](int64_t columns) {
    const int64_t bytes = columns * static_cast<int64_t>(sizeof(*b));
    return (kBytesAhead / bytes + P::kSpread - 1) / P::kSpread * P::kSpread;
  };
  int64_t j = 0;
  for (; j + kVectors * kWidth <= n; j += kVectors * kWidth) {
    block_tile<P, kRows, kVectors>(k, a, a_stride, b + j, b_stride, ahead_of(kVectors * kWidth),
                                   sums + j, sums_stride);
  }
  if constexpr (kVectors == 8) {
    for (; j + 4 * kWidth <= n; j += 4 * kWidth) {
      block_tile<P, kRows, 4>(k, a, a_stride, b + j, b_stride, ahead_of(4 * kWidth), sums + j,
                              sums_stride);
    }
  }
  return j;
}

// sums (m, n) = a (m, k) b; b's rows are b_stride apart. What lies between n and the next
// multiple of 32 is overwritten.
template <class P>
void spread_rows(int64_t m, int64_t n, int64_t k, const typename P::Left* a, int64_t a_stride,
                 const typename P::Right* b, int64_t b_stride, typename P::Sum* sums,
                 int64_t sums_stride) {
  constexpr int kSteps = 4;
  constexpr int64_t kDepth = kSteps * P::kSpread;
  const int64_t bytes = k * b_stride * static_cast<int64_t>(sizeof(*b));
  // Blocks of a larger matrix would touch all of its pages several times; with one row they are
  // slower from L3 on, too: 384 x 1536 f32 takes 35 us for 31 (Zen 4).
  constexpr int64_t kOneBlock = 128, kMost = 8 << 20,
                    kMostOfOneRow = kDotRows > 3 ? 1 << 20 : kMost;
  int64_t j = 0;
  if (m <= kDotRows && (bytes <= (m > 1 ? kMost : kMostOfOneRow) || n <= kOneBlock)) {
    j = multiply_blocks<P>(m, n, k, a, a_stride, b, b_stride, sums, sums_stride);
  }
  // Of memory whole pages are read: one row of f32 times 4096 x 4096 takes 3.6 ms for 4.9 (Zen 4).
  const int64_t most_columns = m <= 8 && bytes <= kMostCached ? 512 : 4096 / m / 32 * 32;
  for (; j < n; j += most_columns) {
    const int64_t columns = n - j < most_columns ? n - j : most_columns;
    const int64_t step_bytes = kDepth * columns * static_cast<int64_t>(sizeof(*b));
    const int64_t ahead = kDepth * ((kBytesAhead + step_bytes - 1) / step_bytes);
    int64_t i = 0;
    for (; i + kDepth <= k; i += kDepth) {
      spread_tile<P, kSteps>(m, columns, a + i, a_stride, b + i * b_stride + j, b_stride, kDepth,
                             ahead, sums + j, sums_stride, i > 0);
    }
    for (; i < k; i += P::kSpread) {
      spread_tile<P, 1>(m, columns, a + i, a_stride, b + i * b_stride + j, b_stride, k - i, ahead,
                        sums + j, sums_stride, i > 0);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels::TS_SIMD
