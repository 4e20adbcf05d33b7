// A node of the recorded graph, and the history of a tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

class Node;
class WeightCache;

// The target of a gradient: output `index` of the call that `node` stands for.
struct Edge {
  std::shared_ptr<Node> node;
  int index = 0;
};

// The required shape, dtype and device of a gradient.
struct TensorMeta {
  Shape shape;
  DType dtype = kF32;
  Device device;
  static TensorMeta of(const Tensor& tensor) {
    return {tensor.shape(), tensor.dtype(), tensor.device()};
  }
  friend bool operator==(const TensorMeta&, const TensorMeta&) = default;
};

// Hooks on one gradient. Shared, so that a handle can remove its hook later.
struct GradHook {
  int id;
  int index;  // of the output
  std::function<Tensor(const Tensor&)> call;
};
using GradHooks = std::vector<GradHook>;

class Node {
 public:
  Node();
  // Frees the nodes behind this one in a loop: a graph of a million nodes needs no deep stack.
  virtual ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  // grads: one for each output of the call, undefined if none came. Returns one for each edge.
  virtual TensorList apply(TensorList grads) = 0;
  virtual std::string name() const = 0;
  virtual void release_saved() {}
  // Whether apply() needs the sums over the rows of that output's gradient as a gradient.
  virtual bool takes_column_sums(int) const { return false; }

  std::vector<Edge> next_edges;          // one for each input, empty where no gradient is wanted
  std::vector<TensorMeta> output_metas;  // of the call's outputs
  std::shared_ptr<GradHooks> hooks;      // before apply; made at the first registration
  std::string forward_site;              // in anomaly mode: who called, with what
  uint32_t place = 0;  // of a RangeListener (core/profile/profiler.h), if there is one
  uint64_t sequence;   // later calls first: order of the backward pass

  // Call it once the edges are made: looking them up may make a view's history, which must come
  // before this node.
  void take_sequence();
};

// Adds to the `.grad` of a leaf; each leaf has one, made at its first use.
class AccumulateGrad final : public Node {
 public:
  explicit AccumulateGrad(const Tensor& leaf);
  TensorList apply(TensorList grads) override;
  std::string name() const override { return "accumulate_grad"; }
  const Tensor& leaf() const { return leaf_; }

 private:
  Tensor leaf_;
};

// A view knows its base: writing to the view changes the history of the base.
struct ViewInfo {
  Tensor base;
  uint32_t version;  // of the storage when the view's grad_fn was made; later: made again
  bool made_without_grad;
};

struct PostAccumulateHook {
  int id;
  std::function<void(const Tensor&)> call;
};

// The autograd state of a tensor.
struct AutogradSlot final : TensorSlot {
  bool requires_grad = false;  // of a leaf
  bool replaced = false;       // see leaf_hooks.h
  Tensor grad;
  Tensor main_grad;                       // of a leaf: the memory for `grad`, see set_main_grad
  std::shared_ptr<Tensor> retained_grad;  // of a tensor that is no leaf, after retain_grad()
  std::shared_ptr<Node> grad_fn;
  int output_index = 0;
  std::weak_ptr<AccumulateGrad> accumulator;
  std::shared_ptr<GradHooks> leaf_hooks;
  std::shared_ptr<std::vector<PostAccumulateHook>> post_accumulate_hooks;
  std::unique_ptr<ViewInfo> view;
  std::shared_ptr<WeightCache> weight_cache;  // of a leaf, see weight_cache.h
};

// The slot, or nullptr; ensure_slot makes one.
AutogradSlot* autograd_slot(const Tensor& tensor);
AutogradSlot& ensure_autograd_slot(const Tensor& tensor);

bool requires_grad(const Tensor& tensor);
// The edge into which a gradient of `tensor` flows; empty if none is needed. The history of a view
// whose base was written since is made again here.
Edge gradient_edge(const Tensor& tensor);
// Held while a leaf's slot changes: two backwards on two threads may add to one leaf.
std::mutex& leaf_mutex(const TensorImpl* leaf);
// The node that adds to the `.grad` of a leaf, while a graph uses it.
std::shared_ptr<AccumulateGrad> accumulator_of(const Tensor& leaf);
// Makes `tensor` the output `index` of `node`.
void set_history(const Tensor& tensor, std::shared_ptr<Node> node, int index);

// History of a view after the view was written by `node` (whose edge 0 is the view's old history):
// the base now comes from a node that routes gradients through `node` for the view's elements and
// past it for the others.
void rebase_view_history(const Tensor& view, std::shared_ptr<Node> node);

}  // namespace tessera
