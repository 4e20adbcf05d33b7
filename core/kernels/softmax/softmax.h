// softmax and log_softmax along one dimension, and their gradients.
//
// x: any shape and strides, f64, f32, bf16, f16; results are contiguous in x's dtype. Inside f32
// (f64 for f64), sums over blocks in f64. Rows (the last dimension) take two passes over a row in
// cache; another dimension is worked in tiles of columns. A row of -infinity gives NaN, as in
// torch. Meta tensors give meta results. Throws DTypeError, DeviceError, ShapeError.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

Tensor softmax(const Tensor& x, int dim, bool log);
// dx = y (dy - sum(dy y)), or dy - exp(y) sum(dy) where `log`; y is what forward gave.
Tensor softmax_backward(const Tensor& dy, const Tensor& y, int dim, bool log);

}  // namespace tessera::kernels
