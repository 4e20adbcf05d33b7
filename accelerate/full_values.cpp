#include <tessera/accelerate/full_values.h>

#include <algorithm>

#include <tessera/accelerate/settings/edit_distance.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/mesh/dtensor.h>

namespace tessera::accelerate {
namespace {

DType wide(const Tensor& tensor) { return tensor.dtype() == kF64 ? kF64 : kF32; }

// A copy of all of it, on every rank. Collective of a part.
Tensor whole_copy(const Tensor& tensor) {
  const NoGradGuard no_grad;
  const Tensor plain = raw::alias(tensor);
  if (!distributed::is_dtensor(tensor)) {
    return plain.dtype() == wide(plain) ? plain.clone() : plain.to(wide(plain));
  }
  // Of another leaf than the parameter itself, which would ask for the gradient's placements.
  copy_guard(tensor, plain);
  const Tensor whole = distributed::full_tensor(plain);
  // With one rank nothing is gathered.
  const bool shared = whole.storage() == plain.storage();
  return whole.dtype() != wide(whole) ? whole.to(wide(whole)) : shared ? whole.clone() : whole;
}

// This rank's part of a value, as it is to lie in `target`.
Tensor part_for(std::string_view where, const std::string& name, const Tensor& target,
                const Tensor& value) {
  TS_CHECK_DTYPE(value.defined() && is_floating(value.dtype()), where,
                 "takes a whole value of floating-point numbers; got ", value, " for '", name, "'");
  check_whole(value, where);
  const Tensor part = fitting_part(target, value);
  TS_CHECK_SHAPE(part.defined() && part.shape() == target.shape(), where, "the value for '", name,
                 "' is ", value, ", and it is ", described_whole(target),
                 "; give a whole one of its shape");
  return part;
}

void write_part(const Tensor& target, const Tensor& part) {
  const NoGradGuard no_grad;
  copy_(raw::alias(target), part.detach().to(target.device()));
}

template <class Names>
std::string list_of_names(const Names& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

}  // namespace

FullValues::FullValues(nn::ModuleBase& model, FullValuesOptions options)
    : model_(&model), options_(std::move(options)) {}

NamedTensor FullValues::find(std::string_view where, const ParameterName& wanted) const {
  const NamedTensors all = model_->named_parameters();
  if (wanted.parameter_.defined()) {
    const auto at = std::ranges::find_if(
        all, [&](const NamedTensor& named) { return named.tensor.is(wanted.parameter_); });
    TS_CHECK(at != all.end(), where, "the tensor ", wanted.parameter_, " is no parameter of ",
             model_->type_name(), "; give one of parameters(), or its name");
    return *at;
  }
  const auto at = std::ranges::find(all, wanted.name_, &NamedTensor::name);
  if (at != all.end()) return *at;
  std::string near;
  size_t least = wanted.name_.size() / 3 + 2;
  for (const auto& [name, tensor] : all) {
    const size_t distance = edit_distance(wanted.name_, name);
    if (distance < least) least = distance, near = name;
  }
  TS_THROW(ValueError, where, model_->type_name(), " has no parameter '", wanted.name_, "'",
           near.empty() ? "; named_parameters() lists all" : "; did you mean '" + near + "'?");
}

FullValues::Held FullValues::holder_of(const Tensor& parameter) const {
  for (optim::Optimizer* optimizer : options_.optimizers) {
    for (size_t group = 0; group < optimizer->num_groups(); ++group) {
      for (const auto& [name, tensor] : optimizer->parameters(group)) {
        if (tensor.is(parameter)) return {optimizer, name};
      }
    }
  }
  return {};
}

Tensor FullValues::gradient_of(std::string_view where, const NamedTensor& parameter) const {
  const std::string sum = options_.sum_so_far ? options_.sum_so_far() : std::string();
  TS_CHECK_AS(AutogradError, sum.empty(), where, "the gradient of '", parameter.name,
              "' is not complete: ", sum);
  Tensor gradient = parameter.tensor.grad();
  TS_CHECK(gradient.defined(), where, "'", parameter.name, "' has no gradient: ",
           parameter.tensor.requires_grad()
               ? "no backward came to it since zero_grad(); ask between backward() and that"
               : "it does not require one");
  return gradient;
}

Tensor FullValues::state_of(std::string_view where, const NamedTensor& parameter,
                            std::string_view state) const {
  const Held held = holder_of(parameter.tensor);
  TS_CHECK(held.optimizer != nullptr, where, "no optimizer has '", parameter.name,
           "'; prepare the one that does, or name it in FullValuesOptions");
  const StateDict all = held.optimizer->parameter_state(held.name);
  if (const Tensor* found = all.find(state)) {
    TS_CHECK(state != "step", where, "the step of '", parameter.name,
             "' is a number and no state; parameter_state() has it");
    return *found;
  }
  const std::vector<std::string> names = state_names(parameter.tensor);
  TS_THROW(ValueError, where, "there is no state '", state, "' of '", parameter.name, "'",
           names.empty() ? "; its optimizer has not stepped with it yet: states are made in the "
                           "first step"
                         : "; there are " + list_of_names(names));
}

std::vector<std::string> FullValues::state_names(const ParameterName& name) const {
  const NamedTensor parameter = find("state_names", name);
  const Held held = holder_of(parameter.tensor);
  std::vector<std::string> names;
  if (held.optimizer == nullptr) return names;
  for (const auto& [state, tensor] : held.optimizer->parameter_state(held.name)) {
    if (state != "step") names.push_back(state);
  }
  return names;
}

// ---- Reading -----------------------------------------------------------------------------------

Tensor FullValues::parameter(const ParameterName& name) const {
  const NamedTensor parameter = find("full parameter", name);
  const Held held = holder_of(parameter.tensor);
  if (held.optimizer != nullptr) {
    const StateDict states = held.optimizer->parameter_state(held.name);
    if (const Tensor* master = states.find("master")) return whole_copy(*master);
  }
  return whole_copy(parameter.tensor);
}

Tensor FullValues::gradient(const ParameterName& name) const {
  const Tensor whole = whole_copy(gradient_of("full gradient", find("full gradient", name)));
  const NoGradGuard no_grad;
  if (const double factor = scale(); factor != 1) mul_(whole, Scalar(1 / factor));
  return whole;
}

Tensor FullValues::state(const ParameterName& name, std::string_view state) const {
  return whole_copy(state_of("full state", find("full state", name), state));
}

// ---- Writing -----------------------------------------------------------------------------------

void FullValues::set_parameter(const ParameterName& name, const Tensor& value) const {
  constexpr std::string_view kWhere = "set_parameter";
  const NoGradGuard no_grad;
  const auto [own_name, parameter] = find(kWhere, name);
  const Tensor part = part_for(kWhere, own_name, parameter, value);
  const Held held = holder_of(parameter);
  if (held.optimizer != nullptr && parameter.dtype() != wide(parameter)) {
    const StateDict states = held.optimizer->parameter_state(held.name);
    if (const Tensor* master = states.find("master")) {
      write_part(*master, part);
    } else {  // so that it begins with what was given, and not with that rounded
      const Tensor begin = raw::empty_like(raw::alias(parameter), kF32);
      write_part(begin, part);
      copy_guard(parameter, begin);
      held.optimizer->begin_masters({{held.name, begin}});
    }
  }
  write_part(parameter, part);
}

void FullValues::set_gradient(const ParameterName& name, const Tensor& value) const {
  constexpr std::string_view kWhere = "set_gradient";
  const NamedTensor parameter = find(kWhere, name);
  const Tensor gradient = gradient_of(kWhere, parameter);
  const Tensor part = part_for(kWhere, parameter.name, gradient, value);
  write_part(gradient, part);
  const NoGradGuard no_grad;
  if (const double factor = scale(); factor != 1) mul_(raw::alias(gradient), Scalar(factor));
  if (options_.written) options_.written();
}

void FullValues::set_state(const ParameterName& name, std::string_view state,
                           const Tensor& value) const {
  constexpr std::string_view kWhere = "set_state";
  const NamedTensor parameter = find(kWhere, name);
  const Tensor target = state_of(kWhere, parameter, state);
  write_part(target, part_for(kWhere, parameter.name, target, value));
}

}  // namespace tessera::accelerate
