// Quantisation to fp8 by tiles, and products of what comes of it.
#include <tessera/core/kernels/fp8/quantize.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include <tessera/autograd/ops.h>
#include <tessera/core/half.h>
#include <tessera/core/kernels/fp8/amax.h>
#include <tessera/core/kernels/fp8/cast_transpose.h>
#include <tessera/core/kernels/fp8/logits_gradient.h>
#include <tessera/core/kernels/fp8/quantize_pieces.h>
#include <tessera/core/kernels/fp8/scale_history.h>
#include <tessera/core/kernels/loss/cross_entropy.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

#include "message_of.h"
#include "refusals.h"

namespace tessera::test_fp8_quantize {
namespace {

using kernels::quantize;
using kernels::Quantized;
using kernels::QuantizeOptions;
using kernels::ScaleTile;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Tensor random(const Shape& shape, DType dtype = kF32, double scale = 1) {
  return mul(randn(shape), Scalar(scale)).to(dtype).detach();
}

uint8_t code_of(float value, DType format) {
  return format == kF8E4M3 ? from_float_saturate<f8e4m3>(value).bits
                           : from_float_saturate<f8e5m2>(value).bits;
}
std::vector<uint8_t> codes_of(const Tensor& values) {
  const auto* const bytes = static_cast<const uint8_t*>(values.data());
  return {bytes, bytes + values.numel()};
}
double number_of(uint8_t code, DType format) {
  return static_cast<double>(format == kF8E4M3 ? to_float(f8e4m3::from_bits(code))
                                               : to_float(f8e5m2::from_bits(code)));
}

// ---- Casts -------------------------------------------------------------------------------------

// The scalar conversion is held against all 2^32 floats by test_half; the kernel's lanes here
// against the scalar one: on floats of every exponent, both signs and all ends, NaN among them.
TEST(Quantize, RoundsEveryLaneAsTheScalarConversion) {
  constexpr int64_t kCount = int64_t{1} << 20;
  const Tensor x = raw::empty({64, kCount / 64}, kF32);
  float* const values = x.data_as<float>();
  for (int64_t i = 0; i < kCount; ++i) {
    // 4096 patterns apart: no more than the 20 high bits of a float change; the low ones vary too.
    const uint32_t bits =
        static_cast<uint32_t>(i) * 4096u + static_cast<uint32_t>(i * 2654435761u >> 7) % 4096u;
    std::memcpy(values + i, &bits, sizeof bits);
  }
  for (const DType format : {kF8E4M3, kF8E5M2}) {
    for (const float scale : {1.0f, 3.7f, 0x1p-20f}) {
      const Quantized q =
          quantize(x, {.format = format}, tensor({static_cast<double>(scale)}, kF32));
      const std::vector<uint8_t> codes = codes_of(q.values);
      const float largest = format == kF8E4M3 ? 448 : 57344;
      int64_t wrong = 0, saturated = 0, underflown = 0;
      for (int64_t i = 0; i < kCount; ++i) {
        const float scaled = std::isinf(values[i]) ? kNaN : values[i] * scale;
        const uint8_t code = code_of(scaled, format);
        wrong += codes[static_cast<size_t>(i)] != code;
        // Further away than half of the last step, which is 32 or 8192.
        const float half = format == kF8E4M3 ? 16 : 4096;
        const float beyond = std::abs(scaled) - largest;
        saturated += format == kF8E4M3 ? beyond > half : beyond >= half;
        underflown += (code & 0x7f) == 0 && values[i] != 0;
      }
      EXPECT_EQ(wrong, 0) << format << " times " << scale;
      EXPECT_EQ(q.saturated, saturated) << format << " times " << scale;
      EXPECT_EQ(q.underflown, underflown) << format << " times " << scale;
      EXPECT_TRUE(std::isnan(q.amax));
      EXPECT_EQ(q.scale.item<float>(), scale);
      EXPECT_EQ(q.inverse.item<float>(), 1 / scale);
    }
  }
}

TEST(Quantize, SixteenBitNumbersAreTheirFloats) {
  for (const DType dtype : {kBF16, kF16}) {
    const Tensor x = random({48, 80}, dtype, 3);
    for (const DType format : {kF8E4M3, kF8E5M2}) {
      const Quantized narrow = quantize(x, {.format = format});
      const Quantized wide = quantize(x.to(kF32), {.format = format});
      EXPECT_EQ(codes_of(narrow.values), codes_of(wide.values));
      EXPECT_EQ(narrow.scale.item<float>(), wide.scale.item<float>());
      EXPECT_EQ(narrow.amax, wide.amax);
    }
  }
}

// Gaussian numbers keep 31.5 dB in E4M3 and 25.6 dB in E5M2, where the scale fits.
TEST(Quantize, KeepsTheSignalOfGaussianNumbers) {
  manual_seed(3);
  const Tensor x = random({256, 512});
  for (const auto& [format, decibels] : {std::pair(kF8E4M3, 31.0), std::pair(kF8E5M2, 25.0)}) {
    const Tensor back = kernels::dequantize(quantize(x, {.format = format}), kF32);
    const double signal = sum(mul(x, x)).item(), noise = sum(mul(back - x, back - x)).item();
    EXPECT_GT(10 * std::log10(signal / noise), decibels) << format;
    EXPECT_LT(10 * std::log10(signal / noise), decibels + 2) << format;
  }
}

// ---- Scales ------------------------------------------------------------------------------------

TEST(Fp8Scale, IsTheLargestNumberOverAmaxRoundedOnce) {
  for (const float amax : {1.0f, 3.0f, 0.7f, 1e-20f, 448.0f, 3e38f, 0x1.fffffep-3f}) {
    EXPECT_EQ(kernels::fp8_scale(amax, kF8E4M3, false),
              static_cast<float>(448.0 / static_cast<double>(amax)));
    EXPECT_EQ(kernels::fp8_scale(amax, kF8E5M2, false),
              static_cast<float>(57344.0 / static_cast<double>(amax)));
    EXPECT_EQ(kernels::fp8_scale(amax, kF8E4M3, false, 3),
              static_cast<float>(448.0 / static_cast<double>(amax) / 8));
    const float two = kernels::fp8_scale(amax, kF8E4M3, true);
    int exponent = 0;
    EXPECT_EQ(std::frexp(two, &exponent), 0.5f) << amax;
    EXPECT_LE(two, kernels::fp8_scale(amax, kF8E4M3, false));
    EXPECT_GT(2 * two, kernels::fp8_scale(amax, kF8E4M3, false));
  }
}

TEST(Fp8Scale, IsOneWhereAmaxTellsNothing) {
  for (const float amax : {0.0f, kInfinity, kNaN}) {
    EXPECT_EQ(kernels::fp8_scale(amax, kF8E4M3, false), 1);
    EXPECT_EQ(kernels::fp8_scale(amax, kF8E5M2, true), 1);
  }
}

TEST(Fp8Scale, EndsAtTheLargestFloat) {
  EXPECT_EQ(kernels::fp8_scale(1e-40f, kF8E4M3, false), std::numeric_limits<float>::max());
  EXPECT_EQ(kernels::fp8_scale(1e-40f, kF8E4M3, true), 0x1p127f);
}

TEST(Quantize, MakesInfinitiesNaNAndKeepsNaN) {
  const Tensor x = tensor({1, -2, 1e300, -1e300}, kF32).view({1, 4});  // infinite in f32
  const Quantized q = quantize(x, {.format = kF8E5M2});
  EXPECT_EQ(codes_of(q.values), (std::vector<uint8_t>{0x3c, 0xc0, 0x7f, 0x7f}));
  EXPECT_EQ(q.amax, kInfinity);
  EXPECT_EQ(q.scale.item<float>(), 1);
  EXPECT_EQ(q.saturated, 0);
  const Quantized n = quantize(tensor({1.0, static_cast<double>(kNaN)}, kF32).view({1, 2}), {});
  EXPECT_EQ(codes_of(n.values)[1] & 0x7f, 0x7f);
  EXPECT_TRUE(std::isnan(n.amax));
  EXPECT_EQ(n.scale.item<float>(), 1);
  // A finite number that its scale takes beyond f32 is finite all the same.
  const Quantized far =
      quantize(tensor({1e10, kInfinity}, kF32).view({1, 2}), {}, tensor({3e38}, kF32));
  EXPECT_EQ(codes_of(far.values), (std::vector<uint8_t>{0x7e, 0x7f}));
}

// What is not finite in an operand is not finite in its row or column of the product.
TEST(Quantize, WhatIsNotFiniteReachesTheProduct) {
  const Tensor good = random({16, 32});
  for (const float bad : {kInfinity, -kInfinity, kNaN}) {
    for (const DType format : {kF8E4M3, kF8E5M2}) {
      for (const ScaleTile tile :
           {ScaleTile::tensor(), ScaleTile::row(), ScaleTile{1, 16}, ScaleTile{16, 16}}) {
        for (const Tensor& scale : {Tensor(), tensor({24.0}, kF32)}) {
          if (scale.defined() && tile != ScaleTile::tensor()) continue;
          const Tensor x = good.clone();
          x.data_as<float>()[5 * 32 + 7] = bad;
          const QuantizeOptions options{.format = format, .tile = tile, .power_of_two = true};
          const Quantized a = quantize(x, options, scale), b = quantize(good, options, scale);
          const Tensor product = kernels::fp8_matmul({a, false}, {b, true}, kF32);
          for (int64_t column = 0; column < 16; ++column) {
            EXPECT_FALSE(std::isfinite(product.select(0, 5).select(0, column).item<float>()));
            EXPECT_EQ(std::isfinite(product.select(0, 4).select(0, column).item<float>()), true);
          }
        }
      }
    }
  }
}

// ---- Tiles -------------------------------------------------------------------------------------

const ScaleTile kTiles[] = {ScaleTile::tensor(),
                            ScaleTile::row(),
                            ScaleTile::column(),
                            {1, 16},
                            {16, 1},
                            {16, 16},
                            {48, 0},
                            {0, 32}};

int64_t tile_of(int64_t i, int64_t side) { return side > 0 ? i / side : 0; }

void expect_tiles(const Tensor& x, const QuantizeOptions& options) {
  const Quantized q = quantize(x, options);
  const int64_t M = x.size(0), N = x.size(1);
  const auto values = x.to(kF32).contiguous();
  const float* const from = values.data_as<float>();
  const int64_t down = tile_of(M - 1, options.tile.rows) + 1;
  const int64_t across = tile_of(N - 1, options.tile.columns) + 1;
  ASSERT_EQ(q.scale.shape(), (Shape{down, across}));
  std::vector<float> amax(static_cast<size_t>(down * across), 0);
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t n = 0; n < N; ++n) {
      float& most = amax[static_cast<size_t>(tile_of(m, options.tile.rows) * across +
                                             tile_of(n, options.tile.columns))];
      most = std::max(most, std::abs(from[m * N + n]));
    }
  }
  const std::vector<uint8_t> codes = codes_of(q.values);
  int64_t wrong = 0;
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t n = 0; n < N; ++n) {
      const int64_t tile =
          tile_of(m, options.tile.rows) * across + tile_of(n, options.tile.columns);
      const float scale =
          kernels::fp8_scale(amax[static_cast<size_t>(tile)], options.format, options.power_of_two);
      EXPECT_EQ(q.scale.data_as<float>()[tile], scale);
      EXPECT_EQ(q.inverse.data_as<float>()[tile], 1 / scale);
      wrong +=
          codes[static_cast<size_t>(m * N + n)] != code_of(from[m * N + n] * scale, options.format);
    }
  }
  EXPECT_EQ(wrong, 0) << options.tile.rows << " x " << options.tile.columns;
  EXPECT_EQ(q.amax, *std::max_element(amax.begin(), amax.end()));
}

