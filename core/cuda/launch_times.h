// What each launch of some work took on the GPU, to be held against its price (dry/price.h).
//
//     for (const gpu::LaunchTime& launch : gpu::time_launches([&] { step(); })) ...
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tessera::gpu {

struct LaunchTime {
  std::string name;  // as errors and prices have it
  // Who asked for it, as dry::Launch has them: the op, the innermost layer, and of a library's
  // launch what it was asked for (gemm.h's describe(), or the graph's key), else empty.
  std::string op, layer, request;
  double seconds = 0;
};

// Runs the work, which this thread launches, and waits for it: kernels, launches of libraries, and
// copies, in the order of the calls, which is that of dry::record() of the same work. An event
// behind each launch tells when it had ended; its time is that since the launch before it on its
// stream had, and so holds the gap between them. The first of a stream counts from the call. A
// replay of a graph is one launch. Listens to the ranges of ops and layers in the place of who does
// so. None in a program without GPUs; on the emulation, times are the host's. UnsupportedError
// within a capture.
std::vector<LaunchTime> time_launches(const std::function<void()>& work);

}  // namespace tessera::gpu
