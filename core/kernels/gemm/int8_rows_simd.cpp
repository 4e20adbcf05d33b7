#include <tessera/core/kernels/gemm/gemm_rows.h>
#include <tessera/core/kernels/gemm/int8_rows.h>

namespace tessera::kernels::TS_SIMD {

void int8_sums(const Int8Sums& p) {
  dot_rows<WideProducts<float, int8_t>>(p.m, p.n, p.k, p.x, p.x_row_stride, p.weight,
                                        p.weight_row_stride, p.sums, p.sums_row_stride);
}

}  // namespace tessera::kernels::TS_SIMD
