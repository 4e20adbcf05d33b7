#include <tessera/distributed/transport/group.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/backend.h>
#include <tessera/core/factory.h>
#include <tessera/core/profiler.h>
#include <tessera/distributed/transport/deterministic.h>
#include <tessera/distributed/transport/watchdog.h>

namespace tessera::distributed {
namespace {

using Clock = std::chrono::steady_clock;

Part part_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.is_meta() ? nullptr : static_cast<char*>(tensor.data()), tensor.nbytes()};
}

uint64_t hash_of(const std::source_location& where) {
  uint64_t hash = 1469598103934665603u;  // FNV-1a
  for (const char* c = where.file_name(); *c != 0; ++c) {
    hash = (hash ^ static_cast<unsigned char>(*c)) * 1099511628211u;
  }
  return (hash ^ where.line()) * 1099511628211u;
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

namespace {

// Memory that a collective writes. It is asked for on the stream that reads it later, as freed
// memory goes to what its own stream does next.
Tensor result_buffer(const Tensor& like) {
  std::optional<gpu::CurrentStream> elsewhere;
  RankContext& context = rank_context();
  if (context.mutation == Mutation::kOtherStream) [[unlikely]]
    elsewhere.emplace(context.other_stream);
  return raw::empty(like.shape(), like.dtype(), like.device());
}

}  // namespace

// What start() needs to know of a call, whatever it is.
struct Group::Request {
  Operation operation;
  DType dtype = DType::kUInt8;
  ReduceOp reduce = ReduceOp::kSum;
  int root = -1;
  int tag = 0;
  int64_t count = 0;  // -1: differs between ranks
  int64_t bytes = 0;
  std::string mistake = {};  // of a send or recv whose peer is to be told
  std::vector<Part> sends = {}, receives = {};
  // Tensors whose memory the transport uses, and where results go that it cannot write directly.
  std::vector<Tensor> keep = {};
  std::vector<std::pair<Tensor, Tensor>> copy_back = {};  // to, from

  Device device() const { return keep.empty() ? kCpu : keep.front().device(); }
  // A contiguous tensor that the transport reads.
  Tensor input(const Tensor& tensor) {
    keep.push_back(contiguous(detach(tensor)));
    return keep.back();
  }
  // One that it writes (and reads, where in_place).
  Tensor output(const Tensor& tensor, bool in_place = false) {
    tensor.bump_version();
    if (tensor.is_contiguous()) {
      keep.push_back(tensor);
      return tensor;
    }
    const Tensor buffer = in_place ? contiguous(detach(tensor)) : result_buffer(tensor);
    keep.push_back(buffer);
    copy_back.emplace_back(detach(tensor), buffer);
    return buffer;
  }
};

// ---- Work ---------------------------------------------------------------------------------------

struct Work::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::string error;  // empty: all is well. Text, not an exception that threads would share
  double virtual_done = 0;

  std::shared_ptr<Group> group;
  CommRecord record;
  int64_t number = 0;  // in the trace
  Clock::time_point issued;
  double timeout = 0;
  std::weak_ptr<void> carrier;  // for drive(), where the call said that it waits
  std::vector<Tensor> keep;
  std::vector<std::pair<Tensor, Tensor>> copy_back;
  std::function<void()> order;  // see Call::order
  bool delivered = false;       // wait() has copied back
  bool answered = false;        // someone waited, or the caller has an error of its own
  std::vector<Work> parts;      // of a coalesced call

  ~State() {
    if (group && !answered && !error.empty()) {
      group->note_unseen(record, number, error, delivered);
    }
  }
  void finish(std::string failure, double end_on_clock) {
    {
      const std::lock_guard lock(mutex);
      if (done) return;
      done = true;
      error = std::move(failure);
      virtual_done = end_on_clock;
    }
    changed.notify_all();
  }
};

