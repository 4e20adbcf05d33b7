#include <tessera/core/kernels/common/lanes.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum_blocks.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum_limbs.h>

namespace tessera::kernels::TS_SIMD {
namespace {

using namespace square_sum;

// Registers of one level, which hide the latency of an addition in each other's shadow.
constexpr int kPacks = kPackBytes == 64 ? 8 : 4;
constexpr int kSize = PackOf<double>::kSize;
constexpr int kStep = kPacks * kSize;  // elements that they receive at once

// Elements between two additions to the limbs, which stay in L1 from one pass to the next. Few of
// a narrow type: the fewer there are, the less often do their magnitudes ask for a second level
// (bf16 of a normal distribution: 13% faster than with 4096).
template <class T>
constexpr int64_t kRun = sizeof(T) == 2 ? 1024 : 8192 / sizeof(T);
// Runs are read twice, and the second time from L1: the prefetcher of the processor loses its
// stream. With this distance, in bytes, a pass over f32 in memory takes 0.11 ns an element instead
// of 0.16 (v4).
constexpr int64_t kPrefetch = 16384;
template <class T>
constexpr int kLogAdds = __builtin_ctzll(static_cast<unsigned long long>(kRun<T> / kStep));
static_assert(kStep << kLogAdds<float> == kRun<float>);

template <class T>
using BitsOf = typename Magnitude<T>::Bits;
template <class T>
constexpr BitsOf<T> kMagnitudeMask = static_cast<BitsOf<T>>(~BitsOf<T>{0}) >> 1;

template <class T>
TS_HD BitsOf<T> magnitude(T x) {
  return __builtin_bit_cast(BitsOf<T>, x) & kMagnitudeMask<T>;
}

template <class T>
using BitPack = Pack<BitsOf<T>>;
template <class T>
constexpr int kBits = PackOf<BitsOf<T>>::kSize;
static_assert(kStep % kBits<bf16> == 0);

constexpr int kNoBase = 1 << 20;

// Magnitudes as bits, 0 and ~0 where all are zero.
template <class T>
struct Range {
  BitsOf<T> largest, least_but_zero;
};

template <class T>
TS_HD BitPack<T> load_bits(const T* x) {
  return *reinterpret_cast<const typename UnalignedOf<BitsOf<T>, kPackBytes>::type*>(x);
}
template <class T>
TS_HD BitPack<T> load_magnitudes(const T* x) {
  return load_bits(x) & kMagnitudeMask<T>;
}
template <class T>
TS_HD void store_magnitudes(T* x, BitPack<T> bits) {
  *reinterpret_cast<typename UnalignedOf<BitsOf<T>, kPackBytes>::type*>(x) = bits;
}

// n is a multiple of kStep. Of f64 the high words decide, as v3 has no largest of 64-bit integers:
// both numbers are then rounded down, and what is less than 2^-1042 counts as zero, which its
// square is.
template <class T>
TS_HD Range<T> range_of(const T* x, int64_t n) {
  constexpr bool kWords = sizeof(T) == 8;
  using Element = std::conditional_t<kWords, uint32_t, BitsOf<T>>;
  using Values = Pack<Element>;
  constexpr int kShift = kWords ? 32 : 0;
  Values mask{};
  for (int l = 0; l < PackOf<Element>::kSize; ++l) {
    if (!kWords || l % 2 == 1) mask[l] = static_cast<Element>(kMagnitudeMask<T> >> kShift);
  }
  Values largest{}, least = ~Values{};
  for (int64_t i = 0; i < n; i += kStep) {
#pragma GCC unroll 8
    for (int k = 0; k < kStep; k += kBits<T>) {
      const Values bits = reinterpret_cast<Values>(load_bits(x + i + k)) & mask;
      largest = bits > largest ? bits : largest;
      const Values but_zero = bits - 1;  // zero becomes the most that there is
      least = but_zero < least ? but_zero : least;
    }
  }
  Element most = 0, fewest = static_cast<Element>(~Element{0});
  for (int l = 0; l < PackOf<Element>::kSize; ++l) {
    if (largest[l] > most) most = largest[l];
    if (least[l] < fewest) fewest = least[l];
  }
  if (most == 0) return {0, static_cast<BitsOf<T>>(~BitsOf<T>{0})};
  return {static_cast<BitsOf<T>>(BitsOf<T>{most} << kShift),
          static_cast<BitsOf<T>>((BitsOf<T>{fewest} + 1) << kShift)};
}

// sum + v * v in `next`, and what rounding took away from it.
template <class T, bool kRest>
TS_HD Pack<double> add_square(Pack<double> v, Pack<double>& sum) {
  const Pack<double> before = sum;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) < sizeof(double)) {
    const auto w = reinterpret_cast<__m512d>(v);
    sum = reinterpret_cast<Pack<double>>(_mm512_fmadd_pd(w, w, reinterpret_cast<__m512d>(before)));
    if constexpr (!kRest) return Pack<double>{};
    return reinterpret_cast<Pack<double>>(
        _mm512_fmsub_pd(w, w, reinterpret_cast<__m512d>(sum - before)));
  }
#elif defined(__FMA__)
  if constexpr (sizeof(T) < sizeof(double)) {
    const auto w = reinterpret_cast<__m256d>(v);
    sum = reinterpret_cast<Pack<double>>(_mm256_fmadd_pd(w, w, reinterpret_cast<__m256d>(before)));
    if constexpr (!kRest) return Pack<double>{};
    return reinterpret_cast<Pack<double>>(
        _mm256_fmsub_pd(w, w, reinterpret_cast<__m256d>(sum - before)));
  }
#endif
  const Pack<double> square = v * v;  // exact, or rounded by itself
  sum = before + square;
  return square - (sum - before);
}

