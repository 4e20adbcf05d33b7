#include <tessera/optim/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <tessera/core/factory/factory.h>

namespace tessera::optim {
namespace {

constexpr double kPi = std::numbers::pi;

double ratio(int64_t a, int64_t b) { return static_cast<double>(a) / static_cast<double>(b); }

// The factor of a linear warm-up: 0 at step 0, 1 from `warmup` on.
double warmup_factor(int64_t step, int64_t warmup) {
  return step < warmup ? ratio(step, warmup) : 1;
}

// From `high` at progress 0 to `low` at 1.
double cosine(double progress, double high, double low) {
  return low + (high - low) * 0.5 * (1 + std::cos(kPi * progress));
}

void check_steps(const char* where, const char* option, int64_t value, int64_t least) {
  TS_CHECK(value >= least, where, option, " must be at least ", least, "; got ", value,
           "; it counts steps");
}
// NaN is refused too.
void check_factor(const char* where, const char* option, double value) {
  TS_CHECK(value >= 0, where, option, " must not be negative; got ", value);
}
void check_positive(const char* where, const char* option, double value) {
  TS_CHECK(value > 0, where, option, " must be positive; got ", value);
}
void check_warmup(const char* where, int64_t warmup, int64_t total) {
  check_steps(where, "warmup", warmup, 0);
  TS_CHECK(total > 0 && total >= warmup, where,
           "total, the number of steps with the warm-up, must be positive and at least warmup (",
           warmup, "); got ", total);
}
void check_milestones(const char* where, const std::vector<int64_t>& milestones) {
  for (size_t i = 0; i < milestones.size(); ++i) {
    TS_CHECK(milestones[i] >= (i == 0 ? 0 : milestones[i - 1]), where,
             "milestones must ascend from 0; got ", milestones[i],
             i == 0 ? "" : " behind a larger one");
  }
}

}  // namespace

// ---- Rules -------------------------------------------------------------------------------------

double Constant::rate(int64_t step, double base) const {
  return step < total_iters ? base * factor : base;
}
void Constant::check() const {
  check_factor("ConstantSchedule", "factor", factor);
  check_steps("ConstantSchedule", "total_iters", total_iters, 0);
}

double Linear::rate(int64_t step, double base) const {
  const double progress = ratio(std::min(step, total_iters), total_iters);
  return base * (start_factor + (end_factor - start_factor) * progress);
}
void Linear::check() const {
  check_factor("LinearSchedule", "start_factor", start_factor);
  check_factor("LinearSchedule", "end_factor", end_factor);
  check_steps("LinearSchedule", "total_iters", total_iters, 1);
}

double Step::rate(int64_t step, double base) const {
  return base * std::pow(gamma, static_cast<double>(step / step_size));
}
void Step::check() const {
  check_steps("StepSchedule", "step_size", step_size, 1);
  check_factor("StepSchedule", "gamma", gamma);
}

double MultiStep::rate(int64_t step, double base) const {
  const auto reached = std::ranges::count_if(milestones, [step](int64_t m) { return m <= step; });
  return base * std::pow(gamma, static_cast<double>(reached));
}
void MultiStep::check() const {
  check_milestones("MultiStepSchedule", milestones);
  check_factor("MultiStepSchedule", "gamma", gamma);
}

double Exponential::rate(int64_t step, double base) const {
  return base * std::pow(gamma, static_cast<double>(step));
}
void Exponential::check() const { check_positive("ExponentialSchedule", "gamma", gamma); }

double Polynomial::rate(int64_t step, double base) const {
  if (step < warmup) return base * warmup_factor(step, warmup);
  if (step >= total) return min_lr;
  const double left = 1 - ratio(step - warmup, total - warmup);
  return (base - min_lr) * std::pow(left, power) + min_lr;
}
void Polynomial::check() const {
  check_warmup("PolynomialSchedule", warmup, total);
  check_factor("PolynomialSchedule", "power", power);
  check_factor("PolynomialSchedule", "min_lr", min_lr);
}

double Cosine::rate(int64_t step, double base) const {
  if (step < warmup) return base * warmup_factor(step, warmup);
  if (step >= total && !periodic) return min_lr;
  return cosine(ratio(step - warmup, std::max<int64_t>(1, total - warmup)), base, min_lr);
}
void Cosine::check() const {
  check_warmup("CosineSchedule", warmup, total);
  check_factor("CosineSchedule", "min_lr", min_lr);
}

double CosineRestarts::rate(int64_t step, double base) const {
  int64_t length = period, into = step;
  if (growth == 1) {
    into %= period;
  } else {
    while (into >= length) {
      into -= length;
      length *= growth;
    }
  }
  return cosine(ratio(into, length), base, min_lr);
}
void CosineRestarts::check() const {
  check_steps("CosineRestartsSchedule", "period", period, 1);
  TS_CHECK(growth >= 1, "CosineRestartsSchedule", "growth must be at least 1; got ", growth);
  check_factor("CosineRestartsSchedule", "min_lr", min_lr);
}

double CosineHardRestarts::rate(int64_t step, double base) const {
  if (step < warmup) return base * warmup_factor(step, warmup);
  if (step >= total) return 0;
  const double progress = ratio(step - warmup, std::max<int64_t>(1, total - warmup));
  return cosine(std::fmod(static_cast<double>(cycles) * progress, 1.0), base, 0);
}
void CosineHardRestarts::check() const {
  check_warmup("CosineHardRestartsSchedule", warmup, total);
  TS_CHECK(cycles >= 1, "CosineHardRestartsSchedule", "cycles must be at least 1; got ", cycles);
}

// Phases end at the steps where torch ends them: pct_start * total - 1, with three phases twice
// that minus one, and total - 1.
double OneCycle::at(int64_t step, double low, double high, double end) const {
  const double total_steps = static_cast<double>(total);
  const double rise_end = pct_start * total_steps - 1;
  const double fall_end = three_phase ? 2 * pct_start * total_steps - 2 : rise_end;
  const auto anneal = [this](double from, double to, double progress) {
    return linear ? (to - from) * progress + from : cosine(progress, from, to);
  };
  const double now = static_cast<double>(step);
  if (now <= rise_end) return rise_end == 0 ? high : anneal(low, high, now / rise_end);
  if (three_phase && now <= fall_end) {
    return anneal(high, low, (now - rise_end) / (fall_end - rise_end));
  }
  return anneal(three_phase ? low : high, end,
                std::min(1.0, (now - fall_end) / (total_steps - 1 - fall_end)));
}

double OneCycle::rate(int64_t step, double) const {
  const double initial = max_lr / div_factor;
  return at(step, initial, max_lr, initial / final_div_factor);
}
void OneCycle::check() const {
  check_steps("OneCycleSchedule", "total", total, 1);
  check_positive("OneCycleSchedule", "max_lr", max_lr);
  TS_CHECK(pct_start >= 0 && pct_start <= 1, "OneCycleSchedule",
           "pct_start is a part of the steps, in [0, 1]; got ", pct_start);
  check_positive("OneCycleSchedule", "div_factor", div_factor);
  check_positive("OneCycleSchedule", "final_div_factor", final_div_factor);
}

std::optional<double> OneCycle::momentum(int64_t step) const {
  if (!cycle_momentum) return std::nullopt;
  return at(step, max_momentum, base_momentum, max_momentum);
}

double InverseSqrt::rate(int64_t step, double base) const {
  if (step < warmup) return base * warmup_factor(step, warmup);
  const int64_t scale = timescale.value_or(warmup > 0 ? warmup : 10000);
  return base / std::sqrt(ratio(step - warmup + scale, scale));
}
void InverseSqrt::check() const {
  check_steps("InverseSqrtSchedule", "warmup", warmup, 0);
  if (timescale) check_steps("InverseSqrtSchedule", "timescale", *timescale, 1);
}

double Warmup::rate(int64_t step, double base) const { return base * warmup_factor(step, warmup); }
void Warmup::check() const { check_steps("WarmupSchedule", "warmup", warmup, 0); }

void Lambda::check() const {
  TS_CHECK(factor != nullptr, "LambdaSchedule", "needs a function of the step; got none");
}

double Sequential::rate(int64_t step, double base) const {
  const auto next = std::ranges::upper_bound(milestones, step);
  const auto index = static_cast<size_t>(next - milestones.begin());
  return rules[index].rate(index == 0 ? step : step - milestones[index - 1], base);
}
void Sequential::check() const {
  TS_CHECK(rules.size() == milestones.size() + 1, "SequentialSchedule", "needs one rule more than ",
           milestones.size(), " milestones; got ", rules.size());
  check_milestones("SequentialSchedule", milestones);
}

double Chained::rate(int64_t step, double base) const {
  for (const Rule& rule : rules) base = rule.rate(step, base);
  return base;
}
void Chained::check() const {
  TS_CHECK(!rules.empty(), "ChainedSchedule", "needs at least one rule; got none");
}

// ---- Schedules ---------------------------------------------------------------------------------

// The rates of now may be those that another schedule set, in this process or before a load.
Schedule::Schedule(Optimizer& optimizer) : optimizer_(&optimizer) {
  for (size_t i = 0; i < optimizer.num_groups(); ++i) {
    if (!optimizer.initial_lr(i)) optimizer.set_initial_lr(i, optimizer.lr(i));
    base_lrs_.push_back(*optimizer.initial_lr(i));
  }
}
Schedule::~Schedule() = default;

void Schedule::set_base_lr(double lr) {
  for (size_t i = 0; i < base_lrs_.size(); ++i) {
    optimizer_->set_initial_lr(i, lr);
    base_lrs_[i] = lr;
  }
}

void Schedule::apply() {
  const auto new_momentum = momentum(step_);
  for (size_t i = 0; i < base_lrs_.size(); ++i) {
    optimizer_->set_lr(i, rate(step_, base_lrs_[i]));
    if (new_momentum) optimizer_->set_momentum(i, *new_momentum);
  }
}

bool Schedule::step() {
  int64_t count = 1;
  if (gate_) {
    StepDecision decision = gate_();
    count = decision.count;
    if (!decision.run) {
      skip_reason_ = std::move(decision.reason);
      return false;
    }
  }
  skip_reason_.clear();
  if (count > 1) {
    count = std::clamp(last_step() - step_, int64_t{0}, count);
  } else {
    TS_CHECK(step_ <= last_step(), "schedule", "was made for ", last_step() + 1,
             " steps, and all were taken; make it with a larger total");
  }
  step_ += count;
  apply();
  return true;
}

namespace {

Tensor saved_rates(std::span<const double> rates) {
  return tensor(rates, {static_cast<int64_t>(rates.size())}, kF64);
}

std::vector<double> loaded_rates(const Tensor& saved, size_t num_groups) {
  std::vector<double> rates = saved.to_vector<double>();
  TS_CHECK(rates.size() == num_groups, "schedule", "the state has rates of ", rates.size(),
           " groups, the optimizer has ", num_groups);
  return rates;
}

}  // namespace

StateDict Schedule::state_dict() const {
  StateDict state;
  state.set("step", scalar_tensor(step_, kI64));
  state.set("base_lrs", saved_rates(base_lrs_));
  return state;
}

void Schedule::load_state_dict(const StateDict& state) {
  const std::vector<double> base_lrs = loaded_rates(state.at("base_lrs"), base_lrs_.size());
  step_ = state.at("step").item<int64_t>();
  base_lrs_ = base_lrs;
  apply();
}

// ---- Plateau -----------------------------------------------------------------------------------

PlateauSchedule::PlateauSchedule(Optimizer& optimizer, const PlateauOptions& options)
    : optimizer_(&optimizer),
      options_(options),
      best_(options.maximize ? -std::numeric_limits<double>::infinity()
                             : std::numeric_limits<double>::infinity()) {
  TS_CHECK(options.factor >= 0 && options.factor < 1, "PlateauSchedule",
           "factor must be in [0, 1); got ", options.factor);
  check_steps("PlateauSchedule", "patience", options.patience, 0);
  check_steps("PlateauSchedule", "cooldown", options.cooldown, 0);
  check_factor("PlateauSchedule", "threshold", options.threshold);
  check_factor("PlateauSchedule", "min_lr", options.min_lr);
  check_factor("PlateauSchedule", "eps", options.eps);
}

bool PlateauSchedule::improves(double metric) const {
  const double sign = options_.maximize ? 1 : -1;
  const double bound = options_.absolute_threshold ? best_ + sign * options_.threshold
                                                   : best_ * (1 + sign * options_.threshold);
  return options_.maximize ? metric > bound : metric < bound;
}

bool PlateauSchedule::step(double metric) {
  if (gate_) {
    StepDecision decision = gate_();
    if (!decision.run) {
      skip_reason_ = std::move(decision.reason);
      return false;
    }
  }
  skip_reason_.clear();
  if (improves(metric)) {
    best_ = metric;
    bad_steps_ = 0;
  } else {
    ++bad_steps_;
  }
  if (cooldown_left_ > 0) {
    --cooldown_left_;
    bad_steps_ = 0;
  }
  if (bad_steps_ <= options_.patience) return false;
  bool lowered = false;
  for (size_t i = 0; i < optimizer_->num_groups(); ++i) {
    const double old_lr = optimizer_->lr(i);
    const double new_lr = std::max(old_lr * options_.factor, options_.min_lr);
    if (old_lr - new_lr > options_.eps) {
      optimizer_->set_lr(i, new_lr);
      lowered = true;
    }
  }
  cooldown_left_ = options_.cooldown;
  bad_steps_ = 0;
  return lowered;
}

StateDict PlateauSchedule::state_dict() const {
  StateDict state;
  state.set("best", scalar_tensor(best_, kF64));
  state.set("bad_steps", scalar_tensor(bad_steps_, kI64));
  state.set("cooldown_left", scalar_tensor(cooldown_left_, kI64));
  std::vector<double> lrs;
  for (size_t i = 0; i < optimizer_->num_groups(); ++i) lrs.push_back(optimizer_->lr(i));
  state.set("lrs", saved_rates(lrs));
  return state;
}

void PlateauSchedule::load_state_dict(const StateDict& state) {
  const double best = state.scalar("best");
  const auto bad_steps = state.at("bad_steps").item<int64_t>();
  std::vector<double> lrs;  // states of before have none: the optimizer's tells them
  if (state.contains("lrs")) lrs = loaded_rates(state.at("lrs"), optimizer_->num_groups());
  cooldown_left_ = state.at("cooldown_left").item<int64_t>();
  best_ = best;
  bad_steps_ = bad_steps;
  for (size_t i = 0; i < lrs.size(); ++i) optimizer_->set_lr(i, lrs[i]);
}

}  // namespace tessera::optim
