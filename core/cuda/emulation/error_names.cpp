// Also of the dry device.
#include <cuda_runtime_api.h>

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorPeerAccessAlreadyEnabled:
      return "cudaErrorPeerAccessAlreadyEnabled";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
  }
  if (error == cudaErrorStreamCaptureUnsupported) return "cudaErrorStreamCaptureUnsupported";
  if (error == cudaErrorStreamCaptureInvalidated) return "cudaErrorStreamCaptureInvalidated";
  if (error == cudaErrorStreamCaptureMerge) return "cudaErrorStreamCaptureMerge";
  if (error == cudaErrorStreamCaptureUnmatched) return "cudaErrorStreamCaptureUnmatched";
  if (error == cudaErrorStreamCaptureUnjoined) return "cudaErrorStreamCaptureUnjoined";
  if (error == cudaErrorStreamCaptureIsolation) return "cudaErrorStreamCaptureIsolation";
  return "unknown";
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
