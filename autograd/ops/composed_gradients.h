// Derivatives of backward for fused ops, whose own backward is a kernel.
#pragma once

#include <functional>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

// The gradients of sum(composed(inputs) * dy) with respect to those inputs that require grad, as
// functions of inputs and dy that are recorded themselves. `inputs` are a fused op's saved inputs;
// `composed` makes the op's result of them by ops that have second derivatives.
TensorList composed_gradients(const TensorList& inputs, const Tensor& dy,
                              const std::function<Tensor(const TensorList&)>& composed);

}  // namespace tessera
