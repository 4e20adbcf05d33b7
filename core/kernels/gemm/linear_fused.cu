#include <tessera/core/kernels/gemm/linear_fused.h>

#include <tessera/core/context.h>
#include <tessera/core/cuda/gemm.h>
#include <tessera/core/factory.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/raw_views.h>
#include <tessera/core/kernels/gemm/matmul_tiles.cuh>

namespace tessera::kernels {
namespace {

using gpu::GemmEpilogue;

// d = a b with matrices as they lie; nothing where the library cannot read them.
bool product_of(const Tensor& a, const Tensor& b, const Tensor& d, gpu::GemmProblem& problem) {
  problem.M = d.size(0);
  problem.N = d.size(1);
  problem.K = a.size(1);
  problem.tf32 = a.dtype() == kF32 && Context::current().slot<GemmOptions>().tf32;
  return d.numel() > 0 && problem.K > 0 && as_gemm_matrix(a, problem.a) &&
         as_gemm_matrix(b, problem.b) && as_gemm_matrix(d, problem.d);
}
void set_bias(gpu::GemmProblem& problem, const Tensor& bias) {
  problem.bias = bias.data();
  problem.bias_dtype = bias.dtype();
}

// The last dimension as columns, the others as rows.
Tensor rows_of(const Tensor& x) {
  const int64_t columns = x.size(-1);
  return raw::view(contiguous(x), {columns == 0 ? 0 : x.numel() / columns, columns});
}

Tensor column_sums(const Tensor& x) { return sum(x, {0}, false, x.dtype()); }

LinearGelu linear_gelu_cuda(const Tensor& x, const Tensor& weight, const Tensor& bias,
                            bool tanh_form, bool want_before) {
  if (tanh_form && x.numel() > 0) {
    Shape shape = x.shape();
    shape[x.dim() - 1] = weight.size(0);
    const Tensor y = raw::empty(shape, x.dtype(), x.device());
    const Tensor before = want_before ? raw::empty(shape, x.dtype(), x.device()) : Tensor();
    const Tensor rows = rows_of(x);  // perhaps a copy, which must live until the product is queued
    gpu::GemmProblem problem;
    if (product_of(rows, raw::transpose(weight, 0, 1), rows_of(y), problem)) {
      problem.epilogue = bias.defined() ? GemmEpilogue::kGeluBias : GemmEpilogue::kGelu;
      const Tensor packed = bias.defined() ? contiguous(bias) : bias;
      if (bias.defined()) set_bias(problem, packed);
      if (want_before) as_gemm_matrix(rows_of(before), problem.aux);
      if (gpu::fused_gemm_wins(problem, [&] { unary<fn::GeluTanh>(y); }) && run_counted(problem)) {
        return {y, before};
      }
    }
  }
  const Tensor before = linear(x, weight, bias);
  return {tanh_form ? unary<fn::GeluTanh>(before) : unary<fn::Gelu>(before),
          want_before ? before : Tensor()};
}

LinearGradients linear_gradients_cuda(const Tensor& dy, const Tensor& x, bool want_bias) {
  const Tensor transposed = raw::transpose(dy, 0, 1);
  if (!want_bias) return {matmul(transposed, x), Tensor()};
  LinearGradients result{raw::empty({dy.size(1), x.size(1)}, x.dtype(), x.device()),
                         raw::empty({dy.size(1)}, x.dtype(), x.device())};
  gpu::GemmProblem problem;
  if (product_of(transposed, x, result.weight, problem)) {
    problem.epilogue = GemmEpilogue::kBiasGradOfA;
    set_bias(problem, result.bias);
    if (gpu::fused_gemm_wins(problem, [&] { column_sums(dy); }) && run_counted(problem)) {
      return result;
    }
  }
  matmul_into(result.weight, transposed, x, false);
  result.bias = column_sums(dy);
  return result;
}

GeluGradients linear_gelu_gradients_cuda(const Tensor& dy, const Tensor& weight,
                                         const Tensor& before, bool tanh_form, bool want_bias) {
  const Tensor grad = raw::empty(before.shape(), dy.dtype(), dy.device());
  const auto through_gelu = [&] {
    tanh_form ? binary_into<fn::GeluTanhGrad>(grad, grad, before)
              : binary_into<fn::GeluGrad>(grad, grad, before);
  };
  gpu::GemmProblem problem;
  if (tanh_form && product_of(dy, weight, grad, problem) && as_gemm_matrix(before, problem.aux)) {
    const Tensor bias =
        want_bias ? raw::empty({grad.size(1)}, grad.dtype(), grad.device()) : Tensor();
    problem.epilogue = want_bias ? GemmEpilogue::kGeluGradBiasGrad : GemmEpilogue::kGeluGrad;
    if (want_bias) set_bias(problem, bias);
    const auto rest = [&] {
      through_gelu();
      if (want_bias) column_sums(grad);
    };
    if (gpu::fused_gemm_wins(problem, rest) && run_counted(problem)) return {grad, bias};
  }
  matmul_into(grad, dy, weight, false);
  through_gelu();
  return {grad, Tensor()};
}

}  // namespace

void register_linear_fused() {
  cuda_kernel<linear_gelu> = linear_gelu_cuda;
  cuda_kernel<linear_gradients> = linear_gradients_cuda;
  cuda_kernel<linear_gelu_gradients> = linear_gelu_gradients_cuda;
}

}  // namespace tessera::kernels
