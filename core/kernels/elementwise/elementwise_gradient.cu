#include <tessera/core/kernels/elementwise/elementwise.cuh>

namespace tessera::kernels {

void register_elementwise_gradient() { TS_UNARY_GRADIENT_FUNCTORS(TS_REGISTER_BINARY) }

}  // namespace tessera::kernels
