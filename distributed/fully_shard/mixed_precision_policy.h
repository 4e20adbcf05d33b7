// The dtypes of a sharded unit, after PyTorch's torch.distributed.fsdp.MixedPrecisionPolicy.
#pragma once

#include <optional>

#include <tessera/core/dtype.h>

namespace tessera::distributed {

// Shards, their gradients and the optimizer keep the parameters' dtype. Casts are made at the
// beginning and end of a call of the unit's module: unlike autocast, which chooses by op,
// everything in between sees one dtype. Norms that should stay in f32 must be units of their own.
struct MixedPrecisionPolicy {
  // The dtype in which parameters are gathered and ops read them. Absent: their own.
  std::optional<DType> param_dtype = {};
  // The dtype in which gradients are reduced, and add up while they are not reduced. Absent:
  // param_dtype. Sums over several backwards are kept in the parameters' dtype, in which they are
  // also reduced along a replicated axis.
  std::optional<DType> reduce_dtype = {};
  std::optional<DType> output_dtype = {};  // of the call's floating outputs
  bool cast_forward_inputs = true;         // floating inputs are cast to param_dtype
};

}  // namespace tessera::distributed
