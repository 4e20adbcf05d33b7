// A matrix times a scale, narrowed, by rows and by columns, in one read: the kernel under
// cast_transpose() and quantize() of GPUs.
//
// A thread takes a patch as high and as wide as 16 bytes of the result hold numbers (16 x 16 of
// float8). It writes the patch's rows as they come, transposes the patch in registers, and writes
// its columns: all accesses are of 16 bytes, no shared memory is needed. A warp is 4 patches wide
// and 8 high, so that it reads 128 bytes of a row of 16-bit numbers, and writes 64 of a row and 128
// of a column of float8.
#pragma once

#include <tessera/core/cuda/launch.h>
#include <tessera/core/half.h>
#include <tessera/core/kernels/fp8/rules.h>

namespace tessera::kernels {

template <class T, class Q>
struct CastJob {
  const T* x;               // (M, N)
  const float* scale;       // one number; null: of `largest`, or 1
  const uint32_t* largest;  // bits of the largest |x|, from which the scale is made, or null
  bool power_of_two;
  Q* values;          // (M, N) or null
  Q* transposed;      // (N, M) or null
  float* scale_used;  // one number each, or null
  float* inverse;
  uint32_t* amax;              // raised to the bits of the largest |x|, or null
  unsigned long long* counts;  // saturated, underflown: added to, or null
  bool no_nan;                 // amax is at most infinite
  int64_t M, N;
  bool vectors;  // rows of all matrices begin at multiples of 16 bytes, patches are whole
};

namespace cast {

inline constexpr int kAcross = 8, kDown = 16;  // patches of a block
inline constexpr int kThreads = kAcross * kDown;
template <class Q>
inline constexpr int kSide = 16 / static_cast<int>(sizeof(Q));
template <class Q>
inline constexpr int kInWord = 4 / static_cast<int>(sizeof(Q));

struct LargerBits {
  TS_DEVICE uint32_t operator()(uint32_t a, uint32_t b) const { return a > b ? a : b; }
};

// Bytes of b, a by number: 0 to 3 are those of a. selector: four digits, the lowest byte's last.
TS_DEVICE uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDACC__)
  return __byte_perm(a, b, selector);
#else
  const uint64_t both = (uint64_t{b} << 32) | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = (selector >> (4 * i)) & 7u;
    result |= static_cast<uint32_t>((both >> (8 * byte)) & 0xffu) << (8 * i);
  }
  return result;
#endif
}

// Words of numbers, a row each, become words of columns.
template <class Q>
TS_DEVICE void transpose_words(uint32_t (&w)[kInWord<Q>]) {
  if constexpr (kInWord<Q> == 4) {
    const uint32_t low01 = bytes_of(w[0], w[1], 0x5140), high01 = bytes_of(w[0], w[1], 0x7362);
    const uint32_t low23 = bytes_of(w[2], w[3], 0x5140), high23 = bytes_of(w[2], w[3], 0x7362);
    w[0] = bytes_of(low01, low23, 0x5410);
    w[1] = bytes_of(low01, low23, 0x7632);
    w[2] = bytes_of(high01, high23, 0x5410);
    w[3] = bytes_of(high01, high23, 0x7632);
  } else {
    const uint32_t first = bytes_of(w[0], w[1], 0x5410);
    w[1] = bytes_of(w[0], w[1], 0x7632);
    w[0] = first;
  }
}

// The GPU's own conversions, two numbers at a time, have the bits of from_float_saturate().
template <class Q>
TS_DEVICE uint32_t pack_word(const float* values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (sizeof(Q) == 1) {
    uint16_t low, high;
    if constexpr (std::is_same_v<Q, f8e4m3>) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(values[1]), "f"(values[0]));
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(values[3]), "f"(values[2]));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(values[1]), "f"(values[0]));
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(values[3]), "f"(values[2]));
    }
    return static_cast<uint32_t>(low) | (static_cast<uint32_t>(high) << 16);
  }
#endif
  uint32_t word = 0;
  TS_UNROLL
  for (int i = 0; i < kInWord<Q>; ++i) {
    const uint32_t bits = from_float_saturate<Q>(values[i]).bits;
    word |= bits << (8 * static_cast<int>(sizeof(Q)) * i);
  }
  return word;
}

struct Seen {
  uint32_t largest = 0, saturated = 0, underflown = 0;
  template <class Q>
  TS_DEVICE void number(float value, float scaled) {
    const uint32_t bits = rules::magnitude_bits(value);
    largest = LargerBits{}(largest, bits);
    if constexpr (sizeof(Q) == 1) {
      saturated += rules::saturates<Q>(scaled);
      // Half of the smallest number is a tie that goes to 0.
      constexpr float kToZero = std::is_same_v<Q, f8e4m3> ? 0x1p-10f : 0x1p-17f;
      underflown += (::fabsf(scaled) <= kToZero) & (bits != 0) ? 1u : 0u;
    }
  }
};

