#include <cmath>
#include <initializer_list>
#include <utility>

#include <tessera/core/cuda/movable_stream.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/norm/norm.h>
#include <tessera/core/kernels/norm/norm_quantized.h>
#include <tessera/core/kernels/random/random_fill.h>
#include <tessera/core/kernels/random/random_numbers.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/common/column_fold.cuh>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/common/strided.cuh>
#include <tessera/core/kernels/fp8/cast_transpose.cuh>

namespace tessera::kernels {
namespace {

// Rows of up to 1024 numbers (512 of f64) whose vectors are aligned stay in the registers of a
// warp: read and written once, 16 bytes at a time. Longer ones take a block each. Forward keeps
// them in shared memory. Backward keeps them in the registers of kWideBlock threads up to 8192
// numbers (4096), with the sums of the columns beside them; beyond, or without alignment, in shared
// memory, and the sums of the columns are a launch of their own, which reads dy and x a second
// time.
constexpr int kWideBlock = 256;
template <int kThreads>
inline constexpr int kRowsOfBlock = kThreads == gpu::kWarp ? 4 : 1;
template <int kThreads>
inline constexpr int kRegisterBlock = kRowsOfBlock<kThreads>* kThreads;

// Columns of weight or bias. Rows in registers read them as they are stored (W: of x's dtype, or as
// they are calculated with), the others converted.
template <class W, class A, int N>
TS_DEVICE gpu::Vector<A, N> load_stored(const void* columns, int64_t c) {
  const auto stored = gpu::load_vector<N>(static_cast<const W*>(columns) + c);
  if constexpr (std::is_same_v<W, A>) {
    return stored;
  } else {
    gpu::Vector<A, N> values;
    TS_UNROLL
    for (int j = 0; j < N; ++j) values.values[j] = load<A>(stored.values[j]);
    return values;
  }
}

// Dropout on the way, as dropout_kernel of random_fill.cu has it.
template <class T>
struct NormDropout {
  MovableStream stream;
  uint32_t dropped;
  Compute<T> scale;

  // Neighbours from element `first` on, a multiple of N. `now`: of stream.
  template <int N>
  TS_DEVICE void apply(gpu::Vector<T, N>& vector, const RandomStream& now, int64_t first) const {
    constexpr int kEach = N < 4 ? N : 4;
    TS_UNROLL
    for (int b = 0; b < N / kEach; ++b) {
      const auto bits = philox4x32(now.seed, now.stream, static_cast<uint64_t>(first / 4 + b));
      const bool second_half = kEach < 4 && first % 4 != 0;
      TS_UNROLL
      for (int i = 0; i < kEach; ++i) {
        const uint32_t word =
            second_half ? bits[static_cast<size_t>((i + 2) % 4)] : bits[static_cast<size_t>(i)];
        T& number = vector.values[b * kEach + i];
        const Compute<T> value = load<Compute<T>>(number) * scale;
        number = store<T>(word >= dropped ? value : Compute<T>(0));
      }
    }
  }
};

template <class T>
struct NormForward {
  const T* x;          // (rows, C)
  const T* residual;   // (rows, C) or null
  T* sum;              // (rows, C) where there is a residual
  T* y;                // (rows, C)
  const void* weight;  // (C) of W or null; of Compute<T> for kernels without a W
  const void* bias;    // the same
  Compute<T>* mean;    // (rows), null for rms_norm
  Compute<T>* rstd;    // (rows)
  int64_t rows, C;
  double eps;
  NormDropout<T> dropout;  // of x, for kernels that drop
};

template <class T>
struct NormBackward {
  const T* dy;             // (rows, C)
  const T* dsum;           // (rows, C) or null
  const T* x;              // (rows, C)
  const void* weight;      // (C) as in NormForward
  const Compute<T>* mean;  // (rows), null for rms_norm
  const Compute<T>* rstd;  // (rows)
  T* dx;                   // (rows, C) or null
  Compute<T>* dweights;    // (blocks of kNormRows rows, C) or null
  Compute<T>* dbiases;     // (blocks of kNormRows rows, C) or null
  int64_t rows, C;
  // Of kernels that have more to do with dx.
  T* update;             // (rows, C) or null: what dropout takes of dx
  Compute<T>* dupdates;  // (blocks of kNormRows rows, C) or null: sums of update, or else of dx
  NormDropout<T> dropout;
};

// A row in the registers of a warp. write(column, numbers of the result): of each vector.
template <class T, class W, bool kDrops, class Write>
TS_DEVICE void normalise_row(const NormForward<T>& p, int64_t row, const Write& write) {
  using A = Compute<T>;
  using Lanes = InRegisters<T>;
  constexpr int kWidth = 16 / sizeof(T);
  A values[Lanes::kNumbers];
  double total = 0;
  RandomStream now{};
  if constexpr (kDrops) now = p.dropout.stream.now();
  Lanes::each(p.C, [&](int v, int64_t c) {
    gpu::Vector<T, kWidth> in = gpu::load_vector<kWidth>(p.x + row * p.C + c);
    if constexpr (kDrops) p.dropout.apply(in, now, row * p.C + c);
    if (p.residual != nullptr) {
      const auto other = gpu::load_vector<kWidth>(p.residual + row * p.C + c);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        in.values[j] = store<T>(load<A>(in.values[j]) + load<A>(other.values[j]));
      }
      gpu::store_vector(p.sum + row * p.C + c, in);
    }
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) {
      const A value = load<A>(in.values[j]);
      values[v * kWidth + j] = value;
      total += static_cast<double>(value);
    }
  });
  A mean = 0;
  if (p.mean != nullptr) {
    mean = static_cast<A>(gpu::warp_reduce(total, gpu::Plus{}) / static_cast<double>(p.C));
  }
  double squares = 0;
  Lanes::each(p.C, [&](int v, int64_t) {
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) {
      const A deviation = values[v * kWidth + j] - mean;
      squares += static_cast<double>(deviation * deviation);
    }
  });
  squares = gpu::warp_reduce(squares, gpu::Plus{});
  const double variance = squares / static_cast<double>(p.C);
  const double overflowed = p.mean != nullptr ? variance - variance : 0;  // NaN, see norm.h
  const A rstd = static_cast<A>(1 / ::sqrt(variance + p.eps) + overflowed);
  if (threadIdx.x % gpu::kWarp == 0) {
    if (p.mean != nullptr) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  Lanes::each(p.C, [&](int v, int64_t c) {
    gpu::Vector<A, kWidth> w, b;
    if (p.weight != nullptr) w = load_stored<W, A, kWidth>(p.weight, c);
    if (p.bias != nullptr) b = load_stored<W, A, kWidth>(p.bias, c);
    gpu::Vector<T, kWidth> out;
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) {
      A value = (values[v * kWidth + j] - mean) * rstd;
      if (p.weight != nullptr) value = value * w.values[j];
      if (p.bias != nullptr) value = value + b.values[j];
      out.values[j] = store<T>(value);
    }
    write(c, out);
  });
}

