// Adagrad (Duchi, Hazan, Singer 2011), as torch.optim.Adagrad.
#pragma once

#include <tessera/optim/optimizer.h>

namespace tessera::optim {

struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;  // lr / (1 + (step - 1) * lr_decay)
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
  bool maximize = false;
  bool master_weights = true;
  void visit(auto&& visitor) {
    using enum OptionRange;
    visitor("lr", lr, kNotNegative);
    visitor("lr_decay", lr_decay, kNotNegative);
    visitor("weight_decay", weight_decay, kNotNegative);
    visitor("initial_accumulator_value", initial_accumulator_value, kNotNegative);
    visitor("eps", eps, kNotNegative);
    visitor("maximize", maximize);
    visitor("master_weights", master_weights);
  }
};

// State: sum.
class Adagrad : public TypedOptimizer<AdagradOptions> {
 public:
  explicit Adagrad(const NamedTensors& parameters, const AdagradOptions& options = {})
      : TypedOptimizer("Adagrad", parameters, options) {}
  explicit Adagrad(std::vector<ParameterGroup<AdagradOptions>> groups)
      : TypedOptimizer("Adagrad", groups) {}

 protected:
  std::span<const char* const> state_names() const override;
  std::optional<double> initial_state(size_t group, size_t index) const override;
  void update(size_t group, std::span<ParameterState* const> parameters,
              const kernels::StepScalars& scalars) override;
};

}  // namespace tessera::optim
