#include <tessera/optim/rule_optimizer.h>

#include <tessera/core/kernels/optim/multi_tensor.h>

namespace tessera::optim {

namespace rules = kernels::rules;

template <class Rule>
std::span<const char* const> RuleOptimizer<Rule>::state_names() const {
  return Rule::kStates;
}

template <class Rule>
std::optional<double> RuleOptimizer<Rule>::initial_state(size_t group, size_t index) const {
  const Options& options = this->options(group);
  const int state = static_cast<int>(index);
  if (!rules::uses_state<Rule>(options, state)) return std::nullopt;
  return rules::initial_state<Rule>(options, state);
}

template <class Rule>
void RuleOptimizer<Rule>::update(size_t group, std::span<ParameterState* const> parameters,
                                 const kernels::StepScalars& scalars) {
  static_assert(Rule::kStates.size() <= kernels::kMaxRuleStates);
  const Options& options = this->options(group);
  std::vector<kernels::UpdateTensors> tensors;
  tensors.reserve(parameters.size());
  for (const ParameterState* p : parameters) {
    kernels::UpdateTensors& one = tensors.emplace_back();
    one.param = p->target();
    one.grad = p->gradient;
    one.model_copy = p->model_copy();
    if (this->state_dtype(group) == kBF16) one.rounding = this->rounding_of(*p);
    for (size_t i = 0; i < Rule::kStates.size(); ++i) {
      // One that an option has needed before is kept, and not used.
      if (rules::uses_state<Rule>(options, static_cast<int>(i))) one.states[i] = p->states[i];
    }
  }
  kernels::multi_tensor_update<Rule>(tensors, options, scalars);
}

#define TS_INSTANTIATE(name) template class RuleOptimizer<rules::name>;
TS_UPDATE_RULES(TS_INSTANTIATE)
#undef TS_INSTANTIATE

}  // namespace tessera::optim
