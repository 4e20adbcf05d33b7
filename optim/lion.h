// Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2).
#pragma once

#include <tessera/optim/optimizer.h>

namespace tessera::optim {

struct LionOptions {
  double lr = 1e-4;  // about a tenth of AdamW's: every element moves by lr
  std::array<double, 2> betas = {0.9, 0.99};
  double weight_decay = 0;  // decoupled
  bool maximize = false;
  bool master_weights = true;
  void visit(auto&& visitor) {
    using enum OptionRange;
    visitor("lr", lr, kNotNegative);
    visitor("betas", betas, kBelowOne);
    visitor("weight_decay", weight_decay, kNotNegative);
    visitor("maximize", maximize);
    visitor("master_weights", master_weights);
  }
};

// State: exp_avg.
class Lion : public TypedOptimizer<LionOptions> {
 public:
  explicit Lion(const NamedTensors& parameters, const LionOptions& options = {})
      : TypedOptimizer("Lion", parameters, options) {}
  explicit Lion(std::vector<ParameterGroup<LionOptions>> groups) : TypedOptimizer("Lion", groups) {}

 protected:
  std::span<const char* const> state_names() const override;
  std::optional<double> initial_state(size_t group, size_t index) const override;
  void update(size_t group, std::span<ParameterState* const> parameters,
              const kernels::StepScalars& scalars) override;
};

}  // namespace tessera::optim
