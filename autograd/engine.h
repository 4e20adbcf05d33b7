// The backward pass over recorded nodes.
//
// [Note: order] Nodes run by falling sequence number once all their gradients have arrived, so the
// order, and with it every rounding, is a function of the order of the forward calls alone. The
// pass runs on the calling thread. Gradients of one tensor are added in the order in which they
// arrive; a leaf's are summed in a buffer of this pass and added to `.grad` once.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <tessera/autograd/node.h>

namespace tessera {

struct EngineRequest {
  std::span<const Edge> roots;        // where the pass starts
  std::span<const Tensor> gradients;  // one for each root
  bool ones = false;                  // all of them are ones that the caller made
  bool retain_graph = false;
  bool create_graph = false;
  // Empty: accumulate into leaves. Otherwise returns the gradients at these edges and runs only the
  // nodes that lead to them.
  std::span<const Edge> wanted = {};
};
// Returns one tensor for each wanted edge (undefined if no gradient came).
TensorList run_backward(const EngineRequest& request);

// [Note: what goes along with gradients] A kernel that calculates a gradient can often do related
// work more cheaply than the pass could later, and backward of an op may offer that to the pass
// that runs it on this thread (through Saved, by input):
//
// - to add the gradient that reached the same tensor before: a product adds a matrix to its result,
// and backward of a norm that of the residual stream. take_pending_gradient() removes that gradient
// from the pass, so the gradient that backward returns must include it; - to return the sums over
// its rows too, if the op before it has a bias whose gradient they are (Op::bias). They are used if
// the gradient arrives unchanged and alone: if a hook changes it or another is added, they are
// discarded; - to declare that the gradients that it returns are disjoint parts of one tensor that
// nothing else holds: a leaf then takes its part for `.grad` without a copy. This applies only if
// all of them are whole gradients of leaves, since nothing else keeps the storage then.
//
// Outside of a pass, and if backward is recorded, these functions find nothing.
Tensor take_pending_gradient(const Edge& edge);
// Whether the gradient at `edge` will be the only one, and its node can use sums.
bool wants_column_sums(const Edge& edge);
void leave_column_sums(const Edge& edge, const Tensor& gradient, const Tensor& sums);
// For the gradient at output `index` of the running node; undefined if there are none.
Tensor arrived_column_sums(int index);
// Declares the parts of `whole`, one for each of `edges` (undefined: none), that are about to be
// returned.
void leave_parts(const Tensor& whole, std::span<const Edge> edges, std::span<const Tensor> parts);
// Whether the gradient of the running leaf is such a part.
bool arrived_as_part();
// Whether that gradient is the ones with which the pass began, for which a loss was calculated.
bool arrived_ones(int index);

// ---- In two halves ------------------------------------------------------------------------------

// [Note: two halves] A backward may run in halves: the gradients of inputs, for which somebody
// waits, and later those of weights. Each product is calculated once.
//
//     SplitBackward backward({.roots = roots, .gradients = gradients, .inputs = inputs});
//     send(x.grad());      // the inputs have theirs; weights have none yet
//     backward.run_weights();
//
// The first half runs the nodes that lead to an input. An op of these that has a weight says with
// weight_gradients() what is left to calculate for it: a linear layer keeps its input and the
// gradient of its output, and frees the rest. What other ops return for weights (of norms, as small
// as these) is kept until the second half as it is. The second half then runs what is left in the
// order of one pass, so every sum is added up as there: gradients have the same bits. If nothing
// leads to an input, the second half is all of it.
class SplitBackward {
 public:
  struct Request {
    std::vector<Edge> roots;  // where the pass starts
    TensorList gradients;     // one for each root
    bool ones = false;        // all of them are ones that the caller made
    std::vector<Edge> inputs;
  };
  // Runs the first half. The graph is freed as the halves go on.
  explicit SplitBackward(Request request);
  ~SplitBackward();  // without run_weights(): weights get nothing
  SplitBackward(SplitBackward&&) noexcept;
  SplitBackward& operator=(SplitBackward&&) noexcept;
  void run_weights();  // once; AutogradError for a second call

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

namespace detail {

// Whether the running node is in a first half in which all gradients at these inputs may wait.
bool may_defer(std::initializer_list<int> inputs);
void defer_gradients(std::initializer_list<int> inputs, std::function<TensorList()> calculate);

}  // namespace detail

// For backward of an op: the gradients at these inputs, as `calculate` returns them; undefined ones
// in the first half of a backward, in whose second half it is called. It captures tensors by value,
// and nothing of Saved. What it returns undefined then is as backward has returned it.
template <class Calculate>
TensorList weight_gradients(std::initializer_list<int> inputs, Calculate calculate) {
  if (!detail::may_defer(inputs)) return calculate();
  detail::defer_gradients(inputs, std::move(calculate));
  return TensorList(inputs.size());
}

}  // namespace tessera
