// The mpi backend: ranks are processes. One thread of each makes all MPI calls and blocks in none
// of them (mpi/progress.h); every channel of a group has a communicator of its own, so that
// collectives of several channels and groups are under way together, and ranks may issue them in
// different orders.
#include <tessera/distributed/backend.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>

#include <tessera/core/error.h>
#include <tessera/distributed/mpi/native.h>

namespace tessera::distributed {
namespace {

using mpi::Deliver;
using mpi::LanePtr;
using mpi::Progress;
using mpi::Ranks;
using mpi::Requests;
using mpi::Task;

// 4 MiB: at n = 2 against 1 MiB 8% faster at 4 and 16 MiB; the whole of 25 MiB at once leaves the
// caches and is 1.5 times slower (bench_collectives).
constexpr int64_t kChunkBytes = int64_t{4} << 20;

// A channel of a group on this rank.
struct ChannelState {
  LanePtr lane;
  std::shared_ptr<Ranks> ranks;
  // On the progress thread: headers of the last call, sequence 0 where none has come, and of the
  // one before it.
  std::vector<CallHeader> headers, headers_before;
};
using ChannelPtr = std::shared_ptr<ChannelState>;

std::string text_of(const CallHeader& header) {
  return detail::concatenate(name_of(header.operation), " #", header.sequence, " (", header.dtype,
                             "[", header.count, "])");
}

// Ends when the headers of all ranks have come and are the same.
Task verify(ChannelPtr channel, CallPtr call) {
  const Ranks& ranks = *channel->ranks;
  const auto size = static_cast<size_t>(ranks.size), self = static_cast<size_t>(ranks.rank);
  constexpr auto kBytes = static_cast<int64_t>(sizeof(CallHeader));
  std::vector<Part> sends(size, Part{reinterpret_cast<char*>(&call->header), kBytes});
  std::vector<Part> receives(size);
  channel->headers_before.swap(channel->headers);
  channel->headers.assign(size, CallHeader{});
  channel->headers[self] = call->header;
  for (size_t r = 0; r < size; ++r) {
    receives[r] = {reinterpret_cast<char*>(&channel->headers[r]), kBytes};
  }
  sends[self] = receives[self] = {};
  Requests requests;
  mpi::start_exchange(ranks, mpi::kHeaderTag, sends, receives, &requests);
  co_await requests;
  if (agree(channel->headers)) co_return;

  std::vector<CallText> texts(size);
  texts[self] = call->text;
  for (size_t r = 0; r < size; ++r) {
    sends[r] = {call->text.data(), sizeof(CallText)};
    receives[r] = {texts[r].data(), sizeof(CallText)};
  }
  sends[self] = receives[self] = {};
  mpi::start_exchange(ranks, mpi::kHeaderTag, sends, receives, &requests);
  co_await requests;
  throw DistributedError(describe_mismatch(texts));
}

// A receiver learns from the sender's header what comes; what does not fit is taken from the
// network all the same, so that the sender ends and the next message is found.
Task transfer(ChannelPtr channel, CallPtr call) {
  const Ranks& ranks = *channel->ranks;
  const int peer = call->header.root;
  TS_CHECK(call->tag >= 0 && call->tag < (1 << 29), name_of(call->header.operation),
           "a tag is in [0, 2^29); ", call->tag, " was given");
  const int header_tag = mpi::kFirstPeerTag + 2 * call->tag, payload_tag = header_tag + 1;
  CallHeader theirs = call->header;
  const Part header{reinterpret_cast<char*>(&theirs), sizeof theirs};
  Requests requests;
  if (call->header.operation == Operation::kSend) {
    mpi::start_send(ranks, peer, header_tag, header, &requests);
    mpi::start_send(ranks, peer, payload_tag, call->sends[static_cast<size_t>(peer)], &requests);
    co_await requests;
    co_return;
  }
  mpi::start_receive(ranks, peer, header_tag, header, &requests);
  co_await requests;
  Part part = call->receives[static_cast<size_t>(peer)];
  const CallHeader& mine = call->header;
  const bool fits = theirs.dtype == mine.dtype && theirs.count == mine.count;
  std::vector<char> refused;
  if (!fits) {
    refused.resize(static_cast<size_t>(theirs.count * size_of(theirs.dtype)));
    part = {refused.data(), static_cast<int64_t>(refused.size())};
  }
  mpi::start_receive(ranks, peer, payload_tag, part, &requests);
  co_await requests;
  TS_CHECK_AS(DistributedError, fits, "recv", "rank ", peer, " sent ", theirs.dtype, "[",
              theirs.count, "] with tag ", call->tag, ", and this rank receives ", mine.dtype, "[",
              mine.count, "]; send and recv must name the same dtype and number of elements");
}

Task carry_out(ChannelPtr channel, CallPtr call) {
  const CallHeader& header = call->header;
  if (header.operation == Operation::kSend || header.operation == Operation::kRecv) {
    co_await transfer(channel, call);
    co_return;
  }
  co_await verify(channel, call);
  const auto self = static_cast<size_t>(channel->ranks->rank);
  switch (header.operation) {
    case Operation::kAllReduce:
    case Operation::kReduce:
    case Operation::kReduceScatter: {
      mpi::Reduction reduction;
      reduction.pieces = call->sends;
      reduction.dtype = header.dtype;
      reduction.op = header.reduce;
      reduction.root = header.root;
      if (header.operation == Operation::kReduce) reduction.deliver = Deliver::kRoot;
      if (header.operation == Operation::kReduceScatter) {
        reduction.deliver = Deliver::kOwner;
        reduction.output = call->receives[self].data;
      }
      if (header.mode == ReductionMode::kNative && reduces_well(*channel->ranks, reduction)) {
        co_await reduce_natively(channel->ranks, std::move(reduction));
      } else {
        co_await reduce_in_rank_order(channel->ranks, std::move(reduction));
      }
      break;
    }
    case Operation::kBroadcast: {
      const auto root = static_cast<size_t>(header.root);
      Requests requests;
      mpi::start_broadcast(*channel->ranks, header.root,
                           root == self ? call->sends[root] : call->receives[root], &requests);
      co_await requests;
      break;
    }
    case Operation::kAllGather:
    case Operation::kAllToAll:
    case Operation::kGather:
    case Operation::kScatter: {
      Requests requests;
      mpi::start_exchange(*channel->ranks, mpi::kPayloadTag, call->sends, call->receives,
                          &requests);
      co_await requests;
      break;
    }
    default:  // barrier and invalid are their headers
      break;
  }
}

// For the caller of something that the progress thread does.
class Completion {
 public:
  void set(std::exception_ptr error) {
    std::lock_guard lock(mutex_);
    error_ = std::move(error);
    done_ = true;
    changed_.notify_all();
  }
  bool wait(double seconds) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return done_; });
  }
  void rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
  bool done_ = false;
};

