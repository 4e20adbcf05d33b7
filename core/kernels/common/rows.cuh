// Rows for blocks: how the kernels that normalise, reduce and compare walk a tensor of (rows, n).
//
// Short rows stay in the registers of a warp or a block, longer ones in shared memory between the
// walks over them: both are read from memory once. The number of threads depends on n alone, so
// that the order of every sum is a function of the shape and of the rows' alignment. Partial sums
// are joined in a fixed tree in the wide type.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

#include <tessera/core/approximate.h>
#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/math.h>
#include <tessera/core/kernels/common/vector_lanes.cuh>

namespace tessera::kernels {

// f32 statistics are joined in double, as on the CPU.
template <class C>
using Joined = std::conditional_t<std::is_floating_point_v<C>, double, int64_t>;

// Threads for a row of n elements: 4 elements a thread, a whole number of warps.
inline unsigned row_threads(int64_t n) {
  unsigned threads = 32;
  while (threads < 1024 && int64_t{threads} * 4 < n) threads *= 2;
  return threads;
}

// Shared memory that block_reduce needs.
#define TS_REDUCE_SLOT(T, name) TS_SHARED(T, name, ::tessera::gpu::kWarp)

// ---- A row in registers -------------------------------------------------------------------------

// Rows whose vectors are aligned and that kThreads threads hold in their registers, 32 numbers each
// (16 of f64): read and written once.
template <class T, int kThreads = gpu::kWarp, int kWidth = 16 / static_cast<int>(sizeof(T))>
struct InRegisters {
  static constexpr int kNumbers = static_cast<int>(128 / sizeof(Compute<T>));  // of a thread
  static constexpr int kVectors = kNumbers / kWidth;
  static constexpr int64_t kMost = int64_t{kNumbers} * kThreads;

  // Calls f(number of the vector, its first column) for the vectors of the calling thread.
  template <class F>
  static TS_DEVICE void each(int64_t n, const F& f) {
    const int t = static_cast<int>(threadIdx.x) % kThreads;
    TS_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int64_t c = int64_t{v * kThreads + t} * kWidth;
      if (c < n) f(v, c);
    }
  }
};

// Every thread of a row gets op over the row: a warp, or the whole block.
template <int kThreads, class V, class Op>
TS_DEVICE V row_reduce(V value, const Op& op, V neutral, V* slot) {
  if constexpr (kThreads == gpu::kWarp) {
    return gpu::warp_reduce(value, op);
  } else {
    return gpu::block_reduce(value, op, neutral, slot);
  }
}

// ---- A row in shared memory ---------------------------------------------------------------------

// Numbers of a vector where a block of up to 1024 threads calculates a row. f64 goes one by one:
// its exp, or the steps of a norm, and two numbers at once do not fit into the registers.
template <class T>
inline constexpr int kRowVector = sizeof(T) == 8 ? 1 : 16 / static_cast<int>(sizeof(T));

// How a block walks a row of any length and alignment: vectors of kWidth from the first aligned
// address on, single numbers before and after them. What a thread puts into a stage in the first
// walk it takes back in the next: no barrier between.
template <class T, int kWidth>
struct RowWalk {
  int64_t n;
  int64_t head = 0;  // numbers before the first vector
  int64_t skew = 0;  // of the stage, so that vectors are aligned there too

  TS_DEVICE RowWalk(const T* row, int64_t n) : n(n) {
    if constexpr (kWidth > 1) {
      skew = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kWidth);
      head = skew > 0 ? kWidth - skew : 0;
      if (head > n) head = n;
    }
  }
  // Calls f.operator()<N>(c) for N numbers from column c on, as thread t of `threads`.
  template <class F>
  TS_DEVICE void each(const F& f) const {
    each(threadIdx.x, blockDim.x, f);
  }
  template <class F>
  TS_DEVICE void each(int64_t t, int64_t threads, const F& f) const {
    const int64_t vectors = (n - head) / kWidth, tail = head + vectors * kWidth;
    if constexpr (kWidth > 1) {
      if (t < head) f.template operator()<1>(t);
    }
    for (int64_t v = t; v < vectors; v += threads) {
      f.template operator()<kWidth>(head + v * kWidth);
    }
    if constexpr (kWidth > 1) {
      if (tail + t < n) f.template operator()<1>(tail + t);
    }
  }
};

// A row that is walked twice: the first walk reads memory and keeps what it read in the stage, the
// next takes it back from there. Without a stage, which long rows do not fit into, memory is read
// again. `walk` must be that of the row or of one that begins alike.
template <class T, int kWidth>
struct StagedRow {
  const T* row;
  T* stage;  // in shared memory, of stage_bytes(n)
  bool staged;
  int64_t skew;

