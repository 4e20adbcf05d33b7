// Between DTensors and what ranks give or take in its place: whole tensors, parts to compare.
#pragma once

#include <string_view>

#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/mesh/placement.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// This rank's part of the tensor that rank 0 of the mesh has: a scatter or a broadcast for each
// axis, those that shard first. ShapeError or DTypeError on every rank where they give others.
Tensor scatter_from_first(const Tensor& whole, const DTensorSpec& spec);

// What of `whole`, of which rank 0 of the group has the elements, lies in `target`: a DTensor that
// lies alike, or where the target is whole all of it, in the dtype of `whole`, on the device of the
// target (the CPU where it has no elements). On other ranks `whole` says shape and dtype and needs
// no elements (kMeta); on rank 0 a view is not copied before it is sent. Collective; a scatter
// along each axis that cuts, a broadcast along others. ShapeError where the shapes differ;
// ConfigError for a mesh that is not the ranks of the group in their order.
Tensor scatter_whole(const Tensor& whole, const Tensor& target, Group& group = world());

// The reverse of scatter_from_first(): the whole on rank 0 of the mesh, undefined on the others, by
// one gather for each axis that cuts. Collective; UnsupportedError for a Partial.
Tensor gather_to_first(const Tensor& dtensor);

// This rank's part of a whole tensor that it has: a view, but of a FlatShard where the elements do
// not lie in order. UnsupportedError for a Partial.
Tensor part_of_whole(const Tensor& whole, const DTensorSpec& spec);

// Why a part has the shape that it has; ends a message.
std::string_view rule_of_parts(const DTensorSpec& spec);

// Throws on every rank where the parts of one do not fit: ShapeError, DTypeError, ValueError for
// copies that differ. `shape_given`: the spec's shape is not made from this rank's part.
void check_parts(const Tensor& local, const DTensorSpec& spec, bool shape_given);

}  // namespace tessera::distributed
