// The backward pass over recorded nodes.
//
// [Note: order] Nodes run by falling sequence number once all their gradients have arrived, so the
// order, and with it every rounding, is a function of the order of the forward calls alone. The
// pass runs on the calling thread. Gradients of one tensor are added in the order in which they
// arrive; a leaf's are summed in a buffer of this pass and added to `.grad` once.
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

}  // namespace tessera
