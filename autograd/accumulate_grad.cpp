// How gradients reach leaves.
#include <mutex>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/engine.h>
#include <tessera/autograd/leaf_hooks.h>
#include <tessera/autograd/node.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {

std::mutex& leaf_mutex(const TensorImpl* leaf) {
  static std::mutex mutexes[64];
  return mutexes[(reinterpret_cast<uintptr_t>(leaf) >> 6) % 64];
}

static bool owns_its_bytes(const Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         !tensor.storage()->is_foreign() && tensor.storage()->bytes() == tensor.nbytes();
}

static void call_post_accumulate_hooks(const AutogradSlot& slot, const Tensor& leaf) {
  if (!slot.post_accumulate_hooks) return;
  const auto hooks = *slot.post_accumulate_hooks;  // a hook may remove itself
  for (const PostAccumulateHook& hook : hooks) hook.call(leaf);
}

AccumulateGrad::AccumulateGrad(const Tensor& leaf) : leaf_(leaf) {
  // Runs as soon as its last contribution is there: gradients become ready early, one by one.
  sequence = UINT64_MAX;
  output_metas.push_back(TensorMeta::of(leaf));
}

TensorList AccumulateGrad::apply(TensorList grads) {
  AutogradSlot& slot = ensure_autograd_slot(leaf_);
  {
    std::lock_guard lock(leaf_mutex(leaf_.impl()));
    Tensor gradient = std::move(grads[0]);
    const TensorPlacement* placement = tensor_placement(leaf_);
    if (!slot.grad.defined()) {
      if (grad_enabled()) {
        slot.grad = placement == nullptr ? gradient : view(gradient, gradient.shape());
      } else if (slot.main_grad.defined()) {
        copy_(slot.main_grad, gradient);
        slot.grad = slot.main_grad;
      } else {
        // A gradient that nobody else holds becomes `.grad` without a copy.
        if (owns_its_bytes(gradient) && gradient.is_contiguous()) {
          slot.grad = std::move(gradient);
        } else if (gradient.use_count() == 1 && arrived_as_part()) {
          slot.grad = raw::as_parameter(gradient);  // versions are not those of the other parts
        } else {
          slot.grad = clone(gradient);
        }
        slot.grad.storage()->set_category(MemoryCategory::kGradient);
      }
      // The gradient of a part is a part; main_grad is its owner's object.
      if (placement != nullptr && !slot.grad.is(slot.main_grad)) {
        slot.grad.impl()->guard = placement->of_gradient();
      }
    } else if (grad_enabled()) {
      check_whole(slot.grad, "backward with create_graph onto a .grad that is there");
      slot.grad = add(slot.grad, gradient);
    } else {
      add_(placement == nullptr ? slot.grad : raw::alias(slot.grad), gradient);
    }
  }
  call_post_accumulate_hooks(slot, leaf_);
  return {};
}

void set_replaced(const Tensor& leaf, bool replaced) {
  ensure_autograd_slot(leaf).replaced = replaced;
}
bool is_replaced(const Tensor& leaf) {
  const AutogradSlot* slot = autograd_slot(leaf);
  return slot != nullptr && slot->replaced;
}

bool has_leaf_hooks(const Tensor& leaf) {
  const AutogradSlot* slot = autograd_slot(leaf);
  const auto any = [](const auto& hooks) { return hooks != nullptr && !hooks->empty(); };
  return slot != nullptr && (any(slot->leaf_hooks) || any(slot->post_accumulate_hooks));
}

bool run_leaf_hooks(const Tensor& leaf) {
  if (!leaf.grad().defined() || !has_leaf_hooks(leaf)) return false;
  const AutogradSlot* slot = autograd_slot(leaf);
  const NoGradGuard no_grad;
  if (slot->leaf_hooks != nullptr) {
    const GradHooks hooks = *slot->leaf_hooks;  // a hook may remove itself
    for (const GradHook& hook : hooks) {
      const Tensor gradient = raw::alias(leaf.grad());
      const Tensor replaced = hook.call(gradient);
      if (!replaced.defined() || replaced.is(gradient)) continue;
      TS_CHECK_SHAPE(replaced.shape() == gradient.shape(), "register_hook",
                     "the hook of a parameter in parts gets this rank's part, ", gradient,
                     ", and gave ", replaced, "; give a tensor of its shape");
      copy_(gradient, replaced);
    }
  }
  call_post_accumulate_hooks(*slot, leaf);
  return true;
}

}  // namespace tessera
