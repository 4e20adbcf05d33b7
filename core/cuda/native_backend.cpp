// core_cuda and core_cuda_emulated: the backend on CUDA's runtime, or on the emulation's.
#include <tessera/core/gpu/backend.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <tessera/core/context.h>
#include <tessera/core/cuda/capability.h>
#include <tessera/core/cuda/capture.h>
#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/contexts.h>
#include <tessera/core/cuda/device_errors.h>
#include <tessera/core/cuda/device_memory.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/cuda/hooks.h>
#include <tessera/core/cuda/kernel_list.h>
#include <tessera/core/cuda/launch_log.h>
#include <tessera/core/cuda/pinned_memory.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/environment.h>
#include <tessera/core/error.h>
#include <tessera/core/gpu/transfers.h>

namespace tessera::gpu {
namespace {

struct Operation {
  const char* name = nullptr;
  cudaStream_t stream = nullptr;
};
thread_local Operation last_operation;

bool waits_for_launches() {
  static const bool waits = environment_flag("TESSERA_SYNC");
  return waits;
}

// The streams of a context, by device; absent: the null stream.
struct StreamSlot {
  std::vector<std::shared_ptr<StreamHandle>> of_device;
};

struct Availability {
  int count = 0;
  std::string reason;
};
const Availability& availability() {
  static const Availability found = [] {
    Availability result;
    const cudaError_t error = cudaGetDeviceCount(&result.count);
    if (error == cudaSuccess && result.count > 0) return result;
    cudaGetLastError();
    result.count = 0;
    if (error == cudaErrorInsufficientDriver) {
      int driver = 0, runtime = 0;
      cudaDriverGetVersion(&driver);
      cudaRuntimeGetVersion(&runtime);
      result.reason = driver == 0
                          ? std::string("this machine has no NVIDIA driver; use cpu")
                          : "the NVIDIA driver supports CUDA " + std::to_string(driver / 1000) +
                                "." + std::to_string(driver % 1000 / 10) +
                                " and this program needs " + std::to_string(runtime / 1000) + "." +
                                std::to_string(runtime % 1000 / 10) + "; update the driver";
    } else {
      result.reason = std::string("this machine has no usable NVIDIA GPU (") +
                      cudaGetErrorName(error) + "); use cpu";
    }
    return result;
  }();
  return found;
}

const char* file_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

// Streams that nobody holds. They are not destroyed but used again: memory that was asked for on
// one belongs to it for good. What is queued on one comes before what its next holder queues.
struct IdleStreams {
  std::mutex mutex;
  std::unordered_map<int, std::vector<cudaStream_t>> of_device;
};
IdleStreams& idle_streams() {
  static IdleStreams* const streams = new IdleStreams;
  return *streams;
}

}  // namespace

struct StreamHandle {
  int device;
  cudaStream_t stream;
  bool owned;
  ~StreamHandle() {
    // One that a capture may have joined belongs to it until its end: nobody else gets it.
    if (!owned || Capture::current() != nullptr) return;
    IdleStreams& idle = idle_streams();
    std::lock_guard lock(idle.mutex);
    try {
      idle.of_device[device].push_back(stream);
    } catch (...) {  // no memory for the list: the stream stays unused
    }
  }
};
struct EventHandle {
  cudaEvent_t event;
  ~EventHandle() {
    enter_some_device();
    cudaEventDestroy(event);
  }
};

// ---- Errors -------------------------------------------------------------------------------------

void note_operation(const char* name, cudaStream_t stream) { last_operation = {name, stream}; }

const char* last_operation_name() { return last_operation.name; }

std::string failure_details() { return hook_failure_details(); }

void throw_cuda_error(cudaError_t error, const char* expression, const char* file, int line) {
  cudaGetLastError();  // the next call starts without it, unless the device is lost
  std::string text = std::string(expression) + " failed with " + cudaGetErrorName(error) + ": " +
                     cudaGetErrorString(error) + " (" + file_name(file) + ":" +
                     std::to_string(line) + ")";
  if (last_operation.name != nullptr) {
    text += "; the last operation queued here was " + std::string(last_operation.name);
    if (last_operation.stream != nullptr) text += " on a stream of its own";
    if (!waits_for_launches()) text += "; set TESSERA_SYNC=1 to find the one that failed";
  }
  const std::string details = failure_details();
  if (!details.empty()) text += "; " + details;
  throw CudaError("cuda: " + text);
}

void finish_launch(cudaError_t error, const char* name, cudaStream_t stream) {
  note_operation(name, stream);
  if (error != cudaSuccess) throw_cuda_error(error, name, "launch", 0);
  log_launch(name, stream);
  if (waits_for_launches() && Capture::current() == nullptr) {
    error = cudaStreamSynchronize(stream);
    if (error != cudaSuccess) throw_cuda_error(error, name, "launch", 0);
  }
}

void allow_shared_bytes(const void* kernel, size_t bytes) {
  int device = 0;
  TS_CUDA(cudaGetDevice(&device));
  static std::mutex* const mutex = new std::mutex;
  static auto* const allowed = new std::map<std::pair<const void*, int>, size_t>;
  const std::lock_guard lock(*mutex);
  // Never less than before: another thread may be about to launch what asked for more.
  size_t& most = (*allowed)[{kernel, device}];
  if (bytes <= most) return;
  TS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)));
  most = bytes;
}

