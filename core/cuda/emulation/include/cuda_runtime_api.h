// What CUDA's runtime has beside what kernel files use: graphs.
#pragma once

#include <cuda_runtime.h>

inline constexpr cudaError_t cudaErrorStreamCaptureUnsupported = static_cast<cudaError_t>(900),
                             cudaErrorStreamCaptureInvalidated = static_cast<cudaError_t>(901),
                             cudaErrorStreamCaptureMerge = static_cast<cudaError_t>(902),
                             cudaErrorStreamCaptureUnmatched = static_cast<cudaError_t>(903),
                             cudaErrorStreamCaptureUnjoined = static_cast<cudaError_t>(904),
                             cudaErrorStreamCaptureIsolation = static_cast<cudaError_t>(905);

using cudaGraph_t = struct EmulatedGraph*;
using cudaGraphExec_t = struct EmulatedGraphExec*;
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed,
};

// What is queued on a stream that captures becomes a node of the graph and does not run; arguments
// of launches keep the values of the capture. Other streams join by waiting for an event of it and
// must be joined again. Waiting for captured work, copies from or to pageable memory, and (unless
// the thread's mode is relaxed) allocation end the capture with an error.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, void* nodes, size_t* count);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
