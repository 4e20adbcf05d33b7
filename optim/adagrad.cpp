#include <tessera/optim/adagrad.h>

#include <tessera/core/kernels/optim/multi_tensor.h>

namespace tessera::optim {

std::span<const char* const> Adagrad::state_names() const {
  static constexpr const char* kNames[] = {"sum"};
  return kNames;
}
std::optional<double> Adagrad::initial_state(size_t group, size_t) const {
  return options(group).initial_accumulator_value;
}

void Adagrad::update(size_t group, std::span<ParameterState* const> parameters,
                     const kernels::StepScalars& scalars) {
  const AdagradOptions& options = this->options(group);
  std::vector<kernels::AdagradTensors> tensors;
  tensors.reserve(parameters.size());
  for (const ParameterState* p : parameters) {
    tensors.push_back({.param = p->target(),
                       .grad = p->gradient,
                       .state_sum = p->states[0],
                       .shadow = p->shadow()});
  }
  kernels::multi_tensor_adagrad(tensors,
                                {.lr_decay = options.lr_decay,
                                 .eps = options.eps,
                                 .weight_decay = options.weight_decay,
                                 .maximize = options.maximize},
                                scalars);
}

}  // namespace tessera::optim
