// Elementary functions of the functors. The float forms have no branch and no call, so that loops
// over them vectorize (sin and cos look up a table and stay scalar under g++ 12; below kCommonAngle
// sin_common and cos_common give the same bits without it) and host and device give the same bits;
// contraction must be off, fma is written where meant. The double forms are libm's. pow, atan2 and
// lgamma are libm's for both; digamma and zeta are calculated in double.
//
// Largest error of the float forms, in units of the last place of the exact result, measured over
// bit patterns of all finite floats, subnormals included (tests/core/test_math.cpp holds them to
// it):
//
//   exp 1.2   expm1 1.8   log 0.9   log1p 1.5   tanh 2.5   erf 1.1   sin 1.5   cos 1.5
//   tan 3.0   log2 1.5    log10 1.7 erfinv 4.0
//
// Infinities, NaN, signed zeros and the ends of the range behave as C's Annex F says. Polynomials
// are Remez fits of the relative error, with coefficients rounded to float one after the other and
// the rest refitted.
#pragma once

#include <cmath>
#include <cstdint>

#include <tessera/core/macros.h>

namespace tessera::math {

namespace detail {

TS_HD uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
TS_HD float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline constexpr float kLog2E = 0x1.715476p+0f;
inline constexpr float kLn2High = 0x1.62e43p-1f;
inline constexpr float kLn2Low = -0x1.05c61p-29f;

// Adding this rounds a float to an integer, which then stands in its low bits.
inline constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
inline constexpr uint32_t kRoundBits = 0x4b400000u;

TS_HD float power_of_two(int32_t exponent) {  // -126 <= exponent <= 127
  return float_of(static_cast<uint32_t>(exponent + 127) << 23);
}

// x = n ln2 + r with |r| <= ln2 / 2; returns exp(r) - 1 = r + r^2 q(r).
TS_HD float reduced_expm1(float x, int32_t& n) {
  const float shifted = ::fmaf(x, kLog2E, kRound);
  n = static_cast<int32_t>(bits_of(shifted) - kRoundBits);
  const float rounded = shifted - kRound;
  const float r = ::fmaf(rounded, -kLn2Low, ::fmaf(rounded, -kLn2High, x));
  float q = 1.395879197e-03f;
  q = ::fmaf(q, r, 8.368291892e-03f);
  q = ::fmaf(q, r, 4.166657478e-02f);
  q = ::fmaf(q, r, 1.666651666e-01f);
  q = ::fmaf(q, r, 5.000000000e-01f);
  return ::fmaf(r * r, q, r);
}

// exp where the result is a normal number: -87 <= x <= 88.
TS_HD float exp_normal(float x) {
  int32_t n;
  const float p = reduced_expm1(x, n);
  return (p + 1.0f) * power_of_two(n);
}

// expm1 for -50 <= x <= 89. 2^n p + (2^n - 1), halved inside so that n = 128 does not overflow.
TS_HD float expm1_in_range(float x) {
  int32_t n;
  const float p = reduced_expm1(x, n);
  const float half_scale = power_of_two(n - 1);
  return 2.0f * ::fmaf(half_scale, p, half_scale - 0.5f);
}

// log(u + correction) = exponent ln2 + f - square / 2 + cubic for a positive normal u and a
// correction far smaller than it.
struct LogParts {
  float exponent, f, square, cubic;
};
TS_HD LogParts log_parts(float u, float correction, int32_t exponent_offset) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3u;
  const uint32_t shifted = bits_of(u) - kSqrtHalf;
  const int32_t exponent = static_cast<int32_t>(shifted) >> 23;
  const float mantissa = float_of((shifted & 0x7fffffu) + kSqrtHalf);  // sqrt(1/2) to sqrt(2)
  const int32_t scale = exponent < 127 ? exponent : 127;
  const float f =
      ::fmaf(correction, float_of(static_cast<uint32_t>(127 - scale) << 23), mantissa - 1.0f);
  const float e = static_cast<float>(exponent + exponent_offset);
  float q = -7.663075626e-02f;
  q = ::fmaf(q, f, 1.277841032e-01f);
  q = ::fmaf(q, f, -1.316227466e-01f);
  q = ::fmaf(q, f, 1.420115680e-01f);
  q = ::fmaf(q, f, -1.662320793e-01f);
  q = ::fmaf(q, f, 2.000125498e-01f);
  q = ::fmaf(q, f, -2.500082254e-01f);
  q = ::fmaf(q, f, 3.333333135e-01f);
  const float f2 = f * f;
  return {e, f, f2, (f2 * f) * q};
}

TS_HD float log_corrected(float u, float correction, int32_t exponent_offset) {
  const LogParts parts = log_parts(u, correction, exponent_offset);
  float y = ::fmaf(parts.exponent, kLn2Low, parts.cubic);
  y = ::fmaf(-0.5f, parts.square, y);
  return ::fmaf(parts.exponent, kLn2High, parts.f + y);
}

// log(x) in the base b: log_b(2) and 1 / ln(b) as sums of two floats. Whole powers of 2 and 10 that
// a float holds give whole numbers.
TS_HD float log_in_base(float x, float two_high, float two_low, float e_high, float e_low) {
  const bool tiny = x < 0x1p-126f;
  const LogParts parts = log_parts(tiny ? x * 0x1p23f : x, 0.0f, tiny ? -23 : 0);
  const float m = parts.f + ::fmaf(-0.5f, parts.square, parts.cubic);
  const float rest = ::fmaf(m, e_high, ::fmaf(parts.exponent, two_low, m * e_low));
  return ::fmaf(parts.exponent, two_high, rest);
}

// What log(x) is where x is not a positive number, else `normal`.
TS_HD float log_or_special(float x, float normal) {
  const float special = x < 0.0f ? float_of(0x7fc00000u) : x;  // +inf and NaN pass
  const float value = x > 0.0f && x < float_of(0x7f800000u) ? normal : special;
  return x == 0.0f ? float_of(0xff800000u) : value;
}

// x = n pi/2 + r with |r| <= pi/4, for every finite float. x is written m * 16^i with |m| < 2^24,
// so that m times a reduced power of 16 is small and its high part exact in double.
TS_HD float reduce_half_pi(float x, uint32_t& quadrant) {
  // 16^i reduced by multiples of 2 pi: a high part of at most 29 bits and a double for the rest.
  static constexpr double kReducedPowersHigh[27] = {
      0x1p+0,          -0x1.6cbe3fap+1, -0x1.9c501fcp+0, -0x1.460d4ecp-1, 0x1.304999dp+1,
      0x1.58e8ecp-2,   -0x1.c9b6498p-1, -0x1.bcb4a24p+0, -0x1.54a767dp+1, 0x1.668ad94p+0,
      -0x1.5ca6dffp+1, 0x1.9a6f588p-2,  0x1.09f468p-3,   0x1.09f4684p+1,  0x1.d412de4p+0,
      -0x1.14a6223p+1, 0x1.8f1a5c4p+1,  -0x1.82ac838p-2, 0x1.ee663ap-3,   -0x1.35d931p+1,
      -0x1.082d21ap+0, 0x1.2b5532cp+1,  -0x1.214a9b8p-2, 0x1.c35466cp+0,  0x1.89a58c4p+1,
      -0x1.0f45204p+0, 0x1.e52a7a6p+0};
  static constexpr double kReducedPowersLow[27] = {0.0,
                                                   0x1.9bc5b961b1acep-29,
                                                   0x1.4c71cb18f8747p-30,
                                                   -0x1.16ce9e652943p-29,
                                                   -0x1.2a1861e90aa2fp-29,
                                                   0x1.2c0aa86572557p-30,
                                                   -0x1.8226fe126436p-30,
                                                   0x1.8ccc9eb33ee4bp-32,
                                                   -0x1.830ee719bc742p-31,
                                                   0x1.bb436614df386p-30,
                                                   0x1.547827d3e6a98p-29,
                                                   0x1.8afe657e60255p-32,
                                                   0x1.e928118ff7087p-30,
                                                   -0x1.6d7ee7008f78ap-30,
                                                   0x1.ecfcfcf3ac5b5p-29,
                                                   0x1.462021976ea92p-32,
                                                   -0x1.56965f290c0efp-30,
                                                   0x1.001bd445e5556p-31,
                                                   -0x1.de27ecb3a5e43p-29,
                                                   -0x1.f3c6b791847c5p-36,
                                                   0x1.13f76c94d82d9p-30,
                                                   -0x1.f814a975e080fp-30,
                                                   -0x1.1233b1d7415b4p-30,
                                                   0x1.8fcb337ab9ec9p-29,
                                                   0x1.dc40bb622ebdap-31,
                                                   -0x1.9a43241d6b3c8p-29,
                                                   0x1.8010098f35163p-30};
  const int32_t exponent = static_cast<int32_t>((bits_of(x) >> 23) & 0xffu) - 127;
  const int32_t steps = exponent < 23 ? 0 : (exponent - 23) >> 2;
  const int32_t index = steps < 27 ? steps : 26;  // infinity and NaN have an exponent of 128
  const double m = static_cast<double>(x * power_of_two(-4 * index));
  const double high = m * kReducedPowersHigh[index], low = m * kReducedPowersLow[index];
  constexpr double kRoundDouble = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = ::fma(high + low, 0x1.45f306dc9c883p-1, kRoundDouble);
  const double n = shifted - kRoundDouble;
  quadrant = static_cast<uint32_t>(__builtin_bit_cast(uint64_t, shifted));
  const double r = ::fma(n, -0x1.921fb54442d18p+0, high) + ::fma(n, -0x1.1a62633145c07p-54, low);
  return static_cast<float>(r);
}

// The same for |x| < kCommonAngle, where the power is 16^0: the same bits, and it vectorizes.
TS_HD float reduce_common_half_pi(float x, uint32_t& quadrant) {
  constexpr double kRoundDouble = 6755399441055744.0;  // 1.5 * 2^52
  const double m = static_cast<double>(x);
  const double shifted = ::fma(m, 0x1.45f306dc9c883p-1, kRoundDouble);
  const double n = shifted - kRoundDouble;
  quadrant = static_cast<uint32_t>(__builtin_bit_cast(uint64_t, shifted));
  return static_cast<float>(::fma(n, -0x1.921fb54442d18p+0, m) + n * -0x1.1a62633145c07p-54);
}

TS_HD float sin_of_reduced(float r, uint32_t quadrant) {  // sin(r + quadrant * pi / 2)
  const float r2 = r * r;
  float s = 2.831717893e-06f;
  s = ::fmaf(s, r2, -1.985302515e-04f);
  s = ::fmaf(s, r2, 8.333379403e-03f);
  s = ::fmaf(s, r2, -1.666666716e-01f);
  s = ::fmaf(s * r2, r, r);
  float c = 2.443142512e-05f;
  c = ::fmaf(c, r2, -1.388730481e-03f);
  c = ::fmaf(c, r2, 4.166664556e-02f);
  c = ::fmaf(c, r2, -0.5f);
  c = ::fmaf(c, r2, 1.0f);
  const float value = quadrant & 1u ? c : s;
  return float_of(bits_of(value) ^ ((quadrant & 2u) << 30));
}

}  // namespace detail

