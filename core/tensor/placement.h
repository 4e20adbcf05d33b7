// How a tensor that is a part of a larger one says so: core, autograd and optimizers ask it where
// the part lies in the whole and which ranks hold the other parts. distributed/mesh/dtensor.h
// implements it.
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

// One box of a shard: elements [offset, offset + extent) of every dimension of the whole. Element
// `first` of the shard's memory is its first, and the others follow by `strides`.
struct PartBox {
  Shape offset, extent;
  int64_t first = 0;
  Shape strides;
};
// A part is these boxes of a tensor of shape `whole`: several if it is sharded in blocks, none if
// it has no elements.
struct PlaceInWhole {
  Shape whole;
  std::vector<PartBox> boxes;
};

// The ranks that together hold every element of a tensor once.
struct PartHolders {
  explicit PartHolders(const void* ranks_in) : ranks(ranks_in) {}
  virtual ~PartHolders() = default;
  // Reduces the ranks' values (such as the sum of a norm) in place. Collective among the holders.
  enum class Reduction { kSum, kMax };
  virtual void reduce(const Tensor& value, Reduction reduction) const = 0;
  // An exchange that brings each of these tensors together on one rank. `parts` are this rank's
  // parts; they need no elements.
  virtual std::unique_ptr<WholeExchange> exchange(std::span<const Tensor> parts) const = 0;

  const void* const ranks;  // equal for tensors that are sharded over the same ranks
};

// A tensor with a placement has the geometry of its own part.
struct TensorPlacement : ElementGuard {
  TensorPlacement() : ElementGuard(Kind::kPlacement) {}

  // What describe() says of the whole. It is "f32[12, 4] on mesh(dp=4): [Shard(0)]" where
  // describe() is "DTensor f32[12, 4] on mesh(dp=4): [Shard(0)], local [3, 4]".
  virtual std::string describe_whole(const Tensor& part) const = 0;
  virtual const Shape& whole_shape() const = 0;
  virtual PlaceInWhole place() const = 0;  // a part of the flattened whole has flat offsets
  virtual bool equals(const TensorPlacement& other) const = 0;
  // The placement of the gradient is this one, but a Partial has a whole gradient.
  virtual std::unique_ptr<TensorPlacement> of_gradient() const = 0;
  // This part of another tensor of the whole's shape, as a view if possible; undefined if `whole`
  // has another shape.
  virtual Tensor part_of(const Tensor& whole) const = 0;
  // nullptr if this rank has the whole. Every rank of the mesh must ask, because the first call may
  // be collective. A Partial throws UnsupportedError, named `where`.
  virtual std::unique_ptr<const PartHolders> holders(std::string_view where) const = 0;
};

// nullptr for a tensor that is not a part and for an undefined one.
inline const TensorPlacement* tensor_placement(const Tensor& x) {
  const ElementGuard* guard = element_guard(x);
  return guard != nullptr && guard->kind == ElementGuard::Kind::kPlacement
             ? static_cast<const TensorPlacement*>(guard)
             : nullptr;
}

// The shape of the tensor that x is a shard of, or that of x.
inline Shape whole_shape(const Tensor& x) {
  const TensorPlacement* placement = tensor_placement(x);
  return placement != nullptr ? placement->whole_shape() : x.shape();
}

// The holders of x; nullptr if x is whole. A Partial and a tensor without bytes throw
// UnsupportedError.
inline std::unique_ptr<const PartHolders> part_holders(const Tensor& x, std::string_view where) {
  const ElementGuard* guard = element_guard(x);
  if (guard == nullptr) return nullptr;
  const TensorPlacement* placement = tensor_placement(x);
  TS_CHECK_AS(UnsupportedError, placement != nullptr, where,
              "no rank has a part of what is given; ", guard->remedy());
  return placement->holders(where);
}

// Tensors whose parts the same ranks hold; `members` are indices into the given list.
struct HeldParts {
  std::unique_ptr<const PartHolders> holders;
  std::vector<size_t> members;
};
// The lists are in the order of their first members. `where`: as in part_holders().
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

// Whether both are whole, or are parts with equal placements.
inline bool same_placement(const Tensor& a, const Tensor& b) {
  const TensorPlacement *left = tensor_placement(a), *right = tensor_placement(b);
  return left == nullptr || right == nullptr ? left == right : left->equals(*right);
}

// The elements of `source` that belong into `target`, as a plain tensor. They are the same part if
// the placements are equal, and the target's part if `source` is whole. Undefined if it does not
// fit.
inline Tensor fitting_part(const Tensor& target, const Tensor& source) {
  if (unreadable_storage(target) != nullptr || unreadable_storage(source) != nullptr) return {};
  const TensorPlacement *own = tensor_placement(target), *other = tensor_placement(source);
  if (own != nullptr && other == nullptr) return own->part_of(source);
  const bool alike = own == nullptr ? other == nullptr : own->equals(*other);
  return alike && source.shape() == target.shape() ? raw::alias(source) : Tensor();
}

// For messages that must be the same on all ranks.
inline std::string described_whole(const Tensor& x) {
  const TensorPlacement* placement = tensor_placement(x);
  return placement != nullptr ? placement->describe_whole(x) : x.describe();
}

}  // namespace tessera
