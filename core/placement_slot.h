// What core and autograd know of tensors that are parts of a larger one: that they are, how to say
// so, and that nothing may take them for the whole. distributed/mesh/dtensor.h fills the slot.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <tessera/core/tensor.h>

namespace tessera {

// In TensorImpl::placement. The tensor that bears it has the geometry of its own part.
struct PlacementSlot : TensorSlot {
  // "DTensor f32[12, 4] on mesh(dp=4): [Shard(0)], local [3, 4]", and of that what concerns the
  // whole: "f32[12, 4] on mesh(dp=4): [Shard(0)]".
  virtual std::string describe(const Tensor& part) const = 0;
  virtual std::string describe_whole(const Tensor& part) const = 0;
  virtual std::unique_ptr<PlacementSlot> clone() const = 0;
  // Of the gradient: as this one's, but whole where this one holds a summand.
  virtual std::unique_ptr<PlacementSlot> of_gradient() const = 0;
  virtual bool equals(const PlacementSlot& other) const = 0;
};

// The slot, or nullptr for a tensor that is whole (and for an undefined one).
inline const PlacementSlot* placement_slot(const Tensor& x) {
  return x.defined() ? static_cast<const PlacementSlot*>(x.impl()->placement.get()) : nullptr;
}

// `to` becomes the part of a tensor that lies as the one of `from`; of the same shape. Nothing
// where `from` is whole.
inline void copy_placement(const Tensor& from, const Tensor& to) {
  if (const PlacementSlot* slot = placement_slot(from)) to.impl()->placement = slot->clone();
}

// For what would take a part for the whole. Throws UnsupportedError with the remedy.
inline void check_whole(const Tensor& x, std::string_view where) {
  TS_CHECK_AS(UnsupportedError, placement_slot(x) == nullptr, where, "works on whole tensors; got ",
              x, "; take full_tensor(), or to_local() for this rank's part");
}

}  // namespace tessera
