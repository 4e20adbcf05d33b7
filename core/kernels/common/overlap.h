// Questions that a kernel asks before it writes over memory that it may also read.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// True where writing x would write an element twice (expanded tensors). Exact for strides in which
// each dimension steps over the extent of the smaller ones; other layouts count as repeating.
bool repeats_elements(const Tensor& x);

// True where `out` and `x` share memory other than as the same elements in the same order: writing
// one would change what is still to be read of the other.
bool overlaps_shifted(const Tensor& out, const Tensor& x);

}  // namespace tessera::kernels
