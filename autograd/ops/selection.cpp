// Comparisons, logic, choices between elements, and ops of three inputs.
#include <tessera/autograd/ops/elementwise_rules.h>
#include <tessera/core/kernels/copy/copy.h>

namespace tessera {

// ---- Comparisons: bool, no gradient; operands are promoted first --------------------------------

const Op kEq{.name = "eq", .marks = MarkRule::kPointwise, .takes_numbers = true};

Tensor eq(const Tensor& a, const Tensor& b) {
  check_arithmetic(kEq, a, b);
  return not_differentiable(kEq, {a, b},
                            [](Inputs in) { return kernels::binary<fn::Eq>(in[0], in[1]); });
}
Tensor eq(const Tensor& a, const Scalar& b) {
  check_arithmetic(kEq, a);
  return not_differentiable(kEq, {a}, [b](Inputs in) { return kernels::binary<fn::Eq>(in[0], b); });
}

const Op kNe{.name = "ne", .marks = MarkRule::kPointwise, .takes_numbers = true};

Tensor ne(const Tensor& a, const Tensor& b) {
  check_arithmetic(kNe, a, b);
  return not_differentiable(kNe, {a, b},
                            [](Inputs in) { return kernels::binary<fn::Ne>(in[0], in[1]); });
}
Tensor ne(const Tensor& a, const Scalar& b) {
  check_arithmetic(kNe, a);
  return not_differentiable(kNe, {a}, [b](Inputs in) { return kernels::binary<fn::Ne>(in[0], b); });
}

const Op kLt{.name = "lt", .marks = MarkRule::kPointwise, .takes_numbers = true};

Tensor lt(const Tensor& a, const Tensor& b) {
  check_arithmetic(kLt, a, b);
  return not_differentiable(kLt, {a, b},
                            [](Inputs in) { return kernels::binary<fn::Lt>(in[0], in[1]); });
}
Tensor lt(const Tensor& a, const Scalar& b) {
  check_arithmetic(kLt, a);
  return not_differentiable(kLt, {a}, [b](Inputs in) { return kernels::binary<fn::Lt>(in[0], b); });
}

const Op kLe{.name = "le", .marks = MarkRule::kPointwise, .takes_numbers = true};

Tensor le(const Tensor& a, const Tensor& b) {
  check_arithmetic(kLe, a, b);
  return not_differentiable(kLe, {a, b},
                            [](Inputs in) { return kernels::binary<fn::Le>(in[0], in[1]); });
}
Tensor le(const Tensor& a, const Scalar& b) {
  check_arithmetic(kLe, a);
  return not_differentiable(kLe, {a}, [b](Inputs in) { return kernels::binary<fn::Le>(in[0], b); });
}

const Op kGt{.name = "gt", .marks = MarkRule::kPointwise, .takes_numbers = true};

Tensor gt(const Tensor& a, const Tensor& b) {
  check_arithmetic(kGt, a, b);
  return not_differentiable(kGt, {a, b},
                            [](Inputs in) { return kernels::binary<fn::Gt>(in[0], in[1]); });
}
Tensor gt(const Tensor& a, const Scalar& b) {
  check_arithmetic(kGt, a);
  return not_differentiable(kGt, {a}, [b](Inputs in) { return kernels::binary<fn::Gt>(in[0], b); });
}

const Op kGe{.name = "ge", .marks = MarkRule::kPointwise, .takes_numbers = true};

Tensor ge(const Tensor& a, const Tensor& b) {
  check_arithmetic(kGe, a, b);
  return not_differentiable(kGe, {a, b},
                            [](Inputs in) { return kernels::binary<fn::Ge>(in[0], in[1]); });
}
Tensor ge(const Tensor& a, const Scalar& b) {
  check_arithmetic(kGe, a);
  return not_differentiable(kGe, {a}, [b](Inputs in) { return kernels::binary<fn::Ge>(in[0], b); });
}

const Op kLogicalAnd{.name = "logical_and", .marks = MarkRule::kPointwise, .takes_numbers = true};

Tensor logical_and(const Tensor& a, const Tensor& b) {
  check_arithmetic(kLogicalAnd, a, b);
  return not_differentiable(
      kLogicalAnd, {a, b}, [](Inputs in) { return kernels::binary<fn::LogicalAnd>(in[0], in[1]); });
}

const Op kLogicalOr{.name = "logical_or", .marks = MarkRule::kPointwise, .takes_numbers = true};

Tensor logical_or(const Tensor& a, const Tensor& b) {
  check_arithmetic(kLogicalOr, a, b);
  return not_differentiable(kLogicalOr, {a, b},
                            [](Inputs in) { return kernels::binary<fn::LogicalOr>(in[0], in[1]); });
}

const Op kLogicalXor{.name = "logical_xor", .marks = MarkRule::kPointwise, .takes_numbers = true};

Tensor logical_xor(const Tensor& a, const Tensor& b) {
  check_arithmetic(kLogicalXor, a, b);
  return not_differentiable(
      kLogicalXor, {a, b}, [](Inputs in) { return kernels::binary<fn::LogicalXor>(in[0], in[1]); });
}

// ---- Bits: integers and bool --------------------------------------------------------------------

namespace {

template <class F>
Tensor bitwise(const Op& op, const Tensor& a, const Tensor& b) {
  check_arithmetic(op, a, b);
  check_integers(op, a, "the first operand");
  check_integers(op, b, "the second operand");
  return not_differentiable(op, {a, b}, [](Inputs in) { return kernels::binary<F>(in[0], in[1]); });
}

template <class F>
Tensor bitwise(const Op& op, const Tensor& a, const Scalar& b) {
  check_integers(op, a);
  TS_CHECK_DTYPE(!b.is_floating(), op, "is defined for integers and bool; got the number ", b);
  return not_differentiable(op, {a}, [b](Inputs in) { return kernels::binary<F>(in[0], b); });
}

}  // namespace

const Op kBitwiseAnd{.name = "bitwise_and", .marks = MarkRule::kPointwise, .takes_numbers = true};
const Op kBitwiseOr{.name = "bitwise_or", .marks = MarkRule::kPointwise, .takes_numbers = true};
const Op kBitwiseXor{.name = "bitwise_xor", .marks = MarkRule::kPointwise, .takes_numbers = true};

Tensor bitwise_and(const Tensor& a, const Tensor& b) {
  return bitwise<fn::BitwiseAnd>(kBitwiseAnd, a, b);
}
Tensor bitwise_and(const Tensor& a, const Scalar& b) {
  return bitwise<fn::BitwiseAnd>(kBitwiseAnd, a, b);
}
Tensor bitwise_or(const Tensor& a, const Tensor& b) {
  return bitwise<fn::BitwiseOr>(kBitwiseOr, a, b);
}
Tensor bitwise_or(const Tensor& a, const Scalar& b) {
  return bitwise<fn::BitwiseOr>(kBitwiseOr, a, b);
}
Tensor bitwise_xor(const Tensor& a, const Tensor& b) {
  return bitwise<fn::BitwiseXor>(kBitwiseXor, a, b);
}
Tensor bitwise_xor(const Tensor& a, const Scalar& b) {
  return bitwise<fn::BitwiseXor>(kBitwiseXor, a, b);
}

// ---- where, masked_fill -------------------------------------------------------------------------

const Op kWhere{.name = "where",
                .marks = MarkRule::kPointwise,
                .takes_numbers = true,
                .reads = {inputs(), inputs(0), inputs(0)},
                .flops_per_element = 0};

namespace {

void check_condition(const Op& op, const Tensor& condition) {
  check_defined(op, "the condition", condition);
  TS_CHECK_DTYPE(condition.dtype() == kBool || condition.dtype() == kU8, op,
                 "expects a bool condition; got ", condition, "; compare with ne(x, 0)");
}

}  // namespace

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  check_defined(kWhere, "a", a);
  check_defined(kWhere, "b", b);
  check_condition(kWhere, condition);
  broadcast_shapes(broadcast_shapes(condition.shape(), a.shape(), kWhere.name), b.shape(),
                   kWhere.name);
  return differentiable(
      kWhere, {condition, a, b},
      [](Inputs in) { return kernels::ternary<fn::Where>(in[0], in[1], in[2]); },
      [](Grads dy, const Saved& s) -> TensorList {
        const Tensor condition = s.input(0);
        return {Tensor(), s.needs(1) ? where(condition, dy[0], 0) : Tensor(),
                s.needs(2) ? where(condition, 0, dy[0]) : Tensor()};
      });
}

