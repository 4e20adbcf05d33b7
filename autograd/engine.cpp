#include <tessera/autograd/engine.h>

#include <algorithm>
#include <atomic>
#include <queue>
#include <unordered_map>
#include <utility>

#include <tessera/autograd/anomaly.h>
#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/mark_rules.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/profile/profiler.h>

namespace tessera {
namespace {

// Of a gradient as it was sent.
struct ColumnSums {
  int index;  // of the output
  const TensorImpl* gradient;
  uint32_t version;
  Tensor sums;
};

// What a node of a first half leaves to the second one, see [Note: two halves].
struct SecondHalf {
  struct Calculation {
    std::vector<int> inputs;
    std::function<TensorList()> calculate;
  };
  std::vector<Calculation> calculations;
  std::vector<Edge> edges;  // those that wait, empty ones in the place of others
  TensorList gradients;     // that are there
  std::string range_name;   // of a profile
  uint32_t place = 0;
};

struct NodeState {
  std::shared_ptr<Node> node;  // none behind a first half in which it ran
  uint64_t sequence = 0;
  const TensorImpl* part = nullptr;  // the gradient of a leaf that is its part of another
  int owed = 0;                      // gradients still to come from nodes that run earlier
  bool needed = false;               // leads to a target
  bool target = false;               // an edge is wanted, or an input of a first half
  TensorList gradients;
  std::vector<std::pair<int, size_t>> captures;  // (output, position in the result)
  std::vector<ColumnSums> sums;                  // that came along with gradients
  std::unique_ptr<SecondHalf> second;
};

struct Later {
  bool operator()(const NodeState* a, const NodeState* b) const {
    return a->sequence < b->sequence;
  }
};

class Pass;
thread_local Pass* current_pass = nullptr;
std::atomic<uint64_t> next_number{1};

// One backward pass.
class Pass {
 public:
  // inputs: none, or those of a first half
  explicit Pass(const EngineRequest& request, std::span<const Edge> inputs = {})
      : request_(request), inputs_(inputs) {}

  TensorList run();
  void run_first_half();
  void run_second_half();
  bool may_defer(std::initializer_list<int> inputs) const;
  void defer(std::initializer_list<int> inputs, std::function<TensorList()> calculate);
  int owed(const Node* node) const {
    const auto found = states_.find(node);
    return found == states_.end() ? 0 : found->second.owed;
  }
  bool reaches(const Node* node) const { return states_.contains(node); }
  bool accumulates() const { return request_.wanted.empty(); }
  Tensor take_pending(const Edge& edge);
  bool wants_sums(const Edge& edge) const;
  void leave_sums(const Edge& edge, const Tensor& gradient, const Tensor& sums);
  Tensor arrived_sums(int index) const;
  void leave_parts(const Tensor& whole, std::span<const Edge> edges, std::span<const Tensor> parts);
  bool arrived_as_part() const { return part_; }
  bool arrived_ones(int index) const { return std::ranges::find(ones_, index) != ones_.end(); }
  // A backward inside a backward belongs to the outer one. Each half of one is in its own.
  Pass* outer = nullptr;
  uint64_t number() {
    if (outer != nullptr) return outer->number();
    if (number_ == 0) number_ = next_number.fetch_add(1, std::memory_order_relaxed);
    return number_;
  }
  std::vector<std::function<void()>> callbacks;

 private:
  void discover();
  void mark_needed();
  void deliver_roots();
  void run_ready();
  void make_ready(NodeState& state);
  void run_node(NodeState& state);
  void run_second(NodeState& state);
  // Whether what reaches it waits for the second half.
  bool waits(const Edge& edge) const {
    if (!first_half_ || !edge.node) return false;
    const NodeState& state = states_.at(edge.node.get());
    return !state.needed && !state.target;
  }
  void deliver(const Edge& edge, Tensor gradient, const Node* from);
  void settle(const Edge& edge);

