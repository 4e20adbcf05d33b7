// The optimizers. Options, defaults and formulas are those of their rules, which
// core/kernels/optim/update_rules.h explains; optimizer.h describes what all have in common.
#pragma once

#include <tessera/optim/rule_optimizer.h>

namespace tessera::optim {

// State: momentum_buffer, where momentum is not 0.
class SGD : public RuleOptimizer<kernels::rules::SGD> {
 public:
  using RuleOptimizer::RuleOptimizer;
};
using SGDOptions = SGD::Options;

// State: exp_avg, exp_avg_sq, with amsgrad max_exp_avg_sq.
class AdamW : public RuleOptimizer<kernels::rules::AdamW> {
 public:
  using RuleOptimizer::RuleOptimizer;
};
using AdamWOptions = AdamW::Options;
class Adam : public RuleOptimizer<kernels::rules::Adam> {
 public:
  using RuleOptimizer::RuleOptimizer;
};
using AdamOptions = Adam::Options;

// State: sum.
class Adagrad : public RuleOptimizer<kernels::rules::Adagrad> {
 public:
  using RuleOptimizer::RuleOptimizer;
};
using AdagradOptions = Adagrad::Options;

// State: square_avg; grad_avg where centered; momentum_buffer where momentum is not 0.
class RMSprop : public RuleOptimizer<kernels::rules::RMSprop> {
 public:
  using RuleOptimizer::RuleOptimizer;
};
using RMSpropOptions = RMSprop::Options;

// State: exp_avg.
class Lion : public RuleOptimizer<kernels::rules::Lion> {
 public:
  using RuleOptimizer::RuleOptimizer;
};
using LionOptions = Lion::Options;

// State: square_avg, acc_delta.
class Adadelta : public RuleOptimizer<kernels::rules::Adadelta> {
 public:
  using RuleOptimizer::RuleOptimizer;
};
using AdadeltaOptions = Adadelta::Options;

// State: exp_avg, exp_inf.
class Adamax : public RuleOptimizer<kernels::rules::Adamax> {
 public:
  using RuleOptimizer::RuleOptimizer;
};
using AdamaxOptions = Adamax::Options;

// State: exp_avg, exp_avg_sq.
class NAdam : public RuleOptimizer<kernels::rules::NAdam> {
 public:
  using RuleOptimizer::RuleOptimizer;
};
using NAdamOptions = NAdam::Options;
class RAdam : public RuleOptimizer<kernels::rules::RAdam> {
 public:
  using RuleOptimizer::RuleOptimizer;
};
using RAdamOptions = RAdam::Options;

}  // namespace tessera::optim
