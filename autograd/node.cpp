#include <tessera/autograd/node.h>

#include <atomic>
#include <mutex>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/raw_views.h>

namespace tessera {
namespace {

std::atomic<uint64_t> next_sequence{0};

// Nodes waiting to be freed by the outermost destructor on this thread.
struct NodeGraveyard {
  std::vector<std::shared_ptr<Node>> nodes;
  bool draining = false;
};
NodeGraveyard& graveyard() {
  thread_local NodeGraveyard instance;
  return instance;
}

// Two backwards on two threads may add to one leaf.
std::mutex& leaf_mutex(const TensorImpl* leaf) {
  static std::mutex mutexes[64];
  return mutexes[(reinterpret_cast<uintptr_t>(leaf) >> 6) % 64];
}

bool owns_its_bytes(const Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         !tensor.storage()->is_foreign() && tensor.storage()->bytes() == tensor.nbytes();
}

// A tensor of the base's geometry whose strides are the base's own, so that view geometries apply.
Tensor scatter_base(const TensorMeta& meta, const Shape& strides) {
  return raw::empty_strided(meta.shape, strides, meta.dtype, meta.device);
}

// Gradient of a view with respect to its base, by geometry alone.
class ViewOfBase final : public Node {
 public:
  ViewOfBase(const Tensor& view, const Tensor& base)
      : base_(TensorMeta::of(base)),
        base_strides_(base.strides()),
        shape_(view.shape()),
        strides_(view.strides()),
        offset_(view.offset() - base.offset()) {
    next_edges.push_back(gradient_edge(base));
    output_metas.push_back(TensorMeta::of(view));
    take_sequence();
  }
  TensorList apply(TensorList grads) override {
    NoGradGuard no_grad;
    Tensor result = scatter_base(base_, base_strides_);
    zero_(result);
    copy_(raw::as_strided(result, shape_, strides_, offset_), grads[0]);
    return {result};
  }
  std::string name() const override { return "view"; }

 private:
  TensorMeta base_;
  Shape base_strides_, shape_, strides_;
  int64_t offset_;
};

// History of a base after one of its views was written.
class WrittenThroughView final : public Node {
 public:
  WrittenThroughView(const Tensor& view, const Tensor& base, std::shared_ptr<Node> write)
      : base_strides_(base.strides()),
        shape_(view.shape()),
        strides_(view.strides()),
        offset_(view.offset() - base.offset()),
        write_(std::move(write)) {
    next_edges.push_back(gradient_edge(base));
    for (size_t i = 1; i < write_->next_edges.size(); ++i) {
      next_edges.push_back(write_->next_edges[i]);
    }
    output_metas.push_back(TensorMeta::of(base));
    take_sequence();
  }
  TensorList apply(TensorList grads) override {
    NoGradGuard no_grad;
    Tensor result = scatter_base(output_metas[0], base_strides_);
    copy_(result, grads[0]);
    Tensor part = raw::as_strided(result, shape_, strides_, offset_);
    TensorList written = write_->apply({clone(part)});
    if (written[0].defined()) {
      copy_(part, written[0]);
    } else {
      zero_(part);
    }
    TensorList list{result};
    for (size_t i = 1; i < written.size(); ++i) list.push_back(written[i]);
    return list;
  }
  std::string name() const override { return write_->name() + " (through a view)"; }
  void release_saved() override { write_->release_saved(); }

 private:
  Shape base_strides_, shape_, strides_;
  int64_t offset_;
  std::shared_ptr<Node> write_;
};

}  // namespace

Node::Node() { take_sequence(); }

void Node::take_sequence() { sequence = next_sequence.fetch_add(1, std::memory_order_relaxed); }

Node::~Node() {
  NodeGraveyard& grave = graveyard();
  for (Edge& edge : next_edges) {
    if (edge.node) grave.nodes.push_back(std::move(edge.node));
  }
  if (grave.draining) return;
  grave.draining = true;
  while (!grave.nodes.empty()) {
    std::shared_ptr<Node> node = std::move(grave.nodes.back());
    grave.nodes.pop_back();
    node.reset();  // its destructor adds what it pointed to
  }
  grave.draining = false;
}

AccumulateGrad::AccumulateGrad(const Tensor& leaf) : leaf_(leaf) {
  // Runs as soon as its last contribution is there: gradients become ready early, one by one.
  sequence = UINT64_MAX;
  output_metas.push_back(TensorMeta::of(leaf));
}

TensorList AccumulateGrad::apply(TensorList grads) {
  AutogradSlot& slot = ensure_autograd_slot(leaf_);
  {
    std::lock_guard lock(leaf_mutex(leaf_.impl()));
    Tensor gradient = std::move(grads[0]);
    if (!slot.grad.defined()) {
      if (grad_enabled()) {
        slot.grad = gradient;
      } else if (slot.main_grad.defined()) {
        copy_(slot.main_grad, gradient);
        slot.grad = slot.main_grad;
      } else {
        // A gradient that nobody else holds becomes `.grad` without a copy.
        const bool take = owns_its_bytes(gradient) && gradient.is_contiguous();
        slot.grad = take ? std::move(gradient) : clone(gradient);
        if (!slot.grad.is_meta()) slot.grad.storage()->set_category(MemoryCategory::kGradient);
      }
    } else if (grad_enabled()) {
      slot.grad = add(slot.grad, gradient);
    } else {
      add_(slot.grad, gradient);
    }
  }
  if (slot.post_accumulate_hooks) {
    const auto hooks = *slot.post_accumulate_hooks;  // a hook may remove itself
    for (const PostAccumulateHook& hook : hooks) hook.call(leaf_);
  }
  return {};
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
