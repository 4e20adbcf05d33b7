// Where a cut dimension goes in ops that move dimensions. Internal to the rules.
#pragma once

#include <optional>

#include <tessera/autograd/mark_rules.h>
#include <tessera/core/shape.h>
#include <tessera/distributed/tensor_parallel/mark.h>

namespace tessera::distributed {

// The result's mark of a call whose operands, broadcast, have `dims` dimensions and this shard;
// nothing where the op goes along the cut dimension. `shape`: of the first operand's part.
std::optional<Mark> moved_by(const OpDims& op, const Mark& shard, int dims, const Shape& shape);

// Of a view of a part as another shape. The chunk stays one where what lies outside of the cut
// dimension is kept as it is; a dimension of blocks may be split into blocks and the rest, or made
// of them. Where dimensions of size 1 leave it open which one is cut, the first one.
std::optional<Mark> viewed(const Mark& shard, const Shape& from, const Shape& to);

}  // namespace tessera::distributed
