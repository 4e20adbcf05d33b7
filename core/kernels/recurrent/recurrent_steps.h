// What recurrent_cpu.cpp asks of recurrent_simd.cpp: products with a matrix that is packed once for
// many steps, and what stands between two of them. Internal. T and C as in recurrent.h.
#pragma once

#include <cstdint>

#include <tessera/core/dtype.h>
#include <tessera/core/isa.h>

namespace tessera::kernels {

// The right side of the products of all steps.
struct PackedMatrix {
  DType dtype;  // T
  bool pairs;   // bf16 in pairs, for AVX-512 BF16; else panels are of C
  int64_t depth, columns;
  void* panels;  // packed_matrix_bytes()
};

TS_SIMD_DECLARE(int64_t packed_matrix_bytes(const PackedMatrix& matrix));
TS_SIMD_DECLARE(int64_t packed_rows_bytes(const PackedMatrix& matrix, int64_t rows));
TS_SIMD_DECLARE(int64_t panels_of(const PackedMatrix& matrix));
// Panels [first, last) of the matrix whose element (k, column) is source[k * k_stride + column *
// column_stride].
TS_SIMD_DECLARE(void pack_matrix(const PackedMatrix& matrix, const void* source, int64_t k_stride,
                                 int64_t column_stride, int64_t first, int64_t last));
// source: (rows, depth) of T, each row contiguous.
TS_SIMD_DECLARE(void pack_step_rows(const PackedMatrix& matrix, const void* source,
                                    int64_t row_stride, int64_t rows, void* packed));
// target (rows, columns) of C = rows matrix, or is added to it; the columns of panels [first,
// last). Each element adds up its depth in one order, whatever rows and panels stand beside it.
TS_SIMD_DECLARE(void multiply_step(const PackedMatrix& matrix, const void* packed, int64_t rows,
                                   int64_t first, int64_t last, void* target, int64_t row_stride,
                                   bool accumulate));

// A step of `rows` sequences with H units, all arrays contiguous.
struct LstmStep {
  DType dtype;
  int64_t rows, H;
  void* gates;           // (rows, 4 H) of C: sums of the input, becomes the gates
  const void* products;  // (rows, 4 H) of C: recurrent sums
  void* cell;            // (rows, H) of C: becomes the next
  void* cells;           // (rows, H) of C: gets a copy, or null
  void* hidden;          // (rows, H) of T: gets the next
  void* output;          // (rows, H) of T: gets a copy
};
struct LstmStepGradient {
  DType dtype;
  int64_t rows, H;
  const void* gates;        // (rows, 4 H) of C
  const void* cell;         // (rows, H) of C: after the step
  const void* cell_before;  // (rows, H) of C
  const void* grad_output;  // (rows, H) of T, or null
  const void* grad_hidden;  // (rows, H) of C: from the step after
  void* grad_cell;          // (rows, H) of C: becomes that of cell_before
  void* grad_gates;         // (rows, 4 H) of T: of the sums before sigmoid and tanh
};
struct GruStep {
  DType dtype;
  int64_t rows, H;
  void* gates;           // (rows, 3 H) of C
  const void* products;  // (rows, 3 H) of C
  const void* bias_new;  // (H) of C, or null: the recurrent bias of the new gate
  void* recurrent_new;   // (rows, H) of C: gets the new gate's recurrent sums, or null
  void* hidden;          // (rows, H) of T
  void* output;          // (rows, H) of T
};
struct GruStepGradient {
  DType dtype;
  int64_t rows, H;
  const void* gates;          // (rows, 3 H) of C
  const void* recurrent_new;  // (rows, H) of C
  const void* hidden_before;  // (rows, H) of T
  const void* grad_output;    // (rows, H) of T, or null
  void* grad_hidden;          // (rows, H) of C: becomes what reaches hidden_before past the gates
  void* grad_input;           // (rows, 3 H) of T: of the input's sums
  void* grad_recurrent;       // (rows, 3 H) of T: of the recurrent sums
};
TS_SIMD_DECLARE(void lstm_step(const LstmStep& step));
TS_SIMD_DECLARE(void lstm_step_gradient(const LstmStepGradient& step));
TS_SIMD_DECLARE(void gru_step(const GruStep& step));
TS_SIMD_DECLARE(void gru_step_gradient(const GruStepGradient& step));

}  // namespace tessera::kernels
