#include <tessera/autograd/graph.h>

#include <unordered_set>
#include <vector>

#include <tessera/autograd/node.h>

namespace tessera {

bool leads_to_any(const Tensor& output, const NamedTensors& leaves) {
  std::unordered_set<const Node*> wanted;
  for (const auto& [name, leaf] : leaves) {
    const AutogradSlot* slot = autograd_slot(leaf);
    // Without an accumulator no graph uses the leaf.
    if (slot == nullptr) continue;
    if (const auto accumulator = slot->accumulator.lock()) wanted.insert(accumulator.get());
  }
  if (wanted.empty()) return false;
  const Edge root = gradient_edge(output);
  if (!root.node) return false;
  std::vector<const Node*> stack{root.node.get()};
  std::unordered_set<const Node*> seen{root.node.get()};
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    if (wanted.contains(node)) return true;
    for (const Edge& edge : node->next_edges) {
      if (edge.node && seen.insert(edge.node.get()).second) stack.push_back(edge.node.get());
    }
  }
  return false;
}

}  // namespace tessera