TEST(Quantize, GivesEachTileItsScale) {
  manual_seed(5);
  // Magnitudes differ from row to row and from column to column; the last tiles are smaller.
  const Tensor spread = exp(random({53, 1}, kF32, 2)) * exp(random({1, 70}, kF32, 2));
  const Tensor x = (random({53, 70}) * spread).detach();
  for (const ScaleTile& tile : kTiles) {
    for (const bool two : {false, true}) {
      expect_tiles(x, {.format = kF8E4M3, .tile = tile, .power_of_two = two});
      expect_tiles(x.t(), {.format = kF8E5M2, .tile = tile, .power_of_two = two});
      expect_tiles(x.to(kBF16), {.format = kF8E4M3, .tile = tile, .power_of_two = two});
    }
  }
}

TEST(Quantize, TakesAScaleThatIsGivenAndNotesAmax) {
  const Tensor x = tensor({1, -3, 2, 0.5}, kF32).view({2, 2});
  const Quantized q = quantize(x, {.format = kF8E4M3}, tensor({2.0}, kF32));
  EXPECT_EQ(q.values.to_vector(), (std::vector<double>{2, -6, 4, 1}));
  EXPECT_EQ(q.inverse.item<float>(), 0.5f);
  EXPECT_EQ(q.amax, 3);
}

