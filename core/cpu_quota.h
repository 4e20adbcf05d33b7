// How much of the processors a container lets this process use.
#pragma once

#include <optional>
#include <string>

namespace tessera {

// Cores' worth of time, 0.5 for half a core; nothing: no limit. The least of all limits from this
// process's control group up, of version 2 (cpu.max) and version 1 (cpu.cfs_quota_us). `root` is in
// front of /proc, and of the places where it says that groups are mounted: for tests.
std::optional<double> cpu_quota(const std::string& root = "");

}  // namespace tessera