template <class T, class W, bool kDrops>
__global__ void __launch_bounds__(kRegisterBlock<gpu::kWarp>)
    register_row_norm_kernel(const NormForward<T> p) {
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock<gpu::kWarp> + threadIdx.x / gpu::kWarp;
  if (row >= p.rows) return;  // the whole warp
  normalise_row<T, W, kDrops>(
      p, row, [&](int64_t c, const auto& out) { gpu::store_vector(p.y + row * p.C + c, out); });
}

// The result in fp8, by rows and by columns; see norm_quantized.h. Of a number 1 byte each is
// written. With the copy by columns made later from the one by rows, 1 + (1 + 1) would move; by a
// cast of a stored f32 result, 4 + (4 + 1 + 1).
//
// The warps of a block take turns at kCastRows rows, whose bytes meet in shared memory, in words of
// four columns, and leave it as kCastRows neighbours of a column: whole sectors.
constexpr int kCastRows = 32, kCastThreads = 256;
template <class T, class W>
__global__ void __launch_bounds__(kCastThreads)
    register_row_norm_cast_kernel(const NormForward<T> p, const CastJob<T, f8e4m3> job) {
  using Q = f8e4m3;
  constexpr int kWidth = 16 / sizeof(T), kWords = kWidth / 4, kWarps = kCastThreads / gpu::kWarp;
  constexpr int kSixteen = 4;  // words of 16 rows
  TS_SHARED(uint32_t, slot, gpu::kWarp);
  uint32_t* const bytes = gpu::dynamic_shared<uint32_t>();  // (row, four columns)
  const int64_t begin = int64_t{blockIdx.x} * kCastRows, words = p.C / 4;
  const int rows = static_cast<int>(p.rows - begin < kCastRows ? p.rows - begin : kCastRows);
  const float factor = cast::scale_of(job);
  const cast::Before before{job.through, 1.0f};
  cast::Seen seen;
  for (int i = static_cast<int>(threadIdx.x) / gpu::kWarp; i < rows; i += kWarps) {
    normalise_row<T, W, false>(p, begin + i, [&](int64_t c, const auto& out) {
      float scaled[kWidth];
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        const float value = cast::number_of(cast::Plain{}, out.values[j], out.values[j], before);
        scaled[j] = value * factor;
        seen.template number<Q>(value, scaled[j]);
      }
      gpu::Vector<uint32_t, kWords> packed;
      TS_UNROLL
      for (int w = 0; w < kWords; ++w) packed.values[w] = cast::pack_word<Q>(scaled + 4 * w);
      gpu::store_vector(reinterpret_cast<uint32_t*>(job.values + (begin + i) * p.C + c), packed);
      if (job.transposed != nullptr) gpu::store_shared_vector(bytes + i * words + c / 4, packed);
    });
  }
  if (job.transposed != nullptr) {  // all threads
    __syncthreads();
    for (int64_t word = threadIdx.x; word < words; word += kCastThreads) {
      for (int first = 0; first < rows; first += 4 * kSixteen) {
        uint32_t columns[kSixteen][4];  // (four rows, column)
        TS_UNROLL
        for (int g = 0; g < kSixteen; ++g) {
          TS_UNROLL
          for (int i = 0; i < 4; ++i) columns[g][i] = bytes[(first + 4 * g + i) * words + word];
          cast::transpose_words<Q>(columns[g]);
        }
        TS_UNROLL
        for (int j = 0; j < 4; ++j) {
          gpu::Vector<uint32_t, kSixteen> column;
          TS_UNROLL
          for (int g = 0; g < kSixteen; ++g) column.values[g] = columns[g][j];
          Q* const to = job.transposed + (4 * word + j) * p.rows + begin + first;
          gpu::store_vector(reinterpret_cast<uint32_t*>(to), column);
        }
      }
    }
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    *job.scale_used = factor;
    *job.inverse = 1 / factor;
  }
  cast::note(job, seen, slot);
}

