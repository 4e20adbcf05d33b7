#include <cmath>
#include <initializer_list>

#include <tessera/core/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/norm/norm.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/common/strided.cuh>

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

template <class T>
struct NormForward {
  const T* x;                // (rows, C)
  const T* residual;         // (rows, C) or null
  T* sum;                    // (rows, C) where there is a residual
  T* y;                      // (rows, C)
  const Compute<T>* weight;  // (C) or null
  const Compute<T>* bias;    // (C) or null
  Compute<T>* mean;          // (rows), null for rms_norm
  Compute<T>* rstd;          // (rows)
  int64_t rows, C;
  double eps;
};

template <class T>
struct NormBackward {
  const T* dy;               // (rows, C)
  const T* dsum;             // (rows, C) or null
  const T* x;                // (rows, C)
  const Compute<T>* weight;  // (C) or null
  const Compute<T>* mean;    // (rows), null for rms_norm
  const Compute<T>* rstd;    // (rows)
  T* dx;                     // (rows, C) or null
  Compute<T>* dweights;      // (blocks of kNormRows rows, C) or null
  Compute<T>* dbiases;       // (blocks of kNormRows rows, C) or null
  int64_t rows, C;
};

template <class T>
__global__ void __launch_bounds__(kRegisterBlock<gpu::kWarp>)
    register_row_norm_kernel(const NormForward<T> p) {
  using A = Compute<T>;
  using Lanes = InRegisters<T>;
  constexpr int kWidth = 16 / sizeof(T);
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock<gpu::kWarp> + threadIdx.x / gpu::kWarp;
  if (row >= p.rows) return;  // the whole warp
  A values[Lanes::kNumbers];
  double total = 0;
  Lanes::each(p.C, [&](int v, int64_t c) {
    gpu::Vector<T, kWidth> in = gpu::load_vector<kWidth>(p.x + row * p.C + c);
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
    if (p.weight != nullptr) w = gpu::load_vector<kWidth>(p.weight + c);
    if (p.bias != nullptr) b = gpu::load_vector<kWidth>(p.bias + c);
    gpu::Vector<T, kWidth> out;
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) {
      A value = (values[v * kWidth + j] - mean) * rstd;
      if (p.weight != nullptr) value = value * w.values[j];
      if (p.bias != nullptr) value = value + b.values[j];
      out.values[j] = store<T>(value);
    }
    gpu::store_vector(p.y + row * p.C + c, out);
  });
}

