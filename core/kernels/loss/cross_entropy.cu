#include <tessera/core/kernels/loss/cross_entropy.h>

#include <algorithm>
#include <cmath>

#include <tessera/core/context.h>
#include <tessera/core/cuda/device_errors.h>
#include <tessera/core/cuda/device_memory.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/kernels/loss/linear_cross_entropy.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/math.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/common/rows.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;
// Numbers that a thread takes at once, and threads of a block at most: exp and division of f64 take
// many registers.
template <class T>
inline constexpr int kVector = sizeof(T) == 8 ? 1 : 16 / static_cast<int>(sizeof(T));
template <class T>
inline constexpr unsigned kMostThreads = sizeof(T) == 8 ? 512 : 1024;
template <class T>
unsigned threads_for(int64_t V, int width) {
  const unsigned threads = walk_threads(V, width);
  return threads < kMostThreads<T> ? threads : kMostThreads<T>;
}
constexpr const char* kName = "cross_entropy";

__global__ void check_targets_kernel(const int64_t* target, int64_t* result, int64_t n, int64_t V,
                                     int64_t ignore_index, const char* op,
                                     gpu::DeviceErrorWord* errors) {
  const int64_t i = gpu::first_index();
  if (i >= n) return;
  const int64_t value = target[i];
  const bool outside = value != ignore_index && (value < 0 || value >= V);
  if (outside && atomicCAS(&errors->found, 0, 1) == 0) {
    errors->op = op;
    errors->position = i;
    errors->value = value;
    errors->low = 0;
    errors->high = V;
  }
  result[i] = outside ? ignore_index : value;
}

Tensor check_targets_cuda(const char* where, const Tensor& target, int64_t classes,
                          int64_t ignore_index) {
  TS_CHECK_DTYPE(target.dtype() == kI64 || target.dtype() == kI32, where,
                 "expects class indices of i64 or i32; got ", target,
                 "; probabilities have the dtype and shape of the input");
  const Tensor wide = contiguous(target.dtype() == kI64 ? target : convert(target, kI64));
  const Tensor result = raw::empty(target.shape(), kI64, target.device());
  if (target.numel() == 0) return result;
  gpu::launch({.name = where,
               .grid = gpu::blocks(target.numel(), kBlock),
               .block = kBlock,
               .traffic = {target.numel() * 8, target.numel() * 8}},
              check_targets_kernel, wide.data_as<int64_t>(), result.data_as<int64_t>(),
              target.numel(), classes, ignore_index, where, gpu::device_error_word());
  return result;
}

// One block a row, which is read once.
template <class T, int kWidth>
__global__ void __launch_bounds__(kMostThreads<T>)
    forward_kernel(const T* logits,            // (N, V), rows `stride` apart
                   const int64_t* targets,     // (N)
                   const Compute<T>* weights,  // (V) or null
                   const double* weight_sum,   // one number, or null
                   Compute<T>* losses,         // (N)
                   Compute<T>* statistics,     // (N, 2)
                   double* target_weights,     // (N)
                   int64_t stride, int64_t V, int64_t ignore_index, double smoothing) {
  using C = Compute<T>;
  TS_REDUCE_SLOT(C, largest_slot);
  TS_REDUCE_SLOT(double, sum_slot);
  const int64_t n = blockIdx.x, target = targets[n];
  if (target == ignore_index) {  // the whole block
    if (threadIdx.x == 0) {
      losses[n] = statistics[2 * n] = statistics[2 * n + 1] = C(0);
      target_weights[n] = 0;
    }
    return;
  }
  const T* const x = logits + n * stride;
  ExpSum<C, ExpNumber<T>> row;
  double weighted = 0;  // sum of weight times logit
  RowWalk<T, kWidth>(x, V).each([&]<int N>(int64_t c) {
    const gpu::Vector<T, N> in = gpu::load_vector<N>(x + c);
    C values[N];
    TS_UNROLL
    for (int j = 0; j < N; ++j) values[j] = load<C>(in.values[j]);
    row.add(values);
    if (smoothing == 0) return;
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      const double value = static_cast<double>(values[j]);
      weighted += weights != nullptr ? static_cast<double>(weights[c + j]) * value : value;
    }
  });
  row.template join<0>(largest_slot, sum_slot);
  if (smoothing != 0) weighted = gpu::block_reduce(weighted, gpu::Plus{}, 0.0, sum_slot);
  if (threadIdx.x != 0) return;
  const double weight = weights != nullptr ? static_cast<double>(weights[target]) : 1.0;
  const double total = weight_sum != nullptr ? *weight_sum : static_cast<double>(V);
  const double largest = static_cast<double>(row.largest), log_sum = ::log(row.sum);
  double loss =
      (1 - smoothing) * weight * ((largest - static_cast<double>(load<C>(x[target]))) + log_sum);
  if (smoothing != 0) {
    loss += smoothing / static_cast<double>(V) * (total * (largest + log_sum) - weighted);
  }
  losses[n] = static_cast<C>(loss);
  statistics[2 * n] = row.largest;
  statistics[2 * n + 1] = static_cast<C>(1 / row.sum);
  target_weights[n] = weight;
}

