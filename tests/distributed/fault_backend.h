// A backend around another, for tests: it delays and loses a rank's calls, lets it read results
// that have not come, and makes time.
//
//     compared_ranks(2, body, {.decorate = with_faults()});
//     faults().before_start = [](const Call&) { sleep(); return true; };   // in the body
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// Time that tests make: what a rank computes adds to `now`, the calls of a channel follow one
// another and take `latency(call)` from when the last rank issued them, and waiting moves `now` to
// their end.
struct VirtualClock {
  double now = 0;
  std::function<double(const Call&)> latency;
};

// What is done to the calls of one rank, in all of its groups.
struct Faults {
  // Before the call goes on. False: it never does, and the others wait for it. May sleep.
  std::function<bool(const Call&)> before_start;
  // Hands the call on by `start`, under another current stream for example.
  std::function<void(const std::function<void()>& start)> around_start;
  // Waiting returns at once. Results of CPU tensors never come, those of a GPU when they will.
  bool skip_wait = false;
  std::shared_ptr<VirtualClock> clock;  // see use_clock()
};

// When the ranks' calls began and ended, by their virtual clocks. One for all ranks.
class VirtualNetwork {
 public:
  void issued(const std::string& group, const Call& call, double now, double latency) {
    const std::lock_guard lock(mutex_);
    Meeting& meeting = meetings_[key(group, call)];
    meeting.begin = std::max(meeting.begin, now);
    meeting.latency = latency;
  }
  double ended(const std::string& group, const Call& call) {
    const std::lock_guard lock(mutex_);
    Meeting& meeting = meetings_[key(group, call)];
    if (meeting.end < 0) {
      double& free_at = free_at_[{group, call.channel}];
      free_at = meeting.end = std::max(free_at, meeting.begin) + meeting.latency;
    }
    return meeting.end;
  }

 private:
  struct Meeting {
    double begin = 0, latency = 0, end = -1;
  };
  using Key = std::tuple<std::string, Channel, int64_t>;
  static Key key(const std::string& group, const Call& call) {
    return {group, call.channel, call.header.sequence};
  }
  std::mutex mutex_;
  std::map<Key, Meeting> meetings_;
  std::map<std::pair<std::string, Channel>, double> free_at_;
};

class FaultBackend final : public Backend {
 public:
  FaultBackend(std::string group, std::shared_ptr<Backend> inner, std::shared_ptr<Faults> faults,
               std::shared_ptr<VirtualNetwork> network)
      : group_(std::move(group)),
        inner_(std::move(inner)),
        faults_(std::move(faults)),
        network_(std::move(network)) {}

  Faults& faults() const { return *faults_; }

  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  bool serves(const Device& device) const override { return inner_->serves(device); }
  std::optional<uint64_t> fingerprint() const override { return inner_->fingerprint(); }
  bool moves_data() const override { return inner_->moves_data(); }
  void drive(const std::shared_ptr<void>& carrier,
             std::chrono::steady_clock::time_point deadline) override {
    inner_->drive(carrier, deadline);
  }
  std::unique_ptr<Backend> split(int color, std::span<const int> members,
                                 const std::string& name) override {
    std::unique_ptr<Backend> part = inner_->split(color, members, name);
    if (!part) return nullptr;
    return std::make_unique<FaultBackend>(name, std::move(part), faults_, network_);
  }
  void fail(std::exception_ptr error) override { inner_->fail(std::move(error)); }
  std::vector<std::optional<Position>> positions(Channel channel) override {
    return inner_->positions(channel);
  }
  std::string shutdown(std::chrono::milliseconds limit) override { return inner_->shutdown(limit); }

  void start(CallPtr call) override {
    if (may_go(*call)) go(call, [&] { inner_->start(call); });
  }
  void start_together(std::span<const CallPtr> calls) override {
    std::vector<CallPtr> going;
    for (const CallPtr& call : calls) {
      if (may_go(*call)) going.push_back(call);
    }
    if (!faults_->clock && !faults_->skip_wait) return inner_->start_together(going);
    for (const CallPtr& call : going) go(call, [&] { inner_->start(call); });
  }

 private:
  bool may_go(const Call& call) const {
    return !faults_->before_start || faults_->before_start(call);
  }

  void go(const CallPtr& call, const std::function<void()>& start) {
    const bool skips = faults_->skip_wait;
    if (skips && call->device.is_cpu()) return lose_result(call);
    if (faults_->clock) return go_on_clock(call, start);
    if (skips) call->waits = false;
    if (faults_->around_start) {
      faults_->around_start(start);
    } else {
      start();
    }
    if (skips && call->order) call->order = [] {};
  }

  // The others get what this rank sends; what it gets goes where nobody looks.
  void lose_result(const CallPtr& call) {
    auto other = std::make_shared<Call>(*call);
    auto memory = std::make_shared<std::vector<std::vector<char>>>();
    for (std::vector<Part>* parts : {&other->sends, &other->receives}) {
      for (Part& part : *parts) {
        if (part.data == nullptr) continue;
        memory->emplace_back(part.data, part.data + part.bytes);
        part.data = memory->back().data();
      }
    }
    other->waits = false;
    other->done = [memory](std::exception_ptr) {};
    inner_->start(other);
    call->done(nullptr);
  }

  void go_on_clock(const CallPtr& call, const std::function<void()>& start) {
    struct Arrival {
      std::mutex mutex;
      std::condition_variable changed;
      bool done = false;
      double end = 0;
    };
    const auto clock = faults_->clock;
    const auto arrival = std::make_shared<Arrival>();
    network_->issued(group_, *call, clock->now, clock->latency ? clock->latency(*call) : 0);
    call->waits = false;
    call->done = [=, group = group_, network = network_, raw = call.get(),
                  done = call->done](std::exception_ptr error) {
      const double end = network->ended(group, *raw);
      raw->ended = end;
      done(error);
      {
        const std::lock_guard lock(arrival->mutex);
        arrival->done = true;
        arrival->end = end;
      }
      arrival->changed.notify_all();
    };
    start();
    call->order = [clock, arrival] {
      std::unique_lock lock(arrival->mutex);
      arrival->changed.wait(lock, [&] { return arrival->done; });
      clock->now = std::max(clock->now, arrival->end);
    };
  }

  const std::string group_;
  const std::shared_ptr<Backend> inner_;
  const std::shared_ptr<Faults> faults_;
  const std::shared_ptr<VirtualNetwork> network_;
};

// For RunRanksOptions::decorate.
inline std::function<std::shared_ptr<Backend>(std::shared_ptr<Backend>)> with_faults() {
  return [network = std::make_shared<VirtualNetwork>()](std::shared_ptr<Backend> inner) {
    return std::make_shared<FaultBackend>("world", std::move(inner), std::make_shared<Faults>(),
                                          network);
  };
}

// Of this rank, whose world has them.
inline Faults& faults() { return dynamic_cast<FaultBackend&>(world().backend()).faults(); }

// This rank's calls, and the times of its trace, follow the clock; null: real time.
inline void use_clock(const std::shared_ptr<VirtualClock>& clock) {
  faults().clock = clock;
  std::function<double()> now;
  if (clock) now = [clock] { return clock->now; };
  rank_context().trace->set_clock(std::move(now));
}

}  // namespace tessera::distributed