// A register of 16-bit elements as four packs, in any order. Of bf16 as words of two: a mask and a
// shift for all of them.
template <class T>
TS_HD void widen(BitPack<T> bits, Pack<double>* values) {
#if defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, f16>) {  // four at a time: 256 bits cost Zen 1 twice as much
    const __m128i halves[2] = {_mm256_castsi256_si128(reinterpret_cast<__m256i>(bits)),
                               _mm256_extracti128_si256(reinterpret_cast<__m256i>(bits), 1)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m128i half = halves[i / 2];
      const __m128i four = i % 2 == 0 ? half : _mm_unpackhi_epi64(half, half);
      values[i] = reinterpret_cast<Pack<double>>(_mm256_cvtps_pd(_mm_cvtph_ps(four)));
    }
    return;
  }
#endif
  typedef float Floats __attribute__((vector_size(kPackBytes)));
  Floats floats[2];
  if constexpr (std::is_same_v<T, bf16>) {
    const auto words = reinterpret_cast<Pack<uint32_t>>(bits);
    floats[0] = reinterpret_cast<Floats>(words & 0xffff0000u);
    floats[1] = reinterpret_cast<Floats>(words << 16);
  } else {
#if defined(__AVX512F__)
    const auto all = reinterpret_cast<__m512i>(bits);
    floats[0] = reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm512_castsi512_si256(all)));
    floats[1] = reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(all, 1)));
#else
    for (int l = 0; l < kBits<T>; ++l) {
      floats[l / (2 * kSize)][l % (2 * kSize)] = to_float(__builtin_bit_cast(T, uint16_t{bits[l]}));
    }
#endif
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#if defined(__AVX512F__)
    const auto all = reinterpret_cast<__m512d>(floats[i]);
    const __m256d low = _mm512_castpd512_pd256(all), high = _mm512_extractf64x4_pd(all, 1);
    values[2 * i] = reinterpret_cast<Pack<double>>(_mm512_cvtps_pd(_mm256_castpd_ps(low)));
    values[2 * i + 1] = reinterpret_cast<Pack<double>>(_mm512_cvtps_pd(_mm256_castpd_ps(high)));
#elif defined(__AVX2__)
    const auto all = reinterpret_cast<__m256>(floats[i]);
    const __m128 low = _mm256_castps256_ps128(all), high = _mm256_extractf128_ps(all, 1);
    values[2 * i] = reinterpret_cast<Pack<double>>(_mm256_cvtps_pd(low));
    values[2 * i + 1] = reinterpret_cast<Pack<double>>(_mm256_cvtps_pd(high));
#else
    for (int l = 0; l < 2 * kSize; ++l) values[2 * i + l / kSize][l % kSize] = floats[i][l];
#endif
  }
}

// Elements x[0, kStep) as packs, in any order.
template <class T>
TS_HD void load_step(const T* x, Pack<double> (&values)[kPacks]) {
  if constexpr (kIsHalf<T>) {
#pragma GCC unroll 2
    for (int k = 0; k < kPacks; k += 4) widen<T>(load_bits(x + k * kSize), values + k);
    return;
  }
#pragma GCC unroll 16
  for (int k = 0; k < kPacks; ++k) values[k] = load_pack<double>(x + k * kSize);
}

