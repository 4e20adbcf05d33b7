// Copies and conversions: any dtype to any, any strides to any.
//
// Elements of one dtype are moved as bytes: memcpy where both sides lie in order, 32 x 32 tiles
// where one is the transpose of the other, strided runs otherwise. Other pairs are converted by the
// rules of core/dispatch.h (round to nearest even, floats to integers towards zero). Parallel from
// 32K elements on. Throws ShapeError, DeviceError.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// target: any strides without repeated elements; source: broadcastable to its shape. A source that
// overlaps the target is copied first.
void copy_into(const Tensor& target, const Tensor& source);

// A new tensor in the order of dimensions of x where x is dense, contiguous otherwise.
Tensor convert(const Tensor& x, DType dtype);
Tensor copy(const Tensor& x);
// x itself where it is contiguous.
Tensor contiguous(const Tensor& x);

// Throws ValueError where x holds integers and has no number for the value (see can_hold).
void fill(const Tensor& x, const Scalar& value);

// False where an integer dtype has no number for the value: NaN, an infinity, beyond the range.
// Floating dtypes round, beyond their range to infinity; fractions are cut; a negative number wraps
// in u8, as in torch.
bool can_hold(DType dtype, const Scalar& value);

}  // namespace tessera::kernels
