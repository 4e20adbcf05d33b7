// Tensors of one value, below the other factory functions because kernels begin with them.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::raw {

// Throws ValueError if the dtype cannot hold the value (see kernels::can_hold).
Tensor full(const Shape& shape, const Scalar& value, DType dtype, const Device& device = kCpu);
Tensor zeros(const Shape& shape, DType dtype, const Device& device = kCpu);
Tensor zeros_like(const Tensor& x);

}  // namespace tessera::raw
