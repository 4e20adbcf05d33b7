#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/engine.h>
#include <tessera/autograd/linear_rules.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/ops/composed_gradients.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/gemm/linear_fused.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/kernels/loss/linear_cross_entropy.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {

// ---- linear_gelu --------------------------------------------------------------------------------

const Op kLinearGelu{.name = "linear_gelu",
                     .marks = MarkRule::kSpecial,
                     .autocast = Autocast::kLow,
                     .reads = {inputs(1, 2), inputs(0, 1, 2), inputs()},
                     .composed = "gelu(linear(x, weight, bias))"};

namespace {

// y: [..., out]; weight: [out, in]. The same for the product and for the gradient of its input.
double linear_flops(const Tensor& y, const Tensor& weight) {
  return 2.0 * static_cast<double>(y.numel()) * static_cast<double>(weight.size(1));
}

void check_layer(const Op& op, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  check_defined(op, "x", x);
  check_defined(op, "weight", weight);
  TS_CHECK_SHAPE(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), op,
                 "inner dimensions differ: x is ", x, " and weight is ", weight,
                 "; x's last must equal the second of weight [out, in]");
  TS_CHECK_SHAPE(!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)), op,
                 "expects a bias of [", weight.size(0), "]; got ", bias);
}
void check_layer_dtypes(const Op& op, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()) && x.dtype() == weight.dtype() &&
                     (!bias.defined() || bias.dtype() == x.dtype()),
                 op, "expects operands of one floating dtype; got ", x, ", ", weight, " and ",
                 bias);
}

// All dimensions but the last in one; their product is spelled out, as a row may have no elements.
Tensor rows_of(const Tensor& x) {
  return raw::view(kernels::contiguous(x), {numel_of(x.shape().slice(0, x.dim() - 1)), x.size(-1)});
}

// rows weight, of inputs 0 and 1, and what reached x's gradient before: of a GPU's product it is a
// part.
Tensor input_gradient(const Tensor& rows, const Saved& s) {
  const Tensor pending = rows.device().is_cuda() ? s.take_pending(0) : Tensor();
  const Tensor grad = pending.defined()
                          ? kernels::matmul_onto(rows_of(pending), rows, s.input(1), {})
                          : kernels::matmul(rows, s.input(1));
  return raw::view(grad, s.input_shape(0));
}

// Of a weight and a bias, at these inputs.
TensorList layer_gradients(std::initializer_list<int> inputs, const Tensor& rows, const Tensor& x,
                           bool wants_bias) {
  return weight_gradients(inputs, [rows, x, wants_bias]() -> TensorList {
    const kernels::LinearGradients gradients =
        kernels::linear_gradients(rows, rows_of(x), wants_bias);
    count_flops(linear_flops(rows, gradients.weight));
    return {gradients.weight, gradients.bias};
  });
}

// Input i as recorded backwards take it, if there is one.
Tensor place_of(const Saved& s, int i, bool defined) {
  return defined ? s.input_or_place(i) : Tensor();
}
// The elements that forward kept, with the history of `made`, whose operands may be places alone.
Tensor with_history(const Tensor& elements, const Tensor& made) {
  if (!elements.defined()) return made;
  return add(made, detach(sub(reshape(elements, made.shape()), made)));
}

}  // namespace

Tensor linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Gelu approximate) {
  check_layer(kLinearGelu, x, weight, bias);
  const bool tanh_form = approximate == Gelu::kTanh, has_bias = bias.defined();
  return differentiable(
      kLinearGelu, {x, weight, bias},
      [tanh_form](Inputs in, Extras& extras) {
        check_layer_dtypes(kLinearGelu, in[0], in[1], in[2]);
        const kernels::LinearGelu result =
            kernels::linear_gelu(in[0], in[1], in[2], tanh_form, extras.wanted());
        count_flops(linear_flops(result.y, in[1]));
        if (extras.wanted()) extras.save(result.before);
        return result.y;
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        if (grad_enabled()) {
          const TensorList saved{place_of(s, 0, true), place_of(s, 1, true),
                                 place_of(s, 2, has_bias)};
          return composed_gradients(saved, dy[0], [&](const TensorList& in) {
            return gelu(with_history(s.extra(0), linear(in[0], in[1], in[2])), approximate);
          });
        }
        const Tensor before = s.extra(0);
        const auto [rows, sums] =
            kernels::gelu_gradients(rows_of(dy[0]), rows_of(before), tanh_form, s.needs(2));
        Tensor grad_x, grad_weight, grad_bias = sums;
        const bool wants_bias = s.needs(2) && !sums.defined();
        if (s.needs(0)) {
          grad_x = input_gradient(rows, s);
          count_flops(linear_flops(before, s.input(1)));
        }
        if (s.needs(1)) {
          const TensorList late = layer_gradients({1, 2}, rows, s.input(0), wants_bias);
          grad_weight = late[0];
          if (wants_bias) grad_bias = late[1];
        } else if (wants_bias) {
          grad_bias = sum(rows, {0});
        }
        return {grad_x, grad_weight, grad_bias};
      });
}

