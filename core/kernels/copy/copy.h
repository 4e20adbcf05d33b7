// Copies and conversions: any dtype to any, any strides to any.
//
// Elements of one dtype are moved as bytes: by memcpy if both sides are in order, by 32 x 32 tiles
// if one is the transpose of the other, else by strided runs. Other pairs are converted by the
// rules of core/dispatch.h (round to nearest even, floats to integers toward zero). Parallel from
// 32K elements on. Throws ShapeError, DeviceError.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// target: any strides without repeated elements; source: broadcastable to its shape. A source that
// overlaps the target is copied first.
void copy_into(const Tensor& target, const Tensor& source);

// A new tensor with x's order of dimensions if x is dense, else contiguous.
Tensor convert(const Tensor& x, DType dtype);
Tensor copy(const Tensor& x);
// x itself if it is contiguous.
Tensor contiguous(const Tensor& x);

// Throws ValueError if x is an integer tensor that cannot hold the value (see can_hold).
void fill(const Tensor& x, const Scalar& value);

// False if the value is NaN, infinite or out of range for an integer dtype. Floating dtypes round,
// beyond their range to infinity; fractions are truncated; a negative number wraps in u8, as in
// torch.
bool can_hold(DType dtype, const Scalar& value);

}  // namespace tessera::kernels
