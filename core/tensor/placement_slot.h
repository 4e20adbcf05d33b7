// What core and autograd know of tensors that are parts of a larger one: that they are, how to say
// so, and that nothing may take them for the whole. distributed/mesh/dtensor.h fills the slot.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <tessera/core/context.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/core/tensor/whole_exchange.h>

namespace tessera {

// A part is elements [offset, offset + its shape) of a tensor of shape `whole`.
struct PlaceInWhole {
  Shape whole;
  Shape offset;
};

// In TensorImpl::placement. The tensor that bears it has the geometry of its own part.
struct PlacementSlot : TensorSlot {
  // "DTensor f32[12, 4] on mesh(dp=4): [Shard(0)], local [3, 4]", and of that what concerns the
  // whole: "f32[12, 4] on mesh(dp=4): [Shard(0)]".
  virtual std::string describe(const Tensor& part) const = 0;
  virtual std::string describe_whole(const Tensor& part) const = 0;
  // What to do instead, for who would take the part for the whole.
  virtual std::string_view remedy() const {
    return "take full_tensor() for the whole, or to_local() for this rank's part";
  }
  virtual std::unique_ptr<PlacementSlot> clone() const = 0;
  virtual PlaceInWhole place(const Tensor& part) const {  // of what holds all elements or none
    return {part.shape(), Shape::filled(part.dim(), 0)};
  }
  // Of the whole.
  virtual Shape whole_shape(const Tensor& part) const { return part.shape(); }
  // Of the gradient: as this one's, but whole where this one holds a summand.
  virtual std::unique_ptr<PlacementSlot> of_gradient() const = 0;
  virtual bool equals(const PlacementSlot& other) const = 0;

  // Whom a value of the whole is reduced over that each rank has of its part, such as a norm's sum:
  // the ranks that together hold every element once. Equal for tensors that are cut over the same
  // ranks, nullptr where this rank has the whole. Every rank of the mesh asks alike: the first time
  // may be collective. UnsupportedError, named `where`, for what is no part, as a summand.
  virtual const void* holders(std::string_view where) const {
    TS_THROW(UnsupportedError, where, "no rank has a part of what is given; ", remedy());
  }
  // The sum (or the maximum) of what these ranks give, in place. Collective among them.
  enum class HolderReduction { kSum, kMax };
  virtual void reduce_over_holders(const Tensor&, HolderReduction) const { holders("reduce"); }
  // How the tensors of which this rank has these parts, of equal holders() that are not null,
  // become whole on one of those ranks each. The parts need no elements.
  virtual std::unique_ptr<WholeExchange> exchange_wholes(std::span<const Tensor> parts) const {
    static_cast<void>(parts);
    return nullptr;
  }
  // Of a weight of which there are casts alone (autograd/weight_cache.h): autocast finds them, and
  // whatever reads the weight itself calls bring() before, which gathers it; collective.
  virtual bool has_casts() const { return false; }
  virtual void bring() const {}
  // This part of another tensor of the whole's shape, a view where it can be one; undefined where
  // that is no such tensor, or no part of one can stand here.
  virtual Tensor part_of(const Tensor& whole) const {
    static_cast<void>(whole);
    return {};
  }
};

// The slot, or nullptr for a tensor that is whole (and for an undefined one).
inline const PlacementSlot* placement_slot(const Tensor& x) {
  return x.defined() ? static_cast<const PlacementSlot*>(x.impl()->placement.get()) : nullptr;
}

// Of what x is a part of, or of x.
inline Shape whole_shape(const Tensor& x) {
  const PlacementSlot* slot = placement_slot(x);
  return slot != nullptr ? slot->whole_shape(x) : x.shape();
}

// Of the tensors that ranks hold parts of, those that the same ranks do, by their place in the
// list; lists in the order of their first ones. `where`: as holders().
inline std::vector<std::vector<size_t>> by_holders(std::span<const Tensor> tensors,
                                                   std::string_view where) {
  std::vector<std::pair<const void*, std::vector<size_t>>> lists;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const PlacementSlot* const slot = placement_slot(tensors[i]);
    const void* const holders = slot != nullptr ? slot->holders(where) : nullptr;
    if (holders == nullptr) continue;
    size_t at = 0;
    while (at < lists.size() && lists[at].first != holders) ++at;
    if (at == lists.size()) lists.push_back({holders, {}});
    lists[at].second.push_back(i);
  }
  std::vector<std::vector<size_t>> result;
  for (auto& [holders, members] : lists) result.push_back(std::move(members));
  return result;
}

// Whether both are whole, or parts that lie alike.
inline bool same_placement(const Tensor& a, const Tensor& b) {
  const PlacementSlot *left = placement_slot(a), *right = placement_slot(b);
  return left == nullptr || right == nullptr ? left == right : left->equals(*right);
}

// `to` becomes the part of a tensor that lies as the one of `from`; of the same shape. Nothing
// where `from` is whole.
inline void copy_placement(const Tensor& from, const Tensor& to) {
  if (const PlacementSlot* slot = placement_slot(from)) to.impl()->placement = slot->clone();
}

// What of `source` belongs into `target`, as a plain tensor: the same part of a tensor that lies
// alike, else of a whole one all or the part that the target is. Undefined where it does not fit.
inline Tensor fitting_part(const Tensor& target, const Tensor& source) {
  const PlacementSlot *own = placement_slot(target), *other = placement_slot(source);
  if (own != nullptr && other == nullptr) return own->part_of(source);
  const bool alike = own == nullptr ? other == nullptr : own->equals(*other);
  return alike && source.shape() == target.shape() ? raw::alias(source) : Tensor();
}
// In messages that are the same on all ranks.
inline std::string described_whole(const Tensor& x) {
  const PlacementSlot* slot = placement_slot(x);
  return slot != nullptr ? slot->describe_whole(x) : x.describe();
}

// For what would take a part for the whole. Throws UnsupportedError with the remedy.
inline void check_whole(const Tensor& x, std::string_view where) {
  const PlacementSlot* slot = placement_slot(x);
  TS_CHECK_AS(UnsupportedError, slot == nullptr, where, "works on whole tensors; got ", x, "; ",
              slot->remedy());
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
