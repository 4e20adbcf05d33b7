#include <tessera/autograd/autocast_mode.h>

#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/node.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {

const Op detail::kAutocastWeight{
    .name = "autocast_weight", .marks = MarkRule::kPointwise, .reads_copies = inputs(0)};

namespace {

bool takes_part(const Tensor& tensor) {
  return tensor.defined() &&
         (tensor.dtype() == kF32 || tensor.dtype() == kF16 || tensor.dtype() == kBF16);
}

// `parameter`: known to be one, though it may be frozen.
Tensor cast(const Tensor& x, DType dtype, bool parameter = false) {
  if (!takes_part(x) || x.dtype() == dtype) return x;
  const AutogradSlot* slot = autograd_slot(x);
  const bool leaf = parameter || (slot != nullptr && slot->requires_grad && !slot->grad_fn);
  if (!leaf || dtype == kF32) return to(x, dtype);
  const Tensor low = weight_cache::get(x, {.dtype = dtype});
  // The engine converts the gradient to the leaf's dtype.
  return differentiable(
      detail::kAutocastWeight, {x}, [&](Inputs) { return raw::alias(low); },
      [](Grads dy, const Saved&) { return dy[0]; });
}

}  // namespace

namespace {

AutocastMode guarded_mode(DType dtype, bool enabled) {
  TS_CHECK_DTYPE(dtype == kBF16 || dtype == kF16, "autocast", "expects bf16 or f16; got ", dtype);
  const AutocastMode& outer = Context::current().slot<AutocastMode>();
  if (!outer.enabled || !outer.boundary) return {.enabled = enabled, .dtype = dtype};
  TS_CHECK_AS(ConfigError, !enabled, "autocast", "the module that is being called casts to ",
              outer.dtype,
              " at its boundary, and a module has one policy; take out the AutocastGuard, or give "
              "the module an autocast policy instead");
  return outer;
}

}  // namespace

AutocastGuard::AutocastGuard(DType dtype, bool enabled)
    : scoped_(Context::current().slot<AutocastMode>(), guarded_mode(dtype, enabled)) {}

namespace detail {

Tensor autocast_product(const Tensor& x) {
  const AutocastMode mode = Context::current().slot<AutocastMode>();
  if (!mode.enabled || !x.defined()) return x;
  if (mode.boundary && !mode.boundary->contains(x.impl())) return x;
  const ScopedValue<bool> off(Context::current().slot<AutocastMode>().enabled, false);
  return cast(x, mode.dtype, mode.boundary != nullptr);
}

Tensor autocast_float32(const Tensor& x) {
  const AutocastMode& mode = Context::current().slot<AutocastMode>();
  return mode.enabled && !mode.boundary && takes_part(x) ? to(x, kF32) : x;
}

TensorList autocast_inputs(const Op& op, std::span<const Tensor> inputs) {
  TensorList result(inputs.begin(), inputs.end());
  const AutocastMode mode = Context::current().slot<AutocastMode>();
  if (!mode.enabled) return result;
  if (!mode.boundary && op.autocast == Autocast::kInputDtype) return result;
  // Casts are ops themselves; they must not be cast again.
  const ScopedValue<bool> off(Context::current().slot<AutocastMode>().enabled, false);
  if (mode.boundary) {
    for (Tensor& input : result) {
      if (input.defined() && mode.boundary->contains(input.impl())) {
        input = cast(input, mode.dtype, true);
      }
    }
    return result;
  }
  DType target = kF32;
  switch (op.autocast) {
    case Autocast::kInputDtype:
      return result;
    case Autocast::kLow:
      target = mode.dtype;
      break;
    case Autocast::kFloat32:
      break;
    case Autocast::kWidest: {
      bool mixed = false;
      bool first = true;
      for (const Tensor& input : result) {
        if (!takes_part(input)) continue;
        if (!first && input.dtype() != target) mixed = true;
        target = first ? input.dtype() : promote_types(target, input.dtype());
        first = false;
      }
      if (!mixed) return result;
      break;
    }
    case Autocast::kRefuse:
      for (const Tensor& input : result) {
        TS_CHECK_DTYPE(!takes_part(input) || input.dtype() == kF32, op, "is unsafe in ",
                       input.dtype(),
                       " under autocast; use binary_cross_entropy_with_logits, or an "
                       "AutocastGuard that is off around the call");
      }
      return result;
  }
  for (Tensor& input : result) input = cast(input, target);
  return result;
}
}  // namespace detail
}  // namespace tessera
