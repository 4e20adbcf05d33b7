#include <tessera/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/multi_tensor.h>
#include <tessera/core/profiler.h>

namespace tessera::optim {
namespace {

DType state_dtype(const Tensor& parameter) { return parameter.dtype() == kF64 ? kF64 : kF32; }

// With the parameter's order of dimensions, so that one index walks through both.
Tensor make_state(const Tensor& parameter, double value) {
  const MemoryCategoryGuard category(MemoryCategory::kOptimizer);
  const Tensor state = raw::empty_like(parameter, state_dtype(parameter));
  fill_(state, value);
  return state;
}

Tensor make_master(const Tensor& parameter) {
  const MemoryCategoryGuard category(MemoryCategory::kOptimizer);
  const Tensor master = raw::empty_like(parameter, kF32);
  copy_(master, parameter.detach());
  return master;
}

bool is_16_bit(DType dtype) { return dtype == kF16 || dtype == kBF16; }

std::string group_key(size_t group, std::string_view option) {
  return "group." + std::to_string(group) + "." + std::string(option);
}

}  // namespace

Optimizer::Optimizer() : next_step_(tensor({1, 0}, kF64)) {}
Optimizer::~Optimizer() = default;

void Optimizer::scale_next_step(double factor) { next_step_.data_as<double>()[0] *= factor; }

void Optimizer::add_group(const NamedTensors& parameters) {
  std::unordered_set<std::string> names;
  std::unordered_set<const TensorImpl*> tensors;
  for (const Group& group : groups_) {
    for (const auto& [name, tensor] : group.named) {
      names.insert(name);
      tensors.insert(tensor.impl());
    }
  }
  Group group;
  for (const auto& [name, tensor] : parameters) {
    TS_CHECK(tensor.defined() && tensor.is_leaf() && is_floating(tensor.dtype()), "optimizer", "'",
             name, "' must be a floating leaf; got ", tensor);
    TS_CHECK(names.insert(name).second, "optimizer", "the name '", name,
             "' was given twice; state is kept by name");
    TS_CHECK(tensors.insert(tensor.impl()).second, "optimizer", "'", name,
             "' is a tensor that was already given under another name; give tied weights once");
    group.named.push_back({name, tensor});
    group.states.push_back({.parameter = tensor, .gradient = {}});
  }
  groups_.push_back(std::move(group));
}

double Optimizer::lr(size_t group) const { return const_cast<Optimizer*>(this)->lr_of(group); }
void Optimizer::set_lr(double lr) {
  for (size_t i = 0; i < groups_.size(); ++i) lr_of(i) = lr;
}
void Optimizer::set_lr(size_t group, double lr) { lr_of(group) = lr; }

NamedTensors Optimizer::parameters() const {
  NamedTensors result;
  for (const Group& group : groups_) {
    result.insert(result.end(), group.named.begin(), group.named.end());
  }
  return result;
}
const NamedTensors& Optimizer::parameters(size_t group) const { return groups_.at(group).named; }

void Optimizer::zero_grad(bool set_to_none) {
  if (zero_grad_gate_ && !zero_grad_gate_()) return;
  gradient_factor_ = {};
  for (const Group& group : groups_) {
    for (const auto& [name, tensor] : group.named) tensor.zero_grad(set_to_none);
  }
}

// ---- The step ----------------------------------------------------------------------------------

void Optimizer::prepare(size_t group, ParameterState& state) {
  // A model that has moved since takes its state along.
  const Device& device = state.parameter.device();
  const MemoryCategoryGuard category(MemoryCategory::kOptimizer);
  const auto follow = [&](Tensor& held) {
    if (held.defined() && held.device() != device) held = held.to(device);
  };
  follow(state.master);
  for (Tensor& held : state.states) follow(held);
  if (is_16_bit(state.parameter.dtype()) && keeps_master_weights(group) &&
      !state.master.defined()) {
    state.master = make_master(state.parameter);
  }
  for (size_t i = 0; i < state_names().size(); ++i) {
    if (state.states[i].defined()) continue;
    if (const auto value = initial_state(group, i)) {
      state.states[i] = make_state(state.parameter, *value);
    }
  }
}

bool Optimizer::step() {
  const TimelineRange range("optimizer step");
  const NoGradGuard no_grad;
  // A gate may still set what the step is told (a loss scaler that unscales now).
  StepDecision decision = gate_ ? gate_() : StepDecision{};
  double* next_step = next_step_.data_as<double>();
  double scale = std::exchange(next_step[0], 1);
  const bool skip = std::exchange(next_step[1], 0) != 0;
  if (decision.run && skip) decision = StepDecision::skip("a gradient is not finite");
  if (!decision.run) {
    skip_reason_ = std::move(decision.reason);
    gradient_factor_ = {};
    return false;
  }
  if (gradient_factor_.defined() && !reads_gradient_factor()) {
    scale *= std::exchange(gradient_factor_, {}).item();
  }
  skip_reason_.clear();
  for (size_t g = 0; g < groups_.size(); ++g) {
    // Parameters that joined late have lower step numbers: each number is a pass of its own.
    std::map<int64_t, std::vector<ParameterState*>> by_step;
    for (ParameterState& state : groups_[g].states) {
      state.gradient = state.parameter.grad();
      if (!state.gradient.defined()) continue;
      prepare(g, state);
      if (!state.master.defined()) {
        state.autocast_shadow = detail::take_shadow_to_write(state.parameter);
      }
      by_step[state.step + 1].push_back(&state);
    }
    for (const auto& [number, states] : by_step) {
      double scalars[kernels::kNumStepScalars] = {};
      scalars[kernels::kLearningRate] = lr_of(g);
      scalars[kernels::kStep] = static_cast<double>(number);
      scalars[kernels::kGradientScale] = scale;
      update(g, states, scalars);
      for (ParameterState* state : states) {
        state->step = number;
        state->gradient = {};
        if (std::exchange(state->autocast_shadow, {}).defined()) {
          detail::stamp_shadow(state->parameter);
        }
      }
    }
  }
  gradient_factor_ = {};
  return true;
}

// ---- State -------------------------------------------------------------------------------------

StateDict Optimizer::state_dict() const {
  class Writer : public OptionVisitor {
   public:
    Writer(StateDict& state, size_t group) : state_(state), group_(group) {}
    void visit(const char* name, std::span<double> values) override {
      const Shape shape = values.size() == 1 ? Shape{} : Shape{static_cast<int64_t>(values.size())};
      state_.set(group_key(group_, name), tensor(std::span<const double>(values), shape, kF64));
    }

   private:
    StateDict& state_;
    size_t group_;
  };
  StateDict state;
  for (size_t g = 0; g < groups_.size(); ++g) {
    Writer writer(state, g);
    const_cast<Optimizer*>(this)->visit_options(g, writer);
    state.set(group_key(g, "num_parameters"),
              scalar_tensor(static_cast<int64_t>(groups_[g].named.size()), kI64));
    for (size_t i = 0; i < groups_[g].named.size(); ++i) {
      const ParameterState& own = groups_[g].states[i];
      if (own.step == 0 && !own.master.defined()) continue;
      const std::string prefix = "state." + groups_[g].named[i].name + ".";
      state.set(prefix + "step", scalar_tensor(own.step, kI64));
      if (own.master.defined()) state.set(prefix + "master", own.master);
      for (size_t s = 0; s < state_names().size(); ++s) {
        if (own.states[s].defined()) state.set(prefix + state_names()[s], own.states[s]);
      }
    }
  }
  return state;
}

void Optimizer::load_state_dict(const StateDict& state) {
  const NoGradGuard no_grad;
  std::string problems;
  std::unordered_set<std::string> used;
  // Reads options; `check` only looks whether they are there.
  class Reader : public OptionVisitor {
   public:
    Reader(const StateDict& state, size_t group, bool check, std::string& problems,
           std::unordered_set<std::string>& used)
        : state_(state), group_(group), check_(check), problems_(problems), used_(used) {}
    void visit(const char* name, std::span<double> values) override {
      const std::string key = group_key(group_, name);
      used_.insert(key);
      const Tensor* saved = state_.find(key);
      if (check_) {
        if (saved == nullptr) {
          problems_ += "\n  missing: " + key;
        } else if (saved->numel() != static_cast<int64_t>(values.size())) {
          problems_ += "\n  of another size: " + key + " is " + saved->describe();
        }
        return;
      }
      const auto numbers = saved->to_vector<double>();
      std::ranges::copy(numbers, values.begin());
    }

   private:
    const StateDict& state_;
    size_t group_;
    bool check_;
    std::string& problems_;
    std::unordered_set<std::string>& used_;
  };

  struct Loaded {
    ParameterState* target;
    ParameterState value;
  };
  std::vector<Loaded> loaded;
  const auto take = [&](const std::string& key, const Tensor& parameter, DType dtype) -> Tensor {
    used.insert(key);
    const Tensor* saved = state.find(key);
    if (saved == nullptr) {
      problems += "\n  missing: " + key;
      return {};
    }
    if (saved->shape() != parameter.shape()) {
      problems += "\n  of another shape: " + key + " is " + saved->describe() +
                  ", the parameter is " + parameter.describe();
      return {};
    }
    const MemoryCategoryGuard category(MemoryCategory::kOptimizer);
    const Tensor copy = raw::empty_like(parameter, dtype);
    copy_(copy, *saved);
    return copy;
  };
  for (size_t g = 0; g < groups_.size(); ++g) {
    Reader check(state, g, true, problems, used);
    visit_options(g, check);
    const std::string count_key = group_key(g, "num_parameters");
    used.insert(count_key);
    const Tensor* count = state.find(count_key);
    if (count == nullptr ||
        count->item<int64_t>() != static_cast<int64_t>(groups_[g].named.size())) {
      problems += "\n  group " + std::to_string(g) + " has " +
                  std::to_string(groups_[g].named.size()) + " parameters, the state has " +
                  (count == nullptr ? "no such group" : std::to_string(count->item<int64_t>()));
    }
    for (size_t i = 0; i < groups_[g].named.size(); ++i) {
      const std::string prefix = "state." + groups_[g].named[i].name + ".";
      const Tensor& parameter = groups_[g].named[i].tensor;
      ParameterState value{.parameter = parameter, .gradient = {}};
      used.insert(prefix + "step");
      if (const Tensor* step = state.find(prefix + "step")) {
        value.step = step->item<int64_t>();
        if (state.contains(prefix + "master")) {
          value.master = take(prefix + "master", parameter, kF32);
        }
        for (size_t s = 0; s < state_names().size(); ++s) {
          if (value.step > 0 && initial_state(g, s)) {
            value.states[s] = take(prefix + state_names()[s], parameter, state_dtype(parameter));
          }
        }
      }
      loaded.push_back({&groups_[g].states[i], std::move(value)});
    }
  }
  for (const auto& [name, saved] : state) {
    if (!used.contains(name)) problems += "\n  unexpected: " + name;
  }
  TS_CHECK(problems.empty(), type_name(), "the saved state does not fit this optimizer:", problems,
           "\n  make the optimizer with the groups, names and kind it was saved with");
  for (size_t g = 0; g < groups_.size(); ++g) {
    Reader read(state, g, false, problems, used);
    visit_options(g, read);
  }
  for (Loaded& one : loaded) *one.target = std::move(one.value);
}

void Optimizer::rebind(const NamedTensors& parameters) {
  std::unordered_map<std::string, Tensor> by_name;
  for (const auto& [name, tensor] : parameters) by_name.emplace(name, tensor);
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.named.size(); ++i) {
      const std::string& name = group.named[i].name;
      const auto found = by_name.find(name);
      TS_CHECK(found != by_name.end(), "rebind", "there is no parameter '", name,
               "' among those given; rebind needs every name of the optimizer");
      const Tensor& master = group.states[i].master;
      for (const Tensor* state : {&master, &group.states[i].states[0]}) {
        TS_CHECK_SHAPE(!state->defined() || state->shape() == found->second.shape(), "rebind",
                       "the state of '", name, "' is ", *state, ", the new parameter is ",
                       found->second, "; rebind before the first step, or load a state that fits");
      }
    }
  }
  for (Group& group : groups_) {
    for (size_t i = 0; i < group.named.size(); ++i) {
      group.named[i].tensor = by_name.at(group.named[i].name);
      group.states[i].parameter = group.named[i].tensor;
    }
  }
}

