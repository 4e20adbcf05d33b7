// Linear layers with what stands around them. A GPU's library makes some of it within the product
// (core/gemm_options.h says when); elsewhere these are the product and the pass one after the
// other, which is also what they must equal. Floating dtypes, no fp8; shapes are checked by the
// ops.
#pragma once

#include <tessera/core/tensor/tensor.h>

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

// Back through a linear layer and the GELU before it.
struct GeluGradients {
  Tensor before;  // (dy weight) gelu'(before): [rows, in]
  // Its sum over rows: [in]. Undefined where not wanted, or where it was not brought along: then it
  // comes with linear_gradients() of the layer before.
  Tensor bias;
};
// For GELU alone: dy gelu'(before), in one pass with its sums over rows if a GPU can read them as
// vectors. dy, before: [rows, in].
GeluGradients gelu_gradients(const Tensor& dy, const Tensor& before, bool tanh_form,
                             bool want_bias);
// dy: [rows, out]; weight: [out, in]; before: [rows, in], what GELU was applied to.
GeluGradients linear_gelu_gradients(const Tensor& dy, const Tensor& weight, const Tensor& before,
                                    bool tanh_form, bool want_bias);

}  // namespace tessera::kernels
