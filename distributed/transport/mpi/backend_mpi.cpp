// The mpi backend: ranks are processes. One thread of each makes all MPI calls and blocks in none
// of them (mpi/progress.h); every channel of a group has a communicator of its own, so that
// collectives of several channels and groups are under way together, and ranks may issue them in
// different orders.
#include <tessera/distributed/transport/backend.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <tuple>

#include <tessera/core/error.h>
#include <tessera/distributed/transport/mpi/native.h>

namespace tessera::distributed {
namespace {

using mpi::LanePtr;
using mpi::Progress;
using mpi::Ranks;
using mpi::Requests;
using mpi::Task;

// 4 MiB: at n = 2 against 1 MiB 8% faster at 4 and 16 MiB; the whole of 25 MiB at once leaves the
// caches and is 1.5 times slower (bench_collectives).
constexpr int64_t kChunkBytes = int64_t{4} << 20;

// What goes from rank to rank before a call: its header, what this rank will send to and takes from
// that one, and how many bytes come to it in any case.
struct Greeting {
  CallHeader header;
  int64_t sends = 0, receives = 0, early = 0;
};

// A channel of a group on this rank.
struct ChannelState {
  LanePtr lane;
  std::shared_ptr<Ranks> ranks;
  // On the progress thread: what the ranks said of the last call, sequence 0 where nothing has
  // come, and of the one before it.
  std::vector<Greeting> greetings, greetings_before;
};
using ChannelPtr = std::shared_ptr<ChannelState>;

std::string text_of(const CallHeader& header) {
  return detail::concatenate(name_of(header.operation), " #", header.sequence, " (", header.dtype,
                             "[", header.count < 0 ? "uneven" : std::to_string(header.count), "])");
}

// Every rank's word to every other: words[r] of rank r, words[rank] of this one.
template <class Word>
void start_words(const Ranks& ranks, std::span<Word> sent, std::span<Word> words,
                 Requests* requests) {
  const auto size = static_cast<size_t>(ranks.size), self = static_cast<size_t>(ranks.rank);
  std::vector<Part> sends(size), receives(size);
  for (size_t r = 0; r < size; ++r) {
    if (r == self) continue;
    const auto bytes = static_cast<int64_t>(sizeof(Word));
    sends[r] = {reinterpret_cast<char*>(&sent[sent.size() == 1 ? 0 : r]), bytes};
    receives[r] = {reinterpret_cast<char*>(&words[r]), bytes};
  }
  mpi::start_exchange(ranks, mpi::kHeaderTag, sends, receives, requests);
}

// The first pair of ranks that expect different sizes of each other, as this rank sees it.
std::string compare_sizes(const Call& call, std::span<const Greeting> mine,
                          std::span<const Greeting> theirs, int self) {
  for (int r = 0; r < static_cast<int>(mine.size()); ++r) {
    if (r == self) continue;
    const Greeting &here = mine[static_cast<size_t>(r)], &there = theirs[static_cast<size_t>(r)];
    const DType dtype = call.header.dtype;
    if (here.sends != there.receives) {
      return describe_sizes(self, here.sends, r, there.receives, dtype);
    }
    if (here.receives != there.sends) {
      return describe_sizes(r, there.sends, self, here.receives, dtype);
    }
  }
  return {};
}

// Ends when the headers of all ranks have come and are the same, and where sizes may differ, those
// of every pair. What a reduction (null: of another call) sends first travels beside its header,
// which saves a round; where the calls differ it is received and dropped.
Task verify(ChannelPtr channel, CallPtr call, mpi::Reduction* reduction) {
  const Ranks& ranks = *channel->ranks;
  const auto size = static_cast<size_t>(ranks.size), self = static_cast<size_t>(ranks.rank);
  const bool uneven = call->header.count < 0;
  std::vector<Greeting> mine(size, Greeting{call->header});
  std::vector<Greeting>& theirs = channel->greetings;
  channel->greetings_before.swap(theirs);
  theirs.assign(size, Greeting{});
  for (size_t r = 0; uneven && r < size; ++r) {
    const bool reduces = movement_of(call->header.operation) == Movement::kReduction;
    mine[r].sends = call->sends[r].bytes;
    mine[r].receives = reduces ? call->sends[self].bytes : call->receives[r].bytes;
  }
  std::vector<int64_t> early(size);
  if (reduction != nullptr) mpi::begin_reduction(ranks, reduction, early);
  for (size_t r = 0; r < size; ++r) mine[r].early = early[r];
  theirs[self] = mine[self];
  Requests requests;
  start_words<Greeting>(ranks, mine, theirs, &requests);
  co_await requests;

  std::vector<CallHeader> headers;
  for (const Greeting& greeting : theirs) headers.push_back(greeting.header);
  std::vector<CallText> texts;
  if (!agree(headers)) {
    texts.resize(size);
    std::vector<std::vector<char>> dropped(size);
    for (size_t r = 0; r < size; ++r) {
      if (r == self) continue;
      dropped[r].resize(static_cast<size_t>(theirs[r].early));
      mpi::start_receive(ranks, static_cast<int>(r), mpi::kPayloadTag,
                         {dropped[r].data(), theirs[r].early}, &requests);
    }
    co_await requests;
    if (reduction != nullptr) co_await reduction->sent;
    start_words<CallText>(ranks, {&call->text, 1}, texts, &requests);
    co_await requests;
    texts[self] = call->text;
    throw DistributedError(describe_mismatch(texts));
  }
  if (!uneven) co_return;
  texts.resize(size);
  // Only two ranks see that a size differs: they tell the others.
  CallText verdict{};
  const std::string difference = compare_sizes(*call, mine, theirs, ranks.rank);
  difference.copy(verdict.data(), verdict.size() - 1);
  start_words<CallText>(ranks, {&verdict, 1}, texts, &requests);
  co_await requests;
  texts[self] = verdict;
  for (const CallText& text : texts) {
    if (text[0] != 0) throw DistributedError(text.data());
  }
}

// What a sender says before its message, and the receiver's answer after it: empty, or why it could
// not take it.
struct Announcement {
  CallHeader header;
  CallText text;
  bool refused = false;
};

// A receiver learns from the announcement what comes; what does not fit is taken from the network
// all the same, so that the next message is found.
Task transfer(ChannelPtr channel, CallPtr call) {
  const Ranks& ranks = *channel->ranks;
  const int peer = call->header.root;
  const int first_tag = mpi::kFirstPeerTag + 3 * call->tag;
  const int payload_tag = first_tag + 1, answer_tag = first_tag + 2;
  Announcement theirs{call->header, call->text, call->refused};
  CallText answer{};
  const Part announcement{reinterpret_cast<char*>(&theirs), sizeof theirs};
  const Part answered{answer.data(), sizeof answer};
  Requests requests;
  if (call->header.operation == Operation::kSend) {
    mpi::start_send(ranks, peer, first_tag, announcement, &requests);
    if (!call->refused) {
      mpi::start_send(ranks, peer, payload_tag, call->sends[static_cast<size_t>(peer)], &requests);
    }
    mpi::start_receive(ranks, peer, answer_tag, answered, &requests);
    co_await requests;
    if (answer[0] != 0) throw DistributedError(answer.data());
    co_return;
  }
  mpi::start_receive(ranks, peer, first_tag, announcement, &requests);
  co_await requests;
  Call sent;
  sent.header = theirs.header;
  sent.text = theirs.text;
  sent.refused = theirs.refused;
  const bool fits = agree(sent, *call);
  std::string mismatch;
  Part part = call->receives[static_cast<size_t>(peer)];
  std::vector<char> refused;
  if (!fits) {
    mismatch = describe_mismatch(sent, *call);
    mismatch.copy(answer.data(), answer.size() - 1);
    refused.resize(static_cast<size_t>(sent.header.count * size_of(sent.header.dtype)));
    part = {refused.data(), static_cast<int64_t>(refused.size())};
  }
  if (!sent.refused) {
    mpi::start_receive(ranks, peer, payload_tag, part, &requests);
    co_await requests;
  }
  mpi::start_send(ranks, peer, answer_tag, answered, &requests);
  co_await requests;
  if (!fits) throw DistributedError(mismatch);
}

Task carry_out(ChannelPtr channel, CallPtr call) {
  const CallHeader& header = call->header;
  const OperationTraits& traits = traits_of(header.operation);
  if (traits.movement == Movement::kMessage) {
    co_await transfer(channel, call);
    co_return;
  }
  const auto self = static_cast<size_t>(channel->ranks->rank);
  if (traits.movement == Movement::kReduction) {
    mpi::Reduction reduction;
    reduction.pieces = call->sends;
    reduction.dtype = header.dtype;
    reduction.op = header.reduce;
    reduction.root = header.root;
    reduction.delivery = traits.delivery;
    if (traits.delivery == Delivery::kOwner) {
      reduction.output = call->receives[self].data;
      reduction.onto = header.onto;
    }
    const bool natively =
        header.mode == ReductionMode::kNative && reduces_well(*channel->ranks, reduction);
    co_await verify(channel, call, natively || header.count < 0 ? nullptr : &reduction);
    if (natively) {
      co_await reduce_natively(channel->ranks, std::move(reduction));
    } else {
      co_await reduce_in_rank_order(channel->ranks, std::move(reduction));
    }
    co_return;
  }
  co_await verify(channel, call, nullptr);
  switch (traits.movement) {
    case Movement::kBroadcast: {
      const auto root = static_cast<size_t>(header.root);
      Requests requests;
      mpi::start_broadcast(*channel->ranks, header.root,
                           root == self ? call->sends[root] : call->receives[root], &requests);
      co_await requests;
      break;
    }
    case Movement::kParts: {
      Requests requests;
      mpi::start_exchange(*channel->ranks, mpi::kPayloadTag, call->sends, call->receives,
                          &requests);
      co_await requests;
      break;
    }
    case Movement::kNothing:  // the header was all
    case Movement::kReduction:
    case Movement::kMessage:
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

// Reads what the channel's greetings say, on the thread to which they belong.
using Positions = std::vector<std::optional<Position>>;
Task read_positions(ChannelPtr channel, std::shared_ptr<Positions> positions) {
  positions->resize(static_cast<size_t>(channel->ranks->size));
  for (size_t r = 0; r < positions->size(); ++r) {
    for (const auto* greetings : {&channel->greetings, &channel->greetings_before}) {
      if ((*positions)[r] || r >= greetings->size()) continue;
      const CallHeader& header = (*greetings)[r].header;
      if (header.sequence > 0) (*positions)[r] = Position{header.sequence, text_of(header)};
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
    const bool is_peer = is_message(operation);
    const ChannelPtr& channel =
        channels_[static_cast<size_t>(is_peer ? Channel::kPeer : call->channel)];
    const auto carrier = std::make_shared<mpi::Operation>(
        [channel, call] { return carry_out(channel, call); },
        [call](std::exception_ptr error) { call->done(std::move(error)); });
    if (call->waits) call->carrier = carrier;
    progress_->submit(is_peer ? peer_lane(*call) : channel->lane, carrier, call->waits);
  }

  void drive(const std::shared_ptr<void>& carrier,
             std::chrono::steady_clock::time_point deadline) override {
    progress_->drive(*std::static_pointer_cast<mpi::Operation>(carrier), deadline);
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
    std::vector<LanePtr> peer_lanes;
    {
      const std::lock_guard lock(mutex_);
      if (!peer_failure_) peer_failure_ = error;
      for (const auto& [key, lane] : peer_lanes_) peer_lanes.push_back(lane);
    }
    for (const LanePtr& lane : peer_lanes) progress_->fail(lane, error);
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

  // Messages of one kind, peer and tag follow one another; all others pass each other.
  LanePtr peer_lane(const Call& call) {
    std::exception_ptr failure;
    LanePtr lane;
    {
      const std::lock_guard lock(mutex_);
      LanePtr& known = peer_lanes_[{call.header.operation, call.header.root, call.tag}];
      if (known) return known;
      lane = known = make_lane(static_cast<size_t>(Channel::kPeer), mpi::Lane::Order::kOneByOne);
      failure = peer_failure_;
    }
    if (failure) progress_->fail(lane, failure);
    return lane;
  }

  const std::shared_ptr<Progress> progress_;
  const int rank_, size_;
  const BackendOptions options_;
  const bool is_world_;
  std::array<ChannelPtr, kChannels> channels_;
  LanePtr query_lane_;
  std::mutex mutex_;
  std::map<std::tuple<Operation, int, int>, LanePtr> peer_lanes_;  // under mutex_
  std::exception_ptr peer_failure_;                                // under mutex_
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
