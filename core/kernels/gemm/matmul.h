// Matrix products of tensors: any strides, batches with broadcasting, no copy of transposed or
// sliced operands. Operands of one dtype (f64, f32, f16, bf16, i64, i32, u8); results are
// contiguous; meta tensors give meta results. Shapes are checked by the public ops.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// a: [..., M, K]; b: [..., K, N]; batch dimensions broadcast. Returns [..., M, N].
Tensor matmul(const Tensor& a, const Tensor& b);

// x: [..., K]; weight: [N, K]; bias: [N] or undefined. Returns [..., N].
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias);

// beta * x + alpha * a b. x broadcasts to [M, N]; a: [M, K]; b: [K, N].
Tensor addmm(const Tensor& x, const Tensor& a, const Tensor& b, double beta, double alpha);

// target = a b, or target += a b. target: [M, N] with contiguous rows, of a's dtype or f32.
void matmul_into(const Tensor& target, const Tensor& a, const Tensor& b, bool accumulate);

// base + (a b + bias) in new memory. On a GPU it is one product, rounded once, but for
// GemmFusion::kNever; elsewhere the product and a sum. base: [M, N] contiguous, of a's dtype; a:
// [M, K]; b: [K, N]; bias: [N] or undefined.
Tensor matmul_onto(const Tensor& base, const Tensor& a, const Tensor& b, const Tensor& bias);

}  // namespace tessera::kernels
