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

#include <tessera/core/tensor.h>

namespace tessera {

TensorList checkpoint(const std::function<TensorList(const TensorList&)>& function,
                      const TensorList& inputs);
Tensor checkpoint(const std::function<Tensor(const Tensor&)>& function, const Tensor& input);

}  // namespace tessera
