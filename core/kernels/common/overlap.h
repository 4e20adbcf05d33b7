// Whether memory overlaps, for kernels that write over memory that they may also read.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// True where writing x would write an element twice (expanded tensors). Exact for strides in which
// each dimension steps over the extent of the smaller ones; other layouts count as repeating.
bool repeats_elements(const Tensor& x);

// True if `out` and `x` share memory other than as the same elements in the same order, so that
// writing one would change what is still to be read of the other.
bool overlaps_shifted(const Tensor& out, const Tensor& x);

}  // namespace tessera::kernels
