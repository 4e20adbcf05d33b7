// Rows of ops/elementwise.cpp and ops/activation.cpp.
#include <cmath>

#include "autograd/op_samples.h"

namespace tessera::tests {
namespace {

using enum Differentiable;

// A matrix, a 0-d tensor, an empty one, and a length beyond one vector with a rest.
std::vector<Sample> shapes(Input (*make)(const Shape&), const char* attrs = "{}") {
  return {{{make({3, 5})}, attrs},
          {{make({})}, attrs},
          {{make({2, 0})}, attrs},
          {{make({2, 3, 11})}, attrs}};
}
// Both operands alike, one broadcast into the other, each broadcast, scalar beside matrix, empty.
std::vector<Sample> pairs(Input (*make)(const Shape&), Input (*other)(const Shape&),
                          const char* attrs = "{}") {
  return {{{make({3, 5}), other({3, 5})}, attrs, 5}, {{make({2, 3, 5}), other({5})}, attrs, 6},
          {{make({3, 1}), other({1, 4})}, attrs, 4}, {{make({}), other({2, 3})}, attrs, 6},
          {{make({0, 3}), other({1})}, attrs},       {{make({37}), other({1})}, attrs, 37}};
}

OpRow unary(std::string_view name, Result (*call)(const Args&, Attrs&), Input (*make)(const Shape&),
            Differentiable differentiable = kYes) {
  return {.name = name,
          .parameters = "input",
          .call = call,
          .samples = shapes(make),
          .differentiable = differentiable,
          .perf = Sample{{make({1 << 22})}}};
}

#define UNARY(op, make) \
  unary(                \
      #op, [](const Args& in, Attrs&) -> Result { return op(in[0]); }, make)
#define UNARY_FLAT(op, make) \
  unary(                     \
      #op, [](const Args& in, Attrs&) -> Result { return op(in[0]); }, make, kNo)

OpRow binary(std::string_view name, Result (*call)(const Args&, Attrs&),
             std::vector<Sample> samples, Differentiable differentiable = kYes,
             double tolerance = 4) {
  return {.name = name,
          .parameters = "input|self, other",
          .call = call,
          .samples = std::move(samples),
          .differentiable = differentiable,
          .tolerance = tolerance,
          .perf = Sample{{positive({1 << 22}), positive({1 << 22})}}};
}

// A comparison or other op whose second operand is a tensor or the number `other`.
#define WITH_NUMBER(op)                                                 \
  [](const Args& in, Attrs& a) -> Result {                              \
    return in.has(1) ? op(in[0], in[1]) : op(in[0], a.scalar("other")); \
  }

Tensor add_like(const Args& in, Attrs& a, bool subtract) {
  const Scalar alpha = a.scalar("alpha", 1);
  if (!in.has(0) && subtract) {
    TS_CHECK(alpha.to_double() == 1, "sub", "a number minus a tensor has no 'alpha'");
    return rsub(a.scalar("input|self"), in[1]);
  }
  if (!in.has(0)) return add(mul(in[1], alpha), a.scalar("input|self"));
  if (in.has(1)) return subtract ? sub(in[0], in[1], alpha) : add(in[0], in[1], alpha);
  return subtract ? sub(in[0], a.scalar("other"), alpha) : add(in[0], a.scalar("other"), alpha);
}

Result divide(const Args& in, Attrs& a) {
  const std::string rounding = a.text("rounding_mode", "");
  if (rounding == "floor")
    return in.has(1) ? floor_divide(in[0], in[1]) : floor_divide(in[0], a.scalar("other"));
  if (rounding == "trunc") {
    const auto whole = [&](size_t i, const char* key) {
      return in.has(i) ? !is_floating(in[i].dtype()) : !a.scalar(key).is_floating();
    };
    if (in.has(0) && whole(0, "input|self") && whole(1, "other")) {
      const Tensor x = in[0];  // floored, and one more where that went away from zero
      const auto cut = [&](const auto& divisor) {
        const Tensor floored = floor_divide(x, divisor);
        const Tensor inexact = ne(sub(x, mul(floored, divisor)), 0);
        return add(floored, to(logical_and(lt(floored, 0), inexact), floored.dtype()));
      };
      return in.has(1) ? cut(in[1]) : cut(a.scalar("other"));
    }
  }
  const Tensor quotient = !in.has(0)  ? rdiv(a.scalar("input|self"), in[1])
                          : in.has(1) ? div(in[0], in[1])
                                      : div(in[0], a.scalar("other"));
  if (rounding == "trunc") return mul(sign(quotient), floor(abs(quotient)));  // towards zero
  TS_CHECK(rounding.empty(), "div", "'rounding_mode' is null, \"trunc\" or \"floor\"; got '",
           rounding, "'");
  return quotient;
}

Result power(const Args& in, Attrs& a) {
  if (!in.has(0)) return pow(a.scalar("input|self"), in[1]);
  return in.has(1) ? pow(in[0], in[1]) : pow(in[0], a.scalar("exponent|other"));
}

Result clamped(const Args& in, Attrs& a) {
  const std::optional<Scalar> low = a.maybe_scalar("min"), high = a.maybe_scalar("max");
  if (!in.has(1) && !in.has(2)) return clamp(in[0], low, high);
  Tensor y = in[0];
  if (in.has(1)) y = maximum(y, in[1]);
  if (in.has(2)) y = minimum(y, in[2]);
  return low || high ? clamp(y, low, high) : y;
}

Result rounded(const Args& in, Attrs& a) {
  const int64_t decimals = a.integer("decimals", 0);
  if (decimals == 0) return round(in[0]);
  const double factor = std::pow(10.0, std::abs(static_cast<double>(decimals)));
  return decimals > 0 ? div(round(mul(in[0], factor)), factor)
                      : mul(round(div(in[0], factor)), factor);
}

Gelu approximation(Attrs& a) {
  const std::string name = a.text("approximate", "none");
  TS_CHECK(name == "none" || name == "tanh", "gelu", "'approximate' is \"none\" or \"tanh\"; got '",
           name, "'");
  return name == "tanh" ? Gelu::kTanh : Gelu::kNone;
}

}  // namespace

std::vector<OpRow> elementwise_rows() {
  std::vector<OpRow> rows = {
      UNARY(neg, normal),
      UNARY(abs, away),
      UNARY(exp, normal),
      UNARY(expm1, normal),
      UNARY(log, positive),
      UNARY(log1p, positive),
      UNARY(sqrt, positive),
      UNARY(rsqrt, positive),
      UNARY(reciprocal, away),
      UNARY(square, normal),
      UNARY(sin, normal),
      UNARY(cos, normal),
      UNARY(tanh, normal),
      UNARY(sigmoid, normal),
      UNARY(erf, normal),
      UNARY(relu, away),
      UNARY(silu, normal),
      UNARY(sign, away),
      UNARY(floor, away),
      UNARY(ceil, away),
      UNARY_FLAT(isnan, normal),
      UNARY_FLAT(isinf, normal),
      UNARY_FLAT(isfinite, normal),
      UNARY_FLAT(logical_not, booleans),
      unary("round", rounded, away),
      unary(
          "clone", [](const Args& in, Attrs&) -> Result { return clone(in[0]); }, normal),
      unary(
          "contiguous", [](const Args& in, Attrs&) -> Result { return contiguous(in[0]); }, normal),
      {.name = "to",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         const auto dtype = a.dtype();
         TS_CHECK(dtype.has_value(), "to", "'dtype' is missing");
         return to(in[0], *dtype);
       },
       .samples = shapes(normal, R"({"dtype": "float32"})")},
      {.name = "gelu",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result { return gelu(in[0], approximation(a)); },
       .samples = {{{normal({3, 5})}},
                   {{normal({3, 5})}, R"({"approximate": "tanh"})"},
                   {{normal({})}},
                   {{normal({0})}},
                   {{normal({41})}, R"({"approximate": "tanh"})"}},
       .perf = Sample{{normal({1 << 22})}, R"({"approximate": "tanh"})"}},
      {.name = "elu",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result { return elu(in[0], a.number("alpha", 1)); },
       .samples = {{{away({3, 5})}},
                   {{away({2, 9})}, R"({"alpha": 0.5})"},
                   {{away({})}},
                   {{away({0, 2})}}}},
      {.name = "softplus",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return softplus(in[0], a.number("beta", 1), a.number("threshold", 20));
       },
       .samples = {{{normal({3, 5})}},
                   {{normal({2, 9})}, R"({"beta": 2.0, "threshold": 5.0})"},
                   {{normal({})}},
                   {{normal({0})}}}},
      {.name = "leaky_relu",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return leaky_relu(in[0], a.number("negative_slope", 0.01));
       },
       .samples = {{{away({3, 5})}},
                   {{away({2, 9})}, R"({"negative_slope": 0.3})"},
                   {{away({})}},
                   {{away({0})}}}},
      {.name = "glu",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result { return glu(in[0], a.integer("dim", -1)); },
       .samples = {{{normal({3, 6})}}, {{normal({4, 3, 2})}, R"({"dim": 0})"}, {{normal({0, 4})}}}},
      {.name = "clamp",
       .parameters = "input, min, max",
       .call = clamped,
       .samples = {{{uniform(-0.9, 1.9, {3, 5})}, R"({"min": -1, "max": 2})"},
                   {{distinct({4, 5})}, R"({"min": -0.25, "max": 0.25})"},
                   {{distinct({7})}, R"({"min": 0})"},
                   {{distinct({7})}, R"({"max": 0})"},
                   {{distinct({})}, R"({"min": -1.0})"},
                   {{distinct({0})}, R"({"max": 1})"},
                   {{distinct({3, 4}), constant(uniform(-2, -1, {4})),
                     constant(uniform(1, 2, {3, 1}))}}}},
      {.name = "nan_to_num",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return nan_to_num(in[0], a.number("nan", 0), a.maybe_number("posinf"),
                           a.maybe_number("neginf"));
       },
       .samples = shapes(normal)},

