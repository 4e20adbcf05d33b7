// core/math.h against libm in double: the errors that its header states, and the special values.
#include <tessera/core/math.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

#include "thinned.h"

namespace tessera::test_math {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Distance in units of the last place that the exact result has as a float. Results that round to
// zero or beyond the largest float may be off by one such step there.
double error_in_ulp(float value, double exact) {
  int exponent;
  std::frexp(exact, &exponent);
  const double ulp = std::ldexp(1.0, std::max(exponent - 24, -149));
  const double largest = std::numeric_limits<float>::max();
  const double seen = std::isinf(value) ? std::copysign(std::ldexp(1.0, 128), value) : value;
  const double wanted = std::clamp(exact, -std::ldexp(1.0, 128), std::ldexp(1.0, 128));
  return std::abs(seen - wanted) / (std::abs(exact) > largest ? std::ldexp(1.0, 104) : ulp);
}

template <class Function, class Reference>
void expect_accurate(const char* name, Function function, Reference reference, double limit) {
  double worst = 0;
  float where = 0;
  // Primes: 4.2 million bit patterns of both signs, or 65 thousand.
  const uint32_t step = tests::sanitized() ? 65521 : 1021;
  for (uint64_t bits = 0; bits < (1ull << 32); bits += step) {
    const float x = float_of(static_cast<uint32_t>(bits));
    if (!std::isfinite(x)) continue;
    const double exact = reference(static_cast<double>(x));
    const float value = function(x);
    if (std::isnan(exact) || std::isinf(exact)) {
      ASSERT_TRUE(std::isnan(exact) ? std::isnan(value) : value == static_cast<float>(exact))
          << name << "(" << x << ") = " << value << ", exact " << exact;
      continue;
    }
    const double error = error_in_ulp(value, exact);
    if (!(error <= worst)) worst = error, where = x;
  }
  EXPECT_LE(worst, limit) << name << " at " << where;
  EXPECT_GT(worst, 0.3) << name << ": a sweep that finds no rounding error compares nothing";
}

#define EXPECT_ACCURATE(name, limit)                                                       \
  expect_accurate(                                                                         \
      #name, [](float x) { return math::name(x); }, [](double x) { return std::name(x); }, \
      (limit))

TEST(Math, ExpIsAccurate) { EXPECT_ACCURATE(exp, 1.2); }
TEST(Math, Expm1IsAccurate) { EXPECT_ACCURATE(expm1, 1.8); }
TEST(Math, LogIsAccurate) { EXPECT_ACCURATE(log, 0.9); }
TEST(Math, Log1pIsAccurate) { EXPECT_ACCURATE(log1p, 1.5); }
TEST(Math, TanhIsAccurate) { EXPECT_ACCURATE(tanh, 2.5); }
TEST(Math, ErfIsAccurate) { EXPECT_ACCURATE(erf, 1.1); }
TEST(Math, SinIsAccurateForHugeArgumentsToo) { EXPECT_ACCURATE(sin, 1.5); }
TEST(Math, CosIsAccurateForHugeArgumentsToo) { EXPECT_ACCURATE(cos, 1.5); }

TEST(Math, NormalCdfIsAccurateBelowZeroToo) {
  double worst = 0, worst_bell = 0;
  for (float x = -6; x < 6; x += 0.0003f) {
    const auto parts = math::normal_parts(x);
    const double exact = x;
    worst = std::max(worst, error_in_ulp(parts.cdf, 0.5 * std::erfc(-exact / std::sqrt(2.0))));
    worst_bell = std::max(worst_bell, error_in_ulp(parts.bell, std::exp(-exact * exact / 2)));
  }
  EXPECT_LE(worst, 5.4);
  EXPECT_LE(worst_bell, 2.0);
  EXPECT_EQ(math::normal_parts(-kInf).cdf, 0.0f);
  EXPECT_EQ(math::normal_parts(kInf).cdf, 1.0f);
  EXPECT_EQ(math::normal_parts(-1e30f).cdf, 0.0f);
  EXPECT_TRUE(std::isnan(math::normal_parts(kNan).cdf));
}

void expect_same(float value, float wanted, const char* what) {
  if (std::isnan(wanted)) {
    EXPECT_TRUE(std::isnan(value)) << what;
  } else {
    EXPECT_EQ(value, wanted) << what;
    EXPECT_EQ(std::signbit(value), std::signbit(wanted)) << what;
  }
}

TEST(Math, SpecialValuesAreThoseOfTheStandard) {
  for (float x :
       {0.0f, -0.0f, kInf, -kInf, kNan, -1.0f, 1.0f, float_of(1), float_of(0x80000001u)}) {
    SCOPED_TRACE(x);
    expect_same(math::exp(x) == 0 ? 0.0f : math::exp(x), std::exp(x), "exp");
    expect_same(math::log(x), std::log(x), "log");
    expect_same(math::log1p(x), x == 1 ? math::log1p(1.0f) : std::log1p(x), "log1p");
    if (std::abs(x) != 1) {
      expect_same(math::expm1(x), std::expm1(x), "expm1");
      expect_same(math::tanh(x), std::tanh(x), "tanh");
      if (std::abs(x) > 1e-30f || x == 0 || std::isnan(x))
        expect_same(math::erf(x), std::erf(x), "erf");
      expect_same(math::sin(x), std::sin(x), "sin");
      expect_same(math::cos(x), std::cos(x), "cos");
    }
  }
}

TEST(Math, ExpEndsInInfinityZeroAndSubnormals) {
  EXPECT_EQ(math::exp(88.72284f), kInf);
  EXPECT_LT(math::exp(88.72283f), kInf);
  EXPECT_EQ(math::exp(-104.0f), 0.0f);
  EXPECT_EQ(math::exp(-103.0f), std::exp(-103.0f));
  EXPECT_EQ(math::exp(3.4e38f), kInf);
  EXPECT_EQ(math::exp(-3.4e38f), 0.0f);
}

TEST(Math, TanhAndErfReachOneAndAreOdd) {
  for (float x : {4.1f, 9.1f, 50.0f, 3.4e38f, kInf}) {
    EXPECT_EQ(math::erf(x), 1.0f) << x;
    EXPECT_EQ(math::erf(-x), -1.0f) << x;
  }
  for (float x : {9.1f, 50.0f, 3.4e38f, kInf}) {
    EXPECT_EQ(math::tanh(x), 1.0f) << x;
    EXPECT_EQ(math::tanh(-x), -1.0f) << x;
  }
}

TEST(Math, DoubleFormsAreLibm) {
  EXPECT_EQ(math::exp(0.3), std::exp(0.3));
  EXPECT_EQ(math::erf(0.3), std::erf(0.3));
  EXPECT_EQ(math::log1p(0.3), std::log1p(0.3));
}

}  // namespace
}  // namespace tessera::test_math
