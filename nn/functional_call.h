// Calls a module with other parameters, as torch.func.functional_call does: for derivatives by all
// parameters at once, ensembles, and updates that are themselves differentiated.
//
//     NamedTensors decayed = model.named_parameters();
//     for (auto& [name, tensor] : decayed) tensor = tensor * 0.99;
//     Tensor decayed_loss = functional_call(model, decayed, ids, targets).loss;
//
// With autograd/functional.h, the product of the Hessian by all parameters with v:
//
//     const NamedTensors names = model.named_parameters();
//     const auto loss_of = [&](const TensorList& values) -> Tensor {
//       return functional_call(model, with_values(names, values), ids, targets).loss;
//     };
//     const TensorList v = model.parameters();
//     auto [value, product] = functional::hvp(loss_of, model.parameters(), v);
//
// During the call the given tensors replace the parameters and buffers of their names; hooks, modes
// and names in errors are those of any call. Afterwards, also after an exception, the module is as
// before. Parameters that are not named keep their own tensors. A tied parameter is given under one
// of its names. The tensors have the shapes and devices of those that they replace; dtypes may
// differ, and gradients flow to tensors that are results of recorded ops. Buffers that forward
// writes to (running statistics) are written in the given tensors. Recomputation by
// checkpoint_calls() sees the given parameters; the module must live until then. Not for modules
// with sharded parameters (fully_shard), nor for several threads at once. Throws ValueError for an
// unknown name, ShapeError and DeviceError.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <tessera/autograd/checkpoint.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/nn/module.h>

namespace tessera::nn {

// In the scope the module holds `tensors`; nested scopes end last in, first out.
class ReplacedParameters {
 public:
  ReplacedParameters(ModuleBase& module, const NamedTensors& tensors);
  ~ReplacedParameters();
  ReplacedParameters(const ReplacedParameters&) = delete;
  ReplacedParameters& operator=(const ReplacedParameters&) = delete;

 private:
  struct Replaced {
    Tensor* place;
    Tensor own;
  };
  std::vector<Replaced> replaced_;
};

template <class M, class... Args>
auto functional_call(M& module, const NamedTensors& tensors, Args&&... args) {
  const ReplacedParameters replaced(module, tensors);
  const RecomputationGuard again([&module, tensors]() -> std::shared_ptr<void> {
    return std::make_shared<ReplacedParameters>(module, tensors);
  });
  return module(std::forward<Args>(args)...);
}
template <class M, class... Args>
auto functional_call(M& module, const StateDict& tensors, Args&&... args) {
  return functional_call(module, NamedTensors(tensors.begin(), tensors.end()),
                         std::forward<Args>(args)...);
}

// Pairs the names of `names` with these values, in the same order. ValueError if the numbers
// differ.
NamedTensors with_values(const NamedTensors& names, const TensorList& values);

}  // namespace tessera::nn
