// The communication of a rank: a record for every collective, kept in a ring buffer. A timeout
// dumps it, tests and reports count by it, and it shows overlap.
//
//     CommTrace::Scope scope(group.trace());
//     loss.backward();
//     EXPECT_EQ(count(scope.records(), Operation::kAllReduce), buckets);
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <tessera/core/dtype.h>
#include <tessera/distributed/transport/operation.h>

namespace tessera::distributed {

enum class ReduceOp : uint8_t { kSum, kMean, kMax, kMin, kProduct };
// How sums are computed: kDeterministic in rank order with f32 accumulation for 16-bit dtypes, the
// same bits on every backend; kNative by the transport's own reduction, in its own order.
enum class ReductionMode : uint8_t { kDeterministic, kNative };

// Order is guaranteed, and verified across ranks, within one channel of one group; each has its own
// communicator and sequence numbers.
enum class Channel : uint8_t {
  kUser,       // calls of user code
  kGradient,   // reductions that backward overlaps with
  kParameter,  // parameters: gathered, broadcast
  kModule,     // collectives inside forward and backward (SyncBatchNorm)
  kPeer,       // send and recv
  kControl,    // agreement: verification, used maps, norms
};
inline constexpr int kChannels = 6;

std::string_view name_of(ReduceOp op);
std::string_view name_of(Channel channel);
std::string describe_seconds(double seconds);  // "0.203 s", "1800 s"

struct CommRecord {
  enum class State : uint8_t { kQueued, kDone, kFailed };
  std::string group;
  Channel channel = Channel::kUser;
  int64_t sequence = 0;  // in the channel, from 1; sends and receives count separately
  Operation operation = Operation::kBarrier;
  ReduceOp reduce = ReduceOp::kSum;
  bool onto = false;  // a reduce_scatter_onto
  DType dtype = DType::kUInt8;
  int64_t count = 0;  // elements; -1 if it differs between ranks
  int64_t bytes = 0;  // this rank's tensor: for gathers the input, for scatters the output
  int root = -1;      // or peer
  int group_size = 1;
  std::string tag, phase;
  const char* file = "";
  int line = 0;
  State state = State::kQueued;
  // Seconds by the clock of the trace; -1: not yet.
  double queued = -1, done = -1;
  double wait_begin = -1, wait_end = -1;  // of the first wait()

  // "all_reduce #12 (sum, f32[4096]) 'bucket 3'", "reduce_scatter #3 (sum onto, f32[64])"
  std::string describe() const;
  std::string place() const;  // of the call: "train.cpp:41"
  // Bytes that this rank sends in a bandwidth-optimal algorithm: 2 (N-1)/N of an all_reduce's
  // tensor, (N-1) times an all_gather's input, ...
  double wire_bytes() const;
};

class CommTrace {
 public:
  explicit CommTrace(size_t capacity = 2048);

  // A rank's thread adds and any thread updates, so records are addressed by a running number.
  int64_t add(CommRecord record);
  // Sets the end; ignored if the ring has dropped the record.
  void finish(int64_t number, bool failed, double seconds);
  void waited(int64_t number, double begin, double end);

  std::vector<CommRecord> records(int64_t first = 0) const;  // of those kept, in order of issue
  int64_t next() const;                                      // the number of the next record
  double seconds() const;                                    // since the trace was made
  // Replaces the clock of seconds() for simulated times; empty restores it. Called by the rank's
  // thread while none of its calls is running.
  void set_clock(std::function<double()> seconds) { clock_ = std::move(seconds); }
  // {"rank": r, "records": [...]} as JSON text.
  std::string to_json(int rank) const;

  // Keeps every record from here on; several scopes may be open.
  class Scope {
   public:
    explicit Scope(CommTrace& trace);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    std::vector<CommRecord> records() const { return trace_->records(first_); }

   private:
    CommTrace* trace_;
    int64_t first_;
  };

 private:
  void trim();
  const size_t capacity_;
  const int64_t start_;  // steady clock, nanoseconds
  std::function<double()> clock_;
  mutable std::mutex mutex_;
  std::deque<CommRecord> records_;
  int64_t first_ = 0;  // number of records_.front()
  int scopes_ = 0;
};

int64_t count(const std::vector<CommRecord>& records, Operation operation);
int64_t count(const std::vector<CommRecord>& records, Operation operation, Channel channel);
int64_t bytes(const std::vector<CommRecord>& records, Operation operation);
// The fraction of the time of a channel's collectives that no wait() saw. 1 if there were none.
double hidden_share(const std::vector<CommRecord>& records, Channel channel);

}  // namespace tessera::distributed
