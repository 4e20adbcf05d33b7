// Tensors of memory that nobody has written yet: what kernels return their results in. No gradients
// here.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::raw {

// Uninitialized, contiguous. Throws ShapeError, OutOfMemory.
Tensor empty(const Shape& shape, DType dtype, const Device& device = kCpu);
// Uninitialized with the geometry of x where x is dense (its order of dimensions is kept),
// contiguous otherwise.
Tensor empty_like(const Tensor& x);
Tensor empty_like(const Tensor& x, DType dtype);
Tensor empty_strided(const Shape& shape, const Shape& strides, DType dtype, const Device& device);

}  // namespace tessera::raw
