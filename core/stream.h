// Queues of work that run beside the caller, and events that order them. On the CPU a stream is a
// worker thread and an event a flag; on a GPU they are those of its runtime. Code that overlaps
// communication with calculation is written once.
#pragma once

#include <functional>
#include <memory>

#include <tessera/core/device.h>

namespace tessera {

// Something that happens on a stream. Copies share the same happening.
class Event {
 public:
  Event();
  bool done() const;  // true before the first record, as on GPUs
  void wait() const;  // blocks the calling thread; rethrows an error of the stream's earlier work
  // From `start` to this one, both of which happened; on the clock of the device. Throws ValueError
  // for events of different kinds and DeviceError for one that did not happen.
  double milliseconds_since(const Event& start) const;

 private:
  friend class Stream;
  struct State;
  std::shared_ptr<State> state_;
};

class Stream {
 public:
  // Throws DeviceError for a device this program has no backend for.
  explicit Stream(const Device& device = kCpu);
  ~Stream();  // waits for the queued work
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Runs `work` after everything queued before. On the CPU a worker runs it, in a context of its
  // own; an error is kept and rethrown by the next synchronize() or Event::wait(), and the work
  // behind it is dropped. On a GPU the caller runs it now, and what it queues goes to this stream.
  void enqueue(std::function<void()> work);
  Event record();                 // happens when all work queued so far is done
  void wait(const Event& event);  // later work on this stream waits for it
  void synchronize();             // blocks until the queue is empty; rethrows

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
