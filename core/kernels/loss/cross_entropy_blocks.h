// Rows of cross_entropy_simd.cpp. V classes; class_weights are in the compute type or null.
#pragma once

#include <cstdint>

#include <tessera/core/dtype.h>
#include <tessera/core/isa.h>

namespace tessera::kernels {

struct RowStatistics {
  double largest;
  double sum;           // of exp(x - largest)
  double weighted_sum;  // of w[c] (x[c] - largest), where asked for
};
TS_SIMD_DECLARE(RowStatistics cross_entropy_row(DType dtype, const void* x, int64_t V,
                                                const void* class_weights, bool weighted));
// dx[c] = a exp(x[c] - largest) - b w[c], and c0 less at the target. dx may be x.
TS_SIMD_DECLARE(void cross_entropy_row_gradient(DType dtype, const void* x, void* dx, int64_t V,
                                                double largest, double a, double b,
                                                const void* class_weights, int64_t target,
                                                double at_target));

}  // namespace tessera::kernels
