#include <tessera/optim/optimizer.h>

#include <algorithm>
#include <deque>
#include <map>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::optim {
namespace {

// With the parameter's order of dimensions, so that one index walks through both.
Tensor make_state(const Tensor& parameter, DType dtype, double value) {
  const MemoryCategoryGuard category(MemoryCategory::kOptimizer);
  const Tensor state = raw::empty_like(parameter, dtype);
  fill_(state, value);
  copy_guard(parameter, state);
  return state;
}

Tensor make_master(const Tensor& parameter) {
  const MemoryCategoryGuard category(MemoryCategory::kOptimizer);
  const Tensor master = raw::empty_like(parameter, kF32);
  copy_(master, raw::alias(parameter));
  copy_guard(parameter, master);
  return master;
}

// Of parts, each rank updates its own: parameter and gradient are the same part. A plain gradient
// of a part is its owner's business.
void check_placements(const Tensor& parameter, const Tensor& gradient) {
  const TensorPlacement *own = tensor_placement(parameter), *other = tensor_placement(gradient);
  TS_CHECK_AS(UnsupportedError, other == nullptr || (own != nullptr && own->equals(*other)), "step",
              "the parameter is ", parameter, " and its gradient ", gradient,
              "; redistribute one of them (a summand cannot be updated)");
}

bool is_16_bit(DType dtype) { return dtype == kF16 || dtype == kBF16; }

// The cached copy that the update writes beside the parameter, or undefined: it knows how to round
// to 16 bits, once. Others are made again where they are read.
Tensor cast_to_write(const Tensor& parameter) {
  for (const auto& [key, tensor] : weight_cache::begin_write(parameter)) {
    if (!key.is_plain_cast()) continue;
    // A step on another stream may have made it (GraphedStep); this one may write when it is freed.
    if (tensor.device().is_cuda()) {
      gpu::record_use(tensor.device().index, tensor.storage()->data());
    }
    return tensor;
  }
  return {};
}
void mark_cast_written(const Tensor& parameter, const Tensor& cast) {
  if (!cast.defined()) return;
  weight_cache::mark_written(parameter, {.key = {.dtype = cast.dtype()}, .tensor = cast});
}

std::string group_key(size_t group, std::string_view option) {
  return "group." + std::to_string(group) + "." + std::string(option);
}

}  // namespace

Optimizer::Optimizer(std::string_view type_name)
    : type_name_(type_name), next_step_(tensor({1, 0}, kF64)) {}
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
    TS_CHECK(tensor.defined() && tensor.is_leaf() && is_floating(tensor.dtype()), type_name(), "'",
             name, "' must be a floating leaf; got ", tensor);
    TS_CHECK(names.insert(name).second, type_name(), "the name '", name,
             "' was given twice; state is kept by name");
    TS_CHECK(tensors.insert(tensor.impl()).second, type_name(), "'", name,
             "' is a tensor that was already given under another name; give tied weights once");
    TS_CHECK_DTYPE(tensor.dtype() != kF64 || state_dtype(groups_.size()) == kF32, type_name(),
                   "state_dtype ", state_dtype(groups_.size()), " is for arithmetic in f32, and '",
                   name, "' is ", tensor, "; leave it out for the group of f64 parameters");
    group.named.push_back({name, tensor});
    group.states.push_back({.parameter = tensor,
                            .gradient = {},
                            .rounding_key = kernels::StateRounding::key_of(name)});
  }
  groups_.push_back(std::move(group));
}

DType Optimizer::state_dtype_of(size_t group, const Tensor& parameter) const {
  return parameter.dtype() == kF64 ? kF64 : state_dtype(group);
}