// A block walks kNormRows rows, a warp every fourth of them or all threads each; the sums of its
// columns stay in registers and are joined in the order of the warps.
template <class T, int kThreads>
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
  A dweight[kNumbers] = {}, dbias[kNumbers] = {};
  for (int64_t row = begin + group; row < end; row += kRows) {
    const A m = p.mean != nullptr ? p.mean[row] : A(0), r = p.rstd[row];
    A xhats[kNumbers], gs[kNumbers];  // g = dy weight
    double sum = 0, product = 0;      // of g and g xhat
    Lanes::each(p.C, [&](int v, int64_t c) {
      const auto grads = gpu::load_vector<kWidth>(p.dy + row * p.C + c);
      const auto in = gpu::load_vector<kWidth>(p.x + row * p.C + c);
      gpu::Vector<A, kWidth> w;
      if (p.weight != nullptr) w = gpu::load_vector<kWidth>(p.weight + c);
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
    });
  }
  const auto join = [&](const A(&own)[kNumbers], A* result) {
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
      const gpu::Vector<A, N> weight = load_columns<N>(p.weight + c);
      TS_UNROLL
      for (int j = 0; j < N; ++j) values[j] = values[j] * weight.values[j];
    }
    if (p.bias != nullptr) {
      const gpu::Vector<A, N> bias = load_columns<N>(p.bias + c);
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
    const gpu::Vector<A, N> weight = load_columns<N>(p.weight + c);
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

RowNorm row_norm_forward_cuda(const Tensor& x, const Tensor& residual, int64_t columns,
                              const Tensor& weight, const Tensor& bias, double eps, bool center) {
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  const DType compute = compute_dtype(x.dtype());
  RowNorm result;
  result.y = raw::empty(x.shape(), x.dtype(), x.device());
  result.rstd = raw::empty({rows}, compute, x.device());
  if (center) result.mean = raw::empty({rows}, compute, x.device());
  if (residual.defined()) result.sum = raw::empty(x.shape(), x.dtype(), x.device());
  if (rows == 0) return result;
  const Tensor source = contiguous(x), w = in_dtype(weight, compute), b = in_dtype(bias, compute);
  const Tensor other = in_dtype(residual, x.dtype());
  dispatch_floating(x.dtype(), "layer_norm", [&]<class T>() {
    using A = Compute<T>;
    const char* const name = center ? "layer_norm" : "rms_norm";
    const NormForward<T> p{source.data_as<T>(),
                           data_or_null<T>(other),
                           data_or_null<T>(result.sum),
                           result.y.data_as<T>(),
                           data_or_null<A>(w),
                           data_or_null<A>(b),
                           data_or_null<A>(result.mean),
                           result.rstd.data_as<A>(),
                           rows,
                           columns,
                           eps};
    gpu::Traffic traffic{source.numel() * size_of(source.dtype()), 0};
    for (const Tensor* in : {&other, &w, &b}) {
      if (in->defined()) traffic.reads += in->numel() * size_of(in->dtype());
    }
    for (const Tensor* out : {&result.sum, &result.y, &result.mean, &result.rstd}) {
      if (out->defined()) traffic.writes += out->numel() * size_of(out->dtype());
    }
    if (register_threads<T>(columns, {&source, &other, &result.sum, &result.y, &w, &b}) ==
        gpu::kWarp) {
      gpu::launch({.name = name,
                   .grid = gpu::blocks(rows, kRowsOfBlock<gpu::kWarp>),
                   .block = kRegisterBlock<gpu::kWarp>,
                   .traffic = traffic},
                  register_row_norm_kernel<T>, p);
      return;
    }
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

// `threads`: how many keep a row in their registers.
template <class T>
void launch_norm_backward(const NormBackward<T>& p, int threads) {
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
    traffic.reads += (p.dsum != nullptr ? plane : 0) + (p.weight != nullptr ? p.C * kWide : 0);
    traffic.writes = plane;
  }
  const gpu::Traffic whole{traffic.reads, traffic.writes + column_sums};
  if (threads == gpu::kWarp) {
    gpu::launch(
        {.name = kName, .grid = blocks, .block = kRegisterBlock<gpu::kWarp>, .traffic = whole},
        register_row_norm_backward_kernel<T, gpu::kWarp>, p);
    return;
  }
  if (threads == kWideBlock) {
    gpu::launch({.name = kName, .grid = blocks, .block = kWideBlock, .traffic = whole},
                register_row_norm_backward_kernel<T, kWideBlock>, p);
    return;
  }
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
                                        const Tensor& rstd, const bool (&wanted)[3]) {
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  const DType compute = compute_dtype(x.dtype());
  const int64_t blocks = (rows + kNormRows - 1) / kNormRows;
  RowNormGradients result;
  if (wanted[0]) result.input = raw::empty(x.shape(), x.dtype(), x.device());
  Tensor dweights, dbiases;  // (blocks, columns)
  if (wanted[1]) dweights = raw::empty({blocks, columns}, compute, x.device());
  if (wanted[2]) dbiases = raw::empty({blocks, columns}, compute, x.device());
  if (blocks > 0) {
    const Tensor source = contiguous(x), grad = in_dtype(dy, x.dtype());
    const Tensor more = in_dtype(dsum, x.dtype()), w = in_dtype(weight, compute);
    dispatch_floating(x.dtype(), "layer_norm", [&]<class T>() {
      using A = Compute<T>;
      launch_norm_backward<T>(
          {grad.data_as<T>(), data_or_null<T>(more), source.data_as<T>(), data_or_null<A>(w),
           data_or_null<A>(mean), rstd.data_as<A>(), data_or_null<T>(result.input),
           data_or_null<A>(dweights), data_or_null<A>(dbiases), rows, columns},
          register_threads<T>(columns, {&grad, &more, &source, &w, &result.input}));
    });
  }
  if (wanted[1]) result.weight = sum(dweights, {0}, false, compute);
  if (wanted[2]) result.bias = sum(dbiases, {0}, false, compute);
  return result;
}

}  // namespace

void register_norm() {
  cuda_kernel<row_norm_forward> = row_norm_forward_cuda;
  cuda_kernel<row_norm_backward> = row_norm_backward_cuda;
}

}  // namespace tessera::kernels
