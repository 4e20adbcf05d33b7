#include <tessera/core/cuda/graph.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include <tessera/core/context.h>
#include <tessera/core/cuda/capture.h>
#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/contexts.h>
#include <tessera/core/cuda/device_errors.h>
#include <tessera/core/cuda/device_memory.h>
#include <tessera/core/cuda/launch_log.h>
#include <tessera/core/cuda/movable_stream.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/error.h>
#include <tessera/core/random.h>

namespace tessera::gpu {
namespace {

constexpr size_t kFeedBytes = size_t{64} << 10;
constexpr size_t kFeedAlignment = 16;
// Replays that the host may have queued before it waits for the first of them.
constexpr size_t kReplaysAhead = 4;
constexpr int kMaxDevices = 64;

struct CaptureSlot {
  Capture* capture = nullptr;
  std::function<kernels::MovableStream(RandomStream)> movable;
};

std::mutex& capture_gate(int device) {
  static auto* const gates = new std::array<std::mutex, kMaxDevices>;
  return gates->at(static_cast<size_t>(device) % kMaxDevices);
}

}  // namespace

Capture* Capture::current() { return Context::current().slot<CaptureSlot>().capture; }

void refuse_in_capture(const char* call) {
  if (Capture::current() == nullptr) return;
  const char* const last = last_operation_name();
  TS_THROW(UnsupportedError, "graph capture", call, " makes the host wait and cannot be captured",
           last == nullptr ? "" : "; the last op queued was ", last == nullptr ? "" : last,
           "; keep the value on the device and read it after the step, or leave the op out of the "
           "graph");
}

void upload_constants(void* target, int device, const void* source, size_t bytes) {
  if (bytes == 0) return;
  if (Capture* const capture = Capture::current()) {
    const CurrentDevice scope(device);
    TS_CUDA(cudaMemcpyAsync(target, capture->keep_constants(source, bytes), bytes,
                            cudaMemcpyDefault, current_stream()));
    return;
  }
  copy_staged(target, device, source, bytes);
}

NoCapture::NoCapture(int device) : device_(device) { capture_gate(device).lock(); }
NoCapture::~NoCapture() { capture_gate(device_).unlock(); }

NoCaptureNow::NoCaptureNow(int device) : device_(device), holds_(capture_gate(device).try_lock()) {}
NoCaptureNow::~NoCaptureNow() {
  if (holds_) capture_gate(device_).unlock();
}

RelaxedCapture::RelaxedCapture() : mode_(cudaStreamCaptureModeRelaxed) {
  cudaThreadExchangeStreamCaptureMode(&mode_);
}
RelaxedCapture::~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

// ---- The graph ----------------------------------------------------------------------------------

class Graph::Impl final : public Capture {
 public:
  Impl(std::shared_ptr<StreamHandle> stream, int device)
      : stream_(std::move(stream)), device_(device), allocator_(caching_allocator(device)) {
    const CurrentStream current(stream_);
    feed_memory_ = static_cast<char*>(allocator_.allocate(kFeedBytes));
    try {
      staging_ = static_cast<char*>(pinned_allocator().allocate(kFeedBytes * kReplaysAhead));
      device_error_word();  // kernels may want it, and it cannot be made inside
      pool_ = allocator_.open_pool();
    } catch (...) {
      free_memory();
      throw;
    }
  }

