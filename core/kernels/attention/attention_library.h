// The way of attention on a GPU to cuDNN (core/cuda/libraries/attention_graph.h says what it serves). Both
// forms queue the work and say true; or do nothing and say false, where there is no library, or one
// that does not serve the problem: then own kernels do. A mask goes along as what is added to the
// scores. `lengths`: i32 [2, B] on the device, the query and key lengths of each sample; undefined
// where the spec has none.
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
