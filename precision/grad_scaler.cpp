#include <tessera/precision/grad_scaler.h>

#include <cmath>
#include <limits>
#include <sstream>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::precision {
namespace {

constexpr const char* kGradScaler = "GradScaler";

// Powers of two pass unrounded, others become what f32 gradients were really multiplied by.
double as_f32(double value) { return static_cast<double>(static_cast<float>(value)); }

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options), scale_(as_f32(options.init_scale)), overflows_left_(options.hysteresis) {
  TS_CHECK_AS(ConfigError, scale_ > 0 && std::isfinite(scale_), kGradScaler,
              "init_scale must be positive and finite in f32; got ", options.init_scale);
  const bool stays = options.growth_factor == 1 && options.backoff_factor == 1;
  TS_CHECK_AS(ConfigError,
              stays || (options.growth_factor > 1 && std::isfinite(options.growth_factor)),
              kGradScaler, "growth_factor must be greater than 1; got ", options.growth_factor,
              "; for a scale that stays make backoff_factor 1, too");
  TS_CHECK_AS(ConfigError, stays || (options.backoff_factor > 0 && options.backoff_factor < 1),
              kGradScaler, "backoff_factor must lie between 0 and 1; got ", options.backoff_factor,
              "; for a scale that stays make growth_factor 1, too");
  TS_CHECK_AS(ConfigError, options.hysteresis >= 1, kGradScaler,
              "hysteresis must be at least 1; got ", options.hysteresis);
  TS_CHECK_AS(ConfigError, options.hysteresis == 1 || !options.on_device, kGradScaler,
              "on_device keeps no count of overflows; leave on_device out, or hysteresis at 1");
  TS_CHECK_AS(ConfigError, options.growth_interval > 0, kGradScaler,
              "growth_interval must be positive; got ", options.growth_interval);
  TS_CHECK_AS(ConfigError, options.min_scale >= 0 && options.min_scale <= scale_, kGradScaler,
              "min_scale must lie between 0 and init_scale; got ", options.min_scale);
}

Tensor GradScaler::scale(const Tensor& loss) const {
  if (!enabled()) return loss;
  const bool narrow = loss.dtype() == kF16 || loss.dtype() == kBF16;
  const Tensor wide = narrow ? to(loss, kF32) : loss;
  if (!options_.on_device || !loss.device().is_cuda()) return mul(wide, Scalar(scale_));
  if (!is_on_device()) begin_on_device(loss.device());
  // A copy: the scale changes before the graph of the loss is gone.
  const Tensor factor = kernels::convert(raw::select(on_device_, 0, kernels::kLossScale), kF32);
  return mul(wide, wide.dtype() == kF32 ? factor : kernels::convert(factor, wide.dtype()));
}

double GradScaler::loss_scale() const {
  read_device();
  return options_.enabled ? scale_ : 1;
}
int64_t GradScaler::growth_tracker() const {
  read_device();
  return growth_tracker_;
}
int64_t GradScaler::skipped_steps() const {
  read_device();
  return skipped_steps_;
}

// ---- On a device -------------------------------------------------------------------------------

void GradScaler::begin_on_device(const Device& device) const {
  TS_CHECK_AS(UnsupportedError, gpu::Capture::current() == nullptr, kGradScaler,
              "the first iteration makes the scale and cannot be captured; run one before");
  on_device_ = tensor({scale_, static_cast<double>(growth_tracker_),
                       static_cast<double>(skipped_steps_), 0.0},
                      kF64)
                   .to(device);
}

void GradScaler::read_device() const {
  if (!is_on_device()) return;
  const std::vector<double> values = on_device_.to_vector();
  scale_ = values[kernels::kLossScale];
  growth_tracker_ = static_cast<int64_t>(values[kernels::kGrowthTracker]);
  skipped_steps_ = static_cast<int64_t>(values[kernels::kSkippedSteps]);
  check_scale();
}

void GradScaler::check_scale() const {
  TS_CHECK(scale_ >= options_.min_scale && scale_ > 0, kGradScaler,
           "gradients are not finite even at a loss scale of ", scale_ / options_.backoff_factor,
           ", so they are NaN or infinite by themselves; look for the op with AnomalyMode, or "
           "lower the learning rate");
}

Tensor GradScaler::inverse_on_device() const {
  const NoGradGuard no_grad;
  return reciprocal(raw::select(on_device_, 0, kernels::kLossScale));
}

