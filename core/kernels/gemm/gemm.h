// Matrix products on raw pointers: C = alpha * A B + beta * C + bias, for one matrix or a batch.
//
// Operands are given by strides, so that a transposed or sliced matrix is read where it lies. Every
// floating dtype multiplies in f32 (f64 in f64) and rounds once, at the end; integers wrap.
//
// Four engines, chosen by dtype, shape and strides alone:
//   few rows    of C (at most 64, with a short K fewer), or one column: the matrix is read once,
//               where it lies, at memory's speed (gemm_rows.h); bf16 in pairs with AVX-512 BF16.
//               A row has the same bits alone and among few
//   f32         where the processor has AMX, its tiles with operands in three bf16 parts, which
//               keeps the precision of f32 products (gemm_split.h; stretches of K with numbers so
//               small or large that parts of products leave f32's range go through registers);
//               elsewhere, and where a side is under 32, oneDNN's sgemm on tiles of C (as fast as
//               MKL here), where it was found; but with AVX2 a transposed A is one of the others
//   bf16        AMX tiles of our own where the processor has them, else pairs of bf16 in AVX-512
//               registers where it has AVX-512 BF16 (gemm_dot.h)
//   the others  packed panels and an FMA micro-kernel (AVX2 or AVX-512); f16 and bf16 are widened
//               while they are packed
// C is cut into tiles by its shape alone and each tile adds up its K in one fixed order (of bf16 a
// long K of a small C is cut too, and parts are added in order): bits do not depend on the number
// of threads. They do depend on the instruction set (isa.h, TESSERA_ISA): bf16 on AMX and AVX-512
// BF16 is added up in pairs, rounded to nearest whatever MXCSR says, and subnormal numbers count as
// zeros there.
#pragma once

#include <cstdint>

#include <tessera/core/dtype.h>

namespace tessera::kernels {

// Element (row, column) is data[row * row_stride + column * column_stride]; any strides, 0 too.
struct GemmOperand {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

enum class GemmBias : uint8_t {
  kNone,
  kColumn,  // bias[n] is added to column n: linear layers
  kRow,     // bias[m] is added to row m: convolutions, whose rows are channels
};

struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  DType dtype = kF32;         // of A and B; f64, f32, f16, bf16, i64, i32, u8
  DType result_dtype = kF32;  // of C and bias; equal to dtype, or f32 for f16 and bf16
  GemmOperand a = {};         // (m, k)
  GemmOperand b = {};         // (k, n)
  void* c = nullptr;          // (m, n), rows contiguous; must not overlap a or b
  int64_t c_row_stride = 0;
  double alpha = 1;
  double beta = 0;  // 0: C is not read
  const void* bias = nullptr;
  GemmBias bias_kind = GemmBias::kNone;

  // Batches: element offsets of each matrix. Null: one matrix.
  int64_t batch = 1;
  const int64_t* a_offsets = nullptr;  // (batch)
  const int64_t* b_offsets = nullptr;
  const int64_t* c_offsets = nullptr;
};

// Runs on num_threads() cores; on this thread alone inside a parallel loop. k = 0 gives
// beta * C + bias. Throws DTypeError for a dtype outside the list, OutOfMemory.
void gemm(const Gemm& problem);

}  // namespace tessera::kernels
