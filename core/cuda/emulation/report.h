// What the emulation found in the kernel that failed last.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::gpu::emulation {

std::string take_report();  // empty where there is nothing new

// The ranges that were begun since the last call, in order, with a '>' for each that was open on
// their thread.
std::vector<std::string> take_ranges();

// How often the host waited for queued work so far: synchronisations, and copies to host memory.
int64_t host_waits();

// How many launches of this name were queued so far.
int64_t launches_of(const std::string& name);

}  // namespace tessera::gpu::emulation
