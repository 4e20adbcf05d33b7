// Elementwise ops of one input: record, forward, backward.
#include <cmath>
#include <limits>

#include <tessera/autograd/ops/elementwise_rules.h>
#include <tessera/core/kernels/copy/copy.h>

namespace tessera {
namespace {

// Ops that are the identity on integers.
template <class F>
Tensor apply_rounding(Inputs in) {
  return is_floating(in[0].dtype()) ? kernels::unary<F>(in[0]) : kernels::copy(in[0]);
}

Tensor zero_gradient(Grads dy, const Saved&) { return zeros_like(dy[0]); }

}  // namespace

const Op kNeg{.name = "neg", .marks = MarkRule::kLinear};

Tensor neg(const Tensor& x) {
  check_arithmetic(kNeg, x);
  check_not_bool(kNeg, x, "logical_not");
  return differentiable(kNeg, {x}, apply<fn::Neg>,
                        [](Grads dy, const Saved&) { return neg(dy[0]); });
}

const Op kAbs{.name = "abs", .marks = MarkRule::kPointwise, .reads = {inputs(0)}};

Tensor abs(const Tensor& x) {
  check_arithmetic(kAbs, x);
  check_not_bool(kAbs, x, "the tensor itself");
  return differentiable(kAbs, {x}, apply<fn::Abs>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.input(0), fn::AbsGrad{},
                    [](const Tensor& dy, const Tensor& x) { return mul(dy, sign(x)); });
  });
}

const Op kSign{.name = "sign", .marks = MarkRule::kPointwise};

Tensor sign(const Tensor& x) {
  check_arithmetic(kSign, x);
  return differentiable(kSign, {x}, apply<fn::Sign>, zero_gradient);
}

const Op kFloor{.name = "floor", .marks = MarkRule::kPointwise};

Tensor floor(const Tensor& x) {
  check_arithmetic(kFloor, x);
  check_not_bool(kFloor, x, "the tensor itself");
  return differentiable(kFloor, {x}, apply_rounding<fn::Floor>, zero_gradient);
}

const Op kCeil{.name = "ceil", .marks = MarkRule::kPointwise};

Tensor ceil(const Tensor& x) {
  check_arithmetic(kCeil, x);
  check_not_bool(kCeil, x, "the tensor itself");
  return differentiable(kCeil, {x}, apply_rounding<fn::Ceil>, zero_gradient);
}

const Op kRound{.name = "round", .marks = MarkRule::kPointwise};

Tensor round(const Tensor& x) {
  check_arithmetic(kRound, x);
  check_not_bool(kRound, x, "the tensor itself");
  return differentiable(kRound, {x}, apply_rounding<fn::Round>, zero_gradient);
}

const Op kTrunc{.name = "trunc", .marks = MarkRule::kPointwise};

Tensor trunc(const Tensor& x) {
  check_arithmetic(kTrunc, x);
  check_not_bool(kTrunc, x, "the tensor itself");
  return differentiable(kTrunc, {x}, apply_rounding<fn::Trunc>, zero_gradient);
}

const Op kSquare{.name = "square", .marks = MarkRule::kPointwise, .reads = {inputs(0)}};

Tensor square(const Tensor& x) {
  check_arithmetic(kSquare, x);
  if (x.dtype() == kBool) return to(x, kI64);  // torch's square is pow(x, 2)
  return differentiable(kSquare, {x}, apply<fn::Square>,
                        [](Grads dy, const Saved& s) { return mul(mul(dy[0], 2), s.input(0)); });
}

const Op kExp{.name = "exp",
              .marks = MarkRule::kPointwise,
              .autocast = Autocast::kFloat32,
              .reads_outputs = outputs(0),
              .flops_per_element = 12};

Tensor exp(const Tensor& x) {
  check_arithmetic(kExp, x);
  return differentiable(kExp, {x}, apply_floating<fn::Exp>,
                        [](Grads dy, const Saved& s) { return mul(dy[0], s.output()); });
}

const Op kExpm1{.name = "expm1",
                .marks = MarkRule::kPointwise,
                .autocast = Autocast::kFloat32,
                .reads_outputs = outputs(0),
                .flops_per_element = 14};

Tensor expm1(const Tensor& x) {
  check_arithmetic(kExpm1, x);
  return differentiable(kExpm1, {x}, apply_floating<fn::Expm1>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.output(), fn::Expm1Grad{},
                    [](const Tensor& dy, const Tensor& y) { return mul(dy, add(y, 1)); });
  });
}

const Op kLog{.name = "log",
              .marks = MarkRule::kPointwise,
              .autocast = Autocast::kFloat32,
              .reads = {inputs(0)},
              .flops_per_element = 14};

