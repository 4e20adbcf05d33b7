// What the emulation found in the kernel that failed last.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::gpu::emulation {

std::string take_report();  // empty where there is nothing new

// How often the host waited for queued work so far: synchronisations, and copies to host memory.
int64_t host_waits();

}  // namespace tessera::gpu::emulation
