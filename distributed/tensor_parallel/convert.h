// From one mark to another along an axis of the compute mesh: the only place where tensor-parallel
// code communicates. The table is closed, and nobody writes a backward: that of a -> b is the
// conversion dual(b) -> dual(a), which is in the table, and so are its own.
//
// | a -> b                               | forward               | backward               |
// |--------------------------------------|-----------------------|------------------------|
// | invariant -> replicated              | nothing               | summand -> invariant   |
// | summand -> replicated, invariant     | all_reduce            | as it comes, nothing   |
// | Shard -> replicated                  | all_gather            | summand -> Shard       |
// | Shard -> invariant                   | all_gather            | invariant -> Shard     |
// | replicated, invariant -> Shard       | own chunk             | Shard -> summand, ...  |
// | summand -> Shard                     | reduce_scatter        | Shard -> replicated    |
// | Shard -> summand                     | zeros around          | replicated -> Shard    |
// | replicated, invariant -> summand     | coordinate 0 keeps it | replicated -> summand, |
// |                                      |                       | invariant              |
// | replicated -> invariant              | nothing               | invariant -> summand   |
// | Shard(a) -> Shard(b)                 | all_to_all            | Shard(b) -> Shard(a)   |
// | the same                             | nothing               | nothing                |
#pragma once

#include <optional>
#include <string_view>

#include <tessera/autograd/op.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/tensor_parallel/mark.h>

namespace tessera::distributed {

struct ConvertOptions {
  // The whole length of the dimension that x has a chunk of. Absent: all chunks are as long as x's.
  std::optional<int64_t> length = {};
  // Chunks of a dimension that does not divide differ in length (chunk_of in mesh/placement.h), and
  // the way back needs `length`. Without it ShapeError.
  bool uneven = false;
};

// x, marked a along the axis, as b; other axes' marks stay. Collective along the axis where the
// table has a collective. Shares elements where nothing moves. Throws UnsupportedError for a shard
// of one dimension in other blocks, ConfigError for an axis that the compute mesh does not have.
Tensor convert(const Tensor& x, std::string_view axis, const Mark& to,
               const ConvertOptions& options = {});

// The chunk of a whole tensor that the rank at a coordinate has: a copy.
Tensor chunk_at(const Tensor& whole, const Mark& shard, int ranks, int coordinate);

extern const Op kConvert;  // the record of all conversions

}  // namespace tessera::distributed
