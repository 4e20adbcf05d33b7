// Quantization for fp8 products, which need operands in both orders: one read of the matrix scales
// and narrows it, by rows and by columns, and finds the largest magnitude.
#pragma once

#include <tessera/core/half.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

struct CastTransposed {
  Tensor values;      // [M, N] of the requested dtype; undefined if not wanted
  Tensor transposed;  // [N, M]; undefined if not wanted
  Tensor amax;        // [] f32: the largest |x|, before the scale; NaN if x has one
};
// x: [M, N], f32, f16 or bf16, any strides. dtype: f8e4m3, f8e5m2, f16 or bf16. x * scale is
// rounded to nearest even and clamped to the dtype's largest finite number; a NaN stays, and in fp8
// an infinity becomes NaN. scale: one f32 on x's device, or undefined for 1. Reads 2 or 4 bytes per
// element and writes one or two elements of the result. The bits are the same on both devices.
// Throws DTypeError, ShapeError.
CastTransposed cast_transpose(const Tensor& x, DType dtype, const Tensor& scale, bool want_values,
                              bool want_transposed);

// Calls f<Q>() with the type of a dtype that cast_transpose makes.
template <class F>
void dispatch_cast_target(DType dtype, const F& f) {
  switch (dtype) {
    case kF8E4M3:
      return f.template operator()<f8e4m3>();
    case kF8E5M2:
      return f.template operator()<f8e5m2>();
    case kF16:
      return f.template operator()<f16>();
    default:
      return f.template operator()<bf16>();
  }
}

}  // namespace tessera::kernels
