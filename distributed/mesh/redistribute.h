// From one way of lying on a mesh to another, on plain local parts: what redistribute(), to_local()
// and full_tensor() of dtensor.h go through. Its steps along one axis are also those of convert()
// (tensor_parallel/convert.h).
//
// [Note: redistribution] Along one axis, forward and for the gradient:
//
//     from -> to            forward                          backward
//     Shard -> Replicate    all_gather                       own chunk; reduce_scatter where the
//                                                            gradient is stated to be partial
//     Partial -> Replicate  all_reduce                       nothing
//     Partial -> Shard      reduce_scatter                   all_gather
//     Replicate -> Shard    own chunk                        all_gather
//     Shard(a) -> Shard(b)  all_to_all                       all_to_all
//     Replicate -> Partial  the value at coordinate 0 and    nothing
//                           zeros (mean, max, min: the value)
//     BlockShard            as Shard, of the same dimension too: between both through Replicate
//     FlatShard             as Shard from and to Replicate and from Partial
//     the same              nothing                          nothing
//
// All other changes go through Replicate; the same shards by another name (a StridedShard that no
// axis to its right divides) go nowhere. A gradient goes back to the placements of the source, but
// stays replicated if that is partial. Sizes need not divide: lists of uneven shards are sent
// without padding. Among several axes the one that leaves fewer elements goes first (from [Partial,
// Partial] to [Replicate, Shard(0)] the reduce_scatter); a chunk of a chunk is gathered before the
// chunk, and if two shards conflict one is gathered. Between a FlatShard and a Shard, and from one
// FlatShard to another, the way is through Replicate, and so it is if another axis changes too.
//
// The gradient of a summand of a Partial(mean) over n ranks is the value's divided by n. A
// Partial(max) or (min) has none: recording one is an UnsupportedError.
#pragma once

#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/mesh/placement.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// This rank's part under `to` of the tensor whose part under `from` is `local`, whose placement
// slot is passed by: a plain tensor, which shares elements with `local` where nothing changes.
// Collective along the axes that change. Both specs are checked ones of one mesh and shape.
// Recorded where `local` requires grad: the gradient that arrives lies by `output_gradient`, what
// goes back by from.of_gradient(). Channel::kModule.
Tensor redistribute_local(const Tensor& local, const DTensorSpec& from, const DTensorSpec& to,
                          const DTensorSpec& output_gradient);

// One step: this rank's part under `to` of what is x under `from` on the ranks of a group. Not to or
// from a FlatShard, and between two shards of different dimensions only. `length`: that of the
// dimension that `from` cuts, whole. x itself if the group has one rank. Not recorded.
Tensor moved_along(const Tensor& x, const Placement& from, const Placement& to, int64_t length,
                   Group& group, const CollectiveOptions& call);

// Returns what lies in these ranges of a dimension: a view for one range, else a copy.
Tensor held_along(const Tensor& x, int dim, const Ranges& ranges);
// The reverse: a dimension of that length from the shards of all ranks, in their order.
Tensor joined_along(const TensorList& parts, const Placement& cut, int64_t length);

// For FlatShards: a tensor's elements in row-major order, 1-D (a view if they lie so), and from
// that those of each rank, as views.
Tensor elements_of(const Tensor& x);
TensorList runs_of(const Tensor& elements, const FlatShard& flat, int ranks);

}  // namespace tessera::distributed
