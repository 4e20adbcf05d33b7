#include <tessera/precision/autocast.h>

#include <unordered_map>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/initial_values.h>

namespace tessera::precision {
namespace {

// Modules with a policy, in this context. The module's hooks own the policy: it goes with them.
struct Units {
  std::unordered_map<const nn::ModuleBase*, std::weak_ptr<const Policy>> policies;
  std::unordered_map<const nn::ModuleBase*, std::weak_ptr<Fp8Layers>> fp8;
};

bool takes_part(const Tensor& tensor) {
  return tensor.dtype() == kF32 || tensor.dtype() == kF16 || tensor.dtype() == kBF16;
}

void cast_all(nn::TensorRefs tensors, DType dtype) {
  for (Tensor* tensor : tensors) {
    if (takes_part(*tensor) && tensor->dtype() != dtype) *tensor = to(*tensor, dtype);
  }
}

NamedTensors store_as(nn::ModuleBase& module, DType dtype) {
  const NoGradGuard no_grad;
  NamedTensors originals;
  for (const auto& [name, tensor] : module.named_parameters()) {
    if (!takes_part(tensor) || tensor.dtype() == dtype) continue;
    // A base that was stored in 16 bits and learns nothing: f32 would be more bytes and no more.
    if (!tensor.requires_grad() && dtype == kF32) continue;
    const MemoryCategoryGuard category(MemoryCategory::kParameter);
    const Tensor original = tensor.detach();  // keeps the storage that set_data takes away
    if (const Tensor grad = tensor.grad(); grad.defined()) grad.set_data(to(grad, dtype));
    const Tensor stored = to(original, dtype);
    pass_initial_values(original, stored);
    tensor.set_data(stored);
    if (original.dtype() == kF32 && is_low_precision(dtype)) originals.push_back({name, original});
  }
  return originals;
}

std::shared_ptr<void> autocast_scope(DType dtype) {
  AutocastMode mode{.enabled = true, .dtype = dtype};
  // Not an AutocastGuard: inside a unit that casts at its boundary this is a unit of its own.
  return std::make_shared<ScopedValue<AutocastMode>>(Context::current().slot<AutocastMode>(),
                                                     std::move(mode));
}

}  // namespace

AppliedPolicy& AppliedPolicy::operator=(AppliedPolicy&& other) noexcept {
  remove();
  policy_ = other.policy_;
  originals_ = std::move(other.originals_);
  parameters_ = std::move(other.parameters_);
  handles_ = std::move(other.handles_);
  fp8_ = std::move(other.fp8_);
  return *this;
}

void AppliedPolicy::add_parameters(const TensorList& tensors) {
  if (!parameters_) return;
  for (const Tensor& tensor : tensors) parameters_->insert(tensor.impl());
}

void AppliedPolicy::remove() {
  for (HookHandle& handle : handles_) handle.remove();
  handles_.clear();
  fp8_.reset();
}

std::optional<Policy> policy_of(const nn::ModuleBase& module) {
  const auto& policies = Context::current().slot<Units>().policies;
  const auto found = policies.find(&module);
  if (found == policies.end()) return std::nullopt;
  const auto policy = found->second.lock();
  return policy ? std::optional(*policy) : std::nullopt;
}

std::shared_ptr<Fp8Layers> fp8_of(const nn::ModuleBase& module) {
  const auto& layers = Context::current().slot<Units>().fp8;
  const auto found = layers.find(&module);
  return found == layers.end() ? nullptr : found->second.lock();
}

AppliedPolicy apply(nn::ModuleBase& module, const Policy& policy) {
  check(policy);
  if (const auto present = policy_of(module)) {
    TS_THROW(ConfigError, "precision", module.type_name(), " '", module.dotted_name(),
             "' has a policy: ", describe(*present), "; got another: ", describe(policy),
             "; a module has one, either by autocast or at its boundary: remove the first");
  }
  AppliedPolicy applied;
  applied.policy_ = policy;
  applied.originals_ = store_as(module, policy.parameter);
  const auto shared = std::make_shared<const Policy>(policy);
  auto& policies = Context::current().slot<Units>().policies;
  std::erase_if(policies, [](const auto& entry) { return entry.second.expired(); });
  policies[&module] = shared;
  if (policy.fp8_recipe) {
    applied.fp8_ = std::make_shared<Fp8Layers>(module, *policy.fp8_recipe);
    auto& fp8 = Context::current().slot<Units>().fp8;
    std::erase_if(fp8, [](const auto& entry) { return entry.second.expired(); });
    fp8[&module] = applied.fp8_;
  }

  const bool boundary = policy.casting == Casting::kBoundary;
  const bool low = policy.compute == kBF16 || policy.compute == kF16;
  if (boundary) {
    applied.parameters_ = std::make_shared<TensorSet>();
    applied.add_parameters(module.parameters());
  }
  const std::shared_ptr<const TensorSet> parameters = applied.parameters_;
  applied.handles_.push_back(module.register_call_scope(
      [shared, boundary, low, parameters](nn::ModuleBase&) -> std::shared_ptr<void> {
        if (!boundary) return low ? autocast_scope(shared->compute) : nullptr;
        return std::make_shared<ScopedValue<AutocastMode>>(
            Context::current().slot<AutocastMode>(),
            AutocastMode{.enabled = true, .dtype = shared->compute, .boundary = parameters});
      }));
  if (boundary) {
    applied.handles_.push_back(module.register_forward_pre_hook(
        [dtype = policy.compute](nn::ModuleBase&, nn::TensorRefs inputs) {
          cast_all(inputs, dtype);
        }));
  }
  if (policy.output) {
    applied.handles_.push_back(module.register_forward_hook(
        [dtype = *policy.output](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs outputs) {
          cast_all(outputs, dtype);
        }));
  }
  return applied;
}

}  // namespace tessera::precision
