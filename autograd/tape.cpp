#include <tessera/autograd/autograd.h>
#include <tessera/autograd/leaf_hooks.h>

#include <algorithm>
#include <atomic>

#include <tessera/autograd/engine.h>
#include <tessera/autograd/node.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

int next_hook_id() {
  static std::atomic<int> next{0};
  return next.fetch_add(1);
}

// The roots of a pass and their gradients, checked.
struct Roots {
  std::vector<Edge> edges;
  TensorList gradients;
  bool ones = true;  // made here
};

Roots make_roots(std::span<const Tensor> outputs, std::span<const Tensor> gradients,
                 const char* where) {
  TS_CHECK_AS(AutogradError, gradients.empty() || gradients.size() == outputs.size(), where,
              "expects a gradient for each of the ", outputs.size(), " outputs; got ",
              gradients.size());
  Roots roots;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Tensor& output = outputs[i];
    check_whole(output, where);
    Edge edge = gradient_edge(output);
    TS_CHECK_AS(AutogradError, edge.node != nullptr, where, "output ", i, " (", output,
                ") does not require grad: no input of its calculation does, or grad mode was off");
    Tensor gradient = gradients.empty() ? Tensor() : gradients[i];
    if (!gradient.defined()) {
      TS_CHECK_AS(AutogradError, output.numel() == 1, where, "output ", i, " (", output,
                  ") has more than one element; pass a gradient, or sum it first");
      gradient = raw::full(output.shape(), 1, output.dtype(), output.device());
    } else {
      roots.ones = false;
    }
    TS_CHECK_SHAPE(gradient.shape() == output.shape(), where, "the gradient of output ", i, " (",
                   gradient, ") must have the output's shape: ", output);
    roots.edges.push_back(std::move(edge));
    roots.gradients.push_back(std::move(gradient));
  }
  return roots;
}

}  // namespace

bool grad_enabled() { return Context::current().slot<GradMode>().enabled; }

void backward(std::span<const Tensor> outputs, std::span<const Tensor> gradients,
              const BackwardOptions& options) {
  const Roots roots = make_roots(outputs, gradients, "backward");
  run_backward({.roots = roots.edges,
                .gradients = roots.gradients,
                .ones = roots.ones,
                .retain_graph = options.retain_graph || options.create_graph,
                .create_graph = options.create_graph});
}

void backward(const Tensor& output, const Tensor& gradient, const BackwardOptions& options) {
  backward(std::span<const Tensor>(&output, 1), std::span<const Tensor>(&gradient, 1), options);
}

TensorList grad(std::span<const Tensor> outputs, std::span<const Tensor> inputs,
                std::span<const Tensor> gradients, const GradOptions& options) {
  const Roots roots = make_roots(outputs, gradients, "grad");
  std::vector<Edge> wanted;
  for (size_t i = 0; i < inputs.size(); ++i) {
    wanted.push_back(gradient_edge(inputs[i]));
    TS_CHECK_AS(AutogradError, wanted.back().node != nullptr, "grad", "input ", i, " (", inputs[i],
                ") does not require grad; call set_requires_grad() before using it");
    TS_CHECK_AS(UnsupportedError, !is_replaced(inputs[i]), "grad", "input ", i, " (", inputs[i],
                ") is this rank's part of a parameter, and what was calculated has read the whole; "
                "call backward(), after which `.grad` is this rank's part of the gradient");
  }
  if (wanted.empty()) return {};
  TensorList results = run_backward({.roots = roots.edges,
                                     .gradients = roots.gradients,
                                     .retain_graph = options.retain_graph || options.create_graph,
                                     .create_graph = options.create_graph,
                                     .wanted = wanted});
  for (size_t i = 0; i < results.size(); ++i) {
    TS_CHECK_AS(AutogradError, results[i].defined() || options.allow_unused, "grad", "input ", i,
                " (", inputs[i],
                ") was not used in the calculation; set allow_unused to get an undefined gradient");
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const TensorPlacement* placement = tensor_placement(inputs[i]);
    if (placement == nullptr || !results[i].defined()) continue;
    results[i] = view(results[i], results[i].shape());  // an object of its own
    results[i].impl()->guard = placement->of_gradient();
  }
  return results;
}

