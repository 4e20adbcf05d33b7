#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/copy.h>
#include <tessera/core/kernels/elementwise.h>
#include <tessera/core/kernels/linear_cross_entropy.h>
#include <tessera/core/kernels/linear_fused.h>
#include <tessera/core/kernels/matmul.h>
#include <tessera/core/raw_views.h>

namespace tessera {

// ---- linear_gelu --------------------------------------------------------------------------------

const Op kLinearGelu{.name = "linear_gelu",
                     .autocast = Autocast::kLow,
                     .reads = {inputs(1), inputs(0), inputs()},
                     .twice_differentiable = false,
                     .composed = "gelu(linear(x, weight, bias))"};

namespace {

// y: [..., out]; weight: [out, in]. The same for the product and for the gradient of its input.
double linear_flops(const Tensor& y, const Tensor& weight) {
  return 2.0 * static_cast<double>(y.numel()) * static_cast<double>(weight.size(1));
}

}  // namespace

Tensor linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Gelu approximate) {
  TS_CHECK_SHAPE(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), kLinearGelu,
                 "inner dimensions differ: x is ", x, " and weight is ", weight,
                 "; x's last must equal the second of weight [out, in]");
  TS_CHECK_SHAPE(!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)),
                 kLinearGelu, "expects a bias of [", weight.size(0), "]; got ", bias);
  const bool tanh_form = approximate == Gelu::kTanh;
  return differentiable(
      kLinearGelu, {x, weight, bias},
      [tanh_form](Inputs in, Extras& extras) {
        TS_CHECK_DTYPE(is_floating(in[0].dtype()) && !is_float8(in[0].dtype()) &&
                           in[0].dtype() == in[1].dtype() &&
                           (!in[2].defined() || in[2].dtype() == in[0].dtype()),
                       kLinearGelu, "expects operands of one floating dtype; got ", in[0], ", ",
                       in[1], " and ", in[2]);
        const kernels::LinearGelu result =
            kernels::linear_gelu(in[0], in[1], in[2], tanh_form, extras.wanted());
        count_flops(linear_flops(result.y, in[1]));
        if (extras.wanted()) extras.save(result.before);
        return result.y;
      },
      [tanh_form](Grads dy, const Saved& s) -> TensorList {
        const Tensor before = s.extra(0);
        const Tensor grad = tanh_form ? kernels::binary<fn::GeluTanhGrad>(dy[0], before)
                                      : kernels::binary<fn::GeluGrad>(dy[0], before);
        const int64_t count = numel_of(grad.shape().slice(0, grad.dim() - 1));
        const Tensor rows = raw::view(kernels::contiguous(grad), {count, grad.size(-1)});
        Tensor grad_x, grad_weight, grad_bias;
        if (s.needs(0)) {
          grad_x = raw::view(kernels::matmul(rows, s.input(1)), s.input_shape(0));
          count_flops(linear_flops(before, s.input(1)));
        }
        if (s.needs(1)) {
          const Tensor x = s.input(0);
          const kernels::LinearGradients gradients =
              kernels::linear_gradients(rows, reshape(x, {count, x.size(-1)}), s.needs(2));
          count_flops(linear_flops(before, s.input(1)));
          grad_weight = gradients.weight;
          grad_bias = gradients.bias;
        } else if (s.needs(2)) {
          grad_bias = sum(rows, {0});
        }
        return {grad_x, grad_weight, grad_bias};
      });
}

// ---- linear_cross_entropy -----------------------------------------------------------------------

const Op kLinearCrossEntropy{.name = "linear_cross_entropy",
                             .autocast = Autocast::kLow,
                             .twice_differentiable = false,
                             .composed = "cross_entropy(linear(x, weight), target)"};

namespace {

// The gradient that forward made, times what it lacks and that of the loss; itself where that is 1,
// as it is where a backward begins.
Tensor scaled(const Tensor& grad, const Tensor& dy, double lacking) {
  if (dy.is_meta()) return mul(grad, to(dy, grad.dtype()));
  if (dy.device().is_cuda()) {  // a pass over the gradient, which takes less time than the host
    return mul(grad, lacking == 1 ? dy : mul(dy, Scalar(lacking)));
  }
  const double factor = dy.item() * lacking;
  return factor == 1 ? grad : mul(grad, Scalar(factor));
}

}  // namespace

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                            int64_t ignore_index, Reduction reduction) {
  TS_CHECK_SHAPE(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
                 kLinearCrossEntropy, "expects x [N, C] and weight [V, C]; got ", x, " and ",
                 weight);
  TS_CHECK_SHAPE(target.dim() == 1 && target.size(0) == x.size(0), kLinearCrossEntropy,
                 "expects a target of [", x.size(0), "]; got ", target);
  TS_CHECK_DTYPE(target.dtype() == kI64 || target.dtype() == kI32, kLinearCrossEntropy,
                 "expects class indices, i64 or i32; got ", target);
  if (reduction == Reduction::kNone) {
    return cross_entropy(linear(x, weight), target,
                         {.ignore_index = ignore_index, .reduction = reduction});
  }
  const bool mean = reduction == Reduction::kMean;
  const bool want_x = grad_enabled() && x.requires_grad();
  const bool want_weight = grad_enabled() && weight.requires_grad();
  return differentiable(
      kLinearCrossEntropy, {x, weight, target},
      [=](Inputs in, Extras& extras) {
        TS_CHECK_DTYPE(is_floating(in[0].dtype()) && !is_float8(in[0].dtype()) &&
                           in[0].dtype() == in[1].dtype(),
                       kLinearCrossEntropy, "expects x and weight of one floating dtype; got ",
                       in[0], " and ", in[1]);
        const kernels::LinearCrossEntropy result = kernels::linear_cross_entropy(
            in[0], in[1], in[2], ignore_index, mean, want_x, want_weight);
        // The two gradient products are made here as well.
        count_flops(2.0 * static_cast<double>(in[0].numel()) * static_cast<double>(in[1].size(0)) *
                    (1 + want_x + want_weight));
        if (extras.wanted()) {
          extras.save(result.grad_x);
          extras.save(result.grad_weight);
          extras.save(scalar_tensor(result.gradient_factor, kF64));
        }
        return result.loss;
      },
      [](Grads dy, const Saved& s) -> TensorList {
        const double lacking = s.extra(2).item();
        return {s.needs(0) ? scaled(s.extra(0), dy[0], lacking) : Tensor(),
                s.needs(1) ? scaled(s.extra(1), dy[0], lacking) : Tensor(), Tensor()};
      });
}

}  // namespace tessera
