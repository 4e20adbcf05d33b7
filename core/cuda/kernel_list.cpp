#include <tessera/core/cuda/kernel_list.h>

namespace tessera::gpu {

void register_kernels() {}

}  // namespace tessera::gpu