  const EngineRequest& request_;
  const std::span<const Edge> inputs_;
  uint64_t number_ = 0;  // where it is in no other
  bool first_half_ = false;
  std::vector<NodeState*> second_;  // that are ready when the second half begins
  NodeState* running_ = nullptr;
  std::unordered_map<const Node*, NodeState> states_;
  std::vector<NodeState*> discovered_;
  std::vector<decltype(states_)::node_type> ran_;  // in a first half, and wait for the second
  std::priority_queue<NodeState*, std::vector<NodeState*>, Later> ready_;
  TensorList results_;
  // Of the node that runs: what arrived with its gradients, and which of them are the first ones.
  std::vector<ColumnSums> arrived_;
  std::vector<int> ones_;
  bool part_ = false;
  std::vector<uint32_t> root_versions_;
};

bool profiling() { return Context::current().slot<detail::ProfilerSlot>().active != nullptr; }

// Brings a gradient to the shape and dtype of what it is the gradient of.
Tensor conform(Tensor gradient, const TensorMeta& meta, const Node* from) {
  if (!(gradient.shape() == meta.shape)) {
    TS_CHECK_AS(ShapeError, broadcastable_to(meta.shape, gradient.shape()),
                from != nullptr ? from->name() : "backward", "gave a gradient ", gradient,
                " for a tensor of shape ", meta.shape);
    gradient = sum_to(gradient, meta.shape);
  }
  if (gradient.dtype() != meta.dtype) gradient = to(gradient, meta.dtype);
  // Of a number of the CPU beside tensors of a GPU the gradient comes to it, as in torch.
  if (meta.shape.empty() && meta.device.is_cpu()) gradient = to(gradient, meta.device);
  TS_CHECK_DEVICE(gradient.device() == meta.device, from != nullptr ? from->name() : "backward",
                  "gave a gradient ", gradient, " for a tensor on ", meta.device);
  return gradient;
}

// Adds where two gradients meet: in place where the first one's bytes belong to this pass alone.
void accumulate(Tensor& sum, Tensor gradient) {
  if (!sum.defined()) {
    sum = std::move(gradient);
  } else if (!grad_enabled() && sum.use_count() == 1 && sum.storage().use_count() == 1 &&
             is_dense(sum.shape(), sum.strides()) && !sum.storage()->is_foreign()) {
    add_(sum, gradient);
  } else {
    sum = add(sum, gradient);
  }
}

void forget_sums(NodeState& state, int index) {
  std::erase_if(state.sums, [&](const ColumnSums& one) { return one.index == index; });
}

void Pass::discover() {
  std::vector<NodeState*> stack;
  const auto visit = [&](const Edge& edge) {
    auto [found, fresh] = states_.try_emplace(edge.node.get());
    if (fresh) {
      found->second.node = edge.node;
      found->second.sequence = edge.node->sequence;
      stack.push_back(&found->second);
      discovered_.push_back(&found->second);
    }
    return &found->second;
  };
  for (const Edge& root : request_.roots) visit(root);
  while (!stack.empty()) {
    NodeState* state = stack.back();
    stack.pop_back();
    for (const Edge& edge : state->node->next_edges) {
      if (edge.node) ++visit(edge)->owed;
    }
  }
}

void Pass::mark_needed() {
  for (size_t i = 0; i < request_.wanted.size(); ++i) {
    const auto found = states_.find(request_.wanted[i].node.get());
    if (found == states_.end()) continue;
    found->second.captures.emplace_back(request_.wanted[i].index, i);
    found->second.target = true;
  }
  for (const Edge& input : inputs_) {
    const auto found = states_.find(input.node.get());
    if (found != states_.end()) found->second.target = true;
  }
  // What runs later has a smaller sequence, but for leaves, which end every path.
  std::vector<NodeState*> order = discovered_;
  std::sort(order.begin(), order.end(), [](const NodeState* a, const NodeState* b) {
    const bool leaf_a = a->node->next_edges.empty(), leaf_b = b->node->next_edges.empty();
    return leaf_a != leaf_b ? leaf_a : a->sequence < b->sequence;
  });
  for (NodeState* state : order) {
    for (const Edge& edge : state->node->next_edges) {
      if (!edge.node) continue;
      const NodeState& next = states_.at(edge.node.get());
      if (next.needed || next.target) state->needed = true;
    }
  }
}

void Pass::settle(const Edge& edge) {
  NodeState& state = states_.at(edge.node.get());
  if (--state.owed == 0) make_ready(state);
}

void Pass::make_ready(NodeState& state) {
  if (first_half_ && !state.needed && !state.target) {
    second_.push_back(&state);
  } else {
    ready_.push(&state);
  }
}

void Pass::deliver(const Edge& edge, Tensor gradient, const Node* from) {
  NodeState& state = states_.at(edge.node.get());
  gradient = conform(std::move(gradient),
                     edge.node->output_metas.at(static_cast<size_t>(edge.index)), from);
  state.gradients.resize(edge.node->output_metas.size());
  Tensor& sum = state.gradients[static_cast<size_t>(edge.index)];
  if (sum.defined()) {
    forget_sums(state, edge.index);
    state.part = nullptr;
  }
  accumulate(sum, std::move(gradient));
}

// ---- What goes along with gradients (engine.h) --------------------------------------------------

Tensor Pass::take_pending(const Edge& edge) {
  const auto found = states_.find(edge.node.get());
  if (found == states_.end()) return {};
  NodeState& state = found->second;
  const auto index = static_cast<size_t>(edge.index);
  if (index >= state.gradients.size()) return {};
  forget_sums(state, edge.index);
  state.part = nullptr;
  return std::exchange(state.gradients[index], Tensor());
}

bool Pass::wants_sums(const Edge& edge) const {
  const auto found = states_.find(edge.node.get());
  if (found == states_.end()) return false;
  const NodeState& state = found->second;
  const auto index = static_cast<size_t>(edge.index);
  const bool runs = request_.wanted.empty() || state.needed;
  const bool first = index >= state.gradients.size() || !state.gradients[index].defined();
  return runs && state.owed == 1 && first && edge.node->takes_column_sums(edge.index);
}

void Pass::leave_sums(const Edge& edge, const Tensor& gradient, const Tensor& sums) {
  const auto found = states_.find(edge.node.get());
  if (found == states_.end()) return;
  found->second.sums.push_back({edge.index, gradient.impl(), gradient.version(), sums});
}

Tensor Pass::arrived_sums(int index) const {
  for (const ColumnSums& one : arrived_) {
    if (one.index == index) return one.sums;
  }
  return {};
}

void Pass::leave_parts(const Tensor& whole, std::span<const Edge> edges,
                       std::span<const Tensor> parts) {
  const auto count = static_cast<int64_t>(parts.size());
  if (whole.use_count() > 1 || whole.storage().use_count() > 1 + count ||
      whole.storage()->is_foreign() || whole.storage()->bytes() != whole.nbytes()) {
    return;
  }
  for (size_t i = 0; i < edges.size(); ++i) {
    const auto* const leaf = dynamic_cast<const AccumulateGrad*>(edges[i].node.get());
    if (leaf == nullptr || !parts[i].defined() || !parts[i].is_contiguous()) return;
    if (leaf->hooks && !leaf->hooks->empty()) return;  // they see it, and may keep a view
  }
  for (size_t i = 0; i < edges.size(); ++i) {
    const auto found = states_.find(edges[i].node.get());
    if (found != states_.end()) found->second.part = parts[i].impl();
  }
}

void Pass::run_node(NodeState& state) {
  Node& node = *state.node;
  TensorList gradients = std::move(state.gradients);
  state.gradients.clear();
  const bool any = std::any_of(gradients.begin(), gradients.end(),
                               [](const Tensor& gradient) { return gradient.defined(); });
  if (any && node.hooks) {
    const GradHooks hooks = *node.hooks;  // a hook may remove itself
    for (const GradHook& hook : hooks) {
      Tensor& gradient = gradients[static_cast<size_t>(hook.index)];
      if (!gradient.defined()) continue;
      Tensor replaced = hook.call(gradient);
      if (replaced.defined()) {
        gradient =
            conform(std::move(replaced), node.output_metas[static_cast<size_t>(hook.index)], &node);
      }
    }
  }
  for (const auto& [output, position] : state.captures) {
    if (any) results_[position] = gradients[static_cast<size_t>(output)];
  }
  const bool runs = any && (request_.wanted.empty() || state.needed);
  if (!runs) {
    for (const Edge& edge : node.next_edges) {
      if (edge.node) settle(edge);
    }
    return;
  }
  ones_.clear();
  for (size_t i = 0; request_.ones && i < gradients.size(); ++i) {
    for (size_t root = 0; root < root_versions_.size(); ++root) {
      const Tensor& one = request_.gradients[root];
      if (gradients[i].is(one) && one.version() == root_versions_[root]) {
        ones_.push_back(static_cast<int>(i));
      }
    }
  }
  part_ = gradients[0].defined() && gradients[0].impl() == state.part;
  arrived_ = std::move(state.sums);
  std::erase_if(arrived_, [&](const ColumnSums& one) {
    const Tensor& gradient = gradients[static_cast<size_t>(one.index)];
    return !gradient.defined() || gradient.impl() != one.gradient ||
           gradient.version() != one.version;
  });
  // A single output has a gradient whenever the node runs; others may lack theirs.
  TensorList next;
  const std::string range_name = profiling() ? node.name() + " backward" : std::string();
  const ProfilerRange range(range_name, node.place);
  const ScopedValue<NodeState*> running(running_, &state);
  try {
    next = node.apply(std::move(gradients));
  } catch (Error& error) {
    if (!node.forward_site.empty()) {
      error.add_context("backward of " + node.forward_site);
    }
    throw;
  }
  arrived_.clear();
  ones_.clear();
  part_ = false;
  TS_CHECK_AS(AutogradError, next.size() == node.next_edges.size(), node.name(), "backward gave ",
              next.size(), " gradients for ", node.next_edges.size(), " inputs");
  if (anomaly_enabled()) check_anomaly(node, next);
  if (!request_.retain_graph) node.release_saved();
  for (size_t i = 0; i < next.size(); ++i) {
    const Edge& edge = node.next_edges[i];
    if (!edge.node) continue;
    if (waits(edge)) {
      if (!state.second) state.second = std::make_unique<SecondHalf>();
      state.second->edges.resize(next.size());
      state.second->gradients.resize(next.size());
      state.second->edges[i] = edge;
      if (!next[i].defined()) continue;
      state.second->gradients[i] = conform(
          std::move(next[i]), edge.node->output_metas.at(static_cast<size_t>(edge.index)), &node);
      continue;
    }
    if (next[i].defined()) deliver(edge, std::move(next[i]), &node);
    settle(edge);
  }
  if (state.second) {
    state.second->range_name = range_name;
    state.second->place = node.place;
    second_.push_back(&state);
  }
}

bool Pass::may_defer(std::initializer_list<int> inputs) const {
  // Anomaly mode looks at each gradient where its op is named.
  if (!first_half_ || running_ == nullptr || anomaly_enabled()) return false;
  const std::vector<Edge>& edges = running_->node->next_edges;
  bool any = false;
  for (const int input : inputs) {
    const Edge& edge = edges.at(static_cast<size_t>(input));
    if (!edge.node) continue;
    if (!waits(edge)) return false;
    any = true;
  }
  return any;
}

void Pass::defer(std::initializer_list<int> inputs, std::function<TensorList()> calculate) {
  if (!running_->second) running_->second = std::make_unique<SecondHalf>();
  running_->second->calculations.push_back({inputs, std::move(calculate)});
}

void Pass::run_second(NodeState& state) {
  const std::unique_ptr<SecondHalf> second = std::move(state.second);
  const ProfilerRange range(second->range_name, second->place);
  for (SecondHalf::Calculation& calculation : second->calculations) {
    TensorList gradients = calculation.calculate();
    calculation.calculate = nullptr;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const auto input = static_cast<size_t>(calculation.inputs[i]);
      if (gradients[i].defined()) second->gradients[input] = std::move(gradients[i]);
    }
  }
  for (size_t i = 0; i < second->edges.size(); ++i) {
    const Edge& edge = second->edges[i];
    if (!edge.node) continue;
    Tensor& gradient = second->gradients[i];
    if (gradient.defined()) deliver(edge, std::move(gradient), nullptr);
    settle(edge);
  }
}

void Pass::deliver_roots() {
  std::vector<NodeState*> roots;
  for (size_t i = 0; i < request_.roots.size(); ++i) {
    const Edge& root = request_.roots[i];
    root_versions_.push_back(request_.gradients[i].version());
    deliver(root, request_.gradients[i], nullptr);
    NodeState* state = &states_.at(root.node.get());
    if (state->owed == 0 && std::find(roots.begin(), roots.end(), state) == roots.end()) {
      roots.push_back(state);
    }
  }
  for (NodeState* root : roots) make_ready(*root);
}

void Pass::run_ready() {
  while (!ready_.empty()) {
    NodeState* state = ready_.top();
    ready_.pop();
    if (state->second) {
      run_second(*state);
    } else {
      run_node(*state);
    }
  }
}

TensorList Pass::run() {
  discover();
  results_.resize(request_.wanted.size());
  if (!request_.wanted.empty()) mark_needed();
  deliver_roots();
  run_ready();
  return std::move(results_);
}

void Pass::run_first_half() {
  discover();
  mark_needed();
  first_half_ = true;
  deliver_roots();
  run_ready();
  first_half_ = false;
  // What ran lets go of the inputs; what waits has its edges. Later nodes may lie in its place.
  for (NodeState* state : discovered_) {
    if (!state->needed && !state->target) continue;
    auto ran = states_.extract(state->node.get());
    ran.mapped().node.reset();
    if (ran.mapped().second) ran_.push_back(std::move(ran));
  }
  discovered_.clear();
}

void Pass::run_second_half() {
  for (NodeState* state : second_) ready_.push(state);
  second_.clear();
  run_ready();
}

// Runs a part of a pass as backward runs.
template <class Part>
void run_part(Pass& pass, bool create_graph, const Part& part) {
  const ScopedValue<Pass*> outer(pass.outer, current_pass);
  const ScopedValue<Pass*> current(current_pass, &pass);
  {
    ScopedValue<bool> mode(Context::current().slot<GradMode>().enabled, create_graph);
    // Backward runs in the dtypes that forward has left, whatever scope it is called in.
    ScopedValue<bool> autocast(Context::current().slot<AutocastMode>().enabled, false);
    const CheckedMarks checked;  // forward was
    part();
  }
  // Callbacks may queue further ones.
  for (size_t i = 0; i < pass.callbacks.size(); ++i) {
    const std::function<void()> callback = pass.callbacks[i];
    callback();
  }
  pass.callbacks.clear();
}

}  // namespace

