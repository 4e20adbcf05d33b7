// What all optimizers share: parameter groups, state by parameter name, the step and its gate.
//
//     optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-4});
//     ...
//     optimizer.step();
//     optimizer.zero_grad();
//
// Each group has complete options of its own:
//
//     optim::AdamW optimizer({{decayed, {.lr = 3e-4, .weight_decay = 0.1}},
//                             {others, {.lr = 3e-4, .weight_decay = 0}}});
//
// A step is one pass over all parameters of a group (kernels/multi_tensor.h). State is f32 (f64 for
// f64 parameters; bf16 with `state_dtype`, rounded as core/kernels/optim/state_rounding.h explains)
// and is made at a parameter's first step. For 16-bit parameters an f32 master copy is kept unless
// Options::master_weights is false. It follows writes to the parameter: an element that is no
// longer its rounded master replaces it. The same pass writes autocast's cached copy of a parameter
// (autograd/weight_cache.h). Parameters without a gradient are skipped. Arithmetic, order of
// operations and ranges of options are torch's: options out of range are a ValueError when the
// optimizer is made, and so is an optimizer without parameters.
//
// In the capture of a graph (optim/graphed_step.h) a step becomes part of the graph. Each replay is
// a step with the current learning rate, step number and next_step(); everything else is as
// captured. Other options that changed, and state that was replaced, throw ConfigError at the
// replay. UnsupportedError at the capture for a step with a gate, which a replay cannot ask (except
// an Accelerator's, by accelerate/graphed_step.h), and for parameters that were never stepped.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/core/kernels/optim/option_range.h>
#include <tessera/core/memory/storage.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {
struct StateRounding;
struct StepScalars;
}  // namespace tessera::kernels

namespace tessera::optim {

// The answer of a gate that is asked before each step.
struct StepDecision {
  bool run = true;
  std::string reason = {};  // why not
  int64_t count = 1;        // steps that a schedule takes at once
  static StepDecision skip(std::string reason) {
    return {.run = false, .reason = std::move(reason)};
  }
};
// Gradient accumulation, loss scaling and sharding use the gate to skip steps. It is called before
// next_step() is read and may change that.
using StepGate = std::function<StepDecision()>;

class Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Updates every parameter that has a gradient. Returns false if the gate or next_step() skipped
  // the step; skip_reason() gives the reason. Throws ShapeError, DTypeError for a gradient that
  // does not fit its parameter.
  bool step();
  // `answers_for_replays`: the gate's answer in the capture of a graph holds for every replay, and
  // whoever replays does the gate's host work at each step.
  struct StepGateOptions {
    bool answers_for_replays = false;
  };
  void set_step_gate(StepGate gate, const StepGateOptions& options) {
    gate_ = std::move(gate);
    gate_answers_for_replays_ = options.answers_for_replays;
  }
  void set_step_gate(StepGate gate) { set_step_gate(std::move(gate), {}); }
  const std::string& skip_reason() const { return skip_reason_; }
  void zero_grad(bool set_to_none = true);
  // Asked before each zero_grad(), which does nothing if it returns false, to keep gradients that
  // are still being accumulated.
  void set_zero_grad_gate(std::function<bool()> gate) { zero_grad_gate_ = std::move(gate); }

  size_t num_groups() const { return groups_.size(); }
  double lr(size_t group = 0) const;
  void set_lr(double lr);  // of all groups
  void set_lr(size_t group, double lr);
  // The base rate of schedules of the group: lr() when the first of them was made. Saved and loaded
  // with the options. torch: group["initial_lr"].
  std::optional<double> initial_lr(size_t group = 0) const { return groups_.at(group).initial_lr; }
  void set_initial_lr(size_t group, double lr) { groups_.at(group).initial_lr = lr; }
  // Momentum, or Adam's beta1, which OneCycle changes along with the rate. False if the optimizer
  // has none.
  virtual bool set_momentum(size_t group, double momentum) = 0;

  NamedTensors parameters() const;  // of all groups
  const NamedTensors& parameters(size_t group) const;
  // The parameters and dtype of which a step needs whole tensors. For sharded parameters they are
  // exchanged (core/tensor/whole_exchange.h).
  struct WholeParameters {
    NamedTensors parameters = {};
    DType dtype = kF32;
  };
  virtual WholeParameters whole_parameters() const { return {}; }

  // Arguments of the next step, on the parameters' device: f64 [2], {factor, skip}, reset to {1, 0}
  // by the step. Gradients are multiplied by the factor as they are read (clip_grad_norm stores its
  // scale here and saves a pass; a loss scaler its inverse). If skip is not 0 (a non-finite
  // gradient was found), the step changes neither parameters, states nor step numbers.
  const Tensor& next_step() const { return next_step_; }
  void scale_next_step(double factor);
  // The same by one f64 element on the parameters' device, which the update reads there, so the
  // host does not wait for it. Replaces an earlier one; the next step or zero_grad() consumes it.
  void scale_next_step(const Tensor& factor) { gradient_factor_ = factor; }
  const Tensor& next_step_factor() const { return gradient_factor_; }  // or undefined
  // The next step is skipped if this f64 element on the parameters' device is not 0, which the host
  // does not learn: step() returns true, and step numbers are corrected on the device. They are
  // read back by state_dict(), or when other parameters than before take part in a step.
  void skip_next_step_where(const Tensor& found) { found_ = found; }

