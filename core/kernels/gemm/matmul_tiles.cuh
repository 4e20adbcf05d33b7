// Matrix products that run on own kernels: one description for those of matmul.cu, which take
// anything, and those of matmul_tensor.cu, which take f16 and bf16 on tensor cores.
#pragma once

#include <cstdint>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {

// c = alpha a b + beta c + bias, for each matrix of a batch.
struct Product {
  int64_t M, N, K;
  int64_t a_row, a_column, b_row, b_column, c_row;  // strides in elements
  double alpha, beta;
  unsigned row_tiles = 1, column_tiles = 1;  // of a matrix of the result, see cut_into_tiles
};

// All tiles of all matrices lie in one dimension of the grid, as the others end at 65535: tiles of
// a row of them first.
struct TilePlace {
  int64_t matrix, row, column;
};
TS_DEVICE TilePlace tile_place(const Product& p) {
  const unsigned rest = blockIdx.x / p.column_tiles;
  return {rest / p.row_tiles, rest % p.row_tiles, blockIdx.x % p.column_tiles};
}
// Sets the counts of p; returns the size of the grid.
inline unsigned cut_into_tiles(const char* where, Product& p, int64_t side, int64_t matrices) {
  const int64_t rows = (p.M + side - 1) / side, columns = (p.N + side - 1) / side;
  constexpr int64_t kMost = INT32_MAX;  // blocks of a grid
  TS_CHECK_SHAPE(rows <= kMost && columns <= kMost && rows * columns <= kMost / matrices, where,
                 "a product on own kernels has at most 2^31 - 1 tiles of ", side, " x ", side,
                 "; it is ", matrices, " times [", p.M, ", ", p.N, "]; multiply it in parts");
  p.row_tiles = static_cast<unsigned>(rows);
  p.column_tiles = static_cast<unsigned>(columns);
  return static_cast<unsigned>(rows * columns * matrices);
}

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

// gpu::run_gemm, and the context's GemmCounts where the library ran it.
bool run_counted(const gpu::GemmProblem& problem);

}  // namespace tessera::kernels
