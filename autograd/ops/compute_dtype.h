// What composed formulas calculate in.
#pragma once

#include <tessera/autograd/ops.h>

namespace tessera {

// f16 and bf16 in f32; everything else as it is.
inline Tensor in_compute(const Tensor& x) { return is_low_precision(x.dtype()) ? to(x, kF32) : x; }

}  // namespace tessera