namespace {

Shape with_inserted(const Shape& shape, int at, int64_t value) {
  Shape result;
  for (int d = 0; d < shape.size(); ++d) {
    if (d == at) result.push_back(value);
    result.push_back(shape[d]);
  }
  return result;
}

// Boxes of one size that lie as far apart in the whole as it is long by their number are one box of
// a whole that has a dimension for their number.
kernels::WholeIndex index_of(const Tensor& part, const TensorPlacement& placement) {
  Shape shape = part.shape(), strides = part.strides();
  PlaceInWhole place = placement.place();
  if (place.boxes.empty()) return {};
  PartBox& box = place.boxes.front();
  const auto count = static_cast<int64_t>(place.boxes.size());
  if (shape.size() != place.whole.size()) {  // a run, which is 1-D, of a part
    shape = box.extent;
    strides = box.strides;
  }
  if (count > 1) {
    int dim = 0;
    while (dim + 1 < shape.size() && shape[dim] == box.extent[dim]) ++dim;
    const int64_t step = place.whole[dim] / count;
    for (int64_t i = 0; i < count; ++i) {
      const PartBox& other = place.boxes[static_cast<size_t>(i)];
      Shape offset = box.offset;
      offset[dim] += i * step;
      TS_CHECK_AS(UnsupportedError,
                  count * step == place.whole[dim] && other.extent == box.extent &&
                      other.offset == offset && shape[dim] == count * box.extent[dim],
                  "state_dtype", "a part whose pieces do not lie evenly in the whole has no ",
                  "numbers that round states alike for any cut; got ", part,
                  "; leave state_dtype out of its group");
    }
    place.whole[dim] = step;
    place.whole = with_inserted(place.whole, dim, count);
    box.offset = with_inserted(box.offset, dim, 0);
    shape[dim] = box.extent[dim];
    shape = with_inserted(shape, dim, count);
    strides = with_inserted(strides, dim, strides[dim] * box.extent[dim]);
  }
  return kernels::WholeIndex::of(shape, strides, place.whole, box.offset);
}

}  // namespace

kernels::StateRounding Optimizer::rounding_of(const ParameterState& state) {
  const Tensor& parameter = state.parameter;
  const Shape& shape = parameter.shape();
  const TensorPlacement* part = tensor_placement(parameter);
  return {state.rounding_key, part != nullptr
                                  ? index_of(parameter, *part)
                                  : kernels::WholeIndex::of(shape, parameter.strides(), shape,
                                                            Shape::filled(shape.size(), 0))};
}

void Optimizer::check_may_grow() const {
  TS_CHECK_AS(UnsupportedError, !gate_, type_name(),
              "a group is added before prepare(), or before another set_step_gate()");
}

void Optimizer::check_parameters() const {
  const bool any =
      std::ranges::any_of(groups_, [](const Group& group) { return !group.named.empty(); });
  TS_CHECK(any, type_name(), "needs parameters; got an empty list",
           groups_.size() > 1 ? " in every group" : "");
}

void Optimizer::check_options(size_t group, const char* contradiction) {
  class Checker : public OptionVisitor {
   public:
    explicit Checker(std::string_view type_name) : type_name_(type_name) {}
    void visit(const char* name, OptionRange range, std::span<double> values) override {
      for (size_t i = 0; i < values.size(); ++i) {
        const double value = values[i];
        const std::string index = values.size() > 1 ? "[" + std::to_string(i) + "]" : "";
        all << (all.tellp() > 0 ? ", " : "") << name << index << ' ' << value;
        const auto check = [&](bool fits, const char* what) {  // NaN fits nowhere
          TS_CHECK(fits, type_name_, name, index, " must ", what, "; got ", value);
        };
        switch (range) {
          case OptionRange::kAny:
          case OptionRange::kBits:
            break;
          case OptionRange::kNotNegative:
            check(value >= 0, "not be negative");
            break;
          case OptionRange::kBelowOne:
            check(value >= 0 && value < 1, "be in [0, 1)");
            break;
          case OptionRange::kUpToOne:
            check(value >= 0 && value <= 1, "be in [0, 1]");
            break;
        }
      }
    }
    PlainText<std::ostringstream> all;

   private:
    std::string_view type_name_;
  };
  Checker checker(type_name());
  visit_options(group, checker);
  TS_CHECK(contradiction == nullptr, type_name(), contradiction, "; got ", checker.all.str());
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
  found_ = {};
  for (const Group& group : groups_) {
    for (const auto& [name, tensor] : group.named) tensor.zero_grad(set_to_none);
  }
}

