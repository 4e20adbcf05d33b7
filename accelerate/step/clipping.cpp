#include <tessera/accelerate/step/clipping.h>

#include <algorithm>
#include <limits>
#include <unordered_set>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/optim/clip.h>

namespace tessera {

// Whether the parameters' models are all at the end of their windows.
bool Clipping::is_at_boundary(const TensorList& parameters) const {
  std::unordered_set<TensorImpl*> tensors;
  for (const Tensor& tensor : parameters) tensors.insert(tensor.impl());
  bool known = false;
  for (const auto& record : prepared_.models) {
    for (const auto& [name, tensor] : record->parameters) {
      if (!tensors.contains(tensor.impl())) continue;
      if (!record->window.is_boundary()) return false;
      known = true;
      break;
    }
  }
  return known || prepared_.sync_gradients;
}

// The prepared optimizers that have exactly these gradients, each one once: what scales their next
// steps scales nothing else. None where there are no such optimizers.
Clipping::Owners Clipping::owners_of(const TensorList& parameters) const {
  std::unordered_set<const TensorImpl*> left;
  for (const Tensor& parameter : parameters) {
    if (parameter.grad().defined()) left.insert(parameter.impl());
  }
  Owners owners;
  for (const auto& record : prepared_.optimizers) {
    TensorList own;
    for (const auto& [name, parameter] : record->parameters) {
      if (parameter.grad().defined()) own.push_back(parameter);
    }
    const auto is_left = [&](const Tensor& parameter) { return left.contains(parameter.impl()); };
    if (own.empty() || !std::ranges::all_of(own, is_left)) continue;
    for (const Tensor& parameter : own) left.erase(parameter.impl());
    owners.push_back(record.get());
  }
  return left.empty() ? owners : Owners();
}

// Whether their next steps multiply by the same so far. A program may have told one of them a
// factor of its own, and then one for all cannot take its place.
bool Clipping::share_a_factor(const Owners& owners) {
  const auto told = [](const OptimizerRecord* owner) {
    return std::pair{owner->optimizer->next_step().data_as<double>()[0],
                     owner->optimizer->next_step_factor().impl()};
  };
  if (owners.size() == 1) return true;
  for (OptimizerRecord* owner : owners) loss_scaling_.unscale(*owner->optimizer);
  return std::ranges::all_of(
      owners, [&](const OptimizerRecord* owner) { return told(owner) == told(owners.front()); });
}

Tensor Clipping::fold(const Owners& owners, const TensorList& parameters, double max_norm,
                      double norm_type) {
  optim::ClipOptions options{.norm_type = norm_type, .fold_into = owners.front()->optimizer};
  for (OptimizerRecord* owner : owners) {
    optim::Optimizer& optimizer = *owner->optimizer;
    loss_scaling_.unscale(optimizer);
    if (!owner->clip) {
      owner->clip = {optimizer.next_step().data_as<double>()[0], optimizer.next_step_factor()};
    }
    if (owner != owners.front()) options.fold_into_others.push_back(&optimizer);
  }
  return optim::clip_grad_norm(parameters, max_norm, options);
}

// As a program that clips all parameters of the optimizer before its step. Where it has none with a
// gradient there is nothing to clip; ranks that hold parts all have the same ones.
void Clipping::before_step(OptimizerRecord& record, bool clipped) {
  if (settings_.gradient_clipping == 0 || clipped) return;
  TensorList parameters;
  bool any = false;
  for (const auto& [name, tensor] : record.parameters) {
    any = any || tensor.grad().defined();
    parameters.push_back(tensor);
  }
  if (any) {
    loss_scaling_.note_norm(parameters,
                            fold({&record}, parameters, settings_.gradient_clipping, 2));
  }
  record.clip.reset();  // the step takes it
}

void Clipping::drop(OptimizerRecord& record) {
  record.clipped = false;
  if (!record.clip) return;
  record.optimizer->next_step().data_as<double>()[0] = record.clip->before;
  record.optimizer->scale_next_step(record.clip->before_on_device);
  record.clip.reset();
}

void Clipping::apply() {
  for (const auto& record : prepared_.optimizers) apply(*record);
}

void Clipping::apply(OptimizerRecord& record) {
  if (!record.clip) return;
  const NoGradGuard no_grad;
  optim::Optimizer& optimizer = *record.optimizer;
  std::unordered_set<TensorImpl*> seen;
  const TensorList gradients = gradients_of(record.parameters, seen);
  const double factor = optimizer.next_step().data_as<double>()[0] / record.clip->before;
  if (factor != 1) kernels::multi_tensor_scale(gradients, &factor);
  if (Tensor on_device = optimizer.next_step_factor(); on_device.defined()) {
    if (const Tensor& before = record.clip->before_on_device; before.defined()) {
      on_device = on_device / before;
    }
    for (const Tensor& gradient : gradients) {
      mul_(raw::alias(gradient), on_device.to(gradient.dtype()));  // of a part its elements
    }
  }
  drop(record);
}

Tensor Clipping::clip_norm(const TensorList& parameters, double max_norm, double norm_type) {
  ModelRecord* const holder =
      parameters.empty() ? nullptr : prepared_.holder_of(parameters.front());
  if (!is_at_boundary(parameters)) {
    if (holder != nullptr) {
      const auto last = holder->norms.find(parameters.front().impl());
      if (last != holder->norms.end()) return last->second;
    }
    return scalar_tensor(std::numeric_limits<double>::quiet_NaN(), kF64);
  }
  Tensor norm;
  if (const Owners owners = owners_of(parameters); !owners.empty() && share_a_factor(owners)) {
    const double limit = settings_.gradient_clipping;
    if (limit > 0 && norm_type == 2 && owners.size() == 1) {
      max_norm = std::min(max_norm, limit);
      owners.front()->clipped = true;
    }
    norm = fold(owners, parameters, max_norm, norm_type);
  } else {
    apply();
    norm = optim::clip_grad_norm(
        parameters, max_norm,
        {.norm_type = norm_type, .gradient_scale = 1 / loss_scaling_.scale()});
  }
  loss_scaling_.note_norm(parameters, norm);
  return holder == nullptr ? norm : keep_norm(*holder, parameters.front(), norm);
}

// For micro-batches in which nothing is clipped.
Tensor Clipping::keep_norm(ModelRecord& holder, const Tensor& first, const Tensor& norm) const {
  Tensor& last = holder.norms[first.impl()];
  if (!in_graphed_step) return last = norm;
  const NoGradGuard no_grad;
  if (!last.defined() || last.device() != norm.device()) return last = norm.clone();
  copy_(last, norm);
  return last;
}

void Clipping::clip_value(const TensorList& parameters, double limit) {
  if (!is_at_boundary(parameters)) return;
  apply();
  optim::clip_grad_value(parameters, limit, 1 / loss_scaling_.scale());
}

}  // namespace tessera
