#include <tessera/autograd/saved_tensor.h>

#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/tensor/unreadable_storage.h>

namespace tessera {

std::string in_place_name(std::string_view op) {
  return std::string(op) + (op.ends_with('_') ? "" : "_");
}

SavedTensor::SavedTensor(const Tensor& tensor) {
  if (!tensor.defined()) return;
  const AutogradSlot* slot = autograd_slot(tensor);
  const bool leaf = slot != nullptr && slot->requires_grad && !slot->grad_fn;
  kept_ = leaf ? tensor : raw::alias(tensor);
  version_ = tensor.version();
  const auto& stack = Context::current().slot<SavedTensorHookStack>().hooks;
  if (!stack.empty()) {
    hooks_ = stack.back();
    NoGradGuard no_grad;
    packed_ = hooks_->pack(kept_);
    kept_ = Tensor();
  }
}

Tensor SavedTensor::unpack(const Edge& history, const Op& op, const char* what, int index) const {
  Tensor tensor;
  if (hooks_) {
    tensor = hooks_->unpack(packed_);
  } else {
    const char* writer = kept_.impl()->version->writer.load(std::memory_order_relaxed);
    TS_CHECK_AS(AutogradError, kept_.version() == version_, op.name, what, ' ', index, " (", kept_,
                ") is needed for backward but was written in place since the call",
                writer != nullptr ? ", the last time by " : "",
                writer != nullptr ? in_place_name(writer) : "", " (version ", kept_.version(),
                ", expected ", version_,
                "); use the op that returns a new tensor, or clone() before writing");
    const ElementGuard* guard = element_guard(kept_);
    TS_CHECK_AS(AutogradError, guard == nullptr, op.name, "backward needs ", kept_, "; ",
                guard->remedy());
    check_bytes(kept_, op.name);
    tensor = kept_;
  }
  if (!grad_enabled() || !history.node || tensor.requires_grad()) return tensor;
  tensor = raw::alias(tensor);
  set_history(tensor, history.node, history.index);
  return tensor;
}

void SavedTensor::reset() {
  kept_ = Tensor();
  packed_.reset();
  hooks_.reset();
}

SavedExtra::SavedExtra(const Tensor& tensor) : kept_(tensor) {
  const auto& stack = Context::current().slot<SavedTensorHookStack>().hooks;
  if (!tensor.defined() || stack.empty()) return;
  hooks_ = stack.back();
  NoGradGuard no_grad;
  packed_ = hooks_->pack(kept_);
  kept_ = Tensor();
}

Tensor SavedExtra::unpack() const { return hooks_ ? hooks_->unpack(packed_) : kept_; }

SavedTensorHooks::SavedTensorHooks(Pack pack, Unpack unpack) {
  Context::current().slot<SavedTensorHookStack>().hooks.push_back(
      std::make_shared<SavedTensorHookPair>(
          SavedTensorHookPair{std::move(pack), std::move(unpack)}));
}
SavedTensorHooks::~SavedTensorHooks() {
  Context::current().slot<SavedTensorHookStack>().hooks.pop_back();
}

}  // namespace tessera
