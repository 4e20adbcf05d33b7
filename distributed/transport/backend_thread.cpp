#include <tessera/distributed/transport/backend_thread.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>

#include <tessera/core/error.h>
#include <tessera/distributed/transport/backend_one_device.h>
#include <tessera/distributed/transport/deterministic.h>

namespace tessera::distributed {
namespace {

// Failures are kept as text and thrown anew for each call: an exception object that threads share
// is counted inside libstdc++, out of ThreadSanitizer's sight.
std::exception_ptr distributed_error(const std::string& message) {
  return message.empty() ? nullptr : std::make_exception_ptr(DistributedError(message));
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& failure) {
    return failure.what();
  } catch (...) {
    return "unknown failure";
  }
}

void copy_on_host(const Part& to, const Part& from) {
  std::memcpy(to.data, from.data, static_cast<size_t>(from.bytes));
}

// Of uneven calls: the first pair of ranks that expect different sizes of each other.
std::string compare_sizes(std::span<const CallPtr> calls) {
  const CallHeader& header = calls[0]->header;
  if (header.count >= 0) return {};
  const bool reduces = movement_of(header.operation) == Movement::kReduction;
  for (size_t from = 0; from < calls.size(); ++from) {
    for (size_t to = 0; to < calls.size(); ++to) {
      const int64_t sent = calls[from]->sends[to].bytes;
      const int64_t expected = (reduces ? calls[to]->sends[to] : calls[to]->receives[from]).bytes;
      if (sent == expected) continue;
      return describe_sizes(static_cast<int>(from), sent, static_cast<int>(to), expected,
                            header.dtype);
    }
  }
  return {};
}

// Every rank's side of one collective.
void carry_out(std::span<const CallPtr> calls, const CopyParts& copy, const ReduceParts& reduce) {
  const CallHeader& header = calls[0]->header;
  const size_t size = calls.size();
  const int64_t element = size_of(header.dtype);
  std::vector<const void*> inputs;
  const auto copy_part = [&](const Part& to, const Part& from) {
    if (from.bytes > 0 && to.data != from.data) copy(to, from);
  };
  const auto reduce_piece = [&](size_t piece, void* out) {
    const int64_t bytes = calls[0]->sends[piece].bytes;
    inputs.clear();
    if (header.onto && calls[0]->device.is_cpu()) inputs.push_back(out);  // see Call
    for (const CallPtr& call : calls) inputs.push_back(call->sends[piece].data);
    if (bytes > 0) reduce(inputs, out, bytes / element, header.dtype, header.reduce);
  };
  const OperationTraits& traits = traits_of(header.operation);
  switch (traits.movement) {
    case Movement::kReduction: {
      const auto root = static_cast<size_t>(std::max(header.root, 0));
      for (size_t piece = 0; piece < size; ++piece) {
        const bool owned = traits.delivery == Delivery::kOwner;
        const Part& result = owned ? calls[piece]->receives[piece] : calls[root]->sends[piece];
        reduce_piece(piece, result.data);
        if (traits.delivery != Delivery::kAll) continue;
        for (size_t r = 1; r < size; ++r) copy_part(calls[r]->sends[piece], result);
      }
      return;
    }
    case Movement::kBroadcast: {
      const auto root = static_cast<size_t>(header.root);
      for (size_t r = 0; r < size; ++r) {
        if (r != root) copy_part(calls[r]->receives[root], calls[root]->sends[root]);
      }
      return;
    }
    case Movement::kParts:
      for (size_t from = 0; from < size; ++from) {
        for (size_t to = 0; to < size; ++to) {
          copy_part(calls[to]->receives[from], calls[from]->sends[to]);
        }
      }
      return;
    case Movement::kMessage: {  // a send and its recv
      const auto to = static_cast<size_t>(calls[0]->header.root);
      const auto from = static_cast<size_t>(calls[1]->header.root);
      copy_part(calls[1]->receives[from], calls[0]->sends[to]);
      return;
    }
    case Movement::kNothing:
      return;
  }
}

}  // namespace

// The meeting place of one group.
class ThreadHub {
 public:
  ThreadHub(std::vector<int> world_ranks, const Device& device)
      : world_ranks_(std::move(world_ranks)), device_(device), positions_(kChannels) {
    for (auto& channel : positions_) channel.resize(world_ranks_.size());
  }

  int size() const { return static_cast<int>(world_ranks_.size()); }
  bool serves(const Device& device) const { return device.is_cpu() || device == device_; }