// One block a row; each number is read once and written once.
template <class T, int kWidth>
__global__ void __launch_bounds__(kMostThreads<T>)
    backward_kernel(const T* logits, const int64_t* targets, const Compute<T>* weights,
                    const double* weight_sum, const Compute<T>* statistics,
                    const Compute<T>* row_gradients,
                    const double* divisor,  // one number, or null
                    T* result, int64_t stride, int64_t V, int64_t ignore_index, double smoothing,
                    bool one_gradient) {
  using C = Compute<T>;
  const int64_t n = blockIdx.x, target = targets[n];
  const T* const x = logits + n * stride;
  T* const dx = result + n * V;
  const bool ignored = target == ignore_index;
  const double total = weight_sum != nullptr ? *weight_sum : static_cast<double>(V);
  const double smooth = smoothing / static_cast<double>(V);
  const double scale = divisor != nullptr ? 1 / *divisor : 1.0;
  const double g = static_cast<double>(row_gradients[one_gradient ? 0 : n]) * scale;
  const double weight = weights != nullptr && !ignored ? static_cast<double>(weights[target]) : 1.0;
  const double hard = g * (1 - smoothing) * weight;
  const C a =
      static_cast<C>((hard + g * smooth * total) * static_cast<double>(statistics[2 * n + 1]));
  const C b = static_cast<C>(g * smooth), largest = statistics[2 * n];
  RowWalk<T, kWidth>(x, V).each([&]<int N>(int64_t c) {
    gpu::Vector<T, N> vector = gpu::load_vector<N>(x + c);
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      C value = a * exponential<ExpNumber<T>>(load<C>(vector.values[j]) - largest);
      if (smoothing != 0) value = value - (weights != nullptr ? b * weights[c + j] : b);
      if (c + j == target) value = value - static_cast<C>(hard);
      vector.values[j] = store<T>(ignored ? C(0) : value);
    }
    gpu::store_vector(dx + c, vector);
  });
}

// The class weights in the compute dtype and their sum, on the device.
struct ClassWeights {
  Tensor values, sum;
  ClassWeights(const Tensor& weight, DType compute) {
    if (!weight.defined()) return;
    values = contiguous(weight.dtype() == compute ? weight : convert(weight, compute));
    sum = kernels::sum(values, {0}, false, kF64);
  }
};

CrossEntropyRows forward_cuda(const Tensor& logits, const Tensor& targets,
                              const CrossEntropyAttributes& attributes) {
  const int64_t N = logits.size(0), V = logits.size(1);
  const DType compute = compute_dtype(logits.dtype());
  CrossEntropyRows result{raw::empty({N}, compute, logits.device()),
                          raw::empty({N, 2}, compute, logits.device()), Tensor()};
  if (N == 0) {
    result.total_weight = raw::zeros({}, kF64, logits.device());
    return result;
  }
  const ClassWeights weights(attributes.weight, compute);
  const Tensor target_weights = raw::empty({N}, kF64, logits.device());
  dispatch_floating(logits.dtype(), kName, [&]<class T>() {
    using C = Compute<T>;
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    constexpr auto kWide = static_cast<int64_t>(sizeof(C));
    // Rows that are ignored are not read, and of class weights those of the targets, or all.
    gpu::Traffic traffic{N * (V * kSize + 8), N * (3 * kWide + 8), true};
    if (weights.values.defined()) traffic.reads += V * kWide + 8;
    gpu::launch({.name = kName,
                 .grid = static_cast<unsigned>(N),
                 .block = threads_for<T>(V, kVector<T>),
                 .traffic = traffic},
                forward_kernel<T, kVector<T>>, logits.data_as<T>(), targets.data_as<int64_t>(),
                weights.values.defined() ? weights.values.data_as<C>() : nullptr,
                weights.sum.defined() ? weights.sum.data_as<double>() : nullptr,
                result.losses.data_as<C>(), result.statistics.data_as<C>(),
                target_weights.data_as<double>(), logits.stride(0), V, attributes.ignore_index,
                attributes.label_smoothing);
  });
  result.total_weight = sum(target_weights, {0}, false, kF64);
  return result;
}

