// A guard says why the elements of a tensor must not be read as those of other tensors. Ops look
// for it at each input, which costs one load. There are two kinds:
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

// TensorImpl::guard holds it.
struct ElementGuard : TensorSlot {
  enum class Kind : uint8_t { kPlacement, kUnreadable };
  explicit ElementGuard(Kind kind_in) : kind(kind_in) {}

  // What messages show in place of the tensor's dtype, shape and device.
  virtual std::string describe(const Tensor& tensor) const = 0;
  // What a caller that wants to read the elements should do instead.
  virtual std::string_view remedy() const = 0;
  // The guard for another tensor of the same elements; null if that tensor needs none.
  virtual std::unique_ptr<ElementGuard> clone() const = 0;

  const Kind kind;
};

// nullptr for a tensor without a guard and for an undefined one.
inline const ElementGuard* element_guard(const Tensor& x) {
  return x.defined() ? static_cast<const ElementGuard*>(x.impl()->guard.get()) : nullptr;
}

// Gives `to`, of the same shape, a copy of the guard of `from`, if it has one.
inline void copy_guard(const Tensor& from, const Tensor& to) {
  if (const ElementGuard* guard = element_guard(from)) to.impl()->guard = guard->clone();
}

// For ops that would take a part for the whole. Throws UnsupportedError with the remedy.
inline void check_whole(const Tensor& x, std::string_view where) {
  const ElementGuard* guard = element_guard(x);
  TS_CHECK_AS(UnsupportedError, guard == nullptr, where, "works on whole tensors; got ", x, "; ",
              guard->remedy());
}

}  // namespace tessera
