// Matrix products that run on own kernels: one description for those of matmul.cu, which take
// anything, and those of matmul_tensor.cu, which take f16 and bf16 on tensor cores.
#pragma once

#include <tessera/core/cuda/gemm.h>
#include <tessera/core/tensor.h>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {

// c = alpha a b + beta c + bias, for each matrix of a batch.
struct Product {
  int64_t M, N, K;
  int64_t a_row, a_column, b_row, b_column, c_row;  // strides in elements
  double alpha, beta;
};

// Queues the product and says true; or does nothing and says false, where the operands are no f16
// or bf16, lie apart in both directions, or are so small that a tile would be empty for the most
// part. bias: [N] contiguous or undefined; result: rows contiguous, of a's dtype or f32; `batch`
// walks the matrices of result, a and b.
bool multiply_on_tensor_cores(const char* where, const Product& product, const Tensor& a,
                              const Tensor& b, const Tensor& bias, const Tensor& result,
                              const Walk& batch);

// The last two dimensions of x as the library reads them, by rows or by columns; false where
// strides are of another kind.
bool as_gemm_matrix(const Tensor& x, gpu::GemmMatrix& matrix);

}  // namespace tessera::kernels
