// Tensors whose bytes are not there, and what their readers do about it.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include <tessera/core/context.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

// Why a tensor has no bytes.
struct UnreadableStorage : ElementGuard {
  UnreadableStorage() : ElementGuard(Kind::kUnreadable) {}

  // Whether bring() gets the bytes. Until then what reads another form of the elements finds that:
  // a weight's cast (autograd/weight_cache.h), the operand of a product in fp8.
  virtual bool can_bring() const { return false; }
  // Before the elements themselves are read; this guard ends with it. May be collective.
  virtual void bring() const {}
};

// nullptr for a tensor whose elements can be read, and for an undefined one.
inline const UnreadableStorage* unreadable_storage(const Tensor& x) {
  const ElementGuard* guard = element_guard(x);
  return guard != nullptr && guard->kind == ElementGuard::Kind::kUnreadable
             ? static_cast<const UnreadableStorage*>(guard)
             : nullptr;
}

// Tensors whose bytes come and go, by the version counter that views of them share: what they are,
// "'h.0.weight' of unit h.0".
struct LentTensors {
  std::unordered_map<const VersionCounter*, std::string> names;
};

// For what reads elements. Throws AutogradError for a tensor whose bytes were given back.
inline void check_bytes(const Tensor& x, std::string_view where) {
  if (x.storage()->bytes() > 0 || x.numel() == 0 || x.is_meta()) [[likely]]
    return;
  const auto& lent = Context::current().slot<LentTensors>().names;
  const auto found = lent.find(x.impl()->version.get());
  TS_THROW(AutogradError, where, "the bytes of ", x, " were given back",
           found == lent.end() ? "" : ": it is a view of " + found->second,
           "; a gathered parameter and views of it are there while the calls of their unit run and "
           "in its backward: clone() what is to stay");
}

}  // namespace tessera
