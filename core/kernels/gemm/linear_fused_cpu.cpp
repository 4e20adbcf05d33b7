#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/gemm/linear_fused.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {

LinearGelu linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, bool tanh_form,
                       bool want_before) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::linear_gelu>("linear_gelu", x.device(), x, weight, bias, tanh_form,
                                         want_before);
  }
  const Tensor before = linear(x, weight, bias);
  return {tanh_form ? unary<fn::GeluTanh>(before) : unary<fn::Gelu>(before),
          want_before ? before : Tensor()};
}

LinearGradients linear_gradients(const Tensor& dy, const Tensor& x, bool want_bias) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::linear_gradients>("linear", x.device(), dy, x, want_bias);
  }
  return {matmul(raw::transpose(dy, 0, 1), x),
          want_bias ? sum(dy, {0}, false, dy.dtype()) : Tensor()};
}

GeluGradients gelu_gradients(const Tensor& dy, const Tensor& before, bool tanh_form,
                             bool want_bias) {
  if (dy.device().is_cuda()) {
    return on_cuda<kernels::gelu_gradients>("gelu", dy.device(), dy, before, tanh_form, want_bias);
  }
  return {tanh_form ? binary<fn::GeluTanhGrad>(dy, before) : binary<fn::GeluGrad>(dy, before), {}};
}

GeluGradients linear_gelu_gradients(const Tensor& dy, const Tensor& weight, const Tensor& before,
                                    bool tanh_form, bool want_bias) {
  if (dy.device().is_cuda()) {
    return on_cuda<kernels::linear_gelu_gradients>("linear_gelu_linear", dy.device(), dy, weight,
                                                   before, tanh_form, want_bias);
  }
  const Tensor grad = matmul(dy, weight);
  tanh_form ? binary_into<fn::GeluTanhGrad>(grad, grad, before)
            : binary_into<fn::GeluGrad>(grad, grad, before);
  return {grad, Tensor()};
}

}  // namespace tessera::kernels