Tensor log(const Tensor& x) {
  check_arithmetic(kLog, x);
  return differentiable(kLog, {x}, apply_floating<fn::Log>,
                        [](Grads dy, const Saved& s) { return div(dy[0], s.input(0)); });
}

const Op kLog2{.name = "log2",
               .marks = MarkRule::kPointwise,
               .autocast = Autocast::kFloat32,
               .reads = {inputs(0)},
               .flops_per_element = 14};

Tensor log2(const Tensor& x) {
  check_arithmetic(kLog2, x);
  return differentiable(kLog2, {x}, apply_floating<fn::Log2>, [](Grads dy, const Saved& s) {
    return mul(div(dy[0], s.input(0)), 1 / M_LN2);
  });
}

const Op kLog10{.name = "log10",
                .marks = MarkRule::kPointwise,
                .autocast = Autocast::kFloat32,
                .reads = {inputs(0)},
                .flops_per_element = 14};

Tensor log10(const Tensor& x) {
  check_arithmetic(kLog10, x);
  return differentiable(kLog10, {x}, apply_floating<fn::Log10>, [](Grads dy, const Saved& s) {
    return mul(div(dy[0], s.input(0)), 1 / M_LN10);
  });
}

const Op kLog1p{.name = "log1p",
                .marks = MarkRule::kPointwise,
                .autocast = Autocast::kFloat32,
                .reads = {inputs(0)},
                .flops_per_element = 16};

Tensor log1p(const Tensor& x) {
  check_arithmetic(kLog1p, x);
  return differentiable(kLog1p, {x}, apply_floating<fn::Log1p>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.input(0), fn::Log1pGrad{},
                    [](const Tensor& dy, const Tensor& x) { return div(dy, add(x, 1)); });
  });
}

const Op kSqrt{.name = "sqrt", .marks = MarkRule::kPointwise, .reads_outputs = outputs(0)};

Tensor sqrt(const Tensor& x) {
  check_arithmetic(kSqrt, x);
  return differentiable(kSqrt, {x}, apply_floating<fn::Sqrt>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.output(), fn::SqrtGrad{},
                    [](const Tensor& dy, const Tensor& y) { return div(dy, mul(y, 2)); });
  });
}

const Op kRsqrt{.name = "rsqrt",
                .marks = MarkRule::kPointwise,
                .autocast = Autocast::kFloat32,
                .reads_outputs = outputs(0),
                .flops_per_element = 2};

Tensor rsqrt(const Tensor& x) {
  check_arithmetic(kRsqrt, x);
  return differentiable(kRsqrt, {x}, apply_floating<fn::Rsqrt>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.output(), fn::RsqrtGrad{}, [](const Tensor& dy, const Tensor& y) {
      return mul(mul(dy, -0.5), pow(y, 3));
    });
  });
}

const Op kReciprocal{.name = "reciprocal",
                     .marks = MarkRule::kPointwise,
                     .autocast = Autocast::kFloat32,
                     .reads_outputs = outputs(0)};

Tensor reciprocal(const Tensor& x) {
  check_arithmetic(kReciprocal, x);
  return differentiable(
      kReciprocal, {x}, apply_floating<fn::Reciprocal>, [](Grads dy, const Saved& s) {
        return gradient(dy[0], s.output(), fn::ReciprocalGrad{},
                        [](const Tensor& dy, const Tensor& y) { return neg(mul(dy, square(y))); });
      });
}

const Op kSin{
    .name = "sin", .marks = MarkRule::kPointwise, .reads = {inputs(0)}, .flops_per_element = 20};

Tensor sin(const Tensor& x) {
  check_arithmetic(kSin, x);
  return differentiable(kSin, {x}, apply_floating<fn::Sin>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.input(0), fn::SinGrad{},
                    [](const Tensor& dy, const Tensor& x) { return mul(dy, cos(x)); });
  });
}

const Op kCos{
    .name = "cos", .marks = MarkRule::kPointwise, .reads = {inputs(0)}, .flops_per_element = 20};

Tensor cos(const Tensor& x) {
  check_arithmetic(kCos, x);
  return differentiable(kCos, {x}, apply_floating<fn::Cos>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.input(0), fn::CosGrad{},
                    [](const Tensor& dy, const Tensor& x) { return neg(mul(dy, sin(x))); });
  });
}

const Op kTan{.name = "tan",
              .marks = MarkRule::kPointwise,
              .autocast = Autocast::kFloat32,
              .reads_outputs = outputs(0),
              .flops_per_element = 40};

