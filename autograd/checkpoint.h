// Activation checkpointing: less memory for more time.
//
// checkpoint(f, inputs) calls f and keeps only its inputs; what its ops would have saved is
// recomputed when backward first needs it, with the random numbers of the first call.
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

// True during a recomputation for a backward: counters and logs of forward should skip it.
bool is_recomputing();

// The same for a scope: `again` recomputes what its ops would have saved, by doing what the scope
// did on replacements of `inputs`. `around` makes an object that lives during the recomputation,
// before the random numbers and the autocast state of the first run are restored. While grad mode
// is off it does nothing.
class CheckpointScope {
 public:
  using Again = std::function<void(const TensorList& inputs)>;
  using Around = std::function<std::shared_ptr<void>()>;
  CheckpointScope(Again again, TensorList inputs, Around around = {});

 private:
  std::unique_ptr<SavedTensorHooks> hooks_;
};

// In the scope, objects that recomputations of checkpoints begun there need around them, besides
// the random numbers and autocast of the first run: for parameters that are not always unsharded.
// Objects of outer scopes are made first.
class RecomputationGuard {
 public:
  explicit RecomputationGuard(CheckpointScope::Around around);
  ~RecomputationGuard();
  RecomputationGuard(const RecomputationGuard&) = delete;
  RecomputationGuard& operator=(const RecomputationGuard&) = delete;
};

}  // namespace tessera