// A block walks kNormRows rows, a warp every fourth of them or all threads each; the sums of its
// columns stay in registers and are joined in the order of the warps.
template <class T, class W, int kThreads, bool kMore>
__global__ void __launch_bounds__(kRegisterBlock<kThreads>)
    register_row_norm_backward_kernel(const NormBackward<T> p) {
  using A = Compute<T>;
  using Lanes = InRegisters<T, kThreads>;
  constexpr int kWidth = 16 / sizeof(T), kNumbers = Lanes::kNumbers;
  constexpr int kRows = kRowsOfBlock<kThreads>;
  TS_SHARED(A, joined, kRows > 1 ? Lanes::kMost : 1);
  TS_REDUCE_SLOT(double, slot);
  const int group = static_cast<int>(threadIdx.x) / kThreads;
  const int64_t begin = int64_t{blockIdx.x} * kNormRows;
  const int64_t end = begin + kNormRows < p.rows ? begin + kNormRows : p.rows;
  A dweight[kNumbers] = {}, dbias[kNumbers] = {}, dupdate[kMore ? kNumbers : 1] = {};
  RandomStream now{};
  if constexpr (kMore) {
    if (p.update != nullptr) now = p.dropout.stream.now();
  }
  for (int64_t row = begin + group; row < end; row += kRows) {
    const A m = p.mean != nullptr ? p.mean[row] : A(0), r = p.rstd[row];
    A xhats[kNumbers], gs[kNumbers];  // g = dy weight
    double sum = 0, product = 0;      // of g and g xhat
    Lanes::each(p.C, [&](int v, int64_t c) {
      const auto grads = gpu::load_vector<kWidth>(p.dy + row * p.C + c);
      const auto in = gpu::load_vector<kWidth>(p.x + row * p.C + c);
      gpu::Vector<A, kWidth> w;
      if (p.weight != nullptr) w = load_stored<W, A, kWidth>(p.weight, c);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        const int i = v * kWidth + j;
        const A grad = load<A>(grads.values[j]);
        xhats[i] = (load<A>(in.values[j]) - m) * r;
        gs[i] = p.weight != nullptr ? grad * w.values[j] : grad;
        sum += static_cast<double>(gs[i]);
        product += static_cast<double>(gs[i] * xhats[i]);
        dweight[i] += grad * xhats[i];
        dbias[i] += grad;
      }
    });
    if (p.dx == nullptr) continue;
    A mean_g = 0;
    if (p.mean != nullptr) {
      mean_g = static_cast<A>(row_reduce<kThreads>(sum, gpu::Plus{}, 0.0, slot) /
                              static_cast<double>(p.C));
    }
    const A mean_product = static_cast<A>(row_reduce<kThreads>(product, gpu::Plus{}, 0.0, slot) /
                                          static_cast<double>(p.C));
    Lanes::each(p.C, [&](int v, int64_t c) {
      gpu::Vector<T, kWidth> more, out;
      if (p.dsum != nullptr) more = gpu::load_vector<kWidth>(p.dsum + row * p.C + c);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        const int i = v * kWidth + j;
        A value = (gs[i] - mean_g - xhats[i] * mean_product) * r;
        if (p.dsum != nullptr) value = value + load<A>(more.values[j]);
        out.values[j] = store<T>(value);
      }
      gpu::store_vector(p.dx + row * p.C + c, out);
      if constexpr (kMore) {
        if (p.update != nullptr) {
          p.dropout.apply(out, now, row * p.C + c);
          gpu::store_vector(p.update + row * p.C + c, out);
        }
        TS_UNROLL
        for (int j = 0; j < kWidth; ++j) dupdate[v * kWidth + j] += load<A>(out.values[j]);
      }
    });
  }
  const auto join = [&](const auto& own, A* result) {
    if (result == nullptr) return;  // all threads
    for (int turn = 0; turn < kRows; ++turn) {
      if (group == turn) {
        Lanes::each(p.C, [&](int v, int64_t c) {
          TS_UNROLL
          for (int j = 0; j < kWidth; ++j) {
            const A before = turn > 0 ? joined[c + j] : A(0);
            const A value = before + own[v * kWidth + j];
            if (turn + 1 < kRows) {
              joined[c + j] = value;
            } else {
              result[blockIdx.x * p.C + c + j] = value;
            }
          }
        });
      }
      __syncthreads();
    }
  };
  join(dweight, p.dweights);
  join(dbias, p.dbiases);
  if constexpr (kMore) join(dupdate, p.dupdates);
}

