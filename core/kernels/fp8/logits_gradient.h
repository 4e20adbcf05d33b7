// Quantization of the gradient that the logits of a mean of cross-entropies have.
#pragma once

#include <tessera/core/kernels/fp8/quantize.h>

namespace tessera::kernels {

struct LogitsGradient {
  Tensor logits;      // f16 or bf16 [N, V]
  Tensor targets;     // i64 [N], checked
  Tensor statistics;  // of cross_entropy_forward() (loss/cross_entropy.h)
  Tensor gradient;    // f32 [1], of the loss
  Tensor divisor;     // f64, one number: how many rows count
  int64_t ignore_index = -100;
};
// As quantize() of what cross_entropy_backward() gives, with one scale: on a GPU a pass over the
// logits, and one for the scale where that is of the values at hand; nothing is stored in between.
Quantized quantize_logits_gradient(const LogitsGradient& of, const QuantizeOptions& options,
                                   const Tensor& scale = {}, const QuantizeWants& wants = {});

}  // namespace tessera::kernels