Tensor where(const Tensor& condition, const Tensor& a, const Scalar& b) {
  check_defined(kWhere, "a", a);
  check_condition(kWhere, condition);
  broadcast_shapes(condition.shape(), a.shape(), kWhere.name);
  return differentiable(
      kWhere, {condition, a},
      [b](Inputs in) { return kernels::ternary<fn::Where>(in[0], in[1], b); },
      [](Grads dy, const Saved& s) -> TensorList {
        return {Tensor(), where(s.input(0), dy[0], 0)};
      });
}

Tensor where(const Tensor& condition, const Scalar& a, const Tensor& b) {
  check_defined(kWhere, "b", b);
  check_condition(kWhere, condition);
  broadcast_shapes(condition.shape(), b.shape(), kWhere.name);
  return differentiable(
      kWhere, {condition, b},
      [a](Inputs in) { return kernels::ternary<fn::Where>(in[0], a, in[1]); },
      [](Grads dy, const Saved& s) -> TensorList {
        return {Tensor(), where(s.input(0), 0, dy[0])};
      });
}

const Op kMaskedFill{.name = "masked_fill",
                     .marks = MarkRule::kPointwise,
                     .takes_numbers = true,
                     .reads = {inputs(1)},
                     .flops_per_element = 0};

namespace {

void check_fill_value(const Tensor& x, const Scalar& value) {
  TS_CHECK(kernels::can_hold(x.dtype(), value), kMaskedFill, "no element of ", x.dtype(),
           " can be ", value, "; convert the tensor with to(dtype) first");
}

}  // namespace

