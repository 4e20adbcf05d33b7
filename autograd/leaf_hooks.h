// Hooks on leaves whose gradients are not in their own `.grad`: for ranks with sharded parameters,
// whose ops read other leaves, the unsharded parameters.
#pragma once

#include <functional>

#include <tessera/autograd/autograd.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

// Called by each zero_grad() of the leaf in this context, whether it has a `.grad` or not. The hook
// must be removed before the leaf is destroyed.
HookHandle register_zero_grad_hook(const Tensor& leaf, std::function<void()> hook);

// A replaced leaf, which no graph leads to, is refused by grad().
void set_replaced(const Tensor& leaf, bool replaced);
bool is_replaced(const Tensor& leaf);
// If `.grad` was set in another way than by the engine: runs the hooks of register_hook(), with a
// plain tensor of its elements, into which a defined result is copied, then those of
// register_post_accumulate_hook(). False if there are none.
bool run_leaf_hooks(const Tensor& leaf);
bool has_leaf_hooks(const Tensor& leaf);

}  // namespace tessera
