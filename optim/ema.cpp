#include <tessera/optim/ema.h>

#include <unordered_map>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::optim {
namespace {

constexpr const char* kUpdates = "num_updates";
constexpr const char* kPrefix = "average.";

}  // namespace

EMA::EMA(const NamedTensors& parameters, const EMAOptions& options)
    : options_(options), parameters_(parameters) {
  TS_CHECK(options.decay >= 0 && options.decay <= 1, "EMA", "decay must be in [0, 1]; got ",
           options.decay);
  const NoGradGuard no_grad;
  const MemoryCategoryGuard category(MemoryCategory::kOptimizer);
  for (const auto& [name, parameter] : parameters) {
    const TensorPlacement* const placement = tensor_placement(parameter);
    const bool part = placement != nullptr && placement->equals(*placement->of_gradient());
    TS_CHECK_AS(UnsupportedError, part || element_guard(parameter) == nullptr, "EMA",
                "takes whole parameters and their parts; '", name, "' is ", parameter,
                "; a summand is to be redistributed");
    const Tensor average = raw::empty_like(parameter, parameter.dtype() == kF64 ? kF64 : kF32);
    copy_(average, raw::alias(parameter));
    copy_guard(parameter, average);
    averages_.push_back({name, average});
  }
}

void EMA::follow_parameters() const {
  const NoGradGuard no_grad;
  const MemoryCategoryGuard category(MemoryCategory::kOptimizer);
  for (size_t i = 0; i < averages_.size(); ++i) {
    const auto& [name, parameter] = parameters_[i];
    Tensor& average = averages_[i].tensor;
    if (same_placement(parameter, average) && average.device() == parameter.device()) continue;
    const Tensor part = fitting_part(parameter, average);
    TS_CHECK_AS(UnsupportedError, part.defined(), "EMA", "the average of '", name, "' is ", average,
                " and the parameter is now ", parameter,
                "; make the EMA after what has changed the parameter, or rebind() it");
    const Tensor own = raw::empty(parameter.shape(), average.dtype(), parameter.device());
    copy_(own, part);
    copy_guard(parameter, own);
    average = own;
  }
}

void EMA::update() {
  follow_parameters();
  kernels::multi_tensor_lerp(tensors_of(averages_), tensors_of(parameters_), 1 - options_.decay);
  ++num_updates_;
}

void EMA::copy_to_parameters() const {
  follow_parameters();
  const NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    copy_(raw::alias(parameters_[i].tensor), raw::alias(averages_[i].tensor));
  }
}

EMA::Scope::Scope(EMA& average) : average_(average) {
  average.follow_parameters();
  const NoGradGuard no_grad;
  for (size_t i = 0; i < average.parameters_.size(); ++i) {
    const Tensor& parameter = average.parameters_[i].tensor;
    if (tensor_placement(parameter) != nullptr) {
      // A part stays where it is: whoever gathers the whole brings one that lies elsewhere home,
      // over the values that were set aside.
      own_values_.push_back(raw::alias(parameter).clone());
      copy_(raw::alias(parameter), raw::alias(average.averages_[i].tensor));
      parameter.bump_version();
      continue;
    }
    own_values_.push_back(raw::alias(parameter));
    // The parameter's own bytes are set aside, not copied.
    parameter.set_data(raw::alias(average.averages_[i].tensor).to(parameter.dtype()));
    parameter.bump_version();
  }
}
EMA::Scope::~Scope() {
  const NoGradGuard no_grad;
  for (size_t i = 0; i < own_values_.size(); ++i) {
    const Tensor& parameter = average_.parameters_[i].tensor;
    if (tensor_placement(parameter) != nullptr) {
      copy_(raw::alias(parameter), own_values_[i]);
    } else {
      parameter.set_data(own_values_[i]);
    }
    parameter.bump_version();
  }
}

StateDict EMA::state_dict() const {
  follow_parameters();
  StateDict state;
  state.set(kUpdates, scalar_tensor(num_updates_, kI64));
  for (const auto& [name, average] : averages_) state.set(kPrefix + name, average);
  return state;
}

void EMA::load_state_dict(const StateDict& state) {
  follow_parameters();
  for (const auto& [name, average] : averages_) {
    const Tensor& saved = state.at(kPrefix + name);
    TS_CHECK_SHAPE(saved.shape() == average.shape(), "EMA", "the saved average of '", name, "' is ",
                   saved, ", the parameter's is ", average);
    TS_CHECK(same_placement(saved, average), "EMA", "the saved average of '", name, "' is ", saved,
             ", the parameter's is ", average, "; redistribute one of them");
  }
  const auto updates = static_cast<int64_t>(state.scalar(kUpdates));
  const NoGradGuard no_grad;
  for (const auto& [name, average] : averages_) {
    copy_(raw::alias(average), raw::alias(state.at(kPrefix + name)));
  }
  num_updates_ = updates;
}

void EMA::rebind(const NamedTensors& parameters) {
  std::unordered_map<std::string, Tensor> by_name;
  for (const auto& [name, tensor] : parameters) by_name.emplace(name, tensor);
  NamedTensors rebound;
  for (const auto& [name, average] : averages_) {
    const auto found = by_name.find(name);
    TS_CHECK(found != by_name.end() && found->second.shape() == average.shape(), "EMA",
             "rebind needs a parameter '", name, "' of shape ", average.shape());
    TS_CHECK(same_placement(found->second, average), "EMA", "rebind: '", name, "' is ",
             found->second, ", its average ", average, "; redistribute the parameter");
    rebound.push_back({name, found->second});
  }
  parameters_ = std::move(rebound);
}

}  // namespace tessera::optim
