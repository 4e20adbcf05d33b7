#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/random/random_fill.h>
#include <tessera/core/kernels/random/random_numbers.h>
#include <tessera/core/math.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tessera::kernels::TS_SIMD {
namespace {

// Philox keeps each 32-bit word in a 64-bit lane whose upper half is garbage: the multiplication
// reads lower halves only, so a round is two products, two shifts and four xors. g++ turns the
// scalar form into full 64-bit products (4x slower), hence the intrinsic.
#if defined(__AVX512F__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef uint64_t Lanes __attribute__((vector_size(8 * kLanes)));

TS_HD Lanes multiply_lower_halves(Lanes a, Lanes b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Lanes>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Lanes>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// kLanes blocks: 4 * kLanes numbers.
TS_HD void philox_lanes(uint32_t* bits, RandomStream stream, uint64_t first) {
  constexpr uint64_t kLow = 0xffffffffu;
  Lanes block;
  for (int i = 0; i < kLanes; ++i) block[i] = first + static_cast<uint64_t>(i);
  Lanes c0 = block & kLow, c1 = block >> 32;
  Lanes c2 = (Lanes{} | (stream.stream & kLow)), c3 = (Lanes{} | (stream.stream >> 32));
  uint32_t k0 = static_cast<uint32_t>(stream.seed), k1 = static_cast<uint32_t>(stream.seed >> 32);
  const Lanes m0 = Lanes{} | uint64_t{0xD2511F53u}, m1 = Lanes{} | uint64_t{0xCD9E8D57u};
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Lanes p0 = multiply_lower_halves(c0, m0), p1 = multiply_lower_halves(c2, m1);
    c0 = (p1 >> 32) ^ c1 ^ uint64_t { k0 };
    c2 = (p0 >> 32) ^ c3 ^ uint64_t { k1 };
    c1 = p1;
    c3 = p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const Lanes front = (c0 & kLow) | (c1 << 32), back = (c2 & kLow) | (c3 << 32);
#if defined(__AVX512F__)
  const Lanes first_half = __builtin_shufflevector(front, back, 0, 8, 1, 9, 2, 10, 3, 11);
  const Lanes second_half = __builtin_shufflevector(front, back, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  const Lanes first_half = __builtin_shufflevector(front, back, 0, 4, 1, 5);
  const Lanes second_half = __builtin_shufflevector(front, back, 2, 6, 3, 7);
#endif
  __builtin_memcpy(bits, &first_half, sizeof(Lanes));
  __builtin_memcpy(bits + 2 * kLanes, &second_half, sizeof(Lanes));
}

// The bits of a chunk stay in the first-level cache between the two passes over them.
constexpr int64_t kChunk = 1024;

template <class T>
constexpr int kWords = sizeof(T) == 8 ? 2 : 1;  // numbers that an element takes

TS_HD uint64_t word64(const uint32_t* bits, int64_t i) {
  return (uint64_t{bits[2 * i]} << 32) | bits[2 * i + 1];
}

template <class T>
void uniform_chunk(const uint32_t* TS_RESTRICT bits, T* TS_RESTRICT x, int64_t n, double low,
                   double high) {
  const float from = static_cast<float>(low), to = static_cast<float>(high);
  if (low == 0 && high == 1) {
    for (int64_t i = 0; i < n; ++i) x[i] = store<T>(unit<T>(bits[i]));
  } else {
    for (int64_t i = 0; i < n; ++i) x[i] = uniform_between<T>(unit<T>(bits[i]), from, to);
  }
}

template <class T>
void normal_chunk(const uint32_t* TS_RESTRICT bits, T* TS_RESTRICT x, int64_t n, double mean,
                  double std) {
  const float m = static_cast<float>(mean), s = static_cast<float>(std);
  float z[kChunk];
  for (int64_t i = 0; i < (n + 1) / 2; ++i) {
    box_muller(bits[2 * i], bits[2 * i + 1], z[2 * i], z[2 * i + 1]);
  }
  for (int64_t i = 0; i < n; ++i) x[i] = store<T>(m + s * z[i]);
}

void uniform_chunk(const uint32_t* TS_RESTRICT bits, double* TS_RESTRICT x, int64_t n, double low,
                   double high) {
  for (int64_t i = 0; i < n; ++i) {
    x[i] = uniform_between<double>(unit64(word64(bits, i)), low, high);
  }
}

void normal_chunk(const uint32_t* TS_RESTRICT bits, double* TS_RESTRICT x, int64_t n, double mean,
                  double std) {
  for (int64_t i = 0; i < n; i += 2) {
    const double u = unit64(word64(bits, i)) + 0x1p-54;
    const double radius = ::sqrt(-2.0 * ::log(u));
    const double angle = 6.283185307179586477 * unit64(word64(bits, i + 1));
    x[i] = mean + std * (radius * ::cos(angle));
    if (i + 1 < n) x[i + 1] = mean + std * (radius * ::sin(angle));
  }
}

template <class T>
void dropout_chunk(const uint32_t* TS_RESTRICT bits, const T* TS_RESTRICT x, T* TS_RESTRICT y,
                   int64_t n, uint32_t dropped, Compute<T> scale) {
  for (int64_t i = 0; i < n; ++i) {
    const Compute<T> value = load<Compute<T>>(x[i]) * scale;
    y[i] = store<T>(bits[i] >= dropped ? value : Compute<T>(0));
  }
}

// Calls f(bits, element, elements) for chunks of [begin, end); `words` numbers an element.
template <int words, class F>
TS_HD void for_each_chunk(int64_t begin, int64_t end, RandomStream stream, int64_t first, F&& f) {
  alignas(64) uint32_t bits[kChunk * words];
  for (int64_t i = begin; i < end; i += kChunk) {
    const int64_t n = end - i < kChunk ? end - i : kChunk;
    philox_range(bits, stream, static_cast<uint64_t>(i + first) * words / 4, (n * words + 3) / 4);
    f(bits, i, n);
  }
}

}  // namespace

void philox_range(uint32_t* bits, RandomStream stream, uint64_t first, int64_t count) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {  // two in flight hide the products' latency
    philox_lanes(bits + 4 * i, stream, first + static_cast<uint64_t>(i));
    philox_lanes(bits + 4 * (i + kLanes), stream, first + static_cast<uint64_t>(i + kLanes));
  }
  for (; i < count; i += kLanes) {
    alignas(64) uint32_t last[4 * kLanes];
    philox_lanes(last, stream, first + static_cast<uint64_t>(i));
    const int64_t blocks = count - i < kLanes ? count - i : kLanes;
    for (int64_t j = 0; j < 4 * blocks; ++j) bits[4 * i + j] = last[j];
  }
}

template <class T>
void uniform_range(T* x, int64_t begin, int64_t end, RandomStream stream, int64_t first, double low,
                   double high) {
  for_each_chunk<kWords<T>>(begin, end, stream, first,
                            [&](const uint32_t* bits, int64_t i, int64_t n) {
                              uniform_chunk(bits, x + i, n, low, high);
                            });
}

template <class T>
void normal_range(T* x, int64_t begin, int64_t end, RandomStream stream, int64_t first, double mean,
                  double std) {
  for_each_chunk<kWords<T>>(
      begin, end, stream, first,
      [&](const uint32_t* bits, int64_t i, int64_t n) { normal_chunk(bits, x + i, n, mean, std); });
}

template <class T>
void dropout_range(const T* x, T* y, int64_t begin, int64_t end, RandomStream stream, int64_t first,
                   double p) {
  const uint32_t dropped = dropout_threshold(p);
  const auto scale = static_cast<Compute<T>>(1.0 / (1.0 - p));
  alignas(64) uint32_t bits[kChunk + 4];
  for (int64_t i = begin; i < end; i += kChunk) {
    const int64_t n = end - i < kChunk ? end - i : kChunk;
    const int64_t before = (i + first) % 4;  // of a block's four
    philox_range(bits, stream, static_cast<uint64_t>(i + first) / 4, (before + n + 3) / 4);
    dropout_chunk(bits + before, x + i, y + i, n, dropped, scale);
  }
}

#define TS_INSTANTIATE(T)                                                                   \
  template void uniform_range(T*, int64_t, int64_t, RandomStream, int64_t, double, double); \
  template void normal_range(T*, int64_t, int64_t, RandomStream, int64_t, double, double);  \
  template void dropout_range(const T*, T*, int64_t, int64_t, RandomStream, int64_t, double);
TS_INSTANTIATE(double)
TS_INSTANTIATE(float)
TS_INSTANTIATE(f16)
TS_INSTANTIATE(bf16)
#undef TS_INSTANTIATE

}  // namespace tessera::kernels::TS_SIMD