TS_HD int64_t units_of(const Pack<double> (&sums)[kPacks], double anchor) {
  using Integers = Pack<int64_t>;
  Integers total{};
#pragma GCC unroll 16
  for (int k = 0; k < kPacks; ++k) {
    total += reinterpret_cast<Integers>(sums[k]) - __builtin_bit_cast(int64_t, anchor);
  }
  int64_t units = 0;
#pragma GCC unroll 16
  for (int l = 0; l < kSize; ++l) units += total[l];
  return units;
}

// Squares of a run whose magnitudes fit into kLevels; n <= kRun<T> is a multiple of kStep.
// `source`: where in memory the run began.
template <class T, int kLevels>
TS_HD void add_levels(const T* x, int64_t n, int base, const T* source, int64_t* sum) {
  Pack<double> sums[kLevels][kPacks];
  double anchors[kLevels];
#pragma GCC unroll 4
  for (int level = 0; level < kLevels; ++level) {
    anchors[level] = anchor_of(unit_of(base, kLogAdds<T>, level), level);
#pragma GCC unroll 16
    for (int k = 0; k < kPacks; ++k) sums[level][k] = Pack<double>{} + anchors[level];
  }
  for (int64_t i = 0; i < n; i += kStep) {
    for (int byte = 0; byte < kStep * static_cast<int>(sizeof(T)); byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(source + i) + kPrefetch + byte);
    }
    Pack<double> values[kPacks];
    load_step(x + i, values);
#pragma GCC unroll 16
    for (int k = 0; k < kPacks; ++k) {
      Pack<double> rest = add_square<T, (kLevels > 1)>(values[k], sums[0][k]);
#pragma GCC unroll 4
      for (int level = 1; level < kLevels; ++level) {
        const Pack<double> before = sums[level][k];
        sums[level][k] = before + rest;
        if (level + 1 < kLevels) rest -= sums[level][k] - before;
      }
    }
  }
#pragma GCC unroll 4
  for (int level = 0; level < kLevels; ++level) {
    add_integer(sum, units_of(sums[level], anchors[level]), unit_of(base, kLogAdds<T>, level));
  }
}

// keep[i] = x[i] where its magnitude is in [from, to), else 0. The two may be one array.
template <class T>
TS_HD void keep_between(const T* x, int64_t n, BitsOf<T> from, BitsOf<T> to, T* keep) {
  for (int64_t i = 0; i < n; i += kBits<T>) {
    const BitPack<T> bits = load_magnitudes(x + i);
    store_magnitudes(keep + i, bits >= from ? bits < to ? bits : 0 : 0);
  }
}

TS_HD bool any_of(auto mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) !=
         0;
#elif defined(__AVX2__)
  return _mm256_testz_si256(reinterpret_cast<__m256i>(mask), reinterpret_cast<__m256i>(mask)) == 0;
#else
  for (size_t l = 0; l < sizeof(mask) / sizeof(mask[0]); ++l) {
    if (mask[l] != 0) return true;
  }
  return false;
#endif
}

// Groups of a run that hold something below a limit; their small elements go one by one.
struct FewGroups {
  static constexpr int64_t kGroup = 128;  // elements; a test for each register costs bf16 a tenth
  static constexpr int kMost = 8;
  int64_t begins[kMost];
  int count = 0;

  // False where there are too many.
  TS_HD bool push(int64_t begin) {
    if (count == kMost) return false;
    begins[count++] = begin;
    return true;
  }
  template <class T>
  TS_HD void add_squares_below(const T* x, BitsOf<T> limit, int64_t* sum) const {
    for (int f = 0; f < count; ++f) {
      for (int64_t i = begins[f]; i < begins[f] + kGroup; i += kBits<T>) {
        // Zero becomes the most that there is.
        if (!any_of(load_magnitudes(x + i) - 1 < static_cast<BitsOf<T>>(limit - 1))) continue;
        for (int64_t k = i; k < i + kBits<T>; ++k) {
          if (magnitude(x[k]) >= limit) continue;
          const double value = convert_one<double>(x[k]);
          add_number(sum, value * value);
        }
      }
    }
  }
};

