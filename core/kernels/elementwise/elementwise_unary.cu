#include <tessera/core/kernels/elementwise/elementwise.cuh>

namespace tessera::kernels {

void register_elementwise_unary() { TS_UNARY_FUNCTORS(TS_REGISTER_UNARY) }

}  // namespace tessera::kernels
