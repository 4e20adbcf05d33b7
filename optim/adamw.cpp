#include <tessera/optim/adamw.h>

#include <tessera/core/kernels/optim/multi_tensor.h>

namespace tessera::optim {

template <class Options>
std::span<const char* const> AdamFamily<Options>::state_names() const {
  static constexpr const char* kNames[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  return kNames;
}

template <class Options>
std::optional<double> AdamFamily<Options>::initial_state(size_t group, size_t index) const {
  if (index == 2 && !this->options(group).amsgrad) return std::nullopt;
  return 0;
}

template <class Options>
void AdamFamily<Options>::update(size_t group, std::span<ParameterState* const> parameters,
                                 const kernels::StepScalars& scalars) {
  const Options& options = this->options(group);
  std::vector<kernels::AdamTensors> tensors;
  tensors.reserve(parameters.size());
  for (const ParameterState* p : parameters) {
    tensors.push_back({.param = p->target(),
                       .grad = p->gradient,
                       .exp_avg = p->states[0],
                       .exp_avg_sq = p->states[1],
                       .max_exp_avg_sq = options.amsgrad ? p->states[2] : Tensor(),
                       .shadow = p->shadow()});
  }
  kernels::multi_tensor_adam(tensors,
                             {.beta1 = options.betas[0],
                              .beta2 = options.betas[1],
                              .eps = options.eps,
                              .weight_decay = options.weight_decay,
                              .decoupled = std::is_same_v<Options, AdamWOptions>,
                              .maximize = options.maximize},
                             scalars);
}

template class AdamFamily<AdamWOptions>;
template class AdamFamily<AdamOptions>;

}  // namespace tessera::optim
