#include <tessera/core/kernels/elementwise/elementwise.cuh>

namespace tessera::kernels {

void register_elementwise_ternary() { TS_TERNARY_FUNCTORS(TS_REGISTER_TERNARY) }

}  // namespace tessera::kernels
