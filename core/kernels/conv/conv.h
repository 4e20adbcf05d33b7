// Convolution in two dimensions as matrix products over unfolded patches (im2col), in chunks of
// samples of at most 32 MiB. f64, f32, f16, bf16; sums are f32 (f64 for f64). Bits do not depend on
// the number of threads. Shapes are checked by the public ops; meta tensors give meta results.
#pragma once

#include <tessera/core/tensor.h>

namespace tessera::kernels {

struct ConvGeometry {
  int64_t stride[2] = {1, 1};  // height, width
  int64_t padding[2] = {0, 0};
  int64_t dilation[2] = {1, 1};
  int64_t groups = 1;
  // Of one dimension; negative or zero where the kernel does not fit.
  int64_t output_size(int64_t input, int64_t kernel, int dim) const {
    const int64_t reach = dilation[dim] * (kernel - 1) + 1, room = input + 2 * padding[dim] - reach;
    return room < 0 ? 0 : room / stride[dim] + 1;
  }
};

// Letters: N samples, C channels, O output channels, G groups.
struct ConvSizes {
  int64_t N, C, H, W, O, KH, KW, OH, OW, G;
  ConvGeometry geometry;
  ConvSizes(const Shape& x, const Shape& weight, const ConvGeometry& g)
      : N(x[0]),
        C(x[1]),
        H(x[2]),
        W(x[3]),
        O(weight[0]),
        KH(weight[2]),
        KW(weight[3]),
        OH(g.output_size(H, KH, 0)),
        OW(g.output_size(W, KW, 1)),
        G(g.groups),
        geometry(g) {}
};

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