// What parts have by themselves adds up to what the whole has, and parts that are quantised with
// its scale to its bytes: matrices that ranks hold in parts are quantised there.
TEST(Quantize, PartsWithTheScaleOfTheWholeAreItsParts) {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    const Tensor x = random({37, 48}, dtype, 3);
    const QuantizeOptions options{.format = kF8E4M3};
    const Quantized whole = quantize(x, options);
    EXPECT_EQ(kernels::largest_magnitude_of(x), whole.amax);
    EXPECT_EQ(kernels::largest_magnitude_of(raw::transpose(x, 0, 1)), whole.amax);
    float amax = 0;
    for (const auto& [first, rows] : {std::pair(0, 13), std::pair(13, 13), std::pair(26, 11)}) {
      amax = std::max(amax, kernels::largest_magnitude_of(raw::narrow(x, 0, first, rows)));
    }
    EXPECT_EQ(amax, whole.amax);
    const Tensor scale = raw::full({1}, kernels::fp8_scale(amax, kF8E4M3, false), kF32);
    std::vector<uint8_t> codes;
    int64_t underflown = 0;
    for (const auto& [first, rows] : {std::pair(0, 13), std::pair(13, 13), std::pair(26, 11)}) {
      const Quantized part = quantize(raw::narrow(x, 0, first, rows), options, scale);
      const std::vector<uint8_t> own = codes_of(part.values);
      codes.insert(codes.end(), own.begin(), own.end());
      underflown += part.underflown;
    }
    EXPECT_EQ(codes, codes_of(whole.values));
    EXPECT_EQ(underflown, whole.underflown);
  }
  EXPECT_EQ(kernels::largest_magnitude_of(zeros({0, 5})), 0);
  EXPECT_EQ(kernels::largest_magnitude_of(zeros({3, 5}, {.device = kMeta})), 0);
  EXPECT_EQ(kernels::largest_magnitude_of(tensor({1.0f, -kInfinity})), kInfinity);
  EXPECT_TRUE(std::isnan(kernels::largest_magnitude_of(tensor({kNaN, kInfinity}))));
  EXPECT_THROW(kernels::largest_magnitude_of(zeros({2}, {.dtype = kF64})), DTypeError);
}

