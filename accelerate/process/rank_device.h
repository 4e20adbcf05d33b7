// Which device a rank computes on.
//
//     const Device device = accelerate::rank_device("cuda", "--device");
//     distributed::ProcessGroup processes({.device = device});
//     model.to(device);
//
// An Accelerator does this by its settings `device` and `cpu`.
#pragma once

#include <string_view>

#include <tessera/core/device.h>

namespace tessera::accelerate {

// The rank's place on its node.
struct RankPlace {
  int rank = 0;
  int local_rank = 0;   // on its node
  int local_ranks = 1;  // on its node
};

// "cpu"; "cuda": the GPU of the local rank; "cuda:N": that GPU, for a node with one rank; "": as
// cuda if there is a GPU, else the CPU. `origin` names the setting's source in errors. ConfigError
// for another name, or one GPU for several ranks; DeviceError with the remedy if there is no GPU,
// no such GPU, or fewer GPUs than ranks.
Device rank_device(std::string_view name, std::string_view origin, const RankPlace& place);
// For this process before it has met the others, from the launcher's environment.
Device rank_device(std::string_view name, std::string_view origin);

}  // namespace tessera::accelerate
