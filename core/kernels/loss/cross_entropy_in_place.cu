// Loss and gradient of rows of logits in one launch, the gradient over the logits: a row stays in
// shared memory between its two walks, so that it is read from memory once and written once.
#include <tessera/core/kernels/loss/cross_entropy.h>

#include <cmath>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/math.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {
namespace {

// One block a row. `staged`: the row fits into shared memory; else it is read again.
template <class T, int kWidth>
__global__ void __launch_bounds__(1024)
    in_place_kernel(T* logits,               // (N, V), rows `stride` apart
                    const int64_t* targets,  // (N)
                    const double* divisor,   // one number, or null for 1
                    double* losses,          // (N)
                    int64_t stride, int64_t V, int64_t ignore_index, bool staged) {
  using C = Compute<T>;
  using Number = ExpNumber<T>;
  // A comparison for each number, and not for each vector: a second exponential of f64 would not
  // fit into the registers.
  constexpr bool kByNumber = kWidth == 1;
  TS_REDUCE_SLOT(C, largest_slot);
  TS_REDUCE_SLOT(double, sum_slot);
  const int64_t target = targets[blockIdx.x];
  T* const x = logits + blockIdx.x * stride;
  const RowWalk<T, kWidth> walk(x, V);
  if (target == ignore_index) {  // the whole block
    walk.each([&]<int N>(int64_t c) {
      gpu::Vector<T, N> zeros;
      TS_UNROLL
      for (int j = 0; j < N; ++j) zeros.values[j] = store<T>(C(0));
      gpu::store_vector(x + c, zeros);
    });
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    return;
  }
  const StagedRow<T, kWidth> row(x, walk, gpu::dynamic_shared<T>(), staged);
  ExpSum<C, Number> sums = exp_sum<Number>(walk, row);
  const C at_target = load<C>(x[target]);  // before the barriers: it is overwritten after them
  sums.template join<0>(largest_slot, sum_slot);
  const C largest = sums.largest;
  if (threadIdx.x == 0) {
    losses[blockIdx.x] =
        (static_cast<double>(largest) - static_cast<double>(at_target)) + ::log(sums.sum);
  }
  const double scale = divisor != nullptr ? 1 / *divisor : 1.0;
  const C a = static_cast<C>(scale / sums.sum), hard = static_cast<C>(scale);
  walk.each([&]<int N>(int64_t c) {
    gpu::Vector<T, N> vector = row.template again<N>(c);
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      C value = a * exponential<Number>(load<C>(vector.values[j]) - largest);
      if (kByNumber && c + j == target) value = value - hard;
      vector.values[j] = store<T>(value);
    }
    gpu::store_vector(x + c, vector);
    if (!kByNumber && target >= c && target < c + N) {  // after the same thread's vector
      x[target] = store<T>(a * exponential<Number>(at_target - largest) - hard);
    }
  });
}

void cross_entropy_in_place_cuda(const Tensor& logits, const Tensor& targets, int64_t ignore_index,
                                 const Tensor& divisor, const Tensor& losses) {
  const int64_t N = logits.size(0), V = logits.size(1);
  if (N == 0 || V == 0) return;
  dispatch_floating(logits.dtype(), "cross_entropy", [&]<class T>() {
    constexpr int kWidth = kRowVector<T>;
    const size_t bytes = stage_bytes<T>(V);
    const bool staged = bytes <= kMostStaged;
    // Rows that are ignored are written alone.
    const int64_t plane = N * V * static_cast<int64_t>(sizeof(T));
    gpu::launch({.name = "cross_entropy",
                 .grid = static_cast<unsigned>(N),
                 .block = walk_threads(V, kWidth),
                 .shared_bytes = staged ? bytes : 0,
                 .traffic = {plane + N * 8 + (divisor.defined() ? 8 : 0), plane + N * 8, true}},
                in_place_kernel<T, kWidth>, logits.data_as<T>(), targets.data_as<int64_t>(),
                divisor.defined() ? divisor.data_as<double>() : nullptr, losses.data_as<double>(),
                logits.stride(0), V, ignore_index, staged);
  });
  logits.bump_version();
}

// A block walks every gridDim.x-th row.
template <class T>
__global__ void __launch_bounds__(256)
    scale_unless_one_kernel(T* rows, int64_t N, int64_t stride, int64_t V,
                            const Compute<T>* factor) {
  using C = Compute<T>;
  const C by = *factor;
  if (by == C(1)) return;
  for (int64_t n = blockIdx.x; n < N; n += gridDim.x) {
    T* const x = rows + n * stride;
    RowWalk<T, 16 / sizeof(T)>(x, V).each([&]<int kCount>(int64_t c) {
      gpu::Vector<T, kCount> vector = gpu::load_vector<kCount>(x + c);
      TS_UNROLL
      for (int j = 0; j < kCount; ++j) {
        vector.values[j] = store<T>(load<C>(vector.values[j]) * by);
      }
      gpu::store_vector(x + c, vector);
    });
  }
}

void scale_unless_one_cuda(const Tensor& x, const Tensor& factor) {
  const int64_t N = x.size(0), V = x.size(1);
  if (N == 0 || V == 0) return;
  constexpr int64_t kMostBlocks = 2112;  // cheap to start where there is nothing to do
  dispatch_floating(x.dtype(), "cross_entropy", [&]<class T>() {
    const int64_t plane = N * V * static_cast<int64_t>(sizeof(T));  // nothing where it is 1
    gpu::launch({.name = "cross_entropy",
                 .grid = static_cast<unsigned>(N < kMostBlocks ? N : kMostBlocks),
                 .block = 256,
                 .traffic = {plane + size_of(dtype_of<Compute<T>>), plane, true}},
                scale_unless_one_kernel<T>, x.data_as<T>(), N, x.stride(0), V,
                factor.data_as<Compute<T>>());
  });
}

}  // namespace

void register_cross_entropy_in_place() {
  cuda_kernel<cross_entropy_in_place> = cross_entropy_in_place_cuda;
  cuda_kernel<scale_unless_one> = scale_unless_one_cuda;
}

}  // namespace tessera::kernels
