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
  // The factor is left to this optimizer's next step, which applies it while it reads the
  // gradients: saves a pass over them. The gradients keep their values.
  Optimizer* fold_into = nullptr;
  // Beside it: optimizers that hold others of the parameters, whose next step is told the same
  // (optim::Muon and the AdamW of the rest). ValueError where what they were told before differs.
  std::vector<Optimizer*> fold_into_others = {};
  // The gradients count as multiplied by it: what the step will do to them as it reads them, a loss
  // scaler's inverse. Where fold_into is set, its next_step() says so.
  double gradient_scale = 1;
};
// Scales the gradients of `parameters` so that their norm, taken as that of one vector, is at most
// max_norm: by min(1, max_norm / (norm + 1e-6)). Returns the norm before clipping, f64, one
// element. The 2-norm is the root of an exact sum (core/kernels/optim/multi_tensor_square_sum.h):
// the same bits however the gradients are cut into tensors, on any number of threads, on either
// device. Other norms have f64 partial sums per block in a fixed tree: the same bits for any thread
// count. Parameters without a gradient are passed over. On a GPU, with fold_into and without
// error_if_nonfinite, norm and factor stay there: the host waits only for a norm that it reads.
//
// Gradients that are parts (DTensors): the norm is that of the whole ones, the same on all ranks,
// and each scales its parts. It takes one all_reduce for each set of ranks that parts are cut over
// (a mesh's sharded axes; an axis that replicates counts once, and so do whole gradients beside
// parts): of the exact sum for the 2-norm, 544 bytes, whose bits are those of one process with the
// whole gradients; of an f64 for others, whose sums are added in rank order. Collective then: all
// ranks give the same parameters, also those of which a rank has no gradient or no elements. With
// error_if_nonfinite every rank throws. UnsupportedError for a summand (Partial), and for parts
// while a graph is captured.
Tensor clip_grad_norm(const TensorList& parameters, double max_norm,
                      const ClipOptions& options = {});
// Clamps every element of every gradient to [-limit, limit]. gradient_scale: as above.
void clip_grad_value(const TensorList& parameters, double limit, double gradient_scale = 1);
// The same of parameters with names, as modules and nn::trainable_parameters() list them.
template <std::same_as<NamedTensors> Named>
Tensor clip_grad_norm(const Named& parameters, double max_norm, const ClipOptions& options = {}) {
  return clip_grad_norm(tensors_of(parameters), max_norm, options);
}
template <std::same_as<NamedTensors> Named>
void clip_grad_value(const Named& parameters, double limit, double gradient_scale = 1) {
  clip_grad_value(tensors_of(parameters), limit, gradient_scale);
}

}  // namespace tessera::optim
