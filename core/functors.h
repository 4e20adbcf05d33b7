// Scalar formulas of the elementwise ops, each beside its gradient. One functor serves all devices.
//
// A functor is called with values of a compute type C (float; double and int64_t for those dtypes)
// and returns C, or bool for predicates. It has no index and no memory; attributes are double
// members. The lists at the end say which loops a kernel file makes of it: a new functor is added
// to one of them and to no build file.
//
//   static constexpr bool kIntegers = true;   also instantiated for int64_t
//   static constexpr bool kCondition = true;  the first argument is a bool, as a byte
//   static is_common, common                  of floats: a form without calls, with the same bits
//                                             where is_common; loops on the CPU vectorise it
//
// Integer arithmetic wraps around, as in torch. Functors in *Grad take dy first and return dx;
// their conventions at kinks are torch's (2.15).
#pragma once

#include <cstdint>
#include <type_traits>

#include <tessera/core/approximate.h>
#include <tessera/core/macros.h>
#include <tessera/core/math.h>

namespace tessera::fn {

template <class C>
inline constexpr bool is_integer = std::is_integral_v<C>;

namespace detail {

TS_HD int64_t wrapped(uint64_t value) { return static_cast<int64_t>(value); }
TS_HD uint64_t bits(int64_t value) { return static_cast<uint64_t>(value); }

template <class C>
TS_HD C sum(C a, C b) {
  if constexpr (is_integer<C>) {
    return wrapped(bits(a) + bits(b));
  } else {
    return a + b;
  }
}
template <class C>
TS_HD C product(C a, C b) {
  if constexpr (is_integer<C>) {
    return wrapped(bits(a) * bits(b));
  } else {
    return a * b;
  }
}
template <class C>
TS_HD C sigmoid(C x) {
  return C(1) / (C(1) + math::exp(-x));
}
// 1 where it rounds to that: gradients multiply what is left of 1 by large numbers.
template <>
TS_HD math::Approximate sigmoid(math::Approximate x) {
  const math::Approximate e = math::exp(-x);
  return e.value < 0x1p-24f ? math::Approximate(1)
                            : math::Approximate(1) / (math::Approximate(1) + e);
}

inline constexpr double kSqrt2OverPi = 0.79788456080286535588;
inline constexpr double kInverseSqrt2Pi = 0.39894228040143267794;
inline constexpr double kTwoOverSqrtPi = 1.12837916709551257390;
inline constexpr double kGeluCubic = 0.044715;

}  // namespace detail

#define TS_FUNCTOR_UNARY(...) \
  template <class C>          \
  TS_HD __VA_ARGS__ operator()(C x) const
#define TS_FUNCTOR_BINARY(...) \
  template <class C>           \
  TS_HD __VA_ARGS__ operator()(C a, C b) const
#define TS_FUNCTOR_TERNARY(...) \
  template <class C>            \
  TS_HD __VA_ARGS__ operator()(C a, C b, C c) const

// ---- One input ----------------------------------------------------------------------------------

struct Identity {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_UNARY(C) { return x; }
};
struct Neg {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_UNARY(C) {
    if constexpr (is_integer<C>) {
      return detail::wrapped(0 - detail::bits(x));
    } else {
      return -x;
    }
  }
};
struct Abs {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_UNARY(C) {
    if constexpr (is_integer<C>) {
      return x < 0 ? detail::wrapped(0 - detail::bits(x)) : x;
    } else {
      return math::fabs(x);
    }
  }
};
struct Sign {  // 0 for NaN, as in torch
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_UNARY(C) { return static_cast<C>(x > C(0)) - static_cast<C>(x < C(0)); }
};
struct AbsGrad {
  TS_FUNCTOR_BINARY(C) { return a * Sign{}(b); }
};
struct Square {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_UNARY(C) { return detail::product(x, x); }
};
struct Floor {
  TS_FUNCTOR_UNARY(C) { return math::floor(x); }
};
struct Ceil {
  TS_FUNCTOR_UNARY(C) { return math::ceil(x); }
};
struct Round {
  TS_FUNCTOR_UNARY(C) { return math::round_even(x); }
};
struct Trunc {
  TS_FUNCTOR_UNARY(C) { return math::trunc(x); }
};
struct Reciprocal {
  TS_FUNCTOR_UNARY(C) { return C(1) / x; }
};
struct ReciprocalGrad {  // of y
  TS_FUNCTOR_BINARY(C) { return -a * (b * b); }
};
struct Sqrt {
  TS_FUNCTOR_UNARY(C) { return math::sqrt(x); }
};
struct SqrtGrad {  // of y
  TS_FUNCTOR_BINARY(C) { return a / (C(2) * b); }
};
struct Rsqrt {
  TS_FUNCTOR_UNARY(C) { return C(1) / math::sqrt(x); }
};
struct RsqrtGrad {  // of y
  TS_FUNCTOR_BINARY(C) { return C(-0.5) * a * (b * b * b); }
};
struct Exp {
  TS_FUNCTOR_UNARY(C) { return math::exp(x); }
};
struct Expm1 {
  TS_FUNCTOR_UNARY(C) { return math::expm1(x); }
};
struct Expm1Grad {  // of y
  TS_FUNCTOR_BINARY(C) { return a * (b + C(1)); }
};
struct Log {
  TS_FUNCTOR_UNARY(C) { return math::log(x); }
};
struct Log2 {
  TS_FUNCTOR_UNARY(C) { return math::log2(x); }
};
struct Log10 {
  TS_FUNCTOR_UNARY(C) { return math::log10(x); }
};
struct Log1p {
  TS_FUNCTOR_UNARY(C) { return math::log1p(x); }
};
struct Log1pGrad {
  TS_FUNCTOR_BINARY(C) { return a / (b + C(1)); }
};
struct Sin {
  TS_FUNCTOR_UNARY(C) { return math::sin(x); }
  static TS_HD bool is_common(float x) { return math::fabs(x) < math::kCommonAngle; }
  static TS_HD float common(float x) { return math::sin_common(x); }
};
struct SinGrad {
  TS_FUNCTOR_BINARY(C) { return a * math::cos(b); }
  static TS_HD bool is_common(float, float b) { return Sin::is_common(b); }
  static TS_HD float common(float a, float b) { return a * math::cos_common(b); }
};
struct Cos {
  TS_FUNCTOR_UNARY(C) { return math::cos(x); }
  static TS_HD bool is_common(float x) { return Sin::is_common(x); }
  static TS_HD float common(float x) { return math::cos_common(x); }
};
struct CosGrad {
  TS_FUNCTOR_BINARY(C) { return a * -math::sin(b); }
  static TS_HD bool is_common(float, float b) { return Sin::is_common(b); }
  static TS_HD float common(float a, float b) { return a * -math::sin_common(b); }
};
struct Tan {
  TS_FUNCTOR_UNARY(C) { return math::tan(x); }
  static TS_HD bool is_common(float x) { return Sin::is_common(x); }
  static TS_HD float common(float x) { return math::tan_common(x); }
};
struct TanGrad {  // of y
  TS_FUNCTOR_BINARY(C) { return a * (C(1) + b * b); }
};
struct Tanh {
  TS_FUNCTOR_UNARY(C) { return math::tanh(x); }
};
struct TanhGrad {  // of y
  TS_FUNCTOR_BINARY(C) { return a * (C(1) - b * b); }
};
struct Sigmoid {
  TS_FUNCTOR_UNARY(C) { return detail::sigmoid(x); }
};
struct SigmoidGrad {  // of y
  TS_FUNCTOR_BINARY(C) { return a * (C(1) - b) * b; }
};
struct Erf {
  TS_FUNCTOR_UNARY(C) { return math::erf(x); }
};
struct ErfGrad {
  TS_FUNCTOR_BINARY(C) { return C(detail::kTwoOverSqrtPi) * math::exp(-b * b) * a; }
};
struct Erfinv {
  TS_FUNCTOR_UNARY(C) { return math::erfinv(x); }
};
struct ErfinvGrad {  // of x: a rounded y would be squared in the exponent
  TS_FUNCTOR_BINARY(C) {
    const C y = math::erfinv(b);
    return a * (C(1 / detail::kTwoOverSqrtPi) * math::exp(y * y));
  }
};
struct Lgamma {
  TS_FUNCTOR_UNARY(C) { return math::lgamma(x); }
};
struct Digamma {
  TS_FUNCTOR_UNARY(C) { return math::digamma(x); }
};
struct LgammaGrad {
  TS_FUNCTOR_BINARY(C) { return a * math::digamma(b); }
};
// The derivative of this order of digamma: scale is (-1)^(order + 1) order!.
struct Polygamma {
  double order = 1, scale = 1;
  TS_FUNCTOR_UNARY(C) { return C(scale * math::zeta(order + 1, static_cast<double>(x))); }
};
struct PolygammaGrad {  // order and scale are those of the derivative
  double order = 2, scale = -2;
  TS_FUNCTOR_BINARY(C) { return a * Polygamma{order, scale}(b); }
};
// Limits that are numbers; NaN stands for an absent one. The gradient flows strictly inside of
// them, as in torch 2.15.
struct ClampGrad {
  double low = __builtin_nan(""), high = __builtin_nan("");
  TS_FUNCTOR_BINARY(C) {
    const bool above = (b > C(low)) | (low != low), below = (b < C(high)) | (high != high);
    return above & below ? a : C(0);
  }
};
struct NanToNum {
  double nan = 0, posinf = 0, neginf = 0;
  TS_FUNCTOR_UNARY(C) {
    const C infinity = C(__builtin_inf());
    const C finite = x == infinity ? C(posinf) : x == -infinity ? C(neginf) : x;
    return x != x ? C(nan) : finite;
  }
};
struct NanToNumGrad {
  TS_FUNCTOR_BINARY(C) { return b - b == C(0) ? a : C(0); }
};
struct IsNan {
  TS_FUNCTOR_UNARY(bool) { return x != x; }
};
struct IsInf {
  TS_FUNCTOR_UNARY(bool) { return math::fabs(x) == C(__builtin_inf()); }
};
struct IsFinite {
  TS_FUNCTOR_UNARY(bool) { return x - x == C(0); }
};
struct BitwiseNot {  // of integers
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_UNARY(C) {
    if constexpr (is_integer<C>) {
      return ~x;
    } else {
      return C(0);
    }
  }
};
struct LogicalNot {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_UNARY(bool) { return x == C(0); }
};

// ---- Activations --------------------------------------------------------------------------------

struct Relu {  // NaN stays
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_UNARY(C) { return x < C(0) ? C(0) : x; }
};
struct ReluGrad {  // of y (or x); 0 at 0
  TS_FUNCTOR_BINARY(C) { return b <= C(0) ? C(0) : a; }
};
struct Gelu {  // x cdf(x) of the standard normal distribution
  TS_FUNCTOR_UNARY(C) { return x * math::normal_parts(x).cdf; }
};
struct GeluGrad {
  TS_FUNCTOR_BINARY(C) {
    const auto normal = math::normal_parts(b);
    return a * math::fma(b * C(detail::kInverseSqrt2Pi), normal.bell, normal.cdf);
  }
};
// 0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), written as x sigmoid(2 u): one
// exponential, and no cancellation where x is far below zero.
struct GeluTanh {
  TS_FUNCTOR_UNARY(C) {
    const C inner = x * math::fma(C(detail::kGeluCubic), x * x, C(1));
    return x * detail::sigmoid(C(2 * detail::kSqrt2OverPi) * inner);
  }
};
struct GeluTanhGrad {
  TS_FUNCTOR_BINARY(C) {
    const C b2 = b * b;
    const C s = detail::sigmoid(C(2 * detail::kSqrt2OverPi) * b *
                                math::fma(C(detail::kGeluCubic), b2, C(1)));
    const C slope = C(2 * detail::kSqrt2OverPi) * math::fma(C(3 * detail::kGeluCubic), b2, C(1));
    return a * math::fma(b * s * (C(1) - s), slope, s);
  }
};
struct Silu {
  TS_FUNCTOR_UNARY(C) { return x / (C(1) + math::exp(-x)); }
};
struct SiluGrad {
  TS_FUNCTOR_BINARY(C) {
    const C s = detail::sigmoid(b);
    return a * s * math::fma(b, C(1) - s, C(1));
  }
};
struct Elu {
  double alpha = 1;
  TS_FUNCTOR_UNARY(C) { return x < C(0) ? C(alpha) * math::expm1(x) : x; }
};
struct EluGrad {
  double alpha = 1;
  TS_FUNCTOR_BINARY(C) { return b <= C(0) ? a * C(alpha) * math::exp(b) : a; }
};
struct Softplus {
  double beta = 1, threshold = 20;
  TS_FUNCTOR_UNARY(C) {
    const C scaled = x * C(beta);
    const C soft = math::log1p(math::exp(scaled)) / C(beta);
    return scaled > C(threshold) ? x : soft;
  }
};
struct SoftplusGrad {
  double beta = 1, threshold = 20;
  TS_FUNCTOR_BINARY(C) {
    const C scaled = b * C(beta);
    return scaled > C(threshold) ? a : a * detail::sigmoid(scaled);
  }
};
struct LeakyRelu {
  double slope = 0.01;
  TS_FUNCTOR_UNARY(C) { return x > C(0) ? x : x * C(slope); }
};
struct LeakyReluGrad {
  double slope = 0.01;
  TS_FUNCTOR_BINARY(C) { return b > C(0) ? a : a * C(slope); }
};

// ---- Two inputs ---------------------------------------------------------------------------------

struct Add {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(C) { return detail::sum(a, b); }
};
struct AddScaled {  // a + alpha b
  static constexpr bool kIntegers = true;
  double alpha = 1;
  TS_FUNCTOR_BINARY(C) { return detail::sum(a, detail::product(static_cast<C>(alpha), b)); }
};
struct Sub {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(C) {
    if constexpr (is_integer<C>) {
      return detail::wrapped(detail::bits(a) - detail::bits(b));
    } else {
      return a - b;
    }
  }
};
struct Mul {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(C) { return detail::product(a, b); }
};
struct Div {
  TS_FUNCTOR_BINARY(C) { return a / b; }
};
struct DivGradDivisor {  // (dy, a, b): -dy (a / b) / b
  TS_FUNCTOR_TERNARY(C) { return -a * ((b / c) / c); }
};
// Python's //: rounds down. Integers: the divisor is not 0 (the op checks).
struct FloorDivide {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(C) {
    if constexpr (is_integer<C>) {
      if (b == 0) return 0;
      if (b == -1) return Neg{}(a);
      const C quotient = a / b;
      return quotient - C((a % b != 0) && ((a < 0) != (b < 0)));
    } else {
      return from_rest(a, b, math::fmod(a, b));
    }
  }
  static TS_HD bool is_common(float a, float b) { return math::has_common_quotient(a, b); }
  static TS_HD float common(float a, float b) { return from_rest(a, b, math::fmod_common(a, b)); }

