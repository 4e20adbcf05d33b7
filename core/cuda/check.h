// Errors of the CUDA runtime as exceptions: TS_CUDA(cudaMemcpyAsync(...)).
//
// A kernel fails when it runs, which is after the call that queued it: the text names the
// expression and line that met the error and the last operation that the thread queued. With
// TESSERA_SYNC=1 in the environment every launch is waited for, and the name is the culprit's.
#pragma once

#include <cuda_runtime.h>

#include <string>

namespace tessera::gpu {

// What the calling thread queued last, for error texts: `name` must live as long as the program.
void note_operation(const char* name, cudaStream_t stream);

[[noreturn]] void throw_cuda_error(cudaError_t error, const char* expression, const char* file,
                                   int line);

inline void check(cudaError_t error, const char* expression, const char* file, int line) {
  if (error != cudaSuccess) [[unlikely]]
    throw_cuda_error(error, expression, file, line);
}

// After a launch: throws what the launch itself returned, and under TESSERA_SYNC=1 what it did.
void finish_launch(cudaError_t error, const char* name, cudaStream_t stream);

// More about the last failure than CUDA tells (the emulation's findings), or empty.
std::string failure_details();

}  // namespace tessera::gpu

#define TS_CUDA(...) ::tessera::gpu::check((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