// One block a row: residual added and written, mean, variance of the deviations, result. `staged`:
// the row stays in shared memory; else it is read again.
template <class T, int kWidth>
__global__ void __launch_bounds__(1024) row_norm_kernel(const NormForward<T> p, bool staged) {
  using A = Compute<T>;
  TS_REDUCE_SLOT(double, slot);
  const int64_t row = blockIdx.x, C = p.C;
  const T* const x = p.x + row * C;
  const T* const residual = p.residual != nullptr ? p.residual + row * C : nullptr;
  T* const sum = residual != nullptr ? p.sum + row * C : nullptr;
  const RowWalk<T, kWidth> walk(x, C);
  // Each thread reads again what it read or wrote: no barrier between.
  const StagedRow<T, kWidth> normalised(residual != nullptr ? sum : x, walk,
                                        gpu::dynamic_shared<T>(), staged);
  double total = 0;
  walk.each([&]<int N>(int64_t c) {
    gpu::Vector<T, N> in = gpu::load_vector<N>(x + c);
    if (residual != nullptr) {
      const gpu::Vector<T, N> other = gpu::load_vector<N>(residual + c);
      TS_UNROLL
      for (int j = 0; j < N; ++j) {
        in.values[j] = store<T>(load<A>(in.values[j]) + load<A>(other.values[j]));
      }
      gpu::store_vector(sum + c, in);
    }
    normalised.keep(c, in);
    TS_UNROLL
    for (int j = 0; j < N; ++j) total += static_cast<double>(load<A>(in.values[j]));
  });
  A mean = 0;
  if (p.mean != nullptr) {
    mean =
        static_cast<A>(gpu::block_reduce(total, gpu::Plus{}, 0.0, slot) / static_cast<double>(C));
  }
  double squares = 0;
  walk.each([&]<int N>(int64_t c) {
    const gpu::Vector<T, N> in = normalised.template again<N>(c);
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      const A deviation = load<A>(in.values[j]) - mean;
      squares += static_cast<double>(deviation * deviation);
    }
  });
  squares = gpu::block_reduce(squares, gpu::Plus{}, 0.0, slot);
  const double variance = squares / static_cast<double>(C);
  const double overflowed = p.mean != nullptr ? variance - variance : 0;  // NaN, see norm.h
  const A rstd = static_cast<A>(1 / ::sqrt(variance + p.eps) + overflowed);
  if (threadIdx.x == 0) {
    if (p.mean != nullptr) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  walk.each([&]<int N>(int64_t c) {
    gpu::Vector<T, N> vector = normalised.template again<N>(c);
    A values[N];
    TS_UNROLL
    for (int j = 0; j < N; ++j) values[j] = (load<A>(vector.values[j]) - mean) * rstd;
    if (p.weight != nullptr) {
      const gpu::Vector<A, N> weight = load_columns<N>(static_cast<const A*>(p.weight) + c);
      TS_UNROLL
      for (int j = 0; j < N; ++j) values[j] = values[j] * weight.values[j];
    }
    if (p.bias != nullptr) {
      const gpu::Vector<A, N> bias = load_columns<N>(static_cast<const A*>(p.bias) + c);
      TS_UNROLL
      for (int j = 0; j < N; ++j) values[j] = values[j] + bias.values[j];
    }
    TS_UNROLL
    for (int j = 0; j < N; ++j) vector.values[j] = store<T>(values[j]);
    gpu::store_vector(p.y + row * C + c, vector);
  });
}

// One block a row: the input's gradient. `stage`: numbers between the stages of dy and x in shared
// memory, 0 where they do not fit and are read again.
template <class T, int kWidth>
__global__ void __launch_bounds__(1024)
    row_norm_backward_kernel(const NormBackward<T> p, int64_t stage) {
  using A = Compute<T>;
  TS_REDUCE_SLOT(double, slot);
  const int64_t row = blockIdx.x, C = p.C;
  const T* const x = p.x + row * C;
  const RowWalk<T, kWidth> walk(x, C);
  T* const stages = gpu::dynamic_shared<T>();
  const StagedRow<T, kWidth> grads(p.dy + row * C, walk, stages, stage > 0);
  const StagedRow<T, kWidth> inputs(x, walk, stages + stage, stage > 0);
  const A m = p.mean != nullptr ? p.mean[row] : A(0), r = p.rstd[row];
  // g = dy weight
  const auto weighted = [&]<int N>(int64_t c, const gpu::Vector<T, N>& grad, A(&gs)[N]) {
    TS_UNROLL
    for (int j = 0; j < N; ++j) gs[j] = load<A>(grad.values[j]);
    if (p.weight == nullptr) return;
    const gpu::Vector<A, N> weight = load_columns<N>(static_cast<const A*>(p.weight) + c);
    TS_UNROLL
    for (int j = 0; j < N; ++j) gs[j] = gs[j] * weight.values[j];
  };
  double sum = 0, product = 0;  // of g and g xhat
  walk.each([&]<int N>(int64_t c) {
    const gpu::Vector<T, N> grad = grads.template first<N>(c), in = inputs.template first<N>(c);
    A gs[N];
    weighted(c, grad, gs);
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      sum += static_cast<double>(gs[j]);
      product += static_cast<double>(gs[j] * ((load<A>(in.values[j]) - m) * r));
    }
  });
  A mean_g = 0;
  if (p.mean != nullptr) {
    mean_g =
        static_cast<A>(gpu::block_reduce(sum, gpu::Plus{}, 0.0, slot) / static_cast<double>(C));
  }
  const A mean_product =
      static_cast<A>(gpu::block_reduce(product, gpu::Plus{}, 0.0, slot) / static_cast<double>(C));
  walk.each([&]<int N>(int64_t c) {
    const gpu::Vector<T, N> grad = grads.template again<N>(c), in = inputs.template again<N>(c);
    A gs[N];
    weighted(c, grad, gs);
    gpu::Vector<T, N> more, out;
    if (p.dsum != nullptr) more = gpu::load_vector<N>(p.dsum + row * C + c);
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      const A xhat = (load<A>(in.values[j]) - m) * r;
      A value = (gs[j] - mean_g - xhat * mean_product) * r;
      if (p.dsum != nullptr) value = value + load<A>(more.values[j]);
      out.values[j] = store<T>(value);
    }
    gpu::store_vector(p.dx + row * C + c, out);
  });
}

