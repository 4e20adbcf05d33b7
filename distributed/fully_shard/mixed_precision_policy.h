// The dtypes of a sharded unit, after PyTorch's torch.distributed.fsdp.MixedPrecisionPolicy.
#pragma once

#include <optional>

#include <tessera/core/dtype.h>

namespace tessera::distributed {

// Shards, their gradients and the optimizer keep the parameters' dtype. Casts are made where a call
// of the unit's module begins and ends: unlike autocast, which chooses by op, everything in between
// sees the one dtype. Norms that should stay in f32 are units of their own.
struct MixedPrecisionPolicy {
  // Parameters are cast to it before they travel, and ops read it. Absent: their own.
  std::optional<DType> param_dtype = {};
  // Gradients are cast to it before they travel, and add up in it while they are not reduced.
  // Absent: param_dtype. Sums over several backwards are kept in the parameters' dtype, and along a
  // replicated axis they travel in that.
  std::optional<DType> reduce_dtype = {};
  std::optional<DType> output_dtype = {};  // of the call's floating outputs
  bool cast_forward_inputs = true;         // floating inputs are cast to param_dtype
};

}  // namespace tessera::distributed
