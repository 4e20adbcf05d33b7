// The public interface of autograd: backward, grad, modes, hooks.
#pragma once

#include <any>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <tessera/core/context.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

// ---- Modes, per context ------------------------------------------------------------------------

struct GradMode {
  bool enabled = true;
};
bool grad_enabled();

class NoGradGuard {  // nothing is recorded in the scope
 public:
  NoGradGuard() : scoped_(Context::current().slot<GradMode>().enabled, false) {}

 private:
  ScopedValue<bool> scoped_;
};
class EnableGradGuard {
 public:
  EnableGradGuard() : scoped_(Context::current().slot<GradMode>().enabled, true) {}

 private:
  ScopedValue<bool> scoped_;
};

// ---- Backward ----------------------------------------------------------------------------------
// The order, and with it every bit, follows from the forward calls alone (engine.h).

struct BackwardOptions {
  bool retain_graph = false;  // keep saved tensors for another backward
  bool create_graph = false;  // record backward itself; implies retain_graph
};
// Adds d(sum of outputs * gradients)/d(leaf) to `.grad` of every leaf that requires grad.
// gradients[i] may be undefined for a one-element output (then 1). The contributions of one
// backward to a leaf are summed in a fixed order and added to `.grad` once. Several threads may run
// backward at a time, also to the same leaves. Throws AutogradError.
void backward(std::span<const Tensor> outputs, std::span<const Tensor> gradients = {},
              const BackwardOptions& options = {});
void backward(const Tensor& output, const Tensor& gradient = {},
              const BackwardOptions& options = {});

struct GradOptions {
  bool retain_graph = false;
  bool create_graph = false;
  bool allow_unused = false;  // undefined gradients instead of an error
};
// The gradients with respect to `inputs` (leaves or not); `.grad` does not change.
TensorList grad(std::span<const Tensor> outputs, std::span<const Tensor> inputs,
                std::span<const Tensor> gradients = {}, const GradOptions& options = {});
TensorList grad(const Tensor& output, std::span<const Tensor> inputs, const Tensor& gradient = {},
                const GradOptions& options = {});
// grad(y, {x, w}), grad(y, x).
TensorList grad(const Tensor& output, std::initializer_list<Tensor> inputs,
                const Tensor& gradient = {}, const GradOptions& options = {});
TensorList grad(const Tensor& output, const Tensor& input, const Tensor& gradient = {},
                const GradOptions& options = {});

// Runs the function at the end of this thread's current backward (the outermost one, if backwards
// are nested). Throws AutogradError outside.
void queue_backward_callback(std::function<void()> callback);
// Contributions to a leaf that this thread's current backward has not made yet; 0 outside.
int pending_contributions(const Tensor& leaf);
// The number of this thread's current backward; a nested one has the number of the outer one. 0
// outside, and inside grad(), which changes no leaf.
uint64_t current_backward();
// Whether this thread's current backward leads to a leaf: its gradient has come or may still come
// (not if an op on the path gives none). Known from the start. False outside.
bool backward_reaches(const Tensor& leaf);

// Keeps gradients of `leaf` in `main_grad` from now on: a backward that finds no `.grad` copies its
// gradient there, converting the dtype, and `.grad` is then `main_grad` itself; later ones add in
// place. zero_grad() forgets `.grad`, not main_grad. This puts gradients into one flat buffer
// (`main_grad` is then raw::as_parameter of a view of it), or into a wider dtype than their leaf.
// An undefined tensor turns it off. Backward with create_graph ignores it. Throws ShapeError,
// AutogradError.
void set_main_grad(const Tensor& leaf, const Tensor& main_grad);

// ---- Hooks -------------------------------------------------------------------------------------
// Hooks of one tensor run in the order of registration.

class HookHandle {  // the hook stays until remove() is called
 public:
  HookHandle() = default;
  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  void remove() {
    if (remove_) std::exchange(remove_, nullptr)();
  }

 private:
  std::function<void()> remove_;
};
// Called with the gradient of `tensor` once it is complete; a defined result replaces it.
HookHandle register_hook(const Tensor& tensor, std::function<Tensor(const Tensor&)> hook);
// Called after `.grad` of a leaf was added to: once in each backward that brings it a gradient,
// after the last contribution. May be registered on a leaf that does not require grad yet.
HookHandle register_post_accumulate_hook(const Tensor& leaf,
                                         std::function<void(const Tensor& leaf)> hook);
void retain_grad(const Tensor& tensor);  // keep `.grad` of a non-leaf tensor

// Tensors that ops in the scope save for backward pass through `pack`, and through `unpack` when
// they are read (offloading, recomputation, compression).
class SavedTensorHooks {
 public:
  using Pack = std::function<std::any(const Tensor&)>;
  using Unpack = std::function<Tensor(const std::any&)>;
  SavedTensorHooks(Pack pack, Unpack unpack);
  ~SavedTensorHooks();
  SavedTensorHooks(const SavedTensorHooks&) = delete;
  SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;
};

// ---- Looking for mistakes ----------------------------------------------------------------------
// Costs time; for debugging.

// In the scope, forward calls are recorded and backward checks for NaN: an error in backward names
// the op, its inputs and the module that made the call.
class AnomalyMode {
 public:
  AnomalyMode();

 private:
  ScopedValue<bool> scoped_;
};
// Text that anomaly mode puts before an op's name; modules push their dotted names.
std::string& call_site();  // of the current context

}  // namespace tessera