TEST(Quantize, NothingHasNoTilesAndMetaNoNumbers) {
  const Quantized empty = quantize(raw::empty({0, 16}, kF32), {.tile = ScaleTile::row()});
  EXPECT_EQ(empty.values.shape(), (Shape{0, 16}));
  EXPECT_EQ(empty.amax, 0);
  const Quantized meta = quantize(raw::empty({32, 16}, kBF16, kMeta), {.tile = {1, 8}});
  EXPECT_TRUE(meta.values.is_meta());
  EXPECT_EQ(meta.scale.shape(), (Shape{32, 2}));
}

double relative_distance(const Tensor& got, const std::vector<double>& expected) {
  const std::vector<double> values = got.to_vector();
  double error = 0, all = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    error += (values[i] - expected[i]) * (values[i] - expected[i]);
    all += expected[i] * expected[i];
  }
  return std::sqrt(error / all);
}

TEST(Quantize, RefusesWhatItCannotDo) {
  const Tensor x = raw::zeros({2, 2}, kF32), half = raw::zeros({2, 2}, kBF16);
  const Tensor vector = raw::zeros({4}, kF32), wide = raw::zeros({2, 2}, kF64);
  const Tensor one = tensor({1.0}, kF32), two = tensor({1.0, 1.0}, kF32);
  const auto of_logits = [](const Tensor& logits) {
    kernels::LogitsGradient of;
    of.logits = logits;
    kernels::quantize_logits_gradient(of, {});
  };
  const Quantized rows = quantize(raw::zeros({4, 4}, kF32), {.tile = {2, 0}});
  expect_refusals({
      {"expects f32, f16 or bf16", [&] { quantize(wide, {}); }},
      {"asked for bf16", [&] { quantize(x, {.format = kBF16}); }},
      {"expects a matrix", [&] { quantize(vector, {}); }},
      {"one f32 as the scale", [&] { quantize(x, {.tile = ScaleTile::row()}, one); }},
      {"one f32 as the scale", [&] { quantize(x, {}, two); }},
      {"one f32 as the scale", [&] { quantize(x, {}, tensor({1.0}, kF64)); }},
      {"asked for f16", [&] { kernels::quantize_both(x, {.format = kF16}, {}); }},
      {"asked for f16", [&] { kernels::quantize_both(x, {}, {.format = kF16}); }},
      {"expects f16 or bf16", [&] { kernels::quantize_gelu(x, false, {}); }},
      {"expects a matrix", [&] { kernels::quantize_gelu(vector.to(kBF16), false, {}); }},
      {"expects f16 or bf16", [&] { kernels::quantize_gelu_grad(x, x, false, {}); }},
      {"expects a gradient like",
       [&] {
         kernels::quantize_gelu_grad(raw::zeros({2, 1}, kBF16), half, false, {});
       }},
      {"expects a gradient like", [&] { kernels::quantize_gelu_grad(x, half, false, {}); }},
      {"logits of f16 or bf16", [&] { of_logits(x); }},
      {"a matrix of logits", [&] { of_logits(raw::zeros({4}, kBF16)); }},
      {"f32[2, 1] as the scales",
       [&] {
         kernels::quantize_by(x, {.tile = {1, 0}}, one);
       }},
      {"f32[1, 1] as the scales",
       [&] {
         kernels::quantize_by(x, {}, raw::zeros({1, 1}, kF64));
       }},
      {"largest magnitudes of", [&] { kernels::merge_largest(one, two); }},
      {"where tiles of 2 rows do", [&] { kernels::rows_of(rows, 1, 2); }},
      {"asked for f64", [&] { kernels::dequantize(rows, kF64); }},
      {"before the first add()", [&] { kernels::Fp8Sums().result(kF32); }},
      {"asked for f64", [&] { kernels::Fp8Sums().result(kF64); }},
      {"expects f32, f16 or bf16", [&] { kernels::cast_transpose(wide, kF8E4M3, {}, true, true); }},
      {"asked for f32", [&] { kernels::cast_transpose(x, kF32, {}, true, true); }},
      {"expects a matrix", [&] { kernels::cast_transpose(vector, kF8E4M3, {}, true, true); }},
      {"one f32 as the scale", [&] { kernels::cast_transpose(x, kF8E4M3, two, true, true); }},
      {"one f32 as the scale",
       [&] { kernels::cast_transpose(x, kF8E4M3, tensor({1.0}, kF64), true, true); }},
  });
}

