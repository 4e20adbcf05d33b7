#include <tessera/precision/policy.h>

#include <array>
#include <sstream>

#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/plain_text.h>

namespace tessera::precision {
namespace {

constexpr const char* kPrecision = "precision";

struct NamedPolicy {
  std::string_view name;
  Policy policy;
};
const std::array<NamedPolicy, 8> kPolicies = {{
    {"no", Policy::f32()},
    {"f32", Policy::f32()},
    {"bf16", Policy::autocast(kBF16)},
    {"fp16", Policy::autocast(kF16)},
    {"bf16-pure", Policy::pure(kBF16)},
    {"fp16-pure", Policy::pure(kF16)},
    {"bf16-boundary", Policy::boundary(kBF16)},
    {"fp16-boundary", Policy::boundary(kF16)},
}};

void check_dtype(const char* field, DType dtype) {
  TS_CHECK_AS(UnsupportedError, !is_fp8(dtype), kPrecision, field, " ", dtype,
              " is no dtype of whole models: fp8 needs scaling factors; take Policy::fp8(recipe), "
              "which puts linear layers into it");
  TS_CHECK_AS(ConfigError, is_floating(dtype), kPrecision, field, " must be a floating dtype; got ",
              dtype);
}

}  // namespace

Policy policy_named(std::string_view name) {
  std::string known;
  for (const NamedPolicy& each : kPolicies) {
    if (each.name == name) return each.policy;
    known += (known.empty() ? "" : ", ") + std::string(each.name);
  }
  if (name == "fp8") return Policy::fp8();
  if (name.starts_with("fp8-")) return Policy::fp8(Fp8Recipe::named(name.substr(4)));
  TS_THROW(ConfigError, kPrecision, "there is no policy '", name, "'; known are ", known,
           ", fp8, fp8-RECIPE");
}

void check(const Policy& policy, const Device& device) {
  check_dtype("parameter", policy.parameter);
  check_dtype("compute", policy.compute);
  check_dtype("gradient", policy.gradient);
  if (policy.output) check_dtype("output", *policy.output);
  TS_CHECK_AS(UnsupportedError, !device.is_cuda() || gpu::device_count() > 0, kPrecision,
              "the device ", device, " is not there: ", gpu::unavailable_reason());
  if (policy.fp8_recipe) {
    check(*policy.fp8_recipe);
    TS_CHECK_AS(ConfigError,
                policy.casting == Casting::kAutocast && policy.parameter == kF32 &&
                    (policy.compute == kBF16 || policy.compute == kF16),
                kPrecision,
                "fp8 stands on autocast to bf16 or f16 with parameters in f32, from which weights "
                "are quantised; got parameter ",
                policy.parameter, " with compute ", policy.compute);
    TS_CHECK_AS(UnsupportedError,
                !device.is_cuda() || policy.fp8_recipe->scaling != Fp8Scaling::kBlockwise ||
                    policy.fp8_recipe->block == 128,
                kPrecision, "the blocks of a GPU's products are 128 wide; got ",
                describe(*policy.fp8_recipe), " for ", device);
  }
  if (policy.casting == Casting::kAutocast) {
    const bool low = policy.compute == kBF16 || policy.compute == kF16;
    TS_CHECK_AS(ConfigError, low || policy.compute == policy.parameter, kPrecision,
                "autocast computes in bf16 or f16; got compute ", policy.compute,
                " with parameters in ", policy.parameter, "; use Casting::kBoundary");
    TS_CHECK_AS(ConfigError, policy.parameter == kF32 || policy.parameter == policy.compute,
                kPrecision,
                "autocast reads parameters in f32 or in the compute dtype; got parameter ",
                policy.parameter, " with compute ", policy.compute, "; use Casting::kBoundary");
  } else {
    TS_CHECK_AS(ConfigError, policy.compute != kF64 && policy.parameter != kF64, kPrecision,
                "f64 is never cast; got parameter ", policy.parameter, " with compute ",
                policy.compute);
  }
}

std::string describe(const Policy& policy) {
  PlainText<std::ostringstream> text;
  text << "parameters " << policy.parameter << ", compute " << policy.compute;
  if (policy.compute != policy.parameter) {
    text << (policy.casting == Casting::kAutocast ? " (autocast)" : " (cast at the boundary)");
  }
  if (policy.fp8_recipe) text << " with Linears in " << describe(*policy.fp8_recipe);
  text << ", gradients " << policy.gradient << ", output ";
  if (policy.output) {
    text << *policy.output;
  } else {
    text << "as computed";
  }
  return text.str();
}

}  // namespace tessera::precision
