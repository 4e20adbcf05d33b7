#include <tessera/distributed/transport/group.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <map>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/distributed/transport/backend_one_device.h>
#include <tessera/distributed/transport/caller.h>
#include <tessera/distributed/transport/captured_calls.h>
#include <tessera/distributed/transport/group_request.h>
#include <tessera/distributed/transport/watchdog.h>

namespace tessera::distributed {
namespace {

using Clock = std::chrono::steady_clock;

// How long a call is waited for before one looks whether another one has failed meanwhile.
constexpr std::chrono::seconds kPatience{1};

// FNV-1a, the same on all machines.
uint32_t purpose_of(std::string_view tag) {
  uint32_t hash = 2166136261u;
  for (const char letter : tag) hash = (hash ^ static_cast<unsigned char>(letter)) * 16777619u;
  return hash;
}

void set_text(CallText& text, const std::string& value) {
  const size_t length = std::min(value.size(), text.size() - 1);
  std::memcpy(text.data(), value.data(), length);
  text[length] = 0;
}

std::string rank_list(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

// Here, as a context that nobody initialised is a world of one rank.
RankContext& rank_context() {
  RankContext& context = Context::current().slot<RankContext>();
  if (!context.world) [[unlikely]] {
    context.world = std::make_shared<Group>("world", nullptr, std::vector<int>{0}, context);
  }
  return context;
}

// ---- Work ---------------------------------------------------------------------------------------

struct Work::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::string error;  // empty: all is well. Text, not an exception that threads would share

  std::shared_ptr<Group> group;
  CommRecord record;
  int64_t number = 0;  // in the trace
  Clock::time_point issued;
  double timeout = 0;
  std::weak_ptr<void> carrier;  // for drive(), where the call said that it waits
  std::vector<Tensor> keep;
  std::vector<std::pair<Tensor, Tensor>> copy_back, add_back;
  std::function<void()> order;         // see Call::order
  std::shared_ptr<QueuedCall> queued;  // see Call::queued
  bool delivered = false;              // wait() has copied back
  bool mistaken = false;    // the caller has an error of its own, or does not want to know
  bool answered = false;    // someone waited, or the call was mistaken
  std::vector<Work> parts;  // of a coalesced call

  // Until the call has ended. False at the deadline, or where another call of this rank has failed
  // and this one makes no progress: `other` says which.
  bool wait_until(std::unique_lock<std::mutex>& lock, Clock::time_point deadline,
                  std::string* other);

  ~State() {
    if (group && !answered && !error.empty()) {
      group->note_unseen(record, number, error, delivered);
    }
    if (group && !error.empty()) group->forget_failed(number);
    if (queued && !delivered) let_go(*queued);
  }
  void finish(std::string failure) {
    bool known = false;
    {
      const std::lock_guard lock(mutex);
      if (done) return;
      done = true;
      error = failure;
      known = mistaken;
    }
    changed.notify_all();
    if (group && !known && !failure.empty()) group->note_failed(record, number, failure);
  }
};

bool Work::State::wait_until(std::unique_lock<std::mutex>& lock, Clock::time_point deadline,
                             std::string* other) {
  while (!done) {
    const auto now = Clock::now();
    if (now >= deadline) return false;
    const auto patience = std::min(deadline, now + kPatience);
    lock.unlock();
    if (const auto carried = carrier.lock()) group->backend().drive(carried, patience);
    lock.lock();
    if (changed.wait_until(lock, patience, [&] { return done; }) || patience == deadline) break;
    lock.unlock();
    *other = group->failed_besides(number);
    lock.lock();
    if (!done && !other->empty()) return false;
  }
  return done;
}

void Work::forget() {
  if (!state_) return;
  for (Work& part : state_->parts) part.forget();
  {
    const std::lock_guard lock(state_->mutex);
    state_->mistaken = state_->answered = true;
  }
  if (state_->group) state_->group->forget_failed(state_->number);
  state_.reset();
}

bool Work::completed() const {
  if (!state_) return true;
  for (const Work& part : state_->parts) {
    if (!part.completed()) return false;
  }
  const std::lock_guard lock(state_->mutex);
  return state_->done && (!state_->queued || !state_->error.empty() || has_ended(*state_->queued));
}

int64_t Work::sequence() const { return state_ ? state_->record.sequence : 0; }

void Work::wait() const {
  if (!state_) return;
  State& state = *state_;
  for (const Work& part : state.parts) part.wait();
  if (state.group) {
    RankContext& context = rank_context();
    if (!state.order) state.answered = true;
    CommTrace& trace = state.group->trace();
    const double begin = trace.seconds();
    const auto deadline =
        state.issued + std::chrono::duration_cast<Clock::duration>(
                           std::chrono::duration<double>(std::min(state.timeout, 1e9)));
    std::string error;
    {
      std::unique_lock lock(state.mutex);
      if (state.order) {
        // The stream waits, not the thread: what fails from now on is told by the next call.
        state.answered = state.done;
      } else if (std::string other; !state.wait_until(lock, deadline, &other)) {
        lock.unlock();
        const double waited = std::chrono::duration<double>(Clock::now() - state.issued).count();
        const std::string message = other.empty()
                                        ? state.group->late_ranks(state.record, waited)
                                        : "it has not come after another call failed: " + other;
        state.group->backend().fail(std::make_exception_ptr(DistributedError(message)));
        trace.finish(state.number, true, trace.seconds());
        state.finish(message);
        lock.lock();
      }
      error = state.error;
    }
    if (state.order && error.empty()) state.order();
    if (state.queued && error.empty()) wait_for(*state.queued);
    trace.waited(state.number, begin, trace.seconds());
    if (!error.empty()) {
      state.group->note_raised();
      if (!context.dump_directory.empty()) {
        const std::string path =
            context.dump_directory + "/comm-rank-" + std::to_string(context.rank) + ".json";
        if (FILE* file = std::fopen(path.c_str(), "w")) {
          const std::string text = trace.to_json(context.rank);
          std::fwrite(text.data(), 1, text.size(), file);
          std::fclose(file);
        }
      }
      throw DistributedError("rank " + std::to_string(context.rank) + ": " +
                             state.record.describe() + " of '" + state.record.group +
                             "': " + error);
    }
  }
  if (state.delivered) return;
  state.delivered = true;
  const NoGradGuard no_grad;
  for (const auto& [to, from] : state.copy_back) copy_(to, from);
  for (const auto& [to, from] : state.add_back) add_(to, from);
  state.copy_back.clear();
  state.add_back.clear();
  state.keep.clear();
}

// ---- Group --------------------------------------------------------------------------------------

namespace {

int own_position(const std::shared_ptr<Backend>& backend) { return backend ? backend->rank() : 0; }

}  // namespace

Group::Group(std::string name, std::shared_ptr<Backend> backend, std::vector<int> ranks,
             RankContext& context)
    : name_(std::move(name)),
      backend_(std::move(backend)),
      ranks_(std::move(ranks)),
      rank_(own_position(backend_)),
      trace_(context.trace),
      sequences_(kChannels) {
  TS_CHECK(!backend_ || backend_->size() == size(), "Group", "'", name_, "' lists ", ranks_.size(),
           " ranks for a backend of ", backend_ ? backend_->size() : 1);
  if (backend_) context.watch(backend_);
}

Group::~Group() = default;

Work Group::local(Request& request) {
  // One rank: what it sends is what it gets.
  for (size_t r = 0; r < std::min(request.sends.size(), request.receives.size()); ++r) {
    const Part &from = request.sends[r], &to = request.receives[r];
    if (from.data == nullptr || to.data == nullptr || from.data == to.data) continue;
    const auto bytes = static_cast<size_t>(from.bytes);
    if (const Device device = request.device(); device.is_cuda()) {
      gpu::copy_bytes(to.data, device, from.data, device, bytes);
    } else {
      std::memcpy(to.data, from.data, bytes);
    }
  }
  const NoGradGuard no_grad;
  for (const auto& [to, from] : request.copy_back) copy_(to, from);
  for (const auto& [to, from] : request.add_back) add_(to, from);
  return {};
}

Work Group::Issue::started() {
  state->order = std::move(call->order);
  state->carrier = call->carrier;
  state->queued = call->queued;
  return Work(std::move(state));
}

Work Group::start(Request request, const CollectiveOptions& options) {
  TS_CHECK_AS(DistributedError, !shut_down_, name_, "the group was shut down; no ",
              name_of(request.operation), " may follow");
  const TimelineRange range(name_of(request.operation));
  const bool peer_call = is_message(request.operation);
  if (size() == 1 && !peer_call && request.operation != Operation::kInvalid) return local(request);
  if (request.operation != Operation::kInvalid) raise_unseen(options);
  Issue one = issue(std::move(request), options);
  backend_->start(one.call);
  return one.started();
}

Group::Issue Group::issue(Request request, const CollectiveOptions& options) {
  const bool peer_call = is_message(request.operation);
  RankContext& context = rank_context();
  auto state = std::make_shared<Work::State>();
  CommRecord& record = state->record;
  record.group = name_;
  record.channel = options.channel;
  record.sequence = peer_call ? ++peer_calls_ : ++sequences_[static_cast<size_t>(options.channel)];
  record.operation = request.operation;
  record.reduce = request.reduce;
  record.onto = request.onto;
  record.dtype = request.dtype;
  record.count = request.count;
  record.bytes = request.bytes;
  record.root = request.root;
  record.group_size = size();
  record.tag = options.tag;
  record.phase = context.phase;
  record.file = options.where.file_name();
  record.line = static_cast<int>(options.where.line());
  std::string below;  // where in the library
  if (const SourceLocation& caller = CallerScope::current(); caller.line() != 0) {
    below = " (" + record.place() + ")";
    record.file = caller.file_name();
    record.line = static_cast<int>(caller.line());
  }
  record.queued = trace_->seconds();
  state->group = shared_from_this();
  state->issued = Clock::now();
  state->timeout =
      options.timeout_seconds > 0 ? options.timeout_seconds : context.timeouts.collective;
  const Device device = request.device();
  state->keep = std::move(request.keep);
  state->copy_back = std::move(request.copy_back);
  state->add_back = std::move(request.add_back);
  // Who made a mistake hears of it at once, and what the others say of it is no news.
  state->mistaken = request.operation == Operation::kInvalid || !request.mistake.empty();
  state->answered = state->mistaken;

  state->number = trace_->add(record);

  auto call = std::make_shared<Call>();
  call->header = {request.operation,      request.dtype, request.reduce,
                  context.reduction_mode, request.root,  request.count,
                  record.sequence,        request.onto,  purpose_of(options.tag)};
  call->channel = options.channel;
  call->tag = request.tag;
  call->waits = options.waits;
  call->device = device;
  call->timeout_seconds = state->timeout;
  call->sends = std::move(request.sends);
  call->receives = std::move(request.receives);
  call->refused = !request.mistake.empty();
  if (call->refused) {
    set_text(call->text, request.mistake);
  } else if (request.operation == Operation::kInvalid) {
    set_text(call->text, record.tag);
  } else {
    set_text(call->text, record.describe() + " at " + record.place() + below);
  }
  call->done = [state, trace = trace_, raw = call.get()](std::exception_ptr error) {
    std::string message;
    if (error) {
      try {
        std::rethrow_exception(error);
      } catch (const std::exception& failure) {
        message = failure.what();
      } catch (...) {
        message = "unknown failure";
      }
    }
    trace->finish(state->number, error != nullptr, raw->ended ? *raw->ended : trace->seconds());
    state->finish(std::move(message));
  };
  if (device.is_cuda() && gpu::Capture::current() != nullptr) note_captured(record, call);
  return {state, call};
}

// ---- Captured calls ----------------------------------------------------------------------------

namespace {
struct CapturedCallsSlot {
  CapturedCalls* calls = nullptr;
};
CapturedCalls*& captured_calls() { return Context::current().slot<CapturedCallsSlot>().calls; }
}  // namespace

CapturedCalls::Scope::Scope(CapturedCalls& calls) : scope_(captured_calls(), &calls) {}
CapturedCalls* CapturedCalls::current() { return captured_calls(); }

void Group::note_captured(const CommRecord& record, const CallPtr& call) {
  CapturedCalls* const calls = CapturedCalls::current();
  const Operation operation = record.operation;
  TS_CHECK_AS(UnsupportedError,
              calls != nullptr && !is_message(operation) && operation != Operation::kInvalid,
              "graph capture", record.describe(), " of '", name_,
              "' cannot be captured: ranks count their calls on the host; capture a training "
              "step by Accelerator::graphed_step(), or leave the call out of the graph");
  auto again = std::make_shared<Call>();
  again->header = call->header;
  again->channel = call->channel;
  again->text = call->text;
  again->device = call->device;
  again->timeout_seconds = call->timeout_seconds;
  again->done = [](const std::exception_ptr&) {};
  calls->calls_.push_back({shared_from_this(), record, std::move(again)});
}

void CapturedCalls::repeat() const {
  std::map<Group*, std::vector<CallPtr>> by_group;
  for (const One& one : calls_) {
    Group& group = *one.group;
    CommRecord record = one.record;
    record.sequence = ++group.sequences_[static_cast<size_t>(record.channel)];
    record.queued = group.trace_->seconds();
    group.trace_->finish(group.trace_->add(record), false, record.queued);
    auto call = std::make_shared<Call>(*one.call);
    call->header.sequence = record.sequence;
    by_group[&group].push_back(std::move(call));
  }
  for (const auto& [group, calls] : by_group) group->backend_->repeated(calls);
}

Work Group::join(std::vector<Work> works, std::vector<std::pair<Tensor, Tensor>> copy_back) {
  auto state = std::make_shared<Work::State>();
  state->done = true;  // beyond its parts
  state->parts = std::move(works);
  for (const auto& [tensor, part] : copy_back) tensor.bump_version();
  state->copy_back = std::move(copy_back);
  return Work(std::move(state));
}

std::string describe_mistake(std::string_view operation) {
  std::string text = std::string(operation) + " with a mistake";
  try {
    throw;
  } catch (const std::exception& error) {
    text += " (" + std::string(error.what()) + ")";
  } catch (...) {
  }
  return text;
}

// Tells the others that this rank has no call to make here, and rethrows why.
void Group::invalid(const CollectiveOptions& options, std::string_view operation) {
  const std::exception_ptr mistake = std::current_exception();
  if (size() > 1) {
    const std::string text = describe_mistake(operation);
    CollectiveOptions reason = options;
    reason.tag = text;
    reason.waits = false;
    start({.operation = Operation::kInvalid}, reason);
  }
  std::rethrow_exception(mistake);
}

// Of this rank, which nobody has heard of: ranks that have may never make the call that is waited
// for now.
void Group::note_failed(const CommRecord& record, int64_t number, const std::string& error) {
  const std::lock_guard lock(failures_mutex_);
  if (number > raised_until_) failed_[number] = record.describe() + ": " + error;
}

void Group::forget_failed(int64_t number) {
  const std::lock_guard lock(failures_mutex_);
  failed_.erase(number);
}

// The first of those but for `number`.
std::string Group::failed_besides(int64_t number) {
  const std::lock_guard lock(failures_mutex_);
  for (const auto& [other, text] : failed_) {
    if (other != number) return text;
  }
  return {};
}

// Any thread: the last of a Work may go where its transfer ended.
void Group::note_unseen(const CommRecord& record, int64_t number, const std::string& error,
                        bool waited) {
  const std::string text = record.describe() + " of '" + name_ + "' failed" +
                           (waited ? " on the GPU, after its stream was told to wait" : "") + ": " +
                           error;
  {
    const std::lock_guard lock(failures_mutex_);
    // After an error was raised the calls that were under way with it are let go, as they should.
    if (number <= raised_until_ || !unseen_failure_.empty()) return;
    unseen_failure_ = text;
  }
  std::fprintf(stderr, "tessera: nobody waited for a collective: %s\n", text.c_str());
}

void Group::note_raised() {
  const std::lock_guard lock(failures_mutex_);
  raised_until_ = trace_->next() - 1;
  unseen_failure_.clear();
  failed_.clear();
}

// The others, who may call what is right, learn why this rank does not.
void Group::raise_unseen(const CollectiveOptions& options) {
  std::string text;
  {
    const std::lock_guard lock(failures_mutex_);
    text = std::exchange(unseen_failure_, {});
    if (!text.empty()) raised_until_ = trace_->next() - 1;
  }
  if (text.empty()) return;
  CollectiveOptions reason = options;
  const std::string said = "a call after one that failed unseen (" + text + ")";
  reason.tag = said;
  if (options.channel != Channel::kPeer) start({.operation = Operation::kInvalid}, reason);
  TS_THROW(DistributedError, name_, "nobody waited for an earlier call, and ", text,
           "; wait for every Work");
}

std::string Group::late_ranks(const CommRecord& record, double waited) {
  std::string message = "waited " + describe_seconds(waited) + " at " + record.place();
  auto positions = backend_->positions(record.channel);
  std::vector<int> silent;  // came so far, but do not even answer: stopped, or cut off
  if (const auto& watchdog = rank_context().watchdog) {
    const auto answers = watchdog->ask(name_, record.channel, ranks_, Milliseconds(1000));
    if (positions.empty()) {
      positions = answers;
    } else {
      for (size_t r = 0; r < ranks_.size(); ++r) {
        if (!answers[r]) silent.push_back(ranks_[r]);
      }
    }
  }
  if (is_message(record.operation) && record.root >= 0) {  // whose place in a queue nobody knows
    const auto peer = static_cast<size_t>(record.root);
    const bool is_silent = rank_context().watchdog != nullptr && !positions[peer].has_value();
    return message + "; " + rank_list({&ranks_[peer], 1}) +
           (is_silent || std::ranges::find(silent, ranks_[peer]) != silent.end()
                ? " does not answer"
            : record.operation == Operation::kRecv ? " has sent nothing that fits"
                                                   : " has not received it");
  }
  std::vector<int> here;
  std::map<std::pair<int64_t, std::string>, std::vector<int>> elsewhere;
  std::vector<int> unknown;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (r >= positions.size() || !positions[r]) {
      unknown.push_back(ranks_[r]);
    } else if (positions[r]->sequence == record.sequence) {
      here.push_back(ranks_[r]);
    } else {
      elsewhere[{positions[r]->sequence, positions[r]->text}].push_back(ranks_[r]);
    }
  }
  const auto is = [](const std::vector<int>& ranks) { return ranks.size() == 1 ? " is" : " are"; };
  if (!here.empty()) {
    message += "; " + rank_list(here) + is(here) + " at #" + std::to_string(record.sequence);
  }
  for (const auto& [position, ranks] : elsewhere) {
    message += "; " + rank_list(ranks) + is(ranks) + " at #" + std::to_string(position.first);
    message += position.first == 0 ? " (nothing called yet)" : " (" + position.second + ")";
  }
  for (const std::vector<int>& ranks : {unknown, silent}) {
    if (ranks.empty()) continue;
    message += "; " + rank_list(ranks) + (ranks.size() == 1 ? " does" : " do") + " not answer";
  }
  return message;
}

void Group::barrier(const CollectiveOptions& options) {
  CollectiveOptions waiting = options;
  waiting.waits = true;
  start({.operation = Operation::kBarrier}, waiting).wait();
}

std::shared_ptr<Group> Group::split(int color, int key, const CollectiveOptions& options) {
  TS_CHECK_AS(
      UnsupportedError, backend_ == nullptr || backend_->moves_data(), name_,
      "split: the other ranks are not there and say no colour, so that all would be of this "
      "one's; list the members, by subgroup()");
  CollectiveOptions control = options;
  control.channel = Channel::kControl;
  control.tag = "split";
  const Tensor own = raw::empty({2}, kI64), all = raw::empty({2 * size()}, kI64);
  own.data_as<int64_t>()[0] = color;
  own.data_as<int64_t>()[1] = key;
  all_gather(all, own, control).wait();
  const int64_t* entries = all.data_as<int64_t>();
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    if (entries[2 * r] == color) members.push_back(r);
  }
  std::ranges::stable_sort(members, {}, [&](int r) { return entries[2 * r + 1]; });
  return part(color, members);
}

