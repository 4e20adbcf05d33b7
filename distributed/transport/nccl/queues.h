// The streams of a GPU that collectives run on, beside the one that calculates.
//
// [Note: order on a GPU] A collective is queued on the side stream of its channel, behind an event
// of the caller's current stream: it reads what was calculated before. Its own end is an event that
// Work::wait() makes the current stream wait for; the thread goes on. A watcher thread looks at
// these events: it tells when a transfer has ended (records, completed()), asks NCCL for errors and
// ends what has waited too long.
//
// Private to the nccl backend: not installed.
#pragma once

#include <exception>
#include <functional>
#include <memory>

#include <tessera/core/device.h>
#include <tessera/distributed/transport/nccl/api.h>
#include <tessera/distributed/transport/trace.h>

namespace tessera::distributed::nccl {

// What the watcher does for a transfer. All may be called from any thread.
struct Watch {
  double timeout_seconds = 600;
  std::function<void()> check;                   // now and then; throws what NCCL has found
  std::function<void(double)> expired;           // once, after `timeout_seconds`
  std::function<void(std::exception_ptr)> done;  // once, at the end
};

class DeviceQueues {
 public:
  virtual ~DeviceQueues() = default;
  virtual Device device() const = 0;
  // Calls `launch` with the channel's stream, behind what the caller's current stream has to do.
  // Returns what makes the current stream of its caller wait for that. Where launch throws, the
  // watch is not used. In the capture of a graph the watch ends at once: nothing travels yet.
  virtual std::function<void()> run(Channel channel, const std::function<void(CudaStream)>& launch,
                                    Watch watch) = 0;
  // Records an event after the current stream's work so far.
  virtual void watch(Watch watch) = 0;
  // Blocks until everything queued has run.
  virtual void synchronize() = 0;
};

// For a GPU of this program's backend, real or emulated. DeviceError if there is none.
std::shared_ptr<DeviceQueues> make_device_queues(const Device& device);

}  // namespace tessera::distributed::nccl