// The partial column sums of kNormRows rows and a tile of columns: each lane has kWidth columns,
// each of kNormLines warps every kNormLines-th row, and their sums are joined in the order of the
// warps.
constexpr int kNormLines = 8;
template <class T, int kWidth>
__global__ void __launch_bounds__(gpu::kWarp* kNormLines)
    norm_column_sums_kernel(const NormBackward<T> p) {
  using A = Compute<T>;
  constexpr int kTile = gpu::kWarp * kWidth;
  TS_SHARED(A, sums, kNormLines * kTile);
  const int lane = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const int64_t C = p.C, tiles = (C + kTile - 1) / kTile, block = blockIdx.x / tiles;
  const int64_t c = blockIdx.x % tiles * kTile + lane * kWidth;
  const int64_t begin = block * kNormRows;
  const int64_t end = begin + kNormRows < p.rows ? begin + kNormRows : p.rows;
  A dweight[kWidth] = {}, dbias[kWidth] = {};
  if (c < C) {
    for (int64_t row = begin + line; row < end; row += kNormLines) {
      const A m = p.mean != nullptr ? p.mean[row] : A(0), r = p.rstd[row];
      const auto grads = gpu::load_vector<kWidth>(p.dy + row * C + c);
      const auto in = gpu::load_vector<kWidth>(p.x + row * C + c);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        const A grad = load<A>(grads.values[j]);
        dweight[j] += grad * ((load<A>(in.values[j]) - m) * r);
        dbias[j] += grad;
      }
    }
  }
  const auto join = [&](const A(&own)[kWidth], A* result) {
    if (result == nullptr) return;  // all threads
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) sums[line * kTile + j * gpu::kWarp + lane] = own[j];
    __syncthreads();
    if (line == 0 && c < C) {
      gpu::Vector<A, kWidth> total;
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        total.values[j] = own[j];
        for (int l = 1; l < kNormLines; ++l) {
          total.values[j] += sums[l * kTile + j * gpu::kWarp + lane];
        }
      }
      gpu::store_vector(result + block * C + c, total);
    }
    __syncthreads();
  };
  join(dweight, p.dweights);
  join(dbias, p.dbiases);
}

Tensor in_dtype(const Tensor& x, DType dtype) {
  if (!x.defined()) return x;
  return contiguous(x.dtype() == dtype ? x : convert(x, dtype));
}
template <class T>
T* data_or_null(const Tensor& x) {
  return x.defined() ? x.data_as<T>() : nullptr;
}

// How many threads keep a row in their registers; 0 where none do.
template <class T>
int register_threads(int64_t columns, std::initializer_list<const Tensor*> operands) {
  bool aligned = columns % (16 / static_cast<int64_t>(sizeof(T))) == 0;
  for (const Tensor* x : operands) aligned = aligned && (!x->defined() || is_aligned(x->data()));
  if (!aligned || columns > InRegisters<T, kWideBlock>::kMost) return 0;
  return columns <= InRegisters<T>::kMost ? gpu::kWarp : kWideBlock;
}

// As the kernels of rows in registers read it: as it is where they can, else in the compute type.
template <class T>
Tensor stored_parameter(const Tensor& x) {
  if (!x.defined()) return x;
  const bool as_it_is = x.dtype() == dtype_of<T> && is_aligned(x.data()) && x.is_contiguous();
  return as_it_is ? x : in_dtype(x, dtype_of<Compute<T>>);
}
// Calls f.operator()<W>() for the type that all of them are stored in, and converts those that
// differ.
template <class T, class F>
void with_stored_type(std::initializer_list<Tensor*> parameters, const F& f) {
  if constexpr (!std::is_same_v<T, Compute<T>>) {
    bool narrow = false, wide = false;
    for (const Tensor* x : parameters) {
      if (x->defined()) (x->dtype() == dtype_of<T> ? narrow : wide) = true;
    }
    if (narrow && !wide) return f.template operator()<T>();
  }
  for (Tensor* x : parameters) *x = in_dtype(*x, dtype_of<Compute<T>>);
  f.template operator()<Compute<T>>();
}
const void* address_or_null(const Tensor& x) { return x.defined() ? x.data() : nullptr; }

