// Hooks on zero_grad(): for what holds contributions to a leaf's gradient in another place than its
// `.grad`, and lets go of them with it.
#pragma once

#include <functional>

#include <tessera/autograd/autograd.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

// Called by each zero_grad() of the leaf in this context, whether it has a `.grad` or not. The hook
// must be removed before the leaf goes.
HookHandle register_zero_grad_hook(const Tensor& leaf, std::function<void()> hook);

}  // namespace tessera