TS_HD float exp(float x) {
  const float low = x < -104.0f ? -104.0f : x;  // written so that NaN passes
  const float clamped = low > 89.0f ? 89.0f : low;
  int32_t n;
  const float p = detail::reduced_expm1(clamped, n) + 1.0f;
  // Two steps: 2^n need not be a normal number, and the second product rounds once.
  const int32_t half = n >> 1;
  return (p * detail::power_of_two(half)) * detail::power_of_two(n - half);
}
TS_HD double exp(double x) { return ::exp(x); }

TS_HD float expm1(float x) {
  const float low = x < -50.0f ? -50.0f : x;
  const float clamped = low > 89.0f ? 89.0f : low;
  const float value = detail::expm1_in_range(clamped);
  return x < 0x1p-24f && x > -0x1p-24f ? x : value;  // keeps -0 and subnormals
}
TS_HD double expm1(double x) { return ::expm1(x); }

TS_HD float log(float x) {
  const bool tiny = x < 0x1p-126f;
  return detail::log_or_special(
      x, detail::log_corrected(tiny ? x * 0x1p23f : x, 0.0f, tiny ? -23 : 0));
}
TS_HD double log(double x) { return ::log(x); }

TS_HD float log2(float x) {
  return detail::log_or_special(x,
                                detail::log_in_base(x, 1.0f, 0.0f, detail::kLog2E, 0x1.4ae0cp-26f));
}
TS_HD double log2(double x) { return ::log2(x); }