template <class T>
NormDropout<T> dropout_of(const std::optional<ResidualDropout>& given) {
  if (!given) return {};
  return {movable(given->stream), dropout_threshold(given->p),
          static_cast<Compute<T>>(1.0 / (1.0 - given->p))};
}
int64_t state_bytes_of(const MovableStream& stream) { return stream.state != nullptr ? 16 : 0; }

RowNorm row_norm_forward_cuda(const Tensor& x, const Tensor& residual, int64_t columns,
                              const Tensor& weight, const Tensor& bias, double eps, bool center,
                              const std::optional<ResidualDropout>& given) {
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  const DType compute = compute_dtype(x.dtype());
  RowNorm result;
  result.y = raw::empty(x.shape(), x.dtype(), x.device());
  result.rstd = raw::empty({rows}, compute, x.device());
  if (center) result.mean = raw::empty({rows}, compute, x.device());
  if (residual.defined()) result.sum = raw::empty(x.shape(), x.dtype(), x.device());
  if (rows == 0) return result;
  Tensor source = contiguous(x);
  const Tensor other = in_dtype(residual, x.dtype());
  dispatch_floating(x.dtype(), "layer_norm", [&]<class T>() {
    using A = Compute<T>;
    const char* const name = center ? "layer_norm" : "rms_norm";
    Tensor w = stored_parameter<T>(weight), b = stored_parameter<T>(bias);
    const bool registers = register_threads<T>(columns, {&source, &other, &result.sum, &result.y,
                                                         &w, &b}) == gpu::kWarp;
    if (!registers) {
      w = in_dtype(weight, compute), b = in_dtype(bias, compute);
      if (given) source = dropout(source, given->p, given->stream);
    }
    NormForward<T> p{source.data_as<T>(),
                     data_or_null<T>(other),
                     data_or_null<T>(result.sum),
                     result.y.data_as<T>(),
                     nullptr,
                     nullptr,
                     data_or_null<A>(result.mean),
                     result.rstd.data_as<A>(),
                     rows,
                     columns,
                     eps,
                     {}};
    gpu::Traffic traffic{source.numel() * size_of(source.dtype()), 0};
    const auto take_parameters = [&] {
      p.weight = address_or_null(w), p.bias = address_or_null(b);
      for (const Tensor* in : std::initializer_list<const Tensor*>{&other, &w, &b}) {
        if (in->defined()) traffic.reads += in->numel() * size_of(in->dtype());
      }
    };
    for (const Tensor* out : {&result.sum, &result.y, &result.mean, &result.rstd}) {
      if (out->defined()) traffic.writes += out->numel() * size_of(out->dtype());
    }
    if (registers) {
      if (given) {
        p.dropout = dropout_of<T>(given);
        traffic.reads += state_bytes_of(p.dropout.stream);
      }
      with_stored_type<T>({&w, &b}, [&]<class W>() {
        take_parameters();
        gpu::launch(
            {.name = name,
             .grid = gpu::blocks(rows, kRowsOfBlock<gpu::kWarp>),
             .block = kRegisterBlock<gpu::kWarp>,
             .traffic = traffic},
            given ? register_row_norm_kernel<T, W, true> : register_row_norm_kernel<T, W, false>,
            p);
      });
      return;
    }
    take_parameters();
    constexpr int kWidth = kRowVector<T>;
    const bool vectors = p.residual == nullptr ? begin_alike<T>({p.x, p.y}, {})
                                               : begin_alike<T>({p.x, p.y, p.residual, p.sum}, {});
    const bool staged = stage_bytes<T>(columns) <= kMostStaged;
    gpu::launch({.name = name,
                 .grid = static_cast<unsigned>(rows),
                 .block = walk_threads(columns, vectors ? kWidth : 1),
                 .shared_bytes = staged ? stage_bytes<T>(columns) : 0,
                 .traffic = traffic},
                vectors ? row_norm_kernel<T, kWidth> : row_norm_kernel<T, 1>, p, staged);
  });
  return result;
}

