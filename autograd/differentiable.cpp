#include <tessera/autograd/differentiable.h>

#include <sstream>

#include <tessera/autograd/anomaly.h>
#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable_node.h>
#include <tessera/autograd/engine.h>
#include <tessera/autograd/meta_inputs.h>
#include <tessera/autograd/op_observer.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/tensor/unreadable_storage.h>

namespace tessera {
namespace {

// What has no bytes gets them, where they can be brought; false, and untouched, where `casts` may
// be read instead. Throws UnsupportedError for what is left.
bool make_readable(const Op& op, const Tensor& input, bool casts) {
  const UnreadableStorage* unreadable = unreadable_storage(input);
  if (unreadable != nullptr && unreadable->can_bring()) {
    if (casts) return false;
    unreadable->bring();
  }
  const ElementGuard* guard = element_guard(input);
  TS_CHECK_AS(UnsupportedError, guard == nullptr, op, "has no rule for ", input, "; ",
              guard->remedy());
  return true;
}

const MetaInputs* meta_rules() { return Context::current().slot<MetaInputsSlot>().rules; }

struct Readiness {
  bool casts_left = false;   // of a weight whose cast may be read
  bool partly_meta = false;  // some inputs are meta, and the context has rules for it
  bool marked = false;       // some inputs have marks
};

// One device for all inputs; beside others a zero-dimensional CPU tensor may stand as a number
// where the op takes those. `casts`: of weights their casts may be read, where that is left to be
// seen. Marks are asked for here as a loop of their own would cost seven times as much.
Readiness check_inputs(const Op& op, std::span<const Tensor> inputs, bool casts) {
  const Tensor* first = nullptr;
  bool numbers = false;
  uint64_t marks = 0;
  Readiness ready;
  for (const Tensor& input : inputs) {
    if (!input.defined()) continue;
    marks |= input.impl()->marks;
    if (element_guard(input) != nullptr) [[unlikely]] {
      if (!make_readable(op, input, casts)) {
        ready.casts_left = true;
        continue;
      }
    }
    check_bytes(input, op.name);
    if (op.takes_numbers && input.dim() == 0 && input.device().is_cpu()) {
      numbers = true;
      continue;
    }
    if (first == nullptr) {
      first = &input;
    } else if (input.device() != first->device()) [[unlikely]] {
      const bool partly = input.is_meta() || first->is_meta();
      if (partly && meta_rules() != nullptr) {
        return {.partly_meta = true, .marked = all_marks(inputs) != 0};
      }
      TS_THROW(DeviceError, op, "expects all tensors on one device; got ", *first, " and ", input,
               "; move one with to(device)");
    }
  }
  if (numbers && first != nullptr && first->is_meta() && meta_rules() != nullptr) [[unlikely]] {
    ready.partly_meta = true;
  }
  ready.marked = marks != 0;
  return ready;
}

std::shared_ptr<OpNode> make_node(const Op& op, std::span<const Tensor> inputs,
                                  BackwardFunction backward) {
  auto node = std::make_shared<OpNode>(op, std::move(backward));
  node->next_edges.reserve(inputs.size());
  node->input_metas.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& input = inputs[i];
    node->input_metas.push_back(input.defined() ? TensorMeta::of(input) : TensorMeta{});
    node->next_edges.push_back(input.defined() && is_floating(input.dtype()) ? gradient_edge(input)
                                                                             : Edge{});
    if (node->next_edges.back().node) node->needs |= index_bit(i);
  }
  node->take_sequence();
  if (const RangeListener* listener = Context::current().slot<detail::ProfilerSlot>().active;
      listener != nullptr) [[unlikely]] {
    node->place = listener->place();
  }
  if (anomaly_enabled()) {
    PlainText<std::ostringstream> site;
    site << call_site() << (call_site().empty() ? "" : ": ") << op.name << '(';
    for (size_t i = 0; i < inputs.size(); ++i) site << (i ? ", " : "") << inputs[i].describe();
    site << ')';
    node->forward_site = site.str();
  }
  return node;
}

void decide_what_to_keep(OpNode& node, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (node.needs & index_bit(i)) node.kept |= node.op().reads.of(static_cast<int>(i));
  }
  node.saved_inputs.resize(count);
}

