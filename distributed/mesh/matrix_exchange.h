// Gathers sharded DTensors whole on one rank each, for an optimizer of matrices (optim/muon.h).
//
// [Note: owners] A tensor that one rank holds entirely stays there. The others are assigned largest
// first, each to the rank that has the fewest bytes by then; among equals to the one that holds
// most of it, then to the first. All ranks calculate the same from shapes and placements.
//
// Each direction is one all_to_all, on Channel::kParameter: every rank sends every owner its shards
// of the owner's tensors as one buffer, and gets them back the same way. An owner's own shards are
// not sent. A rank's peak is its shards and the whole tensors that it owns, twice while they are
// packed.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/core/tensor/whole_exchange.h>
#include <tessera/distributed/mesh/placement.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

class MatrixExchange final : public WholeExchange {
 public:
  // The tensors are cut over exactly the ranks of the group, which are numbered as Mesh::group
  // does.
  MatrixExchange(std::vector<DTensorSpec> specs, Group& group);

  bool owns(size_t i) const override { return owners_[i] == group_.rank(); }
  TensorList gather(std::span<const Tensor> parts) override;
  void scatter(std::span<const Tensor> wholes, std::span<const Tensor> parts) override;
  int rounds() const override;
  int64_t gathers() const override;
  int64_t scatters() const override;

  Group& group() const { return group_; }
  int owner(size_t i) const { return owners_[i]; }
  int64_t elements_owned_by(int rank) const;
  int64_t cut() const;  // tensors of which more than one rank holds elements

 private:
  const std::vector<PartBox>& own_boxes(size_t i) const;
  bool is_cut(size_t i) const { return cut_[i] != 0; }
  // For each rank the memory of this rank's parts of what that one owns, and of the parts that it
  // has of what this one owns; none for this rank itself.
  TensorList lent(DType dtype, const Device& device) const;
  TensorList owned(DType dtype, const Device& device) const;
  void exchange(const TensorList& received, const TensorList& sent);

  std::vector<DTensorSpec> specs_;
  Group& group_;
  std::vector<std::vector<std::vector<PartBox>>> boxes_;  // [tensor][rank]: what it holds
  std::vector<uint8_t> cut_;                              // more than one rank holds elements
  std::vector<int> owners_;
};

}  // namespace tessera::distributed
