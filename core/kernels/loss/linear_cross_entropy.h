// Cross entropy of x W^T with class indices, in chunks of rows. One pass gives loss and gradients,
// and only a chunk of the logits [N, V] exists at a time: at most 128 MiB on the CPU, in f32. On a
// GPU a chunk has as many rows as LinearCrossEntropyOptions allows, in the dtype of x (f32 for
// f16), and fewer if memory is short, in which case grad_weight is summed over other chunks.
// fewer where memory is short; then the sums of grad_weight are those of other chunks.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// Options, in a slot of the context.
struct LinearCrossEntropyOptions {
  int64_t logits_bytes = 0;  // limit of a chunk on a GPU; 0: an eighth of the device's memory
};

struct LinearCrossEntropy {
  Tensor loss;         // [] f32, f64 for f64: sum or mean over rows that are not ignored
  Tensor grad_x;       // [N, C], undefined if not wanted
  Tensor grad_weight;  // [V, C], undefined if not wanted; f32 sums, rounded once
  // A factor that the gradients still lack; 1 except for f16. A mean over many rows has gradients
  // below f16's smallest number until the loss scale raises them. So f16 gradients are not divided
  // and are scaled up, to keep digits of small probabilities; grad_weight is then f32, so that sums
  // do not overflow.
  double gradient_factor = 1;
};

// x: [N, C]; weight: [V, C], floating, one dtype; target: [N] i64 or i32. The mean over no rows is
// NaN. Throws IndexError for a target outside [0, V) that is not ignore_index.
LinearCrossEntropy linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                                        int64_t ignore_index, bool mean, bool want_grad_x,
                                        bool want_grad_weight);

}  // namespace tessera::kernels
