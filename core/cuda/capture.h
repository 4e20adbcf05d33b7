// What the files of the runtime share about captures. Internal: graph.h is the interface.
#pragma once

#include <cuda_runtime_api.h>

#include <tessera/core/gpu/backend.h>

namespace tessera::gpu {

int device_of(const StreamHandle& stream);
const char* last_operation_name();  // what note_operation() was told last, or null
// To the device's current stream, see [Note: pageable copies]. Any number of bytes.
void copy_staged(void* target, int device, const void* source, size_t bytes);

// Calls that CUDA refuses to a thread that captures, and that do no harm to it: allocation.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_;
};

// NoCapture (graph.h) where no thread captures on the device at this moment; else false.
class NoCaptureNow {
 public:
  explicit NoCaptureNow(int device);
  ~NoCaptureNow();
  NoCaptureNow(const NoCaptureNow&) = delete;
  NoCaptureNow& operator=(const NoCaptureNow&) = delete;
  explicit operator bool() const { return holds_; }

 private:
  int device_;
  bool holds_;
};

}  // namespace tessera::gpu
