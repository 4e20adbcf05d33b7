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
    visitor("lr", lr), visitor("momentum", momentum), visitor("dampening", dampening);
    visitor("weight_decay", weight_decay), visitor("nesterov", nesterov);
    visitor("maximize", maximize), visitor("master_weights", master_weights);
  }
};

// State: momentum_buffer, where momentum is not 0.
class SGD : public TypedOptimizer<SGDOptions> {
 public:
  explicit SGD(const NamedTensors& parameters, const SGDOptions& options = {});
  explicit SGD(std::vector<ParameterGroup<SGDOptions>> groups);

 protected:
  std::string_view type_name() const override { return "SGD"; }
  std::span<const char* const> state_names() const override;
  std::optional<double> initial_state(size_t group, size_t index) const override;
  void update(size_t group, std::span<ParameterState* const> parameters,
              const kernels::StepScalars& scalars) override;
};

}  // namespace tessera::optim