// ---- Devices ------------------------------------------------------------------------------------

namespace {

void require_index(int index, const char* where) {
  const int count = device_count();
  TS_CHECK_DEVICE(count > 0, where, unavailable_reason());
  TS_CHECK_DEVICE(index >= 0 && index < count, where, "there is no ", cuda(index),
                  "; this machine has cuda:0 to cuda:", count - 1);
}

// When a device is first used: without device code for it, its first kernel would fail with "no
// kernel image".
void require_capability(int index, const char* where) {
  static std::atomic<uint64_t> known{0};  // a bit for each of the first 64 devices
  const uint64_t own = index < 64 ? uint64_t{1} << index : 0;
  if ((known.load(std::memory_order_acquire) & own) != 0) return;
  cudaDeviceProp properties;
  TS_CUDA(cudaGetDeviceProperties(&properties, index));
  TS_CHECK_DEVICE(runs_on(hook_architectures(), properties.major, properties.minor), where,
                  cuda(index), ", ", properties.name, ", has compute capability ", properties.major,
                  ".", properties.minor, ", and this program has device code for ",
                  hook_architectures(),
                  "; build it with -DTESSERA_CUDA_ARCHITECTURES=", properties.major,
                  properties.minor, ", or use cpu");
  known.fetch_or(own, std::memory_order_release);
}

}  // namespace

BackendKind backend_kind() { return hook_kind(); }
int device_count() { return availability().count; }
std::string unavailable_reason() { return availability().reason; }

std::string describe_device(int index) {
  require_index(index, "cuda");
  cudaDeviceProp properties;
  TS_CUDA(cudaGetDeviceProperties(&properties, index));
  return std::string(properties.name) + ", sm_" + std::to_string(properties.major) +
         std::to_string(properties.minor) + ", " + std::to_string(properties.totalGlobalMem >> 20) +
         " MiB";
}