TS_HD float log10(float x) {
  return detail::log_or_special(
      x, detail::log_in_base(x, 0x1.344136p-2f, -0x1.ec10cp-27f, 0x1.bcb7b2p-2f, -0x1.5b235ep-27f));
}
TS_HD double log10(double x) { return ::log10(x); }

TS_HD float log1p(float x) {
  const float u = 1.0f + x;
  const float correction = x < 1.0f ? x - (u - 1.0f) : 1.0f - (u - x);  // 1 + x - u, exactly
  const float normal = detail::log_corrected(u, correction, 0);
  const float special = x < -1.0f ? detail::float_of(0x7fc00000u) : x;
  const float value = x > -1.0f && x < detail::float_of(0x7f800000u) ? normal : special;
  const float with_pole = x == -1.0f ? detail::float_of(0xff800000u) : value;
  return x == 0.0f ? x : with_pole;  // keeps -0
}
TS_HD double log1p(double x) { return ::log1p(x); }

TS_HD float tanh(float x) {
  const float magnitude = ::fabsf(x);
  const float clamped = magnitude > 10.0f ? 10.0f : magnitude;
  const float e = detail::expm1_in_range(2.0f * clamped);
  return ::copysignf(e / (e + 2.0f), x);
}
TS_HD double tanh(double x) { return ::tanh(x); }