std::shared_ptr<Group> Group::part(int color, std::span<const int> members) {
  const std::string name =
      name_ + "/" + std::to_string(splits_++) + "." + std::to_string(std::max(color, 0));
  std::vector<int> world_ranks;
  for (const int member : members) world_ranks.push_back(ranks_[static_cast<size_t>(member)]);
  std::shared_ptr<Backend> backend;
  if (backend_) backend = backend_->split(color, members, name);
  if (color < 0) return nullptr;
  auto group = std::make_shared<Group>(name, std::move(backend), std::move(world_ranks));
  rank_context().parts.push_back(group);
  return group;
}

std::shared_ptr<Group> Group::subgroup(std::span<const int> ranks,
                                       const CollectiveOptions& options) {
  CollectiveOptions control = options;
  control.channel = Channel::kControl;
  control.tag = "subgroup";
  checked(Operation::kAllGather, control, [&] {
    std::vector<bool> listed(ranks_.size());
    for (const int rank : ranks) {
      check_rank(rank, "subgroup: a member");
      TS_CHECK(!listed[static_cast<size_t>(rank)], name_, "subgroup: rank ", rank,
               " is listed twice");
      listed[static_cast<size_t>(rank)] = true;
    }
    TS_CHECK(ranks.empty() || listed[static_cast<size_t>(rank_)], name_, "subgroup: rank ", rank_,
             " calls with a list that it is not in; give the list of its own group, or none");
  });
  const int color = ranks.empty() ? -1 : *std::ranges::min_element(ranks);
  if (backend_ && !backend_->moves_data()) return part(color, ranks);  // nobody to ask
  // Each rank's place in its group (-1: none) and the group's first rank, which names it.
  const Tensor own = raw::empty({size()}, kI64), all = raw::empty({size() * size()}, kI64);
  int64_t* places = own.data_as<int64_t>();
  std::fill_n(places, size(), -1);
  for (size_t i = 0; i < ranks.size(); ++i) places[ranks[i]] = static_cast<int64_t>(i);
  all_gather(all, own, control).wait();
  const int64_t* table = all.data_as<int64_t>();
  for (int r = 0; r < size(); ++r) {
    for (int other = 0; other < size(); ++other) {
      if (table[r * size() + other] < 0) continue;
      TS_CHECK_AS(DistributedError,
                  std::equal(table + r * size(), table + (r + 1) * size(), table + other * size()),
                  name_, "subgroup: ranks ", r, " and ", other,
                  " list different members for the group that both are in");
    }
  }
  return part(color, ranks);
}