Tensor tan(const Tensor& x) {
  check_arithmetic(kTan, x);
  return differentiable(kTan, {x}, apply_floating<fn::Tan>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.output(), fn::TanGrad{},
                    [](const Tensor& dy, const Tensor& y) { return mul(dy, add(square(y), 1)); });
  });
}

const Op kTanh{.name = "tanh",
               .marks = MarkRule::kPointwise,
               .reads_outputs = outputs(0),
               .flops_per_element = 16};

Tensor tanh(const Tensor& x) {
  check_arithmetic(kTanh, x);
  return differentiable(kTanh, {x}, apply_floating<fn::Tanh>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.output(), fn::TanhGrad{},
                    [](const Tensor& dy, const Tensor& y) { return mul(dy, rsub(1, square(y))); });
  });
}

const Op kSigmoid{.name = "sigmoid",
                  .marks = MarkRule::kPointwise,
                  .reads_outputs = outputs(0),
                  .flops_per_element = 14};

Tensor sigmoid(const Tensor& x) {
  check_arithmetic(kSigmoid, x);
  return differentiable(kSigmoid, {x}, apply_floating<fn::Sigmoid>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.output(), fn::SigmoidGrad{},
                    [](const Tensor& dy, const Tensor& y) { return mul(dy, mul(rsub(1, y), y)); });
  });
}

const Op kErf{
    .name = "erf", .marks = MarkRule::kPointwise, .reads = {inputs(0)}, .flops_per_element = 30};

Tensor erf(const Tensor& x) {
  check_arithmetic(kErf, x);
  return differentiable(kErf, {x}, apply_floating<fn::Erf>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.input(0), fn::ErfGrad{}, [](const Tensor& dy, const Tensor& x) {
      return mul(dy, mul(exp(neg(square(x))), 2 / std::sqrt(M_PI)));
    });
  });
}

const Op kErfinv{.name = "erfinv",
                 .marks = MarkRule::kPointwise,
                 .autocast = Autocast::kFloat32,
                 .reads = {inputs(0)},
                 .flops_per_element = 50};

Tensor erfinv(const Tensor& x) {
  check_arithmetic(kErfinv, x);
  return differentiable(kErfinv, {x}, apply_floating<fn::Erfinv>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.input(0), fn::ErfinvGrad{}, [](const Tensor& dy, const Tensor& x) {
      return mul(dy, mul(exp(square(erfinv(x))), std::sqrt(M_PI) / 2));
    });
  });
}

const Op kLgamma{
    .name = "lgamma", .marks = MarkRule::kPointwise, .reads = {inputs(0)}, .flops_per_element = 50};

Tensor lgamma(const Tensor& x) {
  check_arithmetic(kLgamma, x);
  return differentiable(kLgamma, {x}, apply_floating<fn::Lgamma>, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.input(0), fn::LgammaGrad{},
                    [](const Tensor& dy, const Tensor& x) { return mul(dy, digamma(x)); });
  });
}

const Op kDigamma{.name = "digamma",
                  .marks = MarkRule::kPointwise,
                  .reads = {inputs(0)},
                  .flops_per_element = 60};
const Op kPolygamma{.name = "polygamma",
                    .marks = MarkRule::kPointwise,
                    .reads = {inputs(0)},
                    .flops_per_element = 200};

namespace {

template <class F>
F polygamma_functor(int64_t n) {
  return {static_cast<double>(n), (n % 2 == 0 ? -1 : 1) * std::tgamma(static_cast<double>(n + 1))};
}

// dy times the derivative of polygamma(n, x).
Tensor polygamma_gradient(const Tensor& dy, const Tensor& x, int64_t n) {
  return gradient(dy, x, polygamma_functor<fn::PolygammaGrad>(n + 1),
                  [n](const Tensor& dy, const Tensor& x) { return mul(dy, polygamma(n + 1, x)); });
}

}  // namespace

Tensor digamma(const Tensor& x) {
  check_arithmetic(kDigamma, x);
  return differentiable(kDigamma, {x}, apply_floating<fn::Digamma>, [](Grads dy, const Saved& s) {
    return polygamma_gradient(dy[0], s.input(0), 0);
  });
}

Tensor polygamma(int64_t n, const Tensor& x) {
  check_arithmetic(kPolygamma, x);
  TS_CHECK(n >= 0, kPolygamma, "expects an order of at least 0; got ", n);
  if (n == 0) return digamma(x);
  return differentiable(
      kPolygamma, {x},
      [n](Inputs in) {
        return kernels::unary(in[0], polygamma_functor<fn::Polygamma>(n),
                              floating_dtype(in[0].dtype()));
      },
      [n](Grads dy, const Saved& s) { return polygamma_gradient(dy[0], s.input(0), n); });
}

