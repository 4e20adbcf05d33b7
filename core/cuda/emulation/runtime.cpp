// Devices, streams and events of the emulation. All devices share one arena and one lock: what runs
// on them runs one after the other.
#include <cuda_runtime_api.h>
#include <algorithm>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <tessera/core/cuda/emulation/arena.h>
#include <tessera/core/cuda/emulation/peers.h>
#include <tessera/core/cuda/emulation/race.h>
#include <tessera/core/cuda/emulation/report.h>

using tessera::gpu::emulation::next_random;
namespace emulation = tessera::gpu::emulation;
namespace arena = tessera::gpu::emulation::arena;

// What was captured, with the nodes that each one follows.
struct EmulatedGraph {
  struct Node {
    std::function<cudaError_t()> work;
    std::vector<size_t> after;
    std::function<bool()> ready = {};  // of work that other threads' streams take part in
  };
  std::vector<Node> nodes;
};
struct EmulatedGraphExec {
  std::shared_ptr<const EmulatedGraph> graph;  // launches that were queued outlive the handle
};

namespace {

// From cudaStreamBeginCapture to cudaStreamEndCapture.
struct Capture {
  EmulatedGraph graph;
  EmulatedStream* origin = nullptr;
  std::vector<EmulatedStream*> joined;  // with the origin
  bool valid = true;
};

}  // namespace

struct EmulatedEvent {
  // Each record is an instance of its own: a wait means the last record before it.
  struct Happening {
    bool done = false;
    std::chrono::steady_clock::time_point time;
    EmulatedStream* stream = nullptr;
  };
  std::shared_ptr<Happening> last;   // null before the first record
  std::shared_ptr<Capture> capture;  // the last record was captured: it stands for these nodes
  std::vector<size_t> nodes;
};

struct EmulatedStream {
  struct Item {
    std::function<cudaError_t()> work;
    std::shared_ptr<EmulatedEvent::Happening> waits_for, marks;
    std::function<bool()> ready;  // of work that other threads' streams take part in
    bool always = false;          // also where the stream forgets what was queued
  };
  std::deque<Item> queue;
  int device = 0;
  std::shared_ptr<Capture> capture;  // null: what is queued runs
  std::vector<size_t> tail;          // the nodes that the next one follows
};

namespace {

struct Machine {
  std::recursive_mutex mutex;
  std::vector<EmulatedStream*> streams;
  std::vector<EmulatedStream> defaults;  // the null stream of each device
  std::map<char*, size_t> pinned;
  std::map<const void*, int> device_of;                        // of each cudaMalloc
  std::set<int> contexts;                                      // devices that have one
  std::map<std::pair<const void*, int>, size_t> shared_bytes;  // asked for, by kernel and device
  std::string report;
  bool counts_traffic = false;
  std::vector<emulation::CountedTraffic> traffic;
  int64_t host_waits = 0;
  emulation::EventCalls event_calls;
  std::map<std::string, int64_t> launches;  // by name
  std::map<int, emulation::CopiedBytes> copied_beside;
  int devices = 2;
  int driver = CUDART_VERSION;  // 0: none is installed
  int capability = 90;          // compute capability, times 10

  Machine() {
    const char* text = std::getenv("TESSERA_EMULATED_DEVICES");
    if (text != nullptr) devices = std::atoi(text);
    text = std::getenv("TESSERA_EMULATED_DRIVER");
    if (text != nullptr) driver = std::atoi(text);
    text = std::getenv("TESSERA_EMULATED_CAPABILITY");
    if (text != nullptr) capability = std::atoi(text);
    if (driver < CUDART_VERSION) devices = 0;
    defaults.resize(static_cast<size_t>(devices));
    for (EmulatedStream& stream : defaults) {
      stream.device = static_cast<int>(streams.size());
      streams.push_back(&stream);
    }
  }
};
Machine& machine() {
  static Machine* the_machine = new Machine;
  return *the_machine;
}
thread_local int locks_held = 0;
class Lock {
 public:
  explicit Lock(std::recursive_mutex& mutex) : lock_(mutex) { ++locks_held; }
  ~Lock() { --locks_held; }