void Optimizer::begin_masters(const NamedTensors& values) {
  std::unordered_map<std::string, Tensor> by_name;
  for (const auto& [name, tensor] : values) by_name.emplace(name, tensor);
  std::vector<std::pair<ParameterState*, Tensor>> fitting;
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (!keeps_master_weights(g)) continue;
    for (size_t i = 0; i < groups_[g].named.size(); ++i) {
      const auto found = by_name.find(groups_[g].named[i].name);
      if (found == by_name.end()) continue;
      ParameterState& state = groups_[g].states[i];
      const Tensor& value = found->second;
      TS_CHECK_DTYPE(value.dtype() == kF32 && is_16_bit(state.parameter.dtype()), "begin_masters",
                     "expects f32 values for 16-bit parameters; got ", value, " for '",
                     found->first, "', which is ", state.parameter);
      TS_CHECK_SHAPE(
          value.shape() == state.parameter.shape() && value.strides() == state.parameter.strides(),
          "begin_masters", "the value of '", found->first, "' is ", value, ", the parameter is ",
          state.parameter);
      TS_CHECK(!state.master.defined(), "begin_masters", "'", found->first,
               "' has a master; give the values before the first step");
      fitting.emplace_back(&state, value);
    }
  }
  for (auto& [state, value] : fitting) {
    value.storage()->set_category(MemoryCategory::kOptimizer);
    state->master = value;
  }
}

int64_t Optimizer::state_bytes() const {
  int64_t bytes = 0;
  for (const Group& group : groups_) {
    for (const ParameterState& own : group.states) {
      if (own.master.defined()) bytes += own.master.nbytes();
      for (const Tensor& state : own.states) bytes += state.defined() ? state.nbytes() : 0;
    }
  }
  return bytes;
}

}  // namespace tessera::optim
