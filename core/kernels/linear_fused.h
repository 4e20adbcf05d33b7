// Linear layers with what stands around them. A GPU's library makes some of it within the product
// (core/gemm_options.h says when); elsewhere these are the product and the pass one after the
// other, which is also what they must equal. Floating dtypes, no float8; shapes are checked by the
// ops.
#pragma once

#include <tessera/core/tensor.h>

namespace tessera::kernels {

struct LinearGelu {
  Tensor y;       // gelu(before)
  Tensor before;  // x weight^T + bias, for backward; undefined where not wanted
};
// x: [..., in]; weight: [out, in]; bias: [out] or undefined. `tanh_form`: the approximation, which
// is the one that the library has.
LinearGelu linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, bool tanh_form,
                       bool want_before);

struct LinearGradients {
  Tensor weight;  // dy^T x: [out, in]
  Tensor bias;    // sum of dy over rows: [out]; undefined where not wanted
};
// dy: [rows, out]; x: [rows, in].
LinearGradients linear_gradients(const Tensor& dy, const Tensor& x, bool want_bias);

}  // namespace tessera::kernels