const Op kClamp{.name = "clamp", .marks = MarkRule::kPointwise, .reads = {inputs(0)}};

namespace {

DType clamp_dtype(const Tensor& x, const std::optional<Scalar>& min,
                  const std::optional<Scalar>& max) {
  DType dtype = x.dtype();
  if (min) dtype = promote_types(dtype, *min);
  if (max) dtype = promote_types(dtype, *max);
  return dtype;
}

void check_clamp(const Tensor& x, const std::optional<Scalar>& min,
                 const std::optional<Scalar>& max) {
  check_arithmetic(kClamp, x);
  TS_CHECK(min || max, kClamp, "expects min, max or both");
  TS_CHECK_DTYPE(clamp_dtype(x, min, max) != kBool, kClamp, "is not defined for bool; got ", x,
                 "; use logical_and or logical_or");
}

// Limits of integers that their dtype lacks end at its own, and do not wrap as operands do.
void fit_limits(DType dtype, std::optional<Scalar>& min, std::optional<Scalar>& max) {
  if (dtype != kU8 && dtype != kI32) return;
  const int64_t least = dtype == kU8 ? 0 : std::numeric_limits<int32_t>::min();
  const int64_t most = dtype == kU8 ? 255 : std::numeric_limits<int32_t>::max();
  TS_CHECK(!min || min->to_int() <= most, kClamp, "min is ", *min, ", beyond what ", dtype,
           " holds; it would be all elements");
  TS_CHECK(!max || max->to_int() >= least, kClamp, "max is ", *max, ", beyond what ", dtype,
           " holds; it would be all elements");
  if (min) min = std::max(min->to_int(), least);
  if (max) max = std::min(max->to_int(), most);
}

// The gradient flows strictly inside of the limits, as in torch since 2.15.
auto clamp_backward(const std::optional<Scalar>& min, const std::optional<Scalar>& max) {
  return [min, max](Grads dy, const Saved& s) {
    fn::ClampGrad functor;
    if (min) functor.low = min->to_double();
    if (max) functor.high = max->to_double();
    return gradient(dy[0], s.input(0), functor, [&](const Tensor& dy, const Tensor& x) {
      Tensor inside = min ? gt(x, *min) : lt(x, *max);
      if (min && max) inside = logical_and(inside, lt(x, *max));
      return mul(dy, inside);
    });
  };
}

}  // namespace

Tensor clamp(const Tensor& x, std::optional<Scalar> min, std::optional<Scalar> max) {
  check_clamp(x, min, max);
  fit_limits(clamp_dtype(x, min, max), min, max);
  return differentiable(
      kClamp, {x},
      [min, max](Inputs in) {
        const DType dtype = clamp_dtype(in[0], min, max);
        if (min && max) return kernels::ternary<fn::Clamp>(in[0], *min, *max, {}, dtype);
        if (min) return kernels::binary<fn::Maximum>(in[0], *min, {}, dtype);
        return kernels::binary<fn::Minimum>(in[0], *max, {}, dtype);
      },
      clamp_backward(min, max));
}

const Tensor& clamp_(const Tensor& x, std::optional<Scalar> min, std::optional<Scalar> max) {
  check_clamp(x, min, max);
  check_storable(kClamp, x, clamp_dtype(x, min, max));
  fit_limits(x.dtype(), min, max);
  differentiable_inplace(
      kClamp, {x},
      [min, max](Inputs in) {
        if (min && max) {
          kernels::ternary_into<fn::Clamp>(in[0], in[0], *min, *max);
        } else if (min) {
          kernels::binary_into<fn::Maximum>(in[0], in[0], *min);
        } else {
          kernels::binary_into<fn::Minimum>(in[0], in[0], *max);
        }
        return in[0];
      },
      clamp_backward(min, max));
  return x;
}

// Limits with gradients: the composition shares ties, as torch does.
Tensor clamp(const Tensor& x, const Tensor& min, const Tensor& max) {
  TS_CHECK(min.defined() || max.defined(), kClamp, "expects min, max or both");
  const Tensor raised = min.defined() ? maximum(x, min) : x;
  return max.defined() ? minimum(raised, max) : raised;
}

const Op kNanToNum{.name = "nan_to_num", .marks = MarkRule::kPointwise, .reads = {inputs(0)}};