TS_HD float erf(float x) {
  const float magnitude = ::fabsf(x);
  const float x2 = magnitude * magnitude;
  // |x| < 1: x + x p(x^2)
  float p = 7.806903886e-05f;
  p = ::fmaf(p, x2, -7.997853099e-04f);
  p = ::fmaf(p, x2, 5.187162198e-03f);
  p = ::fmaf(p, x2, -2.685334720e-02f);
  p = ::fmaf(p, x2, 1.128357872e-01f);
  p = ::fmaf(p, x2, -3.761262596e-01f);
  p = ::fmaf(p, x2, 1.283791661e-01f);
  const float inner = ::fmaf(p, magnitude, magnitude);
  // beyond: 1 - exp(-g), g = -log(erfc)
  const float a = magnitude > 4.0f ? 4.0f : magnitude;
  float g = 1.810881440e-05f;
  g = ::fmaf(g, a, -3.954021668e-04f);
  g = ::fmaf(g, a, 3.959516529e-03f);
  g = ::fmaf(g, a, -2.450328879e-02f);
  g = ::fmaf(g, a, 1.072356850e-01f);
  g = ::fmaf(g, a, 6.343793273e-01f);
  g = ::fmaf(g, a, 1.128962755e+00f);
  g = ::fmaf(g, a, -5.118964327e-05f);
  const float outer = 1.0f - detail::exp_normal(-g);
  return ::copysignf(magnitude < 1.0f ? inner : outer, x);
}
TS_HD double erf(double x) { return ::erf(x); }

inline constexpr float kCommonAngle = 0x1p27f;

TS_HD float sin_common(float x) {  // |x| < kCommonAngle
  uint32_t quadrant;
  const float r = detail::reduce_common_half_pi(x, quadrant);
  const float value = detail::sin_of_reduced(r, quadrant);
  return x == 0.0f ? x : value;
}
TS_HD float cos_common(float x) {  // |x| < kCommonAngle
  uint32_t quadrant;
  const float r = detail::reduce_common_half_pi(x, quadrant);
  return detail::sin_of_reduced(r, quadrant + 1);
}

