// Ranges on the timeline of NVIDIA's tools (NVTX, as Nsight Systems shows them).
//
//     nsys profile -t cuda,nvtx env TESSERA_NVTX=1 ./train      # all that the program does
//
//     NvtxScope marks;                       // or this context, for a scope
//     { const TimelineRange mine("validation"); validate(); }
//
// Marked are ops (forward and backward), calls of modules by their names, optimizer steps,
// collectives and what loaders do; threads of a loader or an engine by the environment alone. Off,
// nothing is called. Where the program was built without CUDA, or no tool listens, marks go
// nowhere.
#pragma once

#include <tessera/core/profile/profiler.h>

namespace tessera {

// The timeline of the tools: one for all threads.
RangeListener& nvtx_timeline();

class NvtxScope {
 public:
  NvtxScope() : scope_(nvtx_timeline()) {}

 private:
  TimelineScope scope_;
};

}  // namespace tessera