TEST(Quantize, MakesWhatIsWantedBesides) {
  manual_seed(15);
  const Tensor x = random({40, 24}, kF32, 3), factor = tensor({0.3}, kF32);
  const auto expect_equal = [](const Quantized& got, const Quantized& expected) {
    EXPECT_EQ(codes_of(got.values), codes_of(expected.values));
    EXPECT_EQ(got.scale.to_vector(), expected.scale.to_vector());
    EXPECT_EQ(got.sums.defined() ? got.sums.to_vector() : std::vector<double>(),
              expected.sums.defined() ? expected.sums.to_vector() : std::vector<double>());
  };
  const QuantizeOptions options{.format = kF8E5M2, .tile = ScaleTile::row()};
  const Quantized summed = quantize(x, options, {}, {.sums = true});
  EXPECT_EQ(summed.sums.to_vector(), sum(x, {0}).to_vector());
  EXPECT_EQ(codes_of(summed.values), codes_of(quantize(x, options).values));
  const Tensor times = mul(x, Scalar(0.3f)).detach();
  const Tensor through = times.to(kBF16);
  expect_equal(quantize(x, options, {}, {.factor = factor}), quantize(times, options));
  expect_equal(quantize(x, options, {}, {.through = kBF16}), quantize(x.to(kBF16), options));
  expect_equal(quantize(x, options, {}, {.sums = true, .through = kBF16, .factor = factor}),
               quantize(through, options, {}, {.sums = true}));
  const kernels::QuantizedPair both = kernels::quantize_both(
      x, options, {.format = kF8E4M3, .tile = ScaleTile::column()}, {.sums = true});
  expect_equal(both.rows, summed);
  expect_equal(both.columns, quantize(x, {.format = kF8E4M3, .tile = ScaleTile::column()}));
  for (const bool tanh_form : {false, true}) {
    const Tensor half = x.to(kBF16), dy = random({40, 24}, kBF16);
    const Gelu form = tanh_form ? Gelu::kTanh : Gelu::kNone;
    Tensor leaf = half.clone();
    leaf.requires_grad_();
    const Tensor y = gelu(leaf, form);
    y.backward(dy);
    expect_equal(kernels::quantize_gelu(half, tanh_form, options), quantize(y.detach(), options));
    expect_equal(kernels::quantize_gelu_grad(dy, half, tanh_form, options),
                 quantize(leaf.grad(), options));
  }
}

TEST(Quantize, TheGradientOfLogitsIsThatOfTheirLoss) {
  manual_seed(16);
  Tensor logits = random({6, 40}, kBF16, 2);
  const Tensor targets = tensor({3, -100, 39, 0, 7, -100}, kI64);
  const kernels::CrossEntropyRows rows = kernels::cross_entropy_forward(logits, targets, {});
  const Quantized q = kernels::quantize_logits_gradient({.logits = logits,
                                                         .targets = targets,
                                                         .statistics = rows.statistics,
                                                         .gradient = tensor({2.0}, kF32),
                                                         .divisor = rows.total_weight},
                                                        {.format = kF8E5M2});
  logits.requires_grad_();
  mul(cross_entropy(logits, targets), Scalar(2)).backward();
  const Quantized expected = quantize(logits.grad(), {.format = kF8E5M2});
  EXPECT_EQ(codes_of(q.values), codes_of(expected.values));
  EXPECT_EQ(q.scale.item<float>(), expected.scale.item<float>());
}

