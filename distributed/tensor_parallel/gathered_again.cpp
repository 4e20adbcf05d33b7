#include <tessera/distributed/tensor_parallel/gathered_again.h>

#include <any>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/saved_tensor.h>
#include <tessera/core/context.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/tensor_parallel/convert.h>
#include <tessera/distributed/tensor_parallel/mark.h>

namespace tessera::distributed {
namespace {

struct RepeatedGather {
  std::weak_ptr<Storage> whole;
  int64_t offset = 0, numel = 0;
  std::string axis;
  uint64_t marks_of_part = 0;
  SavedTensor part;
  int readers = 0;  // that have saved the whole
  // In a backward: the whole, until the last of them has read it.
  int awaited = 0;
  Tensor again;
};

struct GathersSlot {
  std::vector<const SavedTensorHookPair*> scopes;  // of the calls under way, by their hooks
  std::vector<std::shared_ptr<RepeatedGather>> gathers;
};
GathersSlot& current_gathers() { return Context::current().slot<GathersSlot>(); }

std::vector<std::shared_ptr<SavedTensorHookPair>>& hook_stack() {
  return Context::current().slot<SavedTensorHookStack>().hooks;
}

// Without the innermost hooks, which are ours.
class WithoutOwnHooks {
 public:
  WithoutOwnHooks() : own_(std::move(hook_stack().back())) { hook_stack().pop_back(); }
  ~WithoutOwnHooks() { hook_stack().push_back(std::move(own_)); }
  WithoutOwnHooks(const WithoutOwnHooks&) = delete;
  WithoutOwnHooks& operator=(const WithoutOwnHooks&) = delete;

 private:
  std::shared_ptr<SavedTensorHookPair> own_;
};

struct SavedForm {
  std::shared_ptr<const SavedTensor> tensor;  // as it is, or
  std::shared_ptr<RepeatedGather> gather;     // to be gathered, as this shape with these marks
  Shape shape = {};
  uint64_t marks = 0;
};

SavedForm saved_form_of(const Tensor& x) {
  for (const auto& gather : current_gathers().gathers) {
    const bool same = gather->whole.lock() == x.storage() && gather->offset == x.offset() &&
                      gather->numel == x.numel() && x.is_contiguous();
    if (!same) continue;
    ++gather->readers;
    return {nullptr, gather, x.shape(), x.impl()->marks};
  }
  const WithoutOwnHooks outer;
  return {std::make_shared<SavedTensor>(x), nullptr};
}

Tensor tensor_of(const SavedForm& kept) {
  if (kept.tensor) return kept.tensor->unpack({}, kConvert, "a tensor that was saved", 0);
  RepeatedGather& gather = *kept.gather;
  const NoGradGuard no_grad;
  if (!gather.again.defined()) {
    const Tensor part = raw::alias(gather.part.unpack({}, kConvert, "the part", 0));
    part.impl()->marks = gather.marks_of_part;
    gather.again = convert(part, gather.axis, Mark::replicated());
    gather.awaited = gather.readers;
  }
  const Tensor whole = raw::view(gather.again, kept.shape);
  whole.impl()->marks = kept.marks;
  if (--gather.awaited == 0) gather.again = Tensor();
  return whole;
}

// The hooks of a call, and the list of its gathers.
class GatherScope {
 public:
  GatherScope()
      : hooks_(
            [](const Tensor& x) { return std::any(saved_form_of(x)); },
            [](const std::any& kept) { return tensor_of(std::any_cast<const SavedForm&>(kept)); }) {
    current_gathers().scopes.push_back(hook_stack().back().get());
  }
  ~GatherScope() {
    GathersSlot& slot = current_gathers();
    slot.scopes.pop_back();
    if (slot.scopes.empty()) slot.gathers.clear();
  }
  GatherScope(const GatherScope&) = delete;
  GatherScope& operator=(const GatherScope&) = delete;

 private:
  SavedTensorHooks hooks_;
};

}  // namespace

std::shared_ptr<void> keep_parts_of_gathered() { return std::make_shared<GatherScope>(); }

void note_gathered(const Tensor& whole, const Tensor& part, const std::string& axis) {
  GathersSlot& slot = current_gathers();
  // Where other hooks are innermost (checkpoint()), they keep what is saved.
  const bool ours = !slot.scopes.empty() && hook_stack().back().get() == slot.scopes.back();
  if (!ours || !grad_enabled() || current_backward() != 0) return;
  std::erase_if(slot.gathers, [](const auto& gather) { return gather->whole.expired(); });
  auto gather = std::make_shared<RepeatedGather>();
  gather->whole = whole.storage();
  gather->offset = whole.offset();
  gather->numel = whole.numel();
  gather->axis = axis;
  gather->marks_of_part = part.impl()->marks;
  const WithoutOwnHooks outer;
  gather->part = SavedTensor(part);
  slot.gathers.push_back(std::move(gather));
}

}  // namespace tessera::distributed
