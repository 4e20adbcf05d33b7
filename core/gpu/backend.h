// The GPU as core sees it. Four libraries define these functions, and an executable links exactly
// one of them: core_cuda (NVIDIA's runtime), core_cuda_emulated (kernels on the CPU, for tests) and
// core_no_cuda (there is no GPU). Nothing here needs CUDA's headers.
//
// A program that is linked with core_cuda runs on machines without a GPU or driver too: then
// device_count() is 0 and all else throws a DeviceError that says why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <tessera/core/device.h>

namespace tessera {
class Allocator;
}

namespace tessera::gpu {

enum class BackendKind {
  kNone,      // this program was linked without a GPU backend
  kCuda,      // NVIDIA's runtime
  kEmulated,  // the SIMT emulation
  kDry,       // takes everything, calculates nothing (core/cuda/dry)
};
BackendKind backend_kind();

int device_count();
// Why there is no device, with the remedy; empty where there is one.
std::string unavailable_reason();
// "NVIDIA H200, sm_90, 139 GiB"
std::string describe_device(int index);
// Bytes that no process uses.
int64_t free_memory(int index);
// Throws DeviceError unless `index` is a device of this machine. Also brings the kernels in.
void require_device(int index, const char* where);

Allocator& device_allocator(int index);
// Bytes of `pointer` are in use on the stream of the current context: freed memory is not handed
// out before that stream came by.
void record_use(int index, void* pointer);

// Waits for all work on the device; rethrows errors of kernels.
void synchronize(int index);

// Copies between host and devices, after the queued work of the current streams. Returns when the
// host may read or overwrite its side; `non_blocking` returns at once where the host side is
// pinned.
void copy_bytes(void* target, const Device& to, const void* source, const Device& from,
                size_t bytes, bool non_blocking = false);

// Host memory that devices read and write directly.
Allocator& pinned_allocator();

// ---- Streams and events -------------------------------------------------------------------------

struct StreamHandle;
struct EventHandle;
std::shared_ptr<StreamHandle> make_stream(int device);
// A stream that someone else made (a cudaStream_t); it must outlive the handle.
std::shared_ptr<StreamHandle> wrap_stream(int device, void* stream);
// The one that work of the current context on the device goes to.
std::shared_ptr<StreamHandle> current_stream_handle(int device);
void* native_stream(const StreamHandle& stream);  // its cudaStream_t
void synchronize_stream(StreamHandle& stream);
std::shared_ptr<EventHandle> record_event(StreamHandle& stream);
void wait_event(StreamHandle& stream, EventHandle& event);
bool event_done(EventHandle& event);
void synchronize_event(EventHandle& event);
// Both happened. Milliseconds on the device's clock.
float elapsed_milliseconds(EventHandle& start, EventHandle& end);

// Work of the current context on the stream's device goes to `stream` while one lives.
class CurrentStream {
 public:
  explicit CurrentStream(std::shared_ptr<StreamHandle> stream);
  ~CurrentStream();
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Makes `index` the thread's device for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_;
};

}  // namespace tessera::gpu
