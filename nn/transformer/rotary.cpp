#include <tessera/nn/transformer/rotary.h>

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
  TS_CHECK_AS(ConfigError,
              (scaling != RotaryScaling::kDynamic && scaling != RotaryScaling::kLlama3) ||
                  options.context > 0,
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
  if (options.scaling != RotaryScaling::kLlama3) return plain;
  const Tensor turns = plain * (static_cast<double>(options.context) / (2 * std::numbers::pi));
  const Tensor fast = clamp(
      (turns - options.low_freq_factor) / (options.high_freq_factor - options.low_freq_factor), 0.0,
      1.0);
  return plain * (fast + (1 - fast) / options.factor);
}

RotaryAngles RotaryEmbedding::angles(int64_t begin, int64_t count, const Device& device) const {
  TS_CHECK(begin >= 0 && count >= 0, kRotary, "positions begin at 0; got ", count, " from ", begin);
  const NoGradGuard no_grad;
  const Tensor places = positions(count, device, begin, kF64).unsqueeze(1);
  const Tensor angle = places * frequencies(begin + count, device);
  return {cos(angle).to(kF32), sin(angle).to(kF32)};
}

Tensor RotaryEmbedding::forward(const Tensor& x, int64_t begin) {
  TS_CHECK_SHAPE(x.dim() >= 2 && x.size(-1) == features, kRotary, "needs [..., T, ", features,
                 "]; got ", x);
  const RotaryAngles turns = angles(begin, x.size(-2), x.device());
  return rotary_embedding(x, turns.cos, turns.sin, options.interleaved);
}

std::string RotaryEmbedding::extra_repr() const {
  static constexpr const char* kNames[] = {"default", "linear", "dynamic", "llama3"};
  return tessera::detail::concatenate(features, ", theta=", options.theta,
                                      ", scaling=", kNames[static_cast<int>(options.scaling)]);
}

}  // namespace tessera::nn
