#include <cmath>
#include <initializer_list>

#include <tessera/core/factory.h>
#include <tessera/core/kernels/copy.h>
#include <tessera/core/kernels/norm.h>
#include <tessera/core/kernels/on_device.h>
#include <tessera/core/kernels/reduce.h>
#include <tessera/core/kernels/rows.cuh>
#include <tessera/core/kernels/strided.cuh>

namespace tessera::kernels {
namespace {

DType compute_dtype(DType dtype) { return dtype == kF64 ? kF64 : kF32; }

// Rows of up to 1024 numbers (512 of f64) whose vectors are aligned stay in the registers of a
// warp: read and written once, 16 bytes at a time. Longer ones take a block each; forward keeps
// them in shared memory, backward in the registers of kWideBlock threads up to 8192 numbers (4096),
// and reads those beyond, or without alignment, again from the caches.
constexpr int kWideBlock = 256;
template <int kThreads>
inline constexpr int kRowsOfBlock = kThreads == gpu::kWarp ? 4 : 1;
template <int kThreads>
inline constexpr int kRegisterBlock = kRowsOfBlock<kThreads>* kThreads;

template <class T>
__global__ void __launch_bounds__(kRegisterBlock<gpu::kWarp>)
    register_row_norm_kernel(const T* x,                // (rows, C)
                             const T* residual,         // (rows, C) or null
                             T* sum,                    // (rows, C) where there is a residual
                             T* y,                      // (rows, C)
                             const Compute<T>* weight,  // (C) or null
                             const Compute<T>* bias,    // (C) or null
                             Compute<T>* mean_out,      // (rows), null for rms_norm
                             Compute<T>* rstd_out,      // (rows)
                             int64_t rows, int64_t C, double eps) {
  using A = Compute<T>;
  using Lanes = InRegisters<T>;
  constexpr int kWidth = 16 / sizeof(T);
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock<gpu::kWarp> + threadIdx.x / gpu::kWarp;
  if (row >= rows) return;  // the whole warp
  A values[Lanes::kNumbers];
  double total = 0;
  Lanes::each(C, [&](int v, int64_t c) {
    gpu::Vector<T, kWidth> in = gpu::load_vector<kWidth>(x + row * C + c);
    if (residual != nullptr) {
      const auto other = gpu::load_vector<kWidth>(residual + row * C + c);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        in.values[j] = store<T>(load<A>(in.values[j]) + load<A>(other.values[j]));
      }
      gpu::store_vector(sum + row * C + c, in);
    }
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) {
      const A value = load<A>(in.values[j]);
      values[v * kWidth + j] = value;
      total += static_cast<double>(value);
    }
  });
  A mean = 0;
  if (mean_out != nullptr) {
    mean = static_cast<A>(gpu::warp_reduce(total, gpu::Plus{}) / static_cast<double>(C));
  }
  double squares = 0;
  Lanes::each(C, [&](int v, int64_t) {
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) {
      const A deviation = values[v * kWidth + j] - mean;
      squares += static_cast<double>(deviation * deviation);
    }
  });
  squares = gpu::warp_reduce(squares, gpu::Plus{});
  const A rstd = static_cast<A>(1 / ::sqrt(squares / static_cast<double>(C) + eps));
  if (threadIdx.x % gpu::kWarp == 0) {
    if (mean_out != nullptr) mean_out[row] = mean;
    rstd_out[row] = rstd;
  }
  Lanes::each(C, [&](int v, int64_t c) {
    gpu::Vector<A, kWidth> w, b;
    if (weight != nullptr) w = gpu::load_vector<kWidth>(weight + c);
    if (bias != nullptr) b = gpu::load_vector<kWidth>(bias + c);
    gpu::Vector<T, kWidth> out;
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) {
      A value = (values[v * kWidth + j] - mean) * rstd;
      if (weight != nullptr) value = value * w.values[j];
      if (bias != nullptr) value = value + b.values[j];
      out.values[j] = store<T>(value);
    }
    gpu::store_vector(y + row * C + c, out);
  });
}

