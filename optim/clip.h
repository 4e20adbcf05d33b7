// Clipping of gradients, as torch.nn.utils.
#pragma once

#include <concepts>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::optim {

class Optimizer;

struct ClipOptions {
  double norm_type = 2;             // may be infinity: the largest magnitude
  bool error_if_nonfinite = false;  // throws ValueError instead of spreading NaN or infinity
  // The next step of this optimizer applies the factor as it reads the gradients, which saves a
  // pass over them. The gradients keep their values until then.
  Optimizer* fold_into = nullptr;
  // Other optimizers that hold some of the parameters and apply the same factor at their next step
  // (optim::Muon and the AdamW of the rest). ValueError if their pending factors differ.
  std::vector<Optimizer*> fold_into_others = {};
  // The gradients count as multiplied by this: a factor, such as a loss scaler's inverse, that the
  // step will apply as it reads them. With fold_into, its next_step() supplies it.
  double gradient_scale = 1;
};
// Scales the gradients of `parameters` so that their norm as one vector is at most max_norm, by
// min(1, max_norm / (norm + 1e-6)). Returns the norm before clipping, f64, one element. The 2-norm
// is the root of an exact sum (core/kernels/optim/multi_tensor_square_sum.h), with the same bits
// however the gradients are split into tensors, for any number of threads, on either device. Other
// norms are f64 partial sums of blocks in a fixed tree, with the same bits for any number of
// threads. Parameters without a gradient are ignored. On a GPU, with fold_into and without
// error_if_nonfinite, norm and factor stay there: the host waits only when it reads the norm.
//
// For sharded gradients (DTensors) the norm is that of the whole gradients, the same on all ranks,
// and each rank scales its shards. This takes one all_reduce for each set of ranks that shards are
// split over (a mesh's sharded axes; an axis that replicates counts once, and so do whole gradients
// beside shards): 544 bytes of the exact sum for the 2-norm, which has the bits of one process with
// the whole gradients; an f64 for others, whose sums are added in rank order. It is collective
// then: all ranks pass the same parameters, also those of which a rank has no gradient or no
// elements. With error_if_nonfinite every rank throws. UnsupportedError for a Partial, and for
// shards while a graph is captured.
Tensor clip_grad_norm(const TensorList& parameters, double max_norm,
                      const ClipOptions& options = {});
// Clamps every element of every gradient to [-limit, limit]. gradient_scale: as above.
void clip_grad_value(const TensorList& parameters, double limit, double gradient_scale = 1);
// The same for named parameters, as from modules and nn::trainable_parameters().
template <std::same_as<NamedTensors> Named>
Tensor clip_grad_norm(const Named& parameters, double max_norm, const ClipOptions& options = {}) {
  return clip_grad_norm(tensors_of(parameters), max_norm, options);
}
template <std::same_as<NamedTensors> Named>
void clip_grad_value(const Named& parameters, double limit, double gradient_scale = 1) {
  clip_grad_value(tensors_of(parameters), limit, gradient_scale);
}

}  // namespace tessera::optim
