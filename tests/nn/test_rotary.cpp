// nn::RotaryEmbedding: its angles against the formulas of transformers, and what turning means.
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/nn/transformer/rotary.h>

#include "message_of.h"

namespace tessera::nn::test_rotary {
namespace {

Tensor waves(const Shape& shape, DType dtype = kF64) {
  std::vector<double> values;
  for (int64_t i = 0; i < numel_of(shape); ++i) values.push_back(std::sin(1.3 * double(i) + 0.2));
  return tensor(std::span<const double>(values), shape, dtype);
}

// The frequency of a pair, as transformers writes it (modeling_rope_utils.py).
double frequency(int64_t pair, int64_t features, const RotaryOptions& o, int64_t length) {
  const double C = static_cast<double>(features), i = static_cast<double>(2 * pair);
  double theta = o.theta;
  if (o.scaling == RotaryScaling::kDynamic) {
    const double seen = static_cast<double>(std::max(length, o.context));
    theta *=
        std::pow(o.factor * seen / static_cast<double>(o.context) - (o.factor - 1), C / (C - 2));
  }
  const double plain = 1 / std::pow(theta, i / C);
  if (o.scaling == RotaryScaling::kLinear) return plain / o.factor;
  if (o.scaling != RotaryScaling::kLlama3) return plain;
  const double wavelength = 2 * std::numbers::pi / plain;
  const auto context = static_cast<double>(o.context);
  if (wavelength > context / o.low_freq_factor) return plain / o.factor;
  if (wavelength < context / o.high_freq_factor) return plain;
  const double smooth =
      (context / wavelength - o.low_freq_factor) / (o.high_freq_factor - o.low_freq_factor);
  return (1 - smooth) * plain / o.factor + smooth * plain;
}

TEST(Rotary, AnglesOfEveryScalingAreThoseOfItsFormula) {
  const RotaryOptions kinds[] = {
      {},
      {.theta = 500000},
      {.scaling = RotaryScaling::kLinear, .factor = 2.5},
      {.scaling = RotaryScaling::kDynamic, .factor = 2, .context = 20},
      {.theta = 5e5, .scaling = RotaryScaling::kLlama3, .factor = 8, .context = 8192},
      {.theta = 100,
       .scaling = RotaryScaling::kLlama3,
       .factor = 4,
       .context = 40,
       .low_freq_factor = 1,
       .high_freq_factor = 3}};
  for (const RotaryOptions& options : kinds) {
    const RotaryEmbedding rotary(16, options);
    for (const auto& [begin, count] : {std::pair(0, 9), std::pair(19, 1), std::pair(5, 40)}) {
      const auto [cos, sin] = rotary.angles(begin, count);
      ASSERT_EQ(cos.shape(), (Shape{count, 8}));
      ASSERT_EQ(cos.dtype(), kF32);
      const auto c = cos.to_vector<float>(), s = sin.to_vector<float>();
      for (int64_t p = 0; p < count; ++p) {
        for (int64_t i = 0; i < 8; ++i) {
          const double angle =
              static_cast<double>(begin + p) * frequency(i, 16, options, begin + count);
          const auto at = static_cast<size_t>(p * 8 + i);
          ASSERT_NEAR(c[at], std::cos(angle), 1e-7) << rotary.extra_repr() << " " << p << " " << i;
          ASSERT_NEAR(s[at], std::sin(angle), 1e-7) << rotary.extra_repr() << " " << p << " " << i;
        }
      }
    }
  }
}

TEST(Rotary, ATokenBehindOthersTurnsAsInItsSequence) {
  for (const bool interleaved : {false, true}) {
    RotaryEmbedding rotary(6, {.theta = 50, .interleaved = interleaved});
    const Tensor x = waves({2, 3, 5, 6});
    const Tensor whole = rotary(x);
    for (int64_t p = 0; p < 5; ++p) {
      const Tensor alone = rotary(x.narrow(2, p, 1).contiguous(), p);
      EXPECT_EQ(alone.to_vector(), whole.narrow(2, p, 1).to_vector()) << p;
    }
  }
}

TEST(Rotary, ScoresDependOnDistancesAlone) {
  RotaryEmbedding rotary(8, {.theta = 100});
  const Tensor q = waves({1, 8}), k = waves({2, 8}).narrow(0, 1, 1).contiguous();
  const double near = (rotary(q, 7) * rotary(k, 3)).sum().item();
  EXPECT_NEAR((rotary(q, 104) * rotary(k, 100)).sum().item(), near, 1e-5);
  EXPECT_GT(std::abs((rotary(q, 7) * rotary(k, 4)).sum().item() - near), 1e-3);
}

TEST(Rotary, DtypesStayAndGradientsTurnBack) {
  RotaryEmbedding rotary(4);
  for (const DType dtype : {kF64, kF32, kF16, kBF16}) {
    EXPECT_EQ(rotary(waves({3, 4}, dtype)).dtype(), dtype);
  }
  const Tensor x = waves({3, 4}).set_requires_grad();
  rotary(x).backward(waves({3, 4}));
  // A turn keeps lengths: what comes back is as long as what came in.
  EXPECT_NEAR(square(x.grad()).sum().item(), square(waves({3, 4})).sum().item(), 1e-6);
  const RotaryAngles shapes = rotary.angles(0, 7, kMeta);
  EXPECT_TRUE(shapes.cos.is_meta());
  EXPECT_TRUE(rotary.named_parameters().empty());
}

TEST(Rotary, WhatFitsNoScalingIsRefused) {
  const auto refused = [](int64_t features, const RotaryOptions& options, const char* why) {
    EXPECT_NE(message_of<ConfigError>([&] { RotaryEmbedding(features, options); }).find(why),
              std::string::npos)
        << why;
  };
  refused(5, {}, "come in pairs");
  refused(0, {}, "come in pairs");
  refused(4, {.theta = 1}, "theta");
  refused(4, {.scaling = RotaryScaling::kLinear, .factor = 0}, "factor");
  refused(4, {.scaling = RotaryScaling::kDynamic, .factor = 2}, "context");
  refused(2, {.scaling = RotaryScaling::kDynamic, .factor = 2, .context = 4}, "more than one pair");
  refused(4, {.scaling = RotaryScaling::kLlama3, .factor = 2, .context = 4, .low_freq_factor = 4},
          "high_freq_factor");
  RotaryEmbedding rotary(4);
  EXPECT_THROW(rotary(zeros({3, 6})), ShapeError);
  EXPECT_THROW(rotary(zeros({3, 4}), -1), ValueError);
}

}  // namespace
}  // namespace tessera::nn::test_rotary