// ---- The step ----------------------------------------------------------------------------------

void Optimizer::prepare(size_t group, ParameterState& state) {
  const auto check_outside_of_graphs = [&] {
    TS_CHECK_AS(UnsupportedError, gpu::Capture::current() == nullptr, type_name(),
                "a parameter takes part for the first time and its state must be made; run a step "
                "before the capture");
  };
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
    check_outside_of_graphs();
    state.master = make_master(state.parameter);
    note_parameter(state);
  } else if (is_written(state)) {
    follow_write(state);  // in a capture each replay does it: the graph may be what writes
  }
  for (size_t i = 0; i < state_names().size(); ++i) {
    if (state.states[i].defined()) continue;
    if (const auto value = initial_state(group, i)) {
      check_outside_of_graphs();
      state.states[i] = make_state(state.parameter, state_dtype_of(group, state.parameter), *value);
    }
  }
}

void Optimizer::note_parameter(const ParameterState& state) {
  if (!state.master.defined()) return;
  const Tensor& parameter = state.parameter;
  state.seen = {parameter.storage(), parameter.offset(), parameter.version()};
}

void Optimizer::forget_parameter(const ParameterState& state) { state.seen = {}; }

bool Optimizer::is_written(const ParameterState& state) {
  if (!state.master.defined()) return false;
  const Tensor& parameter = state.parameter;
  const ParameterState::Seen& seen = state.seen;
  return seen.version != parameter.version() || seen.offset != parameter.offset() ||
         seen.storage.owner_before(parameter.storage()) ||
         parameter.storage().owner_before(seen.storage);
}

// A write changes elements, and a version moves on without one too (an average that stood in for
// the parameter for a while): where the parameter still is its master rounded, the master keeps
// what it knows beyond 16 bits. In place: graphs write to it.
void Optimizer::follow_write(const ParameterState& state) {
  const NoGradGuard no_grad;
  const Tensor master = raw::alias(state.master);
  const Tensor parameter = raw::alias(state.parameter).to(master.device());
  const Tensor same = kernels::binary<fn::Eq>(master.to(parameter.dtype()), parameter);
  kernels::ternary_into<fn::Where>(master, same, master, parameter, {}, kF32);
  master.bump_version("a write of the parameter");
  note_parameter(state);
}

// Before each replay. A write that the graph makes behind the step is none that the host sees: its
// version moved on in the capture alone, and says so at the first replay.
std::shared_ptr<std::vector<Optimizer::Replayed>> Optimizer::follow_writes_at_replays() {
  const auto captured = std::make_shared<std::vector<Replayed>>();
  gpu::Capture& capture = *gpu::Capture::current();
  const auto follow = [captured, first = true,
                       stream = gpu::current_stream_handle(capture.device())](void*) mutable {
    const gpu::CurrentStream current(stream);
    for (Replayed& one : *captured) {
      const bool written = is_written(*one.state);
      if (first) one.written_behind = written;
      if (written) follow_write(*one.state);
    }
    first = false;
  };
  capture.feed(0, follow);
  return captured;
}

void Optimizer::settle_masters() const {
  for (const Group& group : groups_) {
    for (const ParameterState& state : group.states) {
      if (is_written(state)) follow_write(state);
    }
  }
}