int64_t free_memory(int index) {
  require_index(index, "cuda");
  const CurrentDevice scope(index);
  size_t free = 0, total = 0;
  TS_CUDA(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(free);
}

void require_device(int index, const char* where) {
  require_index(index, where);
  require_capability(index, where);
  static std::once_flag once;
  std::call_once(once, register_kernels);
}

CurrentDevice::CurrentDevice(int index) { TS_CUDA(enter_device(index, previous_)); }
CurrentDevice::~CurrentDevice() { leave_device(previous_); }

void use_device(int index) {
  require_device(index, "use_device");
  TS_CUDA(cudaSetDevice(index));
}

void synchronize(int index) {
  require_device(index, "synchronize");
  refuse_in_capture("synchronize");
  const CurrentDevice scope(index);
  const NoCapture gate(index);
  TS_CUDA(cudaDeviceSynchronize());
  raise_device_errors(index);
}

// ---- Memory -------------------------------------------------------------------------------------

Allocator& device_allocator(int index) {
  require_device(index, "allocator");
  return caching_allocator(index);
}

void record_use(int index, void* pointer) {
  const CurrentDevice scope(index);
  caching_allocator(index).record_use(pointer, current_stream());
}

Allocator& pinned_allocator() {
  TS_CHECK_DEVICE(device_count() > 0, "pinned memory", unavailable_reason());
  return pinned_memory();
}

int64_t pinned_bytes_in_use() { return device_count() > 0 ? pinned_memory().bytes_in_use() : 0; }

bool is_pinned(const void* pointer) {
  if (device_count() == 0 || !enter_some_device()) return false;
  cudaPointerAttributes attributes;
  TS_CUDA(cudaPointerGetAttributes(&attributes, pointer));
  return attributes.type != cudaMemoryTypeUnregistered && attributes.type != cudaMemoryTypeDevice;
}

namespace {

std::unique_ptr<EventHandle> queue_event(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  TS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  auto handle = std::make_unique<EventHandle>(event);
  TS_CUDA(cudaEventRecord(event, stream));
  return handle;
}

// [Note: peer copies] The target's stream carries the copy, behind what the source's has to do. The
// source's stream goes on behind the copy: whoever owns the bytes may write or free them as if the
// copy were work of his own. The host waits for nothing.
void copy_between(void* target, int to, const void* source, int from, size_t bytes) {
  require_device(from, "copy");
  require_device(to, "copy");
  const CurrentDevice source_scope(from);
  const cudaStream_t giving = current_stream();
  const auto made = queue_event(giving);
  const CurrentDevice target_scope(to);
  const cudaStream_t taking = current_stream();
  TS_CUDA(cudaStreamWaitEvent(taking, made->event, 0));
  note_operation("copy", taking);
  TS_CUDA(hook_copy_between(target, to, source, from, bytes, taking));
  log_launch("copy", taking);
  const auto copied = queue_event(taking);
  const CurrentDevice back(from);
  TS_CUDA(cudaStreamWaitEvent(giving, copied->event, 0));
  if (waits_for_launches()) {
    TS_CUDA(cudaStreamSynchronize(giving));
    raise_device_errors(from);
  }
}

// Of copies, a graph takes those on its device, and those to and from pinned memory that the caller
// does not wait for.
void check_copy_in_capture(const void* target, const Device& to, const void* source,
                           const Device& from, bool non_blocking) {
  const Capture* const capture = Capture::current();
  if (capture == nullptr) return;
  if (to.is_cuda() && from.is_cuda()) {
    if (to.index != from.index) refuse_in_capture("a copy between devices");
    return;
  }
  if (non_blocking && is_pinned(to.is_cpu() ? target : source)) return;
  refuse_in_capture(to.is_cpu() ? "a host read of device memory (item(), to(kCpu), a shape that "
                                  "depends on values)"
                                : "a copy from host memory that is not pinned and non_blocking");
}

// [Note: pageable copies] CUDA may read and write pageable memory before a copy returns or when the
// stream comes to it ("might be synchronous"). What is small and goes to a device is put into
// pinned memory of our own, which is not used again before the stream came by, and nobody waits; so
// are the tables of launches, of any size (upload_constants). All else from or to pageable memory
// is waited for.
constexpr size_t kMostStaged = size_t{64} << 10;  // what drivers stage themselves

class StagingBlock {
 public:
  StagingBlock(const void* source, size_t bytes)
      : data_(pinned_memory().allocate(bytes)), bytes_(bytes) {
    std::memcpy(data_, source, bytes);
  }
  ~StagingBlock() { pinned_memory().deallocate(data_, bytes_); }
  StagingBlock(const StagingBlock&) = delete;
  StagingBlock& operator=(const StagingBlock&) = delete;
  const void* data() const { return data_; }

 private:
  void* const data_;
  const size_t bytes_;
};

}  // namespace

void copy_staged(void* target, int device, const void* source, size_t bytes) {
  require_device(device, "copy");
  const CurrentDevice scope(device);
  const cudaStream_t stream = current_stream();
  note_operation("copy", stream);
  const StagingBlock staged(source, bytes);
  TS_CUDA(cudaMemcpyAsync(target, staged.data(), bytes, cudaMemcpyDefault, stream));
  log_launch("copy", stream);
  pinned_memory().record_use(staged.data(), stream);
  if (!waits_for_launches()) return;
  TS_CUDA(cudaStreamSynchronize(stream));
  raise_device_errors(device);
}

void copy_bytes(void* target, const Device& to, const void* source, const Device& from,
                size_t bytes, bool non_blocking) {
  if (bytes == 0) return;
  check_copy_in_capture(target, to, source, from, non_blocking);
  if (to.is_cuda() && from.is_cuda() && to.index != from.index) {
    return copy_between(target, to.index, source, from.index, bytes);
  }
  const int index = to.is_cuda() ? to.index : from.index;
  require_device(index, "copy");
  const CurrentDevice scope(index);
  const bool captures = Capture::current() != nullptr;
  const bool has_host = to.is_cpu() || from.is_cpu();
  const void* const host = to.is_cpu() ? target : source;
  const bool pinned = has_host && is_pinned(host);
  // see [Note: pageable copies]
  if (from.is_cpu() && !pinned && bytes <= kMostStaged) {
    return copy_staged(target, index, source, bytes);
  }
  const cudaStream_t stream = current_stream();
  note_operation("copy", stream);
  TS_CUDA(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream));
  log_launch("copy", stream);
  const bool waits = has_host && (!non_blocking || !pinned);
  if (waits || (waits_for_launches() && !captures)) {
    TS_CUDA(cudaStreamSynchronize(stream));
    raise_device_errors(index);
  } else if (pinned && !captures) {
    pinned_memory().record_use(host, stream);
  }
}

