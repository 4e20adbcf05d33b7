// Attention on a GPU by cuDNN (core/cuda/libraries/attention_graph.h says what it supports). Both
// functions queue the work and return true, or do nothing and return false if there is no library
// or it does not support the problem; then tessera's own kernels run. A mask is passed as numbers
// that are added to the scores. `lengths`: i32 [2, B] on the device, the query and key lengths of
// each sample; undefined if the spec has none.
#pragma once

#include <tessera/core/kernels/attention/attention.h>

namespace tessera::kernels {

bool attention_by_library(const Tensor& query, const Tensor& key, const Tensor& value,
                          const Tensor& lengths, const AttentionSpec& spec,
                          const AttentionResult& result);

struct AttentionGradients {
  Tensor query, key, value;
};
// Throws UnsupportedError where the library drew the dropout of forward and has no backward for it.
bool attention_backward_by_library(const Tensor& grad_output, const Tensor& query,
                                   const Tensor& key, const Tensor& value, const Tensor& lengths,
                                   const AttentionSpec& spec, const AttentionResult& result,
                                   const AttentionGradients& gradients);

}  // namespace tessera::kernels
