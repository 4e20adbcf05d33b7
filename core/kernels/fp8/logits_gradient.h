// Quantization of the gradient of logits under a mean of cross-entropies.
#pragma once

#include <tessera/core/kernels/fp8/quantize.h>

namespace tessera::kernels {

struct LogitsGradient {
  Tensor logits;      // f16 or bf16 [N, V]
  Tensor targets;     // i64 [N], checked
  Tensor statistics;  // of cross_entropy_forward() (loss/cross_entropy.h)
  Tensor gradient;    // f32 [1], of the loss
  Tensor divisor;     // f64, one number: the count of rows that are not ignored
  int64_t ignore_index = -100;
};
// As quantize() of the result of cross_entropy_backward(), with one scale. A GPU needs one pass
// over the logits, and another one if the scale depends on these values; nothing is stored in
// between.
Quantized quantize_logits_gradient(const LogitsGradient& of, const QuantizeOptions& options,
                                   const Tensor& scale = {}, const QuantizeWants& wants = {});

}  // namespace tessera::kernels
