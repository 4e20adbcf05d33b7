// CUDA's runtime of a dry device: the declarations are the emulation's. Streams have nothing to do,
// so that everything that was queued has ended.
#include <cuda_runtime_api.h>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <tessera/core/cuda/dry/launches.h>
#include <tessera/core/cuda/dry/record.h>
#include <tessera/core/cuda/emulation/peers.h>
#include <tessera/core/error.h>

using tessera::OutOfMemory, tessera::UnsupportedError;
namespace dry = tessera::gpu::dry;

struct EmulatedGraph {
  std::vector<dry::Launch> launches;
};
struct EmulatedGraphExec {
  std::vector<dry::Launch> launches;
};

namespace {

struct Capture {
  EmulatedGraph graph;
  EmulatedStream* origin = nullptr;
  std::vector<EmulatedStream*> joined;
  bool valid = true;
};

constexpr int kMaxDevices = 8;
constexpr size_t kAddresses = size_t{1} << 40;  // of all devices
constexpr size_t kAlignment = 512;

}  // namespace

struct EmulatedStream {
  int device = 0;
  std::shared_ptr<Capture> capture;
};
struct EmulatedEvent {
  bool recorded = false;
  std::shared_ptr<Capture> capture;
};

namespace {

struct Device {
  int64_t reserved = 0, peak = 0;
  bool has_context = false;
  EmulatedStream null_stream;
};

struct Machine {
  std::mutex mutex;
  int devices = 1;
  std::array<Device, kMaxDevices> of;
  int64_t device_bytes = int64_t{80} << 30;
  char* addresses = nullptr;
  std::map<char*, std::pair<size_t, int>> blocks;  // bytes and device
  std::map<char*, size_t> pinned;
  std::vector<dry::Launch> launches;

  Machine() {
    if (const char* text = std::getenv("TESSERA_DRY_DEVICES")) {
      devices = std::clamp(std::atoi(text), 0, kMaxDevices);
    }
    for (int i = 0; i < kMaxDevices; ++i) of[static_cast<size_t>(i)].null_stream.device = i;
    void* const range =
        ::mmap(nullptr, kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TS_CHECK_AS(OutOfMemory, range != MAP_FAILED, "dry device",
                "the system gives no range of addresses of 1 TiB");
    addresses = static_cast<char*>(range);
  }
  bool is_device_memory(const void* pointer) const {
    const char* const at = static_cast<const char*>(pointer);
    return at >= addresses && at < addresses + kAddresses;
  }
};
Machine& machine() {
  static Machine* const the_machine = new Machine;
  return *the_machine;
}
using Lock = std::lock_guard<std::mutex>;

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::shared_ptr<Capture> own_capture;
thread_local cudaStreamCaptureMode own_mode = cudaStreamCaptureModeGlobal;

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
cudaError_t spoil(Capture& capture, cudaError_t error) {
  capture.valid = false;
  return failed(error);
}
// Calls that CUDA forbids to a thread that captures, as they may wait.
bool is_unsafe_now() {
  if (!own_capture || own_mode == cudaStreamCaptureModeRelaxed) return false;
  spoil(*own_capture, cudaErrorStreamCaptureUnsupported);
  return true;
}

Device& here() {
  Device& device = machine().of[static_cast<size_t>(current_device)];
  device.has_context = true;
  return device;
}
EmulatedStream& resolve(cudaStream_t stream) {
  Device& device = here();
  return stream != nullptr ? *stream : device.null_stream;
}

bool is_pinned(const void* pointer) {
  const auto& pinned = machine().pinned;
  char* const address = const_cast<char*>(static_cast<const char*>(pointer));
  auto place = pinned.upper_bound(address);
  if (place == pinned.begin()) return false;
  --place;
  return address < place->first + place->second;
}

// The lowest gap that holds it.
char* find_gap(size_t bytes) {
  char* at = machine().addresses;
  for (const auto& [begin, block] : machine().blocks) {
    if (static_cast<size_t>(begin - at) >= bytes) return at;
    at = begin + block.first;
  }
  const size_t left = kAddresses - static_cast<size_t>(at - machine().addresses);
  return left >= bytes ? at : nullptr;
}

void note_locked(dry::Launch launch, EmulatedStream& stream) {
  launch.device = stream.device;
  dry::sign(launch);
  if (stream.capture) {
    launch.replayed = true;
    stream.capture->graph.launches.push_back(std::move(launch));
  } else {
    machine().launches.push_back(std::move(launch));
  }
}

// After a wait for what was queued on a stream; that of a capture is not queued.
cudaError_t waited(const std::shared_ptr<Capture>& capture) {
  return capture ? spoil(*capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

}  // namespace

void dry::note(Launch launch, cudaStream_t stream) {
  const Lock lock(machine().mutex);
  note_locked(std::move(launch), resolve(stream));
}

std::vector<dry::Launch> dry::take_launches() {
  const Lock lock(machine().mutex);
  return std::exchange(machine().launches, {});
}
void dry::set_device_bytes(int64_t bytes) {
  const Lock lock(machine().mutex);
  machine().device_bytes = bytes;
}
int64_t dry::peak_reserved_bytes(int device) {
  const Lock lock(machine().mutex);
  return machine().of.at(static_cast<size_t>(device)).peak;
}
void dry::reset_peak_reserved_bytes(int device) {
  const Lock lock(machine().mutex);
  Device& of = machine().of.at(static_cast<size_t>(device));
  of.peak = of.reserved;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

// ---- Devices -----------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = machine().devices;
  return *count > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= machine().devices) return failed(cudaErrorInvalidDevice);
  const Lock lock(machine().mutex);
  current_device = device;
  here();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= machine().devices) return failed(cudaErrorInvalidDevice);
  const Lock lock(machine().mutex);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "dry sm_90 device %d", device);
  properties->totalGlobalMem = static_cast<size_t>(machine().device_bytes);
  properties->major = 9;
  properties->multiProcessorCount = 132;  // of an H100 and an H200 SXM
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  const Lock lock(machine().mutex);
  return waited(here().null_stream.capture);
}

