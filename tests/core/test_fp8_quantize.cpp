// Quantisation to fp8 by tiles, and products of what comes of it.
#include <tessera/core/kernels/fp8/quantize.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include <tessera/autograd/ops.h>
#include <tessera/core/half.h>
#include <tessera/core/kernels/fp8/amax.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

#include "message_of.h"

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

TEST(Quantize, RefusesWhatItCannotDo) {
  EXPECT_THROW(quantize(raw::zeros({2, 2}, kF64), {}), DTypeError);
  EXPECT_THROW(quantize(raw::zeros({2, 2}, kF32), {.format = kBF16}), DTypeError);
  EXPECT_THROW(quantize(raw::zeros({2}, kF32), {}), ShapeError);
  EXPECT_THROW(quantize(raw::zeros({2, 2}, kF32), {.tile = ScaleTile::row()}, tensor({1.0}, kF32)),
               ShapeError);
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

double relative_distance(const Tensor& got, const std::vector<double>& expected) {
  const std::vector<double> values = got.to_vector();
  double error = 0, all = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    error += (values[i] - expected[i]) * (values[i] - expected[i]);
    all += expected[i] * expected[i];
  }
  return std::sqrt(error / all);
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