bool Group::compares_calls() const {
  return backend_ != nullptr && backend_->moves_data() && !backend_->fingerprint();
}

void Group::tell(Channel channel, const std::string& reason) noexcept {
  if (size() == 1 || shut_down_) return;
  try {
    start({.operation = Operation::kInvalid}, {.channel = channel, .tag = reason});
  } catch (...) {  // no memory for it: the others learn when this rank ends
  }
}

void Group::abort(const std::string& reason) {
  if (!backend_) return;
  backend_->fail(std::make_exception_ptr(DistributedError("aborted: " + reason)));
}

void Group::shutdown() {
  if (shut_down_) return;
  if (backend_) {
    const double seconds = rank_context().timeouts.collective;
    try {
      barrier({.channel = Channel::kControl, .tag = "shutdown"});
    } catch (...) {
      shut_down_ = true;
      backend_->shutdown(std::chrono::milliseconds(0));
      throw;
    }
    const std::string report =
        backend_->shutdown(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
    // All ranks are here and nothing is under way: what stays behind costs memory, no results.
    if (!report.empty()) {
      std::fprintf(stderr, "tessera: %s was shut down, but %s\n", name_.c_str(), report.c_str());
    }
  }
  shut_down_ = true;
}

Group& world() { return *rank_context().world; }
int rank() { return rank_context().rank; }
int world_size() { return rank_context().world_size; }

}  // namespace tessera::distributed
