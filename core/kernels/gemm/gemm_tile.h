// What gemm_cpu.cpp asks of gemm_simd.cpp, one tile of C over the whole of K, and of
// gemm_rows_simd.cpp, few rows times a matrix. Internal.
#pragma once

#include <cstdint>

#include <tessera/core/isa.h>
#include <tessera/core/kernels/gemm/gemm.h>

namespace tessera::kernels {

// Tiles of C. Two operands of a tile fit L2 together (2 MiB); 512 x 768 costs 3% of the time for
// packing in f32.
inline constexpr int64_t kGemmTileRows = 512;
inline constexpr int64_t kGemmTileColumns = 768;

// c = alpha * sums + beta * c + bias, with one rounding.
struct GemmFinish {
  int64_t m, n;
  const void* sums;  // f64 for f64, else f32; may be c
  int64_t sums_row_stride;
  void* c;
  int64_t c_row_stride;
  DType dtype;  // of c and bias
  double alpha, beta;
  const void* bias;
  GemmBias bias_kind;
  bool rounds_bf16 = false;  // the processor has AVX-512 BF16, and may use it
};

struct GemmTile {
  int64_t m, n, k;
  DType dtype;  // of a and b
  const void* a;
  int64_t a_row_stride, a_column_stride;
  const void* b;
  int64_t b_row_stride, b_column_stride;
  void* sums;  // (m, n): f64 for f64, else f32
  int64_t sums_row_stride;
  bool accumulate;                // add to sums
  bool sums_are_scratch = false;  // only `finish` reads them
  // Whose instructions multiply. kAmx: bf16 on tiles, f32 and f16 there in parts; kBf16: bf16 in
  // pairs; else f16 and bf16 are widened.
  Isa isa;
  void* scratch;                       // gemm_scratch_bytes(m, n)
  const GemmFinish* finish = nullptr;  // from sums to C, of the whole tile; null: sums are C
};

// sums = a B of few rows, with B read where it lies (gemm_rows.h).
struct GemmRows {
  int64_t m, n, k;
  DType dtype;    // of b
  bool in_pairs;  // bf16 is multiplied in pairs
  const void* a;  // (m, k): bf16 in pairs, else f64 for f64 and f32; rows in one piece
  int64_t a_row_stride;
  const void* b;  // (k, n); one of its strides is 1
  int64_t b_row_stride, b_column_stride;
  void* sums;  // (m, n): f64 for f64, else f32; up to a multiple of 32 columns is written
  int64_t sums_row_stride;
};

TS_SIMD_DECLARE(int64_t gemm_scratch_bytes(int64_t m, int64_t n));
// What the columns of a tile are to be a multiple of, so that no registers are left empty.
TS_SIMD_DECLARE(int64_t gemm_column_multiple(DType dtype, Isa isa));
TS_SIMD_DECLARE(void gemm_tile(const GemmTile& tile));
TS_SIMD_DECLARE(void gemm_finish(const GemmFinish& finish));
TS_SIMD_DECLARE(void gemm_rows(const GemmRows& rows));

}  // namespace tessera::kernels
