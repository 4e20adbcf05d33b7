#include <tessera/nn/transformer/rotary.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/nn/transformer/positions.h>

namespace tessera::nn {
namespace {

constexpr std::string_view kRotary = "RotaryEmbedding";

void check_rotary(int64_t features, const RotaryOptions& options) {
  TS_CHECK_AS(ConfigError, features > 0 && features % 2 == 0, kRotary,
              "features come in pairs; got ", features, "; give an even number of them");
  TS_CHECK_AS(ConfigError, std::isfinite(options.theta) && options.theta > 1, kRotary,
              "theta must be above 1; got ", options.theta);
  const RotaryScaling scaling = options.scaling;
  TS_CHECK_AS(
      ConfigError,
      scaling == RotaryScaling::kNone || (std::isfinite(options.factor) && options.factor >= 1),
      kRotary, "factor must be at least 1; got ", options.factor);
  TS_CHECK_AS(
      ConfigError,
      scaling == RotaryScaling::kNone || scaling == RotaryScaling::kLinear || options.context > 0,
      kRotary, "this scaling needs the context that the model was trained with; got ",
      options.context);
  TS_CHECK_AS(ConfigError, scaling != RotaryScaling::kDynamic || features > 2, kRotary,
              "the dynamic scaling needs more than one pair of features");
  TS_CHECK_AS(
      ConfigError,
      scaling != RotaryScaling::kLlama3 ||
          (options.low_freq_factor > 0 && options.high_freq_factor > options.low_freq_factor &&
           std::isfinite(options.high_freq_factor)),
      kRotary, "high_freq_factor must be above low_freq_factor, and both above 0; got ",
      options.high_freq_factor, " and ", options.low_freq_factor);
  TS_CHECK_AS(ConfigError,
              scaling != RotaryScaling::kYarn ||
                  (options.beta_slow > 0 && options.beta_fast >= options.beta_slow &&
                   std::isfinite(options.beta_fast)),
              kRotary, "beta_fast must be at least beta_slow, and both above 0; got ",
              options.beta_fast, " and ", options.beta_slow);
  TS_CHECK_AS(ConfigError,
              !options.attention_factor ||
                  (std::isfinite(*options.attention_factor) && *options.attention_factor > 0),
              kRotary, "attention_factor must be above 0");
  if (scaling != RotaryScaling::kLongRope) return;
  for (const auto* const divisors : {&options.short_factor, &options.long_factor}) {
    TS_CHECK_AS(ConfigError,
                divisors->size() == static_cast<size_t>(features / 2) &&
                    std::ranges::all_of(*divisors, [](double each) { return each > 0; }),
                kRotary, "short_factor and long_factor need a divisor above 0 for each of ",
                features / 2, " pairs; got ", divisors->size());
  }
}

// From 0 at pair `low` to 1 at pair `high`: how slow each of yarn's pairs is.
Tensor yarn_slowness(int64_t features, const RotaryOptions& options, const Device& device) {
  const auto C = static_cast<double>(features);
  const auto pair_of = [&](double turns) {  // that turns so often in the context of the training
    return C * std::log(static_cast<double>(options.context) / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(options.theta));
  };
  double low = pair_of(options.beta_fast), high = pair_of(options.beta_slow);
  if (options.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, C - 1);
  if (low == high) high += 0.001;  // a step; the number is transformers'
  return clamp((arange(0, features / 2, 1, kF64, device) - low) / (high - low), 0.0, 1.0);
}

}  // namespace

RotaryEmbedding::RotaryEmbedding(int64_t features, const RotaryOptions& options)
    : features(features), options(options) {
  check_rotary(features, options);
}

Tensor RotaryEmbedding::frequencies(int64_t length, const Device& device) const {
  const auto C = static_cast<double>(features);
  double theta = options.theta;
  if (options.scaling == RotaryScaling::kDynamic && length > options.context) {
    const double longer = static_cast<double>(length) / static_cast<double>(options.context);
    theta *= std::pow(options.factor * longer - (options.factor - 1), C / (C - 2));
  }
  const Tensor plain = exp(arange(0, features, 2, kF64, device) * (-std::log(theta) / C));
  if (options.scaling == RotaryScaling::kLinear) return plain / options.factor;
  if (options.scaling == RotaryScaling::kYarn) {
    const Tensor slow = yarn_slowness(features, options, device);
    return plain * ((1 - slow) + slow / options.factor);
  }
  if (options.scaling == RotaryScaling::kLongRope) {
    const std::vector<double>& divisors =
        length > options.context ? options.long_factor : options.short_factor;
    return plain / tensor(std::span<const double>(divisors), {features / 2}, kF64).to(device);
  }
  if (options.scaling != RotaryScaling::kLlama3) return plain;
  const Tensor turns = plain * (static_cast<double>(options.context) / (2 * std::numbers::pi));
  const Tensor fast = clamp(
      (turns - options.low_freq_factor) / (options.high_freq_factor - options.low_freq_factor), 0.0,
      1.0);
  return plain * (fast + (1 - fast) / options.factor);
}

double RotaryEmbedding::amplitude() const {
  if (options.attention_factor) return *options.attention_factor;
  if (options.scaling == RotaryScaling::kYarn) return 0.1 * std::log(options.factor) + 1;
  if (options.scaling != RotaryScaling::kLongRope) return 1;
  return std::sqrt(1 + std::log(options.factor) / std::log(static_cast<double>(options.context)));
}

RotaryAngles RotaryEmbedding::angles(const Tensor& positions, int64_t length) const {
  const NoGradGuard no_grad;
  const Tensor angle = positions.to(kF64).unsqueeze(-1) * frequencies(length, positions.device());
  const double factor = amplitude();
  if (factor == 1) return {cos(angle).to(kF32), sin(angle).to(kF32)};
  return {(cos(angle) * factor).to(kF32), (sin(angle) * factor).to(kF32)};
}

RotaryAngles RotaryEmbedding::angles(int64_t begin, int64_t count, const Device& device) const {
  TS_CHECK(begin >= 0 && count >= 0, kRotary, "positions begin at 0; got ", count, " from ", begin);
  return angles(positions(count, device, begin, kF64), begin + count);
}

RotaryAngles RotaryEmbedding::angles(const Tensor& position_ids) const {
  TS_CHECK_SHAPE(position_ids.dim() == 2, kRotary, "needs position ids [B, T]; got ", position_ids);
  const NoGradGuard no_grad;
  const bool grows =
      options.scaling == RotaryScaling::kDynamic || options.scaling == RotaryScaling::kLongRope;
  const int64_t length =
      grows && position_ids.numel() > 0 ? position_ids.max().item<int64_t>() + 1 : 0;
  return angles(position_ids.unsqueeze(1), length);
}

Tensor RotaryEmbedding::forward(const Tensor& x, int64_t begin) {
  TS_CHECK_SHAPE(x.dim() >= 2 && x.size(-1) == features, kRotary, "needs [..., T, ", features,
                 "]; got ", x);
  const RotaryAngles turns = angles(begin, x.size(-2), x.device());
  return rotary_embedding(x, turns.cos, turns.sin, options.interleaved);
}

std::string RotaryEmbedding::extra_repr() const {
  static constexpr const char* kNames[] = {"default", "linear", "dynamic",
                                           "llama3",  "yarn",   "longrope"};
  return tessera::detail::concatenate(features, ", theta=", options.theta,
                                      ", scaling=", kNames[static_cast<int>(options.scaling)]);
}

}  // namespace tessera::nn
