// Reductions over any dimensions of tensors of any layout.
//
// `dims`: sorted and unique (wrap_dims). Results are contiguous. Floats are accumulated in float
// lanes over blocks of 1024 elements and in f64 above (f64 all the way for f64), integers and bool
// in i64. The order is a function of shape and strides alone: the same bits for any thread count.
// Cost: x is read once (var, logsumexp: twice), by rows where the reduced dimension is the one
// whose elements are neighbors, by columns otherwise. Meta tensors give meta results. Throws
// DTypeError (fp8), DeviceError, IndexError (an extremum of nothing).
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// Elements are converted to `dtype` first, as torch's sum(dtype=...).
Tensor sum(const Tensor& x, const Shape& dims, bool keepdim, DType dtype);
Tensor prod(const Tensor& x, const Shape& dims, bool keepdim, DType dtype);
Tensor mean(const Tensor& x, const Shape& dims, bool keepdim);  // floating x
struct Moments {
  Tensor mean;
  Tensor variance;
};
// Two passes: the squares are those of x - mean. `correction` is subtracted from the count.
// `dtype` is that of the results; sqrt of the variance where `root`.
Moments moments(const Tensor& x, const Shape& dims, bool keepdim, double correction, bool root,
                DType dtype);
// The dtype of x; NaN propagates.
Tensor amax(const Tensor& x, const Shape& dims, bool keepdim);
Tensor amin(const Tensor& x, const Shape& dims, bool keepdim);
Tensor any(const Tensor& x, const Shape& dims, bool keepdim);  // bool; NaN counts as true
Tensor all(const Tensor& x, const Shape& dims, bool keepdim);
Tensor count_nonzero(const Tensor& x, const Shape& dims);                 // i64; NaN counts
Tensor norm(const Tensor& x, double p, const Shape& dims, bool keepdim);  // floating x
Tensor logsumexp(const Tensor& x, const Shape& dims, bool keepdim);       // floating x
// Sums to `shape`, from which x's was broadcast; x itself where it has that shape.
Tensor sum_to(const Tensor& x, const Shape& shape);

// The largest (smallest) element along `dim` and where it first stands, i64; the first NaN where
// there is one.
struct Extremum {
  Tensor values;
  Tensor indices;
};
Extremum extremum(const Tensor& x, int dim, bool keepdim, bool largest);

// Running sums and products along `dim`, in f64 (i64 for integers); from the end where `reverse`.
Tensor cumsum(const Tensor& x, int dim, DType dtype, bool reverse = false);
Tensor cumprod(const Tensor& x, int dim, DType dtype);

}  // namespace tessera::kernels
