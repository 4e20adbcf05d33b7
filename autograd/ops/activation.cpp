// Activations: record, forward, backward.
#include <cmath>

#include <tessera/autograd/ops/compute_dtype.h>
#include <tessera/autograd/ops/elementwise_rules.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

void check_real(const Op& op, const Tensor& x) {
  check_defined(op, "the input", x);
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), op,
                 "expects an f64, f32, f16 or bf16 tensor; got ", x, "; convert with to(dtype)");
}

}  // namespace

const Op kRelu{.name = "relu", .marks = MarkRule::kPointwise, .reads_outputs = outputs(0)};

namespace {

Tensor relu_backward(Grads dy, const Saved& s) {
  return gradient(dy[0], s.output(), fn::ReluGrad{},
                  [](const Tensor& dy, const Tensor& y) { return masked_fill(dy, le(y, 0), 0); });
}

}  // namespace

Tensor relu(const Tensor& x) {
  check_arithmetic(kRelu, x);
  check_not_bool(kRelu, x, "the tensor itself");
  return differentiable(kRelu, {x}, apply<fn::Relu>, relu_backward);
}

const Tensor& relu_(const Tensor& x) {
  check_arithmetic(kRelu, x);
  check_not_bool(kRelu, x, "the tensor itself");
  differentiable_inplace(
      kRelu, {x},
      [](Inputs in) {
        kernels::unary_into<fn::Relu>(in[0], in[0]);
        return in[0];
      },
      relu_backward);
  return x;
}

const Op kGelu{
    .name = "gelu", .marks = MarkRule::kPointwise, .reads = {inputs(0)}, .flops_per_element = 12};

namespace {

// Phi(x) + x phi(x)
Tensor composed_gelu_gradient(const Tensor& dy, const Tensor& x) {
  const Tensor cdf = mul(add(erf(mul(x, M_SQRT1_2)), 1), 0.5);
  const Tensor pdf = mul(exp(mul(square(x), -0.5)), M_SQRT1_2 * std::sqrt(M_1_PI));
  return mul(dy, add(cdf, mul(x, pdf)));
}

// With y = x s and s = sigmoid(2 u(x)): s + x s (1 - s) 2 u'(x)
Tensor composed_gelu_tanh_gradient(const Tensor& dy, const Tensor& x) {
  const double scale = 2 * std::sqrt(M_2_PI), cubic = 0.044715;
  const Tensor x2 = square(x);
  const Tensor s = sigmoid(mul(mul(x, add(mul(x2, cubic), 1)), scale));
  const Tensor slope = mul(add(mul(x2, 3 * cubic), 1), scale);
  return mul(dy, add(s, mul(mul(x, mul(s, rsub(1, s))), slope)));
}

}  // namespace

Tensor gelu(const Tensor& x, Gelu approximate) {
  check_real(kGelu, x);
  if (approximate == Gelu::kTanh) {
    return differentiable(kGelu, {x}, apply<fn::GeluTanh>, [](Grads dy, const Saved& s) {
      return gradient(dy[0], s.input(0), fn::GeluTanhGrad{}, composed_gelu_tanh_gradient);
    });
  }
  return differentiable(kGelu, {x}, apply<fn::Gelu>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.input(0), fn::GeluGrad{}, composed_gelu_gradient);
  });
}

const Op kSilu{
    .name = "silu", .marks = MarkRule::kPointwise, .reads = {inputs(0)}, .flops_per_element = 15};

Tensor silu(const Tensor& x) {
  check_real(kSilu, x);
  return differentiable(kSilu, {x}, apply<fn::Silu>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.input(0), fn::SiluGrad{}, [](const Tensor& dy, const Tensor& x) {
      const Tensor s = sigmoid(x);
      return mul(dy, mul(s, add(mul(x, rsub(1, s)), 1)));
    });
  });
}

const Op kElu{
    .name = "elu", .marks = MarkRule::kPointwise, .reads = {inputs(0)}, .flops_per_element = 15};

Tensor elu(const Tensor& x, double alpha) {
  check_real(kElu, x);
  return differentiable(
      kElu, {x}, [alpha](Inputs in) { return kernels::unary(in[0], fn::Elu{alpha}); },
      [alpha](Grads dy, const Saved& s) {
        return gradient(dy[0], s.input(0), fn::EluGrad{alpha},
                        [alpha](const Tensor& dy, const Tensor& x) {
                          // Clamped: an infinity in the branch not taken would give NaN later.
                          const Tensor slope = mul(exp(clamp(x, {}, 0)), alpha);
                          return mul(dy, where(gt(x, 0), 1.0, slope));
                        });
      });
}

const Op kSoftplus{.name = "softplus",
                   .marks = MarkRule::kPointwise,
                   .reads = {inputs(0)},
                   .flops_per_element = 30};

Tensor softplus(const Tensor& x, double beta, double threshold) {
  check_real(kSoftplus, x);
  return differentiable(
      kSoftplus, {x},
      [=](Inputs in) {
        return kernels::unary(in[0], fn::Softplus{beta, threshold});
      },
      [=](Grads dy, const Saved& s) {
        return gradient(dy[0], s.input(0), fn::SoftplusGrad{beta, threshold},
                        [=](const Tensor& dy, const Tensor& x) {
                          const Tensor scaled = mul(x, beta);
                          return mul(dy, where(gt(scaled, threshold), 1.0, sigmoid(scaled)));
                        });
      });
}

const Op kLeakyRelu{.name = "leaky_relu", .marks = MarkRule::kPointwise, .reads = {inputs(0)}};

