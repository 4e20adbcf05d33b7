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

// Magnitudes as bits, 0 and ~0 where all are zero.
template <class T>
struct Range {
  BitsOf<T> largest, least_but_zero;
};

template <class T>
TS_HD BitPack<T> load_magnitudes(const T* x) {
  return *reinterpret_cast<const typename UnalignedOf<BitsOf<T>, kPackBytes>::type*>(x) &
         kMagnitudeMask<T>;
}
template <class T>
TS_HD void store_magnitudes(T* x, BitPack<T> bits) {
  *reinterpret_cast<typename UnalignedOf<BitsOf<T>, kPackBytes>::type*>(x) = bits;
}

// n is a multiple of kStep.
template <class T>
TS_HD Range<T> range_of(const T* x, int64_t n) {
  using Values = BitPack<T>;
  Values largest{}, least = ~Values{};
  for (int64_t i = 0; i < n; i += kStep) {
#pragma GCC unroll 8
    for (int k = 0; k < kStep; k += kBits<T>) {
      const Values bits = load_magnitudes(x + i + k);
      largest = bits > largest ? bits : largest;
      const Values but_zero = bits - 1;  // zero becomes the most that there is
      least = but_zero < least ? but_zero : least;
    }
  }
  Range<T> range{0, static_cast<BitsOf<T>>(~BitsOf<T>{0})};
  for (int l = 0; l < kBits<T>; ++l) {
    if (largest[l] > range.largest) range.largest = largest[l];
    if (least[l] < range.least_but_zero) range.least_but_zero = least[l];
  }
  if (range.largest != 0) ++range.least_but_zero;
  return range;
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

// Elements x[0, kStep) as packs, in any order.
template <class T>
TS_HD void load_step(const T* x, Pack<double> (&values)[kPacks]) {
#if defined(__AVX2__)
  if constexpr (std::is_same_v<T, bf16>) {  // words of two: a mask and a shift for all of them
    using Words = Pack<uint32_t>;
#pragma GCC unroll 8
    for (int k = 0; k < kPacks; k += 4) {
      const Words words =
          *reinterpret_cast<const typename UnalignedOf<uint32_t, kPackBytes>::type*>(x + k * kSize);
      const Words high = words & 0xffff0000u, low = words << 16;
#if defined(__AVX512F__)
      const auto half = [](Words w, int i) TS_LANES {
        const auto bits = reinterpret_cast<__m512d>(w);
        return reinterpret_cast<Pack<double>>(_mm512_cvtps_pd(_mm256_castpd_ps(
            i == 0 ? _mm512_castpd512_pd256(bits) : _mm512_extractf64x4_pd(bits, 1))));
      };
#else
      const auto half = [](Words w, int i) TS_LANES {
        const auto bits = reinterpret_cast<__m256>(w);
        return reinterpret_cast<Pack<double>>(_mm256_cvtps_pd(
            i == 0 ? _mm256_castps256_ps128(bits) : _mm256_extractf128_ps(bits, 1)));
      };
#endif
      values[k] = half(high, 0);
      values[k + 1] = half(high, 1);
      values[k + 2] = half(low, 0);
      values[k + 3] = half(low, 1);
    }
    return;
  }
#endif
#pragma GCC unroll 16
  for (int k = 0; k < kPacks; ++k) values[k] = load_pack<double>(x + k * kSize);
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
    using Integers = Pack<int64_t>;
    Integers total{};
#pragma GCC unroll 16
    for (int k = 0; k < kPacks; ++k) {
      total +=
          reinterpret_cast<Integers>(sums[level][k]) - __builtin_bit_cast(int64_t, anchors[level]);
    }
    int64_t units = 0;
#pragma GCC unroll 16
    for (int l = 0; l < kSize; ++l) units += total[l];
    add_integer(sum, units, unit_of(base, kLogAdds<T>, level));
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

// A copy of x without those that are below `limit` and not 0, whose squares are added one by one.
// False where there are more than kFew packs with some of them; nothing has been added then.
template <class T>
TS_HD bool take_few_below(const T* x, int64_t n, BitsOf<T> limit, T* keep, int64_t* sum) {
  constexpr int kFew = 2;
  int64_t found[kFew];
  int count = 0;
  for (int64_t i = 0; i < n; i += kBits<T>) {
    const BitPack<T> bits = load_magnitudes(x + i);
    const auto below = bits - 1 < static_cast<BitsOf<T>>(limit - 1);
    store_magnitudes(keep + i, below ? 0 : bits);
    if (!any_of(below)) continue;
    if (count == kFew) return false;
    found[count++] = i;
  }
  for (int f = 0; f < count; ++f) {
    for (int64_t i = found[f]; i < found[f] + kBits<T>; ++i) {
      if (magnitude(x[i]) >= limit) continue;
      const double value = convert_one<double>(x[i]);
      add_number(sum, value * value);
    }
  }
  return true;
}

template <class T>
TS_HD void add_run(const T* x, int64_t n, int64_t* sum) {
  using Of = Magnitude<T>;
  T rest[kRun<T>], above[kRun<T>];
  const T* const source = x;
  if (n % kStep != 0) {
    for (int64_t i = 0; i < n; ++i) rest[i] = x[i];
    for (; n % kStep != 0; ++n) rest[n] = __builtin_bit_cast(T, BitsOf<T>{0});
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
  while (range.largest != 0) {
    const int base = Of::base(range.largest, kLogAdds<T>);
    const auto fits = [&](int levels) TS_LANES {
      return range.least_but_zero >= Of::least_above(unit_of(base, kLogAdds<T>, levels - 1));
    };
    if constexpr (sizeof(T) == 2) {
      if (fits(1)) return add_levels<T, 1>(x, n, base, source, sum);
      // A few that are too small do not cost the others a second level.
      const auto from = static_cast<BitsOf<T>>(Of::least_above(unit_of(base, kLogAdds<T>, 0)));
      if (take_few_below(x, n, from, above, sum)) {
        return add_levels<T, 1>(above, n, base, source, sum);
      }
    }
    if (fits(2)) return add_levels<T, 2>(x, n, base, source, sum);
    if (fits(3)) return add_levels<T, 3>(x, n, base, source, sum);
    const auto from =
        static_cast<BitsOf<T>>(Of::least_above(unit_of(base, kLogAdds<T>, kMaxLevels - 1)));
    keep_between(x, n, from, Of::kOutlier, above);
    add_levels<T, kMaxLevels>(above, n, base, source, sum);
    keep_between(x, n, 0, from, rest);
    x = rest;
    range = range_of(x, n);
  }
}

}  // namespace

void square_sum_block(DType dtype, const void* data, int64_t n, int64_t* sum) {
  visit_floating(dtype, [&]<class T>() {
    const T* x = static_cast<const T*>(data);
    for (int64_t begin = 0; begin < n; begin += kRun<T>) {
      add_run(x + begin, n - begin < kRun<T> ? n - begin : kRun<T>, sum);
    }
  });
}

}  // namespace tessera::kernels::TS_SIMD
