#include <tessera/core/kernels/elementwise/elementwise_loops_simd.h>

namespace tessera::kernels::TS_SIMD {

TS_TERNARY_FUNCTORS(TS_DEFINE_TERNARY)

}  // namespace tessera::kernels::TS_SIMD
