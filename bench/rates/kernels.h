// What gpu_rates launches itself, and what it asks of the device beside backend.h.
#pragma once

#include <cstdint>

namespace tessera::bench {

struct DeviceFacts {
  int64_t multiprocessors = 0, memory_bytes = 0;
};
DeviceFacts device_facts();  // of the current device

void launch_nothing();

// `threads` threads, a multiple of 256, each with kChains chains of fmaf or expf of `turns`
// members, a multiple of 16, on the current stream. out: f32 [threads].
inline constexpr int kChains = 8;
void launch_chains(float* out, int64_t threads, int turns, bool exponentials);

}  // namespace tessera::bench
