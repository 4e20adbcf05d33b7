// Distributes whole tensors as DTensors, gathers them, and compares the ranks' parts.
#pragma once

#include <string_view>

#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/mesh/placement.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// This rank's part of the tensor that rank 0 of the mesh has, by a scatter or a broadcast for each
// axis, sharded axes first. Ranks with other shapes or dtypes: ShapeError or DTypeError on all.
Tensor scatter_from_first(const Tensor& whole, const DTensorSpec& spec);

// The elements of `whole`, which rank 0 of the group has, that belong into `target`: a DTensor of
// the same placements, or all of them if `target` is whole. The result has the dtype of `whole` and
// the device of the target (the CPU if it has no elements). On other ranks only shape and dtype of
// `whole` count (it may be kMeta); on rank 0 a view is not copied before it is sent. Collective: a
// scatter along each sharded axis, a broadcast along the others. ShapeError if the shapes differ;
// ConfigError for a mesh that is not the ranks of the group in their order.
Tensor scatter_whole(const Tensor& whole, const Tensor& target, Group& group = world());

// The reverse of scatter_from_first(): the whole on rank 0 of the mesh, undefined on the others, by
// one gather for each sharded axis. Collective; UnsupportedError for a Partial.
Tensor gather_to_first(const Tensor& dtensor);

// This rank's part of a whole tensor that it has. It is a view, except for a FlatShard whose
// elements are not in order and for several blocks. UnsupportedError for a Partial.
Tensor part_of_whole(const Tensor& whole, const DTensorSpec& spec);

// The reason for the shape of a part, as the end of a message.
std::string_view rule_of_parts(const DTensorSpec& spec);

// Throws on every rank if the parts do not fit together: ShapeError, DTypeError, or ValueError for
// copies that differ. `shape_given`: the spec's shape is not made from this rank's part.
void check_parts(const Tensor& local, const DTensorSpec& spec, bool shape_given);

}  // namespace tessera::distributed
