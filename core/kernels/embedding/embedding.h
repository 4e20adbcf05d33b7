// Embedding tables and rotary positions.
#pragma once

#include <tessera/core/isa.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {
struct bf16;
struct f16;
}  // namespace tessera

namespace tessera::kernels {

// index: i64 or i32, any shape; weight: [V, C], any dtype. Result [..., C], by one memcpy per row.
// Throws IndexError for an index outside [0, V).
Tensor embedding(const Tensor& index, const Tensor& weight);
// The same rows plus `other`, which has weight's dtype and broadcasts to [..., C]. A GPU needs one
// pass if other's memory is one piece that repeats, as that of positions does.
Tensor embedding_add(const Tensor& index, const Tensor& weight, const Tensor& other);

// Rows of grad [..., C] summed by their index: [V, C] of grad's dtype. One thread sums each row in
// the order of the index, in f32 for f16 and bf16, without atomics: it takes a counting sort of the
// index, then one pass over grad and one over the result. The row padding_idx stays 0; -1 is none.
// If `onto` ([V, C] of grad's dtype, contiguous) is given, the sums are added to it with one
// rounding, and it is the result; rows that are not in index are not touched.
Tensor embedding_backward(const Tensor& grad, const Tensor& index, int64_t V, int64_t padding_idx,
                          const Tensor& onto = {});

// Rotates pairs of the last dimension by the angles whose cos and sin are given: (a, b) becomes (a
// cos - b sin, a sin + b cos), or with `inverse` (a cos + b sin, b cos - a sin), its gradient. x:
// [..., T, C], floating, C even; cos, sin: broadcastable to [..., T, C / 2], of x's dtype or f32.
// Pairs are (i, i + C / 2), or (2 i, 2 i + 1) if interleaved.
Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
              bool inverse);

// A row of rotary, in embedding_simd.cpp. `half` = C / 2.
#define TS_ROTARY_DECLARE(T, A)                                                               \
  TS_SIMD_DECLARE(void rotary_row(const T* x, const A* cos, const A* sin, T* y, int64_t half, \
                                  bool interleaved, bool inverse))
TS_ROTARY_DECLARE(double, double)
TS_ROTARY_DECLARE(float, float)
TS_ROTARY_DECLARE(f16, float)
TS_ROTARY_DECLARE(bf16, float)
#undef TS_ROTARY_DECLARE

// result[0..n) = sum of rows[order[0..count)] in this order, each row `stride` elements apart; when
// it adds, result's own elements come first.
#define TS_SUM_ROWS_DECLARE(T)                                                       \
  TS_SIMD_DECLARE(void sum_rows(const T* rows, int64_t stride, const int64_t* order, \
                                int64_t count, T* result, int64_t n, bool adds))
TS_SUM_ROWS_DECLARE(double)
TS_SUM_ROWS_DECLARE(float)
TS_SUM_ROWS_DECLARE(f16)
TS_SUM_ROWS_DECLARE(bf16)
#undef TS_SUM_ROWS_DECLARE

}  // namespace tessera::kernels
