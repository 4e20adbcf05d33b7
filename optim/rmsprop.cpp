#include <tessera/optim/rmsprop.h>

#include <tessera/core/kernels/optim/multi_tensor.h>

namespace tessera::optim {

std::span<const char* const> RMSprop::state_names() const {
  static constexpr const char* kNames[] = {"square_avg", "grad_avg", "momentum_buffer"};
  return kNames;
}
std::optional<double> RMSprop::initial_state(size_t group, size_t index) const {
  if (index == 1 && !options(group).centered) return std::nullopt;
  if (index == 2 && options(group).momentum == 0) return std::nullopt;
  return 0;
}

void RMSprop::update(size_t group, std::span<ParameterState* const> parameters,
                     const kernels::StepScalars& scalars) {
  const RMSpropOptions& options = this->options(group);
  std::vector<kernels::RmspropTensors> tensors;
  tensors.reserve(parameters.size());
  for (const ParameterState* p : parameters) {
    tensors.push_back({.param = p->target(),
                       .grad = p->gradient,
                       .square_avg = p->states[0],
                       .grad_avg = options.centered ? p->states[1] : Tensor(),
                       .momentum_buffer = options.momentum != 0 ? p->states[2] : Tensor(),
                       .shadow = p->shadow()});
  }
  kernels::multi_tensor_rmsprop(tensors,
                                {.alpha = options.alpha,
                                 .eps = options.eps,
                                 .weight_decay = options.weight_decay,
                                 .momentum = options.momentum,
                                 .maximize = options.maximize},
                                scalars);
}

}  // namespace tessera::optim
