#include <tessera/accelerate/step/loss_scaling.h>

#include <algorithm>
#include <cmath>

#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera {
namespace {

// Of a model's or an optimizer's parameters: the same answer on every rank.
bool holds_parts(const auto& record) {
  return std::ranges::any_of(record->parameters, [](const NamedTensor& named) {
    return tensor_placement(named.tensor) != nullptr;
  });
}

}  // namespace

void LossScaling::begin(distributed::Group& ranks) {
  scaler_.emplace(precision::GradScalerOptions{
      .init_scale = settings_.scaler_init_scale,
      .growth_factor = settings_.scaler_growth_factor,
      .backoff_factor = settings_.scaler_backoff_factor,
      .growth_interval = settings_.scaler_growth_interval,
      .enabled = settings_.scaler_enabled,
      .min_scale = settings_.scaler_min_scale,
      .hysteresis = settings_.scaler_hysteresis,
      .consecutive_hysteresis = settings_.scaler_consecutive_hysteresis,
      .on_device = settings_.scaler_on_device});
  // Where the finding stays on a GPU no host could agree: a rank that steps alone has a scale of
  // its own.
  if (settings_.scaler_on_device) return;
  // Reduced gradients are equal on all ranks; where they are not, or a rank has a part of them, the
  // ranks agree.
  scaler_->set_agreement([this, &ranks](const Tensor& found) {
    const bool differ = std::ranges::any_of(prepared_.models,
                                            [](const auto& record) {
                                              return record->local || holds_parts(record);
                                            }) ||
                        std::ranges::any_of(prepared_.optimizers,
                                            [](const auto& record) { return holds_parts(record); });
    if (!differ) return;
    ranks
        .all_reduce(found, distributed::ReduceOp::kMax,
                    {.channel = distributed::Channel::kControl, .tag = "found_inf"})
        .wait();
  });
}

void LossScaling::check_steps_are_known() const {
  TS_CHECK_AS(UnsupportedError, !is_on_device(), "optimizer_step_was_skipped",
              "whether a step was left out stays on the GPU with scaler_on_device (",
              settings_.scaler_on_device.origin.describe(), "); leave it false to know");
}

void LossScaling::unscale(optim::Optimizer& optimizer) {
  if (scaler_ && !scaler_->is_unscaled(optimizer)) scaler_->unscale(optimizer);
}

void LossScaling::note_norm(const TensorList& parameters, const Tensor& norm) {
  if (!scaler_ || !scaler_->enabled()) return;
  if (!is_on_device() && !std::isfinite(norm.item())) return;
  for (const Tensor& parameter : parameters) {
    const Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    finite_gradients_.insert_or_assign(gradient.impl(),
                                       FiniteGradient{gradient, gradient.version(), norm});
  }
}

// A norm by which every gradient of the optimizer is known to be finite; undefined where none is.
Tensor LossScaling::take_finite_norm(const optim::Optimizer& optimizer) {
  Tensor norm;
  bool all = true;
  for (size_t group = 0; group < optimizer.num_groups(); ++group) {
    for (const auto& [name, parameter] : optimizer.parameters(group)) {
      const Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      const auto found = finite_gradients_.find(gradient.impl());
      if (found == finite_gradients_.end() || found->second.version != gradient.version()) {
        all = false;
        continue;
      }
      norm = found->second.norm;
      finite_gradients_.erase(found);
    }
  }
  return all ? norm : Tensor();
}

std::string LossScaling::before_step(optim::Optimizer& optimizer) {
  if (!scaler_) return {};
  const Tensor norm = take_finite_norm(optimizer);
  if (norm.defined()) {
    unscale(optimizer);
    scaler_->note_norm(optimizer, norm);
  }
  return scaler_->before_step(optimizer);
}

void LossScaling::forget(optim::Optimizer& optimizer) {
  if (scaler_) scaler_->forget(optimizer);
}

void LossScaling::update() {
  if (!update_is_due()) return;
  const bool any_waits =
      std::ranges::any_of(prepared_.models, [](const auto& record) { return !record->consumed; });
  if (!any_waits) return scaler_->update();
  const double before = scaler_->loss_scale();
  scaler_->update();
  const double ratio = scaler_->loss_scale() / before;
  if (ratio == 1) return;
  std::unordered_set<TensorImpl*> seen;
  for (const auto& record : prepared_.models) {
    if (record->consumed) continue;
    kernels::multi_tensor_scale(gradients_of(record->parameters, seen), &ratio);
    record->kept.scale(ratio);
  }
}

}  // namespace tessera