bool Optimizer::step() {
  const TimelineRange range("optimizer step");
  const NoGradGuard no_grad;
  const bool captures = gpu::Capture::current() != nullptr;
  TS_CHECK_AS(UnsupportedError, !captures || !gate_ || gate_answers_for_replays_, type_name(),
              "the step gate decides on the host, and a graph repeats the step without asking it; "
              "train without the graph, or take the gate away (that of an Accelerator goes with "
              "free_memory())");
  // A gate may still set what the step is told (a loss scaler that unscales now).
  StepDecision decision = gate_ ? gate_() : StepDecision{};
  double* next_step = next_step_.data_as<double>();
  double scalars[kernels::kNumStepScalars] = {};
  kernels::StepScalars step_scalars(scalars);
  step_scalars.gradient_factor = std::exchange(gradient_factor_, {});
  step_scalars.found = std::exchange(found_, {});
  if (!captures) {  // a replay takes what there is at its time
    scalars[kernels::kGradientScale] = std::exchange(next_step[0], 1);
    const bool skip = std::exchange(next_step[1], 0) != 0;
    if (decision.run && skip) decision = StepDecision::skip("a gradient is not finite");
  }
  if (!decision.run) {
    skip_reason_ = std::move(decision.reason);
    return false;
  }
  skip_reason_.clear();
  std::vector<ParameterState*> all;
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (ParameterState& state : groups_[g].states) {
      if (state.parameter.grad().defined()) all.push_back(&state);
    }
  }
  if (all.empty()) step_scalars.found = {};
  if (step_scalars.found.defined() || skipped_.defined()) {
    count_skipped(all);
    step_scalars.skipped = skipped_;
  }
  const auto captured = captures ? follow_writes_at_replays() : nullptr;
  struct Planned {
    std::vector<ParameterState*> states;
    int64_t number;
    std::array<double, kernels::kNumStepScalars> values;
    kernels::StepScalars scalars;
  };
  std::deque<Planned> planned;  // at addresses that stay
  std::vector<Pass> passes;
  for (size_t g = 0; g < groups_.size(); ++g) {
    // Parameters that joined late have lower step numbers: each number is a pass of its own.
    std::map<int64_t, std::vector<ParameterState*>> by_step;
    for (ParameterState& state : groups_[g].states) {
      state.gradient = state.parameter.grad();
      if (!state.gradient.defined()) continue;
      check_placements(state.parameter, state.gradient);
      prepare(g, state);
      if (!state.master.defined()) {
        state.cached_cast = cast_to_write(state.parameter);
      }
      by_step[state.step + 1].push_back(&state);
    }
    for (const auto& [number, states] : by_step) {
      scalars[kernels::kLearningRate] = lr_of(g);
      scalars[kernels::kStep] = static_cast<double>(number);
      Planned& one = planned.emplace_back(Planned{states, number, {}, step_scalars});
      std::copy(std::begin(scalars), std::end(scalars), one.values.begin());
      one.scalars.values = one.values.data();
      if (captures) one.scalars.on_device = feed_replays(g, states);
      passes.push_back({g, one.states, &one.scalars});
    }
  }
  update_all(passes);
  for (const Planned& pass : planned) {
    for (ParameterState* state : pass.states) {
      if (captures) {
        captured->push_back({state, state->cached_cast});
      } else {
        state->step = pass.number;
      }
      state->gradient = {};
      mark_cast_written(state->parameter, std::exchange(state->cached_cast, {}));
    }
  }
  // When all are written: some may be views of one tensor, whose version they share.
  for (const Planned& pass : planned) {
    for (const ParameterState* state : pass.states) note_parameter(*state);
  }
  if (step_scalars.found.defined()) add_(skipped_, reshape(step_scalars.found, {}));
  if (captures) {
    // What the host does in a step, a replay does here, when nothing of the step refuses it.
    gpu::Capture::current()->feed(0, [this, captured](void*) {
      double* const told = next_step_.data_as<double>();
      const bool skip = std::exchange(told[1], 0) != 0;
      told[0] = 1;
      skip_reason_ = skip ? "a gradient is not finite" : "";
      for (const Replayed& one : *captured) {
        if (!skip) {
          ++one.state->step;
          one.state->parameter.bump_version();
          mark_cast_written(one.state->parameter, one.cast);
        }
      }
      for (const Replayed& one : *captured) {
        one.written_behind ? forget_parameter(*one.state) : note_parameter(*one.state);
      }
    });
  }
  return true;
}

