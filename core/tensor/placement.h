// What core, autograd and optimizers know of tensors that are parts of a larger one: how the part
// lies in it, how to say so, and who holds the others. distributed/mesh/dtensor.h implements it.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/core/tensor/unreadable_storage.h>
#include <tessera/core/tensor/whole_exchange.h>

namespace tessera {

// A part is elements [offset, offset + its shape) of a tensor of shape `whole`.
struct PlaceInWhole {
  Shape whole;
  Shape offset;
};

// The ranks that together hold every element of a tensor once.
struct PartHolders {
  explicit PartHolders(const void* ranks_in) : ranks(ranks_in) {}
  virtual ~PartHolders() = default;
  // The sum (or the maximum) of what they give, such as a norm's sum, in place. Collective among
  // them.
  enum class Reduction { kSum, kMax };
  virtual void reduce(const Tensor& value, Reduction reduction) const = 0;
  // How the tensors that they hold, of which this rank has these parts, become whole on one of them
  // each. The parts need no elements.
  virtual std::unique_ptr<WholeExchange> exchange(std::span<const Tensor> parts) const = 0;

  const void* const ranks;  // equal for tensors that are cut over the same ranks
};

// The tensor that bears it has the geometry of its own part.
struct TensorPlacement : ElementGuard {
  TensorPlacement() : ElementGuard(Kind::kPlacement) {}

  // describe() is "DTensor f32[12, 4] on mesh(dp=4): [Shard(0)], local [3, 4]"; of that what
  // concerns the whole: "f32[12, 4] on mesh(dp=4): [Shard(0)]".
  virtual std::string describe_whole(const Tensor& part) const = 0;
  virtual const Shape& whole_shape() const = 0;
  virtual PlaceInWhole place() const = 0;  // of a part of the flattened whole: in that
  virtual bool equals(const TensorPlacement& other) const = 0;
  // The placement of the gradient: this one, but whole for a Partial.
  virtual std::unique_ptr<TensorPlacement> of_gradient() const = 0;
  // This part of another tensor of the whole's shape, a view where it can be one; undefined where
  // that is no such tensor.
  virtual Tensor part_of(const Tensor& whole) const = 0;
  // nullptr where this rank has the whole. Every rank of the mesh asks alike: the first time may be
  // collective. UnsupportedError, named `where`, for a summand.
  virtual std::unique_ptr<const PartHolders> holders(std::string_view where) const = 0;
};

// nullptr for a tensor that is no part, and for an undefined one.
inline const TensorPlacement* tensor_placement(const Tensor& x) {
  const ElementGuard* guard = element_guard(x);
  return guard != nullptr && guard->kind == ElementGuard::Kind::kPlacement
             ? static_cast<const TensorPlacement*>(guard)
             : nullptr;
}

// Describes the tensor that x is a shard of, or x.
inline Shape whole_shape(const Tensor& x) {
  const TensorPlacement* placement = tensor_placement(x);
  return placement != nullptr ? placement->whole_shape() : x.shape();
}

// Those of x; nullptr where it is whole. UnsupportedError for a summand, and for what is not there.
inline std::unique_ptr<const PartHolders> part_holders(const Tensor& x, std::string_view where) {
  const ElementGuard* guard = element_guard(x);
  if (guard == nullptr) return nullptr;
  const TensorPlacement* placement = tensor_placement(x);
  TS_CHECK_AS(UnsupportedError, placement != nullptr, where,
              "no rank has a part of what is given; ", guard->remedy());
  return placement->holders(where);
}

// Tensors that the same ranks hold parts of, by their place in a list.
struct HeldParts {
  std::unique_ptr<const PartHolders> holders;
  std::vector<size_t> members;
};
// In the order of their first ones. `where`: as part_holders().
inline std::vector<HeldParts> by_holders(std::span<const Tensor> tensors, std::string_view where) {
  std::vector<HeldParts> lists;
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::unique_ptr<const PartHolders> holders = part_holders(tensors[i], where);
    if (holders == nullptr) continue;
    size_t at = 0;
    while (at < lists.size() && lists[at].holders->ranks != holders->ranks) ++at;
    if (at == lists.size()) lists.push_back({std::move(holders), {}});
    lists[at].members.push_back(i);
  }
  return lists;
}

// Whether both are whole, or parts that lie alike.
inline bool same_placement(const Tensor& a, const Tensor& b) {
  const TensorPlacement *left = tensor_placement(a), *right = tensor_placement(b);
  return left == nullptr || right == nullptr ? left == right : left->equals(*right);
}

// What of `source` belongs into `target`, as a plain tensor: the same part of a tensor that lies
// alike, else of a whole one all or the part that the target is. Undefined where it does not fit.
inline Tensor fitting_part(const Tensor& target, const Tensor& source) {
  if (unreadable_storage(target) != nullptr || unreadable_storage(source) != nullptr) return {};
  const TensorPlacement *own = tensor_placement(target), *other = tensor_placement(source);
  if (own != nullptr && other == nullptr) return own->part_of(source);
  const bool alike = own == nullptr ? other == nullptr : own->equals(*other);
  return alike && source.shape() == target.shape() ? raw::alias(source) : Tensor();
}

// In messages that are the same on all ranks.
inline std::string described_whole(const Tensor& x) {
  const TensorPlacement* placement = tensor_placement(x);
  return placement != nullptr ? placement->describe_whole(x) : x.describe();
}

}  // namespace tessera