 private:
  template <class C>
  static TS_HD C from_rest(C a, C b, C rest) {
    const C exact = (a - rest) / b;
    const bool lowers = (rest != C(0)) & ((b < C(0)) != (rest < C(0)));
    const C lower = lowers ? exact - C(1) : exact;
    const C floored = math::floor(lower);
    const C rounded = lower - floored > C(0.5) ? floored + C(1) : floored;
    const C quotient = lower != C(0) ? rounded : math::copysign(C(0), a / b);
    return b == C(0) ? a / b : quotient;
  }
};
// Python's %: the sign of the divisor. Integers: the divisor is not 0 (the op checks).
struct Remainder {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(C) {
    if constexpr (is_integer<C>) {
      if (b == 0 || b == -1) return 0;
      const C rest = a % b;
      return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    } else {
      return from_rest(b, math::fmod(a, b));
    }
  }
  static TS_HD bool is_common(float a, float b) { return math::has_common_quotient(a, b); }
  static TS_HD float common(float a, float b) { return from_rest(b, math::fmod_common(a, b)); }

 private:
  template <class C>
  static TS_HD C from_rest(C b, C rest) {
    return (rest != C(0)) & ((b < C(0)) != (rest < C(0))) ? rest + b : rest;
  }
};
// C's %: the sign of the dividend. Integers: the divisor is not 0 (the op checks).
struct Fmod {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(C) {
    if constexpr (is_integer<C>) {
      return b == 0 || b == -1 ? 0 : a % b;
    } else {
      return math::fmod(a, b);
    }
  }
  static TS_HD bool is_common(float a, float b) { return math::has_common_quotient(a, b); }
  static TS_HD float common(float a, float b) { return math::fmod_common(a, b); }
};
struct FmodGradDivisor {  // (dy, a, b): -dy trunc(a / b)
  TS_FUNCTOR_TERNARY(C) { return -a * math::trunc(b / c); }
};
struct Atan2 {
  TS_FUNCTOR_BINARY(C) { return math::atan2(a, b); }
};
// (dy, own, other): dy other / (own^2 + other^2), 0 at the origin; sign -1 for the second operand.
struct Atan2Grad {
  double sign = 1;
  TS_FUNCTOR_TERNARY(C) {
    const C square = b * b + c * c;
    return square == C(0) ? C(0) : a * (C(sign) * c / square);
  }
};
// Integers and bool alone: the ops refuse floats.
struct BitwiseAnd {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(C) {
    if constexpr (is_integer<C>) {
      return a & b;
    } else {
      return C(0);
    }
  }
};
struct BitwiseOr {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(C) {
    if constexpr (is_integer<C>) {
      return a | b;
    } else {
      return C(0);
    }
  }
};
struct BitwiseXor {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(C) {
    if constexpr (is_integer<C>) {
      return a ^ b;
    } else {
      return C(0);
    }
  }
};
// Integers: by squaring, modulo 2^64; negative exponents give the truncated quotient.
struct Pow {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(C) {
    if constexpr (is_integer<C>) {
      if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 == 0 ? 1 : -1) : 0;
      uint64_t result = 1, power = detail::bits(a);
      for (uint64_t rest = detail::bits(b); rest != 0; rest >>= 1) {
        if (rest & 1) result *= power;
        power *= power;
      }
      return detail::wrapped(result);
    } else {
      return math::pow(a, b);
    }
  }
};
struct PowGradBase {  // (dy, a, b): dy b a^(b - 1), 0 where b is 0
  TS_FUNCTOR_TERNARY(C) { return c == C(0) ? C(0) : a * (c * math::pow(b, c - C(1))); }
};
struct Maximum {  // NaN wins
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(C) {
    const C larger = a > b ? a : b;
    return a != a ? a : larger;
  }
};
struct Minimum {  // NaN wins
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(C) {
    const C smaller = a < b ? a : b;
    return a != a ? a : smaller;
  }
};
struct GreaterGrad {  // (dy, a, b): dy where a > b, half of it where they are equal
  TS_FUNCTOR_TERNARY(C) { return b < c ? C(0) : b == c ? C(0.5) * a : a; }
};
struct LessGrad {
  TS_FUNCTOR_TERNARY(C) { return b > c ? C(0) : b == c ? C(0.5) * a : a; }
};
struct Eq {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(bool) { return a == b; }
};
struct Ne {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(bool) { return a != b; }
};
struct Lt {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(bool) { return a < b; }
};
struct Le {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(bool) { return a <= b; }
};
struct Gt {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(bool) { return a > b; }
};
struct Ge {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(bool) { return a >= b; }
};
struct LogicalAnd {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(bool) { return (a != C(0)) & (b != C(0)); }
};
struct LogicalOr {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(bool) { return (a != C(0)) | (b != C(0)); }
};
struct LogicalXor {
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_BINARY(bool) { return (a != C(0)) != (b != C(0)); }
};

