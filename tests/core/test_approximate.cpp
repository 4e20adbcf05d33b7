// The formulas that a GPU calculates with its own exponentials and divisions, of all numbers of 16
// bits beside f64: errors far below what rounding to 16 bits makes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <tessera/core/approximate.h>
#include <tessera/core/functors.h>
#include <tessera/core/half.h>

namespace tessera::test_approximate {
namespace {

using math::Approximate;

// All finite ones of bf16 and f16.
std::vector<float> numbers() {
  std::vector<float> all;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    for (const float x : {to_float(bf16::from_bits(static_cast<uint16_t>(bits))),
                          to_float(f16::from_bits(static_cast<uint16_t>(bits)))}) {
      if (std::isfinite(x)) all.push_back(x);
    }
  }
  return all;
}

// f(x, rounding error allowed of 1): the largest share of it that an error takes.
template <class F, class Scale>
double worst(const F& f, const Scale& scale) {
  // Arguments of exp are below 128 where it is neither 0 nor infinite: 128 2^-24, and a few more.
  constexpr double kError = 0x1p-16;
  double worst = 0;
  for (const float x : numbers()) {
    const double expected = f(static_cast<double>(x)), got = f(Approximate(x)).value;
    if (!std::isfinite(expected) || std::abs(expected) > std::numeric_limits<float>::max())
      continue;
    // An exponential below the normal numbers of f32 is 0; polynomials of x multiply it.
    const double size = std::max(1.0, std::abs(static_cast<double>(x)));
    const double allowed =
        kError * std::abs(scale(static_cast<double>(x))) + 0x1p-126 * size * size * size;
    worst = std::max(worst, std::abs(got - expected) / allowed);
  }
  return worst;
}

TEST(Approximate, FormulasAreWithinTheirBoundsOfF64) {
  const auto gelu_tanh = [](auto x) { return fn::GeluTanh{}(x); };
  const auto gelu = [](auto x) { return fn::Gelu{}(x); };
  const auto silu = [](auto x) { return fn::Silu{}(x); };
  EXPECT_LE(worst(gelu_tanh, gelu_tanh), 1);
  EXPECT_LE(worst(silu, silu), 1);
  // The polynomial of cdf is made for x > -6.
  EXPECT_LE(worst(gelu, [&](double x) { return (x < -6 ? 4 : 1) * gelu(x); }), 1);
}

// Gradients are sums that pass through 0: errors are those of their terms.
TEST(Approximate, GradientsAreWithinTheBoundsOfTheirTerms) {
  const auto gradient = [](const auto& functor) {
    return [&functor](auto x) { return functor(decltype(x)(1), x); };
  };
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  EXPECT_LE(worst(gradient(fn::SiluGrad{}),
                  [&](double x) { return sigmoid(x) * (1 + std::abs(x) * sigmoid(-x)); }),
            1);
  EXPECT_LE(worst(gradient(fn::GeluGrad{}),
                  [](double x) {
                    return 0.5 * std::erfc(-x / std::sqrt(2.0)) +
                           std::abs(x) * 0.4 * std::exp(-x * x / 2);
                  }),
            1);
  const double k = std::sqrt(2 / std::acos(-1.0));
  EXPECT_LE(worst(gradient(fn::GeluTanhGrad{}),
                  [&](double x) {
                    const double u = 2 * k * (x + 0.044715 * x * x * x), s = sigmoid(u);
                    return s + std::abs(x) * s * sigmoid(-u) * 2 * k * (1 + 0.134145 * x * x);
                  }),
            1);
}

TEST(Approximate, ExponentialsOfInfinitiesAndNaN) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(math::exp(Approximate(-infinity)).value, 0);
  EXPECT_EQ(math::exp(Approximate(-200.0f)).value, 0);
  EXPECT_EQ(math::exp(Approximate(infinity)).value, infinity);
  EXPECT_EQ(math::exp(Approximate(0)).value, 1);
  EXPECT_EQ(math::exp(Approximate(-0.0f)).value, 1);
  EXPECT_TRUE(std::isnan(math::exp(Approximate(std::nanf(""))).value));
  EXPECT_EQ((Approximate(1) / Approximate(infinity)).value, 0);
  EXPECT_TRUE(std::isnan(fn::Gelu{}(Approximate(std::nanf(""))).value));
  EXPECT_EQ(fn::Gelu{}(Approximate(50)).value, 50);
  EXPECT_EQ(fn::GeluTanh{}(Approximate(50)).value, 50);
}

// What stands in for a GPU errs as much as one may.
TEST(Approximate, TheHostErrsByTheGpusBounds) {
  double up = 0, down = 0;
  for (float x = -20; x < 20; x += 0.01f) {
    const double error = math::detail::exp2_approximate(x) / std::exp2(static_cast<double>(x)) - 1;
    up = std::max(up, error), down = std::min(down, error);
  }
  EXPECT_NEAR(up, 0x1p-22, 0x1p-23);
  EXPECT_NEAR(down, -0x1p-22, 0x1p-23);
}

}  // namespace
}  // namespace tessera::test_approximate
