// f32 whose exponentials and divisions are a GPU's own instructions, for formulas whose results are
// rounded to 16 bits: functors (functors.h) take it for C as they take float,
// fn::GeluTanh{}(Approximate(x)).value.
//
// Relative errors (PTX ISA, ex2.approx.ftz.f32 and rcp.approx.ftz.f32): 2^-22 of exp2, 2^-23 of a
// reciprocal, and exp(x) adds |x| 2^-24 for its argument; 16 bits round by 2^-12 or more. What is
// smaller than a normal f32 is 0. On the host, where the GPU is emulated, the numbers are exact and
// then moved by those errors, up or down as their bits have it: what tests allow there holds for
// whatever a GPU makes of them within its bounds.
#pragma once

#include <cmath>
#include <cstdint>

#include <tessera/core/macros.h>
#include <tessera/core/math.h>

namespace tessera::math {

namespace detail {

// Host: value (1 + error) or value (1 - error).
TS_HD float moved_by(float value, float argument, float error) {
  const uint32_t drawn = bits_of(argument) * 0x9e3779b1u;
  return value * ((drawn >> 31) != 0 ? 1.0f + error : 1.0f - error);
}

TS_HD float exp2_approximate(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  if (::fabsf(x) < 0x1p-126f) return 1.0f;  // the PTX ISA: exact
  const float result = moved_by(::exp2f(x), x, 0x1p-22f);
  return result < 0x1p-126f ? 0.0f : result;  // NaN passes
#endif
}

TS_HD float reciprocal_approximate(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  const float result = moved_by(1.0f / x, x, 0x1p-23f);
  return ::fabsf(result) < 0x1p-126f ? ::copysignf(0.0f, x) : result;
#endif
}

}  // namespace detail

struct Approximate {
  float value;

  Approximate() = default;
  template <class Number>
  TS_HD explicit Approximate(Number number) : value(static_cast<float>(number)) {}

  friend TS_HD Approximate operator+(Approximate a, Approximate b) {
    return Approximate(a.value + b.value);
  }
  friend TS_HD Approximate operator-(Approximate a, Approximate b) {
    return Approximate(a.value - b.value);
  }
  friend TS_HD Approximate operator-(Approximate a) { return Approximate(-a.value); }
  friend TS_HD Approximate operator*(Approximate a, Approximate b) {
    return Approximate(a.value * b.value);
  }
  friend TS_HD Approximate operator/(Approximate a, Approximate b) {
    return Approximate(a.value * detail::reciprocal_approximate(b.value));
  }
};

TS_HD Approximate fma(Approximate x, Approximate y, Approximate z) {
  return Approximate(::fmaf(x.value, y.value, z.value));
}
TS_HD Approximate exp(Approximate x) {
  return Approximate(detail::exp2_approximate(x.value * detail::kLog2E));
}

namespace detail {

// R of normal_parts (math.h) over t = 1 / (1 + 0.305 a) with fewer terms: 2^-17.8 of it.
TS_HD float normal_tail_approximate(float t) {
  float q = -7.675649971e-02f;
  q = ::fmaf(q, t, 2.012014985e-01f);
  q = ::fmaf(q, t, -3.446612740e-03f);
  q = ::fmaf(q, t, 1.402621269e-01f);
  q = ::fmaf(q, t, 1.167413741e-01f);
  q = ::fmaf(q, t, 1.219996661e-01f);
  return q;
}

}  // namespace detail

struct NormalPartsApproximate {
  Approximate cdf, bell;
};
TS_HD NormalPartsApproximate normal_parts(Approximate x) {
  const float a = ::fabsf(x.value);
  const float bell = detail::exp2_approximate(x.value * x.value * (-0.5f * detail::kLog2E));
  const float t = detail::reciprocal_approximate(::fmaf(0.305f, a, 1.0f));
  const float tail = bell * (detail::normal_tail_approximate(t) * t);
  return {Approximate(x.value < 0.0f ? tail : 1.0f - tail), Approximate(bell)};
}

}  // namespace tessera::math
