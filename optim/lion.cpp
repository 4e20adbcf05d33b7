#include <tessera/optim/lion.h>

#include <tessera/core/kernels/optim/multi_tensor.h>

namespace tessera::optim {

std::span<const char* const> Lion::state_names() const {
  static constexpr const char* kNames[] = {"exp_avg"};
  return kNames;
}
std::optional<double> Lion::initial_state(size_t, size_t) const { return 0; }

void Lion::update(size_t group, std::span<ParameterState* const> parameters,
                  const kernels::StepScalars& scalars) {
  const LionOptions& options = this->options(group);
  std::vector<kernels::LionTensors> tensors;
  tensors.reserve(parameters.size());
  for (const ParameterState* p : parameters) {
    tensors.push_back({.param = p->target(),
                       .grad = p->gradient,
                       .exp_avg = p->states[0],
                       .shadow = p->shadow()});
  }
  kernels::multi_tensor_lion(tensors,
                             {.beta1 = options.betas[0],
                              .beta2 = options.betas[1],
                              .weight_decay = options.weight_decay,
                              .maximize = options.maximize},
                             scalars);
}

}  // namespace tessera::optim
