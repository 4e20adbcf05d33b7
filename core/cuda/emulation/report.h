// What the emulation found in the kernel that failed last.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <tessera/core/cuda/traffic.h>

namespace tessera::gpu::emulation {

std::string take_report();  // empty where there is nothing new

// The ranges that were begun since the last call, in order, with a '>' for each that was open on
// their thread.
std::vector<std::string> take_ranges();

// A launch: what its host code says that it reads and writes, and what it did. Shared memory does
// not count. `accessed`: bytes of all reads and writes, however often an address comes up. `sectors`
// (32 bytes): what warps ask for at a time, see race.h.
struct CountedTraffic {
  std::string name;
  Traffic declared, counted;
  int64_t accessed = 0, sectors = 0;
};
// The traffic of the launches that `work` queues on the current device, in the order in which they
// ran. Counts are 0 if races are not tracked.
std::vector<CountedTraffic> count_traffic(const std::function<void()>& work);

// How often the host waited for queued work so far: synchronizations, and copies to host memory.
int64_t host_waits();

// Calls so far that make an event, and that ask whether one has happened.
struct EventCalls {
  int64_t made = 0, asked = 0;
};
EventCalls event_calls();

// Bytes of the copies between host and device that were queued so far on the device's streams
// beside its null stream: what travels while that one calculates. Tables of launches go with the
// launch.
struct CopiedBytes {
  int64_t to_device = 0, to_host = 0;
};
CopiedBytes copied_beside(int device);

// How many launches of this name were queued so far.
int64_t launches_of(const std::string& name);

}  // namespace tessera::gpu::emulation
