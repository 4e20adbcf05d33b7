// Why the elements of a tensor are not to be read as those of other tensors are. Ops look for it at
// each input, which is one load; what they then do is one of two things:
//
// | guard             | the tensor                                | who fills it                  |
// |-------------------|-------------------------------------------|-------------------------------|
// | TensorPlacement   | is a part of a larger one                 | distributed/mesh/dtensor.h    |
// | UnreadableStorage | has no bytes, or not yet: a parameter     | fully_shard, autograd/fp8     |
// |                   | between gathers, a norm's result in fp8   |                               |
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

// In TensorImpl::guard.
struct ElementGuard : TensorSlot {
  enum class Kind : uint8_t { kPlacement, kUnreadable };
  explicit ElementGuard(Kind kind_in) : kind(kind_in) {}

  // The tensor in messages, in place of its dtype, shape and device.
  virtual std::string describe(const Tensor& tensor) const = 0;
  // What to do instead, for who would read the elements.
  virtual std::string_view remedy() const = 0;
  // For another tensor of the same elements; null: that one needs none.
  virtual std::unique_ptr<ElementGuard> clone() const = 0;

  const Kind kind;
};

// nullptr for a tensor that is as others are (and for an undefined one).
inline const ElementGuard* element_guard(const Tensor& x) {
  return x.defined() ? static_cast<const ElementGuard*>(x.impl()->guard.get()) : nullptr;
}

// `to` is guarded as `from` is; of the same shape. Nothing where `from` is not.
inline void copy_guard(const Tensor& from, const Tensor& to) {
  if (const ElementGuard* guard = element_guard(from)) to.impl()->guard = guard->clone();
}

// For what would take a part for the whole. Throws UnsupportedError with the remedy.
inline void check_whole(const Tensor& x, std::string_view where) {
  const ElementGuard* guard = element_guard(x);
  TS_CHECK_AS(UnsupportedError, guard == nullptr, where, "works on whole tensors; got ", x, "; ",
              guard->remedy());
}

}  // namespace tessera
