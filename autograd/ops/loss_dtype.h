// The dtype of a loss that is made of logits.
#pragma once

#include <tessera/autograd/autocast_mode.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

// Under autocast, or in a module that casts at its boundary, a loss is f32, whatever the logits:
// three digits are too few to look at, and the gradient of a scaled f16 loss, 65536, would be
// infinite.
inline DType loss_dtype(const Tensor& logits) {
  return is_low_precision(logits.dtype()) && Context::current().slot<AutocastMode>().enabled
             ? kF32
             : logits.dtype();
}

}  // namespace tessera
