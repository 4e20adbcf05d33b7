// Recipes of fp8: their bounds, their casts, what they and reports say, and operands that do not
// fit.
#include <gtest/gtest.h>

#include <string>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/precision/fp8_linear.h>
#include <tessera/precision/policy.h>

#include "message_of.h"
#include "refusals.h"

namespace tessera::precision::test_fp8_recipe {
namespace {

TEST(Fp8Recipe, ContradictionsAreErrors) {
  EXPECT_THROW(Fp8Recipe::named("tensorwize"), ConfigError);
  EXPECT_TRUE(mentions(message_of<UnsupportedError>([] { Fp8Recipe::named("MSAMP"); }), "MS-AMP"));
  EXPECT_EQ(Fp8Recipe::named("current"), Fp8Recipe{});
  EXPECT_THROW(check(Fp8Recipe{.scaling = Fp8Scaling::kRowwise, .format = Fp8Format::kHybrid}),
               ConfigError);
  EXPECT_THROW(check(Fp8Recipe{.scaling = Fp8Scaling::kBlockwise, .power_of_two = false}),
               ConfigError);
  EXPECT_THROW(check(Fp8Recipe{.margin = 1}), ConfigError);
  EXPECT_THROW(check(Fp8Recipe{.scaling = Fp8Scaling::kDelayed, .history = 0}), ConfigError);
  EXPECT_THROW(check(Policy{.parameter = kBF16, .compute = kBF16, .fp8_recipe = Fp8Recipe{}}),
               ConfigError);
  EXPECT_EQ(describe(Policy::fp8(Fp8Recipe::named("delayed"))),
            "parameters f32, compute bf16 (autocast) with Linears in fp8 delayed (hybrid, history "
            "1024, max, margin 0), filter default, gradients f32, output as computed");
}

TEST(Fp8Recipe, OptionsReachToTheirBoundsAndNoFurther) {
  using Scaling = Fp8Scaling;
  for (const Fp8Recipe& fits :
       {Fp8Recipe{.block = 16}, Fp8Recipe{.block = 144}, Fp8Recipe{.history = 1},
        Fp8Recipe{.scaling = Scaling::kDelayed, .margin = 64},
        Fp8Recipe{.scaling = Scaling::kRowwise, .format = Fp8Format::kE4M3, .power_of_two = false},
        Fp8Recipe{.format = Fp8Format::kE4M3}, Fp8Recipe{.format = Fp8Format::kHybrid}}) {
    EXPECT_NO_THROW(check(fits)) << describe(fits);
  }
  const char* const e4m3 = "is E4M3 everywhere";
  const auto hybrid = [](Scaling scaling) {
    check(Fp8Recipe{.scaling = scaling, .format = Fp8Format::kHybrid});
  };
  expect_refusals({
      {e4m3, [&] { hybrid(Scaling::kRowwise); }},
      {e4m3, [&] { hybrid(Scaling::kRowwiseWithGwHp); }},
      {e4m3, [&] { hybrid(Scaling::kBlockwise); }},
      {"multiple of 16; got 0", [] { check(Fp8Recipe{.block = 0}); }},
      {"multiple of 16; got -16", [] { check(Fp8Recipe{.block = -16}); }},
      {"multiple of 16; got 24", [] { check(Fp8Recipe{.block = 24}); }},
      {"history must be at least 1; got 0", [] { check(Fp8Recipe{.history = 0}); }},
      {"got -1", [] { check(Fp8Recipe{.scaling = Scaling::kDelayed, .margin = -1}); }},
      {"got 65", [] { check(Fp8Recipe{.scaling = Scaling::kDelayed, .margin = 65}); }},
      {"margin belongs to delayed scales; got 1 with tensorwise",
       [] { check(Fp8Recipe{.margin = 1}); }},
      {"there is no filter 'none'", [] { fp8_filter_named("none"); }},
      {"there is no recipe 'column'", [] { Fp8Recipe::named("column"); }},
      {"MS-AMP", [] { Fp8Recipe::named("msamp"); }},
  });
}

// Each operand's format and tile, as the table at the head of fp8_recipe.h has them.
TEST(Fp8Recipe, CastsAreThoseOfItsTable) {
  using kernels::QuantizeOptions;
  using kernels::ScaleTile;
  struct Row {
    const char* name;
    ScaleTile input, weight, weight_of_grad, grad, input_of_weight, grad_of_weight;
    DType of_grad = kF8E4M3;
    bool two = true;
  };
  const ScaleTile all = ScaleTile::tensor(), row = ScaleTile::row(), column = ScaleTile::column();
  const ScaleTile square{128, 128}, along{1, 128}, across{128, 1};
  const Row rows[] = {
      {"tensorwise", all, all, all, all, all, all, kF8E5M2, false},
      {"delayed", all, all, all, all, all, all, kF8E5M2, false},
      {"rowwise", row, row, column, row, column, column},
      {"rowwise_with_gw_hp", row, row, all, row, column, column},
      {"blockwise", along, square, square, along, across, across},
  };
  for (const Row& expected : rows) {
    SCOPED_TRACE(expected.name);
    for (const bool low : {true, false}) {
      Fp8Recipe recipe = Fp8Recipe::named(expected.name);
      EXPECT_EQ(name_of(recipe.scaling), expected.name);
      recipe.weight_gradient_in_low = low;
      const Fp8Casts casts = recipe.casts();
      const auto options = [&](ScaleTile tile, DType format = kF8E4M3) {
        return QuantizeOptions{.format = format, .tile = tile, .power_of_two = expected.two};
      };
      EXPECT_EQ(casts.input, options(expected.input));
      EXPECT_EQ(casts.weight, options(expected.weight));
      EXPECT_EQ(casts.weight_of_grad, options(expected.weight_of_grad));
      EXPECT_EQ(casts.grad_output, options(expected.grad, expected.of_grad));
      const bool both = low && recipe.scaling != Fp8Scaling::kRowwiseWithGwHp;
      ASSERT_EQ(casts.input_of_weight.has_value(), both);
      ASSERT_EQ(casts.grad_output_of_weight.has_value(), both);
      if (!both) continue;
      EXPECT_EQ(*casts.input_of_weight, options(expected.input_of_weight));
      EXPECT_EQ(*casts.grad_output_of_weight, options(expected.grad_of_weight, expected.of_grad));
    }
  }
  EXPECT_EQ(Fp8Recipe{.format = Fp8Format::kE4M3}.casts().grad_output.format, kF8E4M3);
  EXPECT_TRUE(Fp8Recipe{.power_of_two = true}.casts().input.power_of_two);
}

TEST(Fp8Recipe, DescribesWhatIsNotUsual) {
  EXPECT_EQ(describe(Fp8Recipe{}), "fp8 tensorwise (hybrid), filter default");
  EXPECT_EQ(describe(Fp8Recipe{.scaling = Fp8Scaling::kBlockwise,
                               .in_evaluation = false,
                               .filter = Fp8Filter::kAll,
                               .strict = true}),
            "fp8 blockwise (e4m3, block 128, not in evaluation), filter all, strict");
  EXPECT_EQ(describe(Fp8Recipe{.scaling = Fp8Scaling::kDelayed,
                               .weight_gradient_in_low = false,
                               .history = 16,
                               .algorithm = AmaxAlgorithm::kMostRecent,
                               .margin = 2,
                               .filter = Fp8Filter::kPays}),
            "fp8 delayed (hybrid, history 16, most recent, margin 2, weight gradients high), "
            "filter pays");
}

TEST(Fp8Filter, PaysFromTheShapesOfTheTableOn) {
  using Scaling = Fp8Scaling;
  const auto pays = [](Scaling scaling, int64_t in, int64_t out) {
    return reason_not_to_pay(scaling, in, out).empty();
  };
  for (const Scaling scaling : {Scaling::kTensorwise, Scaling::kDelayed}) {
    EXPECT_FALSE(pays(scaling, 4096, 1024));
    EXPECT_TRUE(pays(scaling, 4097, 1024));
    EXPECT_TRUE(pays(scaling, 4096, 1025));
  }
  for (const Scaling scaling :
       {Scaling::kRowwise, Scaling::kRowwiseWithGwHp, Scaling::kBlockwise}) {
    EXPECT_FALSE(pays(scaling, 8192, 2048));
    EXPECT_FALSE(pays(scaling, 1024, 8192));
    EXPECT_FALSE(pays(scaling, 2048, 4096));
    EXPECT_TRUE(pays(scaling, 2049, 2049));
    EXPECT_TRUE(pays(scaling, 1025, 4097));
  }
  EXPECT_EQ(reason_not_to_pay(Scaling::kDelayed, 64, 32),
            "a product of in 64 and out 32 does not win back its casts");
}

TEST(Fp8Report, TheTableSaysAllThatIsKnown) {
  Fp8Report report{.recipe = Fp8Recipe{}, .layers = {}};
  Fp8LayerReport layer;
  layer.name = "up", layer.fp8_calls = 3;
  layer.fallbacks = {{"the module evaluates", 2}, {"too small", 1}};
  layer.dtypes = {{"bf16", 3}};
  layer.operands[0] = {
      .amax = 2, .elements = 4, .saturated = 0.5, .underflown = 0.25, .not_finite = 1, .sqnr = 30};
  layer.operands[2] = {.amax = 3, .elements = 1};
  report.layers.push_back(layer);
  Fp8LayerReport out;
  out.excluded = "it is the last", out.dtypes = {{"bf16", 2}}, out.fallbacks = {{"too small", 9}};
  report.layers.push_back(out);
  EXPECT_EQ(report.fp8_calls(), 3);
  EXPECT_EQ(report.fallbacks(), 1);
  EXPECT_EQ(
      report.table(),
      "fp8 tensorwise (hybrid), filter default: 3 calls in fp8, 1 that fell back\n"
      "  up: 3 calls, 2 fell back: the module evaluates, 1 fell back: too small, 3 of them in "
      "bf16; x amax 2, saturated 50%, to zero 25%, not finite 1 times, 30 dB; dy amax 3, "
      "saturated 0%, to zero 0%\n"
      "  (model): not in fp8: it is the last, 2 calls in bf16\n");
}

TEST(Fp8Linear, RefusesOperandsThatDoNotFit) {
  const Tensor x = randn({16, 32}), weight = randn({48, 32});
  const auto call = [&](const Tensor& a, const Tensor& w, const Tensor& bias,
                        Fp8Recipe recipe = {}) { return [=] { fp8_linear(a, w, bias, recipe); }; };
  EXPECT_EQ(fp8_linear(x, weight, randn({48}), Fp8Recipe{}).shape(), (Shape{16, 48}));
  expect_refusals({
      {"inner dimensions differ", call(x, randn({48, 16}), {})},
      {"inner dimensions differ", call(x, randn({32}), {})},
      {"inner dimensions differ", call(zeros({}), weight, {})},
      {"a bias of [48]", call(x, weight, randn({32}))},
      {"a bias of [48]", call(x, weight, randn({1, 48}))},
      {"margin belongs to delayed", call(x, weight, {}, Fp8Recipe{.margin = 1})},
  });
}

}  // namespace
}  // namespace tessera::precision::test_fp8_recipe