TensorList run_backward(const EngineRequest& request) {
  Pass pass(request);
  TensorList results;
  run_part(pass, request.create_graph, [&] { results = pass.run(); });
  return results;
}

// ---- Two halves (engine.h) --------------------------------------------------------------

struct SplitBackward::Impl {
  Request given;
  const EngineRequest request;
  Pass pass;
  bool weights_left = true;
  explicit Impl(Request of)
      : given(std::move(of)),
        request{.roots = given.roots, .gradients = given.gradients, .ones = given.ones},
        pass(request, given.inputs) {}
};

SplitBackward::SplitBackward(Request request) : impl_(std::make_unique<Impl>(std::move(request))) {
  run_part(impl_->pass, false, [&] { impl_->pass.run_first_half(); });
  // The graph from the roots on, and with it the inputs.
  for (Edge& root : impl_->given.roots) root = {};
  for (Edge& input : impl_->given.inputs) input = {};
  if (impl_->given.ones) return;  // whoever runs later may ask for them
  for (Tensor& gradient : impl_->given.gradients) gradient = Tensor();
}
SplitBackward::~SplitBackward() = default;
SplitBackward::SplitBackward(SplitBackward&&) noexcept = default;
SplitBackward& SplitBackward::operator=(SplitBackward&&) noexcept = default;

