// The compute type of kernels for f64, f32, f16 and bf16: f64 for f64, else f32.
#pragma once

#include <tessera/core/dtype.h>

namespace tessera::kernels {

inline DType compute_dtype(DType dtype) { return dtype == kF64 ? kF64 : kF32; }

// Calls f<C>() with the type of such a dtype.
template <class F>
void with_compute(DType compute, F&& f) {
  compute == kF64 ? f.template operator()<double>() : f.template operator()<float>();
}

}  // namespace tessera::kernels
