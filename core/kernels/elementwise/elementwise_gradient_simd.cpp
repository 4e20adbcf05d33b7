#include <tessera/core/kernels/elementwise/elementwise_loops_simd.h>

namespace tessera::kernels::TS_SIMD {

TS_UNARY_GRADIENT_FUNCTORS(TS_DEFINE_BINARY)

}  // namespace tessera::kernels::TS_SIMD