// A block walks kNormRows rows, a warp every fourth of them or all threads each; the sums of its
// columns stay in registers and are joined in the order of the warps.
template <class T, int kThreads>
__global__ void __launch_bounds__(kRegisterBlock<kThreads>)
    register_row_norm_backward_kernel(const T* dy,               // (rows, C)
                                      const T* dsum,             // (rows, C) or null
                                      const T* x,                // (rows, C)
                                      const Compute<T>* weight,  // (C) or null
                                      const Compute<T>* mean,    // (rows), null for rms_norm
                                      const Compute<T>* rstd,    // (rows)
                                      T* dx,                     // (rows, C) or null
                                      Compute<T>* dweights,      // (blocks, C) or null
                                      Compute<T>* dbiases,       // (blocks, C) or null
                                      int64_t rows, int64_t C) {
  using A = Compute<T>;
  using Lanes = InRegisters<T, kThreads>;
  constexpr int kWidth = 16 / sizeof(T), kNumbers = Lanes::kNumbers;
  constexpr int kRows = kRowsOfBlock<kThreads>;
  TS_SHARED(A, joined, kRows > 1 ? Lanes::kMost : 1);
  TS_REDUCE_SLOT(double, slot);
  const int group = static_cast<int>(threadIdx.x) / kThreads;
  const int64_t begin = int64_t{blockIdx.x} * kNormRows;
  const int64_t end = begin + kNormRows < rows ? begin + kNormRows : rows;
  A dweight[kNumbers] = {}, dbias[kNumbers] = {};
  for (int64_t row = begin + group; row < end; row += kRows) {
    const A m = mean != nullptr ? mean[row] : A(0), r = rstd[row];
    A xhats[kNumbers], gs[kNumbers];  // g = dy weight
    double sum = 0, product = 0;      // of g and g xhat
    Lanes::each(C, [&](int v, int64_t c) {
      const auto grads = gpu::load_vector<kWidth>(dy + row * C + c);
      const auto in = gpu::load_vector<kWidth>(x + row * C + c);
      gpu::Vector<A, kWidth> w;
      if (weight != nullptr) w = gpu::load_vector<kWidth>(weight + c);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        const int i = v * kWidth + j;
        const A grad = load<A>(grads.values[j]);
        xhats[i] = (load<A>(in.values[j]) - m) * r;
        gs[i] = weight != nullptr ? grad * w.values[j] : grad;
        sum += static_cast<double>(gs[i]);
        product += static_cast<double>(gs[i] * xhats[i]);
        dweight[i] += grad * xhats[i];
        dbias[i] += grad;
      }
    });
    if (dx == nullptr) continue;
    A mean_g = 0;
    if (mean != nullptr) {
      mean_g = static_cast<A>(row_reduce<kThreads>(sum, gpu::Plus{}, 0.0, slot) /
                              static_cast<double>(C));
    }
    const A mean_product = static_cast<A>(row_reduce<kThreads>(product, gpu::Plus{}, 0.0, slot) /
                                          static_cast<double>(C));
    Lanes::each(C, [&](int v, int64_t c) {
      gpu::Vector<T, kWidth> more, out;
      if (dsum != nullptr) more = gpu::load_vector<kWidth>(dsum + row * C + c);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        const int i = v * kWidth + j;
        A value = (gs[i] - mean_g - xhats[i] * mean_product) * r;
        if (dsum != nullptr) value = value + load<A>(more.values[j]);
        out.values[j] = store<T>(value);
      }
      gpu::store_vector(dx + row * C + c, out);
    });
  }
  const auto join = [&](const A(&own)[kNumbers], A* result) {
    if (result == nullptr) return;  // all threads
    for (int turn = 0; turn < kRows; ++turn) {
      if (group == turn) {
        Lanes::each(C, [&](int v, int64_t c) {
          TS_UNROLL
          for (int j = 0; j < kWidth; ++j) {
            const A before = turn > 0 ? joined[c + j] : A(0);
            const A value = before + own[v * kWidth + j];
            if (turn + 1 < kRows) {
              joined[c + j] = value;
            } else {
              result[blockIdx.x * C + c + j] = value;
            }
          }
        });
      }
      __syncthreads();
    }
  };
  join(dweight, dweights);
  join(dbias, dbiases);
}