TS_HD float tan_common(float x) {  // |x| < kCommonAngle
  uint32_t quadrant;
  const float r = detail::reduce_common_half_pi(x, quadrant);
  const float value = detail::sin_of_reduced(r, quadrant) / detail::sin_of_reduced(r, quadrant + 1);
  return x == 0.0f ? x : value;
}

TS_HD float sin(float x) {
  uint32_t quadrant;
  const float r = detail::reduce_half_pi(x, quadrant);
  const float value = detail::sin_of_reduced(r, quadrant);
  return x == 0.0f ? x : value;  // keeps -0
}
TS_HD double sin(double x) { return ::sin(x); }

TS_HD float cos(float x) {
  uint32_t quadrant;
  const float r = detail::reduce_half_pi(x, quadrant);
  return detail::sin_of_reduced(r, quadrant + 1);
}
TS_HD double cos(double x) { return ::cos(x); }

TS_HD float tan(float x) {
  uint32_t quadrant;
  const float r = detail::reduce_half_pi(x, quadrant);
  const float value = detail::sin_of_reduced(r, quadrant) / detail::sin_of_reduced(r, quadrant + 1);
  return x == 0.0f ? x : value;  // keeps -0
}
TS_HD double tan(double x) { return ::tan(x); }

// x p(w) with w = -log(1 - x^2), in which erfinv(x) / x is smooth: one polynomial in w below 5, one
// in its root beyond.
TS_HD float erfinv(float x) {
  const float inside = (1.0f - x) * (1.0f + x);  // 1 - x^2 without the rounding of the square
  const float w = -math::log(inside);
  const float a = (w < 5.0f ? w : 5.0f) - 2.5f;
  float p = -8.791056771e-09f;
  p = ::fmaf(p, a, 2.323264425e-08f);
  p = ::fmaf(p, a, 4.661706612e-07f);
  p = ::fmaf(p, a, -3.462704854e-06f);
  p = ::fmaf(p, a, -4.963347692e-06f);
  p = ::fmaf(p, a, 2.183444449e-04f);
  p = ::fmaf(p, a, -1.252741902e-03f);
  p = ::fmaf(p, a, -4.177386872e-03f);
  p = ::fmaf(p, a, 2.466402799e-01f);
  p = ::fmaf(p, a, 1.501409411e+00f);
  const float b = ::sqrtf(w > 5.0f ? w : 5.0f) - 3.0f;
  float q = 1.100997615e-04f;
  q = ::fmaf(q, b, -3.043638717e-04f);
  q = ::fmaf(q, b, -4.867590178e-05f);
  q = ::fmaf(q, b, 1.478652004e-03f);
  q = ::fmaf(q, b, -3.601640696e-03f);
  q = ::fmaf(q, b, 5.689405371e-03f);
  q = ::fmaf(q, b, -7.636391092e-03f);
  q = ::fmaf(q, b, 9.445007890e-03f);
  q = ::fmaf(q, b, 1.001674891e+00f);
  q = ::fmaf(q, b, 2.832976818e+00f);
  const float value = x * (w < 5.0f ? p : q);
  const float pole = x * detail::float_of(0x7f800000u);
  const float inner = ::fabsf(x) < 1.0f ? value : detail::float_of(0x7fc00000u);
  return ::fabsf(x) == 1.0f ? pole : inner;
}
// Halley's method from a start of three digits. In erfc, which keeps the digits of 1 - |x|, above
// 1/2.
TS_HD double erfinv(double x) {
  const double magnitude = ::fabs(x), rest = 1 - magnitude;
  if (!(magnitude < 1)) return magnitude == 1 ? x * __builtin_inf() : __builtin_nan("");
  double y = static_cast<double>(erfinv(static_cast<float>(magnitude)));
  if (rest < 1e-4) {  // erfc(y) = e^(-y^2) / (y sqrt(pi)), nearly
    const double power = -::log(rest);
    y = ::sqrt(power - 0.5 * ::log(3.14159265358979323846 * power));
  }
  for (int step = 0; step < 3; ++step) {
    const double error = magnitude > 0.5 ? rest - ::erfc(y) : ::erf(y) - magnitude;
    const double newton = error * 0.88622692545275801365 * ::exp(y * y);  // sqrt(pi) / 2
    y -= newton / (1 + y * newton);
  }
  return ::copysign(y, x);
}

