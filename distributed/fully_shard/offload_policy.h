// What a rank with a GPU keeps in memory of the host, after PyTorch's
// torch.distributed.fsdp.CPUOffloadPolicy (which is kParameters) and DeepSpeed's ZeRO-Offload.
#pragma once

#include <cstdint>

namespace tessera::distributed {

enum class OffloadPolicy : uint8_t {
  kNone,
  // Gradients, and the parts of parameters that the optimizer works on, with its states. The device
  // keeps a copy of what its gathers begin with, which a step makes stale: the parts travel up once
  // a step.
  kOptimizer,
  // The parameters, too: the parts travel up for every gather, and the device holds of the model
  // what is whole at the time.
  kParameters,
};

}  // namespace tessera::distributed