TensorList grad(const Tensor& output, std::span<const Tensor> inputs, const Tensor& gradient,
                const GradOptions& options) {
  return grad(std::span<const Tensor>(&output, 1), inputs, std::span<const Tensor>(&gradient, 1),
              options);
}
TensorList grad(const Tensor& output, std::initializer_list<Tensor> inputs, const Tensor& gradient,
                const GradOptions& options) {
  return grad(output, std::span<const Tensor>(inputs.begin(), inputs.size()), gradient, options);
}
TensorList grad(const Tensor& output, const Tensor& input, const Tensor& gradient,
                const GradOptions& options) {
  return grad(output, std::span<const Tensor>(&input, 1), gradient, options);
}

HookHandle register_hook(const Tensor& tensor, std::function<Tensor(const Tensor&)> hook) {
  const Edge edge = gradient_edge(tensor);
  TS_CHECK_AS(AutogradError, edge.node != nullptr, "register_hook", tensor,
              " does not require grad");
  if (!edge.node->hooks) edge.node->hooks = std::make_shared<GradHooks>();
  AutogradSlot& slot = ensure_autograd_slot(tensor);
  // The accumulator of a leaf lives as long as a graph uses it; its hooks as long as the leaf.
  if (!slot.grad_fn) slot.leaf_hooks = edge.node->hooks;
  const int id = next_hook_id();
  edge.node->hooks->push_back({id, edge.index, std::move(hook)});
  return HookHandle([hooks = std::weak_ptr<GradHooks>(edge.node->hooks), id] {
    if (auto list = hooks.lock()) {
      std::erase_if(*list, [id](const GradHook& hook) { return hook.id == id; });
    }
  });
}

HookHandle register_post_accumulate_hook(const Tensor& leaf,
                                         std::function<void(const Tensor&)> hook) {
  TS_CHECK_AS(AutogradError, leaf.is_leaf(), "register_post_accumulate_hook", leaf,
              " must be a leaf");
  AutogradSlot& slot = ensure_autograd_slot(leaf);
  if (!slot.post_accumulate_hooks) {
    slot.post_accumulate_hooks = std::make_shared<std::vector<PostAccumulateHook>>();
  }
  const int id = next_hook_id();
  slot.post_accumulate_hooks->push_back({id, std::move(hook)});
  return HookHandle(
      [hooks = std::weak_ptr<std::vector<PostAccumulateHook>>(slot.post_accumulate_hooks), id] {
        if (auto list = hooks.lock()) {
          std::erase_if(*list, [id](const PostAccumulateHook& hook) { return hook.id == id; });
        }
      });
}

void set_main_grad(const Tensor& leaf, const Tensor& main_grad) {
  TS_CHECK_AS(AutogradError, leaf.is_leaf(), "set_main_grad", leaf, " must be a leaf");
  TS_CHECK_SHAPE(!main_grad.defined() || main_grad.shape() == leaf.shape(), "set_main_grad",
                 "the main gradient ", main_grad, " must have the shape of ", leaf);
  if (!main_grad.defined() && autograd_slot(leaf) == nullptr) return;
  ensure_autograd_slot(leaf).main_grad = main_grad;
}

void retain_grad(const Tensor& tensor) {
  check_whole(tensor, "retain_grad");  // whose gradient would be a part
  AutogradSlot& slot = ensure_autograd_slot(tensor);
  if (tensor.is_leaf() || slot.retained_grad) return;
  auto cell = std::make_shared<Tensor>();
  slot.retained_grad = cell;
  register_hook(tensor, [weak = std::weak_ptr<Tensor>(cell)](const Tensor& gradient) {
    if (auto kept = weak.lock()) *kept = kept->defined() ? add(*kept, gradient) : gradient;
    return Tensor();
  });
}

}  // namespace tessera
