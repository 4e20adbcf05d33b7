// The backward pass over recorded nodes.
//
// [Note: order] Nodes run by falling sequence number once all their gradients are there, so the
// order, and with it every rounding, is a function of the order of the forward calls alone. The
// pass runs on the calling thread. Gradients that meet are added in the order in which they come;
// a leaf's are summed in a buffer of this pass and added to `.grad` once.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include <tessera/autograd/node.h>

namespace tessera {

struct EngineRequest {
  std::span<const Edge> roots;        // where the pass starts
  std::span<const Tensor> gradients;  // one for each root
  bool ones = false;                  // all of them are ones that the caller made
  bool retain_graph = false;
  bool create_graph = false;
  // Empty: accumulate into leaves. Otherwise the gradients at these edges are returned, and only
  // what leads to them runs.
  std::span<const Edge> wanted = {};
};
// Returns one tensor for each wanted edge (undefined where none flowed).
TensorList run_backward(const EngineRequest& request);

// [Note: what goes along with gradients] A kernel that calculates a gradient can often do more with
// it while it has it at hand than the pass does with it later, and backward of an op may offer so
// to the pass that runs it on this thread (Saved has it by input):
//
// - to add the gradient that reached the same tensor before: a product adds a matrix to its result,
//   and backward of a norm that of the residual stream. What take_pending_gradient() gives is gone
//   from the pass, and must be in the gradient that backward returns;
// - to bring the sums over its rows along, where the op before it has a bias whose gradient they
//   are (Op::bias). They count as long as the gradient arrives as it was sent, alone and unwritten:
//   where a hook changes it or another is added, they are forgotten;
// - to say that the gradients that it returns are the parts of one that nobody else holds, each of
//   them of its own elements: a leaf takes its part for `.grad` without a copy. Only where all of
//   them are whole gradients of leaves, as nothing else keeps the storage then.
//
// Outside of a pass, and where backward is recorded, there is nothing to take and nobody who wants.
Tensor take_pending_gradient(const Edge& edge);
// Whether the gradient at `edge` will be the only one, and its node would take sums.
bool wants_column_sums(const Edge& edge);
void leave_column_sums(const Edge& edge, const Tensor& gradient, const Tensor& sums);
// Of the gradient at output `index` of the node that runs; undefined where there are none.
Tensor arrived_column_sums(int index);
// The parts of `whole`, one for each of `edges` (undefined: none), as they are about to be
// returned.
void leave_parts(const Tensor& whole, std::span<const Edge> edges, std::span<const Tensor> parts);
// Whether the gradient of the leaf that runs is such a part.
bool arrived_as_part();
// Whether that gradient is the ones with which the pass began: what a loss was calculated for.
bool arrived_ones(int index);

}  // namespace tessera
