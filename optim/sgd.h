// Stochastic gradient descent with momentum (Sutskever et al. 2013), as torch.optim.SGD.
#pragma once

#include <tessera/optim/optimizer.h>

namespace tessera::optim {

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;  // the first gradient enters the buffer undamped
  double weight_decay = 0;
  bool nesterov = false;  // needs momentum > 0 and no dampening
  bool maximize = false;
  bool master_weights = true;
  void visit(auto&& visitor) {
    using enum OptionRange;
    visitor("lr", lr, kNotNegative);
    visitor("momentum", momentum, kNotNegative);
    visitor("dampening", dampening);
    visitor("weight_decay", weight_decay, kNotNegative);
    visitor("nesterov", nesterov);
    visitor("maximize", maximize);
    visitor("master_weights", master_weights);
  }
  const char* contradiction() const {
    return nesterov && !(momentum > 0 && dampening == 0)
               ? "nesterov needs momentum > 0 and dampening 0"
               : nullptr;
  }
};

// State: momentum_buffer, where momentum is not 0.
class SGD : public TypedOptimizer<SGDOptions> {
 public:
  explicit SGD(const NamedTensors& parameters, const SGDOptions& options = {})
      : TypedOptimizer("SGD", parameters, options) {}
  explicit SGD(std::vector<ParameterGroup<SGDOptions>> groups) : TypedOptimizer("SGD", groups) {}

 protected:
  std::span<const char* const> state_names() const override;
  std::optional<double> initial_state(size_t group, size_t index) const override;
  void update(size_t group, std::span<ParameterState* const> parameters,
              const kernels::StepScalars& scalars) override;
};

}  // namespace tessera::optim