// ---- linear_gelu_linear -------------------------------------------------------------------------

const Op kLinearGeluLinear{
    .name = "linear_gelu_linear",
    .marks = MarkRule::kSpecial,
    .autocast = Autocast::kLow,
    .reads = {inputs(1, 2, 3, 4), inputs(0, 1, 2, 3, 4), inputs(3), inputs()},
    .bias = 4,
    .composed = "linear(gelu(linear(x, weight, bias)), out_weight, out_bias)"};

Tensor linear_gelu_linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
                          const Tensor& out_weight, const Tensor& out_bias, Gelu approximate,
                          const Tensor& residual) {
  check_defined(kLinearGeluLinear, "out_weight", out_weight);
  check_layer(kLinearGeluLinear, x, weight, bias);
  TS_CHECK_SHAPE(out_weight.dim() == 2 && out_weight.size(1) == weight.size(0), kLinearGeluLinear,
                 "expects weights [inner, in] and [out, inner]; got ", weight, " and ", out_weight);
  TS_CHECK_SHAPE(
      !out_bias.defined() || (out_bias.dim() == 1 && out_bias.size(0) == out_weight.size(0)),
      kLinearGeluLinear, "expects an out_bias of [", out_weight.size(0), "]; got ", out_bias);
  Shape shape = x.shape();
  shape[x.dim() - 1] = out_weight.size(0);
  TS_CHECK_SHAPE(!residual.defined() || residual.shape() == shape, kLinearGeluLinear,
                 "expects a residual of ", shape, "; got ", residual);
  const bool tanh_form = approximate == Gelu::kTanh;
  const bool has_bias = bias.defined(), has_out_bias = out_bias.defined();
  // A frozen layer's operand is not kept for it.
  const bool inner_learns =
      x.requires_grad() || weight.requires_grad() || (bias.defined() && bias.requires_grad());
  const bool outer_learns = out_weight.requires_grad();
  // On a CPU a second GELU takes less than a hundredth of the products' time, and its result would
  // be a quarter of what a transformer's layer keeps.
  const bool keeps_hidden = outer_learns && x.device().is_cuda();
  const bool keeps_before = inner_learns || (outer_learns && !keeps_hidden);
  return differentiable(
      kLinearGeluLinear, {x, weight, bias, out_weight, out_bias, residual},
      [=](Inputs in, Extras& extras) {
        check_layer_dtypes(kLinearGeluLinear, in[0], in[1], in[2]);
        check_layer_dtypes(kLinearGeluLinear, in[0], in[3], in[4]);
        const kernels::LinearGelu inner =
            kernels::linear_gelu(in[0], in[1], in[2], tanh_form, extras.wanted() && keeps_before);
        if (in[5].defined()) check_layer_dtypes(kLinearGeluLinear, in[0], in[3], in[5]);
        const Tensor y = in[5].defined()
                             ? raw::view(kernels::matmul_onto(rows_of(in[5]), rows_of(inner.y),
                                                              raw::transpose(in[3], 0, 1), in[4]),
                                         in[5].shape())
                             : kernels::linear(inner.y, in[3], in[4]);
        count_flops(linear_flops(inner.y, in[1]) + linear_flops(y, in[3]));
        if (extras.wanted()) {
          extras.save(inner.before);
          extras.save(keeps_hidden ? inner.y : Tensor());
        }
        return y;
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        if (grad_enabled()) {
          const TensorList saved{place_of(s, 0, true), place_of(s, 1, true),
                                 place_of(s, 2, has_bias), place_of(s, 3, true),
                                 place_of(s, 4, has_out_bias)};
          TensorList all = composed_gradients(saved, dy[0], [&](const TensorList& in) {
            const Tensor before = with_history(s.extra(0), linear(in[0], in[1], in[2]));
            const Tensor hidden = with_history(s.extra(1), gelu(before, approximate));
            return linear(hidden, in[3], in[4]);
          });
          all.push_back(dy[0]);
          return all;
        }
        TensorList grads(6);
        if (s.needs(5)) grads[5] = dy[0];
        if (s.needs(4)) grads[4] = s.column_sums();
        const bool wants_out_bias = s.needs(4) && !grads[4].defined();
        const Tensor rows = rows_of(dy[0]);
        if (s.needs(3)) {
          const bool kept = s.extra(1).defined();
          const TensorList outer = weight_gradients(
              {3, 4},
              [rows, kept, source = s.extra(kept ? 1 : 0), tanh_form,
               wants_out_bias]() -> TensorList {
                const Tensor hidden = kept        ? source
                                      : tanh_form ? kernels::unary<fn::GeluTanh>(source)
                                                  : kernels::unary<fn::Gelu>(source);
                const kernels::LinearGradients gradients =
                    kernels::linear_gradients(rows, rows_of(hidden), wants_out_bias);
                count_flops(linear_flops(rows, gradients.weight));
                return {gradients.weight, gradients.bias};
              });
          grads[3] = outer[0];
          if (wants_out_bias) grads[4] = outer[1];
        } else if (wants_out_bias) {
          grads[4] = sum(rows, {0});
        }
        if (!s.needs(0) && !s.needs(1) && !s.needs(2)) return grads;
        const Tensor out_weight = s.input(3);
        const auto [before, bias] = kernels::linear_gelu_gradients(
            rows, out_weight, rows_of(s.extra(0)), tanh_form, s.needs(2));
        count_flops(linear_flops(rows, out_weight));
        grads[2] = bias;
        const bool wants_bias = s.needs(2) && !bias.defined();
        if (s.needs(1)) {
          const TensorList inner = layer_gradients({1, 2}, before, s.input(0), wants_bias);
          grads[1] = inner[0];
          if (wants_bias) grads[2] = inner[1];
        } else if (wants_bias) {
          grads[2] = sum(before, {0});
        }
        if (s.needs(0)) {
          grads[0] = input_gradient(before, s);
          count_flops(linear_flops(before, s.input(1)));
        }
        return grads;
      });
}