Tensor nan_to_num(const Tensor& x, double nan, std::optional<double> posinf,
                  std::optional<double> neginf) {
  check_arithmetic(kNanToNum, x);
  double largest = std::numeric_limits<double>::max();
  if (x.dtype() == kF32) largest = std::numeric_limits<float>::max();
  if (x.dtype() == kF16) largest = 65504;
  if (x.dtype() == kBF16) largest = 0x1.fep127;
  const fn::NanToNum functor{nan, posinf.value_or(largest), neginf.value_or(-largest)};
  return differentiable(
      kNanToNum, {x},
      [functor](Inputs in) {
        return is_floating(in[0].dtype()) ? kernels::unary(in[0], functor) : kernels::copy(in[0]);
      },
      [](Grads dy, const Saved& s) {
        return gradient(dy[0], s.input(0), fn::NanToNumGrad{},
                        [](const Tensor& dy, const Tensor& x) { return mul(dy, isfinite(x)); });
      });
}

const Op kIsnan{.name = "isnan", .marks = MarkRule::kPointwise};

Tensor isnan(const Tensor& x) {
  check_arithmetic(kIsnan, x);
  return not_differentiable(kIsnan, {x}, apply_floating<fn::IsNan>);
}

const Op kIsinf{.name = "isinf", .marks = MarkRule::kPointwise};

Tensor isinf(const Tensor& x) {
  check_arithmetic(kIsinf, x);
  return not_differentiable(kIsinf, {x}, apply_floating<fn::IsInf>);
}

const Op kIsfinite{.name = "isfinite", .marks = MarkRule::kPointwise};

Tensor isfinite(const Tensor& x) {
  check_arithmetic(kIsfinite, x);
  return not_differentiable(kIsfinite, {x}, apply_floating<fn::IsFinite>);
}

const Op kLogicalNot{.name = "logical_not", .marks = MarkRule::kPointwise};

Tensor logical_not(const Tensor& x) {
  check_arithmetic(kLogicalNot, x);
  return not_differentiable(kLogicalNot, {x}, apply<fn::LogicalNot>);
}

const Op kBitwiseNot{.name = "bitwise_not", .marks = MarkRule::kPointwise};

Tensor bitwise_not(const Tensor& x) {
  check_integers(kBitwiseNot, x);
  return not_differentiable(kBitwiseNot, {x}, [](Inputs in) {
    // Of the two values of bool the other one, not the other bits of its byte.
    return in[0].dtype() == kBool ? kernels::unary<fn::LogicalNot>(in[0])
                                  : kernels::unary<fn::BitwiseNot>(in[0]);
  });
}

// ---- In place -----------------------------------------------------------------------------------

namespace {

template <class F, class Backward>
const Tensor& apply_inplace(const Op& op, const Tensor& x, Backward backward) {
  check_arithmetic(op, x);
  differentiable_inplace(
      op, {x},
      [](Inputs in) {
        kernels::unary_into<F>(in[0], in[0]);
        return in[0];
      },
      std::move(backward));
  return x;
}

void check_floating(const Op& op, const Tensor& x) {
  check_arithmetic(op, x);
  check_storable(op, x, floating_dtype(x.dtype()));
}

}  // namespace

const Tensor& neg_(const Tensor& x) {
  check_not_bool(kNeg, x, "logical_not");
  return apply_inplace<fn::Neg>(kNeg, x, [](Grads dy, const Saved&) { return neg(dy[0]); });
}

const Tensor& exp_(const Tensor& x) {
  check_floating(kExp, x);
  return apply_inplace<fn::Exp>(kExp, x,
                                [](Grads dy, const Saved& s) { return mul(dy[0], s.output()); });
}

const Tensor& sqrt_(const Tensor& x) {
  check_floating(kSqrt, x);
  return apply_inplace<fn::Sqrt>(kSqrt, x, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.output(), fn::SqrtGrad{},
                    [](const Tensor& dy, const Tensor& y) { return div(dy, mul(y, 2)); });
  });
}

const Tensor& tanh_(const Tensor& x) {
  check_floating(kTanh, x);
  return apply_inplace<fn::Tanh>(kTanh, x, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.output(), fn::TanhGrad{},
                    [](const Tensor& dy, const Tensor& y) { return mul(dy, rsub(1, square(y))); });
  });
}

const Tensor& sigmoid_(const Tensor& x) {
  check_floating(kSigmoid, x);
  return apply_inplace<fn::Sigmoid>(kSigmoid, x, [](Grads dy, const Saved& s) {
    return gradient(dy[0], s.output(), fn::SigmoidGrad{},
                    [](const Tensor& dy, const Tensor& y) { return mul(dy, mul(rsub(1, y), y)); });
  });
}

}  // namespace tessera
