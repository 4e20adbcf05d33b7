// What ranks give to become a DTensor: made equal, or compared.
#pragma once

#include <tessera/core/tensor.h>
#include <tessera/distributed/mesh/placement.h>

namespace tessera::distributed {

// This rank's part of the tensor that rank 0 of the mesh has: a scatter or a broadcast for each
// axis, those that shard first. ShapeError or DTypeError on every rank where they give others.
Tensor scatter_from_first(const Tensor& whole, const DTensorSpec& spec);

// Throws on every rank where the parts of one do not fit: ShapeError, DTypeError, ValueError for
// copies that differ. `shape_given`: the spec's shape is not made from this rank's part.
void check_parts(const Tensor& local, const DTensorSpec& spec, bool shape_given);

}  // namespace tessera::distributed
