#include <tessera/distributed/transport/nccl/queues.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include <tessera/core/cuda/graph.h>
#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/gpu/transfers.h>
#include <tessera/core/thread.h>
#include <tessera/distributed/transport/rank_context.h>

namespace tessera::distributed::nccl {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kLookEvery{1};
constexpr std::chrono::milliseconds kCheckEvery{100};  // asking NCCL takes its lock

struct Transfer {
  std::shared_ptr<gpu::EventHandle> end;
  Watch watch;
  Clock::time_point begin = Clock::now();
  bool expired = false;
};

// Shared by the queues and their thread, as either may be the last: a transfer's end may let go of
// the group, and with it of the queues.
struct Watcher {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Transfer> incoming;
  bool stopping = false;

  void run(int device) {
    gpu::use_device(device);  // the library's questions are for the current one too
    std::vector<Transfer> transfers;
    Clock::time_point next_check = Clock::now();
    while (true) {
      {
        std::unique_lock lock(mutex);
        const auto woken = [&] { return stopping || !incoming.empty(); };
        if (transfers.empty()) {
          changed.wait(lock, woken);
        } else {
          changed.wait_for(lock, kLookEvery, woken);
        }
        for (Transfer& transfer : incoming) transfers.push_back(std::move(transfer));
        incoming.clear();
        if (stopping) break;
      }
      const bool checks = Clock::now() >= next_check;
      if (checks) next_check = Clock::now() + kCheckEvery;
      std::vector<Transfer> rest;
      for (Transfer& transfer : transfers) {
        if (!look_at(transfer, checks)) rest.push_back(std::move(transfer));
      }
      transfers = std::move(rest);
    }
    for (Transfer& transfer : transfers) {
      transfer.watch.done(std::make_exception_ptr(
          DistributedError("nccl: the group has gone before its transfer ended")));
    }
  }

  // Whether it has ended.
  static bool look_at(Transfer& transfer, bool checks) {
    try {
      if (gpu::event_done(*transfer.end)) {
        transfer.watch.done(nullptr);
        return true;
      }
      if (checks) transfer.watch.check();
    } catch (...) {
      transfer.watch.done(std::current_exception());
      return true;
    }
    const double waited = std::chrono::duration<double>(Clock::now() - transfer.begin).count();
    if (!transfer.expired && waited > transfer.watch.timeout_seconds) {
      transfer.expired = true;
      transfer.watch.expired(waited);
    }
    return false;
  }
};

class GpuQueues : public DeviceQueues {
 public:
  explicit GpuQueues(const Device& device)
      : device_(device), watcher_(std::make_shared<Watcher>()) {
    thread_ = Thread([watcher = watcher_, index = device.index] { watcher->run(index); });
  }
  ~GpuQueues() override {
    {
      const std::lock_guard lock(watcher_->mutex);
      watcher_->stopping = true;
    }
    watcher_->changed.notify_all();
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  Device device() const override { return device_; }

  std::function<void()> run(Channel channel, const std::function<void(CudaStream)>& launch,
                            Watch watch) override {
    std::shared_ptr<gpu::StreamHandle>& side = streams_[static_cast<size_t>(channel)];
    const gpu::CurrentDevice scope(device_.index);
    if (!side) side = gpu::make_stream(device_.index);
    const auto before = gpu::record_event(*gpu::current_stream_handle(device_.index));
    gpu::wait_event(*side, *before);
    launch(gpu::native_stream(*side));
    std::shared_ptr<gpu::EventHandle> end = gpu::record_event(*side);
    if (gpu::Capture::current() == nullptr) {
      watch_until(end, std::move(watch));
    } else {
      watch.done(nullptr);
    }
    return [end = std::move(end), index = device_.index] {
      gpu::wait_event(*gpu::current_stream_handle(index), *end);
    };
  }

  void watch(Watch watch) override {
    const gpu::CurrentDevice scope(device_.index);
    watch_until(gpu::record_event(*gpu::current_stream_handle(device_.index)), std::move(watch));
  }

  void synchronize() override {
    for (const auto& stream : streams_) {
      if (stream) gpu::synchronize_stream(*stream);
    }
  }

 private:
  void watch_until(std::shared_ptr<gpu::EventHandle> end, Watch watch) {
    {
      const std::lock_guard lock(watcher_->mutex);
      watcher_->incoming.push_back({std::move(end), std::move(watch)});
    }
    watcher_->changed.notify_all();
  }

  const Device device_;
  const std::shared_ptr<Watcher> watcher_;
  Thread thread_;
  std::array<std::shared_ptr<gpu::StreamHandle>, kChannels> streams_;
};

}  // namespace

std::shared_ptr<DeviceQueues> make_device_queues(const Device& device) {
  TS_CHECK_DEVICE(device.is_cuda(), "nccl", "groups of GPUs need a GPU for each rank; given ",
                  device, "; use the mpi backend for CPU tensors");
  gpu::require_device(device.index, "nccl");
  return std::make_shared<GpuQueues>(device);
}

}  // namespace tessera::distributed::nccl
