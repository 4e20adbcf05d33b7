// The interface of transports: collectives on contiguous bytes, already checked, started at once
// and reported by a callback. Group does everything above (tensors, deadlines, records); users do
// not see backends.
//
//     backend_thread.cpp  ranks are threads of this process; the last to come does the work, also
//                         for tensors of one GPU that all share (backend_one_device.h)
//     mpi/backend_mpi.cpp  one progress thread makes all MPI calls (where built with MPI)
//     nccl/backend_nccl.cpp  tensors of GPUs, on streams beside the one that calculates
//     backend_paired.cpp  the first two for CPU tensors, nccl for those of a GPU
//     backend_fake.cpp    any number of ranks, no data: counts and bytes
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <tessera/core/device.h>
#include <tessera/distributed/transport/trace.h>

namespace tessera::distributed {

class Store;
struct QueuedCall;  // backend_one_device.h

// Sent before every collective on the mpi and thread backends, so that ranks with different calls
// raise instead of exchanging wrong data. All of it must agree.
struct CallHeader {
  Operation operation = Operation::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceOp reduce = ReduceOp::kSum;
  ReductionMode mode = ReductionMode::kDeterministic;
  int32_t root = -1;
  int64_t count = 0;  // of elements; -1 in uneven calls, whose sizes the backend compares
  int64_t sequence = 0;
  bool onto = false;     // reduce_scatter: the sum continues that of receives[rank]
  uint32_t purpose = 0;  // a hash of the tag: calls of equal size for other things differ
};
static_assert(sizeof(CallHeader) == 32);

// nullopt if all agree. Otherwise the call of each rank, from the texts of CallText.
using CallText = std::array<char, 256>;  // "all_reduce #3 (sum, f32[8]) at train.cpp:41", 0-ended
bool agree(std::span<const CallHeader> headers);
std::string describe_mismatch(std::span<const CallText> texts);
// The sizes of calls with count -1 differ from pair to pair: every pair compares its own.
std::string describe_sizes(int sender, int64_t sent, int receiver, int64_t expected, DType dtype);

struct Part {
  char* data = nullptr;
  int64_t bytes = 0;
};

// One rank's side of a collective. Lists have an entry for each rank of the group; memory stays
// valid and untouched until `done` was called.
//   all_reduce      sends[r]: the piece that rank r sums; results come in place, to all
//   reduce          the same, results only at root; other ranks' memory is scratch afterwards
//   reduce_scatter  sends[r] goes to rank r; receives[rank] gets this rank's sum, and may be
//                   sends[rank]; where header.onto it is the first summand itself, but of tensors
//                   of a GPU, where the group adds what it gets
//   broadcast       sends[root] at the root, receives[root] at the others: one buffer
//   all_gather, all_to_all, gather, scatter: sends[r] goes to rank r, receives[r] comes from it;
//                   parts of no bytes are not sent; a rank's own two parts may be the same memory
//   send, recv      sends[root] or receives[root], matched by `tag`; a send ends when its receiver
//                   has it, and both sides learn where they do not match or one is `refused`
//   barrier, invalid  nothing but the header
struct Call {
  CallHeader header;
  Channel channel = Channel::kUser;
  int tag = 0;
  std::vector<Part> sends, receives;
  CallText text{};
  bool waits = false;           // the caller comes to drive() at once
  std::weak_ptr<void> carrier;  // written by start(): what drive() takes
  bool refused = false;  // send and recv: the arguments were wrong, `text` says how; no tensor
  Device device = kCpu;  // of the tensors
  double timeout_seconds = 600;
  // When it ended, in seconds of the group's trace, if that is not when `done` is called.
  std::optional<double> ended;
  std::function<void(std::exception_ptr)> done;  // exactly once, from any thread, null if well
  // Written by start() where the results lie in the order of a stream: makes its caller's current
  // stream wait for them. Nobody needs to wait for `done` then.
  std::function<void()> order;
  // Written by start() where the results lie in the order of a stream, but only once other ranks
  // have called: who waits for `done` makes its stream wait for this.
  std::shared_ptr<QueuedCall> queued;
};
using CallPtr = std::shared_ptr<Call>;
// The same for a send and its recv.
bool agree(const Call& send, const Call& recv);
std::string describe_mismatch(const Call& send, const Call& recv);

// The position of a rank on a channel, as far as this rank's backend or store knows.
struct Position {
  int64_t sequence = 0;  // last call that it issued; 0: none
  std::string text;      // of that call
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Whether tensors of the device can be sent; if not Group raises DeviceError.
  virtual bool serves(const Device& device) const = 0;
  // A hash of the calls with GPU tensors that are not compared before: the same on all ranks with
  // the same calls on training's channels (gradients, parameters, modules). Empty if every call is
  // compared.
  virtual std::optional<uint64_t> fingerprint() const { return std::nullopt; }
  // False: nothing is sent (fake), results are not meaningful.
  virtual bool moves_data() const { return true; }

