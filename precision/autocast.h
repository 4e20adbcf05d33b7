// Applies a policy to a module in place; its type, its calls and its parameters' names do not
// change.
//
//     const AppliedPolicy applied = apply(model, Policy::autocast(kBF16));
//     auto out = model(batch.inputs);  // products in bf16; out is as computed
//
// Each call of the module runs in a scope, which ends also by an exception:
//   - kAutocast: an AutocastGuard. Inside, AutocastGuard(kF16), AutocastGuard(kBF16, false) and
//     modules with policies of their own nest as they like.
//   - kBoundary: the call's floating inputs (f32, f16, bf16) and, as ops read them, the parameters
//     of the module and of all below it are cast to `compute`; casts of parameters are kept and
//     renewed by the optimizer's pass (autograd/weight_cache.h). Buffers stay as they are. An
//     AutocastGuard inside is a ConfigError. Autocast around it ends at the boundary.
//   - Policy::fp8: the AutocastGuard, and around each Linear that the recipe takes what
//     precision/fp8_linear.h says.
// Results keep their computed dtype unless `output` is set, since a cast to f32 doubles the logits'
// bytes.
//
// A module has one policy; modules in it may have another, and the innermost counts.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/nn/module.h>
#include <tessera/precision/fp8_linear.h>
#include <tessera/precision/policy.h>

namespace tessera::precision {

// The policy stays on the module until this is destroyed or remove() is called. The parameters keep
// their stored dtype afterwards.
class [[nodiscard]] AppliedPolicy {
 public:
  AppliedPolicy() = default;
  AppliedPolicy(AppliedPolicy&&) noexcept = default;
  AppliedPolicy& operator=(AppliedPolicy&& other) noexcept;
  ~AppliedPolicy() { remove(); }
  void remove();

  const Policy& policy() const { return policy_; }
  // The f32 values of narrowed parameters by name; may be taken once. The optimizer's masters begin
  // with them (Optimizer::begin_masters), so that the rounding loses nothing.
  NamedTensors take_originals() { return std::exchange(originals_, {}); }
  // kBoundary: tensors that replace parameters during calls (unsharded parameters) are cast as
  // these are.
  void add_parameters(const TensorList& tensors);
  // The Linears in fp8, or null if the policy has none.
  const std::shared_ptr<Fp8Layers>& fp8() const { return fp8_; }

 private:
  friend AppliedPolicy apply(nn::ModuleBase& module, const Policy& policy);
  Policy policy_;
  NamedTensors originals_;
  std::shared_ptr<TensorSet> parameters_;  // kBoundary
  std::vector<HookHandle> handles_;
  std::shared_ptr<Fp8Layers> fp8_;
};

// Converts parameters to policy.parameter (buffers keep their dtype: running statistics are f32; so
// do frozen 16-bit parameters if policy.parameter is f32: the base of adapters) and installs the
// policy. Call it before replicate(), whose buffers take the parameters' dtypes, and before the
// optimizer's first step. Throws what check() throws, ConfigError if the module has a policy.
AppliedPolicy apply(nn::ModuleBase& module, const Policy& policy);

// The policy that apply() has put on this module, if any.
std::optional<Policy> policy_of(const nn::ModuleBase& module);
// The module's Linears in fp8; null without such a policy.
std::shared_ptr<Fp8Layers> fp8_of(const nn::ModuleBase& module);

}  // namespace tessera::precision