QuantizedRowNorm row_norm_quantized_cuda(const Tensor& x, const Tensor& residual, int64_t columns,
                                         const Tensor& weight, const Tensor& bias, double eps,
                                         bool center, const QuantizeOptions& options,
                                         const Tensor& scale, const QuantizeWants& wants) {
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  const DType compute = compute_dtype(x.dtype());
  const Tensor source = contiguous(x), other = in_dtype(residual, x.dtype());
  bool fused = scale.defined() && quantises_rows(rows, columns, x.dtype(), options);
  QuantizedRowNorm result;
  if (fused) {
    dispatch_floating(x.dtype(), "layer_norm", [&]<class T>() {
      if constexpr (!std::is_same_v<T, double>) {
        using A = Compute<T>;
        RowNorm& norm = result.norm;
        if (residual.defined()) norm.sum = raw::empty(x.shape(), x.dtype(), x.device());
        Tensor w = stored_parameter<T>(weight), b = stored_parameter<T>(bias);
        fused = register_threads<T>(columns, {&source, &other, &norm.sum, &w, &b}) == gpu::kWarp;
        if (!fused) return;
        norm.rstd = raw::empty({rows}, compute, x.device());
        if (center) norm.mean = raw::empty({rows}, compute, x.device());
        Quantized& y = result.y;
        y = {.values = raw::empty({rows, columns}, options.format, x.device()),
             .scale = raw::empty({1, 1}, kF32, x.device()),
             .inverse = raw::empty({1, 1}, kF32, x.device()),
             .tile = options.tile};
        if (wants.by_columns) {
          y.transposed = raw::empty({columns, rows}, options.format, x.device());
        }
        NormForward<T> p{source.data_as<T>(),
                         data_or_null<T>(other),
                         data_or_null<T>(norm.sum),
                         nullptr,
                         nullptr,
                         nullptr,
                         data_or_null<A>(norm.mean),
                         norm.rstd.data_as<A>(),
                         rows,
                         columns,
                         eps,
                         {}};
        CastJob<T, f8e4m3> job{};
        job.through = wants.through.value_or(kF32);
        job.scale = scale.data_as<float>();
        job.values = y.values.data_as<f8e4m3>();
        job.transposed = data_or_null<f8e4m3>(y.transposed);
        job.scale_used = y.scale.data_as<float>();
        job.inverse = y.inverse.data_as<float>();
        if (wants.largest.defined()) job.amax = static_cast<uint32_t*>(wants.largest.data());
        if (wants.counts.defined()) {
          job.counts = static_cast<unsigned long long*>(wants.counts.data());
        }
        job.no_nan = true;
        with_stored_type<T>({&w, &b}, [&]<class W>() {
          p.weight = address_or_null(w), p.bias = address_or_null(b);
          gpu::Traffic traffic{4, 0};
          for (const Tensor* in : std::initializer_list<const Tensor*>{&source, &other, &w, &b}) {
            if (in->defined()) traffic.reads += in->nbytes();
          }
          for (const Tensor* out : {&norm.sum, &norm.mean, &norm.rstd, &y.values, &y.transposed,
                                    &y.scale, &y.inverse}) {
            if (out->defined()) traffic.writes += out->nbytes();
          }
          gpu::launch({.name = center ? "layer_norm_cast" : "rms_norm_cast",
                       .grid = gpu::blocks(rows, kCastRows),
                       .block = kCastThreads,
                       .shared_bytes =
                           wants.by_columns ? static_cast<size_t>(kCastRows * columns) : size_t{0},
                       .traffic = traffic},
                      register_row_norm_cast_kernel<T, W>, p, job);
        });
      }
    });
    if (fused) return result;
  }
  result.norm = row_norm_forward_cuda(x, residual, columns, weight, bias, eps, center, {});
  const Tensor y = std::exchange(result.norm.y, {});
  result.y = quantize(raw::view(y, {rows, columns}), options, scale, wants);
  return result;
}

