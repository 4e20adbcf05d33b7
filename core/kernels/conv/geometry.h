// Sizes of convolution and pooling in two dimensions.
#pragma once

#include <cstdint>

#include <tessera/core/shape.h>

namespace tessera::kernels {

struct ConvGeometry {
  int64_t stride[2] = {1, 1};  // height, width
  int64_t padding[2] = {0, 0};
  int64_t dilation[2] = {1, 1};
  int64_t groups = 1;
  // Positions of the kernel; 0: as many as fit. A transposed convolution has as many as its input,
  // and its output has room for more if output_padding is a stride or more.
  int64_t positions[2] = {0, 0};
  // The output size of one dimension; 0 if the kernel does not fit.
  int64_t output_size(int64_t input, int64_t kernel, int dim) const {
    if (positions[dim] > 0) return positions[dim];
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

}  // namespace tessera::kernels
