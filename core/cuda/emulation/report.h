// What the emulation found in the kernel that failed last.
#pragma once

#include <string>

namespace tessera::gpu::emulation {

std::string take_report();  // empty where there is nothing new

}  // namespace tessera::gpu::emulation
