// quantize() on a GPU with a scale for each row, column or tile of 128 (cast_tiles.cu). Internal.
#pragma once

#include <tessera/core/kernels/fp8/quantize.h>

namespace tessera::kernels {

// x: contiguous. As quantize(), whose tiles are not the whole matrix.
Quantized quantize_tiles(const Tensor& x, const QuantizeOptions& options,
                         const QuantizeWants& wants);

// Sums of columns, [N] of `dtype`, of those of each row of blocks: f32 [blocks, N].
Tensor fold_sums(const Tensor& sums, DType dtype);

}  // namespace tessera::kernels
