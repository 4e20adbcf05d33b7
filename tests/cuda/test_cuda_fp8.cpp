// fp8 on a GPU: the bytes of the CPU, products by cuBLASLt or a model of it, scales that roll.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/fp8/logits_gradient.h>
#include <tessera/core/kernels/fp8/part_labels.h>
#include <tessera/core/kernels/fp8/quantize.h>
#include <tessera/core/kernels/fp8/scale_history.h>
#include <tessera/core/kernels/loss/cross_entropy.h>
#include <tessera/core/kernels/norm/norm_quantized.h>
#include <tessera/core/random.h>

#include "../message_of.h"
#include "fp8_fixture.h"

namespace tessera::test_cuda_fp8 {
namespace {

using namespace fp8_on_gpu;

// ---- Bytes --------------------------------------------------------------------------------------

// Numbers of all magnitudes; zeros of both signs, those that saturate, and on request what is none.
Tensor numbers(const Shape& shape, DType dtype, bool with_specials) {
  Tensor x = mul(randn(shape), exp(mul(randn(shape), 4.0))).detach();
  if (with_specials) {
    float* const values = x.data_as<float>();
    const float specials[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, -NAN, 1e-38f, 3e38f};
    for (size_t i = 0; i < std::size(specials); ++i) values[5 * i] = specials[i];
  }
  return x.to(dtype);
}

TEST_F(CudaFp8, BytesAndScalesAreThoseOfTheCpu) {
  // Whole patches in several blocks; patches that are cut.
  for (const Shape& shape : {Shape{16, 16}, Shape{272, 160}, Shape{48, 33}, Shape{70, 16}}) {
    for (const DType dtype : {kF32, kBF16, kF16}) {
      for (const DType format : {kF8E4M3, kF8E5M2}) {
        for (const bool specials : {false, true}) {
          for (const bool given : {false, true}) {
            const std::string what = std::string(name_of(dtype)) + " to " +
                                     std::string(name_of(format)) + (specials ? ", specials" : "") +
                                     (given ? ", scale given" : "");
            const Tensor x = numbers(shape, dtype, specials);
            const Tensor scale = given ? full({1}, 24, {.dtype = kF32}) : Tensor();
            const kernels::QuantizeOptions options{.format = format, .power_of_two = specials};
            const auto expected = kernels::quantize(x, options, scale);
            const kernels::QuantizeWants wants{
                .by_columns = true,
                .largest = zeros({1}, {.dtype = kF32, .device = kGpu}),
                .counts = zeros({2}, {.dtype = kI64, .device = kGpu})};
            const auto got =
                kernels::quantize(x.to(kGpu), options, given ? scale.to(kGpu) : Tensor(), wants);
            expect_same_bytes(got.values, expected.values, what);
            expect_same_bytes(got.transposed, expected.values.t(), what + ", by columns");
            expect_same_bytes(got.scale, expected.scale, what);
            expect_same_bytes(got.inverse, expected.inverse, what);
            const double amax = static_cast<double>(expected.amax);
            EXPECT_EQ(wants.largest.item(), std::isnan(amax) ? INFINITY : amax) << what;
            EXPECT_EQ(wants.counts.to(kCpu).to_vector(),
                      (std::vector<double>{static_cast<double>(expected.saturated),
                                           static_cast<double>(expected.underflown)}))
                << what;
          }
        }
      }
    }
  }
}

// A copy for a product that sums along its rows: by rows a scale a row, 1 x 128 or 128 x 128, by
// columns turned around.
struct Tiled {
  const char* name;
  kernels::ScaleTile rows, columns;
};
constexpr Tiled kTiled[] = {{"lines", {1, 0}, {0, 1}},
                            {"vectors", {1, 128}, {128, 1}},
                            {"squares", {128, 128}, {128, 128}}};
struct TiledCopies {
  kernels::Quantized rows, columns;
};
// `together`: both in one pass.
TiledCopies tiled_copies(const Tensor& x, const Tiled& tiles, DType format, bool together,
                         const kernels::QuantizeWants& wants) {
  const auto options = [&](const kernels::ScaleTile& tile) {
    return kernels::QuantizeOptions{.format = format, .tile = tile, .power_of_two = true};
  };
  kernels::QuantizeWants by_rows = wants, by_columns = wants;
  if (tiles.rows == tiles.columns && together) {
    by_rows.by_columns = true;
    const auto both = kernels::quantize(x, options(tiles.rows), {}, by_rows);
    return {both, both};
  }
  if (together) {
    auto pair = kernels::quantize_both(x, options(tiles.rows), options(tiles.columns), wants);
    return {pair.rows, pair.columns};
  }
  by_columns.by_rows = false;
  by_columns.by_columns = true;
  by_columns.counts = by_columns.largest = {};
  return {kernels::quantize(x, options(tiles.rows), {}, by_rows),
          kernels::quantize(x, options(tiles.columns), {}, by_columns)};
}

TEST_F(CudaFp8, BytesAndScalesOfTilesAreThoseOfTheCpu) {
  for (const Shape& shape : {Shape{16, 16}, Shape{272, 160}, Shape{150, 133}}) {
    for (const DType dtype : {kF32, kBF16, kF16}) {
      for (const DType format : {kF8E4M3, kF8E5M2}) {
        if (format == kF8E5M2 && dtype != kBF16) continue;
        for (const Tiled& tiles : kTiled) {
          for (const bool together : {false, true}) {
            const bool specials = format == kF8E4M3;
            const std::string what =
                std::string(name_of(dtype)) + " " + tiles.name + (together ? " together" : "");
            const Tensor x = numbers(shape, dtype, specials);
            const kernels::QuantizeWants wants{
                .largest = zeros({1}, {.dtype = kF32, .device = kGpu}),
                .counts = zeros({2}, {.dtype = kI64, .device = kGpu})};
            const TiledCopies expected = tiled_copies(x, tiles, format, false, {});
            const TiledCopies got = tiled_copies(x.to(kGpu), tiles, format, together, wants);
            expect_same_bytes(got.rows.values, expected.rows.values, what);
            expect_same_bytes(got.columns.transposed, expected.columns.values.t(), what);
            expect_same_bytes(got.rows.scale, expected.rows.scale, what);
            expect_same_bytes(got.rows.inverse, expected.rows.inverse, what);
            const bool turned = got.columns.inverse_by_columns.defined();
            EXPECT_EQ(turned, tiles.rows == tiles.columns) << what;
            expect_same_bytes(turned ? got.columns.inverse_by_columns : got.columns.inverse,
                              expected.columns.inverse, what + ", by columns");
            const double amax = static_cast<double>(expected.rows.amax);
            EXPECT_EQ(wants.largest.item(), std::isnan(amax) ? INFINITY : amax) << what;
            EXPECT_EQ(wants.counts.to(kCpu).to_vector(),
                      (std::vector<double>{static_cast<double>(expected.rows.saturated),
                                           static_cast<double>(expected.rows.underflown)}))
                << what;
          }
        }
      }
    }
  }
}

TEST_F(CudaFp8, TilesAreOfRoundedAndMultipliedNumbersWhichAreAddedUp) {
  const Tensor x = randn({272, 160}).detach();
  const Tensor factor = full({1}, 0.37, {.dtype = kF32});
  for (const Tiled& tiles : kTiled) {
    const TiledCopies expected =
        tiled_copies(x, tiles, kF8E4M3, false, {.through = kBF16, .factor = factor});
    const TiledCopies got =
        tiled_copies(x.to(kGpu), tiles, kF8E4M3, true,
                     {.sums = true, .through = kBF16, .factor = factor.to(kGpu)});
    expect_same_bytes(got.rows.values, expected.rows.values, tiles.name);
    expect_same_bytes(got.rows.scale, expected.rows.scale, tiles.name);
    expect_same_bytes(got.columns.transposed, expected.columns.values.t(), tiles.name);
    const Tensor rounded = mul(x, factor).to(kBF16);
    EXPECT_EQ(got.rows.sums.dtype(), kBF16);
    EXPECT_LE(relative_error(got.rows.sums, sum(rounded.to(kF64), {0})), 0x1p-8) << tiles.name;
    const Tensor cut = x.narrow(1, 0, 133).contiguous();
    const auto sums = tiled_copies(cut.to(kGpu), tiles, kF8E4M3, false, {.sums = true});
    for (const Tensor& each : {sums.rows.sums, sums.columns.sums}) {
      EXPECT_LE(relative_error(each, sum(cut.to(kF64), {0})), 300 * 0x1p-24) << tiles.name;
    }
  }
}

TEST_F(CudaFp8, CopiesThatAreNotWantedAreNotMade) {
  const Tensor x = randn({32, 48}).detach().to(kGpu);
  const auto columns = kernels::quantize(x, {}, {}, {.by_rows = false, .by_columns = true});
  EXPECT_FALSE(columns.values.defined());
  EXPECT_EQ(columns.transposed.shape(), (Shape{48, 32}));
  EXPECT_EQ(columns.rows(), 32);
  EXPECT_EQ(columns.columns(), 48);
  EXPECT_FALSE(kernels::quantize(x, {}).transposed.defined());
  const auto nothing = kernels::quantize(zeros({0, 16}, {.dtype = kF32, .device = kGpu}), {});
  EXPECT_EQ(nothing.scale.item(), 1);
  const auto empty_rows =
      kernels::quantize(zeros({0, 16}, {.dtype = kF32, .device = kGpu}), {.tile = {1, 0}});
  EXPECT_EQ(empty_rows.scale.numel(), 0);
}

TEST_F(CudaFp8, TilesThatNoProductOfAGpuTakesAreRefused) {
  const Tensor x = randn({32, 48}).detach().to(kGpu);
  const kernels::QuantizeWants both{.by_columns = true};
  const auto refuse = [&](const kernels::ScaleTile& tile, const kernels::QuantizeWants& wants) {
    EXPECT_NE(message_of<UnsupportedError>([&] {
                kernels::quantize(x, {.tile = tile}, {}, wants);
              }).find("128"),
              std::string::npos);
  };
  refuse({1, 0}, both);
  refuse({1, 128}, both);
  refuse({0, 1}, {});
  refuse({128, 1}, {});
  refuse({1, 64}, {});
  refuse({64, 64}, both);
  EXPECT_THROW(kernels::quantize_both(x, {.tile = {1, 0}}, {.tile = {128, 1}}), UnsupportedError);
}

TEST_F(CudaFp8, SumsAndRoundedF32ComeOfTheSamePass) {
  for (const Shape& shape : {Shape{272, 160}, Shape{70, 33}}) {
    const Tensor x = randn(shape).detach();
    const auto got =
        kernels::quantize(x.to(kGpu), {}, {}, {.by_columns = true, .sums = true, .through = kBF16});
    const auto expected = kernels::quantize(x.to(kBF16), {});
    expect_same_bytes(got.values, expected.values, "rounded first");
    expect_same_bytes(got.transposed, expected.values.t(), "rounded first");
    expect_same_bytes(got.scale, expected.scale, "rounded first");
    EXPECT_EQ(got.sums.dtype(), kBF16);
    EXPECT_LE(relative_error(got.sums, sum(x.to(kBF16).to(kF64), {0})), 0x1p-8);
    const auto plain = kernels::quantize(x.to(kGpu), {}, {}, {.sums = true});
    EXPECT_LE(relative_error(plain.sums, sum(x.to(kF64), {0})), 300 * 0x1p-24);
  }
}

TEST_F(CudaFp8, GeluAndItsGradientAreQuantisedAsIfTheyHadBeenStored) {
  for (const Shape& shape : {Shape{272, 160}, Shape{48, 33}}) {
    for (const DType dtype : {kBF16, kF16}) {
      for (const bool tanh_form : {false, true}) {
        for (const bool given : {false, true}) {
          const Tensor x = mul(randn(shape), 2.0).to(dtype).detach().to(kGpu);
          const Tensor dy = randn(shape).to(dtype).detach().to(kGpu);
          const Tensor scale = given ? full({1}, 24, {.dtype = kF32, .device = kGpu}) : Tensor();
          const Gelu form = tanh_form ? Gelu::kTanh : Gelu::kNone;
          const kernels::QuantizeWants wants{.by_columns = true, .sums = true};
          const auto compare = [&](const kernels::Quantized& got, const Tensor& stored,
                                   const kernels::QuantizeOptions& options, const char* what) {
            const auto expected = kernels::quantize(stored, options, scale, wants);
            expect_same_bytes(got.values, expected.values.to(kCpu), what);
            expect_same_bytes(got.transposed, expected.transposed.to(kCpu), what);
            expect_same_bytes(got.inverse, expected.inverse.to(kCpu), what);
            if (got.sums.defined()) expect_same_bytes(got.sums, expected.sums.to(kCpu), what);
          };
          const Tensor leaf = x.detach().set_requires_grad();
          const Tensor y = gelu(leaf, form);
          const Tensor dx = grad(TensorList{y}, TensorList{leaf}, TensorList{dy})[0];
          compare(kernels::quantize_gelu(x, tanh_form, {}, scale, {.by_columns = true}), y.detach(),
                  {}, "gelu");
          compare(kernels::quantize_gelu_grad(dy, x, tanh_form, {.format = kF8E5M2}, scale,
                                              {.by_columns = true}),
                  dx, {.format = kF8E5M2}, "its gradient");
        }
      }
    }
  }
}

TEST_F(CudaFp8, TheGradientOfLogitsIsQuantisedAsIfItHadBeenStored) {
  for (const Shape& shape : {Shape{272, 160}, Shape{48, 33}}) {
    for (const DType dtype : {kBF16, kF16}) {
      for (const bool given : {false, true}) {
        const int64_t N = shape[0], V = shape[1];
        const Tensor logits = mul(randn(shape), 3.0).to(dtype).detach().to(kGpu);
        std::vector<int64_t> classes(static_cast<size_t>(N));
        for (size_t i = 0; i < classes.size(); ++i) {
          classes[i] = i % 7 == 3 ? -100 : static_cast<int64_t>(5 * i) % V;
        }
        const Tensor targets = tensor(classes, {N}, kI64).to(kGpu);
        const Tensor up = full({1}, 0.7, {.dtype = kF32, .device = kGpu});
        const Tensor scale = given ? full({1}, 4096, {.dtype = kF32, .device = kGpu}) : Tensor();
        const kernels::QuantizeOptions options{.format = kF8E5M2};
        const auto rows = kernels::cross_entropy_forward(logits, targets, {});
        const Tensor stored = kernels::cross_entropy_backward(logits, targets, {}, rows.statistics,
                                                              up, rows.total_weight);
        const kernels::QuantizeWants wants{.by_columns = true,
                                           .largest = zeros({1}, {.dtype = kF32, .device = kGpu}),
                                           .counts = zeros({2}, {.dtype = kI64, .device = kGpu})};
        const auto got = kernels::quantize_logits_gradient({.logits = logits,
                                                            .targets = targets,
                                                            .statistics = rows.statistics,
                                                            .gradient = up,
                                                            .divisor = rows.total_weight},
                                                           options, scale, wants);
        const auto expected =
            kernels::quantize(stored.to(kCpu), options, given ? scale.to(kCpu) : Tensor());
        expect_same_bytes(got.values, expected.values, "by rows");
        expect_same_bytes(got.transposed, expected.values.t(), "by columns");
        expect_same_bytes(got.inverse, expected.inverse, "scale");
        EXPECT_EQ(wants.largest.item(), static_cast<double>(expected.amax));
        EXPECT_EQ(wants.counts.to(kCpu).to_vector(),
                  (std::vector<double>{static_cast<double>(expected.saturated),
                                       static_cast<double>(expected.underflown)}));
        const auto on_cpu =
            kernels::quantize_logits_gradient({.logits = logits.to(kCpu),
                                               .targets = targets.to(kCpu),
                                               .statistics = rows.statistics.to(kCpu),
                                               .gradient = up.to(kCpu),
                                               .divisor = rows.total_weight.to(kCpu)},
                                              options, given ? scale.to(kCpu) : Tensor());
        expect_same_bytes(on_cpu.values, expected.values, "on the CPU");
      }
    }
  }
}

// Of parts that other devices have quantised: what they saw adds up, and one scale is theirs.
TEST_F(CudaFp8, LabelsOfPartsSayWhatTheWholeWouldHave) {
  constexpr int64_t kBytes = 48, kFirst = 16;
  for (const bool differ : {false, true}) {
    const Tensor labels = zeros({4, kBytes}, {.dtype = kU8, .device = kGpu});
    for (int64_t part = 0; part < 3; ++part) {  // the last one is empty
      const double scale = differ && part == 2 ? 16 : 8;
      const Tensor row = labels.narrow(0, part, 1).view({kBytes});
      const Tensor counts = tensor(std::vector<int64_t>{part + 1, 10 * part + 5}, {2}, kI64);
      kernels::write_part_label(row.narrow(0, kFirst, kernels::kPartLabelBytes),
                                full({1}, scale, {.dtype = kF32, .device = kGpu}),
                                full({1}, part == 1 ? 7.5 : 0.5, {.dtype = kF32, .device = kGpu}),
                                counts.to(kGpu));
    }
    const kernels::WholeOfParts whole = kernels::read_part_labels(labels, kFirst);
    EXPECT_EQ(whole.largest.item(), 7.5);
    EXPECT_EQ(whole.counts.to(kCpu).to_vector(), (std::vector<double>{6, 45}));
    if (differ) {
      EXPECT_TRUE(std::isnan(whole.scale.item()));
      EXPECT_TRUE(std::isnan(whole.inverse.item()));
    } else {
      EXPECT_EQ(whole.scale.item(), 8);
      EXPECT_EQ(whole.inverse.item(), 0.125);
    }
  }
}

// By `center` layer_norm with a bias or rms_norm, by `dtype` alone or behind a residual; the last
// shapes are made one after the other.
TEST_F(CudaFp8, ANormWritesTheBytesOfItsResult) {
  for (const Shape& shape : {Shape{16, 16}, Shape{48, 160}, Shape{272, 768}, Shape{32, 1024},
                             Shape{48, 1040}, Shape{37, 160}, Shape{16, 33}}) {
    for (const DType dtype : {kF32, kBF16, kF16}) {
      for (const bool center : {false, true}) {
        for (const bool low : {false, true}) {  // weights, and what f32 is rounded to first
          SCOPED_TRACE(testing::Message() << name_of(dtype) << shape << center << low);
          const auto on_gpu = [](const Tensor& x) { return x.detach().to(kGpu); };
          const int64_t C = shape[1];
          const Tensor x = on_gpu(numbers(shape, dtype, false));
          const Tensor residual = low == center ? on_gpu(numbers(shape, dtype, false)) : Tensor();
          const Tensor w = on_gpu(randn({C}).to(low ? dtype : kF32));
          const Tensor b = center ? on_gpu(randn({C}).to(low ? dtype : kF32)) : Tensor();
          const Tensor scale = full({1}, 150, {.dtype = kF32, .device = kGpu});
          kernels::QuantizeWants wants{.by_columns = true,
                                       .largest = zeros({1}, {.dtype = kF32, .device = kGpu}),
                                       .counts = zeros({2}, {.dtype = kI64, .device = kGpu})};
          if (low && dtype == kF32) wants.through = kBF16;
          kernels::QuantizeWants wants_of_two = wants;
          wants_of_two.largest = zeros({1}, {.dtype = kF32, .device = kGpu});
          wants_of_two.counts = zeros({2}, {.dtype = kI64, .device = kGpu});
          const auto norm = kernels::row_norm_forward(x, residual, C, w, b, 1e-5, center);
          const auto expected = kernels::quantize(norm.y, {}, scale, wants_of_two);
          const auto got =
              kernels::row_norm_quantized(x, residual, C, w, b, 1e-5, center, {}, scale, wants);
          EXPECT_FALSE(got.norm.y.defined());
          expect_same_bytes(got.y.values, expected.values.to(kCpu), "by rows");
          expect_same_bytes(got.y.transposed, expected.transposed.to(kCpu), "by columns");
          expect_same_bytes(got.y.scale, expected.scale.to(kCpu), "scale");
          expect_same_bytes(got.y.inverse, expected.inverse.to(kCpu), "inverse");
          expect_same_bytes(got.norm.rstd, norm.rstd.to(kCpu), "rstd");
          if (center) expect_same_bytes(got.norm.mean, norm.mean.to(kCpu), "mean");
          if (residual.defined()) expect_same_bytes(got.norm.sum, norm.sum.to(kCpu), "sum");
          EXPECT_EQ(wants.largest.item(), wants_of_two.largest.item());
          const auto counts = wants.counts.to(kCpu).to_vector();
          EXPECT_EQ(counts, wants_of_two.counts.to(kCpu).to_vector());
          // Large numbers are infinite in f16, and their rows NaN.
          EXPECT_TRUE(dtype == kF16 || counts[0] > 0) << "saturated";
        }
      }
    }
  }
}

// ---- Products -----------------------------------------------------------------------------------

TEST_F(CudaFp8, ProductsReadTheCopyAlongTheSum) {
  const Tensor a = randn({32, 48}).detach(), b = randn({64, 48}).detach();
  const kernels::QuantizeOptions wide{.format = kF8E5M2};
  const auto expected =
      kernels::fp8_matmul({kernels::quantize(a, {})}, {kernels::quantize(b, wide), true}, kF32);
  const auto by_rows = [](const Tensor& x, const kernels::QuantizeOptions& options) {
    return kernels::quantize(x.to(kGpu), options);
  };
  const auto by_columns = [](const Tensor& x, const kernels::QuantizeOptions& options) {
    return kernels::quantize(x.t().contiguous().to(kGpu), options, {},
                             {.by_rows = false, .by_columns = true});
  };
  const double tolerance = rounding_of_products(48);
  EXPECT_LE(relative_error(kernels::fp8_matmul({by_rows(a, {})}, {by_rows(b, wide), true}, kF32),
                           expected),
            tolerance);
  EXPECT_LE(relative_error(kernels::fp8_matmul({by_columns(a, {}), true}, {by_columns(b, wide)},
                                               kF32, {.fast_accumulation = true}),
                           expected),
            tolerance);
  if (gpu::on_emulation()) {
    ASSERT_EQ(asked.size(), 2U);
    EXPECT_FALSE(asked[0].fast_accumulation);
    EXPECT_TRUE(asked[1].fast_accumulation);
  }
  const Tensor bias = randn({64}).detach().to(kBF16);
  const Tensor with_bias = kernels::fp8_matmul({by_rows(a, {})}, {by_rows(b, wide), true}, kBF16,
                                               {.bias = bias.to(kGpu)});
  EXPECT_LE(relative_error(with_bias.to(kF32), expected + bias.to(kF32)), 0x1p-8);
}

TEST_F(CudaFp8, ProductsScaleRowsAndTiles) {
  const double tolerance = rounding_of_products(272);
  // Tiles that are cut, along K and beside it.
  const Tensor a = mul(randn({144, 272}), exp(randn({144, 272}))).detach();
  const Tensor b = mul(randn({160, 272}), exp(randn({160, 272}))).detach();
  const auto copies = [](const Tensor& x, const Tiled& tiles, const Device& device, bool turned) {
    return tiled_copies((turned ? x.t().contiguous() : x).to(device), tiles, kF8E4M3,
                        device.is_cuda(), {});
  };
  const auto mode = [](const Tiled& tiles) { return static_cast<int>(&tiles - kTiled) + 1; };
  for (const Tiled& of_a : kTiled) {
    for (const Tiled& of_b : kTiled) {
      const bool lines = &of_a == kTiled, squares = &of_a == kTiled + 2 && &of_b == kTiled + 2;
      if (lines != (&of_b == kTiled)) continue;
      const auto product = [&](const Device& device, bool turned) {
        const TiledCopies left = copies(a, of_a, device, turned);
        const TiledCopies right = copies(b, of_b, device, turned);
        return turned ? kernels::fp8_matmul({left.columns, true}, {right.columns}, kF32)
                      : kernels::fp8_matmul({left.rows}, {right.rows, true}, kF32,
                                            {.fast_accumulation = true});
      };
      if (squares) {
        EXPECT_THROW(product(kGpu, false), UnsupportedError);
        continue;
      }
      const Tensor expected = product(kCpu, false);
      for (const bool turned : {false, true}) {
        asked.clear();
        const Tensor got = product(kGpu, turned).to(kCpu);
        EXPECT_LE(relative_error(got, expected), tolerance) << of_a.name << " " << of_b.name;
        if (!gpu::on_emulation()) continue;
        ASSERT_EQ(asked.size(), 1U);
        EXPECT_EQ(static_cast<int>(asked[0].a_scaling), mode(of_a));
        EXPECT_EQ(static_cast<int>(asked[0].b_scaling), mode(of_b));
        EXPECT_EQ(asked[0].fast_accumulation, lines && !turned);
      }
    }
  }
  // One scale for all of b stands for one a column.
  const auto rows = [&](const Device& device) { return copies(a, kTiled[0], device, false).rows; };
  const auto whole = [&](const Device& device) { return kernels::quantize(b.to(device), {}); };
  asked.clear();
  const Tensor got = kernels::fp8_matmul({rows(kGpu)}, {whole(kGpu), true}, kF32);
  const Tensor other = kernels::fp8_matmul({whole(kGpu)}, {rows(kGpu), true}, kF32);
  EXPECT_LE(relative_error(got, kernels::fp8_matmul({rows(kCpu)}, {whole(kCpu), true}, kF32)),
            tolerance);
  EXPECT_LE(relative_error(other, kernels::fp8_matmul({whole(kCpu)}, {rows(kCpu), true}, kF32)),
            tolerance);
  EXPECT_EQ(asked.size(), gpu::on_emulation() ? 2U : 0U);
  for (const GemmProblem& problem : asked) {
    EXPECT_EQ(problem.a_scaling, gpu::GemmScale::kOuter);
    EXPECT_EQ(problem.b_scaling, gpu::GemmScale::kOuter);
  }
}

TEST_F(CudaFp8, ABiasThatNoAlgorithmTakesIsAddedByAPass) {
  TS_NEEDS_EMULATION("can lack algorithms");
  const Tensor a = randn({144, 272}).detach().to(kGpu), b = randn({160, 272}).detach().to(kGpu);
  const Tensor bias = randn({160}).detach().to(kBF16).to(kGpu);
  for (const Tiled& of_b : {kTiled[1], kTiled[2]}) {
    const TiledCopies left = tiled_copies(a, kTiled[1], kF8E4M3, true, {});
    const TiledCopies right = tiled_copies(b, of_b, kF8E4M3, true, {});
    const auto multiply = [&](const Tensor& added) {
      return kernels::fp8_matmul({left.rows}, {right.rows, true}, kBF16, {.bias = added});
    };
    const Tensor apart = add(multiply({}), bias), together = multiply(bias);
    gpu::emulation::set_gemm_lack(
        [](const GemmProblem& p) { return p.epilogue == gpu::GemmEpilogue::kBias; });
    const Tensor got = multiply(bias);
    gpu::emulation::set_gemm_lack(nullptr);
    EXPECT_EQ(got.to_vector(), apart.to_vector());
    EXPECT_LE(relative_error(got.to(kF32), together.to(kF32)), 0x1p-7);
  }
}

TEST_F(CudaFp8, AProductThatCannotBeIsAnErrorThatSaysWhy) {
  const auto q = [](const Shape& shape, DType format = kF8E4M3) {
    return kernels::quantize(randn(shape).detach().to(kGpu), {.format = format});
  };
  const auto message = [](const auto& a, const auto& b) {
    return message_of<UnsupportedError>([&] { kernels::fp8_matmul({a}, {b, true}, kBF16); });
  };
  EXPECT_NE(message(q({32, 40}), q({64, 40})).find("multiples of 16"), std::string::npos);
  EXPECT_NE(message(q({32, 48}, kF8E5M2), q({64, 48}, kF8E5M2)).find("f8e5m2 with f8e5m2"),
            std::string::npos);
  EXPECT_THROW(kernels::fp8_matmul({q({32, 48})}, {q({48, 64})}, kBF16), ValueError);
  TS_NEEDS_EMULATION("can take its library away");
  gpu::emulation::set_gemm_model(nullptr);
  EXPECT_NE(message(q({32, 48}), q({64, 48})).find("no library"), std::string::npos);
}

// ---- Delayed scales -----------------------------------------------------------------------------

TEST_F(CudaFp8, ScalesRollAsOnTheCpu) {
  for (const bool newest : {false, true}) {
    for (const int64_t operands : {3, 150}) {
      kernels::ScaleHistory cpu{.rows = zeros({5, operands}, {.dtype = kF32}),
                                .position = zeros({2}, {.dtype = kI64}),
                                .maxima = zeros({operands}, {.dtype = kF32}),
                                .scales = ones({operands}, {.dtype = kF32})};
      kernels::ScaleHistory gpu{cpu.rows.to(kGpu), cpu.position.to(kGpu), cpu.maxima.to(kGpu),
                                cpu.scales.to(kGpu)};
      const kernels::ScaleRules rules{.of_newest = newest, .power_of_two = newest, .margin = 1};
      for (int step = 0; step < 13; ++step) {  // around the ring more than once
        Tensor maxima = exp(mul(randn({operands}), 3.0)).detach();
        if (step == 4) maxima = zeros({operands}, {.dtype = kF32});  // nothing was noted
        if (step == 7) {
          maxima.data_as<float>()[0] = INFINITY;
          maxima.data_as<float>()[1] = NAN;
          maxima.data_as<float>()[2] = 0;
        }
        copy_(cpu.maxima, maxima);
        copy_(gpu.maxima, maxima.to(kGpu));
        kernels::roll_scales(cpu, rules);
        kernels::roll_scales(gpu, rules);
        expect_same_bytes(gpu.rows, cpu.rows, "rows");
        expect_same_bytes(gpu.position, cpu.position, "position");
        expect_same_bytes(gpu.maxima, cpu.maxima, "maxima");
        expect_same_bytes(gpu.scales, cpu.scales, "scales");
      }
    }
  }
}

}  // namespace
}  // namespace tessera::test_cuda_fp8
