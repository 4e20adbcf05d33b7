// Quantisation for float8 products, whose operands are needed in both orders: a matrix times a
// scale, narrowed, by rows and by columns, with the largest magnitude beside it. One read of the
// matrix for all of it.
#pragma once

#include <tessera/core/tensor.h>

namespace tessera::kernels {

struct CastTransposed {
  Tensor values;      // [M, N] of the dtype asked for; undefined where not wanted
  Tensor transposed;  // [N, M]; undefined where not wanted
  Tensor amax;        // [] f32: the largest |x|, before the scale; NaN where x has one
};
// x: [M, N], f32, f16 or bf16, any strides. dtype: f8e4m3, f8e5m2, f16 or bf16; x * scale is
// rounded to nearest even and ends at the dtype's largest finite number, NaN stays. scale: one f32
// beside x, or undefined for 1. Reads 2 or 4 bytes an element and writes one or two of the result's
// size. The bits are the same on both devices. Throws DTypeError, ShapeError.
CastTransposed cast_transpose(const Tensor& x, DType dtype, const Tensor& scale, bool want_values,
                              bool want_transposed);

}  // namespace tessera::kernels
