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

// Where a rank stands.
struct RankPlace {
  int rank = 0;
  int local_rank = 0;   // on its node
  int local_ranks = 1;  // of its node
};

// "cpu"; "cuda": the GPU with the rank's number on its node; "cuda:N": that GPU, for a node with
// one rank; "": as cuda where there is a GPU, else the CPU. `origin` says in errors who asks.
// ConfigError for another name, or one GPU for several ranks; DeviceError with the remedy where
// there is no GPU, no such GPU, or fewer than ranks.
Device rank_device(std::string_view name, std::string_view origin, const RankPlace& place);
// Of this process, before it has met the others: what the launcher left in the environment.
Device rank_device(std::string_view name, std::string_view origin);

}  // namespace tessera::accelerate