void Optimizer::update_all(std::span<const Pass> passes) {
  for (const Pass& pass : passes) update(pass.group, pass.parameters, *pass.scalars);
}

// Options that a captured step has taken as constants.
std::vector<double> Optimizer::constant_options(size_t group) {
  class Reader : public OptionVisitor {
   public:
    void visit(const char* name, OptionRange, std::span<double> values) override {
      if (std::string_view(name) != "lr") found.insert(found.end(), values.begin(), values.end());
    }
    std::vector<double> found;
  };
  Reader reader;
  visit_options(group, reader);
  return std::move(reader.found);
}

// The scalars of a captured update, which a replay asks for. It refuses what the graph cannot know.
const double* Optimizer::feed_replays(size_t group, const std::vector<ParameterState*>& stepped) {
  struct Captured {
    ParameterState* state;
    Tensor target, parameter;  // kept: the graph writes to them
    std::array<Tensor, kMaxStates> states;
  };
  std::vector<Captured> all;
  for (ParameterState* state : stepped) {
    all.push_back(
        {state, raw::alias(state->target()), raw::alias(state->parameter), state->states});
  }
  const auto fill = [this, group, all = std::move(all), skipped = skipped_,
                     options = constant_options(group)](void* host) {
    TS_CHECK_AS(ConfigError, constant_options(group) == options, type_name(),
                "options other than the learning rate changed since the step was captured; reset "
                "the graph");
    double* const scalars = static_cast<double*>(host);
    double* const next_step = next_step_.data_as<double>();
    scalars[kernels::kLearningRate] = lr_of(group);
    scalars[kernels::kStep] = static_cast<double>(all.front().state->step + 1);
    scalars[kernels::kGradientScale] = next_step[0];
    scalars[kernels::kSkipStep] = next_step[1] != 0 ? 1 : 0;
    TS_CHECK_AS(ConfigError, skipped.is(skipped_), type_name(),
                "the count of skipped steps was replaced since the step was captured (a state was "
                "loaded); reset the graph");
    for (const Captured& one : all) {
      bool same = one.state->target().data() == one.target.data() &&
                  one.state->parameter.data() == one.parameter.data();
      for (size_t i = 0; i < kMaxStates; ++i) same = same && one.state->states[i].is(one.states[i]);
      TS_CHECK_AS(ConfigError, same, type_name(),
                  "parameters or state were replaced since the step was captured (a state was "
                  "loaded, or the model moved); reset the graph");
    }
  };
  gpu::Capture& capture = *gpu::Capture::current();
  return static_cast<const double*>(capture.feed(kernels::kNumStepScalars * sizeof(double), fill));
}

// Counts from here on what the device leaves out of these parameters' steps.
void Optimizer::count_skipped(const std::vector<ParameterState*>& stepped) {
  if (skipped_.defined() && skipped_of_ == stepped) return;
  TS_CHECK_AS(UnsupportedError, gpu::Capture::current() == nullptr, type_name(),
              "the first step that the device may leave out cannot be captured; run one before");
  settle_skipped();
  if (stepped.empty()) return;
  skipped_ = zeros({}, {.dtype = kF64, .device = stepped.front()->parameter.device()});
  skipped_of_ = stepped;
}

void Optimizer::settle_skipped() const {
  if (!skipped_.defined()) return;
  const auto count = static_cast<int64_t>(skipped_.item());
  if (count == 0) return;
  for (ParameterState* state : skipped_of_) state->step -= count;
  const NoGradGuard no_grad;
  fill_(skipped_, 0);
}

