// Products of fp8 matrices by the library: both operands with the sum along memory, which is
// how Hopper reads them. There is no other way on a GPU, as another precision would be one in
// silence.
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/fp8/quantize.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/gemm/matmul_tiles.cuh>

namespace tessera::kernels {
namespace {

constexpr const char* kProduct = "fp8_matmul";

// The copy whose rows run along the sum.
const Tensor& along_sum(const Fp8Operand& operand, bool rows_are_outside) {
  const Tensor& copy = rows_are_outside ? operand.matrix.values : operand.matrix.transposed;
  TS_CHECK(copy.defined(), kProduct, "needs a copy of ", operand.matrix.device(),
           "'s operand that was not made: quantise it by ", rows_are_outside ? "rows" : "columns");
  return copy;
}

using gpu::GemmScale;

// How the scales of that copy lie, see quantize().
GemmScale scaling_of(const Fp8Operand& operand, bool rows_are_outside) {
  const ScaleTile& tile = operand.matrix.tile;
  const int64_t outside = rows_are_outside ? tile.rows : tile.columns;
  const int64_t along = rows_are_outside ? tile.columns : tile.rows;
  constexpr int64_t kSide = gpu::kScaledTogether;
  if (outside == 0 && along == 0) return GemmScale::kTensor;
  if (outside == 1 && along == 0) return GemmScale::kOuter;
  if (outside == 1 && along == kSide) return GemmScale::kVectors;
  if (outside == kSide && along == kSide) return GemmScale::kSquares;
  TS_THROW(UnsupportedError, kProduct, "has no scales of ", outside, " x ", along,
           " numbers (0: all) where the sum runs along the latter; 1 x all, 1 x ", kSide, " and ",
           kSide, " x ", kSide, " are there");
}

// They must lie so.
const Tensor& inverse_of(const Fp8Operand& operand, bool rows_are_outside, GemmScale scaling) {
  const Quantized& q = operand.matrix;
  const bool turned = !rows_are_outside && q.inverse_by_columns.defined();
  const Tensor& inverse = turned ? q.inverse_by_columns : q.inverse;
  const int outside = rows_are_outside ? 0 : 1;
  const bool fits = scaling == GemmScale::kVectors ? inverse.stride(outside) == 1
                    : scaling == GemmScale::kSquares
                        ? inverse.stride(1 - outside) == 1 && inverse.stride(outside) % 4 == 0
                        : true;
  TS_CHECK(fits, kProduct, "needs scales of ", inverse.size(0), " x ", inverse.size(1),
           " tiles as quantize() lays them for this copy; these have other strides");
  return inverse;
}

// One scale for all is one for each, where the other operand has those.
Tensor spread(const Tensor& inverse, int64_t count) {
  const Tensor all = raw::empty({count}, kF32, inverse.device());
  copy_into(all, raw::expand(raw::view(inverse, {1}), {count}));
  return all;
}

Tensor fp8_matmul_cuda(const Fp8Operand& a, const Fp8Operand& b, DType dtype,
                       const Fp8Product& product) {
  const Tensor &left = along_sum(a, !a.transposed), &right = along_sum(b, b.transposed);
  const int64_t M = left.size(0), K = left.size(1), N = right.size(0);
  const Tensor result = raw::empty({M, N}, dtype, left.device());
  if (result.numel() == 0) return result;
  // dy^T x: a sum over rows of the batch.
  gpu::GemmProblem problem{.M = M, .N = N, .K = K, .sums_over_rows = a.transposed && !b.transposed};
  problem.a = {.dtype = left.dtype(), .leading = K, .data = left.data()};
  problem.b = {.dtype = right.dtype(), .transposed = true, .leading = K, .data = right.data()};
  problem.d = {.dtype = dtype, .leading = N, .data = result.data()};
  problem.a_scaling = scaling_of(a, !a.transposed);
  problem.b_scaling = scaling_of(b, b.transposed);
  Tensor a_scale = inverse_of(a, !a.transposed, problem.a_scaling);
  Tensor b_scale = inverse_of(b, b.transposed, problem.b_scaling);
  if (problem.a_scaling == GemmScale::kOuter && problem.b_scaling == GemmScale::kTensor) {
    problem.b_scaling = GemmScale::kOuter;
    b_scale = spread(b_scale, N);
  } else if (problem.a_scaling == GemmScale::kTensor && problem.b_scaling == GemmScale::kOuter) {
    problem.a_scaling = GemmScale::kOuter;
    a_scale = spread(a_scale, M);
  }
  problem.a_scale = a_scale.data();
  problem.b_scale = b_scale.data();
  problem.fast_accumulation =
      product.fast_accumulation &&
      (problem.a_scaling == GemmScale::kTensor || problem.a_scaling == GemmScale::kOuter);
  bool with_bias = product.bias.defined() && dtype != kF32;  // there is no f32 bias
  const Tensor bias = with_bias ? contiguous(product.bias) : Tensor();
  if (with_bias) {
    problem.epilogue = gpu::GemmEpilogue::kBias;
    problem.bias = bias.data();
    problem.bias_dtype = bias.dtype();
  }
  bool ran = run_counted(problem);
  if (!ran && with_bias) {  // scales of tiles have few algorithms with a bias, or none
    with_bias = false;
    problem = without_epilogue(problem);
    ran = run_counted(problem);
  }
  if (!ran) {
    const std::string reason = gpu::validate(problem);
    TS_THROW(UnsupportedError, kProduct,
             "products of fp8 run by cuBLASLt on a GPU of compute capability 8.9 or more (9.0 "
             "for scales of rows and tiles): ",
             reason.empty() ? gpu::gemm_library() : reason);
  }
  if (product.bias.defined() && !with_bias) binary_into<fn::Add>(result, result, product.bias);
  return result;
}

}  // namespace

void register_fp8_matmul() { cuda_kernel<fp8_matmul> = fp8_matmul_cuda; }

}  // namespace tessera::kernels