bool Work::completed() const {
  if (!state_) return true;
  for (const Work& part : state_->parts) {
    if (!part.completed()) return false;
  }
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

int64_t Work::sequence() const { return state_ ? state_->record.sequence : 0; }

void Work::wait() const {
  if (!state_) return;
  State& state = *state_;
  for (const Work& part : state.parts) part.wait();
  if (state.group) {
    RankContext& context = rank_context();
    if (!state.order) state.answered = true;
    if (context.mutation == Mutation::kSkipWait) return;
    if (context.hooks.before_wait) context.hooks.before_wait(state.record);
    CommTrace& trace = state.group->trace();
    const double begin = context.clock ? context.clock->now : trace.seconds();
    const auto deadline =
        state.issued + std::chrono::duration_cast<Clock::duration>(
                           std::chrono::duration<double>(std::min(state.timeout, 1e9)));
    if (const auto carrier = state.carrier.lock()) state.group->backend().drive(carrier, deadline);
    std::string error;
    {
      std::unique_lock lock(state.mutex);
      const auto ended = [&] { return state.done; };
      if (state.order) {
        // The stream waits, not the thread: what fails from now on is told by the next call.
        state.answered = state.done;
      } else if (!state.changed.wait_until(lock, deadline, ended)) {
        lock.unlock();
        const double waited = std::chrono::duration<double>(Clock::now() - state.issued).count();
        const std::string message = state.group->late_ranks(state.record, waited);
        state.group->backend().fail(std::make_exception_ptr(DistributedError(message)));
        trace.finish(state.number, true, trace.seconds());
        state.finish(message, 0);
        lock.lock();
      }
      error = state.error;
      if (context.clock) context.clock->now = std::max(context.clock->now, state.virtual_done);
    }
    trace.waited(state.number, begin, context.clock ? context.clock->now : trace.seconds());
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
    if (state.order) state.order();
    if (context.hooks.after_wait) context.hooks.after_wait(state.record);
  }
  if (state.delivered) return;
  state.delivered = true;
  const NoGradGuard no_grad;
  for (const auto& [to, from] : state.copy_back) copy_(to, from);
  state.copy_back.clear();
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
  return {};
}

// A call that the backend is about to get; none where a hook holds it back.
struct Group::Issue {
  std::shared_ptr<Work::State> state;
  CallPtr call;

  Work started() {
    if (call) {
      state->order = std::move(call->order);
      state->carrier = call->carrier;
    }
    return Work(std::move(state));
  }
};

Work Group::start(Request request, const CollectiveOptions& options) {
  TS_CHECK_AS(DistributedError, !shut_down_, name_, "the group was shut down; no ",
              name_of(request.operation), " may follow");
  const TimelineRange range(name_of(request.operation));
  const bool peer_call =
      request.operation == Operation::kSend || request.operation == Operation::kRecv;
  if (size() == 1 && !peer_call && request.operation != Operation::kInvalid) return local(request);
  if (request.operation != Operation::kInvalid) raise_unseen(options);
  Issue one = issue(std::move(request), options);
  if (one.call) backend_->start(one.call);
  return one.started();
}

Group::Issue Group::issue(Request request, const CollectiveOptions& options) {
  const bool peer_call =
      request.operation == Operation::kSend || request.operation == Operation::kRecv;
  RankContext& context = rank_context();
  auto state = std::make_shared<Work::State>();
  CommRecord& record = state->record;
  record.group = name_;
  record.channel = options.channel;
  record.sequence = peer_call ? ++peer_calls_ : ++sequences_[static_cast<size_t>(options.channel)];
  record.operation = request.operation;
  record.reduce = request.reduce;
  record.dtype = request.dtype;
  record.count = request.count;
  record.bytes = request.bytes;
  record.root = request.root;
  record.group_size = size();
  record.tag = options.tag;
  record.phase = context.phase;
  record.file = options.where.file_name();
  record.line = static_cast<int>(options.where.line());
  record.queued = context.clock ? context.clock->now : trace_->seconds();
  state->group = shared_from_this();
  state->issued = Clock::now();
  state->timeout =
      options.timeout_seconds > 0 ? options.timeout_seconds : context.timeouts.collective;
  const Device device = request.device();
  state->keep = std::move(request.keep);
  state->copy_back = std::move(request.copy_back);
  // Who made a mistake hears of it at once, and what the others say of it is no news.
  state->answered = request.operation == Operation::kInvalid || !request.mistake.empty();

  const bool issue = !context.hooks.before_issue || context.hooks.before_issue(record);
  state->number = trace_->add(record);
  if (!issue) return {state, nullptr};

  auto call = std::make_shared<Call>();
  call->header = {request.operation, request.dtype, request.reduce,  context.reduction_mode,
                  request.root,      request.count, record.sequence, hash_of(options.where)};
  call->channel = options.channel;
  call->tag = request.tag;
  // Hooks may keep the caller from coming.
  call->waits = options.waits && !context.hooks.before_wait && context.mutation == Mutation::kNone;
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
    set_text(call->text, record.describe() + " at " + record.place());
  }
  if (context.clock) {
    call->virtual_issued = context.clock->now;
    if (context.clock->latency) call->latency = context.clock->latency(record);
  }
  call->done = [state, trace = trace_, virtual_time = context.clock != nullptr,
                raw = call.get()](std::exception_ptr error) {
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
    trace->finish(state->number, error != nullptr,
                  virtual_time ? raw->virtual_done : trace->seconds());
    state->finish(std::move(message), raw->virtual_done);
  };
  return {state, call};
}

