#include <tessera/accelerate/process/rank_device.h>

#include <optional>

#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/distributed/rendezvous/detect.h>

namespace tessera::accelerate {

Device rank_device(std::string_view name, std::string_view origin, const RankPlace& place) {
  constexpr std::string_view kWhere = "device";
  const int devices = name == "cpu" ? 0 : gpu::device_count();
  if (name == "cpu" || (name.empty() && devices == 0)) return kCpu;
  std::optional<Device> named;
  if (!name.empty()) {
    try {
      named = parse_device(name);
    } catch (const ValueError&) {
    }
    TS_CHECK_AS(ConfigError, named && named->is_cuda(), kWhere, origin,
                " is cpu, cuda or cuda:N; got '", name, "'");
    TS_CHECK_DEVICE(devices > 0, kWhere, origin, " asks for ", name, ": ",
                    gpu::unavailable_reason());
  }
  if (name.starts_with("cuda:")) {
    TS_CHECK_AS(
        ConfigError, place.local_ranks == 1, kWhere, origin, " names ", name, " and this node has ",
        place.local_ranks,
        " ranks, which need a GPU each; give cuda, and every rank takes that of its number");
    gpu::require_device(named->index, "device");
    return *named;
  }
  TS_CHECK_DEVICE(place.local_rank < devices, kWhere, "rank ", place.rank, " is number ",
                  place.local_rank, " of its node, which has ", devices, " GPU",
                  devices == 1 ? "" : "s", "; start fewer ranks there, or use the cpu");
  return cuda(place.local_rank);
}

Device rank_device(std::string_view name, std::string_view origin) {
  if (name == "cpu") return kCpu;
  const distributed::LaunchInfo info = distributed::detect();
  return rank_device(name, origin, {info.rank, info.local_rank, info.local_world_size});
}

}  // namespace tessera::accelerate
