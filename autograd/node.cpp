#include <tessera/autograd/node.h>

#include <atomic>
#include <mutex>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/common/overlap.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

std::atomic<uint64_t> next_sequence{0};

// Nodes waiting to be freed by the outermost destructor on this thread, in its frame.
thread_local std::vector<std::shared_ptr<Node>>* graveyard = nullptr;

// Where the elements of a view lie among those of its base. The strides are the base's own, so that
// the geometry of the view applies to any tensor that is laid out as the base.
class PlaceInBase {
 public:
  PlaceInBase(const Tensor& view, const Tensor& base)
      : base_(TensorMeta::of(base)),
        base_strides_(base.strides()),
        shape_(view.shape()),
        strides_(view.strides()),
        offset_(view.offset() - base.offset()) {}

  Tensor empty_base(DType dtype) const {
    return raw::empty_strided(base_.shape, base_strides_, dtype, base_.device);
  }
  Tensor empty_base() const { return empty_base(base_.dtype); }
  Tensor view_of(const Tensor& base) const {
    return raw::as_strided(base, shape_, strides_, offset_);
  }

  // The same in ops, which have derivatives and add up what a view shows twice.
  Tensor gather(const Tensor& base) const {
    return reshape(index_select(reshape(base, {numel_of(base_.shape)}), 0, indices()), shape_);
  }
  Tensor scatter(const Tensor& view) const {
    const Tensor flat = zeros({numel_of(base_.shape)}, {base_.dtype, base_.device});
    const Tensor source = reshape(to(view, base_.dtype), {numel_of(shape_)});
    return reshape(index_add(flat, 0, indices(), source), base_.shape);
  }
  // True for the elements of the base that the view shows.
  Tensor shown() const {
    const NoGradGuard no_grad;
    const Tensor mask = empty_base(kBool);
    zero_(mask);
    fill_(view_of(mask), true);
    return mask;
  }

 private:
  // Of the view's elements, in the base's row-major order.
  Tensor indices() const {
    const NoGradGuard no_grad;
    const Tensor order = empty_base(kI64);
    const int64_t count = numel_of(base_.shape);
    copy_(order, reshape(arange(0, count, 1, kI64, base_.device), base_.shape));
    return reshape(view_of(order), {numel_of(shape_)});
  }

  TensorMeta base_;
  Shape base_strides_, shape_, strides_;
  int64_t offset_;
};

// Gradient of a view with respect to its base, by geometry alone.
class ViewOfBase final : public Node {
 public:
  ViewOfBase(const Tensor& view, const Tensor& base) : place_(view, base) {
    next_edges.push_back(gradient_edge(base));
    output_metas.push_back(TensorMeta::of(view));
    take_sequence();
  }
  TensorList apply(TensorList grads) override {
    if (grad_enabled()) return {place_.scatter(grads[0])};
    const Tensor result = place_.empty_base();
    const Tensor part = place_.view_of(result);
    if (kernels::repeats_elements(part)) return {place_.scatter(grads[0])};
    zero_(result);
    copy_(part, grads[0]);
    return {result};
  }
  std::string name() const override { return "view"; }

 private:
  PlaceInBase place_;
};

// History of a base after one of its views was written.
class WrittenThroughView final : public Node {
 public:
  WrittenThroughView(const Tensor& view, const Tensor& base, std::shared_ptr<Node> write)
      : place_(view, base), write_(std::move(write)) {
    next_edges.push_back(gradient_edge(base));
    for (size_t i = 1; i < write_->next_edges.size(); ++i) {
      next_edges.push_back(write_->next_edges[i]);
    }
    output_metas.push_back(TensorMeta::of(base));
    take_sequence();
  }
  TensorList apply(TensorList grads) override {
    if (grad_enabled()) {
      TensorList list = write_->apply({place_.gather(grads[0])});
      const Tensor before = list[0].defined() ? place_.scatter(list[0]) : zeros_like(grads[0]);
      list[0] = where(place_.shown(), before, grads[0]);
      return list;
    }
    const Tensor result = place_.empty_base();
    copy_(result, grads[0]);
    const Tensor part = place_.view_of(result);
    TensorList list = write_->apply({clone(part)});
    if (list[0].defined()) {
      copy_(part, list[0]);
    } else {
      zero_(part);
    }
    list[0] = result;
    return list;
  }
  std::string name() const override { return write_->name() + " (through a view)"; }
  // A recorded backward that read the saved output has the write as a node of its own, which comes
  // later in the pass and releases itself.
  void release_saved() override {
    if (write_.use_count() == 1) write_->release_saved();
  }