// ---- Streams and events -------------------------------------------------------------------------

cudaStream_t native(const StreamHandle& stream) { return stream.stream; }
int device_of(const StreamHandle& stream) { return stream.device; }

cudaStream_t current_stream() {
  int device = 0;
  TS_CUDA(cudaGetDevice(&device));
  const auto& streams = Context::current().slot<StreamSlot>().of_device;
  const auto index = static_cast<size_t>(device);
  return index < streams.size() && streams[index] ? streams[index]->stream : nullptr;
}

std::shared_ptr<StreamHandle> make_stream(int device) {
  require_device(device, "stream");
  {
    IdleStreams& idle = idle_streams();
    std::lock_guard lock(idle.mutex);
    std::vector<cudaStream_t>& streams = idle.of_device[device];
    if (!streams.empty()) {
      const auto handle = std::make_shared<StreamHandle>(device, streams.back(), true);
      streams.pop_back();
      return handle;
    }
  }
  const CurrentDevice scope(device);
  const RelaxedCapture relaxed;
  cudaStream_t stream = nullptr;
  TS_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return std::make_shared<StreamHandle>(device, stream, true);
}

std::shared_ptr<StreamHandle> copy_stream(int device) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const streams = new std::map<int, std::shared_ptr<StreamHandle>>;
  const std::lock_guard lock(*mutex);
  std::shared_ptr<StreamHandle>& stream = (*streams)[device];
  if (stream == nullptr) stream = make_stream(device);
  return stream;
}

std::shared_ptr<StreamHandle> wrap_stream(int device, void* stream) {
  require_device(device, "stream");
  return std::make_shared<StreamHandle>(device, static_cast<cudaStream_t>(stream), false);
}

std::shared_ptr<StreamHandle> current_stream_handle(int device) {
  require_device(device, "stream");
  const auto& streams = Context::current().slot<StreamSlot>().of_device;
  const auto index = static_cast<size_t>(device);
  if (index < streams.size() && streams[index]) return streams[index];
  return wrap_stream(device, nullptr);
}

void* native_stream(const StreamHandle& stream) { return stream.stream; }

void synchronize_stream(StreamHandle& stream) {
  refuse_in_capture("synchronize");
  const CurrentDevice scope(stream.device);
  TS_CUDA(cudaStreamSynchronize(stream.stream));
  raise_device_errors(stream.device);
}

std::shared_ptr<EventHandle> record_event(StreamHandle& stream) {
  const CurrentDevice scope(stream.device);
  cudaEvent_t event = nullptr;
  TS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDefault));
  auto handle = std::make_shared<EventHandle>(event);
  TS_CUDA(cudaEventRecord(event, stream.stream));
  return handle;
}

void wait_event(StreamHandle& stream, EventHandle& event) {
  const CurrentDevice scope(stream.device);
  TS_CUDA(cudaStreamWaitEvent(stream.stream, event.event, 0));
}

bool event_done(EventHandle& event) {
  refuse_in_capture("asking for an event");
  enter_some_device();
  const cudaError_t error = cudaEventQuery(event.event);
  if (error != cudaErrorNotReady) TS_CUDA(error);
  return error == cudaSuccess;
}

void synchronize_event(EventHandle& event) {
  refuse_in_capture("waiting for an event");
  enter_some_device();
  TS_CUDA(cudaEventSynchronize(event.event));
}

float elapsed_milliseconds(EventHandle& start, EventHandle& end) {
  float milliseconds = 0;
  enter_some_device();
  TS_CUDA(cudaEventElapsedTime(&milliseconds, start.event, end.event));
  return milliseconds;
}

struct CurrentStream::Impl {
  size_t device;
  std::shared_ptr<StreamHandle> previous;
};

CurrentStream::CurrentStream(std::shared_ptr<StreamHandle> stream)
    : impl_(std::make_unique<Impl>()) {
  impl_->device = static_cast<size_t>(stream->device);
  auto& streams = Context::current().slot<StreamSlot>().of_device;
  if (streams.size() <= impl_->device) streams.resize(impl_->device + 1);
  impl_->previous = std::exchange(streams[impl_->device], std::move(stream));
}
CurrentStream::~CurrentStream() {
  Context::current().slot<StreamSlot>().of_device[impl_->device] = std::move(impl_->previous);
}

}  // namespace tessera::gpu