Work Group::join(std::vector<Work> works, std::vector<std::pair<Tensor, Tensor>> copy_back) {
  auto state = std::make_shared<Work::State>();
  state->done = true;  // beyond its parts
  state->parts = std::move(works);
  for (const auto& [tensor, part] : copy_back) tensor.bump_version();
  state->copy_back = std::move(copy_back);
  return Work(std::move(state));
}

namespace {

// "all_reduce with a mistake (what is wrong)", of the exception that is being handled.
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

}  // namespace

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

template <class Check>
void Group::checked(Operation operation, const CollectiveOptions& options, Check&& check) {
  try {
    check();
  } catch (...) {
    invalid(options, name_of(operation));
  }
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
  std::string message = "waited " + describe_seconds(waited);
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

void Group::check_rank(int rank, std::string_view what) const {
  TS_CHECK(rank >= 0 && rank < size(), name_, what, " is rank ", rank,
           "; the group has ranks 0 to ", size() - 1);
}

// What a rank sends to itself.
void Group::check_own(std::span<const Tensor> parts, const Tensor& other, std::string_view where,
                      std::string_view part_name, std::string_view other_name) const {
  const Tensor& own = parts[static_cast<size_t>(rank_)];
  TS_CHECK_SHAPE(own.numel() == other.numel(), where, "the ", part_name, " for rank ", rank_,
                 " itself is ", own, " and its ", other_name, " ", other,
                 "; they need the same number of elements");
}

// Of one contiguous buffer, the piece that each rank sums.
std::vector<Part> Group::cut(const Tensor& flat) const {
  const Part all = part_of(flat);
  const int64_t element = size_of(flat.dtype());
  const int64_t step = (flat.numel() + size() - 1) / size() * element;
  std::vector<Part> parts(ranks_.size());
  for (size_t r = 0; r < parts.size(); ++r) {
    const int64_t begin = std::min(static_cast<int64_t>(r) * step, all.bytes);
    parts[r] = {all.data == nullptr ? nullptr : all.data + begin,
                std::min(step, all.bytes - begin)};
  }
  return parts;
}

namespace {

// One device and one dtype, which the group can carry.
void check_tensors(std::span<const Tensor> tensors, const Tensor& model, Backend* backend,
                   std::string_view where) {
  for (const Tensor& tensor : tensors) {
    TS_CHECK_DTYPE(tensor.dtype() == model.dtype(), where, "tensors of one call have one dtype; ",
                   model, " and ", tensor);
    TS_CHECK_DEVICE(tensor.device() == model.device(), where,
                    "tensors of one call are on one device; ", model, " and ", tensor);
  }
  TS_CHECK_DEVICE(!backend || backend->serves(model.device()), where, "the ", backend->name(),
                  " backend does not carry tensors of ", model.device(), "; given ", model);
}

}  // namespace

Work Group::all_reduce(const Tensor& tensor, ReduceOp op, const CollectiveOptions& options) {
  Request request{.operation = Operation::kAllReduce, .reduce = op};
  checked(request.operation, options, [&] {
    check_tensors({&tensor, 1}, tensor, backend_.get(), "all_reduce");
    check_reduction(tensor.dtype(), op, "all_reduce");
  });
  request.dtype = tensor.dtype();
  request.count = tensor.numel();
  request.bytes = tensor.nbytes();
  const NoGradGuard no_grad;
  request.sends = cut(request.output(tensor, true));
  return start(std::move(request), options);
}

Work Group::reduce(const Tensor& tensor, int root, ReduceOp op, const CollectiveOptions& options) {
  Request request{.operation = Operation::kReduce, .reduce = op, .root = root};
  checked(request.operation, options, [&] {
    check_tensors({&tensor, 1}, tensor, backend_.get(), "reduce");
    check_reduction(tensor.dtype(), op, "reduce");
    check_rank(root, "reduce: root");
  });
  request.dtype = tensor.dtype();
  request.count = tensor.numel();
  request.bytes = tensor.nbytes();
  const NoGradGuard no_grad;
  request.sends = cut(request.output(tensor, true));
  return start(std::move(request), options);
}

Work Group::broadcast(const Tensor& tensor, int root, const CollectiveOptions& options) {
  Request request{.operation = Operation::kBroadcast, .root = root};
  checked(request.operation, options, [&] {
    check_tensors({&tensor, 1}, tensor, backend_.get(), "broadcast");
    check_rank(root, "broadcast: root");
  });
  request.dtype = tensor.dtype();
  request.count = tensor.numel();
  request.bytes = tensor.nbytes();
  request.sends.resize(ranks_.size());
  request.receives.resize(ranks_.size());
  const NoGradGuard no_grad;
  if (rank_ == root) {
    request.sends[static_cast<size_t>(root)] = part_of(request.input(tensor));
  } else {
    request.receives[static_cast<size_t>(root)] = part_of(request.output(tensor));
  }
  return start(std::move(request), options);
}

namespace {

void check_parts(const Tensor& whole, const Tensor& part, int ranks, std::string_view where,
                 std::string_view whole_name, std::string_view part_name) {
  TS_CHECK_SHAPE(whole.numel() == part.numel() * ranks, where, whole_name, " must have ", ranks,
                 " times the elements of ", part_name, "; given ", whole, " and ", part);
}

std::vector<Part> even_parts(const Tensor& flat, size_t ranks) {
  std::vector<Part> parts(ranks);
  const Part all = part_of(flat);
  const int64_t step = all.bytes / static_cast<int64_t>(ranks);
  for (size_t r = 0; r < ranks; ++r) {
    parts[r] = {all.data == nullptr ? nullptr : all.data + static_cast<int64_t>(r) * step, step};
  }
  return parts;
}

}  // namespace

Work Group::all_gather(const Tensor& output, const Tensor& input,
                       const CollectiveOptions& options) {
  Request request{.operation = Operation::kAllGather};
  checked(request.operation, options, [&] {
    check_tensors({&output, 1}, input, backend_.get(), "all_gather");
    check_parts(output, input, size(), "all_gather", "output", "input");
  });
  request.dtype = input.dtype();
  request.count = input.numel();
  request.bytes = input.nbytes();
  const NoGradGuard no_grad;
  request.sends.assign(ranks_.size(), part_of(request.input(input)));
  request.receives = even_parts(request.output(output), ranks_.size());
  return start(std::move(request), options);
}

Work Group::all_gather(std::span<const Tensor> outputs, const Tensor& input,
                       const CollectiveOptions& options) {
  Request request{.operation = Operation::kAllGather, .count = -1};
  checked(request.operation, options, [&] {
    TS_CHECK(std::ssize(outputs) == size(), "all_gather", "needs an output for each of ", size(),
             " ranks; given ", outputs.size());
    check_tensors(outputs, input, backend_.get(), "all_gather");
    check_own(outputs, input, "all_gather", "output", "input");
  });
  request.dtype = input.dtype();
  request.bytes = input.nbytes();
  const NoGradGuard no_grad;
  request.sends.assign(ranks_.size(), part_of(request.input(input)));
  for (const Tensor& output : outputs) {
    request.receives.push_back(part_of(request.output(output)));
  }
  return start(std::move(request), options);
}

Work Group::reduce_scatter(const Tensor& output, const Tensor& input, ReduceOp op,
                           const CollectiveOptions& options) {
  Request request{.operation = Operation::kReduceScatter, .reduce = op};
  checked(request.operation, options, [&] {
    check_tensors({&output, 1}, input, backend_.get(), "reduce_scatter");
    check_reduction(input.dtype(), op, "reduce_scatter");
    check_parts(input, output, size(), "reduce_scatter", "input", "output");
  });
  request.dtype = input.dtype();
  request.count = input.numel();
  request.bytes = output.nbytes();
  const NoGradGuard no_grad;
  request.sends = even_parts(request.input(input), ranks_.size());
  request.receives.resize(ranks_.size());
  request.receives[static_cast<size_t>(rank_)] = part_of(request.output(output));
  return start(std::move(request), options);
}

Work Group::reduce_scatter(const Tensor& output, std::span<const Tensor> inputs, ReduceOp op,
                           const CollectiveOptions& options) {
  Request request{.operation = Operation::kReduceScatter, .reduce = op, .count = -1};
  checked(request.operation, options, [&] {
    TS_CHECK(std::ssize(inputs) == size(), "reduce_scatter", "needs an input for each of ", size(),
             " ranks; given ", inputs.size());
    check_tensors(inputs, output, backend_.get(), "reduce_scatter");
    check_reduction(output.dtype(), op, "reduce_scatter");
    check_own(inputs, output, "reduce_scatter", "input", "output");
  });
  request.dtype = output.dtype();
  request.bytes = output.nbytes();
  const NoGradGuard no_grad;
  for (const Tensor& input : inputs) request.sends.push_back(part_of(request.input(input)));
  request.receives.resize(ranks_.size());
  request.receives[static_cast<size_t>(rank_)] = part_of(request.output(output));
  return start(std::move(request), options);
}

Work Group::all_to_all(std::span<const Tensor> outputs, std::span<const Tensor> inputs,
                       const CollectiveOptions& options) {
  Request request{.operation = Operation::kAllToAll, .count = -1};
  checked(request.operation, options, [&] {
    TS_CHECK(std::ssize(outputs) == size() && std::ssize(inputs) == size(), "all_to_all",
             "needs an input and an output for each of ", size(), " ranks; given ", inputs.size(),
             " and ", outputs.size());
    check_tensors(inputs, inputs[0], backend_.get(), "all_to_all");
    check_tensors(outputs, inputs[0], backend_.get(), "all_to_all");
    check_own(outputs, inputs[static_cast<size_t>(rank_)], "all_to_all", "output", "input");
  });
  request.dtype = inputs[0].dtype();
  const NoGradGuard no_grad;
  for (const Tensor& input : inputs) {
    request.sends.push_back(part_of(request.input(input)));
    request.bytes += input.nbytes();
  }
  for (const Tensor& output : outputs) {
    request.receives.push_back(part_of(request.output(output)));
  }
  return start(std::move(request), options);
}

Work Group::gather(std::span<const Tensor> outputs, const Tensor& input, int root,
                   const CollectiveOptions& options) {
  Request request{.operation = Operation::kGather, .root = root, .count = -1};
  checked(request.operation, options, [&] {
    check_rank(root, "gather: root");
    TS_CHECK(std::ssize(outputs) == (rank_ == root ? size() : 0), "gather",
             "needs an output for each of ", size(), " ranks at root ", root,
             " and none elsewhere; rank ", rank_, " gives ", outputs.size());
    check_tensors(outputs, input, backend_.get(), "gather");
    if (rank_ == root) check_own(outputs, input, "gather", "output", "input");
  });
  request.dtype = input.dtype();
  request.bytes = input.nbytes();
  request.sends.resize(ranks_.size());
  request.receives.resize(ranks_.size());
  const NoGradGuard no_grad;
  request.sends[static_cast<size_t>(root)] = part_of(request.input(input));
  for (size_t r = 0; r < outputs.size(); ++r) {
    request.receives[r] = part_of(request.output(outputs[r]));
  }
  return start(std::move(request), options);
}

Work Group::scatter(const Tensor& output, std::span<const Tensor> inputs, int root,
                    const CollectiveOptions& options) {
  Request request{.operation = Operation::kScatter, .root = root, .count = -1};
  checked(request.operation, options, [&] {
    check_rank(root, "scatter: root");
    TS_CHECK(std::ssize(inputs) == (rank_ == root ? size() : 0), "scatter",
             "needs an input for each of ", size(), " ranks at root ", root,
             " and none elsewhere; rank ", rank_, " gives ", inputs.size());
    check_tensors(inputs, output, backend_.get(), "scatter");
    if (rank_ == root) check_own(inputs, output, "scatter", "input", "output");
  });
  request.dtype = output.dtype();
  request.bytes = output.nbytes();
  request.sends.resize(ranks_.size());
  request.receives.resize(ranks_.size());
  const NoGradGuard no_grad;
  for (size_t r = 0; r < inputs.size(); ++r) {
    request.sends[r] = part_of(request.input(inputs[r]));
  }
  request.receives[static_cast<size_t>(root)] = part_of(request.output(output));
  return start(std::move(request), options);
}

void Group::check_message(std::string_view name, const Tensor& tensor, int peer, int tag) const {
  const std::string call(name);
  check_rank(peer, call + ": peer");
  TS_CHECK(peer != rank_, name_, call, ": rank ", rank_, " is not its own peer");
  TS_CHECK(tag >= 0 && tag < kMaxTag, name_, call, ": a tag is in [0, 2^29); given ", tag);
  check_tensors({&tensor, 1}, tensor, backend_.get(), call);
}

// Tells the peer of a message, if there can be one, that it will not come.
void Group::refuse(Operation operation, int peer, int tag, const std::string& mistake,
                   const CollectiveOptions& options) {
  if (peer < 0 || peer >= size() || peer == rank_ || tag < 0 || tag >= kMaxTag) return;
  Request request{.operation = operation, .root = peer, .tag = tag};
  request.mistake = detail::concatenate("rank ", rank_, ": ", mistake);
  request.sends.resize(ranks_.size());
  request.receives.resize(ranks_.size());
  start(std::move(request), options);
}

Group::Request Group::message(Operation operation, const Tensor& tensor, int peer, int tag) const {
  Request request{.operation = operation,
                  .dtype = tensor.dtype(),
                  .root = peer,
                  .tag = tag,
                  .count = tensor.numel(),
                  .bytes = tensor.nbytes()};
  request.sends.resize(ranks_.size());
  request.receives.resize(ranks_.size());
  const NoGradGuard no_grad;
  if (operation == Operation::kSend) {
    request.sends[static_cast<size_t>(peer)] = part_of(request.input(tensor));
  } else {
    request.receives[static_cast<size_t>(peer)] = part_of(request.output(tensor));
  }
  return request;
}

Work Group::send_or_recv(Operation operation, const Tensor& tensor, int peer, int tag,
                         const CollectiveOptions& options) {
  try {
    check_message(name_of(operation), tensor, peer, tag);
  } catch (...) {
    const std::exception_ptr mistake = std::current_exception();
    refuse(operation, peer, tag, describe_mistake(name_of(operation)), options);
    std::rethrow_exception(mistake);
  }
  return start(message(operation, tensor, peer, tag), options);
}

Work Group::send(const Tensor& tensor, int peer, int tag, const CollectiveOptions& options) {
  return send_or_recv(Operation::kSend, tensor, peer, tag, options);
}

Work Group::recv(const Tensor& tensor, int peer, int tag, const CollectiveOptions& options) {
  return send_or_recv(Operation::kRecv, tensor, peer, tag, options);
}

namespace {

// What is received would change what is sent, or what another message puts there.
void check_apart(std::span<const PeerTensor> sends, std::span<const PeerTensor> receives) {
  const auto overlap = [](const Tensor& a, const Tensor& b) {
    if (a.numel() == 0 || b.numel() == 0 || a.is_meta() || b.is_meta()) return false;
    if (!a.is_contiguous() || !b.is_contiguous()) return false;  // one of them travels as a copy
    const char *first = static_cast<const char*>(a.data()),
               *second = static_cast<const char*>(b.data());
    return first < second + b.nbytes() && second < first + a.nbytes();
  };
  for (size_t i = 0; i < receives.size(); ++i) {
    const PeerTensor& to = receives[i];
    for (const std::span others : {sends, receives.subspan(i + 1)}) {
      for (const PeerTensor& other : others) {
        TS_CHECK(!overlap(to.tensor, other.tensor), "exchange", "what comes from rank ", to.peer,
                 " would be written over the message ", other.tag, " with rank ", other.peer, ", ",
                 other.tensor, "; give it memory of its own");
      }
    }
  }
}

}  // namespace

Work Group::exchange(const std::vector<PeerTensor>& sends, const std::vector<PeerTensor>& receives,
                     const CollectiveOptions& options) {
  TS_CHECK_AS(DistributedError, !shut_down_, name_,
              "the group was shut down; no exchange may follow");
  const TimelineRange range("exchange");
  try {
    for (const auto* list : {&sends, &receives}) {
      for (const auto& [peer, tensor, tag] : *list) check_message("exchange", tensor, peer, tag);
    }
    check_apart(sends, receives);
  } catch (...) {
    const std::exception_ptr mistake = std::current_exception();
    const std::string text = describe_mistake("exchange");
    for (const auto& one : sends) refuse(Operation::kSend, one.peer, one.tag, text, options);
    for (const auto& one : receives) refuse(Operation::kRecv, one.peer, one.tag, text, options);
    std::rethrow_exception(mistake);
  }
  if (sends.empty() && receives.empty()) return {};
  raise_unseen(options);
  // All are made before one is issued: what is issued has to start, or peers wait for it.
  std::vector<Request> requests;
  for (const auto& [peer, tensor, tag] : sends) {
    requests.push_back(message(Operation::kSend, tensor, peer, tag));
  }
  for (const auto& [peer, tensor, tag] : receives) {
    requests.push_back(message(Operation::kRecv, tensor, peer, tag));
  }
  std::vector<Issue> issued;
  std::vector<CallPtr> calls;
  for (Request& request : requests) {
    issued.push_back(issue(std::move(request), options));
    if (issued.back().call) calls.push_back(issued.back().call);
  }
  backend_->start_together(calls);
  std::vector<Work> works;
  for (Issue& one : issued) works.push_back(one.started());
  return join(std::move(works), {});
}

void Group::barrier(const CollectiveOptions& options) {
  CollectiveOptions waiting = options;
  waiting.waits = true;
  start({.operation = Operation::kBarrier}, waiting).wait();
}

std::shared_ptr<Group> Group::split(int color, int key, const CollectiveOptions& options) {
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
  return std::make_shared<Group>(name, std::move(backend), std::move(world_ranks));
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
  const int color = ranks.empty() ? -1 : *std::ranges::min_element(ranks);
  return part(color, ranks);
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