namespace detail {

// R of normal_parts over t.
TS_HD float normal_tail(float t) {
  float q = 3.823950887e-02f;
  q = ::fmaf(q, t, -2.065141052e-01f);
  q = ::fmaf(q, t, 3.690096140e-01f);
  q = ::fmaf(q, t, -2.180682719e-01f);
  q = ::fmaf(q, t, 2.250754684e-01f);
  q = ::fmaf(q, t, 6.130212545e-02f);
  q = ::fmaf(q, t, 1.192621663e-01f);
  q = ::fmaf(q, t, 1.116934791e-01f);
  return q;
}

}  // namespace detail

// The distribution function of the standard normal distribution and exp(-x^2 / 2), which share
// their exponential: cdf(-a) = exp(-a^2 / 2) R(a) with a polynomial in 1 / (1 + 9a/32) for R.
// Unlike (1 + erf(x / sqrt 2)) / 2 it does not cancel below zero: 3.5 units of the last place for x
// > -6; 0 below -13.
struct NormalParts {
  float cdf, bell;
};
TS_HD NormalParts normal_parts(float x) {
  const float magnitude = ::fabsf(x);
  const bool beyond = magnitude > 13.0f;
  const float a = beyond ? 13.0f : magnitude;
  const float square = a * a;
  const float rounding = ::fmaf(a, a, -square);  // what the square lost
  const float rounded_bell = detail::exp_normal(-0.5f * square);
  const float bell = ::fmaf(-0.5f * rounding, rounded_bell, rounded_bell);
  const float t = 1.0f / ::fmaf(0.28125f, a, 1.0f);
  const float tail = beyond ? 0.0f : bell * (detail::normal_tail(t) * t);
  return {x < 0.0f ? tail : 1.0f - tail, beyond ? 0.0f : bell};
}
struct NormalPartsDouble {
  double cdf, bell;
};
TS_HD NormalPartsDouble normal_parts(double x) {
  return {0.5 * ::erfc(x * -0.70710678118654752440), ::exp(-0.5 * x * x)};
}

// libm's: correctly rounded but for rare cases, a call an element.
TS_HD float pow(float x, float y) { return ::powf(x, y); }
TS_HD double pow(double x, double y) { return ::pow(x, y); }

TS_HD float atan2(float y, float x) { return ::atan2f(y, x); }
TS_HD double atan2(double y, double x) { return ::atan2(y, x); }

// libm's, without its global sign.
TS_HD float lgamma(float x) {
#if defined(__CUDA_ARCH__)
  return ::lgammaf(x);
#else
  int sign;
  return ::lgammaf_r(x, &sign);
#endif
}
TS_HD double lgamma(double x) {
#if defined(__CUDA_ARCH__)
  return ::lgamma(x);
#else
  int sign;
  return ::lgamma_r(x, &sign);
#endif
}

// lgamma's derivative: from x >= 10 the asymptotic series (Abramowitz & Stegun 6.3.18), below it by
// psi(x) = psi(x + 1) - 1 / x and for negative x by reflection. As torch: -inf at 0, inf at -0, NaN
// at the other poles.
TS_HD double digamma(double x) {
  if (x == 0) return ::copysign(__builtin_inf(), -x);
  double sum = 0;
  if (x < 0) {
    if (::floor(x) == x) return __builtin_nan("");
    constexpr double kPi = 3.14159265358979323846;
    sum = -kPi / ::tan(kPi * (x - ::trunc(x)));
    x = 1 - x;
  }
  for (; x < 10; x += 1) sum -= 1 / x;
  const double r = 1 / (x * x);
  double series = 1.0 / 12;
  series = ::fma(series, -r, 691.0 / 32760);
  series = ::fma(series, -r, 1.0 / 132);
  series = ::fma(series, -r, 1.0 / 240);
  series = ::fma(series, -r, 1.0 / 252);
  series = ::fma(series, -r, 1.0 / 120);
  series = ::fma(series, -r, 1.0 / 12);
  return sum + (::log(x) - 0.5 / x - r * series);
}
TS_HD float digamma(float x) { return static_cast<float>(digamma(static_cast<double>(x))); }