  ~Impl() override {
    int previous = 0;
    enter_device(device_, previous);
    cudaStreamSynchronize(native(*stream_));
    for (const cudaEvent_t event : staging_free_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
    free_memory();
    leave_device(previous);
  }

  void capture(const std::function<void()>& work);
  void replay();

  const void* feed(size_t bytes, std::function<void(void*)> fill) override {
    const size_t begin = feeds_end_;
    const size_t end = begin + (bytes + kFeedAlignment - 1) / kFeedAlignment * kFeedAlignment;
    TS_CHECK(end <= kFeedBytes, "graph capture", "feeds more than ", kFeedBytes,
             " bytes to each replay; put large values into a tensor and copy to it before");
    feeds_.push_back({begin, std::move(fill)});
    feeds_end_ = end;
    return feed_memory_ + begin;
  }
  const void* keep_constants(const void* source, size_t bytes) override {
    void* const block = pinned_allocator().allocate(bytes);
    constants_.emplace_back(block, bytes);
    std::memcpy(block, source, bytes);
    return block;
  }
  int device() const override { return device_; }

  int64_t num_nodes() const { return num_nodes_; }
  int64_t pool_bytes() const { return allocator_.pool_bytes(pool_); }

 private:
  struct Feed {
    size_t begin;
    std::function<void(void*)> fill;
  };

  kernels::MovableStream movable(RandomStream stream);
  void free_memory() noexcept {
    if (pool_ != 0) allocator_.close_pool(pool_);
    if (feed_memory_ != nullptr) allocator_.deallocate(feed_memory_, kFeedBytes);
    if (staging_ != nullptr) pinned_allocator().deallocate(staging_, kFeedBytes * kReplaysAhead);
    for (const auto& [block, bytes] : constants_) pinned_allocator().deallocate(block, bytes);
  }

  const std::shared_ptr<StreamHandle> stream_;
  const int device_;
  DeviceAllocator& allocator_;
  uint64_t pool_ = 0;
  cudaGraphExec_t exec_ = nullptr;
  int64_t num_nodes_ = 0;
  char* feed_memory_ = nullptr;
  size_t feeds_end_ = 0;
  std::vector<Feed> feeds_;
  char* staging_ = nullptr;  // pinned, one part for each replay under way
  std::array<cudaEvent_t, kReplaysAhead> staging_free_{};
  size_t replays_ = 0;
  std::vector<std::pair<void*, size_t>> constants_;  // pinned
  RandomState random_at_capture_;
  uint64_t streams_taken_ = 0, highest_stream_ = 0;
  const uint64_t* random_feed_ = nullptr;
};

void Graph::Impl::capture(const std::function<void()>& work) {
  const CurrentDevice device(device_);
  const CurrentStream current(stream_);
  const cudaStream_t stream = native(*stream_);
  random_at_capture_ = random_state();
  cudaGraph_t graph = nullptr;
  {
    const NoCapture gate(device_);
    TS_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CaptureSlot& slot = Context::current().slot<CaptureSlot>();
    slot = {this, [this](RandomStream taken) { return movable(taken); }};
    allocator_.begin_capture(pool_);
    const auto end = [&] {
      slot = {};
      const cudaError_t error = cudaStreamEndCapture(stream, &graph);
      allocator_.end_capture();
      streams_taken_ = random_state().next_stream - random_at_capture_.next_stream;
      random_state() = random_at_capture_;
      return error;
    };
    try {
      work();
    } catch (...) {
      if (end() == cudaSuccess) cudaGraphDestroy(graph);
      cudaGetLastError();  // of a capture that CUDA gave up
      throw;
    }
    check(end(), "cudaStreamEndCapture", __FILE__, __LINE__);
  }
  size_t nodes = 0;
  cudaError_t error = cudaGraphGetNodes(graph, nullptr, &nodes);
  if (error == cudaSuccess) error = cudaGraphInstantiate(&exec_, graph);
  cudaGraphDestroy(graph);
  TS_CUDA(error);
  num_nodes_ = static_cast<int64_t>(nodes);
}

void Graph::Impl::replay() {
  TS_CHECK_AS(UnsupportedError, Capture::current() == nullptr, "graph replay",
              "a graph cannot be replayed inside of a capture; queue its work instead");
  const CurrentDevice device(device_);
  const cudaStream_t stream = native(*stream_);
  if (!feeds_.empty()) {
    const size_t turn = replays_ % kReplaysAhead;
    char* const host = staging_ + turn * kFeedBytes;
    cudaEvent_t& taken = staging_free_[turn];
    if (taken == nullptr) {
      TS_CUDA(cudaEventCreateWithFlags(&taken, cudaEventDisableTiming));
    } else {
      TS_CUDA(cudaEventSynchronize(taken));
    }
    for (const Feed& feed : feeds_) feed.fill(host + feed.begin);
    note_operation("graph replay", stream);
    TS_CUDA(cudaMemcpyAsync(feed_memory_, host, feeds_end_, cudaMemcpyDefault, stream));
    log_launch("copy", stream);
    TS_CUDA(cudaEventRecord(taken, stream));
    ++replays_;
  }
  finish_launch(cudaGraphLaunch(exec_, stream), "graph replay", stream);
  random_state().next_stream += streams_taken_;
}

// A stream that was taken since the capture began moves with the context's streams.
kernels::MovableStream Graph::Impl::movable(RandomStream stream) {
  highest_stream_ = std::max(highest_stream_, random_state().next_stream);
  const bool taken_inside = stream.seed == random_at_capture_.seed &&
                            stream.stream >= random_at_capture_.next_stream &&
                            stream.stream < highest_stream_;
  if (!taken_inside) return {stream.seed, stream.stream, nullptr};
  if (random_feed_ == nullptr) {
    random_feed_ = static_cast<const uint64_t*>(feed(2 * sizeof(uint64_t), [this](void* host) {
      const uint64_t state[] = {random_state().seed,
                                random_state().next_stream - random_at_capture_.next_stream};
      std::memcpy(host, state, sizeof state);
    }));
  }
  return {stream.seed, stream.stream, random_feed_};
}

Graph::Graph(std::shared_ptr<StreamHandle> stream, const std::function<void()>& work) {
  TS_CHECK_AS(UnsupportedError, Capture::current() == nullptr, "graph capture",
              "a capture is under way in this context; end it first");
  const int device = device_of(*stream);
  const CurrentDevice scope(device);
  impl_ = std::make_unique<Impl>(std::move(stream), device);
  impl_->capture(work);
}
Graph::~Graph() = default;
void Graph::replay() { impl_->replay(); }
int64_t Graph::num_nodes() const { return impl_->num_nodes(); }
int64_t Graph::pool_bytes() const { return impl_->pool_bytes(); }

}  // namespace tessera::gpu

namespace tessera::kernels {

MovableStream movable(RandomStream stream) {
  const auto& slot = Context::current().slot<gpu::CaptureSlot>();
  return slot.movable ? slot.movable(stream) : MovableStream{stream.seed, stream.stream, nullptr};
}

}  // namespace tessera::kernels
