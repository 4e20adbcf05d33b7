#include <tessera/optim/lbfgs.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>

namespace tessera::optim {
namespace {

constexpr const char* kLbfgs = "LBFGS";

double product(const Tensor& a, const Tensor& b) { return dot(a, b).item(); }
double largest(const Tensor& x) { return max(abs(x)).item(); }

// The minimum of the cubic through two points with their slopes, inside of [low, high]; the middle
// where there is none (Nocedal, Wright, 3.59).
double cubic_minimum(double x1, double f1, double g1, double x2, double f2, double g2, double low,
                     double high) {
  const double d1 = g1 + g2 - 3 * (f1 - f2) / (x1 - x2);
  const double square = d1 * d1 - g1 * g2;
  if (!(square >= 0)) return (low + high) / 2;
  const double d2 = std::sqrt(square);
  const double place = x1 <= x2 ? x2 - (x2 - x1) * ((g2 + d2 - d1) / (g2 - g1 + 2 * d2))
                                : x1 - (x1 - x2) * ((g1 + d2 - d1) / (g1 - g2 + 2 * d2));
  // Of infinite losses the place is no number.
  const double above = low > place || std::isnan(place) ? low : place;
  return high < above ? high : above;
}

}  // namespace

// A place on the line that a search looks along.
struct LBFGS::Trial {
  double length;
  double loss;
  Tensor gradient;
  double slope;  // gradient . direction
};

LBFGS::LBFGS(const NamedTensors& parameters, const LbfgsOptions& options)
    : parameters_(parameters), options_(options), dtype_(kF32) {
  TS_CHECK(!parameters.empty(), kLbfgs, "needs at least one parameter");
  for (const auto& [name, parameter] : parameters) {
    TS_CHECK(parameter.defined(), kLbfgs, "the parameter '", name, "' is undefined");
    TS_CHECK_DTYPE(is_floating(parameter.dtype()) && !is_fp8(parameter.dtype()), kLbfgs, "'", name,
                   "' must be f64, f32, f16 or bf16; got ", parameter);
    TS_CHECK_DEVICE(parameter.device() == parameters[0].tensor.device(), kLbfgs,
                    "expects all parameters on one device; '", name, "' is ", parameter);
    TS_CHECK_AS(UnsupportedError, parameter.impl()->guard == nullptr, kLbfgs, "'", name,
                "' is a part of a parameter that ranks share; gather it, or use another optimizer");
    if (parameter.dtype() == kF64) dtype_ = kF64;
    numel_ += parameter.numel();
  }
  const auto check = [](bool right, const char* name, double value) {
    TS_CHECK(right, kLbfgs, "option '", name, "' is out of its range; got ", value);
  };
  check(options.lr >= 0, "lr", options.lr);
  check(options.max_iter > 0, "max_iter", static_cast<double>(options.max_iter));
  check(options.history_size > 0, "history_size", static_cast<double>(options.history_size));
  check(options.tolerance_grad >= 0, "tolerance_grad", options.tolerance_grad);
  check(options.tolerance_change >= 0, "tolerance_change", options.tolerance_change);
}

void LBFGS::zero_grad(bool set_to_none) {
  for (const auto& [name, parameter] : parameters_) parameter.zero_grad(set_to_none);
}

Tensor LBFGS::flat_gradient() const {
  TensorList parts;
  for (const auto& [name, parameter] : parameters_) {
    const Tensor gradient = parameter.grad();
    const TensorOptions like{.dtype = dtype_, .device = parameter.device()};
    parts.push_back(gradient.defined() ? to(reshape(detach(gradient), {parameter.numel()}), dtype_)
                                       : zeros({parameter.numel()}, like));
  }
  const Tensor flat = cat(parts, 0);  // a copy
  return options_.maximize ? neg(flat) : flat;
}

void LBFGS::move(double length, const Tensor& direction) const {
  int64_t offset = 0;
  for (const auto& [name, parameter] : parameters_) {
    const Tensor part = reshape(narrow(direction, 0, offset, parameter.numel()), parameter.shape());
    add_(parameter, part.dtype() == parameter.dtype() ? part : to(part, parameter.dtype()),
         Scalar(length));
    offset += parameter.numel();
  }
}

LBFGS::Evaluation LBFGS::evaluate(const std::function<Tensor()>& closure, Tensor* loss) {
  Tensor value;
  {
    const EnableGradGuard recording;
    value = closure();
  }
  TS_CHECK_SHAPE(value.defined() && value.numel() == 1, kLbfgs,
                 "the closure must return the loss, one element; got ", value);
  ++evaluations_;
  if (loss != nullptr) *loss = value;
  const double number = value.item();
  return {options_.maximize ? -number : number, flat_gradient()};
}

// -H g, from what the last step has shown of the curvature.
void LBFGS::choose_direction(const Tensor& gradient) {
  if (iterations_ == 1) {
    direction_ = neg(gradient);
    history_.clear();
    scale_ = 1;
    return;
  }
  const Tensor y = sub(gradient, previous_gradient_), s = mul(direction_, length_);
  const double ys = product(y, s);
  if (ys > 1e-10) {
    if (static_cast<int64_t>(history_.size()) >= options_.history_size) {
      history_.erase(history_.begin());
    }
    history_.push_back({y, s, 1 / ys});
    scale_ = ys / product(y, y);
  }
  std::vector<double> alpha(history_.size());
  Tensor q = neg(gradient);
  for (size_t i = history_.size(); i-- > 0;) {
    const Pair& pair = history_[i];
    alpha[i] = product(pair.step, q) * pair.rho;
    add_(q, pair.gradient_change, Scalar(-alpha[i]));
  }
  direction_ = mul(q, scale_);
  for (size_t i = 0; i < history_.size(); ++i) {
    const Pair& pair = history_[i];
    const double beta = product(pair.gradient_change, direction_) * pair.rho;
    add_(direction_, pair.step, Scalar(alpha[i] - beta));
  }
}

// From `start`, where the length is 0. Parameters are as before afterwards.
LBFGS::Trial LBFGS::search(const std::function<Tensor()>& closure, const Trial& start,
                           double length, int64_t max_trials, int64_t* calls) {
  constexpr double kDecrease = 1e-4, kCurvature = 0.9;
  const double reach = largest(direction_);
  TensorList kept;
  for (const auto& [name, parameter] : parameters_) kept.push_back(clone(detach(parameter)));
  const auto attempt = [&](double at) {
    move(at, direction_);
    const Evaluation there = evaluate(closure);
    ++*calls;
    for (size_t i = 0; i < kept.size(); ++i) copy_(parameters_[i].tensor, kept[i]);
    return Trial{at, there.loss, there.gradient, product(there.gradient, direction_)};
  };
  const auto too_high = [&](const Trial& trial) {
    return trial.loss > start.loss + kDecrease * trial.length * start.slope;
  };
  const auto flat_enough = [&](const Trial& trial) {
    return std::abs(trial.slope) <= -kCurvature * start.slope;
  };

  // Longer steps until two of them have a minimum between them.
  Trial before = start, now = attempt(length);
  std::array<Trial, 2> bracket = {start, now};
  int64_t tried = 0;
  bool bracketed = false;
  for (; tried < max_trials; ++tried) {
    if (too_high(now) || (tried > 1 && now.loss >= before.loss)) {
      bracketed = true;
    } else if (flat_enough(now)) {
      return now;
    } else {
      bracketed = now.slope >= 0;
    }
    if (bracketed) {
      bracket = {before, now};
      break;
    }
    const double next =
        cubic_minimum(before.length, before.loss, before.slope, now.length, now.loss, now.slope,
                      now.length + 0.01 * (now.length - before.length), now.length * 10);
    before = std::exchange(now, attempt(next));
  }
  if (!bracketed) bracket = {start, now};

  // Then between them.
  bool stuck = false;
  size_t low = bracket[0].loss <= bracket[1].loss ? 0 : 1;
  while (tried < max_trials) {
    const auto [first, last] = std::minmax(bracket[0].length, bracket[1].length);
    const double begin = first, end = last;
    if ((end - begin) * reach < options_.tolerance_change) break;
    double next = cubic_minimum(bracket[0].length, bracket[0].loss, bracket[0].slope,
                                bracket[1].length, bracket[1].loss, bracket[1].slope, begin, end);
    // Twice close to an end, or at it: a tenth of the way inside.
    const double margin = 0.1 * (end - begin);
    if (std::min(end - next, next - begin) < margin) {
      if (stuck || next >= end || next <= begin) {
        next = std::abs(next - end) < std::abs(next - begin) ? end - margin : begin + margin;
        stuck = false;
      } else {
        stuck = true;
      }
    } else {
      stuck = false;
    }
    now = attempt(next);
    ++tried;
    const size_t high = 1 - low;
    if (too_high(now) || now.loss >= bracket[low].loss) {
      bracket[high] = now;
      low = bracket[0].loss <= bracket[1].loss ? 0 : 1;
      continue;
    }
    const bool done = flat_enough(now);
    if (!done && now.slope * (bracket[high].length - bracket[low].length) >= 0) {
      bracket[high] = bracket[low];
    }
    bracket[low] = now;
    if (done) break;
  }
  return bracket[low];
}

Tensor LBFGS::step(const std::function<Tensor()>& closure) {
  const NoGradGuard no_grad;
  Tensor first_loss;
  Evaluation now = evaluate(closure, &first_loss);
  int64_t calls = 1;
  if (largest(now.gradient) <= options_.tolerance_grad) return first_loss;
  const int64_t max_eval = options_.max_eval.value_or(options_.max_iter * 5 / 4);
  for (int64_t iteration = 1; iteration <= options_.max_iter; ++iteration) {
    ++iterations_;
    choose_direction(now.gradient);
    previous_gradient_ = now.gradient;
    const double previous_loss = now.loss;
    length_ = options_.lr;
    if (iterations_ == 1) length_ *= std::min(1.0, 1 / sum(abs(now.gradient)).item());
    const double slope = product(now.gradient, direction_);
    if (slope > -options_.tolerance_change) break;  // no way down

    if (options_.line_search == LineSearch::kStrongWolfe) {
      int64_t trials = 0;
      const Trial found =
          search(closure, {0, now.loss, now.gradient, slope}, length_, max_eval - calls, &trials);
      length_ = found.length;
      now = {found.loss, found.gradient};
      move(length_, direction_);
      calls += trials;
    } else {
      move(length_, direction_);
      // What the last one has led to, the next step finds out.
      if (iteration != options_.max_iter) {
        now = evaluate(closure);
        ++calls;
      }
    }
    if (iteration == options_.max_iter || calls >= max_eval) break;
    if (largest(now.gradient) <= options_.tolerance_grad) break;
    if (largest(mul(direction_, length_)) <= options_.tolerance_change) break;
    if (std::abs(now.loss - previous_loss) < options_.tolerance_change) break;
  }
  return first_loss;
}

// ---- State -------------------------------------------------------------------------------------

StateDict LBFGS::state_dict() const {
  StateDict state;
  const auto number = [&](const char* name, double value) {
    state.set(name, tensor(std::vector<double>{value}, {}, kF64));
  };
  number("n_iter", static_cast<double>(iterations_));
  number("func_evals", static_cast<double>(evaluations_));
  if (iterations_ == 0) return state;
  number("t", length_);
  number("H_diag", scale_);
  state.set("d", direction_);
  state.set("prev_flat_grad", previous_gradient_);
  for (size_t i = 0; i < history_.size(); ++i) {
    const std::string suffix = "." + std::to_string(i);
    state.set("old_dirs" + suffix, history_[i].gradient_change);
    state.set("old_stps" + suffix, history_[i].step);
    number(("ro" + suffix).c_str(), history_[i].rho);
  }
  return state;
}

void LBFGS::load_state_dict(const StateDict& state) {
  const auto vector = [&](const std::string& name) {
    const Tensor& saved = state.at(name);
    TS_CHECK(saved.dim() == 1 && saved.numel() == numel_, kLbfgs, "the state's '", name,
             "' must have the ", numel_, " elements of all parameters; got ", saved);
    const NoGradGuard no_grad;
    return clone(to(to(detach(saved), dtype_), parameters_[0].tensor.device()));
  };
  const auto iterations = static_cast<int64_t>(state.scalar("n_iter"));
  const auto evaluations = static_cast<int64_t>(state.scalar("func_evals"));
  std::vector<Pair> history;
  Tensor direction, previous;
  double length = 0, scale = 1;
  if (iterations > 0) {
    length = state.scalar("t"), scale = state.scalar("H_diag");
    direction = vector("d"), previous = vector("prev_flat_grad");
    for (size_t i = 0;; ++i) {
      const std::string suffix = "." + std::to_string(i);
      if (!state.contains("old_dirs" + suffix)) break;
      history.push_back(
          {vector("old_dirs" + suffix), vector("old_stps" + suffix), state.scalar("ro" + suffix)});
    }
  }
  iterations_ = iterations, evaluations_ = evaluations;
  history_ = std::move(history);
  direction_ = direction, previous_gradient_ = previous;
  length_ = length, scale_ = scale;
}

}  // namespace tessera::optim
