// Whole tensors that only rank 0 has, in the parts that ranks keep.
#pragma once

#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// What of `whole`, of which rank 0 of the group has the elements, lies in `target`: a DTensor that
// lies alike, or where the target is whole all of it, in the dtype of `whole`, on the device of the
// target (the CPU where it has no elements). On other ranks `whole` says shape and dtype and needs
// no elements (kMeta); on rank 0 a view is not copied before it is sent. Collective; a scatter
// along each axis that cuts, a broadcast along others. ShapeError where the shapes differ;
// ConfigError for a mesh that is not the ranks of the group in their order.
Tensor scatter_whole(const Tensor& whole, const Tensor& target, Group& group = world());

}  // namespace tessera::distributed
