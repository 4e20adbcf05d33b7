#include <tessera/core/kernels/elementwise/elementwise.cuh>

namespace tessera::kernels {

void register_elementwise_binary() { TS_BINARY_FUNCTORS(TS_REGISTER_BINARY) }

}  // namespace tessera::kernels
