#include <tessera/core/kernels/gemm/gemm_block.h>
#include <tessera/core/kernels/gemm/gemm_dot.h>
#include <tessera/core/kernels/gemm/gemm_rows.h>
#include <tessera/core/kernels/gemm/gemm_tile.h>

namespace tessera::kernels::TS_SIMD {
namespace {

template <class P>
void multiply_rows(const GemmRows& rows) {
  const auto* a = static_cast<const typename P::Left*>(rows.a);
  const auto* b = static_cast<const typename P::Right*>(rows.b);
  auto* sums = static_cast<typename P::Sum*>(rows.sums);
  if (rows.b_row_stride == 1) {
    dot_rows<P>(rows.m, rows.n, rows.k, a, rows.a_row_stride, b, rows.b_column_stride, sums,
                rows.sums_row_stride);
  } else {
    spread_rows<P>(rows.m, rows.n, rows.k, a, rows.a_row_stride, b, rows.b_row_stride, sums,
                   rows.sums_row_stride);
  }
}

}  // namespace

void gemm_rows(const GemmRows& rows) {
#if defined(TESSERA_DOT_KERNEL)
  if (rows.in_pairs) return multiply_rows<PairProducts>(rows);
#endif
  switch (rows.dtype) {
    case kF64:
      return multiply_rows<WideProducts<double, double>>(rows);
    case kF32:
      return multiply_rows<WideProducts<float, float>>(rows);
    case kF16:
      return multiply_rows<WideProducts<float, f16>>(rows);
    default:
      return multiply_rows<WideProducts<float, bf16>>(rows);
  }
}

}  // namespace tessera::kernels::TS_SIMD