      binary(
          "add", [](const Args& in, Attrs& a) -> Result { return add_like(in, a, false); },
          pairs(normal, normal)),
      binary(
          "sub", [](const Args& in, Attrs& a) -> Result { return add_like(in, a, true); },
          pairs(normal, normal, R"({"alpha": 0.5})")),
      binary("mul", WITH_NUMBER(mul), pairs(normal, normal)),
      binary("div", divide, pairs(normal, away)),
      binary(
          "maximum", [](const Args& in, Attrs&) -> Result { return maximum(in[0], in[1]); },
          pairs(distinct, away)),
      binary(
          "minimum", [](const Args& in, Attrs&) -> Result { return minimum(in[0], in[1]); },
          pairs(distinct, away)),
      binary("floor_divide", WITH_NUMBER(floor_divide),
             {{{integers(50, {3, 4}), integers(7, {1})}, R"({})"}}, kNo),
      binary("remainder", WITH_NUMBER(remainder),
             {{{away({3, 4})}, R"({"other": 3.0})"},
              {{away({5}), constant(uniform(2.5, 3, {2, 1}))}}}),
      binary("eq", WITH_NUMBER(eq), pairs(booleans, booleans), kNo),
      binary("ne", WITH_NUMBER(ne), pairs(booleans, booleans), kNo),
      binary("lt", WITH_NUMBER(lt), pairs(distinct, distinct), kNo),
      binary("le", WITH_NUMBER(le), pairs(distinct, distinct), kNo),
      binary("gt", WITH_NUMBER(gt), pairs(distinct, distinct), kNo),
      binary("ge", WITH_NUMBER(ge), pairs(distinct, distinct), kNo),
      binary(
          "logical_and", [](const Args& in, Attrs&) -> Result { return logical_and(in[0], in[1]); },
          pairs(booleans, booleans), kNo),
      binary(
          "logical_or", [](const Args& in, Attrs&) -> Result { return logical_or(in[0], in[1]); },
          pairs(booleans, booleans), kNo),
      binary(
          "logical_xor", [](const Args& in, Attrs&) -> Result { return logical_xor(in[0], in[1]); },
          pairs(booleans, booleans), kNo),
      {.name = "pow",
       .parameters = "input|self, exponent",
       .call = power,
       .samples = {{{positive({3, 5}), normal({3, 5})}, "{}", 5},
                   {{positive({2, 3, 4}), normal({4})}, "{}", 6},
                   {{positive({3, 4})}, R"({"exponent": 2})"},
                   {{normal({3, 4})}, R"({"exponent": 3})"},
                   {{positive({5})}, R"({"exponent": -0.5})"},
                   {{absent(), normal({5})}, R"({"self": 2.0})"},
                   {{positive({0})}, R"({"exponent": 2})"},
                   {{positive({})}, R"({"exponent": 1.5})"}},
       .tolerance = 16},
      {.name = "rsub",
       .parameters = "input, other",
       .call = [](const Args& in, Attrs& a) -> Result {
         return in.has(1) ? sub(in[1], in[0]) : rsub(a.scalar("other"), in[0]);
       },
       .samples = shapes(normal, R"({"other": 1.5})")},
      {.name = "rdiv",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result { return rdiv(a.scalar("other"), in[0]); },
       .samples = shapes(away, R"({"other": 1.5})")},
      {.name = "addcmul",
       .parameters = "input, tensor1, tensor2",
       .call = [](const Args& in, Attrs& a) -> Result {
         return addcmul(in[0], in[1], in[2], a.scalar("value", 1));
       },
       .samples = {{{normal({3, 4}), normal({3, 4}), normal({4})}, R"({"value": 0.5})", 4},
                   {{normal({4}), normal({3, 1}), normal({2, 1, 1})}, "{}", 8},
                   {{normal({}), normal({0}), normal({1})}}}},
      {.name = "addcdiv",
       .parameters = "input, tensor1, tensor2",
       .call = [](const Args& in, Attrs& a) -> Result {
         return addcdiv(in[0], in[1], in[2], a.scalar("value", 1));
       },
       .samples = {{{normal({3, 4}), normal({3, 4}), away({4})}, R"({"value": 0.5})", 4},
                   {{normal({4}), normal({3, 1}), away({2, 1, 1})}, "{}", 8}}},
      {.name = "lerp",
       .parameters = "input, end, weight",
       .call = [](const Args& in, Attrs& a) -> Result {
         return in.has(2) ? lerp(in[0], in[1], in[2]) : lerp(in[0], in[1], a.number("weight"));
       },
       .samples = {{{normal({3, 4}), normal({3, 4}), probability({4})}, "{}", 4},
                   {{normal({3, 4}), normal({4})}, R"({"weight": 0.3})", 4},
                   {{normal({3}), normal({2, 1})}, R"({"weight": 0.75})", 4},
                   {{normal({0}), normal({1}), probability({})}}}},
      {.name = "where",
       .parameters = "condition, input|self, other",
       .call = [](const Args& in, Attrs& a) -> Result {
         if (in.has(1) && in.has(2)) return where(in[0], in[1], in[2]);
         if (in.has(1)) return where(in[0], in[1], a.scalar("other"));
         if (!in.has(2)) {  // two numbers: a tensor of their common kind
           const Scalar x = a.scalar("input|self"), y = a.scalar("other");
           const bool floating = x.is_floating() || y.is_floating();
           const bool both_bool =
               x.kind() == Scalar::Kind::kBool && y.kind() == Scalar::Kind::kBool;
           const DType dtype = floating ? kF32 : both_bool ? kBool : kI64;
           return where(in[0], full({}, x, {.dtype = dtype}), full({}, y, {.dtype = dtype}));
         }
         return where(in[0], a.scalar("input|self"), in[2]);
       },
       .samples = {{{booleans({3, 4}), normal({3, 4}), normal({3, 4})}},
                   {{booleans({3, 1}), normal({4}), normal({2, 1, 1})}, "{}", 8},
                   {{booleans({4}), normal({4})}, R"({"other": 2.0})"},
                   {{booleans({4}), absent(), normal({4})}, R"({"input": -1.0})"},
                   {{booleans({0, 2}), normal({2}), normal({})}}}},
      {.name = "masked_fill",
       .parameters = "input, mask, value",
       .call = [](const Args& in, Attrs& a) -> Result {
         return in.has(2) ? where(in[1], to(in[2], in[0].dtype()), in[0])
                          : masked_fill(in[0], in[1], a.scalar("value"));
       },
       .samples = {{{normal({3, 4}), booleans({3, 4})}, R"({"value": -2.0})"},
                   {{normal({2, 3, 4}), booleans({4})}, R"({"value": 0})"},
                   {{normal({}), booleans({})}, R"({"value": 1})"},
                   {{normal({0}), booleans({0})}, R"({"value": 1})"}}},
  };
  for (OpRow& row : rows) {
    // Gradients are made from the rounded result: 1 - y^2, y (1 - y), y^3 magnify its error.
    if (row.name == "tanh" || row.name == "sigmoid" || row.name == "rsqrt") row.tolerance = 8;
  }
  return rows;
}