Tensor backward_cuda(const Tensor& logits, const Tensor& targets,
                     const CrossEntropyAttributes& attributes, const Tensor& statistics,
                     const Tensor& row_gradients, const Tensor& divisor) {
  const int64_t N = logits.size(0), V = logits.size(1);
  const Tensor result = raw::empty({N, V}, logits.dtype(), logits.device());
  if (result.numel() == 0) return result;
  const DType compute = compute_dtype(logits.dtype());
  const ClassWeights weights(attributes.weight, compute);
  const Tensor gradients = contiguous(
      row_gradients.dtype() == compute ? row_gradients : convert(row_gradients, compute));
  dispatch_floating(logits.dtype(), kName, [&]<class T>() {
    using C = Compute<T>;
    constexpr int kWidth = kVector<T>;
    const bool vectors = begin_alike<T>({logits.data(), result.data()}, {logits.stride(0), V});
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    constexpr auto kWide = static_cast<int64_t>(sizeof(C));
    gpu::Traffic traffic{
        N * (V * kSize + 8 + 2 * kWide) + gradients.numel() * kWide + (divisor.defined() ? 8 : 0),
        N * V * kSize};
    if (weights.values.defined()) {  // those of the targets, or all
      traffic.reads += V * kWide + 8;
      traffic.at_most = true;
    }
    gpu::launch({.name = kName,
                 .grid = static_cast<unsigned>(N),
                 .block = threads_for<T>(V, vectors ? kWidth : 1),
                 .traffic = traffic},
                vectors ? backward_kernel<T, kWidth> : backward_kernel<T, 1>, logits.data_as<T>(),
                targets.data_as<int64_t>(),
                weights.values.defined() ? weights.values.data_as<C>() : nullptr,
                weights.sum.defined() ? weights.sum.data_as<double>() : nullptr,
                statistics.data_as<C>(), gradients.data_as<C>(),
                divisor.defined() ? divisor.data_as<double>() : nullptr, result.data_as<T>(),
                logits.stride(0), V, attributes.ignore_index, attributes.label_smoothing,
                gradients.numel() == 1);
  });
  return result;
}

template <class C>
__global__ void distribution_kernel(const int64_t* targets, const C* weights, C* result, int64_t N,
                                    int64_t V, int64_t ignore_index, double smoothing) {
  const int64_t i = gpu::first_index();
  if (i >= N * V) return;
  const int64_t c = i % V, target = targets[i / V];
  const double weight = weights != nullptr ? static_cast<double>(weights[c]) : 1.0;
  C value = C(0);
  if (target != ignore_index) {
    if (smoothing != 0) value = static_cast<C>(smoothing / static_cast<double>(V) * weight);
    if (c == target) value = value + static_cast<C>((1 - smoothing) * weight);
  }
  result[i] = value;
}

Tensor distribution_cuda(const Tensor& like, const Tensor& targets,
                         const CrossEntropyAttributes& attributes) {
  const int64_t N = like.size(0), V = like.size(1);
  const DType compute = compute_dtype(like.dtype());
  const Tensor result = raw::empty({N, V}, compute, like.device());
  if (result.numel() == 0) return result;
  const ClassWeights weights(attributes.weight, compute);
  with_compute(compute, [&]<class C>() {
    constexpr auto kWide = static_cast<int64_t>(sizeof(C));
    gpu::launch({.name = kName,
                 .grid = gpu::blocks(N * V, kBlock),
                 .block = kBlock,
                 .traffic = {N * 8 + (weights.values.defined() ? V * kWide : 0), N * V * kWide}},
                distribution_kernel<C>, targets.data_as<int64_t>(),
                weights.values.defined() ? weights.values.data_as<C>() : nullptr,
                result.data_as<C>(), N, V, attributes.ignore_index, attributes.label_smoothing);
  });
  return result;
}