// ---- Three inputs -------------------------------------------------------------------------------

struct Where {
  static constexpr bool kIntegers = true, kCondition = true;
  template <class C>
  TS_HD C operator()(uint8_t condition, C a, C b) const {  // condition: 0 or 1
    // By bits: g++ 12 does not vectorize a choice whose condition is narrower than its values.
    using Bits = std::conditional_t<sizeof(C) == 8, uint64_t, uint32_t>;
    const Bits mask = Bits(0) - static_cast<Bits>(condition);
    const Bits chosen =
        (__builtin_bit_cast(Bits, a) & mask) | (__builtin_bit_cast(Bits, b) & ~mask);
    return __builtin_bit_cast(C, chosen);
  }
};
struct Addcmul {  // a + value b c
  static constexpr bool kIntegers = true;
  double value = 1;
  TS_FUNCTOR_TERNARY(C) {
    return detail::sum(a, detail::product(static_cast<C>(value), detail::product(b, c)));
  }
};
struct Addcdiv {  // a + value b / c
  double value = 1;
  TS_FUNCTOR_TERNARY(C) { return a + C(value) * (b / c); }
};
struct Lerp {  // a + c (b - a), from the nearer end
  TS_FUNCTOR_TERNARY(C) {
    const C difference = b - a;
    return math::fabs(c) < C(0.5) ? a + c * difference : b - difference * (C(1) - c);
  }
};
struct Clamp {  // to [b, c]; c where b > c; NaN stays, and a NaN limit wins
  static constexpr bool kIntegers = true;
  TS_FUNCTOR_TERNARY(C) { return Minimum{}(Maximum{}(a, b), c); }
};
#undef TS_FUNCTOR_UNARY
#undef TS_FUNCTOR_BINARY
#undef TS_FUNCTOR_TERNARY

}  // namespace tessera::fn