  TS_DEVICE StagedRow(const T* row, const RowWalk<T, kWidth>& walk, T* stage, bool staged)
      : row(row), stage(stage), staged(staged), skew(walk.skew) {}
  template <int N>
  TS_DEVICE void keep(int64_t c, const gpu::Vector<T, N>& vector) const {
    if (staged) gpu::store_shared_vector(stage + skew + c, vector);
  }
  template <int N>
  TS_DEVICE gpu::Vector<T, N> first(int64_t c) const {
    const gpu::Vector<T, N> vector = gpu::load_vector<N>(row + c);
    keep(c, vector);
    return vector;
  }
  template <int N>
  TS_DEVICE gpu::Vector<T, N> again(int64_t c) const {
    if (staged) return gpu::load_vector<N>(stage + skew + c);
    return gpu::load_vector<N>(row + c);
  }
};

// N neighbouring numbers of an operand of columns (a weight, a bias), whatever a row's first vector
// is: by vectors where they are aligned, which all threads of a row agree on but for its ends.
template <int N, class A>
TS_DEVICE gpu::Vector<A, N> load_columns(const A* columns) {
  if (reinterpret_cast<uintptr_t>(columns) % alignof(gpu::Vector<A, N>) == 0) {
    return gpu::load_vector<N>(columns);
  }
  gpu::Vector<A, N> vector;
  TS_UNROLL
  for (int j = 0; j < N; ++j) vector.values[j] = columns[j];
  return vector;
}

// Shared memory for one row, as a multiple of 16 bytes; stages of together up to kMostStaged bytes
// leave room for the slots of reductions.
template <class T>
size_t stage_bytes(int64_t n) {
  return (static_cast<size_t>(n) * sizeof(T) + 31) / 16 * 16;
}
inline constexpr size_t kMostStaged = 224u << 10;

// Two vectors of `width` numbers a thread.
inline unsigned walk_threads(int64_t n, int width) {
  unsigned threads = 64;
  while (threads < 1024 && int64_t{threads} * 2 * width < n) threads *= 2;
  return threads;
}

// True where row i of all operands begins at the same distance from a multiple of 16 bytes.
template <class T>
bool begin_alike(std::initializer_list<const void*> bases, std::initializer_list<int64_t> strides) {
  constexpr int64_t kWidth = 16 / sizeof(T);
  const auto distance = [](const void* base) { return reinterpret_cast<uintptr_t>(base) % 16; };
  bool alike = true;
  for (const void* base : bases) alike = alike && distance(base) == distance(*bases.begin());
  for (const int64_t stride : strides) {
    alike = alike && (stride - *strides.begin()) % kWidth == 0;
  }
  return alike;
}

// ---- Sums of exponentials -----------------------------------------------------------------------

// In what exponentials of T are calculated whose results are rounded to T, or summed by thousands.
template <class T>
using ExpNumber = std::conditional_t<sizeof(T) == 2, math::Approximate, Compute<T>>;

template <class Number, class C>
TS_DEVICE C exponential(C x) {
  if constexpr (std::is_same_v<Number, math::Approximate>) {
    return math::exp(Number(x)).value;
  } else {
    return math::exp(x);
  }
}

// The largest of some numbers and the sum of exp(number - largest), in one walk. The numbers of a
// vector are added up in C, vectors in f64. -infinity adds nothing; NaN makes the sum NaN.
template <class C, class Number = C>
struct ExpSum {
  C largest = -static_cast<C>(INFINITY);
  double sum = 0;

  template <int N>
  TS_DEVICE void add(const C (&values)[N]) {
    C local = largest;
    TS_UNROLL
    for (int j = 0; j < N; ++j) local = values[j] > local ? values[j] : local;
    if (local > largest) raise(local);
    const C shift = largest == -static_cast<C>(INFINITY) ? C(0) : largest;
    C part = 0;
    TS_UNROLL
    for (int j = 0; j < N; ++j) part += exponential<Number>(values[j] - shift);
    sum += static_cast<double>(part);
  }
  // Over the threads of a row; `largest_slot` and `sum_slot` as of block_reduce.
  template <int kThreads>
  TS_DEVICE void join(C* largest_slot, double* sum_slot) {
    raise(row_reduce<kThreads>(largest, gpu::Larger{}, -static_cast<C>(INFINITY), largest_slot));
    sum = row_reduce<kThreads>(sum, gpu::Plus{}, 0.0, sum_slot);
  }
  TS_DEVICE void raise(C to) {
    if (sum != 0) sum *= static_cast<double>(exponential<Number>(largest - to));
    largest = to;
  }
};

// The exponentials of the calling thread's share of a row, which goes to its stage.
template <class Number, class T, int kWidth>
TS_DEVICE ExpSum<Compute<T>, Number> exp_sum(const RowWalk<T, kWidth>& walk,
                                             const StagedRow<T, kWidth>& row) {
  using C = Compute<T>;
  ExpSum<C, Number> sums;
  walk.each([&]<int N>(int64_t c) {
    C values[N];
    unpack(row.template first<N>(c), values);
    sums.add(values);
  });
  return sums;
}

}  // namespace tessera::kernels
