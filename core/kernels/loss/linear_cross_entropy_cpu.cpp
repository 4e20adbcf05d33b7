#include <algorithm>
#include <cmath>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/kernels/loss/linear_cross_entropy.h>
#include <tessera/core/kernels/loss/linear_cross_entropy_rows.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/memory/return_pages.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

// A power of two: lifts probabilities of 2^-22 to f16's normal numbers, and leaves products with
// weights below 100 in its range.
constexpr double kF16Lift = 256;

// Targets as i64, -1 where ignored. Returns how many count.
int64_t read_targets(const Tensor& target, int64_t classes, int64_t ignore_index,
                     std::vector<int64_t>& targets) {
  int64_t counted = 0;
  dispatch_integral(target.dtype(), "linear_cross_entropy", [&]<class T>() {
    const T* data = target.data_as<T>();
    for (int64_t i = 0; i < target.numel(); ++i) {
      const int64_t value = static_cast<int64_t>(data[i * target.stride(0)]);
      const bool ignored = value == ignore_index;
      TS_CHECK_INDEX(ignored || (value >= 0 && value < classes), "linear_cross_entropy", "target ",
                     value, " at position [", i, "] is outside [0, ", classes,
                     "); check the vocabulary size");
      targets.push_back(ignored ? -1 : value);
      counted += !ignored;
    }
  });
  return counted;
}

// Logits, sums and the weight's gradient are the largest blocks of a step with a large vocabulary,
// and gone at its end. Their pages go with them, so that a training holds at rest what the rest of
// it needs.
Tensor returned(const Tensor& x) {
  return_pages_when_freed(x.data(), static_cast<size_t>(x.nbytes()));
  return x;
}
Tensor workspace(const Shape& shape, DType dtype) {
  const MemoryCategoryGuard category(MemoryCategory::kActivation);
  return returned(raw::empty(shape, dtype, kCpu));
}

}  // namespace

LinearCrossEntropy linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                                        int64_t ignore_index, bool mean, bool want_grad_x,
                                        bool want_grad_weight) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::linear_cross_entropy>("linear_cross_entropy", x.device(), x, weight,
                                                  target, ignore_index, mean, want_grad_x,
                                                  want_grad_weight);
  }
  const int64_t N = x.size(0), C = x.size(1), V = weight.size(0);
  const DType sum_dtype = compute_dtype(x.dtype());
  LinearCrossEntropy result;
  // Equal chunks of at most 2^25 logits; the weight is packed once a chunk, which costs 4% of the
  // product at 512 rows (bench_gemm head/forward).
  const int64_t limit = std::max<int64_t>(128, (int64_t{1} << 25) / std::max<int64_t>(V, 1));
  const int64_t chunks = std::max<int64_t>(1, (N + limit - 1) / limit);
  const int64_t step = std::max<int64_t>(1, (N + chunks - 1) / chunks);
  const Shape chunk = {std::min(step, N), V};
  result.loss = raw::empty({}, sum_dtype, x.device());
  if (want_grad_x) result.grad_x = raw::empty({N, C}, x.dtype(), x.device());
  if (x.is_meta()) {  // allocates what the CPU does: a plan's peak is often here
    const Tensor sums = want_grad_weight ? raw::empty({V, C}, sum_dtype, x.device()) : Tensor();
    (void)raw::empty(chunk, sum_dtype, x.device());  // logits, gone before the gradient is rounded
    if (want_grad_weight) {
      const bool kept = x.dtype() == sum_dtype || x.dtype() == kF16;
      result.grad_weight = kept ? sums : raw::empty({V, C}, x.dtype(), x.device());
    }
    return result;
  }
  std::vector<int64_t> targets;
  targets.reserve(static_cast<size_t>(N));
  const int64_t counted = read_targets(target, V, ignore_index, targets);
  const double scale = mean && counted > 0 ? 1.0 / static_cast<double>(counted) : 1.0;
  const bool lifted = x.dtype() == kF16;
  const double row_scale = lifted ? kF16Lift : scale;
  if (lifted) result.gradient_factor = scale / kF16Lift;
  Tensor grad_weight;  // of the sums' dtype
  if (want_grad_weight) {
    grad_weight = x.dtype() == sum_dtype ? raw::empty({V, C}, sum_dtype, x.device())
                                         : workspace({V, C}, sum_dtype);
  }

  Tensor logits = workspace(chunk, sum_dtype);
  const bool want_gradient = want_grad_x || want_grad_weight;
  // Where the gradient is narrower than the logits, its rows begin where theirs do.
  const int64_t gradient_stride = V * size_of(sum_dtype) / size_of(x.dtype());
  Tensor gradients = x.dtype() == sum_dtype ? logits
                                            : raw::from_blob(logits.data(), logits.shape(),
                                                             {gradient_stride, 1}, x.dtype());
  std::vector<double> losses(static_cast<size_t>(N));
  for (int64_t first = 0; first < N; first += step) {
    const int64_t rows = std::min(step, N - first);
    const Tensor x_rows = raw::narrow(x, 0, first, rows);
    const Tensor logit_rows = raw::narrow(logits, 0, 0, rows);
    matmul_into(logit_rows, x_rows, raw::transpose(weight, 0, 1), false);
    parallel_for(rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(V, 1)),
                 [&](int64_t begin, int64_t end) {
                   const int64_t at = begin * V;
                   const LogitRows problem{
                       end - begin,
                       V,
                       static_cast<char*>(logits.data()) + at * size_of(sum_dtype),
                       targets.data() + first + begin,
                       losses.data() + first + begin,
                       want_gradient,
                       x.dtype(),
                       row_scale};
                   TS_SIMD_CALL(cross_entropy_rows, problem);
                 });
    if (!want_gradient) continue;
    const Tensor gradient_rows = raw::narrow(gradients, 0, 0, rows);
    if (want_grad_x) {
      matmul_into(raw::narrow(result.grad_x, 0, first, rows), gradient_rows, weight, false);
    }
    if (want_grad_weight) {
      matmul_into(grad_weight, raw::transpose(gradient_rows, 0, 1), x_rows, first > 0);
    }
  }
  gradients = Tensor();
  logits = Tensor();
  if (want_grad_weight) {
    if (N == 0) fill(grad_weight, 0);
    result.grad_weight =
        x.dtype() == sum_dtype || lifted ? grad_weight : returned(convert(grad_weight, x.dtype()));
  }
  double sum = 0;
  for (double loss : losses) sum += loss;
  const double loss = !mean ? sum : counted > 0 ? sum * scale : std::nan("");
  if (sum_dtype == kF64) {
    *result.loss.data_as<double>() = loss;
  } else {
    *result.loss.data_as<float>() = static_cast<float>(loss);
  }
  return result;
}

}  // namespace tessera::kernels