template <class T, class Q>
TS_DEVICE float scale_of(const CastJob<T, Q>& job) {
  if (job.scale != nullptr) return *job.scale;
  if constexpr (sizeof(Q) == 1) {
    if (job.largest != nullptr) {
      return rules::scale_of(tessera::detail::float_of(*job.largest), rules::kLargestOf<Q>,
                             job.power_of_two);
    }
  }
  return 1;
}

template <class T, class Q>
TS_DEVICE void whole_patch(const CastJob<T, Q>& job, int64_t m, int64_t n, float factor,
                           Seen& seen) {
  constexpr int kN = kSide<Q>, kPer = kInWord<Q>;
  uint32_t words[kN][4];
  TS_UNROLL
  for (int i = 0; i < kN; ++i) {
    const gpu::Vector<T, kN> in = gpu::load_vector<kN>(job.x + (m + i) * job.N + n);
    float scaled[kN];
    TS_UNROLL
    for (int j = 0; j < kN; ++j) {
      const float value = load<float>(in.values[j]);
      scaled[j] = value * factor;
      seen.template number<Q>(value, scaled[j]);
    }
    gpu::Vector<uint32_t, 4> row;
    TS_UNROLL
    for (int w = 0; w < 4; ++w) row.values[w] = words[i][w] = pack_word<Q>(scaled + w * kPer);
    if (job.values != nullptr) {
      gpu::store_vector(reinterpret_cast<uint32_t*>(job.values + (m + i) * job.N + n), row);
    }
  }
  if (job.transposed == nullptr) return;
  TS_UNROLL
  for (int w = 0; w < 4; ++w) {
    uint32_t columns[4][kPer];  // (four rows or two, column)
    TS_UNROLL
    for (int g = 0; g < 4; ++g) {
      TS_UNROLL
      for (int i = 0; i < kPer; ++i) columns[g][i] = words[g * kPer + i][w];
      transpose_words<Q>(columns[g]);
    }
    TS_UNROLL
    for (int j = 0; j < kPer; ++j) {
      gpu::Vector<uint32_t, 4> column;
      TS_UNROLL
      for (int g = 0; g < 4; ++g) column.values[g] = columns[g][j];
      Q* const to = job.transposed + (n + w * kPer + j) * job.M + m;
      gpu::store_vector(reinterpret_cast<uint32_t*>(to), column);
    }
  }
}

// What lies inside of the matrix, number by number.
template <class T, class Q>
TS_DEVICE void cut_patch(const CastJob<T, Q>& job, int64_t m0, int64_t n0, float factor,
                         Seen& seen) {
  const int64_t rows = job.M - m0 < kSide<Q> ? job.M - m0 : kSide<Q>;
  const int64_t columns = job.N - n0 < kSide<Q> ? job.N - n0 : kSide<Q>;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t m = m0 + i, n = n0 + j;
      const float value = load<float>(job.x[m * job.N + n]), scaled = value * factor;
      seen.template number<Q>(value, scaled);
      const Q narrow = from_float_saturate<Q>(scaled);
      if (job.values != nullptr) job.values[m * job.N + n] = narrow;
      if (job.transposed != nullptr) job.transposed[n * job.M + m] = narrow;
    }
  }
}

}  // namespace cast

template <class T, class Q>
__global__ void __launch_bounds__(cast::kThreads, 4) cast_transpose_kernel(CastJob<T, Q> job) {
  TS_SHARED(uint32_t, slot, gpu::kWarp);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % gpu::kWarp;
  const int warp = thread / gpu::kWarp;
  const int across = lane % 4 + 4 * (warp % 2), down = lane / 4 + 8 * (warp / 2);
  const int64_t m = (int64_t{blockIdx.y} * cast::kDown + down) * cast::kSide<Q>;
  const int64_t n = (int64_t{blockIdx.x} * cast::kAcross + across) * cast::kSide<Q>;
  const float factor = cast::scale_of(job);
  cast::Seen seen;
  if (m < job.M && n < job.N) {
    if (job.vectors) {
      cast::whole_patch(job, m, n, factor, seen);
    } else {
      cast::cut_patch(job, m, n, factor, seen);
    }
  }
  const bool first = thread == 0;
  if (first && blockIdx.x == 0 && blockIdx.y == 0 && job.inverse != nullptr) {
    *job.scale_used = factor;
    *job.inverse = 1 / factor;
  }
  if (job.amax != nullptr) {
    uint32_t largest = gpu::block_reduce(seen.largest, cast::LargerBits{}, 0u, slot);
    if (job.no_nan && largest > rules::kInfinityBits) largest = rules::kInfinityBits;
    if (first && largest > 0) atomicMax(job.amax, largest);
  }
  if (job.counts != nullptr) {
    const uint32_t saturated = gpu::block_reduce(seen.saturated, gpu::Plus{}, 0u, slot);
    const uint32_t underflown = gpu::block_reduce(seen.underflown, gpu::Plus{}, 0u, slot);
    if (first && saturated > 0) atomicAdd(job.counts, uint64_t{saturated});
    if (first && underflown > 0) atomicAdd(job.counts + 1, uint64_t{underflown});
  }
}

}  // namespace tessera::kernels