  // "state.NAME.exp_avg": the state of each parameter that was stepped, by its name; "group.0.lr":
  // the options of each group. Tensors share memory with the optimizer.
  StateDict state_dict() const;
  // The state of one parameter by name: "step", "master", "exp_avg"...; empty before its first
  // step. ValueError for an unknown name.
  StateDict parameter_state(std::string_view name) const;
  // Copies options and state from the dictionary; its options decide which states exist. Groups
  // must have as many parameters as when it was saved. The state of a DTensor has the same
  // placement, or is whole; then its shard is taken. On a mismatch throws one ValueError that lists
  // all of them and changes nothing.
  void load_state_dict(const StateDict& state);
  // The parameter whose shape and placement the state of that name has; undefined for step numbers,
  // options and unknown names.
  Tensor state_like(std::string_view key) const;

  // Replaces the tensors of these names (for a model that was sharded or moved). State stays with
  // its name; one of another shape than the new tensor throws ShapeError.
  void rebind(const NamedTensors& parameters);

  // The f32 values with which the masters of 16-bit parameters begin: those before the parameters
  // were rounded. The tensors become the masters without a copy; names that the optimizer does not
  // hold, and groups without master_weights, are ignored. Throws ValueError for a parameter that
  // has a master, DTypeError and ShapeError for one that does not fit.
  void begin_masters(const NamedTensors& values);

  // Bytes of all states and master copies.
  int64_t state_bytes() const;
  // The same for one parameter by name, in bytes for each element that a rank holds, whatever its
  // sharding; 0 before its first step and for an unknown name.
  int64_t state_bytes_per_element(std::string_view name) const;

 protected:
  static constexpr size_t kMaxStates = 3;
  struct ParameterState {
    Tensor parameter;
    Tensor gradient;          // during a step
    Tensor cached_cast = {};  // during a step: a copy of 16 bits (autograd/weight_cache.h)
    int64_t step = 0;
    Tensor master = {};  // f32 copy of a 16-bit parameter
    // Identifies the parameter's contents when the master was made or last rounded into it, to
    // detect writes by others.
    struct Seen {
      std::weak_ptr<Storage> storage = {};  // set_data() leaves the version
      int64_t offset = 0;
      uint32_t version = 0;
    };
    mutable Seen seen = {};
    std::array<Tensor, kMaxStates> states = {};
    uint64_t rounding_key = 0;  // of its name
    // The tensor that kernels update, and the 16-bit tensor that they round it into, if any.
    const Tensor& target() const { return master.defined() ? master : parameter; }
    const Tensor& model_copy() const { return master.defined() ? parameter : cached_cast; }
  };
  // Reads or writes one option of a group, by name. What is only read is not written: state_dict()
  // of one optimizer may run in several threads.
  class OptionVisitor {
   public:
    virtual ~OptionVisitor() = default;
    virtual void visit(const char* name, OptionRange range, std::span<double> values) = 0;
    void operator()(const char* name, double& value, OptionRange range = OptionRange::kAny) {
      visit(name, range, {&value, 1});
    }
    template <size_t kCount>
    void operator()(const char* name, std::array<double, kCount>& values,
                    OptionRange range = OptionRange::kAny) {
      visit(name, range, values);
    }
    void operator()(const char* name, bool& value) {
      double number = value;
      visit(name, OptionRange::kAny, {&number, 1});
      if (value != (number != 0)) value = number != 0;
    }
    // For states: f32 or bf16.
    void operator()(const char* name, DType& value) {
      auto bits = static_cast<double>(8 * size_of(value));
      visit(name, OptionRange::kBits, {&bits, 1});
      if (const DType chosen = bits == 16 ? kBF16 : kF32; chosen != value) value = chosen;
    }
    template <class T>
    requires(std::is_integral_v<T> || std::is_enum_v<T>) void operator()(
        const char* name, T& value, OptionRange range = OptionRange::kAny) {
      auto number = static_cast<double>(value);
      visit(name, range, {&number, 1});
      if (const T chosen = static_cast<T>(static_cast<int64_t>(number)); chosen != value) {
        value = chosen;
      }
    }
  };
  // The arguments of one call of update(): parameters of a group with the same step number.
  struct Pass {
    size_t group;
    std::span<ParameterState* const> parameters;
    const kernels::StepScalars* scalars;
  };

  explicit Optimizer(std::string_view type_name);
  void add_group(const NamedTensors& parameters);
  void check_may_grow() const;  // throws UnsupportedError where a gate decides about steps
  // Called when all groups exist. Throws ValueError if no group has a parameter.
  void check_parameters() const;
  // Throws ValueError for an option outside of its range, and one that shows all options if there
  // is a `contradiction`.
  void check_options(size_t group, const char* contradiction);

