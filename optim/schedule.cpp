#include <tessera/optim/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <tessera/core/factory.h>

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

}  // namespace

// ---- Rules -------------------------------------------------------------------------------------

double Constant::rate(int64_t step, double base) const {
  return step < total_iters ? base * factor : base;
}

double Linear::rate(int64_t step, double base) const {
  const double progress = ratio(std::min(step, total_iters), total_iters);
  return base * (start_factor + (end_factor - start_factor) * progress);
}

double Step::rate(int64_t step, double base) const {
  return base * std::pow(gamma, static_cast<double>(step / step_size));
}

double MultiStep::rate(int64_t step, double base) const {
  const auto reached = std::ranges::count_if(milestones, [step](int64_t m) { return m <= step; });
  return base * std::pow(gamma, static_cast<double>(reached));
}

double Exponential::rate(int64_t step, double base) const {
  return base * std::pow(gamma, static_cast<double>(step));
}

double Polynomial::rate(int64_t step, double base) const {
  if (step < warmup) return base * warmup_factor(step, warmup);
  if (step >= total) return min_lr;
  const double left = 1 - ratio(step - warmup, total - warmup);
  return (base - min_lr) * std::pow(left, power) + min_lr;
}

double Cosine::rate(int64_t step, double base) const {
  if (step < warmup) return base * warmup_factor(step, warmup);
  if (step >= total && !periodic) return min_lr;
  return cosine(ratio(step - warmup, std::max<int64_t>(1, total - warmup)), base, min_lr);
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

double CosineHardRestarts::rate(int64_t step, double base) const {
  if (step < warmup) return base * warmup_factor(step, warmup);
  if (step >= total) return 0;
  const double progress = ratio(step - warmup, std::max<int64_t>(1, total - warmup));
  return cosine(std::fmod(static_cast<double>(cycles) * progress, 1.0), base, 0);
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
  if (now <= rise_end) return anneal(low, high, now / rise_end);
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

std::optional<double> OneCycle::momentum(int64_t step) const {
  if (!cycle_momentum) return std::nullopt;
  return at(step, max_momentum, base_momentum, max_momentum);
}

double InverseSqrt::rate(int64_t step, double base) const {
  if (step < warmup) return base * warmup_factor(step, warmup);
  const int64_t scale = timescale.value_or(warmup > 0 ? warmup : 10000);
  return base / std::sqrt(ratio(step - warmup + scale, scale));
}

double Warmup::rate(int64_t step, double base) const { return base * warmup_factor(step, warmup); }

double Sequential::rate(int64_t step, double base) const {
  TS_CHECK(rules.size() == milestones.size() + 1, "Sequential", "needs one rule more than ",
           milestones.size(), " milestones; got ", rules.size());
  const auto next = std::ranges::upper_bound(milestones, step);
  const auto index = static_cast<size_t>(next - milestones.begin());
  return rules[index].rate(index == 0 ? step : step - milestones[index - 1], base);
}

double Chained::rate(int64_t step, double base) const {
  for (const Rule& rule : rules) base = rule.rate(step, base);
  return base;
}

// ---- Schedules ---------------------------------------------------------------------------------

Schedule::Schedule(Optimizer& optimizer) : optimizer_(&optimizer) {
  for (size_t i = 0; i < optimizer.num_groups(); ++i) base_lrs_.push_back(optimizer.lr(i));
}
Schedule::~Schedule() = default;

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
  if (count > 1) count = std::clamp(last_step() - step_, int64_t{0}, count);
  step_ += count;
  apply();
  return true;
}

StateDict Schedule::state_dict() const {
  StateDict state;
  state.set("step", scalar_tensor(step_, kI64));
  state.set("base_lrs", tensor(std::span<const double>(base_lrs_),
                               {static_cast<int64_t>(base_lrs_.size())}, kF64));
  return state;
}

void Schedule::load_state_dict(const StateDict& state) {
  const auto base_lrs = state.at("base_lrs").to_vector<double>();
  TS_CHECK(base_lrs.size() == base_lrs_.size(), "schedule", "the state has rates of ",
           base_lrs.size(), " groups, the optimizer has ", base_lrs_.size());
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
  TS_CHECK(options.factor < 1, "PlateauSchedule", "factor must be below 1; got ", options.factor);
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
  return state;
}

void PlateauSchedule::load_state_dict(const StateDict& state) {
  const double best = state.scalar("best");
  const auto bad_steps = state.at("bad_steps").item<int64_t>();
  cooldown_left_ = state.at("cooldown_left").item<int64_t>();
  best_ = best;
  bad_steps_ = bad_steps;
}

}  // namespace tessera::optim