// What is known of a matrix after its pieces have been seen is what is known of the whole, for
// every tile that ends where pieces do; and so are products whose sum runs over the pieces.
TEST(Quantize, PiecesAreTheWhole) {
  manual_seed(17);
  const int64_t N = 40;
  const Tensor x = (random({96, N}) * exp(random({96, 1}, kF32, 2))).detach();
  const Tensor other = random({96, 24});
  for (const ScaleTile& tile : std::vector<ScaleTile>{
           ScaleTile::tensor(), ScaleTile::column(), {16, 1}, {16, 16}, {16, 0}, {0, 16}}) {
    SCOPED_TRACE(std::to_string(tile.rows) + " x " + std::to_string(tile.columns));
    const QuantizeOptions options{.tile = tile, .power_of_two = true};
    const Quantized whole = quantize(x, options), right = quantize(other, {});
    const std::vector<std::pair<int64_t, int64_t>> pieces = {{0, 32}, {32, 48}, {80, 16}};
    kernels::Fp8Sums sums;
    std::vector<uint8_t> codes;
    float amax = 0;
    Tensor largest = raw::zeros({1, whole.scale.size(1)}, kF32);
    for (const auto& [first, count] : pieces) {
      const Tensor piece = raw::narrow(x, 0, first, count);
      const Tensor own = kernels::largest_of_tiles(piece, tile);
      for (const double value : own.to_vector()) amax = std::max(amax, static_cast<float>(value));
      if (tile.rows == 0) kernels::merge_largest(largest, own);
    }
    EXPECT_EQ(amax, whole.amax);
    if (tile.rows == 0) {
      EXPECT_EQ(kernels::scales_of(largest, options).to_vector(), whole.scale.to_vector());
    }
    for (const auto& [first, count] : pieces) {
      const Tensor piece = raw::narrow(x, 0, first, count);
      const Tensor scales = kernels::scales_of(
          tile.rows == 0 ? largest : kernels::largest_of_tiles(piece, tile), options);
      const Quantized part = kernels::quantize_by(piece, options, scales);
      const Quantized view = kernels::rows_of(whole, first, count);
      EXPECT_EQ(codes_of(part.values), codes_of(view.values));
      EXPECT_EQ(part.scale.to_vector(), view.scale.to_vector());
      EXPECT_EQ(part.inverse.to_vector(), view.inverse.to_vector());
      sums.add({part, true}, {kernels::rows_of(right, first, count)});
    }
    const Tensor once = kernels::fp8_matmul({whole, true}, {right}, kF32);
    EXPECT_LT(relative_distance(sums.result(kF32), once.to_vector()), 1e-6);
  }
}

TEST(Quantize, LargestMagnitudesKeepNaN) {
  const Tensor to = tensor({1, 5, 0, 2}, kF32);
  kernels::merge_largest(to, tensor({2, 4, kNaN, 2}, kF32));
  kernels::merge_largest(to, tensor({0, 0, kInfinity, 2}, kF32));
  EXPECT_EQ(to.to_vector()[0], 2);
  EXPECT_EQ(to.to_vector()[1], 5);
  EXPECT_TRUE(std::isnan(to.to_vector()[2]));
  EXPECT_EQ(to.to_vector()[3], 2);
}

TEST(CastTranspose, IsQuantizeInBothOrders) {
  manual_seed(18);
  for (const Shape& shape : {Shape{130, 5}, Shape{64, 3}, Shape{1, 70}}) {
    for (const DType from : {kF32, kBF16, kF16}) {
      const Tensor x = random(shape, from, 3), scale = tensor({2.5}, kF32);
      const float amax = kernels::largest_magnitude_of(x);
      for (const DType to : {kF8E4M3, kF8E5M2}) {
        const auto both = kernels::cast_transpose(x, to, scale, true, true);
        const Quantized q = quantize(x, {.format = to}, scale);
        EXPECT_EQ(codes_of(both.values), codes_of(q.values));
        EXPECT_EQ(codes_of(both.transposed), codes_of(raw::transpose(q.values, 0, 1).contiguous()));
        EXPECT_EQ(both.amax.item<float>(), amax);
      }
      for (const DType to : {kBF16, kF16}) {
        const auto plain = kernels::cast_transpose(x.t(), to, {}, true, false);
        EXPECT_EQ(plain.values.to_vector(), x.t().to(to).to_vector());
        EXPECT_FALSE(plain.transposed.defined());
        EXPECT_EQ(plain.amax.item<float>(), amax);
        const auto turned = kernels::cast_transpose(x, to, {}, false, true);
        EXPECT_FALSE(turned.values.defined());
        EXPECT_EQ(turned.transposed.to_vector(), x.t().to(to).to_vector());
      }
    }
  }
  EXPECT_EQ(kernels::cast_transpose(raw::zeros({0, 4}, kF32), kBF16, {}, true, true).amax.item(),
            0);
  const auto meta = kernels::cast_transpose(raw::zeros({2, 4}, kF32, kMeta), kBF16, {}, true, true);
  EXPECT_TRUE(meta.transposed.is_meta());
  EXPECT_EQ(meta.transposed.shape(), (Shape{4, 2}));
}

// ---- Delayed scales ----------------------------------------------------------------------------