Tensor masked_fill(const Tensor& x, const Tensor& mask, const Scalar& value) {
  check_defined(kMaskedFill, "x", x);
  check_condition(kMaskedFill, mask);
  check_fill_value(x, value);
  broadcast_shapes(x.shape(), mask.shape(), kMaskedFill.name);
  return differentiable(
      kMaskedFill, {x, mask},
      [value](Inputs in) {
        return kernels::ternary<fn::Where>(in[1], value, in[0], {}, in[0].dtype());
      },
      [](Grads dy, const Saved& s) -> TensorList {
        return {masked_fill(dy[0], s.input(1), 0), Tensor()};
      });
}

const Tensor& masked_fill_(const Tensor& x, const Tensor& mask, const Scalar& value) {
  check_defined(kMaskedFill, "x", x);
  check_condition(kMaskedFill, mask);
  check_fill_value(x, value);
  check_fits(kMaskedFill, x, mask);
  differentiable_inplace(
      kMaskedFill, {x, mask},
      [value](Inputs in) {
        kernels::ternary_into<fn::Where>(in[0], in[1], value, in[0], {}, in[0].dtype());
        return in[0];
      },
      [](Grads dy, const Saved& s) -> TensorList {
        return {masked_fill(dy[0], s.input(1), 0), Tensor()};
      });
  return x;
}

// ---- addcmul, addcdiv ---------------------------------------------------------------------------

const Op kAddcmul{.name = "addcmul",
                  .marks = MarkRule::kPointwise,
                  .takes_numbers = true,
                  .reads = {inputs(), inputs(2), inputs(1)},
                  .flops_per_element = 3};

namespace {

void check_value(const Op& op, DType common, const Scalar& value) {
  TS_CHECK_DTYPE(is_floating(common) || !value.is_floating(), op,
                 "value must be an integer for integer tensors; got ", value, " for ", common);
}

auto addcmul_backward(const Scalar& value) {
  return [value](Grads dy, const Saved& s) -> TensorList {
    const Tensor scaled = value.to_double() == 1 ? dy[0] : mul(dy[0], value);
    return {dy[0], s.needs(1) ? mul(scaled, s.input(2)) : Tensor(),
            s.needs(2) ? mul(scaled, s.input(1)) : Tensor()};
  };
}

}  // namespace

Tensor addcmul(const Tensor& x, const Tensor& a, const Tensor& b, const Scalar& value) {
  check_arithmetic(kAddcmul, x, a, b);
  check_value(kAddcmul, kernels::promote({x, a, b}), value);
  return differentiable(
      kAddcmul, {x, a, b},
      [value](Inputs in) {
        return kernels::ternary(in[0], in[1], in[2], fn::Addcmul{value.to_double()});
      },
      addcmul_backward(value));
}

const Tensor& addcmul_(const Tensor& x, const Tensor& a, const Tensor& b, const Scalar& value) {
  check_arithmetic(kAddcmul, x, a, b);
  check_fits(kAddcmul, x, a);
  check_fits(kAddcmul, x, b);
  check_storable(kAddcmul, x, kernels::promote({x, a, b}));
  check_value(kAddcmul, kernels::promote({x, a, b}), value);
  differentiable_inplace(
      kAddcmul, {x, a, b},
      [value](Inputs in) {
        kernels::ternary_into(in[0], in[0], in[1], in[2], fn::Addcmul{value.to_double()});
        return in[0];
      },
      addcmul_backward(value));
  return x;
}

