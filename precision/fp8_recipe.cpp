#include <tessera/precision/fp8_recipe.h>

#include <array>
#include <sstream>

#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>

namespace tessera::precision {
namespace {

constexpr const char* kRecipe = "fp8 recipe";
constexpr std::array<std::string_view, 5> kScalings = {"tensorwise", "delayed", "rowwise",
                                                       "rowwise_with_gw_hp", "blockwise"};
constexpr std::array<std::string_view, 3> kFilters = {"default", "all", "pays"};

bool has_tensor_scales(Fp8Scaling scaling) {
  return scaling == Fp8Scaling::kTensorwise || scaling == Fp8Scaling::kDelayed;
}

}  // namespace

std::string_view name_of(Fp8Scaling scaling) { return kScalings[static_cast<size_t>(scaling)]; }
std::string_view name_of(Fp8Filter filter) { return kFilters[static_cast<size_t>(filter)]; }

Fp8Filter fp8_filter_named(std::string_view name) {
  for (size_t i = 0; i < kFilters.size(); ++i) {
    if (kFilters[i] == name) return static_cast<Fp8Filter>(i);
  }
  TS_THROW(ConfigError, kRecipe, "there is no filter '", name, "'; known are default, all, pays");
}

Fp8Recipe Fp8Recipe::named(std::string_view name) {
  if (name == "current") return {};
  for (size_t i = 0; i < kScalings.size(); ++i) {
    if (kScalings[i] == name) return {.scaling = static_cast<Fp8Scaling>(i)};
  }
  TS_CHECK_AS(UnsupportedError, name != "MSAMP" && name != "msamp", kRecipe,
              "MS-AMP keeps weights, gradients and optimizer states in fp8 and is developed no "
              "more; take tensorwise or delayed");
  TS_THROW(ConfigError, kRecipe, "there is no recipe '", name,
           "'; known are tensorwise (current), delayed, rowwise, rowwise_with_gw_hp, blockwise");
}

Fp8Format Fp8Recipe::format_or_default() const {
  return format.value_or(has_tensor_scales(scaling) ? Fp8Format::kHybrid : Fp8Format::kE4M3);
}
bool Fp8Recipe::power_of_two_or_default() const {
  return power_of_two.value_or(!has_tensor_scales(scaling));
}

Fp8Casts Fp8Recipe::casts() const {
  using kernels::ScaleTile;
  const bool two = power_of_two_or_default();
  const DType of_grad = format_or_default() == Fp8Format::kHybrid ? kF8E5M2 : kF8E4M3;
  const auto cast = [&](ScaleTile tile, DType dtype = kF8E4M3) {
    return kernels::QuantizeOptions{.format = dtype, .tile = tile, .power_of_two = two};
  };
  Fp8Casts casts;
  switch (scaling) {
    case Fp8Scaling::kTensorwise:
    case Fp8Scaling::kDelayed:
      casts.input = casts.weight = casts.weight_of_grad = cast(ScaleTile::tensor());
      casts.input_of_weight = casts.input;
      casts.grad_output = cast(ScaleTile::tensor(), of_grad);
      casts.grad_output_of_weight = casts.grad_output;
      break;
    case Fp8Scaling::kRowwise:
    case Fp8Scaling::kRowwiseWithGwHp:
      casts.input = casts.weight = casts.grad_output = cast(ScaleTile::row());
      casts.weight_of_grad =
          cast(scaling == Fp8Scaling::kRowwise ? ScaleTile::column() : ScaleTile::tensor());
      casts.input_of_weight = casts.grad_output_of_weight = cast(ScaleTile::column());
      break;
    case Fp8Scaling::kBlockwise:
      casts.input = casts.grad_output = cast({1, block});
      casts.weight = casts.weight_of_grad = cast({block, block});
      casts.input_of_weight = casts.grad_output_of_weight = cast({block, 1});
      break;
  }
  if (!weight_gradient_in_low || scaling == Fp8Scaling::kRowwiseWithGwHp) {
    casts.input_of_weight.reset();
    casts.grad_output_of_weight.reset();
  }
  return casts;
}

void check(const Fp8Recipe& recipe) {
  const std::string_view name = name_of(recipe.scaling);
  const bool delayed = recipe.scaling == Fp8Scaling::kDelayed;
  TS_CHECK_AS(ConfigError,
              has_tensor_scales(recipe.scaling) || recipe.format_or_default() == Fp8Format::kE4M3,
              kRecipe, name, " is E4M3 everywhere; got format hybrid; leave format open");
  TS_CHECK_AS(ConfigError,
              recipe.scaling != Fp8Scaling::kBlockwise || recipe.power_of_two_or_default(), kRecipe,
              "the scales of blockwise are powers of two; got power_of_two false");
  TS_CHECK_AS(ConfigError, recipe.block >= 1 && recipe.block % 16 == 0, kRecipe,
              "block must be a positive multiple of 16; got ", recipe.block);
  TS_CHECK_AS(ConfigError, recipe.history >= 1, kRecipe, "history must be at least 1; got ",
              recipe.history);
  TS_CHECK_AS(ConfigError, recipe.margin >= 0 && recipe.margin <= 64, kRecipe,
              "margin must lie between 0 and 64; got ", recipe.margin);
  TS_CHECK_AS(ConfigError, delayed || recipe.margin == 0, kRecipe,
              "margin belongs to delayed scales; got ", recipe.margin, " with ", name);
}

std::string describe(const Fp8Recipe& recipe) {
  PlainText<std::ostringstream> text;
  text << "fp8 " << name_of(recipe.scaling) << " ("
       << (recipe.format_or_default() == Fp8Format::kHybrid ? "hybrid" : "e4m3");
  if (recipe.scaling == Fp8Scaling::kDelayed) {
    text << ", history " << recipe.history << ", "
         << (recipe.algorithm == AmaxAlgorithm::kMax ? "max" : "most recent") << ", margin "
         << recipe.margin;
  }
  if (recipe.scaling == Fp8Scaling::kBlockwise) text << ", block " << recipe.block;
  if (!recipe.casts().input_of_weight) text << ", weight gradients high";
  if (!recipe.in_evaluation) text << ", not in evaluation";
  text << "), filter " << name_of(recipe.filter);
  if (recipe.strict) text << ", strict";
  return text.str();
}

std::string reason_not_to_pay(Fp8Scaling scaling, int64_t in_features, int64_t out_features) {
  const int64_t K = in_features, N = out_features;
  const bool small = has_tensor_scales(scaling)
                         ? K <= 4096 && N <= 1024
                         : N <= 2048 || K <= 1024 || (N <= 4096 && K <= 2048);
  if (!small) return {};
  PlainText<std::ostringstream> text;
  text << "a product of in " << K << " and out " << N << " does not win back its casts";
  return text.str();
}

}  // namespace tessera::precision