// `threads`: how many keep a row in their registers.
template <class T>
void launch_norm_backward(NormBackward<T>& p, int threads, Tensor& weight) {
  constexpr const char* kName = "norm_backward";
  constexpr int kWidth = 16 / sizeof(T);
  const unsigned blocks = gpu::blocks(p.rows, kNormRows);
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  constexpr auto kWide = static_cast<int64_t>(sizeof(Compute<T>));
  const int64_t plane = p.rows * p.C * kSize;
  const int64_t statistics = p.rows * (p.mean != nullptr ? 2 : 1) * kWide;
  const int64_t column_sums =
      int64_t{blocks} * p.C * kWide * ((p.dweights != nullptr) + (p.dbiases != nullptr));
  gpu::Traffic traffic{2 * plane + statistics, 0};
  const gpu::Traffic sums_alone{p.dweights != nullptr ? traffic.reads : plane, column_sums};
  if (p.dx != nullptr) {
    traffic.reads += (p.dsum != nullptr ? plane : 0);
    traffic.writes = plane;
  }
  gpu::Traffic whole{traffic.reads, traffic.writes + column_sums};
  const bool more = p.update != nullptr || p.dupdates != nullptr;
  if (p.update != nullptr) {
    whole.reads += state_bytes_of(p.dropout.stream);
    whole.writes += plane;
  }
  if (p.dupdates != nullptr) whole.writes += int64_t{blocks} * p.C * kWide;
  const auto weight_bytes = [&] {
    return p.dx != nullptr && weight.defined() ? p.C * size_of(weight.dtype()) : 0;
  };
  const auto run = [&]<int kThreads>() {
    with_stored_type<T>({&weight}, [&]<class W>() {
      p.weight = address_or_null(weight);
      whole.reads += weight_bytes();
      gpu::launch(
          {.name = kName, .grid = blocks, .block = kRegisterBlock<kThreads>, .traffic = whole},
          more ? register_row_norm_backward_kernel<T, W, kThreads, true>
               : register_row_norm_backward_kernel<T, W, kThreads, false>,
          p);
    });
  };
  if (threads == gpu::kWarp) return run.template operator()<gpu::kWarp>();
  if (threads == kWideBlock) return run.template operator()<kWideBlock>();
  p.weight = address_or_null(weight);
  traffic.reads += weight_bytes();
  if (p.dx != nullptr) {
    const bool vectors = p.dsum == nullptr ? begin_alike<T>({p.x, p.dy, p.dx}, {})
                                           : begin_alike<T>({p.x, p.dy, p.dx, p.dsum}, {});
    const size_t bytes = stage_bytes<T>(p.C);
    const bool staged = 2 * bytes <= kMostStaged;
    gpu::launch({.name = kName,
                 .grid = static_cast<unsigned>(p.rows),
                 .block = walk_threads(p.C, vectors ? kWidth : 1),
                 .shared_bytes = staged ? 2 * bytes : 0,
                 .traffic = traffic},
                vectors ? row_norm_backward_kernel<T, kWidth> : row_norm_backward_kernel<T, 1>, p,
                staged ? static_cast<int64_t>(bytes / sizeof(T)) : int64_t{0});
  }
  if (p.dweights != nullptr || p.dbiases != nullptr) {
    // Results are new tensors, and so aligned.
    const bool vectors = p.C % kWidth == 0 && is_aligned(p.x) && is_aligned(p.dy);
    gpu::launch({.name = kName,
                 .grid = blocks * gpu::blocks(p.C, gpu::kWarp, vectors ? kWidth : 1),
                 .block = dim3(gpu::kWarp, kNormLines),
                 .traffic = sums_alone},
                vectors ? norm_column_sums_kernel<T, kWidth> : norm_column_sums_kernel<T, 1>, p);
  }
}

RowNormGradients row_norm_backward_cuda(const Tensor& dy, const Tensor& dsum, const Tensor& x,
                                        int64_t columns, const Tensor& weight, const Tensor& mean,
                                        const Tensor& rstd, const bool (&wanted)[3],
                                        const RowNormBackwardOptions& options) {
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  const DType compute = compute_dtype(x.dtype());
  const int64_t blocks = (rows + kNormRows - 1) / kNormRows;
  RowNormGradients result;
  const auto column_result = [&](std::optional<DType> dtype) {
    return raw::empty({columns}, dtype.value_or(compute), x.device());
  };
  if (wanted[0]) result.input = raw::empty(x.shape(), x.dtype(), x.device());
  if (wanted[1]) result.weight = column_result(options.weight_dtype);
  if (wanted[2]) result.bias = column_result(options.bias_dtype);
  const bool drops = wanted[0] && options.dropout;
  const Tensor source = contiguous(x), grad = in_dtype(dy, x.dtype());
  const Tensor more = in_dtype(dsum, x.dtype());
  dispatch_floating(x.dtype(), "layer_norm", [&]<class T>() {
    using A = Compute<T>;
    Tensor w = stored_parameter<T>(weight);
    const int threads = register_threads<T>(columns, {&grad, &more, &source, &w, &result.input});
    if (threads == 0) w = in_dtype(weight, compute);
    if (drops && threads > 0) result.update = raw::empty(x.shape(), x.dtype(), x.device());
    if (wanted[0] && options.column_sums && threads > 0) {
      result.column_sums = column_result(x.dtype());
    }
    // (blocks, columns) for each of the sums
    Tensor partials[3];
    const Tensor* const sums[3] = {&result.weight, &result.bias, &result.column_sums};
    ColumnFold<T> fold{.rows = blocks, .columns = columns};
    for (int i = 0; i < 3; ++i) {
      if (!sums[i]->defined()) continue;
      partials[i] = raw::empty({blocks, columns}, compute, x.device());
      fold.add(partials[i], *sums[i]);
    }
    if (blocks > 0) {
      NormBackward<T> p{grad.data_as<T>(),
                        data_or_null<T>(more),
                        source.data_as<T>(),
                        nullptr,
                        data_or_null<A>(mean),
                        rstd.data_as<A>(),
                        data_or_null<T>(result.input),
                        data_or_null<A>(partials[0]),
                        data_or_null<A>(partials[1]),
                        rows,
                        columns,
                        data_or_null<T>(result.update),
                        data_or_null<A>(partials[2]),
                        {}};
      if (result.update.defined()) p.dropout = dropout_of<T>(options.dropout);
      launch_norm_backward<T>(p, threads, w);
    }
    launch_column_fold("norm_fold", fold);
  });
  if (drops && !result.update.defined()) {
    result.update = dropout(result.input, options.dropout->p, options.dropout->stream);
  }
  return result;
}

}  // namespace

void register_norm() {
  cuda_kernel<row_norm_forward> = row_norm_forward_cuda;
  cuda_kernel<row_norm_quantized> = row_norm_quantized_cuda;
  cuda_kernel<row_norm_backward> = row_norm_backward_cuda;
}

}  // namespace tessera::kernels