 private:
  const std::lock_guard<std::recursive_mutex> lock_;
};

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
// The capture that this thread began, and whether it lets potentially unsafe calls through.
thread_local std::shared_ptr<Capture> own_capture;
thread_local cudaStreamCaptureMode own_mode = cudaStreamCaptureModeGlobal;

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// As of CUDA 12: what works on the current device, and naming a device, gives it a context.
void need_context() { machine().contexts.insert(current_device); }

EmulatedStream& resolve(cudaStream_t stream) {
  need_context();
  return stream != nullptr ? *stream : machine().defaults[static_cast<size_t>(current_device)];
}

// Queues work, or adds it to the graph that the stream captures.
void push(EmulatedStream& stream, std::function<cudaError_t()> work) {
  if (!stream.capture) {
    stream.queue.push_back({std::move(work), nullptr, nullptr, nullptr});
    return;
  }
  std::vector<EmulatedGraph::Node>& nodes = stream.capture->graph.nodes;
  nodes.push_back({std::move(work), std::move(stream.tail)});
  stream.tail = {nodes.size() - 1};
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

// An order of the nodes that is drawn among those that their edges allow. Nodes that wait for other
// threads keep theirs: two graphs that run one node at a time would else wait for each other.
std::vector<size_t> drawn_order(const EmulatedGraph& graph) {
  const size_t count = graph.nodes.size();
  std::vector<size_t> missing(count), able, order;
  std::vector<std::vector<size_t>> followers(count);
  std::optional<size_t> last_that_waits;
  for (size_t i = 0; i < count; ++i) {
    missing[i] = graph.nodes[i].after.size();
    for (const size_t before : graph.nodes[i].after) followers[before].push_back(i);
    if (graph.nodes[i].ready) {
      if (last_that_waits) {
        ++missing[i];
        followers[*last_that_waits].push_back(i);
      }
      last_that_waits = i;
    }
    if (missing[i] == 0) able.push_back(i);
  }
  while (!able.empty()) {
    std::swap(able[next_random() % able.size()], able.back());
    const size_t node = able.back();
    able.pop_back();
    order.push_back(node);
    for (const size_t next : followers[node]) {
      if (--missing[next] == 0) able.push_back(next);
    }
  }
  return order;
}

cudaError_t replay(const EmulatedGraph& graph) {
  for (const size_t node : drawn_order(graph)) {
    const cudaError_t error = graph.nodes[node].work();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

bool can_run(const EmulatedStream& stream) {
  if (stream.queue.empty()) return false;
  const EmulatedStream::Item& front = stream.queue.front();
  return (front.waits_for == nullptr || front.waits_for->done) && (!front.ready || front.ready());
}

// Lets other threads queue what a stream waits for. False where they have not for a minute.
bool let_others_in(std::chrono::steady_clock::time_point since) {
  if (std::chrono::steady_clock::now() - since > std::chrono::minutes(1)) return false;
  std::recursive_mutex& mutex = machine().mutex;
  for (int i = 0; i < locks_held; ++i) mutex.unlock();
  std::this_thread::sleep_for(std::chrono::microseconds(100));
  for (int i = 0; i < locks_held; ++i) mutex.lock();
  return true;
}

cudaError_t run_front(EmulatedStream& stream) {
  EmulatedStream::Item item = std::move(stream.queue.front());
  stream.queue.pop_front();
  const cudaError_t error = item.work ? item.work() : cudaSuccess;
  if (item.marks) {
    item.marks->done = true;
    item.marks->time = std::chrono::steady_clock::now();
  }
  return error;
}

// Runs streams in a drawn order until `done` holds. The first failure ends it, and the streams
// forget what was queued, as a device does after an illegal access.
template <class Done>
cudaError_t run_until(const Done& done) {
  Machine& all = machine();
  ++all.host_waits;
  std::optional<arena::Open> open(std::in_place);
  auto last_work = std::chrono::steady_clock::now();
  while (!done()) {
    std::vector<EmulatedStream*> able;
    for (EmulatedStream* stream : all.streams) {
      if (can_run(*stream)) able.push_back(stream);
    }
    if (able.empty()) {
      bool others = false;
      for (const EmulatedStream* stream : all.streams) {
        others |= !stream->queue.empty() && stream->queue.front().ready != nullptr;
      }
      open.reset();
      if (others && let_others_in(last_work)) {
        open.emplace();
        continue;
      }
      all.report = others ? "streams wait for other threads' streams, which do not come"
                          : "streams wait for events that nobody will record";
      return failed(cudaErrorLaunchFailure);
    }
    last_work = std::chrono::steady_clock::now();
    const cudaError_t error = run_front(*able[next_random() % able.size()]);
    if (error != cudaSuccess) {
      for (EmulatedStream* stream : all.streams) {
        while (!stream->queue.empty()) {
          if (stream->queue.front().marks) stream->queue.front().marks->done = true;
          if (stream->queue.front().always) stream->queue.front().work();
          stream->queue.pop_front();
        }
      }
      return failed(error);
    }
  }
  return cudaSuccess;
}

bool is_pinned(const void* pointer) {
  const auto& pinned = machine().pinned;
  char* const address = const_cast<char*>(static_cast<const char*>(pointer));
  auto place = pinned.upper_bound(address);
  if (place == pinned.begin()) return false;
  --place;
  return address < place->first + place->second;
}

}  // namespace

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = machine().devices;
  if (machine().driver < CUDART_VERSION) return failed(cudaErrorInsufficientDriver);
  return *count > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= machine().devices) return failed(cudaErrorInvalidDevice);
  Lock lock(machine().mutex);
  current_device = device;
  need_context();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= machine().devices) return failed(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "emulated sm_%d device %d",
                machine().capability, device);
  properties->totalGlobalMem = arena::kBytes;
  properties->major = machine().capability / 10;
  properties->minor = machine().capability % 10;
  properties->multiProcessorCount = 4;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = machine().driver;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  Lock lock(machine().mutex);
  need_context();
  for (const EmulatedStream* stream : machine().streams) {
    if (stream->device == current_device && stream->capture) {
      return spoil(*stream->capture, cudaErrorStreamCaptureUnsupported);
    }
  }
  return run_until([device = current_device] {
    for (const EmulatedStream* stream : machine().streams) {
      if (stream->device == device && !stream->queue.empty()) return false;
    }
    return true;
  });
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(machine().mutex);
  need_context();
  *free = arena::free_bytes();
  *total = arena::kBytes;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Lock lock(machine().mutex);
  need_context();
  if (is_unsafe_now()) return cudaErrorStreamCaptureUnsupported;
  *pointer = arena::allocate(bytes);
  if (*pointer == nullptr) return failed(cudaErrorMemoryAllocation);
  machine().device_of[*pointer] = current_device;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  Lock lock(machine().mutex);
  need_context();
  if (is_unsafe_now()) return cudaErrorStreamCaptureUnsupported;
  const cudaError_t error = cudaDeviceSynchronize();  // as CUDA's
  if (!arena::release(pointer)) return failed(cudaErrorInvalidValue);
  machine().device_of.erase(pointer);
  return error;
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  Lock lock(machine().mutex);
  need_context();
  if (is_unsafe_now()) return cudaErrorStreamCaptureUnsupported;
  *pointer = std::malloc(bytes == 0 ? 1 : bytes);
  if (*pointer == nullptr) return failed(cudaErrorMemoryAllocation);
  machine().pinned[static_cast<char*>(*pointer)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  Lock lock(machine().mutex);
  need_context();
  if (is_unsafe_now()) return cudaErrorStreamCaptureUnsupported;
  if (machine().pinned.erase(static_cast<char*>(pointer)) == 0)
    return failed(cudaErrorInvalidValue);
  const cudaError_t error = cudaDeviceSynchronize();
  std::free(pointer);
  return error;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  Lock lock(machine().mutex);
  EmulatedStream& queue = resolve(stream);
  const bool to_device = arena::contains(target), from_device = arena::contains(source);
  if (queue.capture &&
      ((!from_device && !is_pinned(source)) || (!to_device && !is_pinned(target)))) {
    return spoil(*queue.capture, cudaErrorStreamCaptureUnsupported);
  }
  if (stream != nullptr && to_device != from_device) {
    emulation::CopiedBytes& copied = machine().copied_beside[queue.device];
    (to_device ? copied.to_device : copied.to_host) += static_cast<int64_t>(bytes);
  }
  // CUDA promises nothing about when it reads or writes pageable memory: before the call returns,
  // or when the stream comes to the copy.
  const bool reads_now = !from_device && !is_pinned(source) && next_random() % 2 == 0;
  const bool writes_now = !to_device && !is_pinned(target) && next_random() % 2 == 0;
  if (reads_now) {
    std::shared_ptr<char[]> staged(new char[bytes]);
    std::memcpy(staged.get(), source, bytes);
    push(queue, [=] {
      std::memcpy(target, staged.get(), bytes);
      return cudaSuccess;
    });
  } else {
    push(queue, [=] {
      std::memmove(target, source, bytes);
      return cudaSuccess;
    });
  }
  return writes_now ? cudaStreamSynchronize(stream) : cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* target, int target_device, const void* source,
                                int source_device, size_t bytes, cudaStream_t stream) {
  Lock lock(machine().mutex);
  const auto is_of = [](const void* pointer, int device) {
    const auto& device_of = machine().device_of;
    auto place = device_of.upper_bound(pointer);
    return place != device_of.begin() && (--place)->second == device;
  };
  if (!is_of(target, target_device) || !is_of(source, source_device)) {
    return failed(cudaErrorInvalidValue);
  }
  push(resolve(stream), [=] {
    std::memmove(target, source, bytes);
    return cudaSuccess;
  });
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Lock lock(machine().mutex);
  need_context();
  *attributes = {};
  attributes->type = arena::contains(pointer) ? cudaMemoryTypeDevice
                     : is_pinned(pointer)     ? cudaMemoryTypeHost
                                              : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  Lock lock(machine().mutex);
  push(resolve(stream), [=] {
    std::memset(target, value, bytes);
    return cudaSuccess;
  });
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute, int value) {
  Lock lock(machine().mutex);
  need_context();
  if (value < 0 || static_cast<size_t>(value) > emulation::kMaxSharedBytes) {
    return failed(cudaErrorInvalidValue);
  }
  machine().shared_bytes[{function, current_device}] = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  Lock lock(machine().mutex);
  need_context();
  *stream = new EmulatedStream{{}, current_device, nullptr, {}};
  machine().streams.push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Lock lock(machine().mutex);
  need_context();
  const cudaError_t error = cudaStreamSynchronize(stream);
  std::erase(machine().streams, stream);
  delete stream;
  return error;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock(machine().mutex);
  EmulatedStream& queue = resolve(stream);
  if (queue.capture) return spoil(*queue.capture, cudaErrorStreamCaptureUnsupported);
  if (queue.queue.empty()) return cudaSuccess;
  return run_until([&] { return queue.queue.empty(); });
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock(machine().mutex);
  EmulatedStream& queue = resolve(stream);
  if (queue.capture) return spoil(*queue.capture, cudaErrorStreamCaptureUnsupported);
  return queue.queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(machine().mutex);
  EmulatedStream& queue = resolve(stream);
  if (event->capture) {
    if (event->capture != queue.capture) {
      if (queue.capture || !event->capture->origin) return failed(cudaErrorStreamCaptureMerge);
      queue.capture = event->capture;
      queue.capture->joined.push_back(&queue);
    }
    queue.tail.insert(queue.tail.end(), event->nodes.begin(), event->nodes.end());
    return cudaSuccess;
  }
  if (!event->last || event->last->done) return cudaSuccess;
  if (queue.capture) return spoil(*queue.capture, cudaErrorStreamCaptureIsolation);
  queue.queue.push_back({nullptr, event->last, nullptr, nullptr});
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* data) {
  Lock lock(machine().mutex);
  push(resolve(stream), [=] {
    function(data);
    return cudaSuccess;
  });
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Lock lock(machine().mutex);
  if (stream == nullptr) return failed(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return failed(cudaErrorStreamCaptureMerge);
  stream->capture = std::make_shared<Capture>();
  stream->capture->origin = stream;
  stream->tail.clear();
  own_capture = stream->capture;
  own_mode = mode;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Lock lock(machine().mutex);
  *graph = nullptr;
  if (stream == nullptr || !stream->capture || stream->capture->origin != stream) {
    return failed(cudaErrorStreamCaptureUnmatched);
  }
  const std::shared_ptr<Capture> capture = std::exchange(stream->capture, nullptr);
  capture->origin = nullptr;
  own_capture = nullptr;
  // The end of each stream that joined must lie before the end of this one.
  std::vector<bool> reached(capture->graph.nodes.size());
  std::vector<size_t> open = std::exchange(stream->tail, {});
  while (!open.empty()) {
    const size_t node = open.back();
    open.pop_back();
    if (reached[node]) continue;
    reached[node] = true;
    const std::vector<size_t>& after = capture->graph.nodes[node].after;
    open.insert(open.end(), after.begin(), after.end());
  }
  bool whole = true;
  for (EmulatedStream* joined : capture->joined) {
    joined->capture = nullptr;
    for (const size_t node : std::exchange(joined->tail, {})) whole = whole && reached[node];
  }
  if (!capture->valid) return failed(cudaErrorStreamCaptureInvalidated);
  if (!whole) return failed(cudaErrorStreamCaptureUnjoined);
  *graph = new EmulatedGraph(std::move(capture->graph));
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  Lock lock(machine().mutex);
  need_context();
  std::swap(*mode, own_mode);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, void*, size_t* count) {
  *count = graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new EmulatedGraphExec{std::make_shared<const EmulatedGraph>(*graph)};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  Lock lock(machine().mutex);
  EmulatedStream& queue = resolve(stream);
  const bool waits = std::ranges::any_of(
      exec->graph->nodes, [](const EmulatedGraph::Node& node) { return node.ready != nullptr; });
  if (!waits) {
    push(queue, [graph = exec->graph] { return replay(*graph); });
    return cudaSuccess;
  }
  for (const size_t node : drawn_order(*exec->graph)) {
    const EmulatedGraph::Node& one = exec->graph->nodes[node];
    queue.queue.push_back({one.work, nullptr, nullptr, one.ready});
  }
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

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  Lock lock(machine().mutex);
  need_context();
  *event = new EmulatedEvent;
  ++machine().event_calls.made;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Lock lock(machine().mutex);
  need_context();
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Lock lock(machine().mutex);
  EmulatedStream& queue = resolve(stream);
  event->capture = queue.capture;
  event->nodes = queue.tail;
  if (queue.capture) return cudaSuccess;
  event->last = std::make_shared<EmulatedEvent::Happening>();
  event->last->stream = &queue;
  queue.queue.push_back({nullptr, nullptr, event->last, nullptr});
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock(machine().mutex);
  need_context();
  if (event->capture) return spoil(*event->capture, cudaErrorStreamCaptureUnsupported);
  const auto happening = event->last;
  if (!happening || happening->done) return cudaSuccess;
  return run_until([&] { return happening->done; });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(machine().mutex);
  need_context();
  ++machine().event_calls.asked;
  if (event->capture) return spoil(*event->capture, cudaErrorStreamCaptureUnsupported);
  if (is_unsafe_now()) return cudaErrorStreamCaptureUnsupported;
  return !event->last || event->last->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  Lock lock(machine().mutex);
  need_context();
  if (!start->last || !end->last) return failed(cudaErrorInvalidResourceHandle);
  if (!start->last->done || !end->last->done) return failed(cudaErrorNotReady);
  *milliseconds =
      std::chrono::duration<float, std::milli>(end->last->time - start->last->time).count();
  return cudaSuccess;
}

namespace tessera::gpu::emulation {

void note_traffic(const char* name, const Traffic& declared);

cudaError_t enqueue_launch(const void* function, const char* name, dim3 grid, dim3 block,
                           size_t shared_bytes, cudaStream_t stream, std::function<void()> kernel,
                           const Traffic& declared) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64 || grid.x == 0 || grid.y == 0 ||
      grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 ||
      shared_bytes > kMaxSharedBytes) {
    return failed(cudaErrorInvalidConfiguration);
  }
  Lock lock(machine().mutex);
  const auto asked = machine().shared_bytes.find({function, current_device});
  const bool has_more = asked != machine().shared_bytes.end() && shared_bytes <= asked->second;
  const size_t limit = has_more ? kMaxSharedBytes : kSharedBytes;
  if (shared_bytes > limit) return failed(cudaErrorInvalidValue);
  ++machine().launches[name];
  const Launch launch{
      name, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, limit};
  push(resolve(stream), [launch, kernel = std::move(kernel), declared] {
    const std::string what = run_grid(launch, kernel);
    if (what.empty()) {
      note_traffic(launch.name, declared);
      return cudaSuccess;
    }
    machine().report = what;
    return cudaErrorLaunchFailure;
  });
  return cudaSuccess;
}

void enqueue_always(cudaStream_t stream, std::function<void()> work) {
  Lock lock(machine().mutex);
  EmulatedStream& queue = resolve(stream);
  push(queue, [work = std::move(work)] {
    work();
    return cudaSuccess;
  });
  if (!queue.capture) queue.queue.back().always = true;  // a graph does it at each replay
}

void enqueue_when(cudaStream_t stream, std::function<bool()> ready, std::function<void()> work) {
  Lock lock(machine().mutex);
  EmulatedStream& queue = resolve(stream);
  const auto run = [work = std::move(work)] {
    work();
    return cudaSuccess;
  };
  if (queue.capture) {
    push(queue, run);
    queue.capture->graph.nodes.back().ready = std::move(ready);
    return;
  }
  queue.queue.push_back({run, nullptr, nullptr, std::move(ready)});
}

bool has_context(int device) {
  Lock lock(machine().mutex);
  return machine().contexts.contains(device);
}

int64_t host_waits() {
  Lock lock(machine().mutex);
  return machine().host_waits;
}

EventCalls event_calls() {
  Lock lock(machine().mutex);
  return machine().event_calls;
}

CopiedBytes copied_beside(int device) {
  Lock lock(machine().mutex);
  return machine().copied_beside[device];
}

int64_t launches_of(const std::string& name) {
  Lock lock(machine().mutex);
  const auto& launches = machine().launches;
  const auto it = launches.find(name);
  return it == launches.end() ? 0 : it->second;
}

void note_traffic(const char* name, const Traffic& declared) {
  if (!machine().counts_traffic) return;
  const race::Counts counts = race::counts();
  machine().traffic.push_back(
      {name, declared, {counts.read, counts.written}, counts.accessed, counts.sectors});
}
std::vector<CountedTraffic> count_traffic(const std::function<void()>& work) {
  {
    Lock lock(machine().mutex);
    cudaDeviceSynchronize();
    machine().traffic.clear();
    machine().counts_traffic = true;
    race::count_sectors(true);
  }
  work();
  Lock lock(machine().mutex);
  cudaDeviceSynchronize();
  machine().counts_traffic = false;
  race::count_sectors(false);
  return std::exchange(machine().traffic, {});
}

std::string take_report() {
  Lock lock(machine().mutex);
  return std::exchange(machine().report, {});
}

}  // namespace tessera::gpu::emulation
