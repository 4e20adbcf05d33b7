// Order along a dimension without sorting: running extrema, and places in sorted rows. Every dtype
// but fp8; results are contiguous. On a CPU one pass; on a GPU made of elementwise kernels and
// gathers, a few for each doubling of the dimension's size. Meta tensors give meta results.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// Where the largest (smallest) of the elements up to each stands along `dim`: i64 of x's shape. Of
// equals the last, and the last NaN once there is one.
Tensor running_extremum(const Tensor& x, int dim, bool largest);

// For each value the number of elements of its row that are smaller, or not larger where `right`:
// i64 of the shape of `values`; a NaN comes after all. sorted: [n], for all values, or [..., n]
// beside values [..., m]; ascending, of the dtype of `values`.
Tensor search_sorted(const Tensor& sorted, const Tensor& values, bool right);

}  // namespace tessera::kernels