// ---- linear_cross_entropy -----------------------------------------------------------------------

const Op kLinearCrossEntropy{.name = "linear_cross_entropy",
                             .marks = MarkRule::kAlongDims,
                             .autocast = Autocast::kLow,
                             .twice_differentiable = false,
                             .composed =
                                 "cross_entropy(linear(x, weight), target), which its argument "
                                 "twice_differentiable does"};

namespace {

// The gradient that forward made, times what it lacks and that of the loss; itself where that is 1,
// as it is where a backward begins.
Tensor scaled(const Tensor& grad, const Tensor& dy, double lacking) {
  if (lacking == 1 && arrived_ones(0)) return grad;
  if (dy.is_meta()) return mul(grad, to(dy, grad.dtype()));
  if (dy.device().is_cuda()) {  // a pass over the gradient, which takes less time than the host
    return mul(grad, lacking == 1 ? dy : mul(dy, Scalar(lacking)));
  }
  const double factor = dy.item() * lacking;
  return factor == 1 ? grad : mul(grad, Scalar(factor));
}

}  // namespace

void check_linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target) {
  check_defined(kLinearCrossEntropy, "x", x);
  check_defined(kLinearCrossEntropy, "weight", weight);
  check_defined(kLinearCrossEntropy, "target", target);
  TS_CHECK_SHAPE(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
                 kLinearCrossEntropy, "expects x [N, C] and weight [V, C]; got ", x, " and ",
                 weight);
  TS_CHECK_SHAPE(target.dim() == 1 && target.size(0) == x.size(0), kLinearCrossEntropy,
                 "expects a target of [", x.size(0), "]; got ", target);
  TS_CHECK_DTYPE(target.dtype() == kI64 || target.dtype() == kI32, kLinearCrossEntropy,
                 "expects class indices, i64 or i32; got ", target);
}

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                            int64_t ignore_index, Reduction reduction, bool twice_differentiable) {
  check_linear_cross_entropy(x, weight, target);
  if (reduction == Reduction::kNone || twice_differentiable) {
    return cross_entropy(linear(x, weight), target,
                         {.ignore_index = ignore_index, .reduction = reduction});
  }
  const bool mean = reduction == Reduction::kMean;
  const bool want_x = grad_enabled() && x.requires_grad();
  const bool want_weight = grad_enabled() && weight.requires_grad();
  return differentiable(
      kLinearCrossEntropy, {x, weight, target},
      [=](Inputs in, Extras& extras) {
        TS_CHECK_DTYPE(
            is_floating(in[0].dtype()) && !is_fp8(in[0].dtype()) && in[0].dtype() == in[1].dtype(),
            kLinearCrossEntropy, "expects x and weight of one floating dtype; got ", in[0], " and ",
            in[1]);
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
