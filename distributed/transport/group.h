// Groups of ranks and their collectives.
//
//     Work work = group.all_reduce(gradient);   // returns at once
//     ...                                       // compute goes on
//     work.wait();                              // gradient holds the sum
//
// All calls are asynchronous; collectives.h has functions that wait. Every rank of a group makes
// the same calls in the same order within a channel; calls are compared before any data moves, and
// a difference is a DistributedError on every rank that names the call sites. A wait that times out
// raises on this rank, names the place of every rank, and breaks the group.
//
// Tensors may be non-contiguous (a contiguous copy is sent, wait() copies the result back) and
// empty. They must be on one device. Wrong arguments are typed errors on the rank that has the
// mistake; the others learn of it in the same call, as DistributedError.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/source_location.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/rank_context.h>
#include <tessera/distributed/transport/trace.h>

namespace tessera::distributed {

struct CollectiveOptions {
  Channel channel = Channel::kUser;
  double timeout_seconds = 0;  // 0: TimeoutScope's, else the context's
  std::string_view tag = {};   // purpose, in records and messages: "bucket 3"
  SourceLocation where = SourceLocation::current();
  // The caller waits at once, so its thread may move the data itself without waking another. If it
  // does not wait, nothing may move until it does.
  bool waits = false;
};

// A running collective. Copies share it; it keeps its tensors alive, also if nobody waits.
class Work {
 public:
  Work() = default;  // an empty one, whose wait() returns at once
  bool valid() const { return state_ != nullptr; }
  // Waits until the results are in the tensors. Rethrows failures as DistributedError. A failure
  // that nobody waits for is not lost: it is a line on stderr, and the group's next call raises.
  // For GPU tensors the current stream waits, not the thread; later failures are reported the same
  // way.
  void wait() const;
  // Declares that nobody will wait and failures need not be reported. The Work is empty afterwards.
  void forget();
  bool completed() const;    // the transfer has ended; wait() no longer blocks
  int64_t sequence() const;  // in its channel, 0 if nothing was issued

 private:
  friend class Group;
  friend class CoalescedScope;
  struct State;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

inline constexpr int kMaxTag = 1 << 29;  // tags of send and recv are below

// One message of an exchange: the tensor to send to the peer, or to receive into.
struct PeerTensor {
  int peer;
  Tensor tensor;
  int tag = 0;
};

class Group : public std::enable_shared_from_this<Group> {
 public:
  // `ranks`: world ranks in group order. For backends; users split world().
  Group(std::string name, std::shared_ptr<Backend> backend, std::vector<int> ranks,
        RankContext& context = rank_context());
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::string& name() const { return name_; }
  std::span<const int> ranks() const { return ranks_; }  // of the world
  Backend& backend() { return *backend_; }
  CommTrace& trace() { return *trace_; }

  // In place. Deterministic unless the context's reduction mode says otherwise.
  Work all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                  const CollectiveOptions& options = {});
  // In place at root; what the other ranks hold afterwards is not specified.
  Work reduce(const Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum,
              const CollectiveOptions& options = {});
  Work broadcast(const Tensor& tensor, int root, const CollectiveOptions& options = {});
  // output: size() times the elements of input, rank r's in the r-th part of dimension 0. The list
  // form takes different sizes: outputs[r] has the shape of rank r's input. In place: the input may
  // be this rank's own part of the output (ValueError for memory of another part).
  Work all_gather(const Tensor& output, const Tensor& input, const CollectiveOptions& options = {});
  Work all_gather(std::span<const Tensor> outputs, const Tensor& input,
                  const CollectiveOptions& options = {});
  // The reverse: input has size() times the elements of output. The list form takes different
  // sizes: inputs[r] goes to rank r, whose output has its shape. In place: the output may be this
  // rank's own part of the input (ValueError for memory of another part).
  Work reduce_scatter(const Tensor& output, const Tensor& input, ReduceOp op = ReduceOp::kSum,
                      const CollectiveOptions& options = {});
  Work reduce_scatter(const Tensor& output, std::span<const Tensor> inputs,
                      ReduceOp op = ReduceOp::kSum, const CollectiveOptions& options = {});
  // Continues the sum in the output: ((output + rank 0's part) + rank 1's) + ..., accumulated as in
  // a reduction (16-bit types in f32, rounded once a call). So N ranks that reduce each of M
  // micro-batches have the bits of one process that accumulates N M gradients in f32. In records it
  // is a reduce_scatter with `onto` set; counts and bytes are the same. NCCL sums the contributions
  // first and wait() adds the sum, so 16-bit types are rounded twice; native reductions of the host
  // may do so too. ValueError if output and input share memory. After an error that is not a
  // mismatch the output is unspecified.
  Work reduce_scatter_onto(const Tensor& output, const Tensor& input,
                           const CollectiveOptions& options = {});
  Work reduce_scatter_onto(const Tensor& output, std::span<const Tensor> inputs,
                           const CollectiveOptions& options = {});
  // inputs[r] goes to rank r, outputs[r] comes from it; sizes may differ from pair to pair.
  Work all_to_all(std::span<const Tensor> outputs, std::span<const Tensor> inputs,
                  const CollectiveOptions& options = {});
  // outputs (inputs): one for each rank at root, empty elsewhere.
  Work gather(std::span<const Tensor> outputs, const Tensor& input, int root,
              const CollectiveOptions& options = {});
  Work scatter(const Tensor& output, std::span<const Tensor> inputs, int root,
               const CollectiveOptions& options = {});
  // Rank r's input goes to rank targets[r], whose output has its size: a ring is {1, 2, ..., 0}.
  // `targets`: each rank of the group once, the same list on all of them (else ValueError; a rank
  // with another list is a DistributedError on all, except over NCCL, whose ranks wait). JAX's
  // ppermute. Output and input may not share memory unless a rank is its own target.
  Work permute(const Tensor& output, const Tensor& input, std::span<const int> targets,
               const CollectiveOptions& options = {});
  // Matched by (peer, tag) in the order of issue; not part of the channel's sequence. A send ends
  // when the receiver has the data: wait for it after the recv that the peer may be waiting for. If
  // dtype or size differ, or one side's arguments are wrong, both sides raise. On GPUs a group's
  // first message makes the channel's communicator, which takes every rank of the group.
  Work send(const Tensor& tensor, int peer, int tag = 0,
            const CollectiveOptions& options = {.channel = Channel::kPeer});
  Work recv(const Tensor& tensor, int peer, int tag = 0,
            const CollectiveOptions& options = {.channel = Channel::kPeer});
  // Messages to and from any peers as one operation, none of which waits for another: two ranks may
  // exchange tensors of any size, where on GPUs a send before a recv on both would wait forever.
  // They match sends, recvs and exchanges of other ranks; there is one Work for all. If an argument
  // is wrong nothing is sent: this rank gets a typed error, and every peer that it named a
  // DistributedError. On GPUs, where messages between two ranks match in the order of issue, an
  // exchange issues its own by tag.
  Work exchange(const std::vector<PeerTensor>& sends, const std::vector<PeerTensor>& receives,
                const CollectiveOptions& options = {.channel = Channel::kPeer});
  // Waits for all ranks. A timeout names the missing ones.
  void barrier(const CollectiveOptions& options = {});

