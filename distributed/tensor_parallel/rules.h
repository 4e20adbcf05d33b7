// What ops make of marked operands, along each axis alone (see autograd/mark_rules.h):
//
// | operands along an axis                          | result                                    |
// |-------------------------------------------------|-------------------------------------------|
// | all invariant                                   | invariant                                 |
// | an invariant one that requires grad, and others | refused: its gradient would be a summand  |
// | replicated ones                                 | replicated                                |
// | shards of the same dimension, and replicated    | a shard of that dimension, if the op does |
// | ones that broadcast along it                    | not go along it                           |
// | summands alone, of a linear op                  | a summand                                 |
// | one summand of a product, others replicated     | a summand                                 |
// | shards of the inner dimension of a product,     | a summand                                 |
// | a sum over the dimension of a shard             |                                           |
//
// All else is an UnsupportedError, which names the op, the axis, the operands with their marks and
// what would do. Random numbers by place (dropout) are refused for shards.
#pragma once

#include <memory>

#include <tessera/autograd/mark_rules.h>
#include <tessera/distributed/tensor_parallel/compute_mesh.h>

namespace tessera::distributed {

std::unique_ptr<MarkRules> make_rules(const ComputeMesh& mesh);

}  // namespace tessera::distributed