// Runs `task` on the lane and waits for it; false where the time is over first.
bool run_on(Progress& progress, const LanePtr& lane, std::function<Task()> task, double seconds) {
  auto completion = std::make_shared<Completion>();
  progress.submit(lane, std::make_shared<mpi::Operation>(std::move(task),
                                                         [completion](std::exception_ptr error) {
                                                           completion->set(std::move(error));
                                                         }));
  if (!completion->wait(seconds)) return false;
  completion->rethrow();
  return true;
}

struct Communicators {
  std::array<MPI_Comm, kChannels> of_channel;
  bool member = false;
};

// Makes the communicators of a group of those ranks of `parent` that have this colour. All ranks
// of the parent meet first, so that MPI_Comm_split, which blocks, finds them all on their way.
Task make_communicators(MPI_Comm parent, int color, int key, std::shared_ptr<Communicators> made) {
  made->of_channel.fill(MPI_COMM_NULL);
  Requests requests;
  mpi::check(MPI_Ibarrier(parent, requests.add()), "MPI_Ibarrier");
  co_await requests;
  MPI_Comm first = MPI_COMM_NULL;
  mpi::check(MPI_Comm_split(parent, color < 0 ? MPI_UNDEFINED : color, key, &first),
             "MPI_Comm_split");
  if (first == MPI_COMM_NULL) co_return;
  made->member = true;
  made->of_channel[0] = first;
  for (size_t i = 1; i < made->of_channel.size(); ++i) {
    mpi::check(MPI_Comm_idup(first, &made->of_channel[i], requests.add()), "MPI_Comm_idup");
    co_await requests;
  }
  for (MPI_Comm communicator : made->of_channel) {
    mpi::check(MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
}

Task free_communicators(std::vector<MPI_Comm> communicators) {
  for (MPI_Comm& communicator : communicators) {
    mpi::check(MPI_Comm_free(&communicator), "MPI_Comm_free");
  }
  co_return;
}

// Reads what the channel's headers say, on the thread to which they belong.
using Positions = std::vector<std::optional<Position>>;
Task read_positions(ChannelPtr channel, std::shared_ptr<Positions> positions) {
  positions->resize(static_cast<size_t>(channel->ranks->size));
  for (size_t r = 0; r < positions->size(); ++r) {
    for (const auto* headers : {&channel->headers, &channel->headers_before}) {
      if ((*positions)[r] || r >= headers->size() || (*headers)[r].sequence == 0) continue;
      (*positions)[r] = Position{(*headers)[r].sequence, text_of((*headers)[r])};
    }
    if (!(*positions)[r]) (*positions)[r] = Position{};
  }
  co_return;
}

class MpiBackend : public Backend {
 public:
  MpiBackend(std::shared_ptr<Progress> progress, const Communicators& communicators, int rank,
             int size, const BackendOptions& options, bool is_world)
      : progress_(std::move(progress)),
        rank_(rank),
        size_(size),
        options_(options),
        is_world_(is_world) {
    for (size_t i = 0; i < channels_.size(); ++i) {
      Ranks ranks;
      ranks.communicator = communicators.of_channel[i];
      ranks.rank = rank;
      ranks.size = size;
      ranks.message_limit = options.message_limit;
      ranks.exchange_ranks = options.exchange_ranks;
      ranks.chunk_bytes = options.chunk_bytes > 0 ? options.chunk_bytes : kChunkBytes;
      channels_[i] = std::make_shared<ChannelState>();
      channels_[i]->ranks = std::make_shared<Ranks>(std::move(ranks));
      channels_[i]->lane = make_lane(i, mpi::Lane::Order::kOneByOne);
    }
    peer_lane_ = make_lane(static_cast<size_t>(Channel::kPeer), mpi::Lane::Order::kAtOnce);
    query_lane_ = std::make_shared<mpi::Lane>(MPI_COMM_NULL, mpi::Lane::Order::kAtOnce);
  }

  ~MpiBackend() override {
    // Not shut down: an exception passes, say. The thread ends; MPI is left as it is.
    if (is_world_) progress_->stop(0);
  }

  std::string_view name() const override { return "mpi"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool serves(const Device& device) const override { return device.is_cpu(); }

  void start(CallPtr call) override {
    const Operation operation = call->header.operation;
    const bool is_peer = operation == Operation::kSend || operation == Operation::kRecv;
    const ChannelPtr& channel =
        channels_[static_cast<size_t>(is_peer ? Channel::kPeer : call->channel)];
    progress_->submit(is_peer ? peer_lane_ : channel->lane,
                      std::make_shared<mpi::Operation>(
                          [channel, call] { return carry_out(channel, call); },
                          [call](std::exception_ptr error) { call->done(std::move(error)); }));
  }

  std::unique_ptr<Backend> split(int color, std::span<const int> members,
                                 const std::string& name) override {
    const auto self = std::find(members.begin(), members.end(), rank_);
    const int key = static_cast<int>(self - members.begin());
    const ChannelPtr& control = channels_[static_cast<size_t>(Channel::kControl)];
    auto made = std::make_shared<Communicators>();
    const bool in_time = run_on(
        *progress_, control->lane,
        [parent = control->ranks->communicator, color, key, made] {
          return make_communicators(parent, color, key, made);
        },
        options_.timeout_seconds);
    if (!in_time) {
      auto error = std::make_exception_ptr(DistributedError(detail::concatenate(
          "split: all ranks have to take part in making group '", name, "'; rank ", rank_,
          " waited ", options_.timeout_seconds, " s; see where the others are")));
      fail(error);
      std::rethrow_exception(error);
    }
    if (!made->member) return nullptr;
    return std::make_unique<MpiBackend>(progress_, *made, key, static_cast<int>(members.size()),
                                        options_, false);
  }

  void fail(std::exception_ptr error) override {
    for (const ChannelPtr& channel : channels_) progress_->fail(channel->lane, error);
    progress_->fail(peer_lane_, error);
    failed_ = true;
  }

  std::vector<std::optional<Position>> positions(Channel channel) override {
    auto positions = std::make_shared<Positions>();
    const ChannelPtr& state = channels_[static_cast<size_t>(channel)];
    const auto read = [state, positions] { return read_positions(state, positions); };
    // The thread answers at once, unless MPI holds it.
    return run_on(*progress_, query_lane_, read, 0.5) ? *positions : Positions{};
  }

  std::string shutdown(std::chrono::milliseconds timeout) override {
    const double seconds = std::chrono::duration<double>(timeout).count();
    if (is_world_) return progress_->stop(seconds);
    if (failed_.exchange(true)) return {};
    std::vector<MPI_Comm> communicators;
    for (const ChannelPtr& channel : channels_) {
      communicators.push_back(channel->ranks->communicator);
    }
    // In the order of the control channel: after what this rank has issued there.
    const ChannelPtr& control = channels_[static_cast<size_t>(Channel::kControl)];
    const bool in_time = run_on(
        *progress_, control->lane, [communicators] { return free_communicators(communicators); },
        seconds);
    fail(std::make_exception_ptr(DistributedError("the group has been shut down; make another")));
    return in_time ? "" : "its communicators could not be freed in time";
  }

 private:
  LanePtr make_lane(size_t channel, mpi::Lane::Order order) {
    return std::make_shared<mpi::Lane>(channels_[channel]->ranks->communicator, order);
  }

  const std::shared_ptr<Progress> progress_;
  const int rank_, size_;
  const BackendOptions options_;
  const bool is_world_;
  std::array<ChannelPtr, kChannels> channels_;
  LanePtr peer_lane_, query_lane_;
  std::atomic<bool> failed_{false};
};

}  // namespace

std::unique_ptr<Backend> make_mpi_backend(const BackendOptions& options) {
  TS_CHECK(options.message_limit > 0 && options.message_limit < (int64_t{1} << 31),
           "make_mpi_backend", "a message has 1 to 2^31 - 1 bytes, as MPI counts in int; limit ",
           options.message_limit, " was given");
  auto progress = Progress::start(options.timeout_seconds);
  auto world = std::make_shared<mpi::Lane>(MPI_COMM_WORLD, mpi::Lane::Order::kOneByOne);
  auto made = std::make_shared<Communicators>();
  const int rank = progress->rank(), size = progress->size();
  const bool in_time = run_on(
      *progress, world, [rank, made] { return make_communicators(MPI_COMM_WORLD, 0, rank, made); },
      options.timeout_seconds);
  if (!in_time) progress->stop(0);
  TS_CHECK_AS(DistributedError, in_time, "make_mpi_backend", "all ranks have to start; rank ", rank,
              " waited ", options.timeout_seconds, " s; see where the others are");
  return std::make_unique<MpiBackend>(std::move(progress), *made, rank, size, options, true);
}

}  // namespace tessera::distributed