// Logits in the dtype of x, which their gradient overwrites; f16's, whose mean would vanish in it,
// in f32. All rows at once where an eighth of the device's memory holds them: each chunk reads the
// weight and rewrites its gradient, and its last wave of tiles idles.
LinearCrossEntropy linear_cross_entropy_cuda(const Tensor& x, const Tensor& weight,
                                             const Tensor& target, int64_t ignore_index, bool mean,
                                             bool want_grad_x, bool want_grad_weight) {
  const int64_t N = x.size(0), C = x.size(1), V = weight.size(0);
  const DType sums = compute_dtype(x.dtype()), held = x.dtype() == kF16 ? kF32 : x.dtype();
  const Device& device = x.device();
  const Tensor targets = check_targets("linear_cross_entropy", target, V, ignore_index);
  // How many rows count; over none the mean is NaN. Stays on the device.
  Tensor divisor;
  if (mean) divisor = sum(binary<fn::Ne>(targets, ignore_index), {0}, false, kF64);
  LinearCrossEntropy result;
  const Tensor losses = raw::empty({N}, kF64, device);
  if (want_grad_x) result.grad_x = raw::empty({N, C}, x.dtype(), device);

  int64_t most = Context::current().slot<LinearCrossEntropyOptions>().logits_bytes;
  if (most <= 0) most = gpu::total_memory(device.index) / 8;
  int64_t chunk = std::clamp(most / std::max<int64_t>(V * size_of(held), 1), int64_t{1},
                             std::max<int64_t>(N, 1));
  Tensor logits;
  while (!logits.defined()) {
    try {
      logits = raw::empty({chunk, V}, held, device);
    } catch (const OutOfMemory&) {  // what else the program holds is not known beforehand
      if (chunk < 1024) throw;
      chunk = (chunk + 1) / 2;
    }
  }
  const bool whole = chunk >= N;
  Tensor grad_weight;
  if (want_grad_weight) grad_weight = raw::empty({V, C}, whole ? x.dtype() : sums, device);
  if (want_grad_weight && N == 0) fill(grad_weight, 0);
  for (int64_t first = 0; first < N; first += chunk) {
    const int64_t rows = std::min(chunk, N - first);
    const Tensor x_rows = raw::narrow(x, 0, first, rows);
    const Tensor target_rows = raw::narrow(targets, 0, first, rows);
    const Tensor logit_rows = raw::narrow(logits, 0, 0, rows);
    const Tensor loss_rows = raw::narrow(losses, 0, first, rows);
    matmul_into(logit_rows, x_rows, raw::transpose(weight, 0, 1), false);
    if (!want_grad_x && !want_grad_weight) {
      copy_into(
          loss_rows,
          cross_entropy_forward(logit_rows, target_rows, {.ignore_index = ignore_index}).losses);
      continue;
    }
    cross_entropy_in_place(logit_rows, target_rows, ignore_index, divisor, loss_rows);
    const Tensor gradient = held == x.dtype() ? logit_rows : convert(logit_rows, x.dtype());
    if (want_grad_x) {
      matmul_into(raw::narrow(result.grad_x, 0, first, rows), gradient, weight, false);
    }
    if (want_grad_weight) {
      matmul_into(grad_weight, raw::transpose(gradient, 0, 1), x_rows, first > 0);
    }
  }
  if (want_grad_weight) {
    result.grad_weight =
        grad_weight.dtype() == x.dtype() ? grad_weight : convert(grad_weight, x.dtype());
  }
  const Tensor total = sum(losses, {0}, false, kF64);
  result.loss = convert(mean ? binary<fn::Div>(total, divisor) : total, sums);
  return result;
}

}  // namespace

void register_cross_entropy() {
  cuda_kernel<linear_cross_entropy> = linear_cross_entropy_cuda;
  cuda_kernel<check_targets> = check_targets_cuda;
  cuda_kernel<cross_entropy_forward> = forward_cuda;
  cuda_kernel<cross_entropy_backward> = backward_cuda;
  cuda_kernel<cross_entropy_distribution> = distribution_cuda;
}

}  // namespace tessera::kernels
