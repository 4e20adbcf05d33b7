// Collectives of ranks that are threads and share one GPU: a model sharded over N ranks is tried on
// a card without N of them.
//
// A rank's call notes what its stream had queued, and returns. The last rank to come queues the
// transfer on a stream of its own behind all of that, so nothing on the device ever waits for work
// that is not queued yet. Work::wait() holds the thread until then, and the stream until the
// transfer has ended. Sums are those of the CPU's ranks, to the bit (deterministic.h).
//
// Private to the thread backend: not installed.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include <tessera/core/gpu/backend.h>
#include <tessera/distributed/transport/backend.h>

namespace tessera::distributed {

// The device of a call that lies in the order of streams, where its caller stood, and its end.
struct QueuedCall {
  Device device;
  std::shared_ptr<gpu::StreamHandle> caller;  // the current stream at the call
  std::shared_ptr<gpu::EventHandle> begin;    // behind what was queued there by then
  std::shared_ptr<gpu::EventHandle> end;      // of the transfer: written before Call::done
};

// On the caller's thread, when it calls. UnsupportedError in the capture of a graph: the other
// ranks' streams are no part of it.
void note_queued(Call& call);

// Once `end` is written. The current stream of the calling thread's context waits for the transfer.
void wait_for(const QueuedCall& call);
bool has_ended(const QueuedCall& call);
// Before tensors of a call that nobody waited for are released: the caller's stream waits.
void let_go(const QueuedCall& call) noexcept;

// Queues what the calls ask for, all of one device, on `side`, and writes their ends.
// `carry_out(copy, reduce)` says which bytes go where, as for CPU tensors.
using CopyParts = std::function<void(const Part& to, const Part& from)>;
using ReduceParts = std::function<void(std::span<const void* const> inputs, void* out,
                                       int64_t count, DType dtype, ReduceOp op)>;
void queue_transfer(std::span<const CallPtr> calls, const std::shared_ptr<gpu::StreamHandle>& side,
                    const std::function<void(const CopyParts&, const ReduceParts&)>& carry_out);

}  // namespace tessera::distributed
