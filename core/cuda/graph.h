// CUDA graphs: work that is queued once and run many times, at the cost of one launch.
//
//     gpu::Graph graph(stream, [&] { y = relu(matmul(x, w)); });   // queues nothing: it captures
//     graph.replay();                                              // runs it on the stream
//
// A replay repeats launches and copies with the addresses and arguments of the capture. So:
//   - memory allocated inside comes from a pool of the graph's own. What is freed inside is used
//     again inside; what leaves the capture (y) stays where it is, is written by each replay, and
//     belongs to the pool also when it is freed. The pool lives as long as the graph.
//   - memory from outside that is used inside (x, w) must outlive the graph.
//   - a number of the host is a constant. One that changes comes from Capture::feed(), random
//     streams move along (movable_stream.h), and the rest must live in device memory.
//   - the host cannot wait inside. What tries to (item(), shapes that depend on values, copies from
//     or to pageable memory, synchronize) throws an UnsupportedError that names the last op; then
//     nothing was queued, and the graph is not made.
// Host code inside runs at the capture and not at replays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include <tessera/core/gpu/backend.h>

namespace tessera::gpu {

// The capture that the current context is in.
class Capture {
 public:
  virtual ~Capture() = default;
  // Device memory, aligned to 16, into which each replay first puts what `fill` writes to `host`.
  // Fills run on the replaying thread in the order of these calls. An error of one is thrown by
  // replay(), before anything was queued. Throws ValueError where the graph feeds over 64 KiB.
  virtual const void* feed(size_t bytes, std::function<void(void* host)> fill) = 0;
  // Pinned memory of the graph's own with the bytes of now: what copies inside may read.
  virtual const void* keep_constants(const void* source, size_t bytes) = 0;
  virtual int device() const = 0;

  static Capture* current();  // or null
};

class Graph {
 public:
  // Captures what `work` queues on `stream` while it is the current one, and on streams that wait
  // for its events and that it waits for again. Brings the random state back to what it was: the
  // work was not done. Throws what `work` throws, and CudaError for what CUDA cannot capture.
  Graph(std::shared_ptr<StreamHandle> stream, const std::function<void()>& work);
  ~Graph();  // waits for replays
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Queues the work on the stream of the capture. Does not wait. Random streams go on as if the
  // work had been queued op by op.
  void replay();

  int64_t num_nodes() const;   // launches, copies, fills
  int64_t pool_bytes() const;  // held by its pool

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Throws the UnsupportedError above where the current context captures. `call` as in "a host read".
void refuse_in_capture(const char* call);

// Copies host memory that does not change to the device, on its current stream: tables that a
// kernel reads beside its arguments. May be captured.
void upload_constants(void* target, int device, const void* source, size_t bytes);

// While one lives, no thread captures on the device: for calls that wait for all of it. Not within
// a capture.
class NoCapture {
 public:
  explicit NoCapture(int device);
  ~NoCapture();
  NoCapture(const NoCapture&) = delete;
  NoCapture& operator=(const NoCapture&) = delete;

 private:
  int device_;
};

}  // namespace tessera::gpu