void finish(const std::shared_ptr<OpNode>& node, const TensorList& outputs, const Extras& extras) {
  for (const Tensor& extra : extras.tensors()) node->extras.emplace_back(extra);
  node->output_metas.reserve(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    node->output_metas.push_back(outputs[i].defined() ? TensorMeta::of(outputs[i]) : TensorMeta{});
    if (node->op().reads_outputs & index_bit(i)) {
      node->saved_outputs.resize(outputs.size());
      node->saved_outputs[i] = SavedTensor(outputs[i]);
    }
  }
}

// Follows the view to the tensor that was not made as a view.
void remember_base(const Tensor& view, const Tensor& source) {
  const AutogradSlot* slot = autograd_slot(source);
  const Tensor& base = slot != nullptr && slot->view ? slot->view->base : source;
  ensure_autograd_slot(view).view =
      std::make_unique<ViewInfo>(ViewInfo{base, view.version(), !grad_enabled()});
}

}  // namespace

[[gnu::cold]] const MarkRules* mark_rules_for(const Op& op) {
  const MarkRulesSlot& slot = Context::current().slot<MarkRulesSlot>();
  if (slot.checked) return nullptr;
  TS_CHECK_AS(
      UnsupportedError, slot.rules != nullptr, op,
      "an operand is marked as a part of a divided model, and this context has no compute "
      "mesh to check it by; call the op in the context (the rank's thread) that divided the "
      "model");
  return slot.rules;
}

bool is_left_unread(const Tensor& x) { return x.is_meta() && meta_rules() != nullptr; }

std::optional<TensorList> resolved_inputs(const Op& op,
                                          std::initializer_list<const Tensor*> inputs) {
  if (meta_rules() == nullptr) return std::nullopt;
  bool meta = false, real = false;
  TensorList all;
  for (const Tensor* input : inputs) {
    all.push_back(*input);
    if (input->defined()) (input->is_meta() ? meta : real) = true;
  }
  if (!meta || !real) return std::nullopt;
  return meta_rules()->resolved(op, all, false);
}

bool DifferentiableCall::will_record(std::span<const Tensor> inputs) {
  if (!grad_enabled()) return false;
  for (const Tensor& input : inputs) {
    if (input.defined() && requires_grad(input)) return true;
  }
  return false;
}

// Of marked inputs. The rules are not asked for the ops inside of the op.
TensorList DifferentiableCall::run_marked(const OpCall& call, const MarkRules& rules,
                                          std::span<const Tensor> inputs, Forward forward,
                                          void* function, BackwardFunction backward) {
  const uint64_t marks = rules.of_results(call, inputs);
  const CheckedMarks checked;
  TensorList results = run(call, inputs, forward, function, std::move(backward));
  for (const Tensor& result : results) {
    if (result.defined()) result.impl()->marks = marks;
  }
  return results;
}

TensorList DifferentiableCall::run(const OpCall& call, std::span<const Tensor> given,
                                   Forward forward, void* function, BackwardFunction backward) {
  const Op& op = call.op;
  TensorList cast;
  std::span<const Tensor> inputs = given;
  const AutocastMode& autocast = Context::current().slot<AutocastMode>();
  const bool casts =
      autocast.enabled && (op.autocast != Autocast::kInputDtype || autocast.boundary);
  const Readiness ready = check_inputs(op, given, casts || op.reads_copies != 0);
  if (ready.marked) [[unlikely]] {
    if (const MarkRules* rules = mark_rules_for(op)) {
      return run_marked(call, *rules, given, forward, function, std::move(backward));
    }
  }
  const ProfilerRange range(op.name);  // once, though what is marked comes by twice
  if (ready.partly_meta) [[unlikely]] {
    const TensorList resolved = meta_rules()->resolved(op, given, false);
    return run(call, resolved, forward, function, std::move(backward));
  }
  if (casts) {
    cast = detail::autocast_inputs(op, given);
    inputs = cast;
    if (ready.casts_left) check_inputs(op, inputs, false);
  }
  TensorList results;
  Extras extras(static_cast<bool>(backward));
  {
    NoGradGuard no_grad;
    forward(function, inputs, extras, results);
  }
  if (OpObserver* observer = Context::current().slot<OpObserverSlot>().observer) [[unlikely]] {
    observer->saw(op, inputs, results);
  }
  for (Tensor& result : results) {
    for (const Tensor& input : inputs) {
      if (result.defined() && result.is(input)) result = raw::alias(result);
    }
  }
  if (op.view) {
    for (const Tensor& result : results) remember_base(result, inputs[0]);
  }
  if (!backward) return results;

  std::shared_ptr<OpNode> node = make_node(op, inputs, std::move(backward));
  if (node->needs == 0) return results;  // only integer inputs were left
  decide_what_to_keep(*node, inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (node->kept & index_bit(i)) node->saved_inputs[i] = SavedTensor(inputs[i]);
  }
  finish(node, results, extras);
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].defined() && is_floating(results[i].dtype())) {
      set_history(results[i], node, static_cast<int>(i));
    }
  }
  return results;
}