// Four steps through a ring of three rows, for operands of two products: the third and the sixth
// are gradients.
TEST(RollScales, FollowTheLargestOfTheLastRows) {
  for (const bool of_newest : {false, true}) {
    for (const int margin : {0, 2}) {
      const kernels::ScaleRules rules{
          .of_newest = of_newest, .power_of_two = margin == 2, .margin = margin};
      const kernels::ScaleHistory history{.rows = raw::zeros({3, 6}, kF32),
                                          .position = raw::zeros({2}, kI64),
                                          .maxima = raw::zeros({6}, kF32),
                                          .scales = raw::full({6}, 9, kF32)};
      kernels::roll_scales(history, rules);  // nothing was noted
      EXPECT_EQ(history.position.to_vector(), (std::vector<double>{0, 0}));
      EXPECT_EQ(history.scales.to_vector(), (std::vector<double>(6, 9)));
      std::vector<std::vector<float>> steps;
      for (int step = 0; step < 5; ++step) {
        std::vector<float> now = {10.0f / static_cast<float>(step + 1), 1.0f,
                                  static_cast<float>(step + 1),         0.0f,
                                  step == 3 ? kInfinity : 3.0f,         step == 1 ? kNaN : 0.0f};
        std::copy(now.begin(), now.end(), history.maxima.data_as<float>());
        for (float& each : now) each = std::isfinite(each) ? each : 0;
        steps.push_back(now);
        kernels::roll_scales(history, rules);
        EXPECT_EQ(history.position.to_vector(),
                  (std::vector<double>{std::min(step + 1.0, 3.0), static_cast<double>(step % 3)}));
        EXPECT_EQ(history.maxima.to_vector(), (std::vector<double>(6, 0)));
        for (size_t i = 0; i < 6; ++i) {
          float amax = 0;
          for (int back = 0; back < (of_newest ? 1 : 3) && back <= step; ++back) {
            amax = std::max(amax, steps[static_cast<size_t>(step - back)][i]);
          }
          const float kept = i == 4 && step == 3 && of_newest
                                 ? kernels::fp8_scale(3, kF8E4M3, margin == 2, margin)
                                 : 9;
          const float expected = amax > 0 ? kernels::fp8_scale(amax, i % 3 == 2 ? kF8E5M2 : kF8E4M3,
                                                               margin == 2, margin)
                                          : kept;
          EXPECT_EQ(history.scales.data_as<float>()[i], expected) << step << " " << i;
        }
      }
    }
  }
}

TEST(RollScales, RefuseAHistoryThatDoesNotFit) {
  const auto roll = [](int64_t steps, int64_t maxima, int64_t scales, int64_t position) {
    kernels::roll_scales({.rows = raw::zeros({steps, 3}, kF32),
                          .position = raw::zeros({position}, kI64),
                          .maxima = raw::zeros({maxima}, kF32),
                          .scales = raw::zeros({scales}, kF32)},
                         {});
  };
  roll(1, 3, 3, 2);
  const char* const says = "maxima and scales of the 3 operands";
  expect_refusals({{says, [&] { roll(0, 3, 3, 2); }},
                   {says, [&] { roll(1, 2, 3, 2); }},
                   {says, [&] { roll(1, 3, 2, 2); }},
                   {says, [&] { roll(1, 3, 3, 1); }}});
}

// ---- Products ----------------------------------------------------------------------------------

// The sum of exact products in f64, with the scales where they stand.
std::vector<double> product_of(const Quantized& a, bool ta, const Quantized& b, bool tb) {
  const auto numbers = [](const Quantized& q) {
    const int64_t M = q.values.size(0), N = q.values.size(1), across = q.inverse.size(1);
    const std::vector<uint8_t> codes = codes_of(q.values);
    std::vector<double> values(codes.size());
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t n = 0; n < N; ++n) {
        const int64_t tile = tile_of(m, q.tile.rows) * across + tile_of(n, q.tile.columns);
        values[static_cast<size_t>(m * N + n)] =
            number_of(codes[static_cast<size_t>(m * N + n)], q.values.dtype()) *
            static_cast<double>(q.inverse.data_as<float>()[tile]);
      }
    }
    return values;
  };
  const std::vector<double> left = numbers(a), right = numbers(b);
  const int64_t M = a.values.size(ta ? 1 : 0), K = a.values.size(ta ? 0 : 1);
  const int64_t N = b.values.size(tb ? 0 : 1);
  std::vector<double> result(static_cast<size_t>(M * N), 0);
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t k = 0; k < K; ++k) {
      const double value = left[static_cast<size_t>(ta ? k * M + m : m * K + k)];
      for (int64_t n = 0; n < N; ++n) {
        result[static_cast<size_t>(m * N + n)] +=
            value * right[static_cast<size_t>(tb ? n * K + k : k * N + n)];
      }
    }
  }
  return result;
}

