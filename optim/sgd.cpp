#include <tessera/optim/sgd.h>

#include <tessera/core/kernels/optim/multi_tensor.h>

namespace tessera::optim {

std::span<const char* const> SGD::state_names() const {
  static constexpr const char* kNames[] = {"momentum_buffer"};
  return kNames;
}
std::optional<double> SGD::initial_state(size_t group, size_t) const {
  if (options(group).momentum == 0) return std::nullopt;
  return 0;
}

void SGD::update(size_t group, std::span<ParameterState* const> parameters,
                 const kernels::StepScalars& scalars) {
  const SGDOptions& options = this->options(group);
  std::vector<kernels::SgdTensors> tensors;
  tensors.reserve(parameters.size());
  for (const ParameterState* p : parameters) {
    tensors.push_back({.param = p->target(),
                       .grad = p->gradient,
                       .momentum_buffer = p->states[0],
                       .first = p->step == 0,
                       .shadow = p->shadow()});
  }
  kernels::multi_tensor_sgd(tensors,
                            {.momentum = options.momentum,
                             .dampening = options.dampening,
                             .weight_decay = options.weight_decay,
                             .nesterov = options.nesterov,
                             .maximize = options.maximize},
                            scalars);
}

}  // namespace tessera::optim