// One block a row: residual added and written, mean, variance of the deviations, result. `staged`:
// the row stays in shared memory; else it is read again.
template <class T, int kWidth>
__global__ void __launch_bounds__(1024)
    row_norm_kernel(const T* x,                // (rows, C)
                    const T* residual,         // (rows, C) or null
                    T* sum,                    // (rows, C) where there is a residual
                    T* y,                      // (rows, C)
                    const Compute<T>* weight,  // (C) or null
                    const Compute<T>* bias,    // (C) or null
                    Compute<T>* mean_out,      // (rows), null for rms_norm
                    Compute<T>* rstd_out,      // (rows)
                    int64_t C, double eps, bool staged) {
  using A = Compute<T>;
  TS_REDUCE_SLOT(double, slot);
  T* const stage = gpu::dynamic_shared<T>();
  const int64_t row = blockIdx.x;
  x += row * C;
  y += row * C;
  if (residual != nullptr) {
    residual += row * C;
    sum += row * C;
  }
  const RowWalk<T, kWidth> walk(x, C);
  // Each thread reads again what it read or wrote: no barrier between.
  const T* const normalised = staged ? stage + walk.skew : residual != nullptr ? sum : x;
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
    if (staged) gpu::store_vector(stage + walk.skew + c, in);
    TS_UNROLL
    for (int j = 0; j < N; ++j) total += static_cast<double>(load<A>(in.values[j]));
  });
  A mean = 0;
  if (mean_out != nullptr) {
    mean =
        static_cast<A>(gpu::block_reduce(total, gpu::Plus{}, 0.0, slot) / static_cast<double>(C));
  }
  double squares = 0;
  walk.each([&]<int N>(int64_t c) {
    const gpu::Vector<T, N> in = gpu::load_vector<N>(normalised + c);
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      const A deviation = load<A>(in.values[j]) - mean;
      squares += static_cast<double>(deviation * deviation);
    }
  });
  squares = gpu::block_reduce(squares, gpu::Plus{}, 0.0, slot);
  const A rstd = static_cast<A>(1 / ::sqrt(squares / static_cast<double>(C) + eps));
  if (threadIdx.x == 0) {
    if (mean_out != nullptr) mean_out[row] = mean;
    rstd_out[row] = rstd;
  }
  walk.each([&]<int N>(int64_t c) {
    gpu::Vector<T, N> vector = gpu::load_vector<N>(normalised + c);
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      A value = (load<A>(vector.values[j]) - mean) * rstd;
      if (weight != nullptr) value = value * weight[c + j];
      if (bias != nullptr) value = value + bias[c + j];
      vector.values[j] = store<T>(value);
    }
    gpu::store_vector(y + c, vector);
  });
}

