// Products of float8 matrices by the library: both operands with the sum along memory, which is
// how Hopper reads them. There is no other way on a GPU, as another precision would be one in
// silence.
#include <tessera/core/cuda/gemm.h>
#include <tessera/core/factory.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/fp8/quantize.h>
#include <tessera/core/kernels/gemm/matmul_tiles.cuh>

namespace tessera::kernels {
namespace {

constexpr const char* kProduct = "float8_matmul";

// The copy whose rows run along the sum.
const Tensor& along_sum(const Float8Operand& operand, bool rows_are_outside) {
  const Tensor& copy = rows_are_outside ? operand.matrix.values : operand.matrix.transposed;
  TS_CHECK(copy.defined(), kProduct, "needs a copy of ", operand.matrix.device(),
           "'s operand that was not made: quantise it by ", rows_are_outside ? "rows" : "columns");
  return copy;
}

Tensor float8_matmul_cuda(const Float8Operand& a, const Float8Operand& b, DType dtype,
                          const Float8Product& product) {
  const Tensor &left = along_sum(a, !a.transposed), &right = along_sum(b, b.transposed);
  const int64_t M = left.size(0), K = left.size(1), N = right.size(0);
  const Tensor result = raw::empty({M, N}, dtype, left.device());
  if (result.numel() == 0) return result;
  gpu::GemmProblem problem{.M = M, .N = N, .K = K};
  problem.a = {.dtype = left.dtype(), .leading = K, .data = left.data()};
  problem.b = {.dtype = right.dtype(), .transposed = true, .leading = K, .data = right.data()};
  problem.d = {.dtype = dtype, .leading = N, .data = result.data()};
  problem.a_scale = a.matrix.inverse.data();
  problem.b_scale = b.matrix.inverse.data();
  problem.fast_accumulation = product.fast_accumulation;
  const bool with_bias = product.bias.defined() && dtype != kF32;  // there is no f32 bias
  const Tensor bias = with_bias ? contiguous(product.bias) : Tensor();
  if (with_bias) {
    problem.epilogue = gpu::GemmEpilogue::kBias;
    problem.bias = bias.data();
    problem.bias_dtype = bias.dtype();
  }
  if (!run_counted(problem)) {
    const std::string reason = gpu::validate(problem);
    TS_THROW(UnsupportedError, kProduct,
             "products of float8 run by cuBLASLt on a GPU of compute capability 8.9 or more: ",
             reason.empty() ? gpu::gemm_library() : reason);
  }
  if (product.bias.defined() && !with_bias) binary_into<fn::Add>(result, result, product.bias);
  return result;
}

}  // namespace

void register_float8_matmul() { cuda_kernel<float8_matmul> = float8_matmul_cuda; }

}  // namespace tessera::kernels