void SplitBackward::run_weights() {
  TS_CHECK_AS(AutogradError, impl_ && std::exchange(impl_->weights_left, false), "run_weights",
              "the gradients of weights are calculated once");
  run_part(impl_->pass, false, [&] { impl_->pass.run_second_half(); });
}

bool detail::may_defer(std::initializer_list<int> inputs) {
  return current_pass != nullptr && !grad_enabled() && current_pass->may_defer(inputs);
}
void detail::defer_gradients(std::initializer_list<int> inputs,
                             std::function<TensorList()> calculate) {
  current_pass->defer(inputs, std::move(calculate));
}

void queue_backward_callback(std::function<void()> callback) {
  TS_CHECK_AS(AutogradError, current_pass != nullptr, "queue_backward_callback",
              "no backward is under way on this thread; call it from a hook");
  Pass* outermost = current_pass;
  while (outermost->outer != nullptr) outermost = outermost->outer;
  outermost->callbacks.push_back(std::move(callback));
}

Tensor take_pending_gradient(const Edge& edge) {
  if (current_pass == nullptr || grad_enabled() || !edge.node) return {};
  return current_pass->take_pending(edge);
}
bool wants_column_sums(const Edge& edge) {
  return current_pass != nullptr && !grad_enabled() && edge.node && current_pass->wants_sums(edge);
}
void leave_column_sums(const Edge& edge, const Tensor& gradient, const Tensor& sums) {
  if (current_pass != nullptr && edge.node) current_pass->leave_sums(edge, gradient, sums);
}
Tensor arrived_column_sums(int index) {
  return current_pass == nullptr || grad_enabled() ? Tensor() : current_pass->arrived_sums(index);
}

void leave_parts(const Tensor& whole, std::span<const Edge> edges, std::span<const Tensor> parts) {
  if (current_pass != nullptr && !grad_enabled()) current_pass->leave_parts(whole, edges, parts);
}
bool arrived_as_part() {
  return current_pass != nullptr && !grad_enabled() && current_pass->arrived_as_part();
}

bool arrived_ones(int index) {
  return current_pass != nullptr && !grad_enabled() && current_pass->arrived_ones(index);
}

uint64_t current_backward() {
  return current_pass == nullptr || !current_pass->accumulates() ? 0 : current_pass->number();
}

bool backward_reaches(const Tensor& leaf) {
  const auto accumulator = accumulator_of(leaf);
  return current_pass != nullptr && accumulator && current_pass->reaches(accumulator.get());
}

int pending_contributions(const Tensor& leaf) {
  return current_pass == nullptr ? 0 : current_pass->owed(accumulator_of(leaf).get());
}

}  // namespace tessera
