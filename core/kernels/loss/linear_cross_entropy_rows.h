// The interface of linear_cross_entropy_simd.cpp to linear_cross_entropy_cpu.cpp. Internal.
#pragma once

#include <cstdint>

#include <tessera/core/dtype.h>
#include <tessera/core/isa.h>

namespace tessera::kernels {

struct LogitRows {
  int64_t rows, classes;
  void* logits;            // (rows, classes) f64 for f64, else f32; overwritten
  const int64_t* targets;  // (rows), negative: ignored
  double* losses;          // (rows), 0 if ignored
  // The gradient of a row, of `dtype`, overwrites the beginning of the row's logits.
  bool want_gradients;
  DType dtype;
  double scale;  // of the gradient
};

TS_SIMD_DECLARE(void cross_entropy_rows(const LogitRows& problem));

}  // namespace tessera::kernels