// ---- Memory ------------------------------------------------------------------------------------

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const Lock lock(machine().mutex);
  *free = static_cast<size_t>(machine().device_bytes - here().reserved);
  *total = static_cast<size_t>(machine().device_bytes);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const Lock lock(machine().mutex);
  Device& device = here();
  if (is_unsafe_now()) return cudaErrorStreamCaptureUnsupported;
  const size_t size = (std::max(bytes, size_t{1}) + kAlignment - 1) / kAlignment * kAlignment;
  char* const place = find_gap(size);
  if (size < bytes || place == nullptr ||
      device.reserved + static_cast<int64_t>(size) > machine().device_bytes) {
    return failed(cudaErrorMemoryAllocation);
  }
  machine().blocks[place] = {size, current_device};
  device.reserved += static_cast<int64_t>(size);
  device.peak = std::max(device.peak, device.reserved);
  *pointer = place;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const Lock lock(machine().mutex);
  here();
  if (is_unsafe_now()) return cudaErrorStreamCaptureUnsupported;
  const auto place = machine().blocks.find(static_cast<char*>(pointer));
  if (place == machine().blocks.end()) return failed(cudaErrorInvalidValue);
  const auto [bytes, device] = place->second;
  machine().of[static_cast<size_t>(device)].reserved -= static_cast<int64_t>(bytes);
  machine().blocks.erase(place);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  const Lock lock(machine().mutex);
  here();
  if (is_unsafe_now()) return cudaErrorStreamCaptureUnsupported;
  *pointer = std::malloc(std::max(bytes, size_t{1}));
  if (*pointer == nullptr) return failed(cudaErrorMemoryAllocation);
  machine().pinned[static_cast<char*>(*pointer)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const Lock lock(machine().mutex);
  here();
  if (is_unsafe_now()) return cudaErrorStreamCaptureUnsupported;
  if (machine().pinned.erase(static_cast<char*>(pointer)) == 0) {
    return failed(cudaErrorInvalidValue);
  }
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  const Lock lock(machine().mutex);
  EmulatedStream& queue = resolve(stream);
  TS_CHECK_AS(UnsupportedError, machine().is_device_memory(target), "dry device",
              "calculates nothing, so that no value can be read from it (item(), to(kCpu), a shape "
              "that depends on values); leave the read out, or train on another device");
  if (queue.capture && !machine().is_device_memory(source) && !is_pinned(source)) {
    return spoil(*queue.capture, cudaErrorStreamCaptureUnsupported);
  }
  const auto moved = static_cast<int64_t>(bytes);
  note_locked({.kind = dry::LaunchKind::kCopy,
               .name = "copy",
               .traffic = {machine().is_device_memory(source) ? moved : 0, moved}},
              queue);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void*, int, size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(target, target, bytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Lock lock(machine().mutex);
  here();
  *attributes = {};
  attributes->type = machine().is_device_memory(pointer) ? cudaMemoryTypeDevice
                     : is_pinned(pointer)                ? cudaMemoryTypeHost
                                                         : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void*, int, size_t bytes, cudaStream_t stream) {
  dry::note(
      {.kind = dry::LaunchKind::kFill, .name = "fill", .traffic = {0, static_cast<int64_t>(bytes)}},
      stream);
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  const Lock lock(machine().mutex);
  here();
  if (value < 0 || static_cast<size_t>(value) > tessera::gpu::emulation::kMaxSharedBytes) {
    return failed(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

// ---- Streams and events ------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const Lock lock(machine().mutex);
  here();
  *stream = new EmulatedStream{current_device, nullptr};
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock(machine().mutex);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Lock lock(machine().mutex);
  return waited(resolve(stream).capture);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Lock lock(machine().mutex);
  EmulatedStream& queue = resolve(stream);
  if (!event->capture || event->capture == queue.capture) return cudaSuccess;
  if (queue.capture || event->capture->origin == nullptr) {
    return failed(cudaErrorStreamCaptureMerge);
  }
  queue.capture = event->capture;
  queue.capture->joined.push_back(&queue);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* data) {
  {
    const Lock lock(machine().mutex);
    if (resolve(stream).capture) return cudaSuccess;
  }
  function(data);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const Lock lock(machine().mutex);
  here();
  *event = new EmulatedEvent;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock(machine().mutex);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock lock(machine().mutex);
  event->recorded = true;
  event->capture = resolve(stream).capture;
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Lock lock(machine().mutex);
  return waited(event->capture);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock lock(machine().mutex);
  if (event->capture) return waited(event->capture);
  return is_unsafe_now() ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->recorded || !end->recorded) return failed(cudaErrorInvalidResourceHandle);
  *milliseconds = 0;
  return cudaSuccess;
}

// ---- Graphs ------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const Lock lock(machine().mutex);
  if (stream == nullptr) return failed(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return failed(cudaErrorStreamCaptureMerge);
  stream->capture = std::make_shared<Capture>();
  stream->capture->origin = stream;
  own_capture = stream->capture;
  own_mode = mode;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const Lock lock(machine().mutex);
  *graph = nullptr;
  if (stream == nullptr || !stream->capture || stream->capture->origin != stream) {
    return failed(cudaErrorStreamCaptureUnmatched);
  }
  const std::shared_ptr<Capture> capture = std::exchange(stream->capture, nullptr);
  capture->origin = nullptr;
  own_capture = nullptr;
  for (EmulatedStream* joined : capture->joined) joined->capture = nullptr;
  if (!capture->valid) return failed(cudaErrorStreamCaptureInvalidated);
  *graph = new EmulatedGraph(std::move(capture->graph));
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, own_mode);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, void*, size_t* count) {
  *count = graph->launches.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new EmulatedGraphExec{graph->launches};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  const Lock lock(machine().mutex);
  resolve(stream);
  // As they were signed when they were captured.
  for (const dry::Launch& launch : exec->launches) machine().launches.push_back(launch);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

namespace tessera::gpu::emulation {

cudaError_t enqueue_launch(const void* function, const char* name, dim3 grid, dim3 block,
                           size_t shared_bytes, cudaStream_t stream, std::function<void()>,
                           const Traffic& declared) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64 || grid.x == 0 || grid.y == 0 ||
      grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 ||
      shared_bytes > kMaxSharedBytes) {
    return failed(cudaErrorInvalidConfiguration);
  }
  dry::note({.name = name,
             .function = function,
             .grid = {grid.x, grid.y, grid.z},
             .block = {block.x, block.y, block.z},
             .shared_bytes = static_cast<int64_t>(shared_bytes),
             .traffic = declared},
            stream);
  return cudaSuccess;
}

bool has_context(int device) {
  const Lock lock(machine().mutex);
  return machine().of.at(static_cast<size_t>(device)).has_context;
}

}  // namespace tessera::gpu::emulation
