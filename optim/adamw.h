// Adam (Kingma, Ba 2014) and AdamW (Loshchilov, Hutter 2017), as torch.optim has them.
#pragma once

#include <tessera/optim/optimizer.h>

namespace tessera::optim {

// AdamW: the parameter shrinks by lr * weight_decay, apart from the gradient.
struct AdamWOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;  // divides by the largest second moment seen (Reddi et al. 2018)
  bool maximize = false;
  bool master_weights = true;
  void visit(auto&& visitor) {
    using enum OptionRange;
    visitor("lr", lr, kNotNegative);
    visitor("betas", betas, kBelowOne);
    visitor("eps", eps, kNotNegative);
    visitor("weight_decay", weight_decay, kNotNegative);
    visitor("amsgrad", amsgrad);
    visitor("maximize", maximize);
    visitor("master_weights", master_weights);
  }
};
// Adam: weight_decay * parameter is added to the gradient.
struct AdamOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  bool master_weights = true;
  void visit(auto&& visitor) {
    using enum OptionRange;
    visitor("lr", lr, kNotNegative);
    visitor("betas", betas, kBelowOne);
    visitor("eps", eps, kNotNegative);
    visitor("weight_decay", weight_decay, kNotNegative);
    visitor("amsgrad", amsgrad);
    visitor("maximize", maximize);
    visitor("master_weights", master_weights);
  }
};

template <class Options>
class AdamFamily : public TypedOptimizer<Options> {
 public:
  using TypedOptimizer<Options>::TypedOptimizer;

 protected:
  using typename Optimizer::ParameterState;
  std::span<const char* const> state_names() const override;
  std::optional<double> initial_state(size_t group, size_t index) const override;
  void update(size_t group, std::span<ParameterState* const> parameters,
              const kernels::StepScalars& scalars) override;
};

// State: exp_avg, exp_avg_sq, with amsgrad max_exp_avg_sq.
class AdamW : public AdamFamily<AdamWOptions> {
 public:
  explicit AdamW(const NamedTensors& parameters, const AdamWOptions& options = {})
      : AdamFamily("AdamW", parameters, options) {}
  explicit AdamW(std::vector<ParameterGroup<AdamWOptions>> groups) : AdamFamily("AdamW", groups) {}
};
class Adam : public AdamFamily<AdamOptions> {
 public:
  explicit Adam(const NamedTensors& parameters, const AdamOptions& options = {})
      : AdamFamily("Adam", parameters, options) {}
  explicit Adam(std::vector<ParameterGroup<AdamOptions>> groups) : AdamFamily("Adam", groups) {}
};

}  // namespace tessera::optim