namespace detail {

// The sum of (q + k)^-s over all k >= 0, for q > 0 and s > 1: terms below 10, Euler and Maclaurin's
// formula above.
TS_HD double zeta_of_positive(double s, double q) {
  double sum = 0;
  for (; q < 10; q += 1) sum += ::pow(q, -s);
  if (q > 1e300) return sum;
  const double power = ::pow(q, -s), r = 1 / (q * q);
  double term = power * s / q;
  double series = term / 12;
  // Bernoulli's numbers B_2k / (2k)! from k = 2 on.
  constexpr double kCoefficients[] = {-1.0 / 720,     1.0 / 30240,           -1.0 / 1209600,
                                      1.0 / 47900160, -691.0 / 1307674368e3, 1.0 / 74724249600.0};
  for (int k = 0; k < 6; ++k) {
    term *= (s + 2 * k + 1) * (s + 2 * k + 2) * r;
    series += term * kCoefficients[k];
  }
  return sum + power * (q / (s - 1) + 0.5) + series;
}

}  // namespace detail

// Hurwitz's zeta function for whole s >= 2, also of negative q; infinity at the poles. Terms below
// 0 are those of a positive q turned around: from ceil(q) - q on, without those from 1 - q on.
TS_HD double zeta(double s, double q) {
  if (q <= 0 && ::floor(q) == q) return __builtin_inf();
  const double turned = ::fmod(s, 2) == 0 ? 1 : -1;
  double sum = 0;
  for (int part = 0; part < (q > 0 ? 1 : 3); ++part) {  // a loop: one copy of a long function
    const double from = q > 0 ? q : part == 0 ? q - ::floor(q) : part == 1 ? ::ceil(q) - q : 1 - q;
    const double sign = part == 0 ? 1 : part == 1 ? turned : -turned;
    sum += sign * detail::zeta_of_positive(s, from);
  }
  return sum;
}

TS_HD float sqrt(float x) { return ::sqrtf(x); }
TS_HD double sqrt(double x) { return ::sqrt(x); }
TS_HD float floor(float x) { return ::floorf(x); }
TS_HD double floor(double x) { return ::floor(x); }
TS_HD float ceil(float x) { return ::ceilf(x); }
TS_HD double ceil(double x) { return ::ceil(x); }
TS_HD float trunc(float x) { return ::truncf(x); }
TS_HD double trunc(double x) { return ::trunc(x); }
TS_HD float round_even(float x) { return ::nearbyintf(x); }  // ties to even, as torch.round
TS_HD double round_even(double x) { return ::nearbyint(x); }
TS_HD float fabs(float x) { return ::fabsf(x); }
TS_HD double fabs(double x) { return ::fabs(x); }
TS_HD float fmod(float x, float y) { return ::fmodf(x, y); }
TS_HD double fmod(double x, double y) { return ::fmod(x, y); }
// fmod without a call, exact where has_common_quotient: a quotient below 2^27 of two floats is at
// least 2^-52 away, relatively, from an integer that it is not, so that the division in double
// truncates to the right one, and 27 + 24 bits of its product are exact.
TS_HD bool has_common_quotient(float x, float y) {
  const float size = ::fabsf(y);
  return (::fabsf(x) < 0x1p27f * size) & (size < detail::float_of(0x7f800000u));
}
TS_HD float fmod_common(float x, float y) {
  const double a = static_cast<double>(x), b = static_cast<double>(y);
  return ::copysignf(static_cast<float>(::fma(-::trunc(a / b), b, a)), x);
}
TS_HD float fma(float x, float y, float z) { return ::fmaf(x, y, z); }
TS_HD double fma(double x, double y, double z) { return ::fma(x, y, z); }
TS_HD float copysign(float x, float sign) { return ::copysignf(x, sign); }
TS_HD double copysign(double x, double sign) { return ::copysign(x, sign); }
TS_HD bool isnan(float x) { return x != x; }
TS_HD bool isnan(double x) { return x != x; }

}  // namespace tessera::math
