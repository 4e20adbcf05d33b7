// How a tensor lies on a mesh: a placement for each axis, in PyTorch's words, and the part of the
// tensor that a rank holds by them.
//
//     Placements placements = {Replicate(), Shard(0)};  // of a mesh (dp_replicate=2, dp_shard=4)
//
// [Note: chunks] N ranks cut a dimension of length L into chunks of c = ceil(L / N): rank i holds
// [i c, min((i + 1) c, L)), which may be short and, where L is small, empty. Where several axes cut
// one dimension the left one cuts first and the next one cuts its chunk; but a strided shard cuts
// after all axes to its right.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/core/shape.h>
#include <tessera/distributed/mesh/box.h>
#include <tessera/distributed/mesh/mesh.h>

namespace tessera::distributed {

struct Replicate {  // every rank along the axis holds the same
  friend bool operator==(const Replicate&, const Replicate&) = default;
};
struct Shard {  // every rank holds its chunk of a dimension (negative: from the last)
  int dim = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};
// A shard that cuts what the axes to its right have left: FSDP over tensor parallelism of the same
// dimension. split_factor: into how many parts those axes cut the dimension before.
struct StridedShard {
  int dim = 0;
  int split_factor = 1;
  friend bool operator==(const StridedShard&, const StridedShard&) = default;
};
struct Partial {  // every rank holds a tensor of the whole shape: the value is their reduction
  ReduceOp op = ReduceOp::kSum;  // kSum, kMean, kMax or kMin
  friend bool operator==(const Partial&, const Partial&) = default;
};
using Placement = std::variant<Replicate, Shard, StridedShard, Partial>;
using Placements = std::vector<Placement>;

std::string describe(const Placement& placement);    // "Shard(0)", "Replicate", "Partial(sum)"
std::string describe(const Placements& placements);  // "[Replicate, Shard(0)]"
bool is_partial(const Placement& placement);
int shard_dim(const Placement& placement);  // of a Shard or a StridedShard, else -1

// The i-th of `parts` chunks of a length, see [Note: chunks]: begin and end.
std::pair<int64_t, int64_t> chunk_of(int64_t length, int parts, int i);

// A tensor's shape and how it lies.
struct DTensorSpec {
  Mesh* mesh = nullptr;
  Placements placements;  // one for each axis of the mesh
  Shape shape;            // of the whole tensor

  // With non-negative dimensions. Throws, named `where`: ConfigError unless there is one placement
  // for each axis of the mesh, the Partials have one reduction that is one of theirs, and split
  // factors are the parts that the axes to their right make; IndexError for a dimension that the
  // shape lacks.
  DTensorSpec checked(std::string_view where) const;
  // The axes that cut a dimension, the first one first.
  std::vector<size_t> cuts(int dim) const;
  Box local_box() const;  // what this rank holds of the whole
  // "f32[12, 4] on mesh(dp=4): [Shard(0)]"
  std::string describe(DType dtype) const;
  friend bool operator==(const DTensorSpec&, const DTensorSpec&) = default;

  // Of the gradient: where this one is partial its gradient is the same on all ranks.
  DTensorSpec of_gradient() const;
  DTensorSpec with(Placements other) const { return {mesh, std::move(other), shape}; }
  DTensorSpec replicated() const;
};

}  // namespace tessera::distributed