// Squares of a run of 16-bit elements in one pass, where one level of `base` fits all of it but a
// few that are too small. Else false, and nothing has been added. n is a multiple of a group.
// kAnySmall: whether a T can be too small; of f16 none is where all are below 1/2.
template <class T, bool kAnySmall>
TS_HD bool add_one_level(const T* x, int64_t n, int base, int64_t* sum) {
  using Of = Magnitude<T>;
  using Values = BitPack<T>;
  typedef int16_t Signed __attribute__((vector_size(kPackBytes)));  // which is what v3 compares
  const int unit = unit_of(base, kLogAdds<T>, 0);
  const auto from = static_cast<int16_t>(Of::least_above(unit));
  const auto to = static_cast<int16_t>(Of::least_beyond(base));
  const double anchor = anchor_of(unit, 0);
  Pack<double> sums[kPacks];
#pragma GCC unroll 16
  for (int k = 0; k < kPacks; ++k) sums[k] = Pack<double>{} + anchor;
  FewGroups few;
  Signed largest{};
  for (int64_t group = 0; group < n; group += FewGroups::kGroup) {
    Values small{};
    for (int64_t i = group; i < group + FewGroups::kGroup; i += kStep) {
      Pack<double> values[kPacks];
#pragma GCC unroll 2
      for (int k = 0; k < kPacks; k += 4) {
        const Values bits = load_magnitudes(x + i + k * kSize);
        const auto compared = reinterpret_cast<Signed>(bits);
        const auto below = reinterpret_cast<Values>(compared < from);
        largest = compared > largest ? compared : largest;
        if constexpr (kAnySmall) small |= bits & below;
        widen<T>(kAnySmall ? bits & ~below : bits, values + k);
      }
#pragma GCC unroll 16
      for (int k = 0; k < kPacks; ++k) add_square<T, false>(values[k], sums[k]);
    }
    if (any_of(small) && !few.push(group)) return false;
  }
  if (any_of(largest >= to)) return false;
  few.add_squares_below(x, static_cast<BitsOf<T>>(from), sum);
  add_integer(sum, units_of(sums, anchor), unit);
  return true;
}
template <class T>
TS_HD bool add_guessed(const T* x, int64_t n, int base, int64_t* sum) {
  if (Magnitude<T>::least_above(unit_of(base, kLogAdds<T>, 0)) == 0) {
    return add_one_level<T, false>(x, n, base, sum);
  }
  return add_one_level<T, true>(x, n, base, sum);
}

// `used`: the base of its level, or kNoBase where one did not do.
template <class T>
TS_HD void add_run(const T* x, int64_t n, int64_t* sum, int& used) {
  using Of = Magnitude<T>;
  T rest[kRun<T>], above[kRun<T>];
  const T* const source = x;
  constexpr int64_t kWhole = kIsHalf<T> ? FewGroups::kGroup : kStep;
  if (n % kWhole != 0) {
    for (int64_t i = 0; i < n; ++i) rest[i] = x[i];
    for (; n % kWhole != 0; ++n) rest[n] = __builtin_bit_cast(T, BitsOf<T>{0});
    x = rest;
  }
  Range<T> range = range_of(x, n);
  if (range.largest >= Of::kOutlier) {
    for (int64_t i = 0; i < n; ++i) {
      if (magnitude(x[i]) < Of::kOutlier) continue;
      const double value = convert_one<double>(x[i]);
      add_number(sum, value * value);
    }
    keep_between(x, n, 0, Of::kOutlier, rest);
    x = rest;
    range = range_of(x, n);
  }
  used = kNoBase;
  while (range.largest != 0) {
    const int base = Of::base(range.largest, kLogAdds<T>);
    const auto least_of = [&](int levels) TS_LANES {
      return static_cast<BitsOf<T>>(Of::least_above(unit_of(base, kLogAdds<T>, levels - 1)));
    };
    const auto fits = [&](int levels) TS_LANES { return range.least_but_zero >= least_of(levels); };
    if constexpr (kIsHalf<T>) {
      used = base;
      if (add_guessed(x, n, base, sum)) return;
      used = kNoBase;
    }
    if (fits(2)) return add_levels<T, 2>(x, n, base, source, sum);
    if (fits(3)) return add_levels<T, 3>(x, n, base, source, sum);
    keep_between(x, n, least_of(kMaxLevels), Of::kOutlier, above);
    add_levels<T, kMaxLevels>(above, n, base, source, sum);
    keep_between(x, n, 0, least_of(kMaxLevels), rest);
    x = rest;
    range = range_of(x, n);
  }
}

}  // namespace

void square_sum_block(DType dtype, const void* data, int64_t n, int64_t* sum) {
  visit_floating(dtype, [&]<class T>() {
    const T* x = static_cast<const T*>(data);
    int base = kNoBase;
    for (int64_t begin = 0; begin < n; begin += kRun<T>) {
      const int64_t run = n - begin < kRun<T> ? n - begin : kRun<T>;
      if constexpr (kIsHalf<T>) {  // neighbours are alike
        if (base != kNoBase && run == kRun<T> && add_guessed(x + begin, run, base, sum)) continue;
      }
      add_run(x + begin, run, sum, base);
    }
  });
}

}  // namespace tessera::kernels::TS_SIMD