Tensor DifferentiableCall::run_inplace(const OpCall& call, std::span<const Tensor> inputs,
                                       Forward forward, void* function, BackwardFunction backward) {
  const Op& op = call.op;
  const Readiness ready = check_inputs(op, inputs, false);
  if (ready.marked) [[unlikely]] {
    if (const MarkRules* rules = mark_rules_for(op)) {
      TS_CHECK_AS(UnsupportedError, rules->of_results(call, inputs) == inputs[0].impl()->marks,
                  in_place_name(op.name), "the result is marked otherwise than ", inputs[0],
                  ", to which it would be written; use the form that returns a new tensor");
      const CheckedMarks checked;
      return run_inplace(call, inputs, forward, function, std::move(backward));
    }
  }
  const ProfilerRange range(op.name);
  if (ready.partly_meta) [[unlikely]] {
    const TensorList resolved = meta_rules()->resolved(op, inputs, true);
    return run_inplace(call, resolved, forward, function, std::move(backward));
  }
  const Tensor& self = inputs[0];
  const AutogradSlot* slot = autograd_slot(self);
  if (grad_enabled()) {
    const Tensor& owner = slot != nullptr && slot->view ? slot->view->base : self;
    const AutogradSlot* owner_slot = autograd_slot(owner);
    TS_CHECK_AS(AutogradError,
                owner_slot == nullptr || !owner_slot->requires_grad || owner_slot->grad_fn,
                in_place_name(op.name), owner.is(self) ? "writes to " : "writes to a view of ",
                owner, ", a leaf that requires grad; write inside a NoGradGuard, or to a clone");
    TS_CHECK_AS(AutogradError,
                !(backward && slot != nullptr && slot->view && slot->view->made_without_grad),
                in_place_name(op.name), "writes to ", self,
                ", a view that was made without grad; make the view outside the NoGradGuard");
  }
  std::shared_ptr<OpNode> node;
  if (backward) {
    node = make_node(op, inputs, std::move(backward));
    decide_what_to_keep(*node, inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!(node->kept & index_bit(i)) || !inputs[i].defined()) continue;
      // What the call overwrites is kept as a copy of its old value.
      if (inputs[i].impl()->version == self.impl()->version) {
        NoGradGuard no_grad;
        node->saved_inputs[i] = SavedTensor(clone(inputs[i]));
      } else {
        node->saved_inputs[i] = SavedTensor(inputs[i]);
      }
    }
  }
  Extras extras(static_cast<bool>(node));
  TensorList results;
  {
    NoGradGuard no_grad;
    forward(function, inputs, extras, results);
  }
  self.bump_version(op.name.data());
  if (node && node->needs != 0 && is_floating(self.dtype())) {
    finish(node, {self}, extras);
    if (slot != nullptr && slot->view) {
      rebase_view_history(self, std::move(node));
    } else {
      set_history(self, std::move(node), 0);
    }
  }
  return self;
}

Tensor Saved::input(int i) const {
  TS_CHECK_AS(AutogradError, node_.kept & index_bit(static_cast<size_t>(i)), node_.op(),
              "backward reads input ", i,
              ", which its record does not name for the wanted gradients");
  const SavedTensor& saved = node_.saved_inputs[static_cast<size_t>(i)];
  if (!saved.defined()) return {};  // an absent input
  return saved.unpack(node_.next_edges[static_cast<size_t>(i)], node_.op(), "input", i);
}

