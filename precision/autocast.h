// Puts a policy on a module, in place: its type, its calls and its parameters' names stay.
//
//     const AppliedPolicy applied = apply(model, Policy::autocast(kBF16));
//     auto out = model(batch.inputs);  // products in bf16; out is as computed
//
// Around each call of the module stands a scope, which also an exception leaves:
//   - kAutocast: an AutocastGuard. Inside, AutocastGuard(kF16), AutocastGuard(kBF16, false) and
//     modules with policies of their own nest as they like.
//   - kBoundary: the call's floating inputs (f32, f16, bf16) and, as ops read them, the parameters
//     of the module and of all below it are cast to `compute`; casts of parameters are kept and
//     renewed by the optimizer's pass (autograd/weight_cache.h). Buffers stay as they are. An
//     AutocastGuard inside is a ConfigError. Autocast around it ends at the boundary.
//   - Policy::fp8: the AutocastGuard, and around each Linear that the recipe takes what
//     precision/fp8_linear.h says.
// Results come as they were computed unless `output` says otherwise: a cast to f32 that nobody
// asked for doubles the logits' bytes.
//
// A module has one policy; below it others may have one too, and the innermost decides.
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

// The policy stays on the module until this goes, or remove() is called. The stored dtype of
// parameters stays also then.
class [[nodiscard]] AppliedPolicy {
 public:
  AppliedPolicy() = default;
  AppliedPolicy(AppliedPolicy&&) noexcept = default;
  AppliedPolicy& operator=(AppliedPolicy&& other) noexcept;
  ~AppliedPolicy() { remove(); }
  void remove();

  const Policy& policy() const { return policy_; }
  // The f32 values of parameters that were narrowed, once, by name: what the optimizer's masters
  // begin with (Optimizer::begin_masters), so that nothing is lost by the rounding.
  NamedTensors take_originals() { return std::exchange(originals_, {}); }
  // kBoundary: tensors that stand in the places of parameters during calls (sharded training's
  // whole parameters) are cast as these are.
  void add_parameters(const TensorList& tensors);
  // The Linears in fp8, or null where the policy has none.
  const std::shared_ptr<Fp8Layers>& fp8() const { return fp8_; }

 private:
  friend AppliedPolicy apply(nn::ModuleBase& module, const Policy& policy);
  Policy policy_;
  NamedTensors originals_;
  std::shared_ptr<TensorSet> parameters_;  // kBoundary
  std::vector<HookHandle> handles_;
  std::shared_ptr<Fp8Layers> fp8_;
};

// Converts parameters to policy.parameter (buffers stay: running statistics are f32; so do frozen
// parameters of 16 bits where that is f32: the base of adapters) and installs what the policy
// needs. Before replicate(), whose buffers take the parameters' dtypes, and before the optimizer's
// first step. Throws what check() throws, ConfigError where the module has a policy.
AppliedPolicy apply(nn::ModuleBase& module, const Policy& policy);

// The policy that apply() has put on this module, if any.
std::optional<Policy> policy_of(const nn::ModuleBase& module);
// Its Linears in fp8; null where it has no such policy.
std::shared_ptr<Fp8Layers> fp8_of(const nn::ModuleBase& module);

}  // namespace tessera::precision
