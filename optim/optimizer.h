// What all optimizers share: parameter groups, state by parameter name, the step and its gate.
//
//     optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-4});
//     ...
//     optimizer.step();
//     optimizer.zero_grad();
//
// Groups have options of their own, each complete:
//
//     optim::AdamW optimizer({{decayed, {.lr = 3e-4, .weight_decay = 0.1}},
//                             {others, {.lr = 3e-4, .weight_decay = 0}}});
//
// One step is one pass over all parameters of a group (kernels/multi_tensor.h). State is f32 (f64
// for f64 parameters; bf16 where an optimizer has `state_dtype` and it says so, rounded as
// core/kernels/optim/state_rounding.h explains) and made at a parameter's first step; for 16-bit
// parameters an f32 master copy is kept unless Options::master_weights is false, and follows writes
// to the parameter: an element that is not its master rounded is taken as it is. The same pass
// writes the copy that autocast keeps of a parameter (autograd/weight_cache.h). Parameters without
// a gradient are passed over. Arithmetic and order of operations are torch's, and so are the
// numbers that options may have: others are a ValueError when the optimizer is made, as is one
// without any parameter.
//
// In the capture of a graph (optim/graphed_step.h) a step becomes part of it. Each replay is a
// step: it takes the learning rate, the step number and next_step() of its time, all else as it was
// captured. Other options that changed, and state that was replaced, throw ConfigError at the
// replay. A step with a gate cannot be captured, as a replay asks nobody (but an Accelerator's, by
// accelerate/graphed_step.h), nor one of parameters
// that were never stepped: UnsupportedError at the capture.
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
// Gradient accumulation, loss scaling and sharding hold steps back through it. It is asked before
// next_step() is read and may change that.
using StepGate = std::function<StepDecision()>;

class Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Updates every parameter that has a gradient. False where the gate or next_step() said no:
  // skip_reason() tells why. Throws ShapeError, DTypeError for a gradient that does not fit its
  // parameter.
  bool step();
  // `answers_for_replays`: its answer in the capture of a graph is that of every replay, and what
  // it does on the host at each step is done there by whoever replays.
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
  // Asked before each zero_grad(), which does nothing where it says false: gradients that are still
  // being accumulated stay.
  void set_zero_grad_gate(std::function<bool()> gate) { zero_grad_gate_ = std::move(gate); }

  size_t num_groups() const { return groups_.size(); }
  double lr(size_t group = 0) const;
  void set_lr(double lr);  // of all groups
  void set_lr(size_t group, double lr);
  // The rate from which schedules of the group go out: lr() when the first of them was made. Saved
  // and loaded with the options. torch: group["initial_lr"].
  std::optional<double> initial_lr(size_t group = 0) const { return groups_.at(group).initial_lr; }
  void set_initial_lr(size_t group, double lr) { groups_.at(group).initial_lr = lr; }
  // Momentum, or Adam's beta1: what OneCycle moves along with the rate. False where there is none.
  virtual bool set_momentum(size_t group, double momentum) = 0;

  NamedTensors parameters() const;  // of all groups
  const NamedTensors& parameters(size_t group) const;
  // What a step needs whole: of these parameters something in this dtype. Where ranks hold parts of
  // them it travels (core/tensor/whole_exchange.h).
  struct WholeParameters {
    NamedTensors parameters = {};
    DType dtype = kF32;
  };
  virtual WholeParameters whole_parameters() const { return {}; }

  // What the next step is told, beside the parameters: f64 [2], {factor, skip}, afterwards {1, 0}
  // again. Gradients are multiplied by the factor as they are read (clip_grad_norm folds its scale
  // in here and saves a pass over them; a loss scaler its inverse). Where skip is not 0 the step
  // leaves parameters, states and step numbers as they are (a non-finite gradient was found).
  const Tensor& next_step() const { return next_step_; }
  void scale_next_step(double factor);
  // The same by one f64 element beside the parameters, which the update reads there: the host does
  // not wait for it. Replaces the one before; goes with the next step, or with zero_grad().
  void scale_next_step(const Tensor& factor) { gradient_factor_ = factor; }
  const Tensor& next_step_factor() const { return gradient_factor_; }  // or undefined
  // The next step is left out where this f64 element beside the parameters is not 0, which the host
  // does not learn: step() returns true, and step numbers are put right on the device. They are
  // read back where state_dict() asks, or other parameters than before take part in a step.
  void skip_next_step_where(const Tensor& found) { found_ = found; }

  // "state.NAME.exp_avg": the state of each parameter that was stepped, by its name; "group.0.lr":
  // the options of each group. Tensors share elements with the optimizer.
  StateDict state_dict() const;
  // Of one parameter, by its name here: "step", "master", "exp_avg"...; empty before its first
  // step. ValueError for a name that is none.
  StateDict parameter_state(std::string_view name) const;
  // Options and state become those of the dictionary, copied; its options, not those before, say
  // which states there are. Groups must have as many parameters as when it was saved. The state of
  // a DTensor lies as it does, or is whole: then its part is taken. Throws one ValueError that
  // lists all that does not fit; then nothing was changed.
  void load_state_dict(const StateDict& state);
  // The parameter whose shape and placement the state of that name has; undefined for numbers of
  // steps, options and names that are none of a parameter's.
  Tensor state_like(std::string_view key) const;

  // Holds other tensors under the same names from now on (a model that was sharded or moved).
  // State stays with its name; one of another shape than the new tensor throws ShapeError.
  void rebind(const NamedTensors& parameters);

  // The f32 values that the masters of 16-bit parameters begin with: those before the parameters
  // were rounded. The tensors become the masters, they are not copied; names that the optimizer
  // does not hold, and groups without master_weights, are passed over. Throws ValueError for a
  // parameter that has a master, DTypeError and ShapeError for one that does not fit.
  void begin_masters(const NamedTensors& values);

  // Bytes of all states and master copies.
  int64_t state_bytes() const;
  // Of a parameter by name, for each element that a rank holds, however its part lies; 0 before its
  // first step and for a name that is not among the parameters.
  int64_t state_bytes_per_element(std::string_view name) const;

 protected:
  static constexpr size_t kMaxStates = 3;
  struct ParameterState {
    Tensor parameter;
    Tensor gradient;          // during a step
    Tensor cached_cast = {};  // during a step: a copy of 16 bits (autograd/weight_cache.h)
    int64_t step = 0;
    Tensor master = {};  // f32 copy of a 16-bit parameter
    // What the parameter was when the master was made or rounded into it. While that holds, nobody
    // else has written the parameter.
    struct Seen {
      std::weak_ptr<Storage> storage = {};  // set_data() leaves the version
      int64_t offset = 0;
      uint32_t version = 0;
    };
    mutable Seen seen = {};
    std::array<Tensor, kMaxStates> states = {};
    uint64_t rounding_key = 0;  // of its name
    // What kernels update, and the 16-bit tensor that they round it into, if any.
    const Tensor& target() const { return master.defined() ? master : parameter; }
    const Tensor& model_copy() const { return master.defined() ? parameter : cached_cast; }
  };
  // Reads or writes one option of a group, by name.
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
      value = number != 0;
    }
    // Of states: f32 or bf16.
    void operator()(const char* name, DType& value) {
      auto bits = static_cast<double>(8 * size_of(value));
      visit(name, OptionRange::kBits, {&bits, 1});
      value = bits == 16 ? kBF16 : kF32;
    }
    template <class T>
    requires(std::is_integral_v<T> || std::is_enum_v<T>) void operator()(
        const char* name, T& value, OptionRange range = OptionRange::kAny) {
      auto number = static_cast<double>(value);
      visit(name, range, {&number, 1});
      value = static_cast<T>(static_cast<int64_t>(number));
    }
  };
  // What one call of update() is about: parameters of a group that all take their step number.
  struct Pass {
    size_t group;
    std::span<ParameterState* const> parameters;
    const kernels::StepScalars* scalars;
  };

  explicit Optimizer(std::string_view type_name);
  void add_group(const NamedTensors& parameters);
  void check_may_grow() const;  // throws UnsupportedError where a gate decides about steps
  // When all groups are there. Throws ValueError where no group has a parameter.
  void check_parameters() const;
  // Throws ValueError for an option outside of its range, and with all of them where there is a
  // `contradiction`.
  void check_options(size_t group, const char* contradiction);

  std::string_view type_name() const { return type_name_; }
  virtual double& lr_of(size_t group) = 0;
  virtual bool keeps_master_weights(size_t group) const = 0;
  virtual DType state_dtype(size_t group) const = 0;  // of parameters that are not f64
  virtual void visit_options(size_t group, OptionVisitor& visitor) = 0;
  // Names of the states, in the order of ParameterState::states.
  virtual std::span<const char* const> state_names() const = 0;
  // The value with which state `index` begins; nothing where this group does not use it.
  virtual std::optional<double> initial_state(size_t group, size_t index) const = 0;
  // One pass over parameters that all take their step number.
  virtual void update(size_t group, std::span<ParameterState* const> parameters,
                      const kernels::StepScalars& scalars) = 0;
  // All passes of a step: for what takes parameters of several together.
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
  // Steps that the device left out, f64, which the numbers of skipped_of_ still count.
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

// Gives an optimizer its typed options. Options has `lr`, `master_weights` and
// `void visit(auto&& visitor)`, which names every option that state_dict saves, and the range of
// each; it may have `const char* contradiction() const`: what is wrong with them together, or null.
// `type_name` is what messages say.
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

  // A group more, after those that are there: layers that are un-frozen later. A schedule goes on
  // with the groups that it was made for. Throws as the constructor does, and UnsupportedError for an
  // optimizer with a gate: what was prepared knows the parameters that it has.
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