  void start(int rank, CallPtr call) {
    if (call->device.is_cuda()) note_queued(*call);
    const bool peer_call = is_message(call->header.operation);
    std::string error;
    std::vector<CallPtr> complete;
    {
      const std::lock_guard lock(mutex_);
      Position& position =
          positions_[static_cast<size_t>(call->channel)][static_cast<size_t>(rank)];
      position = {call->header.sequence, call->text.data()};
      error = broken_;
      if (error.empty()) {
        complete = peer_call ? match(rank, call, &error) : meet(rank, call, &error);
      }
    }
    if (!error.empty()) return call->done(distributed_error(error));
    if (complete.empty()) return;
    error = peer_call ? verify_peers(*complete[0], *complete[1]) : verify(complete);
    if (error.empty()) {
      try {
        transfer(complete);
      } catch (...) {
        error = message_of(std::current_exception());
      }
    }
    for (const CallPtr& side : complete) side->done(distributed_error(error));
  }

  void fail(const std::string& error) {
    std::vector<CallPtr> open;
    {
      const std::lock_guard lock(mutex_);
      if (broken_.empty()) broken_ = error;
      for (auto& [key, meeting] : meetings_) {
        for (CallPtr& call : meeting.calls) {
          if (call) open.push_back(std::move(call));
        }
      }
      meetings_.clear();
      for (auto& [key, queue] : waiting_) {
        for (CallPtr& call : queue) open.push_back(std::move(call));
      }
      waiting_.clear();
    }
    for (const CallPtr& call : open) call->done(distributed_error(error));
  }

  // A rank that failed breaks its groups. One that ended still owes nothing to the collectives that
  // it has joined and to those who receive what it has sent; other calls that need it cannot happen
  // any more. When all have ended, nothing can: open calls would keep their group and the hub.
  void leave(int world_rank, const std::string& message, bool failed) {
    const auto place = std::ranges::find(world_ranks_, world_rank);
    if (place == world_ranks_.end()) return;
    if (failed) return fail(message);
    const auto rank = static_cast<size_t>(place - world_ranks_.begin());
    std::vector<CallPtr> hopeless;
    {
      const std::lock_guard lock(mutex_);
      if (std::ranges::find(gone_, rank, &std::pair<size_t, std::string>::first) != gone_.end()) {
        return;
      }
      gone_.emplace_back(rank, message);
      const bool all = gone_.size() == world_ranks_.size();
      for (auto& [key, queue] : waiting_) {
        const auto& [from, to, tag, sends] = key;
        if (!all && static_cast<size_t>(sends ? to : from) != rank) continue;
        for (CallPtr& call : queue) hopeless.push_back(std::move(call));
        queue.clear();
      }
      for (auto meeting = meetings_.begin(); meeting != meetings_.end();) {
        if (!all && meeting->second.calls[rank]) {
          ++meeting;
          continue;
        }
        for (CallPtr& call : meeting->second.calls) {
          if (call) hopeless.push_back(std::move(call));
        }
        meeting = meetings_.erase(meeting);
      }
    }
    for (const CallPtr& call : hopeless) call->done(distributed_error(message));
  }

  std::vector<std::optional<Position>> positions(Channel channel) {
    const std::lock_guard lock(mutex_);
    const auto& known = positions_[static_cast<size_t>(channel)];
    return {known.begin(), known.end()};
  }

 private:
  struct Meeting {
    std::vector<CallPtr> calls;
    int arrived = 0;
  };

  std::vector<CallPtr> meet(int rank, const CallPtr& call, std::string* error) {
    const std::pair key(call->channel, call->header.sequence);
    Meeting& meeting = meetings_[key];
    meeting.calls.resize(world_ranks_.size());
    for (const auto& [other, message] : gone_) {
      if (meeting.calls[other]) continue;
      *error = message;
      return {};
    }
    meeting.calls[static_cast<size_t>(rank)] = call;
    if (++meeting.arrived < size()) return {};
    std::vector<CallPtr> complete = std::move(meeting.calls);
    meetings_.erase(key);
    return complete;
  }

  // {send, recv} of a pair, once both are there.
  std::vector<CallPtr> match(int rank, const CallPtr& call, std::string* error) {
    const bool sends = call->header.operation == Operation::kSend;
    const int from = sends ? rank : call->header.root, to = sends ? call->header.root : rank;
    std::deque<CallPtr>& others = waiting_[{from, to, call->tag, !sends}];
    if (others.empty()) {
      for (const auto& [other, message] : gone_) {
        if (other != static_cast<size_t>(call->header.root)) continue;
        *error = message;
        return {};
      }
      waiting_[{from, to, call->tag, sends}].push_back(call);
      return {};
    }
    const CallPtr other = others.front();
    others.pop_front();
    return sends ? std::vector{call, other} : std::vector{other, call};
  }

  static std::string verify(std::span<const CallPtr> calls) {
    std::vector<CallHeader> headers;
    std::vector<CallText> texts;
    for (const CallPtr& call : calls) {
      headers.push_back(call->header);
      texts.push_back(call->text);
    }
    return agree(headers) ? compare_sizes(calls) : describe_mismatch(texts);
  }
  static std::string verify_peers(const Call& send, const Call& recv) {
    return agree(send, recv) ? std::string() : describe_mismatch(send, recv);
  }

