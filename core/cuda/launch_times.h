// What each launch of some work took on the GPU, to be held against its price (dry/price.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera::gpu {

struct LaunchTime {
  std::string name;  // as errors and prices have it
  int64_t launches = 0;
  double seconds = 0;  // of all of them
};

// Runs the work, which this thread launches, and waits for it. An event behind each launch tells
// when it had ended; its time is that since the launch before it on its stream had, and so holds
// the gap between them. The first of a stream counts from the call. A replay of a graph is one
// launch. By name, the longest first; none in a program without GPUs. UnsupportedError within a
// capture.
std::vector<LaunchTime> time_launches(const std::function<void()>& work);

}  // namespace tessera::gpu
