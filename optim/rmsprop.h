// RMSprop (Hinton's lecture 6e; centered: Graves 2013), as torch.optim.RMSprop.
#pragma once

#include <tessera/optim/optimizer.h>

namespace tessera::optim {

struct RMSpropOptions {
  double lr = 1e-2;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;  // divides by the standard deviation instead of the root mean square
  bool maximize = false;
  bool master_weights = true;
  void visit(auto&& visitor) {
    using enum OptionRange;
    visitor("lr", lr, kNotNegative);
    visitor("alpha", alpha, kNotNegative);
    visitor("eps", eps, kNotNegative);
    visitor("weight_decay", weight_decay, kNotNegative);
    visitor("momentum", momentum, kNotNegative);
    visitor("centered", centered);
    visitor("maximize", maximize);
    visitor("master_weights", master_weights);
  }
};

// State: square_avg; grad_avg where centered; momentum_buffer where momentum is not 0.
class RMSprop : public TypedOptimizer<RMSpropOptions> {
 public:
  explicit RMSprop(const NamedTensors& parameters, const RMSpropOptions& options = {})
      : TypedOptimizer("RMSprop", parameters, options) {}
  explicit RMSprop(std::vector<ParameterGroup<RMSpropOptions>> groups)
      : TypedOptimizer("RMSprop", groups) {}

 protected:
  std::span<const char* const> state_names() const override;
  std::optional<double> initial_state(size_t group, size_t index) const override;
  void update(size_t group, std::span<ParameterState* const> parameters,
              const kernels::StepScalars& scalars) override;
};

}  // namespace tessera::optim