  // On the thread of whom came last.
  void transfer(std::span<const CallPtr> calls) {
    const Device& device = calls[0]->device;
    for (const CallPtr& call : calls) {
      TS_CHECK_DEVICE(call->device == device, calls[0]->text.data(),
                      "ranks gave tensors of different devices: ", device, " and ", call->device);
    }
    if (!device.is_cuda()) return carry_out(calls, copy_on_host, reduce_contributions);
    std::shared_ptr<gpu::StreamHandle> side;
    {
      const std::lock_guard lock(mutex_);
      auto& stream = streams_[static_cast<size_t>(calls[0]->channel)];
      if (!stream) stream = gpu::make_stream(device.index);
      side = stream;
    }
    queue_transfer(calls, side, [&](const CopyParts& copy, const ReduceParts& reduce) {
      carry_out(calls, copy, reduce);
    });
  }

  const std::vector<int> world_ranks_;
  const Device device_;  // that ranks share; kCpu: none
  std::mutex mutex_;
  std::string broken_;                                // why no call can succeed any more
  std::vector<std::pair<size_t, std::string>> gone_;  // ranks that ended, the first first
  std::map<std::pair<Channel, int64_t>, Meeting> meetings_;
  std::map<std::tuple<int, int, int, bool>, std::deque<CallPtr>> waiting_;
  std::vector<std::vector<Position>> positions_;  // [channel][rank]
  std::array<std::shared_ptr<gpu::StreamHandle>, kChannels> streams_;
};

struct ThreadJob::State {
  explicit State(const Device& device) : device(device) {}

  const Device device;
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<ThreadHub>> hubs;
  struct Leave {
    int rank;
    std::string message;
    bool failed;
  };
  std::vector<Leave> left;  // ranks that are gone, in that order

  std::shared_ptr<ThreadHub> hub(const std::string& name, const std::vector<int>& world_ranks) {
    std::shared_ptr<ThreadHub> hub;
    std::vector<Leave> gone;
    {
      const std::lock_guard lock(mutex);
      std::weak_ptr<ThreadHub>& slot = hubs[name];
      hub = slot.lock();
      if (!hub) slot = hub = std::make_shared<ThreadHub>(world_ranks, device);
      gone = left;
    }
    for (const Leave& leave : gone) hub->leave(leave.rank, leave.message, leave.failed);
    return hub;
  }
};

class ThreadBackend : public Backend {
 public:
  ThreadBackend(std::shared_ptr<ThreadJob::State> job, std::shared_ptr<ThreadHub> hub, int rank,
                std::vector<int> world_ranks)
      : job_(std::move(job)),
        hub_(std::move(hub)),
        rank_(rank),
        world_ranks_(std::move(world_ranks)) {}

  std::string_view name() const override { return "thread"; }
  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  bool serves(const Device& device) const override { return hub_->serves(device); }
  void start(CallPtr call) override { hub_->start(rank_, std::move(call)); }
  void fail(std::exception_ptr error) override { hub_->fail(message_of(error)); }
  std::vector<std::optional<Position>> positions(Channel channel) override {
    return hub_->positions(channel);
  }

  std::unique_ptr<Backend> split(int color, std::span<const int> members,
                                 const std::string& name) override {
    if (color < 0) return nullptr;
    std::vector<int> world_ranks;
    int rank = 0;
    for (size_t i = 0; i < members.size(); ++i) {
      world_ranks.push_back(world_ranks_[static_cast<size_t>(members[i])]);
      if (members[i] == rank_) rank = static_cast<int>(i);
    }
    return std::make_unique<ThreadBackend>(job_, job_->hub(name, world_ranks), rank, world_ranks);
  }

 private:
  const std::shared_ptr<ThreadJob::State> job_;
  const std::shared_ptr<ThreadHub> hub_;
  const int rank_;
  const std::vector<int> world_ranks_;
};

namespace {

std::vector<int> first_numbers(int size) {
  std::vector<int> numbers(static_cast<size_t>(size));
  for (int i = 0; i < size; ++i) numbers[static_cast<size_t>(i)] = i;
  return numbers;
}

}  // namespace

ThreadJob::ThreadJob(int size, const Device& device) : state_(std::make_shared<State>(device)) {
  world_ = state_->hub("world", first_numbers(size));
}
ThreadJob::~ThreadJob() = default;

std::unique_ptr<Backend> ThreadJob::backend(int rank) {
  return std::make_unique<ThreadBackend>(state_, world_, rank, first_numbers(world_->size()));
}

void ThreadJob::leave(int rank, const std::string& message, bool failed) {
  std::vector<std::shared_ptr<ThreadHub>> hubs;
  {
    const std::lock_guard lock(state_->mutex);
    state_->left.push_back({rank, message, failed});
    for (const auto& [name, known] : state_->hubs) {
      if (auto hub = known.lock()) hubs.push_back(std::move(hub));
    }
  }
  for (const auto& hub : hubs) hub->leave(rank, message, failed);
}

}  // namespace tessera::distributed
