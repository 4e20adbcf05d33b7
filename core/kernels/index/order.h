// Order along a dimension without sorting: running extrema, and searches in sorted rows. Every
// dtype but fp8; results are contiguous. A CPU makes one pass; a GPU uses elementwise kernels and
// gathers, a few for each doubling of the dimension's size. Meta tensors give meta results.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// The index along `dim` of the largest (smallest) element so far: i64 of x's shape. Of equal
// elements it is the last, and once there is a NaN, the last NaN.
Tensor running_extremum(const Tensor& x, int dim, bool largest);

// For each value the number of elements of its row that are smaller, or not larger if `right`: i64
// of the shape of `values`; a NaN comes last. sorted: ascending, [n] for all values, or [..., n]
// for values [..., m]; of the dtype of `values`.
Tensor search_sorted(const Tensor& sorted, const Tensor& values, bool right);

}  // namespace tessera::kernels