Tensor GradScaler::finish_step_on_device(Record& record) {
  TS_CHECK_AS(UnsupportedError, !agreement_, kGradScaler,
              "ranks agree through the host, and on_device keeps the finding from it; leave "
              "on_device out");
  record.stepped = true;
  const NoGradGuard no_grad;
  const Tensor found = record.found_on_device;
  // The steps left out, and what the next update() looks at.
  add_(raw::narrow(on_device_, 0, kernels::kSkippedSteps, 2), found);
  return found;
}

void GradScaler::fail_without_device_step() {
  TS_THROW(UnsupportedError, kGradScaler,
           "on_device needs an optimizer with scale_next_step(Tensor) and skip_next_step_where(); "
           "leave on_device out");
}

// ---- One iteration of one optimizer ------------------------------------------------------------

const GradScaler::Record* GradScaler::find(const Tensor& next_step) const {
  for (const Record& record : records_) {
    if (record.next_step.is(next_step)) return &record;
  }
  return nullptr;
}

void GradScaler::unscale(const Tensor& next_step) {
  const Record* known = find(next_step);
  TS_CHECK(known == nullptr, "unscale", "the gradients of this optimizer were ",
           known != nullptr && known->stepped ? "stepped with" : "unscaled",
           " since the last update(); unscale once for each step, and call update() after the "
           "steps of all optimizers");
  if (!is_on_device()) next_step.data_as<double>()[0] /= scale_;
  records_.push_back({.next_step = next_step});
}

bool GradScaler::forget(const Tensor& next_step) {
  const size_t forgotten = std::erase_if(records_, [&](const Record& record) {
    return record.next_step.is(next_step) && !record.stepped;
  });
  if (forgotten == 0) return false;
  next_step.data_as<double>()[0] = 1;
  return true;
}

void GradScaler::note_norm(const Tensor& next_step, const Tensor& norm) {
  auto* record = const_cast<Record*>(find(next_step));
  TS_CHECK(record != nullptr, "note_norm",
           "the gradients of this optimizer are still scaled; call unscale() first");
  TS_CHECK(!record->stepped, "note_norm", "the optimizer has stepped; note the norm before");
  record->judged = true;
  if (is_on_device()) {
    record->found_on_device = kernels::multi_tensor_found_nonfinite({&norm, 1});
  } else {
    record->found = !std::isfinite(norm.item<double>());
  }
}

GradScaler::Record& GradScaler::begin_step(const Tensor& next_step) {
  if (find(next_step) == nullptr) unscale(next_step);
  auto& record = *const_cast<Record*>(find(next_step));
  TS_CHECK(!record.stepped, "step",
           "this optimizer has stepped since the last update(); call update() once after the "
           "steps of all optimizers");
  return record;
}

void GradScaler::append_gradients(const NamedTensors& parameters, TensorList& gradients) {
  for (const auto& [name, tensor] : parameters) {
    if (Tensor gradient = tensor.grad(); gradient.defined()) {
      gradients.push_back(std::move(gradient));
    }
  }
}

// The largest magnitude: it is NaN where any element is, and sums of nothing can overflow.
void GradScaler::judge(Record& record, const TensorList& gradients) const {
  for (const Tensor& gradient : gradients) {
    TS_CHECK_AS(UnsupportedError,
                tensor_placement(gradient) == nullptr || (agreement_ && !is_on_device()), "step",
                "of ", gradient,
                " a rank sees its part alone, and ranks must skip a step together; "
                "set_agreement(), and leave on_device out");
  }
  record.judged = true;
  if (is_on_device()) {
    record.found_on_device = gradients.empty()
                                 ? zeros({1}, {.dtype = kF64, .device = on_device_.device()})
                                 : kernels::multi_tensor_found_nonfinite(gradients);
    return;
  }
  record.found = !gradients.empty() && !std::isfinite(kernels::multi_tensor_norm(
                                           gradients, std::numeric_limits<double>::infinity()));
}

std::string GradScaler::finish_step(Record& record) {
  if (agreement_) {
    const NoGradGuard no_grad;
    const Tensor found = tensor({record.found ? 1.0 : 0.0}, kF32);
    agreement_(found);
    record.found = found.item<float>() != 0;
  }
  record.stepped = true;
  if (!record.found) return {};
  ++skipped_steps_;
  PlainText<std::ostringstream> reason;
  reason << "a gradient is not finite at a loss scale of " << scale_;
  return reason.str();
}

void GradScaler::set_skip(const Tensor& next_step) { next_step.data_as<double>()[1] = 1; }

// ---- The next scale ----------------------------------------------------------------------------

