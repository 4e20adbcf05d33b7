// fp8 of a matrix that is never whole, as the logits of a large vocabulary are not: what is
// known of it when all pieces were seen, its pieces by scales of the whole, and products whose sum
// runs over the pieces. A piece is some of the rows.
//
//     merge_largest(largest, largest_of_tiles(piece, options.tile));         // for all pieces
//     const Tensor scales = scales_of(largest, options);
//     sums.add({quantize_by(piece, options, scales), true}, {rows_of(x, first, count)});  // again
//
// Bytes, scales and counts are those that quantize() gives of the whole, piece by piece. CPU and
// meta, errors as in quantize.h.
#pragma once

#include <cstdint>

#include <tessera/core/kernels/fp8/quantize.h>

namespace tessera::kernels {

// The amax of each tile of x: f32 [tiles along M, tiles along N]; NaN where a tile has one. Reads x
// once.
Tensor largest_of_tiles(const Tensor& x, const ScaleTile& tile);
// `largest` becomes the larger of itself and `other`; a NaN stays. Both f32, of one shape.
void merge_largest(const Tensor& largest, const Tensor& other);
// The larger of two magnitudes; NaN is above all.
float larger_magnitude(float a, float b);
// fp8_scale() of each.
Tensor scales_of(const Tensor& largest, const QuantizeOptions& options);

// quantize() with one scale a tile, of largest_of_tiles()'s shape.
Quantized quantize_by(const Tensor& x, const QuantizeOptions& options, const Tensor& scales);

// `count` rows from `first` on, where a tile begins: bytes and scales, as views.
Quantized rows_of(const Quantized& q, int64_t first, int64_t count);

// a b of fp8_matmul(), of operands that come in pieces along K, all with the same scales where
// their tiles are not cut along K. Sums are f32 [M, N], scaled and rounded at the end.
class Fp8Sums {
 public:
  void add(const Fp8Operand& a, const Fp8Operand& b);
  // f32, f16 or bf16. Once: f32 is scaled in place.
  Tensor result(DType dtype) const;

 private:
  Tensor sums_;                                     // f32 [M, N]
  Tensor by_row_, by_column_;                       // inverse scales that are not in the numbers
  int64_t rows_a_scale_ = 0, columns_a_scale_ = 0;  // a tile's side
};

}  // namespace tessera::kernels
