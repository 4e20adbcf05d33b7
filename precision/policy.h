// The dtypes of a mixed-precision training: those of stored parameters, of products, of sums and
// reductions of gradients, and of a module's results.
//
//     Policy::autocast(kBF16)    f32 parameters, ops by their records (autograd/op.h)
//     Policy::pure(kBF16)        bf16 parameters, f32 masters in the optimizer, f32 gradients
//     Policy::boundary(kBF16)    f32 parameters, cast where a module is entered
//     Policy::fp8(recipe)        autocast to bf16, and Linears in fp8 (precision/fp8_recipe.h)
//
// This library defines the dtypes. Masters belong to the optimizer (Optimizer::begin_masters),
// gradients and their reduction to distributed/fully_shard (ReplicateOptions::gradient_dtype, at
// world size 1 as well).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <tessera/core/device.h>
#include <tessera/core/dtype.h>
#include <tessera/precision/fp8_recipe.h>

namespace tessera::precision {

// How ops compute in their dtype if parameters are stored in another.
enum class Casting : uint8_t {
  kAutocast,  // each op by its record: products in 16 bits, exp and sums in f32
  kBoundary,  // casts inputs and parameters at the module's boundary
};

struct Policy {
  DType parameter = kF32;
  DType compute = kF32;
  DType gradient = kF32;             // for sums over a window and over ranks
  std::optional<DType> output = {};  // of a module's results; unset: as computed
  Casting casting = Casting::kAutocast;
  std::optional<Fp8Recipe> fp8_recipe = {};  // for Linears; everything else is as above

  static Policy f32() { return {}; }
  static Policy autocast(DType compute) { return {.compute = compute}; }
  static Policy pure(DType dtype) {
    return {.parameter = dtype, .compute = dtype, .casting = Casting::kBoundary};
  }
  static Policy boundary(DType compute) {
    return {.compute = compute, .casting = Casting::kBoundary};
  }
  static Policy fp8(const Fp8Recipe& recipe = {}) {
    return {.compute = kBF16, .fp8_recipe = recipe};
  }

  // f16's range asks for a GradScaler.
  bool needs_loss_scaling() const { return parameter == kF16 || compute == kF16; }
  // 16-bit parameters lose small updates: the optimizer keeps f32 masters.
  bool needs_masters() const { return parameter == kF16 || parameter == kBF16; }

  friend bool operator==(const Policy&, const Policy&) = default;
};

// "no" and "f32"; "bf16" and "fp16" (autocast); "bf16-pure", "fp16-pure"; "bf16-boundary",
// "fp16-boundary"; "fp8" (tensorwise), "fp8-RECIPE". Throws ConfigError for other names.
Policy policy_named(std::string_view name);

// Throws UnsupportedError if this build has no kernels for a dtype or the device does not exist,
// ConfigError if the dtypes or a recipe's settings contradict each other. The message names the
// field. fp8 is never replaced by another precision: if it cannot run this throws.
void check(const Policy& policy, const Device& device = kCpu);

// "parameters f32, compute bf16 (autocast), gradients f32, output as computed"
std::string describe(const Policy& policy);

}  // namespace tessera::precision
