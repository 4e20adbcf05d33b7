#include <tessera/core/kernels/elementwise/elementwise_loops_simd.h>

namespace tessera::kernels::TS_SIMD {

TS_UNARY_FUNCTORS(TS_DEFINE_UNARY)

}  // namespace tessera::kernels::TS_SIMD
