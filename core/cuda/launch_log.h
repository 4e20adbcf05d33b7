// How the files of the runtime tell time_launches() what they queued. Internal: launch_times.h is
// the interface.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace tessera::gpu {

// Whether the calling thread's launches are timed.
bool times_launches();
// What a library is asked for, in the next launch of the thread; only where launches are timed.
void note_request(std::string request);
// Behind each launch and copy. Does nothing where launches are not timed, or within a capture.
void log_launch(const char* name, cudaStream_t stream);

}  // namespace tessera::gpu