 private:
  PlaceInBase place_;
  std::shared_ptr<Node> write_;
};

}  // namespace

Node::Node() { take_sequence(); }

void Node::take_sequence() { sequence = next_sequence.fetch_add(1, std::memory_order_relaxed); }

Node::~Node() {
  std::vector<std::shared_ptr<Node>> own;
  const bool outermost = graveyard == nullptr;
  if (outermost) graveyard = &own;
  for (Edge& edge : next_edges) {
    if (edge.node) graveyard->push_back(std::move(edge.node));
  }
  if (!outermost) return;
  while (!own.empty()) {
    std::shared_ptr<Node> node = std::move(own.back());
    own.pop_back();
    node.reset();  // its destructor adds what it pointed to
  }
  graveyard = nullptr;
}

AutogradSlot* autograd_slot(const Tensor& tensor) {
  return tensor.defined() ? static_cast<AutogradSlot*>(tensor.impl()->autograd.get()) : nullptr;
}

AutogradSlot& ensure_autograd_slot(const Tensor& tensor) {
  if (!tensor.impl()->autograd) tensor.impl()->autograd = std::make_unique<AutogradSlot>();
  return static_cast<AutogradSlot&>(*tensor.impl()->autograd);
}

bool requires_grad(const Tensor& tensor) {
  const AutogradSlot* slot = autograd_slot(tensor);
  if (slot == nullptr) return false;
  if (slot->requires_grad || slot->grad_fn) return true;
  // A view made before its base began to require grad.
  return slot->view && slot->view->version != tensor.version() && requires_grad(slot->view->base);
}

Edge gradient_edge(const Tensor& tensor) {
  AutogradSlot* slot = autograd_slot(tensor);
  if (slot == nullptr) return {};
  if (slot->view && slot->view->version != tensor.version() && requires_grad(slot->view->base)) {
    slot->grad_fn = std::make_shared<ViewOfBase>(tensor, slot->view->base);
    slot->output_index = 0;
    slot->view->version = tensor.version();
  }
  if (slot->grad_fn) return {slot->grad_fn, slot->output_index};
  if (!slot->requires_grad) return {};
  std::lock_guard lock(leaf_mutex(tensor.impl()));
  std::shared_ptr<AccumulateGrad> accumulator = slot->accumulator.lock();
  if (!accumulator) {
    accumulator = std::make_shared<AccumulateGrad>(tensor);
    if (slot->leaf_hooks) accumulator->hooks = slot->leaf_hooks;
    slot->accumulator = accumulator;
  }
  // set_data may have changed the leaf since: gradients follow its present shape. Written only
  // then, because a backward on another thread may be reading it.
  const TensorMeta present = TensorMeta::of(tensor);
  if (!(accumulator->output_metas[0] == present)) accumulator->output_metas[0] = present;
  return {accumulator, 0};
}

std::shared_ptr<AccumulateGrad> accumulator_of(const Tensor& leaf) {
  const AutogradSlot* slot = autograd_slot(leaf);
  if (slot == nullptr) return nullptr;
  std::lock_guard lock(leaf_mutex(leaf.impl()));
  return slot->accumulator.lock();
}

void set_history(const Tensor& tensor, std::shared_ptr<Node> node, int index) {
  AutogradSlot& slot = ensure_autograd_slot(tensor);
  slot.grad_fn = std::move(node);
  slot.output_index = index;
  slot.requires_grad = false;
  if (slot.view) slot.view->version = tensor.version();
}

void rebase_view_history(const Tensor& view, std::shared_ptr<Node> node) {
  AutogradSlot& slot = ensure_autograd_slot(view);
  const Tensor base = slot.view->base;
  set_history(base, std::make_shared<WrittenThroughView>(view, base, std::move(node)), 0);
  slot.grad_fn = std::make_shared<ViewOfBase>(view, base);
  slot.output_index = 0;
  slot.view->version = view.version();
}

}  // namespace tessera
