// Cross-entropy of logits rows against class indices. The softmax is never stored: forward makes
// one pass over a row (online largest element and sum of exponentials) and saves two numbers.
//
// logits: [N, V], rows contiguous, f64, f32, bf16 or f16; targets: [N] contiguous i64, checked by
// check_targets before. Arithmetic is f32 (f64 for f64), sums over blocks of a row are f64. A row
// whose target is ignore_index has no loss and a zero gradient.
//
// With class weights w (all 1 where absent), label smoothing s and log-probabilities l:
//   loss = -(1 - s) w[target] l[target] - s / V sum_c w[c] l[c]
// and the loss over all rows is divided by sum of w[target] over the rows that are not ignored.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// Targets as contiguous i64. Throws DTypeError, and IndexError that names position, value and the
// number of classes.
Tensor check_targets(const char* where, const Tensor& target, int64_t classes,
                     int64_t ignore_index);

struct CrossEntropyAttributes {
  Tensor weight = {};  // [V] or absent
  int64_t ignore_index = -100;
  double label_smoothing = 0;
};
struct CrossEntropyRows {
  Tensor losses;      // [N] f32 (f64)
  Tensor statistics;  // [N, 2]: largest logit, 1 / sum of exp(logit - largest)
  // sum of w[target], the divisor of the mean: [] f64 beside the logits, which a GPU does not read
  // back; undefined for meta.
  Tensor total_weight;
};
CrossEntropyRows cross_entropy_forward(const Tensor& logits, const Tensor& targets,
                                       const CrossEntropyAttributes& attributes);
// d logits = row_gradients[n] / divisor * d loss[n], in the logits' dtype. row_gradients: [N] or
// [1]; divisor: one f64 element beside the logits, or undefined for 1.
Tensor cross_entropy_backward(const Tensor& logits, const Tensor& targets,
                              const CrossEntropyAttributes& attributes, const Tensor& statistics,
                              const Tensor& row_gradients, const Tensor& divisor);

// Forward and backward at once, for callers that need a block of rows no longer: writes losses [N]
// f64 and overwrites the logits by (softmax - one_hot(target)) / divisor, zeros for ignored rows.
// divisor: one f64 element on the logits' device, or undefined for 1. Parallel over rows; two
// passes over a row.
void cross_entropy_in_place(const Tensor& logits, const Tensor& targets, int64_t ignore_index,
                            const Tensor& divisor, const Tensor& losses);

// Multiplies x [N, V], rows contiguous, in place by a number of its compute dtype on its device. If
// that number is 1, as the gradient of a loss is, no element is read or written. For a GPU, which
// reads nothing back.
void scale_unless_one(const Tensor& x, const Tensor& factor);

// The target distribution q[N, V]: d loss / d logits = row_sum(q) * softmax - q. In the compute
// dtype of `like`; for gradients of gradients.
Tensor cross_entropy_distribution(const Tensor& like, const Tensor& targets,
                                  const CrossEntropyAttributes& attributes);

}  // namespace tessera::kernels
