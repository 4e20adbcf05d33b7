// What a rank with a GPU keeps in host memory, after PyTorch's
// torch.distributed.fsdp.CPUOffloadPolicy (kParameters) and DeepSpeed's ZeRO-Offload.
#pragma once

#include <cstdint>

namespace tessera::distributed {

enum class OffloadPolicy : uint8_t {
  kNone,
  // Gradients, the shards that the optimizer updates, and its states. The device keeps a copy of
  // the shards for all-gathers, which a step makes stale, so the shards are uploaded once a step.
  kOptimizer,
  // Also the parameters: shards are uploaded for every all-gather, and the device holds only
  // unsharded units.
  kParameters,
};

}  // namespace tessera::distributed
