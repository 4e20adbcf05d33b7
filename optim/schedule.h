// Learning rates as functions of the step.
//
//     optim::CosineSchedule schedule(optimizer, {.warmup = 100, .total = 2000, .min_lr = 1e-4});
//     for (...) { ...; optimizer.step(); schedule.step(); }
//
// A rule is a struct of options with `rate(step, base)`: the rate at `step` (0 is the first) of a
// group whose base rate is `base`. Rules are closed forms: the rate depends on the step alone, so
// that a run resumes exactly and a schedule can be plotted beforehand. Values are those of
// torch.optim.lr_scheduler and of transformers' get_*_schedule_with_warmup. For your own rule use
// LambdaSchedule, or any struct with `rate`, and `check()` if its options can be invalid; it is
// called when the rule enters a schedule. A missing number (a `total`, a `gamma`), negative sizes
// and milestones out of order are a ValueError there.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/optim/optimizer.h>

namespace tessera::optim {

// ---- Rules -------------------------------------------------------------------------------------

// base * factor for the first total_iters steps, then base. torch: ConstantLR.
struct Constant {
  double factor = 1.0 / 3;
  int64_t total_iters = 5;
  double rate(int64_t step, double base) const;
  void check() const;
};
// The factor goes from start to end in total_iters steps. torch: LinearLR.
struct Linear {
  double start_factor = 1.0 / 3;
  double end_factor = 1;
  int64_t total_iters = 5;
  double rate(int64_t step, double base) const;
  void check() const;
};
// base * gamma^(step / step_size). torch: StepLR.
struct Step {
  int64_t step_size;
  double gamma = 0.1;
  double rate(int64_t step, double base) const;
  void check() const;
};
// One factor gamma for each milestone reached. torch: MultiStepLR.
struct MultiStep {
  std::vector<int64_t> milestones;  // ascending
  double gamma = 0.1;
  double rate(int64_t step, double base) const;
  void check() const;
};
// base * gamma^step. torch: ExponentialLR.
struct Exponential {
  double gamma;
  double rate(int64_t step, double base) const;
  void check() const;
};
// Linear warm-up from 0, then (base - min_lr) * (1 - progress)^power + min_lr until `total`.
// torch: PolynomialLR(total_iters); transformers: polynomial_decay (lr_end), and with power 1
// linear_schedule_with_warmup.
struct Polynomial {
  int64_t warmup = 0;
  int64_t total = 5;
  double power = 1;
  double min_lr = 0;
  double rate(int64_t step, double base) const;
  void check() const;
};
// Linear warm-up from 0, then half a cosine down to min_lr at step `total`, where it stays.
// Loshchilov, Hutter 2016. periodic: it rises again after `total`, as torch's CosineAnnealingLR and
// transformers' cosine schedules do.
struct Cosine {
  int64_t warmup = 0;
  int64_t total;
  double min_lr = 0;
  bool periodic = false;
  double rate(int64_t step, double base) const;
  void check() const;
};
// Cosines that start again: the first takes `period` steps, each next one `growth` times as many.
// torch: CosineAnnealingWarmRestarts(T_0, T_mult, eta_min).
struct CosineRestarts {
  int64_t period;
  int64_t growth = 1;
  double min_lr = 0;
  double rate(int64_t step, double base) const;
  void check() const;
};
// Linear warm-up, then `cycles` cosines from base to 0 until `total`, then 0.
// transformers: cosine_with_hard_restarts.
struct CosineHardRestarts {
  int64_t warmup = 0;
  int64_t total;
  int64_t cycles = 1;
  double rate(int64_t step, double base) const;
  void check() const;
};
// Smith, Topin 2017: up to max_lr, down to almost nothing; momentum moves in the opposite
// direction, if the optimizer has one. torch: OneCycleLR. The groups' own rates are not used.
struct OneCycle {
  double max_lr;
  int64_t total;
  double pct_start = 0.3;  // fraction of the steps in which the rate rises
  bool linear = false;     // straight lines instead of cosines
  bool cycle_momentum = true;
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  double div_factor = 25;         // begins at max_lr / div_factor
  double final_div_factor = 1e4;  // ends at the initial rate / final_div_factor
  bool three_phase = false;       // down to the initial rate first, then to the final one
  double rate(int64_t step, double base) const;
  void check() const;
  std::optional<double> momentum(int64_t step) const;

 private:
  double at(int64_t step, double low, double high, double end) const;
};
// Linear warm-up, then base * sqrt(timescale / (step - warmup + timescale)); timescale defaults to
// warmup (10000 without one). transformers: inverse_sqrt; Zhai et al. 2022.
struct InverseSqrt {
  int64_t warmup = 0;
  std::optional<int64_t> timescale = {};
  double rate(int64_t step, double base) const;
  void check() const;
};
// Linear warm-up from 0, then constant. transformers: constant_schedule_with_warmup.
struct Warmup {
  int64_t warmup;
  double rate(int64_t step, double base) const;
  void check() const;
};
// base * factor(step). torch: LambdaLR.
struct Lambda {
  std::function<double(int64_t step)> factor;
  double rate(int64_t step, double base) const { return base * factor(step); }
  void check() const;
};

namespace detail {

template <class T>
const T& checked_rule(const T& rule) {
  if constexpr (requires { rule.check(); }) rule.check();
  return rule;
}

}  // namespace detail

// A type-erased rule, by value.
class Rule {
 public:
  template <class T>
  requires requires(const T& rule) { rule.rate(int64_t{}, double{}); }
  Rule(const T& rule)
      : rate_([rule = detail::checked_rule(rule)](int64_t step, double base) {
          return rule.rate(step, base);
        }) {}
  double rate(int64_t step, double base) const { return rate_(step, base); }

