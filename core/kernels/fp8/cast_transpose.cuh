// A matrix times a scale, narrowed, by rows and by columns, in one read: the kernel under
// cast_transpose() and quantize() of GPUs.
//
// What is narrowed may be a function of the matrix (CastForm), rounded to the matrix's dtype first,
// as if it had been stored. Sums of columns come beside: of each row of blocks, in a fixed order.
//
// A thread takes as many rows as 16 bytes of the result hold numbers (16 of fp8; half as many where
// formulas need the registers), and 8 columns at a time, of fp8 twice. It writes rows as they come
// (8 bytes), transposes them in registers, and writes columns (16 bytes, or 8): no shared memory is
// needed. A warp is 4 such patches wide and 8 high, so that it reads and writes whole sectors: 64
// bytes of a row of 16 bits, 32 of one of fp8, 128 (64) of a column.
#pragma once

#include <tessera/core/approximate.h>
#include <tessera/core/cuda/launch.h>
#include <tessera/core/functors.h>
#include <tessera/core/half.h>
#include <tessera/core/kernels/fp8/rules.h>

namespace tessera::kernels {

// See logits_gradient.h.
struct SoftmaxRows {
  const int64_t* targets;   // (M)
  const float* statistics;  // (M, 2)
  const float* gradient;    // one number each
  const double* divisor;
  int64_t ignore_index;
};

template <class T, class Q>
struct CastJob {
  const T* x;               // (M, N)
  const T* second;          // (M, N), of forms of two numbers
  DType through;            // f32 is rounded to this first; kF32: it is not
  const float* factor;      // x is multiplied by it before that, or null for 1
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
  float* sums;                 // (blocks along M, N) or null
  SoftmaxRows softmax;         // of SoftmaxGrad
  int64_t M, N;
  bool vectors;  // rows of all matrices begin at multiples of 16 bytes, patches are whole
};

namespace cast {

// ---- Forms --------------------------------------------------------------------------------------

struct Plain {
  static constexpr int kOperands = 1;
};
template <class Functor, int kCount>
struct Formula {
  static constexpr int kOperands = kCount;
};
// Of logits.
struct SoftmaxGrad {
  static constexpr int kOperands = 1;
};
using Gelu = Formula<fn::Gelu, 1>;
using GeluTanh = Formula<fn::GeluTanh, 1>;
using GeluGrad = Formula<fn::GeluGrad, 2>;  // of (gradient, input)
using GeluTanhGrad = Formula<fn::GeluTanhGrad, 2>;

// What happens to a number before it is quantised; `factor`: of Plain alone, `share`: of SoftmaxGrad.
struct Before {
  DType through;
  float factor;
  double share = 0;
};

template <class T>
TS_DEVICE float number_of(Plain, T x, T, const Before& before) {
  float value = load<float>(x);
  if (before.factor != 1) value = load<float>(store<T>(value * before.factor));
  const DType through = before.through;
  if constexpr (std::is_same_v<T, float>) {
    if (through == kBF16) return to_float(from_float<bf16>(value));
    if (through == kF16) return to_float(from_float<f16>(value));
  }
  return value;
}
template <class T, class Functor>
TS_DEVICE float number_of(Formula<Functor, 1>, T x, T, const Before&) {
  const math::Approximate y = Functor{}(math::Approximate(load<float>(x)));
  return load<float>(store<T>(y.value));
}
template <class T, class Functor>
TS_DEVICE float number_of(Formula<Functor, 2>, T x, T second, const Before&) {
  const math::Approximate y =
      Functor{}(math::Approximate(load<float>(x)), math::Approximate(load<float>(second)));
  return load<float>(store<T>(y.value));
}

template <int kN, class Form, class T>
TS_DEVICE void load_numbers(const T* x, const T* second, const Before& before,
                            float (&values)[kN]) {
  const gpu::Vector<T, kN> first = gpu::load_vector<kN>(x);
  gpu::Vector<T, kN> other = first;
  if constexpr (Form::kOperands == 2) other = gpu::load_vector<kN>(second);
  TS_UNROLL
  for (int j = 0; j < kN; ++j) {
    values[j] = number_of(Form{}, first.values[j], other.values[j], before);
  }
}

// As backward_kernel of cross_entropy.cu calculates it, to the bit.
struct SoftmaxRow {
  float of_exponential, of_target, largest;
  int64_t target;
  bool ignored;
};
// The share that a row has in the loss; a thread divides once, as that takes longer than a row.
TS_DEVICE double softmax_share(const SoftmaxRows& rows) {
  return static_cast<double>(*rows.gradient) * (1 / *rows.divisor);
}
TS_DEVICE SoftmaxRow softmax_row(const SoftmaxRows& rows, int64_t m, double share) {
  const int64_t target = rows.targets[m];
  return {static_cast<float>(share * static_cast<double>(rows.statistics[2 * m + 1])),
          static_cast<float>(share), rows.statistics[2 * m], target, target == rows.ignore_index};
}
template <class T>
TS_DEVICE float softmax_number(const SoftmaxRow& row, T x, int64_t n) {
  const float exponential = math::exp(math::Approximate(load<float>(x) - row.largest)).value;
  float value = row.of_exponential * exponential;
  if (n == row.target) value = value - row.of_target;
  return load<float>(store<T>(row.ignored ? 0.0f : value));
}
template <int kN, class T>
TS_DEVICE void load_softmax(const T* x, const SoftmaxRow& row, int64_t n, float (&values)[kN]) {
  const gpu::Vector<T, kN> in = gpu::load_vector<kN>(x);
  TS_UNROLL
  for (int j = 0; j < kN; ++j) values[j] = softmax_number(row, in.values[j], n + j);
}

// ---- Patches ------------------------------------------------------------------------------------

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

// A patch, of kRows rows with kW words each, as its columns: `to` is the first number of the first,
// the next one begins `pitch` numbers on.
template <class Q, int kRows, int kW>
TS_DEVICE void store_columns(const uint32_t (&words)[kRows][kW], Q* to, int64_t pitch) {
  constexpr int kPer = kInWord<Q>, kGroups = kRows / kPer;
  TS_UNROLL
  for (int w = 0; w < kW; ++w) {
    uint32_t columns[kGroups][kPer];  // (four rows or two, column)
    TS_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      TS_UNROLL
      for (int i = 0; i < kPer; ++i) columns[g][i] = words[g * kPer + i][w];
      transpose_words<Q>(columns[g]);
    }
    TS_UNROLL
    for (int j = 0; j < kPer; ++j) {
      gpu::Vector<uint32_t, kGroups> column;
      TS_UNROLL
      for (int g = 0; g < kGroups; ++g) column.values[g] = columns[g][j];
      gpu::store_vector(reinterpret_cast<uint32_t*>(to + (w * kPer + j) * pitch), column);
    }
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

template <class Q>
inline constexpr int kWords = sizeof(Q) == 1 ? 2 : 4;  // of a row that are under way at a time
// Rows of a patch: formulas and sums need the registers of the other half.
template <class Q, class Form, bool kSums>
inline constexpr int kHeight = kSums || !std::is_same_v<Form, Plain> ? kSide<Q> / 2 : kSide<Q>;

// Blocks of a multiprocessor. Logits' exponentials wait for loads, which more warps hide; the others
// want registers.
template <class Form>
inline constexpr int kBlocks = std::is_same_v<Form, SoftmaxGrad> ? 5 : 4;

// sums: shared memory for those of the columns.
template <class Form, bool kSums, class T, class Q>
TS_DEVICE void whole_columns(const CastJob<T, Q>& job, int64_t m, int64_t n, float factor,
                             const Before& before, Seen& seen, float* sums) {
  constexpr int kRows = kHeight<Q, Form, kSums>, kPer = kInWord<Q>;
  constexpr int kW = kWords<Q>, kN = kW * kPer;
  uint32_t words[kRows][kW];
  float added[kN] = {};
  TS_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int64_t at = (m + i) * job.N + n;
    float scaled[kN];
    if constexpr (std::is_same_v<Form, SoftmaxGrad>) {
      load_softmax<kN>(job.x + at, softmax_row(job.softmax, m + i, before.share), n, scaled);
    } else {
      load_numbers<kN, Form>(job.x + at, Form::kOperands == 2 ? job.second + at : job.x, before,
                             scaled);
    }
    TS_UNROLL
    for (int j = 0; j < kN; ++j) {
      const float value = scaled[j];
      if constexpr (kSums) added[j] += value;
      scaled[j] = rules::scaled<Q>(value, factor);
      seen.template number<Q>(value, scaled[j]);
    }
    gpu::Vector<uint32_t, kW> row;
    TS_UNROLL
    for (int w = 0; w < kW; ++w) row.values[w] = words[i][w] = pack_word<Q>(scaled + w * kPer);
    if (job.values != nullptr) {
      gpu::store_vector(reinterpret_cast<uint32_t*>(job.values + at), row);
    }
  }
  if constexpr (kSums) {
    TS_UNROLL
    for (int j = 0; j < kN; ++j) sums[j] = added[j];
  }
  if (job.transposed != nullptr) store_columns<Q>(words, job.transposed + n * job.M + m, job.M);
}

// Columns that a thread takes at a time, and those that lie between its first ones and the next.
template <class Q>
inline constexpr int kPart = kWords<Q>* kInWord<Q>;
template <class Q>
inline constexpr int kStep = kAcross* kPart<Q>;

// What lies inside of the matrix, number by number.
template <class Form, bool kSums, class T, class Q>
TS_DEVICE void cut_patch(const CastJob<T, Q>& job, int64_t m0, int64_t n0, float factor,
                         const Before& before, Seen& seen, float* sums) {
  constexpr int kRows = kHeight<Q, Form, kSums>;
  const int64_t rows = job.M - m0 < kRows ? job.M - m0 : kRows;
  const int64_t columns = job.N - n0 < kSide<Q> ? job.N - n0 : kSide<Q>;
  for (int64_t j = 0; j < columns; ++j) {
    float sum = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t m = m0 + i, n = n0 + j;
      const T x = job.x[m * job.N + n];
      const T second = Form::kOperands == 2 ? job.second[m * job.N + n] : x;
      float value;
      if constexpr (std::is_same_v<Form, SoftmaxGrad>) {
        value = softmax_number(softmax_row(job.softmax, m, before.share), x, n);
      } else {
        value = number_of(Form{}, x, second, before);
      }
      const float scaled = rules::scaled<Q>(value, factor);
      sum += value;
      seen.template number<Q>(value, scaled);
      const Q narrow = from_float_saturate<Q>(scaled);
      if (job.values != nullptr) job.values[m * job.N + n] = narrow;
      if (job.transposed != nullptr) job.transposed[n * job.M + m] = narrow;
    }
    if constexpr (kSums) sums[j] = sum;
  }
}

// What the block's threads saw is added to what the job notes. `slot`: shared memory for 32 values.
template <class T, class Q>
TS_DEVICE void note(const CastJob<T, Q>& job, const Seen& seen, uint32_t* slot) {
  if (job.amax != nullptr) {
    uint32_t largest = gpu::block_reduce(seen.largest, LargerBits{}, 0u, slot);
    if (job.no_nan && largest > rules::kInfinityBits) largest = rules::kInfinityBits;
    if (threadIdx.x == 0 && largest > 0) atomicMax(job.amax, largest);
  }
  if (job.counts != nullptr) {
    const uint32_t saturated = gpu::block_reduce(seen.saturated, gpu::Plus{}, 0u, slot);
    const uint32_t underflown = gpu::block_reduce(seen.underflown, gpu::Plus{}, 0u, slot);
    if (threadIdx.x == 0 && saturated > 0) atomicAdd(job.counts, uint64_t{saturated});
    if (threadIdx.x == 0 && underflown > 0) atomicAdd(job.counts + 1, uint64_t{underflown});
  }
}

}  // namespace cast

