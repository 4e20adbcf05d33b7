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
  bool retain_graph = false;
  bool create_graph = false;
  // Empty: accumulate into leaves. Otherwise the gradients at these edges are returned, and only
  // what leads to them runs.
  std::span<const Edge> wanted = {};
};
// Returns one tensor for each wanted edge (undefined where none flowed).
TensorList run_backward(const EngineRequest& request);

}  // namespace tessera