 private:
  std::function<double(int64_t, double)> rate_;
};
// rules[i] from milestones[i - 1] on, counting from there. torch: SequentialLR.
struct Sequential {
  std::vector<Rule> rules;
  std::vector<int64_t> milestones;  // one fewer, ascending
  double rate(int64_t step, double base) const;
  void check() const;
};
// Each rule's base is the rate of the one before. torch: ChainedScheduler, for rules that scale.
struct Chained {
  std::vector<Rule> rules;
  double rate(int64_t step, double base) const;
  void check() const;
};

// ---- Schedules ---------------------------------------------------------------------------------

// The base of a group is its Optimizer::initial_lr(): every schedule of the group has the same
// base, whatever earlier schedules have set and also after a load.
class Schedule {
 public:
  virtual ~Schedule();
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  // Goes to the next step and sets the rates of the optimizer's groups. Returns false if the gate
  // skipped it; skip_reason() gives the reason. A rule with an end (OneCycle) takes `total` steps;
  // one more is a ValueError that changes nothing. A gate may ask for several steps at once, which
  // stop at the end.
  bool step();
  void set_step_gate(StepGate gate) { gate_ = std::move(gate); }
  const std::string& skip_reason() const { return skip_reason_; }
  int64_t current_step() const { return step_; }
  double lr(size_t group = 0) const { return optimizer_->lr(group); }
  const Optimizer& optimizer() const { return *optimizer_; }

  // The step and the groups' base rates; the options of the rule are not included.
  virtual StateDict state_dict() const;
  // Also sets the rates. Throws ValueError.
  virtual void load_state_dict(const StateDict& state);

 protected:
  explicit Schedule(Optimizer& optimizer);
  virtual double rate(int64_t step, double base) const = 0;
  virtual std::optional<double> momentum(int64_t) const { return std::nullopt; }
  // The last schedule with a rate of its own.
  virtual int64_t last_step() const { return std::numeric_limits<int64_t>::max(); }
  // Sets the bases of all groups, for this schedule and later ones.
  void set_base_lr(double lr);
  void apply();

 private:
  Optimizer* optimizer_;
  std::vector<double> base_lrs_;
  int64_t step_ = 0;
  StepGate gate_;
  std::string skip_reason_;
};

// The schedule of a rule; the optimizer must outlive it. Sets the rates of step 0 when it is made.
template <class R>
class RuleSchedule : public Schedule {
 public:
  RuleSchedule(Optimizer& optimizer, R rule) : Schedule(optimizer), rule_(std::move(rule)) {
    detail::checked_rule(rule_);
    if constexpr (std::is_same_v<R, OneCycle>) set_base_lr(rule_.rate(0, 0));  // as torch does
    apply();
  }
  const R& rule() const { return rule_; }

 protected:
  double rate(int64_t step, double base) const override { return rule_.rate(step, base); }
  std::optional<double> momentum(int64_t step) const override {
    if constexpr (requires { rule_.momentum(step); }) return rule_.momentum(step);
    return std::nullopt;
  }
  int64_t last_step() const override {
    if constexpr (std::is_same_v<R, OneCycle>) return rule_.total - 1;
    return Schedule::last_step();
  }

 private:
  R rule_;
};
using ConstantSchedule = RuleSchedule<Constant>;
using LinearSchedule = RuleSchedule<Linear>;
using StepSchedule = RuleSchedule<Step>;
using MultiStepSchedule = RuleSchedule<MultiStep>;
using ExponentialSchedule = RuleSchedule<Exponential>;
using PolynomialSchedule = RuleSchedule<Polynomial>;
using CosineSchedule = RuleSchedule<Cosine>;
using CosineRestartsSchedule = RuleSchedule<CosineRestarts>;
using CosineHardRestartsSchedule = RuleSchedule<CosineHardRestarts>;
using OneCycleSchedule = RuleSchedule<OneCycle>;
using InverseSqrtSchedule = RuleSchedule<InverseSqrt>;
using WarmupSchedule = RuleSchedule<Warmup>;
using LambdaSchedule = RuleSchedule<Lambda>;
using SequentialSchedule = RuleSchedule<Sequential>;
using ChainedSchedule = RuleSchedule<Chained>;

// Lowers the rate when a metric no longer improves. torch: ReduceLROnPlateau.
struct PlateauOptions {
  bool maximize = false;  // improvement means a larger metric
  double factor = 0.1;
  int64_t patience = 10;  // steps without improvement that are tolerated
  double threshold = 1e-4;
  bool absolute_threshold = false;  // in the metric's unit instead of relative to the best
  int64_t cooldown = 0;             // steps after a reduction in which none is counted
  double min_lr = 0;
  double eps = 1e-8;  // smaller changes of the rate are not made
};
class PlateauSchedule {
 public:
  PlateauSchedule(Optimizer& optimizer, const PlateauOptions& options = {});
  // Returns true if the rate was lowered. NaN is not an improvement. A metric that the gate rejects
  // is ignored; skip_reason() gives the reason.
  bool step(double metric);
  void set_step_gate(StepGate gate) { gate_ = std::move(gate); }
  const std::string& skip_reason() const { return skip_reason_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  double lr(size_t group = 0) const { return optimizer_->lr(group); }
  double best() const { return best_; }
  // The best metric, the counts and the rates of the groups.
  StateDict state_dict() const;
  // Also sets the rates, where the state has them. Throws ValueError.
  void load_state_dict(const StateDict& state);

 private:
  bool improves(double metric) const;

  Optimizer* optimizer_;
  PlateauOptions options_;
  double best_;
  int64_t bad_steps_ = 0;
  int64_t cooldown_left_ = 0;
  StepGate gate_;
  std::string skip_reason_;
};

}  // namespace tessera::optim