const Op kAddcdiv{.name = "addcdiv",
                  .marks = MarkRule::kPointwise,
                  .takes_numbers = true,
                  .reads = {inputs(), inputs(2), inputs(1, 2)},
                  .flops_per_element = 3};

namespace {

void check_addcdiv(const Tensor& x, const Tensor& a, const Tensor& b) {
  check_arithmetic(kAddcdiv, x, a, b);
  const DType common = kernels::promote({x, a, b});
  TS_CHECK_DTYPE(is_floating(common), kAddcdiv, "expects floating tensors; got ", x, ", ", a,
                 " and ", b, "; convert with to(dtype)");
}

auto addcdiv_backward(const Scalar& value) {
  return [value](Grads dy, const Saved& s) -> TensorList {
    if (!s.needs(1) && !s.needs(2)) return {dy[0], Tensor(), Tensor()};
    const Tensor b = s.input(2);
    const Tensor slope = div(value.to_double() == 1 ? dy[0] : mul(dy[0], value), b);
    return {dy[0], s.needs(1) ? slope : Tensor(),
            s.needs(2) ? neg(mul(slope, div(s.input(1), b))) : Tensor()};
  };
}

}  // namespace

Tensor addcdiv(const Tensor& x, const Tensor& a, const Tensor& b, const Scalar& value) {
  check_addcdiv(x, a, b);
  return differentiable(
      kAddcdiv, {x, a, b},
      [value](Inputs in) {
        return kernels::ternary(in[0], in[1], in[2], fn::Addcdiv{value.to_double()});
      },
      addcdiv_backward(value));
}

const Tensor& addcdiv_(const Tensor& x, const Tensor& a, const Tensor& b, const Scalar& value) {
  check_addcdiv(x, a, b);
  check_fits(kAddcdiv, x, a);
  check_fits(kAddcdiv, x, b);
  check_storable(kAddcdiv, x, kernels::promote({x, a, b}));
  differentiable_inplace(
      kAddcdiv, {x, a, b},
      [value](Inputs in) {
        kernels::ternary_into(in[0], in[0], in[1], in[2], fn::Addcdiv{value.to_double()});
        return in[0];
      },
      addcdiv_backward(value));
  return x;
}

// ---- lerp ---------------------------------------------------------------------------------------

const Op kLerp{.name = "lerp",
               .marks = MarkRule::kPointwise,
               .takes_numbers = true,
               .reads = {inputs(2), inputs(2), inputs(0, 1)},
               .flops_per_element = 3};

namespace {

void check_lerp(const Tensor& start, const Tensor& end) {
  check_arithmetic(kLerp, start, end);
  TS_CHECK_DTYPE(is_floating(start.dtype()) && is_floating(end.dtype()), kLerp,
                 "expects floating tensors; got ", start, " and ", end, "; convert with to(dtype)");
}

auto lerp_backward(double weight) {
  return [weight](Grads dy, const Saved& s) -> TensorList {
    return {s.needs(0) ? mul(dy[0], 1 - weight) : Tensor(),
            s.needs(1) ? mul(dy[0], weight) : Tensor()};
  };
}

}  // namespace

Tensor lerp(const Tensor& start, const Tensor& end, const Tensor& weight) {
  check_lerp(start, end);
  check_arithmetic(kLerp, start, end, weight);
  return differentiable(
      kLerp, {start, end, weight},
      [](Inputs in) { return kernels::ternary<fn::Lerp>(in[0], in[1], in[2]); },
      [](Grads dy, const Saved& s) -> TensorList {
        return {s.needs(0) ? mul(dy[0], rsub(1, s.input(2))) : Tensor(),
                s.needs(1) ? mul(dy[0], s.input(2)) : Tensor(),
                s.needs(2) ? mul(dy[0], sub(s.input(1), s.input(0))) : Tensor()};
      });
}

Tensor lerp(const Tensor& start, const Tensor& end, double weight) {
  check_lerp(start, end);
  return differentiable(
      kLerp, {start, end},
      [weight](Inputs in) { return kernels::ternary<fn::Lerp>(in[0], in[1], weight); },
      lerp_backward(weight));
}

const Tensor& lerp_(const Tensor& start, const Tensor& end, double weight) {
  check_lerp(start, end);
  check_fits(kLerp, start, end);
  differentiable_inplace(
      kLerp, {start, end},
      [weight](Inputs in) {
        kernels::ternary_into<fn::Lerp>(in[0], in[0], in[1], weight);
        return in[0];
      },
      lerp_backward(weight));
  return start;
}

}  // namespace tessera
