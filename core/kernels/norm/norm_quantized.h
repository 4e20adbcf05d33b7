// Norms whose result is read by products in fp8 alone.
#pragma once

#include <cstdint>

#include <tessera/core/kernels/fp8/quantize.h>
#include <tessera/core/kernels/norm/norm.h>

namespace tessera::kernels {

struct QuantizedRowNorm {
  RowNorm norm;  // without y
  Quantized y;   // [rows, columns]
};
// row_norm_forward() without dropout, and quantize() of its result as a matrix with one scale, to
// the bit. x: f32, f16 or bf16. A GPU calculates both in one pass and does not store the result
// where quantises_rows() says so and `scale` is given; else it runs one after the other.
QuantizedRowNorm row_norm_quantized(const Tensor& x, const Tensor& residual, int64_t columns,
                                    const Tensor& weight, const Tensor& bias, double eps,
                                    bool center, const QuantizeOptions& options,
                                    const Tensor& scale, const QuantizeWants& wants = {});

// To e4m3, of rows that a warp holds in registers and whose number is a multiple of 16.
inline bool quantises_rows(int64_t rows, int64_t columns, DType dtype,
                           const QuantizeOptions& options) {
  return dtype != kF64 && rows > 0 && rows % 16 == 0 && columns % 16 == 0 && columns <= 1024 &&
         options.format == kF8E4M3 && options.tile == ScaleTile::tensor();
}

}  // namespace tessera::kernels
