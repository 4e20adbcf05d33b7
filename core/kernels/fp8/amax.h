// The largest magnitude of a tensor, for scales that are needed before it is quantized (quantize.h)
// because it is part of a matrix whose other parts other ranks hold.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// x: f32, f16 or bf16, any shape and strides. The result is 0 if x is empty or on meta, NaN if it
// has a NaN. Reads x once. CPU and meta; UnsupportedError on a GPU. Throws DTypeError.
float largest_magnitude_of(const Tensor& x);
// For a GPU, without a wait of the host: raises `largest`, f32 [1], to it; a NaN gives infinity.
void raise_to_largest(const Tensor& largest, const Tensor& x);

}  // namespace tessera::kernels