  // A group for each color, ranks ordered by (key, rank); null for color < 0. Collective.
  // UnsupportedError for simulated ranks (make_fake_backend).
  std::shared_ptr<Group> split(int color, int key = 0, const CollectiveOptions& options = {});
  // A group of the listed ranks of this one; every rank of this group calls it with the list of the
  // group it will be in (empty: none, returns null). ValueError for a rank outside, one named
  // twice, or a list without the caller; DistributedError if lists disagree.
  std::shared_ptr<Group> subgroup(std::span<const int> ranks,
                                  const CollectiveOptions& options = {});

  // Declares that this rank has left its work and will never make a call that the others may reach:
  // their next call on the channel raises DistributedError with the reason. Returns at once. The
  // ranks' sequences differ then: see resume_calls() in collectives.h.
  void tell(Channel channel, const std::string& reason) noexcept;
  // The number of calls on the channel that this rank has issued, including those of tell().
  int64_t issued(Channel channel) const { return sequences_[static_cast<size_t>(channel)]; }
  // Whether ranks compare each call before data moves, so that a rank can be told in one.
  bool compares_calls() const;

  // Aborts running calls and refuses later ones, here and, if the backend can, on other ranks.
  void abort(const std::string& reason);
  // Waits for the other ranks and releases the backend's resources. A broken group only releases.
  void shutdown();

 private:
  friend class Work;
  friend class CoalescedScope;
  friend class CapturedCalls;
  struct Request;
  struct Issue;
  Issue issue(Request request, const CollectiveOptions& options);
  Work start(Request request, const CollectiveOptions& options);
  Work local(Request& request);
  void note_captured(const CommRecord& record, const CallPtr& call);
  void check_message(std::string_view name, const Tensor& tensor, int peer, int tag) const;
  void refuse(Operation operation, int peer, int tag, const std::string& mistake,
              const CollectiveOptions& options);
  Request message(Operation operation, const Tensor& tensor, int peer, int tag) const;
  Work send_or_recv(Operation operation, const Tensor& tensor, int peer, int tag,
                    const CollectiveOptions& options);
  void note_unseen(const CommRecord& record, int64_t number, const std::string& error, bool waited);
  void note_raised();
  void note_failed(const CommRecord& record, int64_t number, const std::string& error);
  void forget_failed(int64_t number);
  std::string failed_besides(int64_t number);
  void raise_unseen(const CollectiveOptions& options);
  [[noreturn]] void invalid(const CollectiveOptions& options, std::string_view operation);
  std::string late_ranks(const CommRecord& record, double waited);
  void check_rank(int rank, std::string_view what) const;
  void check_own(std::span<const Tensor> parts, const Tensor& other, std::string_view where,
                 std::string_view part_name, std::string_view other_name) const;
  std::vector<Part> cut(const Tensor& flat) const;
  Work scatter_sums(const Tensor& output, const Tensor& input, ReduceOp op, bool onto,
                    const CollectiveOptions& options);
  Work scatter_sums(const Tensor& output, std::span<const Tensor> inputs, ReduceOp op, bool onto,
                    const CollectiveOptions& options);
  void receive_sum(Request& request, const Tensor& output) const;
  // One Work for several; wait() then copies each second tensor to the first.
  Work join(std::vector<Work> works, std::vector<std::pair<Tensor, Tensor>> copy_back);
  std::shared_ptr<Group> part(int color, std::span<const int> members);
  template <class Check>
  void checked(Operation operation, const CollectiveOptions& options, Check&& check);

  const std::string name_;
  const std::shared_ptr<Backend> backend_;
  const std::vector<int> ranks_;
  const int rank_;
  std::shared_ptr<CommTrace> trace_;
  std::vector<int64_t> sequences_;
  int64_t peer_calls_ = 0;
  int splits_ = 0;
  bool shut_down_ = false;
  // Failures: up to which call of the trace wait() has raised one, and the first that nobody saw.
  std::mutex failures_mutex_;
  int64_t raised_until_ = -1;
  std::string unseen_failure_;
  std::map<int64_t, std::string> failed_;  // calls under way that nobody has waited for, by number
};

// The world group of the current Context: one rank where nothing was initialized.
Group& world();
int rank();
int world_size();

}  // namespace tessera::distributed
