// The dtypes of a mixed-precision training: what parameters are stored in, what products are
// computed in, what gradients are reduced in, what a module gives back.
#pragma once

#include <optional>

#include <tessera/core/dtype.h>

namespace tessera::precision {

struct Policy {
  DType parameter = kF32;
  DType compute = kF32;
  DType reduce = kF32;
  std::optional<DType> output = {};  // nothing: what the module computes
};

}  // namespace tessera::precision