Tensor leaky_relu(const Tensor& x, double negative_slope) {
  check_real(kLeakyRelu, x);
  return differentiable(
      kLeakyRelu, {x},
      [=](Inputs in) { return kernels::unary(in[0], fn::LeakyRelu{negative_slope}); },
      [=](Grads dy, const Saved& s) {
        return gradient(dy[0], s.input(0), fn::LeakyReluGrad{negative_slope},
                        [=](const Tensor& dy, const Tensor& x) {
                          return where(gt(x, 0), dy, mul(dy, negative_slope));
                        });
      });
}

const Op kGlu{
    .name = "glu", .marks = MarkRule::kAlongDims, .reads = {inputs(0)}, .flops_per_element = 15};

Tensor glu(const Tensor& x, int64_t dim) {
  check_real(kGlu, x);
  TS_CHECK_SHAPE(x.dim() > 0, kGlu, "halves a dimension and needs one; got ", x);
  const int d = wrap_dim(dim, x.dim(), kGlu.name);
  TS_CHECK_SHAPE(x.size(d) % 2 == 0, kGlu, "halves dimension ", d, " of ", x,
                 ", whose size must be even");
  const int64_t half = x.size(d) / 2;
  return differentiable(
      along(kGlu, d), {x},
      [=](Inputs in) {
        return kernels::binary<fn::Mul>(
            raw::narrow(in[0], d, 0, half),
            kernels::unary<fn::Sigmoid>(raw::narrow(in[0], d, half, half)));
      },
      [=](Grads dy, const Saved& s) {
        const Tensor x = s.input(0), value = narrow(x, d, 0, half);
        const Tensor gate = sigmoid(narrow(x, d, half, half)), up = mul(dy[0], gate);
        return cat(TensorList{up, mul(mul(up, value), rsub(1, gate))}, d);
      });
}

// ---- Activations that are made of others
// ---------------------------------------------------------

Tensor selu(const Tensor& x) {
  constexpr double kAlpha = 1.6732632423543772848, kScale = 1.0507009873554804934;
  TS_CHECK(x.defined(), "selu", "the input is undefined; give it a value first");
  return mul(elu(x, kAlpha), kScale);
}

// Beside x nothing is kept: what the formulas have in between is made again in backward.
const Op kMish{
    .name = "mish", .marks = MarkRule::kPointwise, .reads = {inputs(0)}, .flops_per_element = 45};

Tensor mish(const Tensor& x) {
  check_real(kMish, x);
  return differentiable(
      kMish, {x},
      [](Inputs in) {
        const Tensor wide = in_compute(in[0]);
        return to(mul(wide, tanh(softplus(wide))), in[0].dtype());
      },
      [](Grads dy, const Saved& s) {
        const Tensor x = in_compute(s.input(0)), t = tanh(softplus(x));
        const Tensor slope = mul(mul(x, sigmoid(x)), rsub(1, square(t)));
        return mul(in_compute(dy[0]), add(t, slope));
      });
}

const Op kHardswish{.name = "hardswish",
                    .marks = MarkRule::kPointwise,
                    .reads = {inputs(0)},
                    .flops_per_element = 4};

Tensor hardswish(const Tensor& x) {
  check_real(kHardswish, x);
  return differentiable(
      kHardswish, {x},
      [](Inputs in) {
        const Tensor wide = in_compute(in[0]);
        return to(div(mul(wide, clamp(add(wide, 3), 0, 6)), 6), in[0].dtype());
      },
      [](Grads dy, const Saved& s) {
        const Tensor x = in_compute(s.input(0)), up = in_compute(dy[0]);
        const Tensor inside = mul(up, add(div(x, 3), 0.5));
        return where(ge(x, 3), up, masked_fill(inside, le(x, -3), 0));
      });
}

const Op kPrelu{.name = "prelu",
                .marks = MarkRule::kAlongDims,
                .autocast = Autocast::kLow,
                .reads = {inputs(0, 1), inputs(0)}};

Tensor prelu(const Tensor& x, const Tensor& weight) {
  check_real(kPrelu, x);
  check_defined(kPrelu, "weight", weight);
  const int64_t channels = x.dim() == 0 ? 1 : x.size(x.dim() == 1 ? 0 : 1);
  TS_CHECK_SHAPE(weight.dim() <= 1 && (weight.numel() == 1 || weight.numel() == channels), kPrelu,
                 "expects a weight of one element or of ", channels, ", the channels of ", x,
                 "; got ", weight);
  // As x's channels lie.
  Shape shape = Shape::filled(x.dim(), 1);
  if (weight.numel() != 1) shape[x.dim() == 1 ? 0 : 1] = channels;
  return differentiable(
      kPrelu, {x, reshape(weight, shape)},
      [](Inputs in) {
        TS_CHECK_DTYPE(in[0].dtype() == in[1].dtype(), kPrelu,
                       "expects operands of one dtype; got ", in[0], " and ", in[1],
                       "; convert one with to(dtype)");
        return where(gt(in[0], 0), in[0], mul(in[0], in[1]));
      },
      [](Grads dy, const Saved& s) -> TensorList {
        const Tensor x = s.input(0), positive = gt(x, 0);
        return {s.needs(0) ? where(positive, dy[0], mul(dy[0], s.input(1))) : Tensor(),
                s.needs(1) ? mul(dy[0], masked_fill(x, positive, 0)) : Tensor()};
      });
}

}  // namespace tessera