Tensor Saved::input_or_place(int i) const {
  const auto at = static_cast<size_t>(i);
  if (node_.kept & index_bit(at)) return input(i);
  const TensorMeta& meta = node_.input_metas[at];
  const Tensor place = zeros(meta.shape, {.dtype = meta.dtype, .device = meta.device});
  const Edge& history = node_.next_edges[at];
  if (grad_enabled() && history.node) set_history(place, history.node, history.index);
  return place;
}

Tensor Saved::output(int i) const {
  TS_CHECK_AS(AutogradError, node_.op().reads_outputs & index_bit(static_cast<size_t>(i)),
              node_.op(), "backward reads output ", i, ", which its record does not name");
  const Edge self{std::const_pointer_cast<OpNode>(node_.shared_from_this()), i};
  return node_.saved_outputs.at(static_cast<size_t>(i)).unpack(self, node_.op(), "output", i);
}

// Asked for twice it is unpacked once: hooks may calculate it.
Tensor Saved::extra(int i) const {
  const auto index = static_cast<size_t>(i);
  extras_.resize(node_.extras.size());
  if (!extras_.at(index)) extras_[index] = node_.extras[index].unpack();
  return *extras_[index];
}
bool Saved::needs(int input) const {
  return (node_.needs & index_bit(static_cast<size_t>(input))) != 0;
}
const Shape& Saved::input_shape(int i) const {
  return node_.input_metas.at(static_cast<size_t>(i)).shape;
}
DType Saved::input_dtype(int i) const { return node_.input_metas.at(static_cast<size_t>(i)).dtype; }
const Shape& Saved::output_shape(int i) const {
  return node_.output_metas.at(static_cast<size_t>(i)).shape;
}
DType Saved::output_dtype(int i) const {
  return node_.output_metas.at(static_cast<size_t>(i)).dtype;
}

Tensor Saved::take_pending(int input) const {
  return take_pending_gradient(node_.next_edges[static_cast<size_t>(input)]);
}
bool Saved::wants_column_sums(int input) const {
  return tessera::wants_column_sums(node_.next_edges[static_cast<size_t>(input)]);
}
void Saved::give_column_sums(int input, const Tensor& gradient, const Tensor& sums) const {
  leave_column_sums(node_.next_edges[static_cast<size_t>(input)], gradient, sums);
}
void Saved::give_parts(const Tensor& whole, std::span<const Tensor> parts) const {
  leave_parts(whole, node_.next_edges, parts);
}
Tensor Saved::column_sums() const { return arrived_column_sums(0); }

namespace {

// The past of gradients that kernels made: differentiating them once more is an error.
class NoSecondDerivative final : public Node {
 public:
  // `past`: all that the gradients were calculated from, so that whoever wants one of them comes
  // by.
  NoSecondDerivative(const Op& op, std::vector<Edge> past, const Tensor& gradient) : op_(op) {
    next_edges = std::move(past);
    output_metas.push_back(TensorMeta::of(gradient));
  }
  TensorList apply(TensorList) override {
    TS_THROW(UnsupportedError, op_.name,
             "has no second derivative here: its backward is a kernel; write it as ",
             op_.composed.empty() ? "ops that have one" : op_.composed);
  }
  std::string name() const override { return std::string(op_.name) + " backward"; }

 private:
  const Op& op_;
};

}  // namespace

TensorList OpNode::apply(TensorList grads) {
  TS_CHECK_AS(
      AutogradError, !released, op_,
      "backward a second time through a graph whose saved tensors were freed; detach() what "
      "is carried over from an earlier step, or use retain_graph = true in the first "
      "backward");
  if (!grad_enabled() || op_.twice_differentiable) {
    return backward_(Grads(grads), Saved(*this));
  }
  TensorList results;
  {
    NoGradGuard no_grad;
    results = backward_(Grads(grads), Saved(*this));
  }
  std::vector<Edge> past = next_edges;
  for (const Tensor& gradient : grads) {
    if (gradient.defined()) past.push_back(gradient_edge(gradient));
  }
  for (Tensor& result : results) {
    if (!result.defined()) continue;
    result = raw::alias(result);
    set_history(result, std::make_shared<NoSecondDerivative>(op_, past, result), 0);
  }
  return results;
}

void OpNode::release_saved() {
  released = true;
  saved_inputs.clear();
  saved_outputs.clear();
  extras.clear();
  backward_ = nullptr;
}

}  // namespace tessera