bool GradScaler::update_is_due() const {
  for (const Record& record : records_) {
    if (record.stepped) return true;
  }
  return false;
}

void GradScaler::update() {
  if (!enabled()) return;
  TS_CHECK(!records_.empty(), "update",
           "no optimizer was unscaled or stepped since the last update(); call it once after the "
           "steps of all optimizers");
  bool judged = false, found = false;
  for (const Record& record : records_) {
    judged |= record.judged;
    found |= record.found;
    // Unscaled gradients that nobody stepped with go with their factor.
    if (!record.stepped) {
      record.next_step.data_as<double>()[0] = 1;
      record.next_step.data_as<double>()[1] = 0;
    }
  }
  records_.clear();
  if (!judged) return;
  if (is_on_device()) {
    return kernels::update_loss_scale(on_device_, {.growth_factor = options_.growth_factor,
                                                   .backoff_factor = options_.backoff_factor,
                                                   .growth_interval = options_.growth_interval});
  }
  if (found) {
    growth_tracker_ = 0;
    if (overflows_left_ > 1) {
      --overflows_left_;
      return;
    }
    scale_ = as_f32(scale_ * options_.backoff_factor);
    check_scale();
    return;
  }
  if (options_.consecutive_hysteresis) overflows_left_ = options_.hysteresis;
  if (++growth_tracker_ < options_.growth_interval) return;
  growth_tracker_ = 0;
  overflows_left_ = options_.hysteresis;
  const double grown = as_f32(scale_ * options_.growth_factor);
  if (std::isfinite(grown)) scale_ = grown;
}

// ---- State -------------------------------------------------------------------------------------

StateDict GradScaler::state_dict() const {
  TS_CHECK(!update_is_due(), "state_dict",
           "the scaler is in the middle of an iteration; call update() before saving");
  read_device();
  StateDict state;
  state.set("scale", scalar_tensor(scale_, kF64));
  state.set("growth_tracker", scalar_tensor(growth_tracker_, kI64));
  state.set("skipped_steps", scalar_tensor(skipped_steps_, kI64));
  state.set("growth_factor", scalar_tensor(options_.growth_factor, kF64));
  state.set("backoff_factor", scalar_tensor(options_.backoff_factor, kF64));
  state.set("growth_interval", scalar_tensor(options_.growth_interval, kI64));
  state.set("min_scale", scalar_tensor(options_.min_scale, kF64));
  if (options_.hysteresis > 1) {
    state.set("hysteresis", scalar_tensor(options_.hysteresis, kI64));
    state.set("overflows_left", scalar_tensor(overflows_left_, kI64));
  }
  return state;
}

void GradScaler::load_state_dict(const StateDict& state) {
  TS_CHECK(!update_is_due(), "load_state_dict",
           "the scaler is in the middle of an iteration; call update() before loading");
  GradScalerOptions options = options_;
  options.init_scale = state.scalar("scale");
  options.growth_factor = state.scalar("growth_factor");
  options.backoff_factor = state.scalar("backoff_factor");
  options.growth_interval = state.at("growth_interval").item<int64_t>();
  options.min_scale = state.scalar("min_scale");
  options.hysteresis =
      state.contains("hysteresis") ? state.at("hysteresis").item<int64_t>() : int64_t{1};
  const int64_t left = state.contains("overflows_left") ? state.at("overflows_left").item<int64_t>()
                                                        : options.hysteresis;
  TS_CHECK(left >= 1 && left <= options.hysteresis, "load_state_dict",
           "overflows_left must lie between 1 and the hysteresis ", options.hysteresis, "; got ",
           left);
  const int64_t tracker = state.at("growth_tracker").item<int64_t>();
  const int64_t skipped = state.at("skipped_steps").item<int64_t>();
  TS_CHECK(tracker >= 0 && skipped >= 0, "load_state_dict",
           "counts must not be negative; got growth_tracker ", tracker, ", skipped_steps ",
           skipped);
  const GradScaler checked(options);  // throws for constants that cannot work
  scale_ = checked.scale_;
  options.init_scale = options_.init_scale;
  options_ = options;
  growth_tracker_ = tracker;
  skipped_steps_ = skipped;
  overflows_left_ = left;
  records_.clear();
  if (is_on_device()) {  // where graphs read it
    kernels::copy_into(
        on_device_,
        tensor({scale_, static_cast<double>(tracker), static_cast<double>(skipped), 0.0}, kF64));
  }
}

}  // namespace tessera::precision