// clang-format off
#define TS_UNARY_FUNCTORS(X)                                                                       \
  X(Identity) X(Neg) X(Abs) X(Sign) X(Square) X(Floor) X(Ceil) X(Round) X(Reciprocal) X(Sqrt)      \
  X(Rsqrt) X(NanToNum) X(IsNan) X(IsInf) X(IsFinite) X(LogicalNot) X(Relu) X(LeakyRelu)            \
  X(Exp) X(Expm1) X(Log) X(Log1p) X(Sin) X(Cos) X(Tanh) X(Sigmoid) X(Erf) X(Gelu) X(GeluTanh)      \
  X(Silu) X(Elu) X(Softplus) X(Trunc) X(Log2) X(Log10) X(Tan) X(Erfinv) X(Lgamma) X(Digamma)       \
  X(Polygamma) X(BitwiseNot)
#define TS_BINARY_FUNCTORS(X)                                                                      \
  X(Add) X(AddScaled) X(Sub) X(Mul) X(Div) X(FloorDivide) X(Remainder) X(Pow) X(Maximum) X(Minimum)\
  X(Eq) X(Ne) X(Lt) X(Le) X(Gt) X(Ge) X(LogicalAnd) X(LogicalOr) X(LogicalXor)        \
  X(Fmod) X(Atan2) X(BitwiseAnd) X(BitwiseOr) X(BitwiseXor)
#define TS_UNARY_GRADIENT_FUNCTORS(X)                                                              \
  X(AbsGrad) X(ReciprocalGrad) X(SqrtGrad) X(RsqrtGrad) X(Expm1Grad) X(Log1pGrad) X(SinGrad)       \
  X(CosGrad) X(TanhGrad) X(SigmoidGrad) X(ErfGrad) X(NanToNumGrad) X(ReluGrad) X(GeluGrad)         \
  X(GeluTanhGrad) X(SiluGrad) X(EluGrad) X(SoftplusGrad) X(LeakyReluGrad)          \
  X(ClampGrad) X(TanGrad) X(ErfinvGrad) X(LgammaGrad) X(PolygammaGrad)
#define TS_TERNARY_FUNCTORS(X)                                                                     \
  X(Where) X(Addcmul) X(Addcdiv) X(Lerp) X(Clamp) X(DivGradDivisor) X(PowGradBase) X(GreaterGrad)  \
  X(LessGrad) X(FmodGradDivisor) X(Atan2Grad)
// clang-format on
