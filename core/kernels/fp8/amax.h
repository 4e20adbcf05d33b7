// The largest magnitude of a tensor, from which scales are made before it is quantized
// (quantize.h): of a part of a matrix whose other parts lie with other ranks.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// x: f32, f16 or bf16, any shape and strides. 0 where it is empty or on meta, NaN where it has one.
// Reads x once. CPU and meta; a GPU is an UnsupportedError. Throws DTypeError.
float largest_magnitude_of(const Tensor& x);
// On a GPU, whose host does not wait: largest, f32 [1], is raised to it; to infinity by a NaN.
void raise_to_largest(const Tensor& largest, const Tensor& x);

}  // namespace tessera::kernels
