// Tensors of one value. Kernels begin with them, so they stand below the other factory functions.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::raw {

// Throws ValueError where no element of the dtype can be the value (see kernels::can_hold).
Tensor full(const Shape& shape, const Scalar& value, DType dtype, const Device& device = kCpu);
Tensor zeros(const Shape& shape, DType dtype, const Device& device = kCpu);
Tensor zeros_like(const Tensor& x);

}  // namespace tessera::raw
