// Which kernels a GPU has: each family's .cu file registers its own
// (core/kernels/common/on_device.h).
#pragma once

namespace tessera::gpu {

void register_kernels();  // once, before the first tensor of a GPU

}  // namespace tessera::gpu
