// What linear layers ask of their operands, in whatever precision they run. Internal.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera {

// Shapes, and that the operands are there; named as linear() and linear_cross_entropy().
void check_linear(const Tensor& x, const Tensor& weight, const Tensor& bias);
void check_linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target);

}  // namespace tessera