// In-place forms run on a copy of their first input, so that gradients of the old value are seen.
std::vector<OpRow> inplace_rows() {
  std::vector<OpRow> rows;
#define INPLACE(op_, parameters_, samples_, ...)                   \
  rows.push_back({.name = #op_,                                    \
                  .parameters = parameters_,                       \
                  .call = [](const Args& in, Attrs& a) -> Result { \
                    (void)a;                                       \
                    const Tensor x = clone(in[0]);                 \
                    __VA_ARGS__;                                   \
                    return x;                                      \
                  },                                               \
                  .samples = samples_})
  const std::vector<Sample> two = {{{normal({3, 5}), normal({3, 5})}, "{}", 5},
                                   {{normal({2, 3, 5}), normal({5})}, "{}", 6},
                                   {{normal({3}), normal({})}, "{}", 3},
                                   {{normal({0, 2}), normal({2})}}};
  const std::vector<Sample> quotients = {{{normal({3, 5}), away({3, 5})}, "{}", 5},
                                         {{normal({2, 3, 5}), away({5})}, "{}", 6}};
  INPLACE(add_, "input, other", two,
          in.has(1) ? add_(x, in[1], a.scalar("alpha", 1)) : add_(x, a.scalar("other")));
  INPLACE(sub_, "input, other", two,
          in.has(1) ? sub_(x, in[1], a.scalar("alpha", 1)) : sub_(x, a.scalar("other")));
  INPLACE(mul_, "input, other", two, in.has(1) ? mul_(x, in[1]) : mul_(x, a.scalar("other")));
  INPLACE(div_, "input, other", quotients, in.has(1) ? div_(x, in[1]) : div_(x, a.scalar("other")));
  INPLACE(pow_, "input", shapes(positive, R"({"exponent": 2.5})"), pow_(x, a.scalar("exponent")));
  INPLACE(neg_, "input", shapes(normal), neg_(x));
  INPLACE(exp_, "input", shapes(normal), exp_(x));
  INPLACE(sqrt_, "input", shapes(positive), sqrt_(x));
  INPLACE(tanh_, "input", shapes(normal), tanh_(x));
  INPLACE(sigmoid_, "input", shapes(normal), sigmoid_(x));
  INPLACE(relu_, "input", shapes(away), relu_(x));
  INPLACE(clamp_, "input", shapes(distinct, R"({"min": -0.25, "max": 0.25})"),
          clamp_(x, a.maybe_scalar("min"), a.maybe_scalar("max")));
  INPLACE(lerp_, "input, end", two, lerp_(x, in[1], a.number("weight", 0.25)));
  const std::vector<Sample> three = {
      {{normal({3, 4}), normal({3, 4}), away({4})}, R"({"value": 0.5})", 4}};
  INPLACE(addcmul_, "input, tensor1, tensor2", three,
          addcmul_(x, in[1], in[2], a.scalar("value", 1)));
  INPLACE(addcdiv_, "input, tensor1, tensor2", three,
          addcdiv_(x, in[1], in[2], a.scalar("value", 1)));
  const std::vector<Sample> masks = {{{normal({3, 4}), booleans({4})}, R"({"value": -2.0})"}};
  INPLACE(masked_fill_, "input, mask", masks, masked_fill_(x, in[1], a.scalar("value")));
  INPLACE(fill_, "input", shapes(normal, R"({"value": 1.5})"), fill_(x, a.scalar("value")));
  INPLACE(copy_, "input, src", two, copy_(x, in[1]));
#undef INPLACE
  for (OpRow& row : rows) {
    if (row.name == "pow_") row.tolerance = 16;
    if (row.name == "tanh_" || row.name == "sigmoid_") row.tolerance = 8;
  }
  return rows;
}

}  // namespace tessera::tests
