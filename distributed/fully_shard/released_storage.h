#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <tessera/core/tensor/tensor.h>
#include <tessera/core/tensor/unreadable_storage.h>

namespace tessera::distributed {

// Guards a resharded whole, so that a read is an error that says why it has no memory.
struct ReleasedStorage : UnreadableStorage {
  ReleasedStorage(std::string name_in, std::string tag_in)
      : name(std::move(name_in)), tag(std::move(tag_in)) {}
  std::string describe(const Tensor& whole) const override {
    return tessera::detail::concatenate("the released parameter '", name, "' of ", tag, ", ",
                                        whole.dtype(), whole.shape());
  }
  std::string_view remedy() const override {
    return "gathered parameters are whole while the calls of their unit run and in its backward; "
           "read it there, or in a scope of full_parameters()";
  }
  std::unique_ptr<ElementGuard> clone() const override {
    return std::make_unique<ReleasedStorage>(name, tag);
  }
  const std::string name, tag;
};

}  // namespace tessera::distributed