// ---- State -------------------------------------------------------------------------------------

StateDict Optimizer::state_dict() const {
  settle_skipped();
  settle_masters();
  class Writer : public OptionVisitor {
   public:
    Writer(StateDict& state, size_t group) : state_(state), group_(group) {}
    void visit(const char* name, OptionRange range, std::span<double> values) override {
      if (range == OptionRange::kBits && values[0] == 32) return;
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
    if (const std::optional<double> lr = groups_[g].initial_lr) {
      state.set(group_key(g, "initial_lr"), scalar_tensor(*lr, kF64));
    }
    state.set(group_key(g, "num_parameters"),
              scalar_tensor(static_cast<int64_t>(groups_[g].named.size()), kI64));
    for (size_t i = 0; i < groups_[g].named.size(); ++i) {
      append_state(groups_[g].states[i], "state." + groups_[g].named[i].name + ".", state);
    }
  }
  return state;
}

void Optimizer::append_state(const ParameterState& own, const std::string& prefix,
                             StateDict& state) const {
  if (own.step == 0 && !own.master.defined()) return;
  state.set(prefix + "step", scalar_tensor(own.step, kI64));
  if (own.master.defined()) state.set(prefix + "master", own.master);
  for (size_t s = 0; s < state_names().size(); ++s) {
    if (own.states[s].defined()) state.set(prefix + state_names()[s], own.states[s]);
  }
}

StateDict Optimizer::parameter_state(std::string_view name) const {
  settle_skipped();
  settle_masters();
  for (const Group& group : groups_) {
    const auto named = std::ranges::find(group.named, name, &NamedTensor::name);
    if (named == group.named.end()) continue;
    StateDict state;
    append_state(group.states[static_cast<size_t>(named - group.named.begin())], "", state);
    return state;
  }
  TS_THROW(ValueError, type_name(), "has no parameter '", name, "'");
}

Tensor Optimizer::state_like(std::string_view key) const {
  constexpr std::string_view kPrefix = "state.";
  const size_t dot = key.rfind('.');
  if (!key.starts_with(kPrefix) || dot < kPrefix.size() || key.substr(dot + 1) == "step") return {};
  const std::string_view name = key.substr(kPrefix.size(), dot - kPrefix.size());
  for (const Group& group : groups_) {
    for (const auto& [other, tensor] : group.named) {
      if (other == name) return tensor;
    }
  }
  return {};
}

void Optimizer::load_state_dict(const StateDict& state) {
  const NoGradGuard no_grad;
  std::string problems;
  std::unordered_set<std::string> used;
  class Reader : public OptionVisitor {
   public:
    Reader(const StateDict& state, size_t group, std::string& problems,
           std::unordered_set<std::string>& used)
        : state_(state), group_(group), problems_(problems), used_(used) {}
    void visit(const char* name, OptionRange range, std::span<double> values) override {
      const std::string key = group_key(group_, name);
      used_.insert(key);
      const Tensor* saved = state_.find(key);
      if (saved == nullptr && range == OptionRange::kBits) {
        values[0] = 32;
      } else if (saved == nullptr) {
        problems_ += "\n  missing: " + key;
      } else if (saved->numel() != static_cast<int64_t>(values.size())) {
        problems_ += "\n  of another size: " + key + " is " + saved->describe();
      } else {
        std::ranges::copy(saved->to_vector<double>(), values.begin());
      }
    }

   private:
    const StateDict& state_;
    size_t group_;
    std::string& problems_;
    std::unordered_set<std::string>& used_;
  };

  // The options as they were.
  class Kept : public OptionVisitor {
   public:
    void visit(const char*, OptionRange, std::span<double> values) override {
      if (restores) {
        std::copy_n(values_.begin() + at_, values.size(), values.begin());
        at_ += static_cast<std::ptrdiff_t>(values.size());
      } else {
        values_.insert(values_.end(), values.begin(), values.end());
      }
    }
    bool restores = false;

   private:
    std::vector<double> values_;
    std::ptrdiff_t at_ = 0;
  };
  std::vector<Kept> kept(groups_.size());
  for (size_t g = 0; g < groups_.size(); ++g) visit_options(g, kept[g]);

  struct Loaded {
    ParameterState* target;
    ParameterState value;
  };
  std::vector<Loaded> loaded;
  std::vector<std::optional<double>> initial_lrs;
  const auto take = [&](const std::string& key, const Tensor& parameter, DType dtype) -> Tensor {
    used.insert(key);
    const Tensor* saved = state.find(key);
    if (saved == nullptr) {
      problems += "\n  missing: " + key;
      return {};
    }
    const Tensor part = fitting_part(parameter, *saved);
    if (!part.defined()) {
      problems += std::string("\n  of another ") +
                  (tensor_placement(*saved) != nullptr ? "placement: " : "shape: ") + key + " is " +
                  described_whole(*saved) + ", the parameter is " + described_whole(parameter);
      return {};
    }
    const MemoryCategoryGuard category(MemoryCategory::kOptimizer);
    const Tensor copy = raw::empty_like(parameter, dtype);
    copy_(copy, part);
    copy_guard(parameter, copy);
    return copy;
  };
  try {
    for (size_t g = 0; g < groups_.size(); ++g) {
      // First, as they say which states there are.
      Reader options(state, g, problems, used);
      visit_options(g, options);
      const std::string rate_key = group_key(g, "initial_lr");
      used.insert(rate_key);
      initial_lrs.push_back(state.contains(rate_key) ? std::optional(state.scalar(rate_key))
                                                     : std::nullopt);
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
        ParameterState value{.parameter = parameter,
                             .gradient = {},
                             .rounding_key = groups_[g].states[i].rounding_key};
        used.insert(prefix + "step");
        if (const Tensor* step = state.find(prefix + "step")) {
          value.step = step->item<int64_t>();
          if (state.contains(prefix + "master")) {
            value.master = take(prefix + "master", parameter, kF32);
          }
          for (size_t s = 0; s < state_names().size(); ++s) {
            const std::string key = prefix + state_names()[s];
            // One that an option needed before was saved, too.
            if (value.step > 0 && (initial_state(g, s) || state.contains(key))) {
              value.states[s] = take(key, parameter, state_dtype_of(g, parameter));
            }
          }
        }
        loaded.push_back({&groups_[g].states[i], std::move(value)});
      }
    }
    for (const auto& [name, saved] : state) {
      if (!used.contains(name)) problems += "\n  unexpected: " + name;
    }
    TS_CHECK(problems.empty(), type_name(),
             "the saved state does not fit this optimizer:", problems,
             "\n  make the optimizer with the groups, names and kind it was saved with");
  } catch (...) {
    for (size_t g = 0; g < groups_.size(); ++g) {
      kept[g].restores = true;
      visit_options(g, kept[g]);
    }
    throw;
  }
  for (size_t g = 0; g < groups_.size(); ++g) groups_[g].initial_lr = initial_lrs[g];
  for (Loaded& one : loaded) {
    *one.target = std::move(one.value);
    note_parameter(*one.target);  // the saved master says more than the parameter of now
  }
  skipped_ = {};
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
    note_parameter(*state);
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

int64_t Optimizer::state_bytes_per_element(std::string_view name) const {
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.named.size(); ++i) {
      if (group.named[i].name != name) continue;
      const ParameterState& own = group.states[i];
      int64_t bytes = own.master.defined() ? size_of(own.master.dtype()) : 0;
      for (const Tensor& state : own.states) {
        if (state.defined()) bytes += size_of(state.dtype());
      }
      return bytes;
    }
  }
  return 0;
}

}  // namespace tessera::optim