template <class T, class Q, class Form = cast::Plain, bool kSums = false>
__global__ void __launch_bounds__(cast::kThreads, cast::kBlocks<Form>)
    cast_transpose_kernel(CastJob<T, Q> job) {
  constexpr int kN = cast::kSide<Q>, kColumns = cast::kAcross * kN;
  TS_SHARED(uint32_t, slot, gpu::kWarp);
  TS_SHARED(float, partial, kSums ? cast::kDown* kColumns : 1);  // (down, column of the block)
  const int thread = static_cast<int>(threadIdx.x), lane = thread % gpu::kWarp;
  const int warp = thread / gpu::kWarp;
  const int across = lane % 4 + 4 * (warp % 2), down = lane / 4 + 8 * (warp / 2);
  const int64_t m = (int64_t{blockIdx.y} * cast::kDown + down) * cast::kHeight<Q, Form, kSums>;
  const float factor = cast::scale_of(job);
  cast::Before before{job.through, job.factor != nullptr ? *job.factor : 1.0f};
  if constexpr (std::is_same_v<Form, cast::SoftmaxGrad>) {
    before.share = cast::softmax_share(job.softmax);
  }
  cast::Seen seen;
  if (job.vectors) {
    const int column = across * cast::kPart<Q>;
    const int64_t n = int64_t{blockIdx.x} * kColumns + column;
    float* const sums = partial + (kSums ? down * kColumns + column : 0);
    if (kSums) {
      for (int step = 0; step < kColumns; step += cast::kStep<Q>) {
        for (int j = 0; j < cast::kPart<Q>; ++j) sums[step + j] = 0;
      }
    }
    TS_ROLLED
    for (int step = 0; step < kColumns; step += cast::kStep<Q>) {
      if (m >= job.M || n + step >= job.N) break;
      cast::whole_columns<Form, kSums>(job, m, n + step, factor, before, seen, sums + step);
    }
  } else {
    const int64_t n = (int64_t{blockIdx.x} * cast::kAcross + across) * kN;
    float* const sums = partial + (kSums ? down * kColumns + across * kN : 0);
    if (kSums) {
      for (int j = 0; j < kN; ++j) sums[j] = 0;
    }
    if (m < job.M && n < job.N) {
      cast::cut_patch<Form, kSums>(job, m, n, factor, before, seen, sums);
    }
  }
  if constexpr (kSums) {
    __syncthreads();
    for (int column = thread; column < kColumns; column += cast::kThreads) {
      const int64_t to = int64_t{blockIdx.x} * kColumns + column;
      float sum = 0;
      for (int i = 0; i < cast::kDown; ++i) sum += partial[i * kColumns + column];
      if (to < job.N) job.sums[int64_t{blockIdx.y} * job.N + to] = sum;
    }
  }
  if (thread == 0 && blockIdx.x == 0 && blockIdx.y == 0 && job.inverse != nullptr) {
    *job.scale_used = factor;
    *job.inverse = 1 / factor;
  }
  cast::note(job, seen, slot);
}

}  // namespace tessera::kernels
