// Many tensors from one rank to all, in few collectives.
#pragma once

#include <cstdint>
#include <string_view>

#include <tessera/core/state/state_dict.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/distributed/transport/traffic.h>

namespace tessera::distributed {

inline constexpr int64_t kBroadcastBytes = int64_t{250} << 20;

// Sends the tensors of `root` to all ranks, in place, packed by dtype in messages of about `limit`
// bytes (a tensor is not split). Collective: names, shapes and dtypes must be equal on all ranks.
void broadcast_tensors(const NamedTensors& tensors, Group& ranks, int root, std::string_view tag,
                       int64_t limit = kBroadcastBytes);
// What broadcast_tensors issues.
Traffic broadcast_traffic(const NamedTensors& tensors, const Group& ranks,
                          int64_t limit = kBroadcastBytes);

}  // namespace tessera::distributed