  std::string_view type_name() const { return type_name_; }
  virtual double& lr_of(size_t group) = 0;
  virtual bool keeps_master_weights(size_t group) const = 0;
  virtual DType state_dtype(size_t group) const = 0;  // of parameters that are not f64
  virtual void visit_options(size_t group, OptionVisitor& visitor) = 0;
  // Names of the states, in the order of ParameterState::states.
  virtual std::span<const char* const> state_names() const = 0;
  // The initial value of state `index`; nothing if this group does not use it.
  virtual std::optional<double> initial_state(size_t group, size_t index) const = 0;
  // One pass over parameters with the same step number.
  virtual void update(size_t group, std::span<ParameterState* const> parameters,
                      const kernels::StepScalars& scalars) = 0;
  // All passes of a step, for rules that handle parameters of several passes together.
  virtual void update_all(std::span<const Pass> passes);
  // For kernels, of states in bf16.
  static kernels::StateRounding rounding_of(const ParameterState& state);

 private:
  struct Group {
    NamedTensors named;
    std::vector<ParameterState> states;
    std::optional<double> initial_lr = {};
  };
  DType state_dtype_of(size_t group, const Tensor& parameter) const;
  void prepare(size_t group, ParameterState& state);
  void append_state(const ParameterState& own, const std::string& prefix, StateDict& state) const;
  struct Replayed {  // by a captured step
    ParameterState* state;
    Tensor cast;  // that is written
    bool written_behind = false;
  };
  static void note_parameter(const ParameterState& state);
  static void forget_parameter(const ParameterState& state);
  static bool is_written(const ParameterState& state);
  static void follow_write(const ParameterState& state);
  void settle_skipped() const;
  void settle_masters() const;
  std::shared_ptr<std::vector<Replayed>> follow_writes_at_replays();
  void count_skipped(const std::vector<ParameterState*>& stepped);
  std::vector<double> constant_options(size_t group);
  const double* feed_replays(size_t group, const std::vector<ParameterState*>& stepped);

  std::string type_name_;
  std::vector<Group> groups_;
  Tensor gradient_factor_, found_;  // of the next step, or undefined
  // Skipped steps in f64 on the device, which the numbers of skipped_of_ still count.
  Tensor skipped_;
  std::vector<ParameterState*> skipped_of_;
  StepGate gate_;
  bool gate_answers_for_replays_ = false;
  std::function<bool()> zero_grad_gate_;
  std::string skip_reason_;
  Tensor next_step_;
};

template <class Options>
struct ParameterGroup {
  NamedTensors parameters;
  Options options;
};

// Gives an optimizer its typed options. Options has `lr`, `master_weights` and `void visit(auto&&
// visitor)`, which names every option that state_dict saves, with its range; it may have `const
// char* contradiction() const`, which describes a conflict between options, or null. Messages use
// `type_name`.
template <class Options>
class TypedOptimizer : public Optimizer {
 public:
  TypedOptimizer(std::string_view type_name, const std::vector<ParameterGroup<Options>>& groups)
      : Optimizer(type_name) {
    for (const auto& group : groups) add(group.parameters, group.options);
    check_parameters();
  }
  TypedOptimizer(std::string_view type_name, const NamedTensors& parameters, const Options& options)
      : Optimizer(type_name) {
    add(parameters, options);
    check_parameters();
  }
  Options& options(size_t group = 0) { return options_.at(group); }
  const Options& options(size_t group = 0) const { return options_.at(group); }

  // Adds a group after the existing ones, for layers that are unfrozen later. Existing schedules
  // keep to their groups. Throws as the constructor does, and UnsupportedError for an optimizer
  // with a gate, since a prepared optimizer's parameters are fixed.
  void add_param_group(const ParameterGroup<Options>& group) {
    check_may_grow();
    try {
      add(group.parameters, group.options);
    } catch (...) {
      options_.resize(num_groups());
      throw;
    }
  }

  bool set_momentum(size_t group, double momentum) override {
    if constexpr (requires(Options & options) { options.betas; }) {
      options_.at(group).betas[0] = momentum;
      return true;
    } else if constexpr (requires(Options & options) { options.momentum; }) {
      options_.at(group).momentum = momentum;
      return true;
    }
    return false;
  }

 protected:
  double& lr_of(size_t group) override { return options_.at(group).lr; }
  bool keeps_master_weights(size_t group) const override { return options_[group].master_weights; }
  DType state_dtype(size_t group) const override {
    if constexpr (requires(const Options& options) { options.state_dtype; }) {
      return options_[group].state_dtype;
    }
    return kF32;
  }
  void visit_options(size_t group, OptionVisitor& visitor) override {
    options_[group].visit(visitor);
  }

 private:
  void add(const NamedTensors& parameters, const Options& options) {
    options_.push_back(options);
    const char* contradiction = nullptr;
    if constexpr (requires { options.contradiction(); }) contradiction = options.contradiction();
    check_options(options_.size() - 1, contradiction);
    add_group(parameters);
  }

  std::vector<Options> options_;
};

}  // namespace tessera::optim