TEST(Fp8Matmul, IsTheProductOfWhatTheBytesSay) {
  manual_seed(7);
  constexpr int64_t M = 40, K = 72, N = 56;
  for (const auto& [a_format, b_format] :
       {std::pair(kF8E4M3, kF8E4M3), std::pair(kF8E5M2, kF8E4M3)}) {
    for (const bool ta : {false, true}) {
      for (const bool tb : {false, true}) {
        const Tensor a = random(ta ? Shape{K, M} : Shape{M, K}),
                     b = random(tb ? Shape{N, K} : Shape{K, N});
        for (const ScaleTile& a_tile : kTiles) {
          const Quantized qa = quantize(a, {a_format, a_tile, true});
          const Quantized qb =
              quantize(b, {b_format, tb ? ScaleTile::row() : ScaleTile{16, 16}, true});
          const std::vector<double> expected = product_of(qa, ta, qb, tb);
          const Tensor y = kernels::fp8_matmul({qa, ta}, {qb, tb}, kF32);
          EXPECT_LT(relative_distance(y, expected), 1e-6)
              << ta << tb << " " << a_tile.rows << " x " << a_tile.columns;
          const Tensor low = kernels::fp8_matmul({qa, ta}, {qb, tb}, kBF16);
          EXPECT_EQ(low.to_vector(), y.to(kBF16).to_vector());  // rounded once
        }
      }
    }
  }
}

TEST(Fp8Matmul, TakesAnyScalesAcrossTheSumAndPowersOfTwoAlongIt) {
  manual_seed(9);
  const Tensor a = random({32, 48}), b = random({64, 48});
  const Quantized qa = quantize(a, {kF8E4M3, ScaleTile::row()});
  const Quantized qb = quantize(b, {kF8E4M3, ScaleTile::tensor()});
  EXPECT_LT(relative_distance(kernels::fp8_matmul({qa}, {qb, true}, kF32),
                              product_of(qa, false, qb, true)),
            1e-6);
  const Quantized along = quantize(a, {kF8E4M3, ScaleTile{1, 16}});
  const std::string message = message_of<ValueError>([&] {
    kernels::fp8_matmul({along}, {qb, true}, kF32);
  });
  EXPECT_NE(message.find("powers of two"), std::string::npos) << message;
}

TEST(Fp8Matmul, RefusesOperandsThatDoNotFit) {
  const Quantized a = quantize(random({16, 32}), {}), b = quantize(random({48, 16}), {});
  EXPECT_THROW(kernels::fp8_matmul({a}, {b}, kF32), ShapeError);
  EXPECT_THROW(kernels::fp8_matmul({a, true}, {b}, kF32), ShapeError);
  EXPECT_THROW(kernels::fp8_matmul({a}, {b, true}, kF32), ShapeError);
  EXPECT_EQ(kernels::fp8_matmul({a, true}, {b, true}, kF32).shape(), Shape({32, 48}));
  EXPECT_THROW(kernels::fp8_matmul({a, true}, {b, true}, kF64), DTypeError);
  const auto with_bias = [&](const Tensor& bias) {
    kernels::fp8_matmul({a, true}, {b, true}, kBF16, {.bias = bias});
  };
  with_bias(raw::zeros({48}, kBF16));
  expect_refusals({{"a bias of bf16[48]", [&] { with_bias(raw::zeros({32}, kBF16)); }},
                   {"a bias of bf16[48]", [&] { with_bias(raw::zeros({48}, kF32)); }}});
}

TEST(Fp8Matmul, AddsABiasToTheRoundedResult) {
  manual_seed(19);
  const Quantized a = quantize(random({16, 32}), {}), b = quantize(random({32, 48}), {});
  const Tensor bias = random({48}, kBF16);
  const Tensor product = kernels::fp8_matmul({a}, {b}, kBF16);
  EXPECT_EQ(kernels::fp8_matmul({a}, {b}, kBF16, {.bias = bias}).to_vector(),
            add(product, bias).to_vector());
}

TEST(Fp8Matmul, BitsDoNotDependOnThreads) {
  manual_seed(11);
  const Quantized a = quantize(random({96, 128}), {kF8E4M3, ScaleTile::row()});
  const Quantized b = quantize(random({128, 80}), {kF8E5M2, ScaleTile::column()});
  const int threads = num_threads();
  set_num_threads(1);
  const std::vector<double> one = kernels::fp8_matmul({a}, {b}, kBF16).to_vector();
  set_num_threads(3);
  EXPECT_EQ(kernels::fp8_matmul({a}, {b}, kBF16).to_vector(), one);
  set_num_threads(threads);
}

}  // namespace
}  // namespace tessera::test_fp8_quantize
