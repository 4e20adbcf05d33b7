// The optimizer of a rule (core/kernels/optim/update_rules.h), from which it has options, states
// and step. It is compiled for the rules of TS_UPDATE_RULES.
#pragma once

#include <tessera/core/kernels/optim/update_rules.h>
#include <tessera/optim/optimizer.h>

namespace tessera::optim {

template <class UpdateRule>
class RuleOptimizer : public TypedOptimizer<typename UpdateRule::Options> {
 public:
  using Rule = UpdateRule;
  using Options = typename UpdateRule::Options;
  static constexpr const char* kName = Rule::kName;
  explicit RuleOptimizer(const NamedTensors& parameters, const Options& options = {})
      : TypedOptimizer<Options>(kName, parameters, options) {}
  explicit RuleOptimizer(const std::vector<ParameterGroup<Options>>& groups)
      : TypedOptimizer<Options>(kName, groups) {}

 protected:
  using typename Optimizer::ParameterState;
  std::span<const char* const> state_names() const override;
  std::optional<double> initial_state(size_t group, size_t index) const override;
  void update(size_t group, std::span<ParameterState* const> parameters,
              const kernels::StepScalars& scalars) override;
};

}  // namespace tessera::optim