// A block walks kNormRows rows: their input gradients, and its partial column sums (dweight,
// dbias), which stay in the block's row of `partials` and belong to one thread each.
template <class T>
__global__ void row_norm_backward_kernel(const T* dy,               // (rows, C)
                                         const T* dsum,             // (rows, C) or null
                                         const T* x,                // (rows, C)
                                         const Compute<T>* weight,  // (C) or null
                                         const Compute<T>* mean,    // (rows), null for rms_norm
                                         const Compute<T>* rstd,    // (rows)
                                         T* dx,                     // (rows, C) or null
                                         Compute<T>* dweights,      // (blocks, C) or null
                                         Compute<T>* dbiases,       // (blocks, C) or null
                                         int64_t rows, int64_t C) {
  using A = Compute<T>;
  TS_REDUCE_SLOT(double, slot);
  const int64_t begin = int64_t{blockIdx.x} * kNormRows;
  const int64_t end = begin + kNormRows < rows ? begin + kNormRows : rows;
  for (int64_t i = threadIdx.x; i < C; i += blockDim.x) {
    if (dweights != nullptr) dweights[blockIdx.x * C + i] = 0;
    if (dbiases != nullptr) dbiases[blockIdx.x * C + i] = 0;
  }
  for (int64_t row = begin; row < end; ++row) {
    const A m = mean != nullptr ? mean[row] : A(0), r = rstd[row];
    double sum = 0, product = 0;  // of g and g xhat, with g = dy weight
    for (int64_t i = threadIdx.x; i < C; i += blockDim.x) {
      const A grad = load<A>(dy[row * C + i]);
      const A xhat = (load<A>(x[row * C + i]) - m) * r;
      const A g = weight != nullptr ? grad * weight[i] : grad;
      sum += static_cast<double>(g);
      product += static_cast<double>(g * xhat);
      if (dweights != nullptr) dweights[blockIdx.x * C + i] += grad * xhat;
      if (dbiases != nullptr) dbiases[blockIdx.x * C + i] += grad;
    }
    if (dx == nullptr) continue;
    A mean_g = 0;
    if (mean != nullptr) {
      mean_g =
          static_cast<A>(gpu::block_reduce(sum, gpu::Plus{}, 0.0, slot) / static_cast<double>(C));
    }
    const A mean_product =
        static_cast<A>(gpu::block_reduce(product, gpu::Plus{}, 0.0, slot) / static_cast<double>(C));
    for (int64_t i = threadIdx.x; i < C; i += blockDim.x) {
      const A xhat = (load<A>(x[row * C + i]) - m) * r;
      const A g = load<A>(dy[row * C + i]) * (weight != nullptr ? weight[i] : A(1));
      A value = (g - mean_g - xhat * mean_product) * r;
      if (dsum != nullptr) value = value + load<A>(dsum[row * C + i]);
      dx[row * C + i] = store<T>(value);
    }
  }
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
    if (register_threads<T>(columns, {&source, &other, &result.sum, &result.y, &w, &b}) ==
        gpu::kWarp) {
      gpu::launch({.name = name,
                   .grid = gpu::blocks(rows, kRowsOfBlock<gpu::kWarp>),
                   .block = kRegisterBlock<gpu::kWarp>},
                  register_row_norm_kernel<T>, source.data_as<T>(), data_or_null<T>(other),
                  data_or_null<T>(result.sum), result.y.data_as<T>(), data_or_null<A>(w),
                  data_or_null<A>(b), data_or_null<A>(result.mean), result.rstd.data_as<A>(), rows,
                  columns, eps);
      return;
    }
    constexpr int kWidth = 16 / sizeof(T);
    const T *const in = source.data_as<T>(), *const more = data_or_null<T>(other);
    const T* const out = result.y.data_as<T>();
    const bool vectors = more == nullptr
                             ? begin_alike<T>({in, out}, {})
                             : begin_alike<T>({in, out, more, result.sum.data_as<T>()}, {});
    const bool staged = stage_bytes<T>(columns) <= kMostStaged;
    gpu::launch({.name = name,
                 .grid = static_cast<unsigned>(rows),
                 .block = walk_threads(columns, vectors ? kWidth : 1),
                 .shared_bytes = staged ? stage_bytes<T>(columns) : 0},
                vectors ? row_norm_kernel<T, kWidth> : row_norm_kernel<T, 1>, in, more,
                data_or_null<T>(result.sum), result.y.data_as<T>(), data_or_null<A>(w),
                data_or_null<A>(b), data_or_null<A>(result.mean), result.rstd.data_as<A>(), columns,
                eps, staged);
  });
  return result;
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
      const int threads = register_threads<T>(columns, {&grad, &more, &source, &w, &result.input});
      const bool warps = threads == gpu::kWarp, wide = threads == kWideBlock;
      gpu::launch({.name = "norm_backward",
                   .grid = static_cast<unsigned>(blocks),
                   .block = warps  ? dim3(kRegisterBlock<gpu::kWarp>)
                            : wide ? dim3(kWideBlock)
                                   : dim3(row_threads(columns))},
                  warps  ? register_row_norm_backward_kernel<T, gpu::kWarp>
                  : wide ? register_row_norm_backward_kernel<T, kWideBlock>
                         : row_norm_backward_kernel<T>,
                  grad.data_as<T>(), data_or_null<T>(more), source.data_as<T>(), data_or_null<A>(w),
                  data_or_null<A>(mean), rstd.data_as<A>(), data_or_null<T>(result.input),
                  data_or_null<A>(dweights), data_or_null<A>(dbiases), rows, columns);
    });
  }
  if (wanted[1]) result.weight = sum(dweights, {0}, false, compute);
  if (wanted[2]) result.bias = sum(dbiases, {0}, false, compute);
  return result;
}

}  // namespace

void register_norm() {
  cuda_form<row_norm_forward> = row_norm_forward_cuda;
  cuda_form<row_norm_backward> = row_norm_backward_cuda;
}

}  // namespace tessera::kernels
