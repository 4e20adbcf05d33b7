// The placements of a tensor on a mesh, one for each axis, as in PyTorch, and the shard of the
// tensor that a rank holds.
//
//     Placements placements = {Replicate(), Shard(0)};  // of a mesh (dp_replicate=2, dp_shard=4)
//
// [Note: chunks] N ranks divide a dimension of length L into chunks of c = ceil(L / N): rank i
// holds [i c, min((i + 1) c, L)), which may be short and, if L is small, empty. If several axes
// shard one dimension the left one divides it first and the next one divides its chunk; but a
// strided shard divides after all axes to its right.
//
// [Note: blocks] A dimension may hold several matrices one behind the other: queries, keys and
// values (c_attn: 3), gate and up (2). A BlockShard divides each of them into chunks, and a rank
// holds its chunk of every block, one behind the other. So its shard is several boxes of the whole:
// as many as blocks, or more if other axes shard in blocks too.
//
// [Note: flat shards] Tensors that lie one behind the other in one buffer, a unit, which N ranks
// divide into chunks of equal length at any element: of a tensor a rank then holds a run of its
// row-major elements, as a 1-D shard, which may begin and end inside of a row and may be empty.
// Other axes of the mesh replicate such a tensor, or shard dimensions of it evenly: then it is the
// run of what they leave, which has one size on all ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/core/shape.h>
#include <tessera/distributed/mesh/box.h>
#include <tessera/distributed/mesh/mesh.h>

namespace tessera {
struct PartBox;  // core/tensor/placement.h
}

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
// Every rank holds its chunk of each of so many equal blocks of a dimension, see [Note: blocks].
// It cuts the dimension before any other axis but those that cut as many blocks of it.
struct BlockShard {
  int dim = 0;
  int blocks = 1;
  friend bool operator==(const BlockShard&, const BlockShard&) = default;
};
// Rank i holds the row-major elements e with i * chunk <= offset + e < (i + 1) * chunk of what the
// other axes leave.
struct FlatShard {
  int64_t offset = 0;  // of the tensor's first element in its unit
  int64_t chunk = 0;   // elements of the unit on a rank
  friend bool operator==(const FlatShard&, const FlatShard&) = default;
};
struct Partial {  // every rank holds a tensor of the whole shape: the value is their reduction
  ReduceOp op = ReduceOp::kSum;  // kSum, kMean, kMax or kMin
  friend bool operator==(const Partial&, const Partial&) = default;
};
using Placement = std::variant<Replicate, Shard, StridedShard, BlockShard, Partial, FlatShard>;
using Placements = std::vector<Placement>;

std::string describe(const Placement& placement);    // "Shard(0)", "Replicate", "Partial(sum)"
std::string describe(const Placements& placements);  // "[Replicate, Shard(0)]"
bool is_partial(const Placement& placement);
int shard_dim(const Placement& placement);     // of a Shard, StridedShard, BlockShard, else -1
int blocks_of(const Placement& placement);     // of a BlockShard, else 1
bool is_sharding(const Placement& placement);  // every rank holds elements of its own

// The i-th of `parts` chunks of a length, see [Note: chunks]: begin and end.
std::pair<int64_t, int64_t> chunk_of(int64_t length, int parts, int i);
// What the i-th of `parts` ranks holds of a dimension of that length where this placement cuts it:
// a chunk, or one of every block. As few ranges as can be, ascending, at least one.
using Ranges = std::vector<std::pair<int64_t, int64_t>>;
Ranges ranges_of(const Placement& cut, int64_t length, int parts, int i);
int64_t length_of(const Ranges& ranges);
// The elements of a tensor of so many that rank i holds, see [Note: flat shards]: begin and end.
std::pair<int64_t, int64_t> run_of(const FlatShard& flat, int64_t numel, int i);

// A tensor's shape and how it lies.
struct DTensorSpec {
  Mesh* mesh = nullptr;
  Placements placements;  // one for each axis of the mesh
  Shape shape;            // of the whole tensor

  // With non-negative dimensions. Throws, named `where`: ConfigError unless there is one placement
  // for each axis of the mesh, the Partials have one reduction that is one of theirs, split factors
  // are the parts that the axes to their right make, blocks divide their dimension and cut it
  // first, and a FlatShard has every element in one of the chunks and copies and even cuts alone
  // beside it; IndexError for a dimension that the shape lacks.
  DTensorSpec checked(std::string_view where) const;
  // The axes that cut a dimension, the first one first.
  std::vector<size_t> cuts(int dim) const;
  // The axis of a FlatShard.
  std::optional<size_t> flat_axis() const;
  // What this rank holds of the whole. UnsupportedError for a FlatShard, whose run of elements is
  // seldom one box, and for several blocks.
  Box local_box() const;
  // The same for every placement. None where there are no elements; one, but of blocks one for
  // each, and of a FlatShard up to 2 * dim - 1.
  std::vector<Box> local_boxes() const;
  // What the rank at these coordinates, one for each axis, holds of the whole, and where in its
  // part, which is row-major.
  std::vector<PartBox> boxes_at(std::span<const int> coordinates) const;
  std::vector<PartBox> own_boxes() const;  // at this rank's
  Ranges own_ranges(int dim) const;        // of a dimension; not of a FlatShard
  // The elements of the part of each rank of the mesh, in its order. Communicates nothing.
  std::vector<int64_t> part_numels() const;
  std::pair<int64_t, int64_t> local_run() const;  // of a FlatShard: begin and end
  Shape shape_of_run() const;                     // of what the other axes leave
  Shape local_shape() const;                      // of the part: the boxes', or 1-D for a run
  // What this rank holds, in words: "[0:3, 0:4]", "[0:1, 0:4] and [3:4, 0:4]", "the elements
  // [10:64]".
  std::string describe_part() const;
  // "f32[12, 4] on mesh(dp=4): [Shard(0)]"
  std::string describe(DType dtype) const;
  friend bool operator==(const DTensorSpec&, const DTensorSpec&) = default;

  // The spec of the gradient: if this one is partial its gradient is the same on all ranks.
  DTensorSpec of_gradient() const;
  DTensorSpec with(Placements other) const { return {mesh, std::move(other), shape}; }
  DTensorSpec replicated() const;
};

}  // namespace tessera::distributed
