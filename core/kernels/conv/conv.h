// Convolution in two dimensions as matrix products over unfolded patches (im2col), in chunks of
// samples of at most 32 MiB. f64, f32, f16, bf16; sums are f32 (f64 for f64). Bits do not depend on
// the number of threads. Shapes are checked by the public ops; meta tensors give meta results.
#pragma once

#include <tessera/core/kernels/conv/geometry.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// x: [N, C, H, W]; weight: [O, C / groups, KH, KW]; bias: [O] or undefined. Returns [N, O, OH, OW].
Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const ConvGeometry& geometry);
// grad: [N, O, OH, OW]. Returns a tensor of x_shape.
Tensor conv2d_input_gradient(const Tensor& grad, const Tensor& weight, const Shape& x_shape,
                             const ConvGeometry& geometry);
// Returns a tensor of weight_shape.
Tensor conv2d_weight_gradient(const Tensor& grad, const Tensor& x, const Shape& weight_shape,
                              const ConvGeometry& geometry);

}  // namespace tessera::kernels
