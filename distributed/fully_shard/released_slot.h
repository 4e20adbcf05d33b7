#pragma once

#include <memory>
#include <string>
#include <utility>

#include <tessera/core/tensor/placement_slot.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::distributed {

// In the placement slot of a whole without bytes, so that whatever would read it says why not.
struct ReleasedSlot : PlacementSlot {
  ReleasedSlot(std::string name_in, std::string tag_in)
      : name(std::move(name_in)), tag(std::move(tag_in)) {}
  std::string describe(const Tensor& whole) const override {
    return "the released parameter '" + name + "' of " + tag + ", " + describe_whole(whole);
  }
  std::string describe_whole(const Tensor& whole) const override {
    return tessera::detail::concatenate(whole.dtype(), whole.shape());
  }
  std::string_view remedy() const override {
    return "gathered parameters are whole while the calls of their unit run and in its backward; "
           "read it there, or in a scope of full_parameters()";
  }
  std::unique_ptr<PlacementSlot> clone() const override {
    return std::make_unique<ReleasedSlot>(name, tag);
  }
  std::unique_ptr<PlacementSlot> of_gradient() const override { return nullptr; }
  bool equals(const PlacementSlot& other) const override { return &other == this; }
  const std::string name, tag;
};

}  // namespace tessera::distributed
