// Activation checkpointing: memory for time.
//
// checkpoint(f, inputs) calls f and keeps only its inputs; what its ops would have saved is
// calculated again when backward first asks for it, with the random numbers of the first call.
//
//     Tensor y = checkpoint([&](const Tensor& in) { return block(in); }, x);
//
// The graph is an ordinary one, so hooks, accumulation and gradients of parameters that f captures
// work as without it. f must do the same each time; it is called once more for each backward.
// Source of the idea: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost"
// (2016).
#pragma once

#include <functional>
#include <memory>

#include <tessera/autograd/autograd.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

TensorList checkpoint(const std::function<TensorList(const TensorList&)>& function,
                      const TensorList& inputs);
Tensor checkpoint(const std::function<Tensor(const Tensor&)>& function, const Tensor& input);

// True while a function is called again for a backward: what was counted or noted then is not to be
// noted a second time.
bool is_recomputing();

// The same for a scope: what its ops would have saved is calculated by `again`, which does what the
// scope did, on inputs that stand for `inputs`. `around`: what lives around that, made before the
// random numbers and the autocast state of the first run come back. While grad mode is off it does
// nothing.
class CheckpointScope {
 public:
  using Again = std::function<void(const TensorList& inputs)>;
  using Around = std::function<std::shared_ptr<void>()>;
  CheckpointScope(Again again, TensorList inputs, Around around = {});

 private:
  std::unique_ptr<SavedTensorHooks> hooks_;
};

// In the scope, what recomputations of checkpoints that begin there need around them, beside random
// numbers and autocast, which are those of the first run then: parameters that are not in their
// places all the time. Those of scopes around it come first.
class RecomputationGuard {
 public:
  explicit RecomputationGuard(CheckpointScope::Around around);
  ~RecomputationGuard();
  RecomputationGuard(const RecomputationGuard&) = delete;
  RecomputationGuard& operator=(const RecomputationGuard&) = delete;
};

}  // namespace tessera
