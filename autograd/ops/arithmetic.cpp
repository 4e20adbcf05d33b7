// Elementwise ops of two inputs: record, forward, backward. Operands of different dtypes are
// promoted inside the kernel (kernels::promote), so no converted copy is made and autocast has
// nothing to add.
#include <cmath>
#include <limits>

#include <tessera/autograd/ops/elementwise_rules.h>
#include <tessera/core/kernels/copy/copy.h>

namespace tessera {
namespace {

using kernels::Operand;

void check_divisor(const Op& op, const Tensor& a, const Tensor& b) {
  if (is_floating(a.dtype()) || is_floating(b.dtype()) || b.is_meta()) return;
  if (a.numel() == 0 || b.numel() == 0) return;  // nothing is divided
  const std::vector<int64_t> values = b.to_vector<int64_t>();
  for (size_t i = 0; i < values.size(); ++i) {
    TS_CHECK(values[i] != 0, op, "integer division by zero; the divisor ", b, " is 0 at element ",
             i, "; convert to a floating dtype or mask the zeros");
  }
}

DType division_dtype(std::initializer_list<Operand> operands) {
  return floating_dtype(kernels::promote(operands));
}

}  // namespace

// ---- add, sub -----------------------------------------------------------------------------------

const Op kAdd{.name = "add", .marks = MarkRule::kLinear, .takes_numbers = true};
const Op kSub{.name = "sub", .marks = MarkRule::kLinear, .takes_numbers = true};

namespace {

void check_alpha(const Op& op, DType common, const Scalar& alpha) {
  TS_CHECK_DTYPE(!alpha.is_floating() || is_floating(common), op,
                 "alpha must be an integer for integer tensors; got alpha = ", alpha, " for ",
                 common);
}

void check_sub(const Operand& a, const Operand& b) {
  TS_CHECK_DTYPE(kernels::promote({a, b}) != kBool, kSub,
                 "is not defined for two bool operands; use logical_xor");
}

bool is_one(const Scalar& alpha) { return alpha.to_double() == 1; }

Tensor scaled(const Tensor& dy, const Scalar& alpha) { return is_one(alpha) ? dy : mul(dy, alpha); }

// a + sign * alpha * b, into `out` where it is given.
Tensor sum_forward(const Operand& a, const Operand& b, const Scalar& alpha, int sign,
                   const Tensor* out = nullptr) {
  const bool plain = is_one(alpha);
  const fn::AddScaled functor{sign * alpha.to_double()};
  if (out != nullptr) {
    if (plain && sign > 0) {
      kernels::binary_into<fn::Add>(*out, a, b);
    } else if (plain) {
      kernels::binary_into<fn::Sub>(*out, a, b);
    } else {
      kernels::binary_into(*out, a, b, functor);
    }
    return *out;
  }
  if (plain) return sign > 0 ? kernels::binary<fn::Add>(a, b) : kernels::binary<fn::Sub>(a, b);
  return kernels::binary(a, b, functor);
}

Tensor sum_of_tensors(const Op& op, const Tensor& a, const Tensor& b, const Scalar& alpha,
                      int sign) {
  check_arithmetic(op, a, b);
  check_alpha(op, kernels::promote({a, b}), alpha);
  return differentiable(
      op, {a, b}, [alpha, sign](Inputs in) { return sum_forward(in[0], in[1], alpha, sign); },
      [alpha, sign](Grads dy, const Saved& s) -> TensorList {
        Tensor db;
        if (s.needs(1)) db = scaled(sign > 0 ? dy[0] : neg(dy[0]), alpha);
        return {dy[0], db};
      });
}

Tensor sum_with_scalar(const Op& op, const Tensor& a, const Scalar& b, const Scalar& alpha,
                       int sign) {
  check_arithmetic(op, a);
  check_alpha(op, kernels::promote({a, b}), alpha);
  return differentiable(
      affine(op), {a}, [b, alpha, sign](Inputs in) { return sum_forward(in[0], b, alpha, sign); },
      [](Grads dy, const Saved&) { return dy[0]; });
}

const Tensor& sum_inplace(const Op& op, const Tensor& a, const Tensor& b, const Scalar& alpha,
                          int sign) {
  check_arithmetic(op, a, b);
  check_fits(op, a, b);
  check_storable(op, a, kernels::promote({a, b}));
  check_alpha(op, kernels::promote({a, b}), alpha);
  differentiable_inplace(
      op, {a, b},
      [alpha, sign](Inputs in) { return sum_forward(in[0], in[1], alpha, sign, &in[0]); },
      [alpha, sign](Grads dy, const Saved& s) -> TensorList {
        Tensor db;
        if (s.needs(1)) db = scaled(sign > 0 ? dy[0] : neg(dy[0]), alpha);
        return {dy[0], db};
      });
  return a;
}

const Tensor& sum_inplace(const Op& op, const Tensor& a, const Scalar& b, int sign) {
  check_arithmetic(op, a);
  check_storable(op, a, kernels::promote({a, b}));
  differentiable_inplace(
      affine(op), {a}, [b, sign](Inputs in) { return sum_forward(in[0], b, 1, sign, &in[0]); },
      [](Grads dy, const Saved&) { return dy[0]; });
  return a;
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b, const Scalar& alpha) {
  return sum_of_tensors(kAdd, a, b, alpha, 1);
}
Tensor add(const Tensor& a, const Scalar& b, const Scalar& alpha) {
  return sum_with_scalar(kAdd, a, b, alpha, 1);
}
const Tensor& add_(const Tensor& a, const Tensor& b, const Scalar& alpha) {
  return sum_inplace(kAdd, a, b, alpha, 1);
}
const Tensor& add_(const Tensor& a, const Scalar& b) { return sum_inplace(kAdd, a, b, 1); }

Tensor sub(const Tensor& a, const Tensor& b, const Scalar& alpha) {
  check_sub(a, b);
  return sum_of_tensors(kSub, a, b, alpha, -1);
}
Tensor sub(const Tensor& a, const Scalar& b, const Scalar& alpha) {
  check_sub(a, b);
  return sum_with_scalar(kSub, a, b, alpha, -1);
}
const Tensor& sub_(const Tensor& a, const Tensor& b, const Scalar& alpha) {
  check_sub(a, b);
  return sum_inplace(kSub, a, b, alpha, -1);
}
const Tensor& sub_(const Tensor& a, const Scalar& b) {
  check_sub(a, b);
  return sum_inplace(kSub, a, b, -1);
}

const Op kRsub{.name = "rsub", .marks = MarkRule::kPointwise};

Tensor rsub(const Scalar& a, const Tensor& b) {
  check_arithmetic(kRsub, b);
  check_sub(a, b);
  return differentiable(
      kRsub, {b}, [a](Inputs in) { return kernels::binary<fn::Sub>(a, in[0]); },
      [](Grads dy, const Saved&) { return neg(dy[0]); });
}

// ---- mul ----------------------------------------------------------------------------------------

const Op kMul{.name = "mul",
              .marks = MarkRule::kProduct,
              .takes_numbers = true,
              .reads = {inputs(1), inputs(0)}};

namespace {

TensorList mul_backward(Grads dy, const Saved& s) {
  return {s.needs(0) ? mul(dy[0], s.input(1)) : Tensor(),
          s.needs(1) ? mul(dy[0], s.input(0)) : Tensor()};
}

}  // namespace

Tensor mul(const Tensor& a, const Tensor& b) {
  check_arithmetic(kMul, a, b);
  return differentiable(
      kMul, {a, b}, [](Inputs in) { return kernels::binary<fn::Mul>(in[0], in[1]); }, mul_backward);
}

Tensor mul(const Tensor& a, const Scalar& b) {
  check_arithmetic(kMul, a);
  return differentiable(
      kMul, {a}, [b](Inputs in) { return kernels::binary<fn::Mul>(in[0], b); },
      [b](Grads dy, const Saved&) { return mul(dy[0], b); });
}

const Tensor& mul_(const Tensor& a, const Tensor& b) {
  check_arithmetic(kMul, a, b);
  check_fits(kMul, a, b);
  check_storable(kMul, a, kernels::promote({a, b}));
  differentiable_inplace(
      kMul, {a, b},
      [](Inputs in) {
        kernels::binary_into<fn::Mul>(in[0], in[0], in[1]);
        return in[0];
      },
      mul_backward);
  return a;
}

const Tensor& mul_(const Tensor& a, const Scalar& b) {
  check_arithmetic(kMul, a);
  check_storable(kMul, a, kernels::promote({a, b}));
  differentiable_inplace(
      kMul, {a},
      [b](Inputs in) {
        kernels::binary_into<fn::Mul>(in[0], in[0], b);
        return in[0];
      },
      [b](Grads dy, const Saved&) { return mul(dy[0], b); });
  return a;
}

// ---- div ----------------------------------------------------------------------------------------

const Op kDiv{.name = "div",
              .marks = MarkRule::kSpecial,
              .takes_numbers = true,
              .reads = {inputs(1), inputs(0, 1)}};

namespace {

TensorList div_backward(Grads dy, const Saved& s) {
  const Tensor b = s.input(1);
  Tensor da, db;
  if (s.needs(0)) da = div(dy[0], b);
  if (s.needs(1)) {
    const Tensor a = s.input(0);
    db = grad_enabled() ? neg(mul(dy[0], div(div(a, b), b)))
                        : kernels::ternary<fn::DivGradDivisor>(dy[0], a, b);
  }
  return {da, db};
}

}  // namespace

Tensor div(const Tensor& a, const Tensor& b) {
  check_arithmetic(kDiv, a, b);
  return differentiable(
      kDiv, {a, b},
      [](Inputs in) {
        return kernels::binary<fn::Div>(in[0], in[1], {}, division_dtype({in[0], in[1]}));
      },
      div_backward);
}

Tensor div(const Tensor& a, const Scalar& b) {
  check_arithmetic(kDiv, a);
  return differentiable(
      kDiv, {a},
      [b](Inputs in) {
        return kernels::binary<fn::Div>(in[0], b, {}, division_dtype({in[0], b}));
      },
      [b](Grads dy, const Saved&) { return div(dy[0], b); });
}

const Tensor& div_(const Tensor& a, const Tensor& b) {
  check_arithmetic(kDiv, a, b);
  check_fits(kDiv, a, b);
  check_storable(kDiv, a, division_dtype({a, b}));
  differentiable_inplace(
      kDiv, {a, b},
      [](Inputs in) {
        kernels::binary_into<fn::Div>(in[0], in[0], in[1]);
        return in[0];
      },
      div_backward);
  return a;
}

const Tensor& div_(const Tensor& a, const Scalar& b) {
  check_arithmetic(kDiv, a);
  check_storable(kDiv, a, division_dtype({a, b}));
  differentiable_inplace(
      kDiv, {a},
      [b](Inputs in) {
        kernels::binary_into<fn::Div>(in[0], in[0], b);
        return in[0];
      },
      [b](Grads dy, const Saved&) { return div(dy[0], b); });
  return a;
}

const Op kRdiv{.name = "rdiv",
               .marks = MarkRule::kPointwise,
               .reads = {inputs(0)},
               .reads_outputs = outputs(0)};

Tensor rdiv(const Scalar& a, const Tensor& b) {
  check_arithmetic(kRdiv, b);
  return differentiable(
      kRdiv, {b},
      [a](Inputs in) {
        return kernels::binary<fn::Div>(a, in[0], {}, division_dtype({a, in[0]}));
      },
      [](Grads dy, const Saved& s) { return neg(mul(dy[0], div(s.output(), s.input(0)))); });
}

// ---- floor_divide, remainder --------------------------------------------------------------------

const Op kFloorDivide{.name = "floor_divide", .marks = MarkRule::kPointwise, .takes_numbers = true};

Tensor floor_divide(const Tensor& a, const Tensor& b) {
  check_arithmetic(kFloorDivide, a, b);
  check_divisor(kFloorDivide, a, b);
  return not_differentiable(kFloorDivide, {a, b}, [](Inputs in) {
    return kernels::binary<fn::FloorDivide>(in[0], in[1]);
  });
}

Tensor floor_divide(const Tensor& a, const Scalar& b) {
  check_arithmetic(kFloorDivide, a);
  TS_CHECK(is_floating(kernels::promote({a, b})) || b.to_int() != 0, kFloorDivide,
           "integer division of ", a, " by zero; convert to a floating dtype first");
  return not_differentiable(kFloorDivide, {a},
                            [b](Inputs in) { return kernels::binary<fn::FloorDivide>(in[0], b); });
}

const Op kRemainder{.name = "remainder",
                    .marks = MarkRule::kPointwise,
                    .takes_numbers = true,
                    .reads = {inputs(), inputs(0, 1)}};

Tensor remainder(const Tensor& a, const Tensor& b) {
  check_arithmetic(kRemainder, a, b);
  check_divisor(kRemainder, a, b);
  return differentiable(
      kRemainder, {a, b}, [](Inputs in) { return kernels::binary<fn::Remainder>(in[0], in[1]); },
      [](Grads dy, const Saved& s) -> TensorList {
        Tensor db;
        if (s.needs(1)) db = neg(mul(dy[0], floor_divide(s.input(0), s.input(1))));
        return {dy[0], db};
      });
}

Tensor remainder(const Tensor& a, const Scalar& b) {
  check_arithmetic(kRemainder, a);
  TS_CHECK(is_floating(kernels::promote({a, b})) || b.to_int() != 0, kRemainder,
           "integer division of ", a, " by zero; convert to a floating dtype first");
  return differentiable(
      kRemainder, {a}, [b](Inputs in) { return kernels::binary<fn::Remainder>(in[0], b); },
      [](Grads dy, const Saved&) { return dy[0]; });
}

// ---- fmod ---------------------------------------------------------------------------------------

const Op kFmod{.name = "fmod",
               .marks = MarkRule::kPointwise,
               .takes_numbers = true,
               .reads = {inputs(), inputs(0, 1)}};

namespace {

void check_fmod(const Operand& a, const Operand& b) {
  TS_CHECK_DTYPE(kernels::promote({a, b}) != kBool, kFmod,
                 "is not defined for two bool operands; convert one with to(dtype)");
}

}  // namespace

Tensor fmod(const Tensor& a, const Tensor& b) {
  check_arithmetic(kFmod, a, b);
  check_fmod(a, b);
  check_divisor(kFmod, a, b);
  return differentiable(
      kFmod, {a, b}, [](Inputs in) { return kernels::binary<fn::Fmod>(in[0], in[1]); },
      [](Grads dy, const Saved& s) -> TensorList {
        if (!s.needs(1)) return {dy[0], Tensor()};
        const Tensor a = s.input(0), b = s.input(1);
        return {dy[0], grad_enabled() ? neg(mul(dy[0], trunc(div(a, b))))
                                      : kernels::ternary<fn::FmodGradDivisor>(dy[0], a, b)};
      });
}

Tensor fmod(const Tensor& a, const Scalar& b) {
  check_arithmetic(kFmod, a);
  check_fmod(a, b);
  TS_CHECK(is_floating(kernels::promote({a, b})) || b.to_int() != 0, kFmod, "integer division of ",
           a, " by zero; convert to a floating dtype first");
  return differentiable(
      kFmod, {a}, [b](Inputs in) { return kernels::binary<fn::Fmod>(in[0], b); },
      [](Grads dy, const Saved&) { return dy[0]; });
}

// ---- atan2 --------------------------------------------------------------------------------------

const Op kAtan2{.name = "atan2",
                .marks = MarkRule::kPointwise,
                .takes_numbers = true,
                .reads = {inputs(0, 1), inputs(0, 1)},
                .flops_per_element = 40};

namespace {

// dy other / (own^2 + other^2), and 0 at the origin.
Tensor atan2_gradient(const Tensor& dy, const Tensor& own, const Tensor& other, double sign) {
  if (!grad_enabled()) {
    return kernels::ternary(dy, own, other, fn::Atan2Grad{sign});
  }
  const Tensor sum = add(square(own), square(other)), is_origin = eq(sum, 0);
  return mul(dy, masked_fill(div(mul(other, sign), masked_fill(sum, is_origin, 1)), is_origin, 0));
}

}  // namespace

Tensor atan2(const Tensor& a, const Tensor& b) {
  check_arithmetic(kAtan2, a, b);
  return differentiable(
      kAtan2, {a, b},
      [](Inputs in) {
        return kernels::binary<fn::Atan2>(in[0], in[1], {}, division_dtype({in[0], in[1]}));
      },
      [](Grads dy, const Saved& s) -> TensorList {
        const Tensor a = s.input(0), b = s.input(1);
        return {s.needs(0) ? atan2_gradient(dy[0], a, b, 1) : Tensor(),
                s.needs(1) ? atan2_gradient(dy[0], b, a, -1) : Tensor()};
      });
}

// ---- pow ----------------------------------------------------------------------------------------

const Op kPow{.name = "pow",
              .marks = MarkRule::kPointwise,
              .autocast = Autocast::kFloat32,
              .takes_numbers = true,
              .reads = {inputs(0, 1), inputs(0, 1)},
              .reads_outputs = outputs(0),
              .flops_per_element = 30};
const Op kPowScalar{.name = "pow",
                    .marks = MarkRule::kPointwise,
                    .autocast = Autocast::kFloat32,
                    .reads = {inputs(0)},
                    .flops_per_element = 30};

namespace {

// dy b a^(b - 1), and 0 where b is 0 whatever a is.
Tensor pow_gradient_base(const Tensor& dy, const Tensor& a, const Tensor& b) {
  if (!grad_enabled()) return kernels::ternary<fn::PowGradBase>(dy, a, b);
  return where(eq(b, 0), 0, mul(dy, mul(b, pow(a, sub(b, 1)))));
}

// dy a^b log(a), and 0 where a is 0 and b is not negative.
Tensor pow_gradient_exponent(const Tensor& dy, const Tensor& y, const Tensor& log_a,
                             const Tensor& is_limit) {
  return where(is_limit, 0, mul(dy, mul(y, log_a)));
}

// Powers that need no call, as torch has them; all others go to the general kernel.
Tensor pow_forward(const Tensor& a, const Scalar& b) {
  const DType common = kernels::promote({a, b});
  const double exponent = b.to_double();
  if (is_floating(common) && is_floating(a.dtype())) {
    if (exponent == 1) return kernels::copy(a);
    if (exponent == 2) return kernels::unary<fn::Square>(a);
    if (exponent == 3) return kernels::binary<fn::Mul>(kernels::unary<fn::Square>(a), a);
    if (exponent == 0.5) return kernels::unary<fn::Sqrt>(a);
    if (exponent == -0.5) return kernels::unary<fn::Rsqrt>(a);
    if (exponent == -1) return kernels::unary<fn::Reciprocal>(a);
  }
  return kernels::binary<fn::Pow>(a, b);
}

Tensor pow_scalar_gradient(const Tensor& dy, const Tensor& x, double exponent) {
  if (exponent == 0) return zeros_like(dy);
  if (exponent == 1) return dy;
  if (exponent == 2) return mul(mul(dy, 2), x);
  return mul(dy, mul(pow(x, exponent - 1), exponent));
}

void check_pow(const Tensor& a, const Scalar& b) {
  check_arithmetic(kPowScalar, a);
  TS_CHECK(is_floating(kernels::promote({a, b})) || b.to_int() >= 0, kPowScalar,
           "integers have no negative powers; got ", a, " and the exponent ", b,
           "; convert to a floating dtype first");
}

}  // namespace

Tensor pow(const Tensor& a, const Tensor& b) {
  check_arithmetic(kPow, a, b);
  return differentiable(
      kPow, {a, b}, [](Inputs in) { return kernels::binary<fn::Pow>(in[0], in[1]); },
      [](Grads dy, const Saved& s) -> TensorList {
        const Tensor a = s.input(0), b = s.input(1);
        Tensor da, db;
        if (s.needs(0)) da = pow_gradient_base(dy[0], a, b);
        if (s.needs(1)) {
          db = pow_gradient_exponent(dy[0], s.output(), log(a), logical_and(eq(a, 0), ge(b, 0)));
        }
        return {da, db};
      });
}

Tensor pow(const Tensor& a, const Scalar& b) {
  check_pow(a, b);
  return differentiable(
      kPowScalar, {a}, [b](Inputs in) { return pow_forward(in[0], b); },
      [b](Grads dy, const Saved& s) {
        return pow_scalar_gradient(dy[0], s.input(0), b.to_double());
      });
}

const Tensor& pow_(const Tensor& a, const Scalar& b) {
  check_pow(a, b);
  check_storable(kPowScalar, a, kernels::promote({a, b}));
  differentiable_inplace(
      kPowScalar, {a},
      [b](Inputs in) {
        kernels::copy_into(in[0], pow_forward(in[0], b));
        return in[0];
      },
      [b](Grads dy, const Saved& s) {
        return pow_scalar_gradient(dy[0], s.input(0), b.to_double());
      });
  return a;
}

const Op kPowOfScalar{.name = "pow",
                      .marks = MarkRule::kPointwise,
                      .autocast = Autocast::kFloat32,
                      .reads = {inputs(0)},
                      .reads_outputs = outputs(0),
                      .flops_per_element = 30};

Tensor pow(const Scalar& a, const Tensor& b) {
  check_arithmetic(kPowOfScalar, b);
  return differentiable(
      kPowOfScalar, {b}, [a](Inputs in) { return kernels::binary<fn::Pow>(a, in[0]); },
      [base = a.to_double()](Grads dy, const Saved& s) {
        const Tensor b = s.input(0);
        if (base != 0) return mul(mul(dy[0], s.output()), std::log(base));
        const Tensor log_a = full_like(b, -std::numeric_limits<double>::infinity());
        return pow_gradient_exponent(dy[0], s.output(), log_a, ge(b, 0));
      });
}

// ---- maximum, minimum ---------------------------------------------------------------------------

const Op kMaximum{.name = "maximum",
                  .marks = MarkRule::kPointwise,
                  .takes_numbers = true,
                  .reads = {inputs(0, 1), inputs(0, 1)}};
const Op kMinimum{.name = "minimum",
                  .marks = MarkRule::kPointwise,
                  .takes_numbers = true,
                  .reads = {inputs(0, 1), inputs(0, 1)}};

namespace {

// dy where a > b, half of it where they are equal; likewise for a < b.
Tensor greater_gradient(const Tensor& dy, const Tensor& a, const Tensor& b) {
  if (!grad_enabled()) return kernels::ternary<fn::GreaterGrad>(dy, a, b);
  return masked_fill(where(eq(a, b), mul(dy, 0.5), dy), lt(a, b), 0);
}
Tensor less_gradient(const Tensor& dy, const Tensor& a, const Tensor& b) {
  if (!grad_enabled()) return kernels::ternary<fn::LessGrad>(dy, a, b);
  return masked_fill(where(eq(a, b), mul(dy, 0.5), dy), gt(a, b), 0);
}

}  // namespace

Tensor maximum(const Tensor& a, const Tensor& b) {
  check_arithmetic(kMaximum, a, b);
  return differentiable(
      kMaximum, {a, b}, [](Inputs in) { return kernels::binary<fn::Maximum>(in[0], in[1]); },
      [](Grads dy, const Saved& s) -> TensorList {
        const Tensor a = s.input(0), b = s.input(1);
        return {s.needs(0) ? greater_gradient(dy[0], a, b) : Tensor(),
                s.needs(1) ? less_gradient(dy[0], a, b) : Tensor()};
      });
}

Tensor minimum(const Tensor& a, const Tensor& b) {
  check_arithmetic(kMinimum, a, b);
  return differentiable(
      kMinimum, {a, b}, [](Inputs in) { return kernels::binary<fn::Minimum>(in[0], in[1]); },
      [](Grads dy, const Saved& s) -> TensorList {
        const Tensor a = s.input(0), b = s.input(1);
        return {s.needs(0) ? less_gradient(dy[0], a, b) : Tensor(),
                s.needs(1) ? greater_gradient(dy[0], a, b) : Tensor()};
      });
}

}  // namespace tessera