  // Returns at once. Calls of one channel run in their order.
  virtual void start(CallPtr call) = 0;
  // Sends and recvs of one channel, none of which waits for another.
  virtual void start_together(std::span<const CallPtr> calls) {
    for (const CallPtr& call : calls) start(call);
  }
  // Calls of one group that a graph has carried out again on the current stream of their device, in
  // their order; see captured_calls.h. Errors are those of a call.
  virtual void repeated(std::span<const CallPtr>) {}
  // Moves a call that said it `waits` on this thread, at most until the deadline. Returns early
  // where another thread moves it already.
  virtual void drive(const std::shared_ptr<void>&, std::chrono::steady_clock::time_point) {}
  // A backend for the ranks of one color, ordered as in `members` (ranks of this one). Every rank
  // of this backend calls it, with its own color; with color < 0 it returns null.
  virtual std::unique_ptr<Backend> split(int color, std::span<const int> members,
                                         const std::string& name) = 0;
  // Ends all running and later calls with `error`. Any thread; idempotent.
  virtual void fail(std::exception_ptr error) = 0;
  // Positions of the group's ranks on a channel; nullopt for a rank that is not known.
  virtual std::vector<std::optional<Position>> positions(Channel) { return {}; }
  // Waits at most this long for running calls and releases resources. The message says what could
  // not be ended in order; empty if all is well.
  virtual std::string shutdown(std::chrono::milliseconds) { return {}; }
};

// Backends over processes. UnsupportedError if this build has none of the kind.
struct BackendOptions {
  double timeout_seconds = 600;                       // of the start, which needs every rank
  int64_t message_limit = (int64_t{1} << 31) - 4096;  // bytes of one message
  int64_t chunk_bytes = 0;  // of a pipelined reduction; 0: the backend's choice
  // Up to so many ranks native reductions are carried out like deterministic ones, which is faster
  // there than MPI's non-blocking forms (docs/measurements/collectives.md).
  int exchange_ranks = 8;
  // Pairs: before tensors of GPUs move, ranks compare their calls over the host's backend, and this
  // thread waits for it. A mismatch, and a mistake on one rank, is then an error at once instead of
  // a timeout or, where NCCL carries it out all the same, one at the end of backward (fingerprint).
  bool compare_calls = false;
};
std::unique_ptr<Backend> make_mpi_backend(const BackendOptions& options = {});
// For tensors of `device`, the rank's GPU, alone. NCCL's own order of addition, whatever the mode;
// the library (libnccl.so.2, or what TESSERA_NCCL names) is loaded here. DeviceError without the
// device, UnsupportedError without the library. The start needs every rank.
std::unique_ptr<Backend> make_nccl_backend(std::shared_ptr<Store> store, int rank, int size,
                                           const Device& device,
                                           const BackendOptions& options = {});
// Ranks with a GPU each: CPU tensors and barriers travel over `host`, tensors of a GPU over
// `device`.
std::unique_ptr<Backend> make_paired_backend(std::shared_ptr<Backend> host,
                                             std::unique_ptr<Backend> device,
                                             const BackendOptions& options = {});
std::unique_ptr<Backend> make_fake_backend(int rank, int size);

}  // namespace tessera::distributed
