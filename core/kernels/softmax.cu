#include <cmath>

#include <tessera/core/factory.h>
#include <tessera/core/kernels/copy.h>
#include <tessera/core/kernels/on_device.h>
#include <tessera/core/kernels/softmax.h>
#include <tessera/core/math.h>
#include <tessera/core/kernels/rows.cuh>

namespace tessera::kernels {
namespace {

// x seen as (outer, n, inner); a block takes one (outer, inner) pair.
struct Rows {
  int64_t outer = 1, n = 1, inner = 1;
  Rows(const Tensor& x, int dim) {
    if (x.dim() == 0) return;
    for (int d = 0; d < dim; ++d) outer *= x.shape()[d];
    n = x.shape()[dim];
    for (int d = dim + 1; d < x.dim(); ++d) inner *= x.shape()[d];
  }
};

template <class T>
__global__ void softmax_kernel(const T* x, T* y, int64_t n, int64_t inner, bool log) {
  using C = Compute<T>;
  TS_REDUCE_SLOT(C, largest_slot);
  TS_REDUCE_SLOT(double, sum_slot);
  const int64_t first = blockIdx.x / inner * n * inner + blockIdx.x % inner;
  C largest = -static_cast<C>(INFINITY);
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    largest = gpu::Larger{}(largest, load<C>(x[first + i * inner]));
  }
  largest = gpu::block_reduce(largest, gpu::Larger{}, -static_cast<C>(INFINITY), largest_slot);
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    sum += static_cast<double>(math::exp(load<C>(x[first + i * inner]) - largest));
  }
  sum = gpu::block_reduce(sum, gpu::Plus{}, 0.0, sum_slot);
  const C log_sum = static_cast<C>(::log(sum));
  const C scale = static_cast<C>(1 / sum);
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const C shifted = load<C>(x[first + i * inner]) - largest;
    y[first + i * inner] = store<T>(log ? shifted - log_sum : math::exp(shifted) * scale);
  }
}

template <class T>
__global__ void softmax_backward_kernel(const T* dy, const T* y, T* dx, int64_t n, int64_t inner,
                                        bool log) {
  using C = Compute<T>;
  TS_REDUCE_SLOT(double, slot);
  const int64_t first = blockIdx.x / inner * n * inner + blockIdx.x % inner;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const C grad = load<C>(dy[first + i * inner]);
    sum += static_cast<double>(log ? grad : grad * load<C>(y[first + i * inner]));
  }
  const C total = static_cast<C>(gpu::block_reduce(sum, gpu::Plus{}, 0.0, slot));
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const C grad = load<C>(dy[first + i * inner]), out = load<C>(y[first + i * inner]);
    dx[first + i * inner] = store<T>(log ? grad - math::exp(out) * total : out * (grad - total));
  }
}

Tensor softmax_cuda(const Tensor& x, int dim, bool log) {
  const Tensor y = raw::empty(x.shape(), x.dtype(), x.device());
  if (x.numel() == 0) return y;
  const Tensor source = contiguous(x);
  const Rows rows(x, dim);
  dispatch_floating(x.dtype(), "softmax", [&]<class T>() {
    gpu::launch({.name = "softmax",
                 .grid = static_cast<unsigned>(rows.outer * rows.inner),
                 .block = row_threads(rows.n)},
                softmax_kernel<T>, source.data_as<T>(), y.data_as<T>(), rows.n, rows.inner, log);
  });
  return y;
}

Tensor softmax_backward_cuda(const Tensor& dy, const Tensor& y, int dim, bool log) {
  const Tensor dx = raw::empty(y.shape(), y.dtype(), y.device());
  if (y.numel() == 0) return dx;
  const Tensor grad = contiguous(dy.dtype() == y.dtype() ? dy : convert(dy, y.dtype()));
  const Tensor out = contiguous(y);
  const Rows rows(y, dim);
  dispatch_floating(y.dtype(), "softmax", [&]<class T>() {
    gpu::launch({.name = "softmax_backward",
                 .grid = static_cast<unsigned>(rows.outer * rows.inner),
                 .block = row_threads(rows.n)},
                softmax_backward_kernel<T>, grad.data_as<T>(), out.data_as<T>(), dx.data_as<T>(),
                rows.n, rows.inner, log);
  });
  return dx;
}

}  // namespace

void register_softmax() {
  cuda_form<softmax> = softmax_cuda;
  cuda_form<softmax_backward> = softmax_backward_cuda;
}

}  // namespace tessera::kernels
