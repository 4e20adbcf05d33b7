// Rows of up to 1024 numbers (512 of f64) stay in a warp's registers, longer ones in shared memory
// while they fit: read once, written once. Along another dimension neighbouring columns are
// neighbouring threads.
#include <cmath>
#include <type_traits>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/softmax/softmax.h>
#include <tessera/core/math.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/common/strided.cuh>
#include <tessera/core/kernels/common/vector_lanes.cuh>

namespace tessera::kernels {
namespace {

constexpr int kRowsOfBlock = 4;  // a warp each
constexpr int kColumns = 32, kLines = 8;

// x seen as (outer, n, inner).
struct Rows {
  int64_t outer = 1, n = 1, inner = 1;
  Rows(const Tensor& x, int dim) {
    if (x.dim() == 0) return;
    for (int d = 0; d < dim; ++d) outer *= x.shape()[d];
    n = x.shape()[dim];
    for (int d = dim + 1; d < x.dim(); ++d) inner *= x.shape()[d];
  }
};

// What turns numbers into results once the row's sums are known.
template <class T>
struct Softmax {
  using C = Compute<T>;
  using Number = ExpNumber<T>;
  C largest, log_sum, scale;
  bool log;
  TS_DEVICE Softmax(const ExpSum<C, Number>& row, bool log)
      : largest(row.largest),
        log_sum(static_cast<C>(::log(row.sum))),
        scale(static_cast<C>(1 / row.sum)),
        log(log) {}
  TS_DEVICE C operator()(C x) const {
    const C shifted = x - largest;
    return log ? shifted - log_sum : exponential<Number>(shifted) * scale;
  }
  template <int N>
  TS_DEVICE gpu::Vector<T, N> operator()(const C (&x)[N]) const {
    C values[N];
    TS_UNROLL
    for (int j = 0; j < N; ++j) values[j] = (*this)(x[j]);
    return pack<T>(values);
  }
};

// Of gradients and results that lie side by side.
template <class T, int N>
struct GradientTerms {
  using C = Compute<T>;
  C grads[N], outs[N];
  TS_DEVICE GradientTerms(const gpu::Vector<T, N>& grad, const gpu::Vector<T, N>& out) {
    unpack(grad, grads);
    unpack(out, outs);
  }
  // Their part of the row's sum. Numbers of 16 bits are added up in C, as ExpSum has it.
  TS_DEVICE double sum(bool log) const {
    using A = std::conditional_t<sizeof(T) == 2, C, double>;
    A part = 0;
    TS_UNROLL
    for (int j = 0; j < N; ++j) part += static_cast<A>(log ? grads[j] : grads[j] * outs[j]);
    return static_cast<double>(part);
  }
  TS_DEVICE gpu::Vector<T, N> of_input(C total, bool log) const {
    C values[N];
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      values[j] = log ? grads[j] - exponential<ExpNumber<T>>(outs[j]) * total
                      : outs[j] * (grads[j] - total);
    }
    return pack<T>(values);
  }
};

// ---- Short rows: a warp each --------------------------------------------------------------------

template <class T, int kWidth>
__global__ void __launch_bounds__(kRowsOfBlock* gpu::kWarp)
    short_softmax_kernel(const T* x, T* y, int64_t rows, int64_t n, bool log) {
  using C = Compute<T>;
  using Lanes = InRegisters<T, gpu::kWarp, kWidth>;
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / gpu::kWarp;
  if (row >= rows) return;  // the whole warp
  C values[Lanes::kVectors][kWidth];
  ExpSum<C, ExpNumber<T>> sums;
  Lanes::each(n, [&](int v, int64_t c) {
    unpack(gpu::load_vector<kWidth>(x + row * n + c), values[v]);
    sums.add(values[v]);
  });
  sums.template join<gpu::kWarp>(nullptr, nullptr);
  const Softmax<T> result(sums, log);
  Lanes::each(n, [&](int v, int64_t c) { gpu::store_vector(y + row * n + c, result(values[v])); });
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kRowsOfBlock* gpu::kWarp)
    short_softmax_backward_kernel(const T* dy, const T* y, T* dx, int64_t rows, int64_t n,
                                  bool log) {
  using C = Compute<T>;
  using Lanes = InRegisters<T, gpu::kWarp, kWidth>;
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / gpu::kWarp;
  if (row >= rows) return;  // the whole warp
  gpu::Vector<T, kWidth> grads[Lanes::kVectors], outs[Lanes::kVectors];
  double sum = 0;
  Lanes::each(n, [&](int v, int64_t c) {
    grads[v] = gpu::load_vector<kWidth>(dy + row * n + c);
    outs[v] = gpu::load_vector<kWidth>(y + row * n + c);
    sum += GradientTerms(grads[v], outs[v]).sum(log);
  });
  const C total = static_cast<C>(gpu::warp_reduce(sum, gpu::Plus{}));
  Lanes::each(n, [&](int v, int64_t c) {
    gpu::store_vector(dx + row * n + c, GradientTerms(grads[v], outs[v]).of_input(total, log));
  });
}

// ---- Long rows: a block each --------------------------------------------------------------------

// `staged`: the row fits into shared memory; else the second walk reads memory again.
template <class T, int kWidth>
__global__ void __launch_bounds__(1024)
    row_softmax_kernel(const T* x, T* y, int64_t n, bool log, bool staged) {
  using C = Compute<T>;
  TS_REDUCE_SLOT(C, largest_slot);
  TS_REDUCE_SLOT(double, sum_slot);
  x += blockIdx.x * n;
  y += blockIdx.x * n;
  const RowWalk<T, kWidth> walk(x, n);
  const StagedRow<T, kWidth> row(x, walk, gpu::dynamic_shared<T>(), staged);
  ExpSum<C, ExpNumber<T>> sums = exp_sum<ExpNumber<T>>(walk, row);
  sums.template join<0>(largest_slot, sum_slot);
  const Softmax<T> result(sums, log);
  walk.each([&]<int N>(int64_t c) {
    C values[N];
    unpack(row.template again<N>(c), values);
    gpu::store_vector(y + c, result(values));
  });
}

// `stage`: numbers between the two stages, 0 where they do not fit.
template <class T, int kWidth>
__global__ void __launch_bounds__(1024)
    row_softmax_backward_kernel(const T* dy, const T* y, T* dx, int64_t n, bool log,
                                int64_t stage) {
  using C = Compute<T>;
  TS_REDUCE_SLOT(double, slot);
  T* const stages = gpu::dynamic_shared<T>();
  dy += blockIdx.x * n;
  y += blockIdx.x * n;
  dx += blockIdx.x * n;
  const RowWalk<T, kWidth> walk(y, n);
  const StagedRow<T, kWidth> grad_row(dy, walk, stages, stage > 0);
  const StagedRow<T, kWidth> out_row(y, walk, stages + stage, stage > 0);
  double sum = 0;
  walk.each([&]<int N>(int64_t c) {
    const gpu::Vector<T, N> grads = grad_row.template first<N>(c);
    const gpu::Vector<T, N> outs = out_row.template first<N>(c);
    sum += GradientTerms(grads, outs).sum(log);
  });
  const C total = static_cast<C>(gpu::block_reduce(sum, gpu::Plus{}, 0.0, slot));
  walk.each([&]<int N>(int64_t c) {
    const gpu::Vector<T, N> grads = grad_row.template again<N>(c);
    const gpu::Vector<T, N> outs = out_row.template again<N>(c);
    gpu::store_vector(dx + c, GradientTerms(grads, outs).of_input(total, log));
  });
}

// ---- Another dimension: kColumns columns a block, each walked by kLines threads -----------------

template <class T>
__global__ void __launch_bounds__(kColumns* kLines)
    column_softmax_kernel(const T* x, T* y, int64_t n, int64_t inner, int64_t tiles, bool log) {
  using C = Compute<T>;
  TS_SHARED(C, largest, kColumns * kLines);
  TS_SHARED(double, sums, kColumns* kLines);
  const int column = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const int64_t at = blockIdx.x % tiles * kColumns + column;
  const int64_t first = blockIdx.x / tiles * n * inner + at;
  ExpSum<C, ExpNumber<T>> own;
  if (at < inner) {
    for (int64_t i = line; i < n; i += kLines) {
      const C value[1] = {load<C>(x[first + i * inner])};
      own.add(value);
    }
  }
  largest[line * kColumns + column] = own.largest;
  sums[line * kColumns + column] = own.sum;
  __syncthreads();
  if (at >= inner) return;
  ExpSum<C, ExpNumber<T>> all;
  for (int l = 0; l < kLines; ++l) {
    all.largest = gpu::Larger{}(all.largest, largest[l * kColumns + column]);
  }
  for (int l = 0; l < kLines; ++l) {
    ExpSum<C, ExpNumber<T>> part;
    part.largest = largest[l * kColumns + column];
    part.sum = sums[l * kColumns + column];
    part.raise(all.largest);
    all.sum += part.sum;
  }
  const Softmax<T> result(all, log);
  for (int64_t i = line; i < n; i += kLines) {
    y[first + i * inner] = store<T>(result(load<C>(x[first + i * inner])));
  }
}

template <class T>
__global__ void __launch_bounds__(kColumns* kLines)
    column_softmax_backward_kernel(const T* dy, const T* y, T* dx, int64_t n, int64_t inner,
                                   int64_t tiles, bool log) {
  using C = Compute<T>;
  TS_SHARED(double, sums, kColumns* kLines);
  const int column = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const int64_t at = blockIdx.x % tiles * kColumns + column;
  const int64_t first = blockIdx.x / tiles * n * inner + at;
  const auto terms = [&](int64_t k) {
    return GradientTerms(gpu::load_vector<1>(dy + k), gpu::load_vector<1>(y + k));
  };
  double sum = 0;
  if (at < inner) {
    for (int64_t i = line; i < n; i += kLines) sum += terms(first + i * inner).sum(log);
  }
  sums[line * kColumns + column] = sum;
  __syncthreads();
  if (at >= inner) return;
  sum = 0;
  for (int l = 0; l < kLines; ++l) sum += sums[l * kColumns + column];
  const C total = static_cast<C>(sum);
  for (int64_t i = line; i < n; i += kLines) {
    const int64_t k = first + i * inner;
    gpu::store_vector(dx + k, terms(k).of_input(total, log));
  }
}

// ---- Launches -----------------------------------------------------------------------------------

Tensor softmax_cuda(const Tensor& x, int dim, bool log) {
  const Tensor y = raw::empty(x.shape(), x.dtype(), x.device());
  if (x.numel() == 0) return y;
  const Tensor source = contiguous(x);
  const Rows rows(x, dim);
  constexpr const char* kName = "softmax";
  dispatch_floating(x.dtype(), kName, [&]<class T>() {
    constexpr int kWidth = kRowVector<T>;
    const int64_t plane = x.numel() * static_cast<int64_t>(sizeof(T));
    const gpu::Traffic traffic{plane, plane};
    const T* const in = source.data_as<T>();
    T* const out = y.data_as<T>();
    if (rows.inner > 1) {
      const int64_t tiles = (rows.inner + kColumns - 1) / kColumns;
      gpu::launch({.name = kName,
                   .grid = static_cast<unsigned>(rows.outer * tiles),
                   .block = dim3(kColumns, kLines),
                   .traffic = traffic},
                  column_softmax_kernel<T>, in, out, rows.n, rows.inner, tiles, log);
      return;
    }
    if (rows.n <= InRegisters<T>::kMost) {
      const bool vectors = rows.n % kWidth == 0 && is_aligned(in) && is_aligned(out);
      gpu::launch({.name = kName,
                   .grid = gpu::blocks(rows.outer, kRowsOfBlock),
                   .block = kRowsOfBlock * gpu::kWarp,
                   .traffic = traffic},
                  vectors ? short_softmax_kernel<T, kWidth> : short_softmax_kernel<T, 1>, in, out,
                  rows.outer, rows.n, log);
      return;
    }
    const bool vectors = begin_alike<T>({in, out}, {});
    const bool staged = stage_bytes<T>(rows.n) <= kMostStaged;
    gpu::launch({.name = kName,
                 .grid = static_cast<unsigned>(rows.outer),
                 .block = walk_threads(rows.n, vectors ? kWidth : 1),
                 .shared_bytes = staged ? stage_bytes<T>(rows.n) : 0,
                 .traffic = traffic},
                vectors ? row_softmax_kernel<T, kWidth> : row_softmax_kernel<T, 1>, in, out, rows.n,
                log, staged);
  });
  return y;
}

Tensor softmax_backward_cuda(const Tensor& dy, const Tensor& y, int dim, bool log) {
  const Tensor dx = raw::empty(y.shape(), y.dtype(), y.device());
  if (y.numel() == 0) return dx;
  const Tensor grad = contiguous(dy.dtype() == y.dtype() ? dy : convert(dy, y.dtype()));
  const Tensor out = contiguous(y);
  const Rows rows(y, dim);
  constexpr const char* kName = "softmax_backward";
  dispatch_floating(y.dtype(), kName, [&]<class T>() {
    constexpr int kWidth = kRowVector<T>;
    const int64_t plane = y.numel() * static_cast<int64_t>(sizeof(T));
    const gpu::Traffic traffic{2 * plane, plane};
    const T *const g = grad.data_as<T>(), *const o = out.data_as<T>();
    T* const result = dx.data_as<T>();
    if (rows.inner > 1) {
      const int64_t tiles = (rows.inner + kColumns - 1) / kColumns;
      gpu::launch({.name = kName,
                   .grid = static_cast<unsigned>(rows.outer * tiles),
                   .block = dim3(kColumns, kLines),
                   .traffic = traffic},
                  column_softmax_backward_kernel<T>, g, o, result, rows.n, rows.inner, tiles, log);
      return;
    }
    if (rows.n <= InRegisters<T>::kMost) {
      const bool vectors =
          rows.n % kWidth == 0 && is_aligned(g) && is_aligned(o) && is_aligned(result);
      gpu::launch(
          {.name = kName,
           .grid = gpu::blocks(rows.outer, kRowsOfBlock),
           .block = kRowsOfBlock * gpu::kWarp,
           .traffic = traffic},
          vectors ? short_softmax_backward_kernel<T, kWidth> : short_softmax_backward_kernel<T, 1>,
          g, o, result, rows.outer, rows.n, log);
      return;
    }
    const bool vectors = begin_alike<T>({g, o, result}, {});
    const size_t bytes = stage_bytes<T>(rows.n);
    const bool staged = 2 * bytes <= kMostStaged;
    gpu::launch(
        {.name = kName,
         .grid = static_cast<unsigned>(rows.outer),
         .block = walk_threads(rows.n, vectors ? kWidth : 1),
         .shared_bytes = staged ? 2 * bytes : 0,
         .traffic = traffic},
        vectors ? row_softmax_backward_kernel<T, kWidth> : row_softmax_backward_kernel<T, 1>, g, o,
        result, rows.n, log, staged ? static_cast<int64_t>(bytes / sizeof(T)) : int64_t{0});
  });
  return dx;
}

}  // namespace

void register_softmax() {
  cuda_kernel<softmax> = softmax_cuda;
  cuda_kernel<softmax_backward> = softmax_backward_cuda;
}

}  // namespace tessera::kernels
