// Loss and gradient of rows of logits in one launch, the gradient over the logits: a row is read
// twice, the second time from the caches, and written once.
#include <tessera/core/kernels/cross_entropy.h>

#include <cmath>

#include <tessera/core/factory.h>
#include <tessera/core/kernels/on_device.h>
#include <tessera/core/math.h>
#include <tessera/core/kernels/rows.cuh>
#include <tessera/core/kernels/strided.cuh>

namespace tessera::kernels {
namespace {

// One block a row; kWidth neighbours a thread.
template <class T, int kWidth>
__global__ void in_place_kernel(T* logits,               // (N, V), rows `stride` apart
                                const int64_t* targets,  // (N)
                                const double* divisor,   // one number, or null for 1
                                double* losses,          // (N)
                                int64_t stride, int64_t V, int64_t ignore_index) {
  using C = Compute<T>;
  using Vector = gpu::Vector<T, kWidth>;
  TS_REDUCE_SLOT(C, largest_slot);
  TS_REDUCE_SLOT(double, sum_slot);
  const int64_t target = targets[blockIdx.x];
  T* const x = logits + blockIdx.x * stride;
  const int64_t first = int64_t{threadIdx.x} * kWidth, step = int64_t{blockDim.x} * kWidth;
  if (target == ignore_index) {  // the whole block
    Vector zeros;
    for (int j = 0; j < kWidth; ++j) zeros.values[j] = store<T>(C(0));
    for (int64_t c = first; c < V; c += step) gpu::store_vector(x + c, zeros);
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    return;
  }
  // The largest so far, and the sum of exponentials below it.
  C largest = -static_cast<C>(INFINITY);
  double sum = 0;
  for (int64_t c = first; c < V; c += step) {
    const Vector vector = gpu::load_vector<kWidth>(x + c);
    C local = largest;
    for (int j = 0; j < kWidth; ++j) {
      const C value = load<C>(vector.values[j]);
      local = value > local ? value : local;
    }
    if (local > largest) {
      sum *= static_cast<double>(math::exp(largest - local));
      largest = local;
    }
    for (int j = 0; j < kWidth; ++j) {
      sum += static_cast<double>(math::exp(load<C>(vector.values[j]) - largest));
    }
  }
  const C at_target = load<C>(x[target]);  // before the barriers: it is overwritten after them
  const C own = largest;
  largest = gpu::block_reduce(largest, gpu::Larger{}, -static_cast<C>(INFINITY), largest_slot);
  if (first < V) sum *= static_cast<double>(math::exp(own - largest));
  sum = gpu::block_reduce(sum, gpu::Plus{}, 0.0, sum_slot);
  if (threadIdx.x == 0) {
    losses[blockIdx.x] =
        (static_cast<double>(largest) - static_cast<double>(at_target)) + ::log(sum);
  }
  const double scale = divisor != nullptr ? 1 / *divisor : 1.0;
  const C a = static_cast<C>(scale / sum), hard = static_cast<C>(scale);
  for (int64_t c = first; c < V; c += step) {
    Vector vector = gpu::load_vector<kWidth>(x + c);
    for (int j = 0; j < kWidth; ++j) {
      C value = a * math::exp(load<C>(vector.values[j]) - largest);
      if (c + j == target) value = value - hard;
      vector.values[j] = store<T>(value);
    }
    gpu::store_vector(x + c, vector);
  }
}

void cross_entropy_in_place_cuda(const Tensor& logits, const Tensor& targets, int64_t ignore_index,
                                 const Tensor& divisor, const Tensor& losses) {
  const int64_t N = logits.size(0), V = logits.size(1);
  if (N == 0 || V == 0) return;
  dispatch_floating(logits.dtype(), "cross_entropy", [&]<class T>() {
    constexpr int kWidth = 16 / sizeof(T);
    const bool vectors =
        V % kWidth == 0 && logits.stride(0) % kWidth == 0 && is_aligned(logits.data());
    const auto run = [&](auto* kernel, int width) {
      gpu::launch({.name = "cross_entropy",
                   .grid = static_cast<unsigned>(N),
                   .block = row_threads((V + width - 1) / width * 4)},
                  kernel, logits.data_as<T>(), targets.data_as<int64_t>(),
                  divisor.defined() ? divisor.data_as<double>() : nullptr, losses.data_as<double>(),
                  logits.stride(0), V, ignore_index);
    };
    vectors ? run(in_place_kernel<T, kWidth>, kWidth) : run(in_place_kernel<T, 1>, 1);
  });
  logits.bump_version();
}

}  // namespace

void register_cross_entropy_in_place() {
  cuda_form<cross_entropy_in_place> = cross_entropy_in_place_cuda;
}

}  // namespace tessera::kernels
