#include <tessera/distributed/pipeline/executor.h>

#include <algorithm>
#include <array>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/engine.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/tensor/empty.h>

namespace tessera::distributed {
namespace {

constexpr std::string_view kPipeline = "pipeline";
// A header: how many tensors, and of each dtype, requires_grad, dimensions (-1: undefined) and their
// sizes.
constexpr int kMostTensors = 8, kMostDims = 8, kEntry = 3 + kMostDims;
constexpr int64_t kHeader = 1 + kMostTensors * kEntry;

std::string tag_of(const Action& action) {
  return std::string(action.backwards ? "gradient" : "output") + ", micro-batch " +
         std::to_string(action.micro);
}

}  // namespace

PipelineExecutor::PipelineExecutor(PipelineTable schedule, std::vector<PipelineStage*> stages,
                                   PipelineGroups groups, const ExecutorOptions& options)
    : schedule_(std::move(schedule)),
      stages_(std::move(stages)),
      groups_(groups),
      options_(options),
      rank_(groups.outputs.rank()) {
  TS_CHECK(schedule_.lowered(), kPipeline, "the table has no messages; lower() adds them");
  simulate(schedule_);
  for (const Group* group : {&groups_.outputs, &groups_.gradients}) {
    TS_CHECK(group->size() == schedule_.ranks() && group->rank() == rank_, kPipeline,
             "both groups have the ranks of the table, ", schedule_.ranks(), ", in one order; '",
             group->name(), "' has ", group->size(), ", this one as ", group->rank());
  }
  TS_CHECK(schedule_.ranks() == 1 || &groups_.outputs != &groups_.gradients, kPipeline,
           "outputs and gradients have a group each: messages of one wait for each other");
  const int own = schedule_.stages / schedule_.ranks();
  TS_CHECK(std::ssize(stages_) == own && !std::ranges::count(stages_, nullptr), kPipeline,
           "a rank has ", own, " stages of the table's ", schedule_.stages, "; got ",
           stages_.size());
}

PipelineStage& PipelineExecutor::stage_of(int stage) {
  return *stages_[static_cast<size_t>(stage / schedule_.ranks())];
}

int PipelineExecutor::peer_of(const Action& action) const {
  const bool forwards = action.backwards != (action.act == Act::kSend);
  return schedule_.rank_of(action.stage + (forwards ? 1 : -1));
}

std::vector<Tensor> PipelineExecutor::step() { return walk(true); }
std::vector<Tensor> PipelineExecutor::evaluate() {
  const NoGradGuard no_grad;
  return walk(false);
}

// Errors of `part` say which rank's they are and where in its row it was.
template <typename Part, typename Where>
void PipelineExecutor::named(const Part& part, const Where& where) const {
  try {
    part();
  } catch (Error& error) {
    error.add_context("pipeline, rank " + std::to_string(rank_) + ", " + where());
    throw;
  }
}

// What is left of a row without its backwards keeps the one order of rows and queues, so it does not
// get stuck either.
std::vector<Tensor> PipelineExecutor::walk(bool trains) {
  trains_ = trains;
  trace_.clear();
  forget();
  try {
    for (const Action& action : schedule_.rows[static_cast<size_t>(rank_)]) {
      if (!trains && action.act != Act::kForward && (!action.is_message() || action.backwards)) {
        continue;
      }
      named([&] { run(action); }, [&] { return action.describe(); });
      trace_.push_back(action);
    }
    named(
        [&] {
          for (const Work& send : sends_) send.wait();
        },
        [] { return std::string("behind the last action"); });
  } catch (...) {
    forget();
    throw;
  }
  sends_.clear();
  return std::exchange(losses_, {});
}

// What a step that failed left behind.
void PipelineExecutor::forget() {
  for (Work& send : sends_) send.forget();
  for (const size_t way : {0, 1}) {
    for (auto& [key, arriving] : arriving_[way]) {
      for (Work& work : arriving.works) work.forget();
    }
    arriving_[way].clear();
    leaving_[way].clear();
  }
  sends_.clear();
  losses_.clear();
  live_.clear();
  halves_.clear();
  looks_in_.clear();
  looks_out_.clear();
}

void PipelineExecutor::run(const Action& action) {
  switch (action.act) {
    case Act::kForward:
      return forward(action);
    case Act::kBackward:
    case Act::kInputGradient:
      return backward(action);
    case Act::kWeightGradient:
      return weight_gradients(action);
    case Act::kSend:
      return send(action);
    case Act::kReceive:
      return receive(action);
    case Act::kGather:
      return stage_of(action.stage).gather();
    case Act::kRelease:
      return stage_of(action.stage).release();
    case Act::kReduce:
      return stage_of(action.stage).reduce();
  }
}

// ---- Calculations -------------------------------------------------------------------------------

void PipelineExecutor::forward(const Action& action) {
  const int stage = action.stage, last = schedule_.stages - 1;
  const Key key(stage, action.micro);
  Live live;
  if (stage > 0) {
    const std::vector<Look>& looks = looks_in_[look_key(action)];
    const std::vector<Tensor> received = taken(arriving_[0], key);
    for (size_t i = 0; i < received.size(); ++i) {
      if (!received[i].defined()) {
        live.inputs.emplace_back();
        continue;
      }
      live.inputs.push_back(received[i].detach().requires_grad_(trains_ && looks[i].requires_grad));
    }
  }
  std::vector<Tensor> outputs = stage_of(stage).forward(action.micro, live.inputs);
  if (stage == last) {
    TS_CHECK_SHAPE(outputs.size() == 1 && (!trains_ || outputs[0].numel() == 1), kPipeline,
                   "the last stage returns its loss, one scalar; got ", outputs.size(),
                   " tensors of micro-batch ", action.micro);
    losses_.push_back(outputs[0].detach());
    live.loss = outputs[0];
    if (trains_) live_[key] = std::move(live);
    return;
  }
  std::vector<Look> looks;
  for (const Tensor& output : outputs) {
    if (!output.defined()) {
      looks.push_back({kF32, false, {}, false});
      continue;
    }
    looks.push_back({output.dtype(), output.requires_grad(), output.shape()});
    if (output.requires_grad()) live.history.push_back(gradient_edge(output));
  }
  const auto [first, is_first] = looks_out_.try_emplace(look_key(action), looks);
  TS_CHECK_SHAPE(
      looks == first->second, kPipeline, "stage ", stage, " returns for micro-batch ", action.micro,
      " other shapes, dtypes or gradients than for the first; cut batches evenly, or set "
      "shapes_vary");
  if (is_first) {
    const bool few = !looks.empty() && std::ssize(looks) <= kMostTensors;
    const bool flat = std::ranges::all_of(
        looks, [](const Look& look) { return std::ssize(look.shape) <= kMostDims; });
    TS_CHECK_SHAPE(few && flat, kPipeline, "a stage returns 1 to ", kMostTensors,
                   " tensors of at most ", kMostDims, " dimensions; stage ", stage, " returns ",
                   looks.size());
  }
  for (Tensor& output : outputs) {
    if (output.defined()) output = kernels::contiguous(output.detach());
  }
  if (trains_) live_[key] = std::move(live);
  hand_on(false, action, std::move(outputs));
}

void PipelineExecutor::backward(const Action& action) {
  const Key key(action.stage, action.micro);
  const Live live = std::move(live_.extract(key).mapped());
  PipelineStage& stage = stage_of(action.stage);
  const bool whole = action.act == Act::kBackward;
  {
    const std::shared_ptr<void> scope = stage.enter_backward(action.micro, whole);
    SplitBackward::Request from;
    if (action.stage < schedule_.stages - 1) {
      from.roots = live.history;
      from.gradients = taken(arriving_[1], key);
    } else if (live.loss.requires_grad()) {
      const Tensor seed = stage.seed(action.micro, live.loss);
      TS_CHECK_SHAPE(!seed.defined() || seed.shape() == live.loss.shape(), kPipeline,
                     "the seed of a loss has its shape; got ", seed, " for ", live.loss);
      from.ones = !seed.defined();
      from.roots = {gradient_edge(live.loss)};
      from.gradients = {from.ones
                            ? raw::full(live.loss.shape(), 1, live.loss.dtype(), live.loss.device())
                            : seed};
    }
    if (!from.roots.empty() && whole) {
      run_backward({.roots = from.roots, .gradients = from.gradients, .ones = from.ones});
    } else if (!from.roots.empty()) {
      for (const Tensor& input : live.inputs) {
        if (input.defined() && input.requires_grad()) from.inputs.push_back(gradient_edge(input));
      }
      halves_.emplace(key, std::move(from));
    }
  }
  if (action.stage == 0) return;
  std::vector<Tensor> of_inputs;
  for (const Tensor& input : live.inputs) {
    if (!input.defined() || !input.requires_grad()) continue;
    const Tensor gradient = input.grad();
    of_inputs.push_back(gradient.defined() ? kernels::contiguous(gradient)
                                           : raw::zeros_like(input));
  }
  hand_on(true, action, std::move(of_inputs));
}

void PipelineExecutor::weight_gradients(const Action& action) {
  const std::shared_ptr<void> scope = stage_of(action.stage).enter_backward(action.micro, true);
  const auto half = halves_.extract(Key(action.stage, action.micro));
  if (!half.empty()) half.mapped().run_weights();
}

// ---- Between stages -----------------------------------------------------------------------------

// To what sends it, or at once to a neighbour on this rank.
void PipelineExecutor::hand_on(bool backwards, const Action& from, std::vector<Tensor> tensors) {
  const size_t way = backwards ? 1 : 0;
  if (schedule_.ranks() > 1) {
    leaving_[way][{from.stage, from.micro}] = std::move(tensors);
    return;
  }
  const Key sender = look_key(from);
  if (!backwards) looks_in_[{sender.first + 1, sender.second}] = looks_out_[sender];
  arriving_[way][{from.stage + (backwards ? -1 : 1), from.micro}].tensors = std::move(tensors);
}

std::vector<Tensor> PipelineExecutor::taken(std::map<Key, Arriving>& from, Key key) {
  const auto found = from.find(key);
  for (const Work& work : found->second.works) work.wait();
  std::vector<Tensor> tensors = std::move(found->second.tensors);
  from.erase(found);
  return tensors;
}

void PipelineExecutor::send(const Action& action) {
  const int peer = peer_of(action);
  Group& group = group_of(action.backwards);
  const std::string tag = tag_of(action);
  const CollectiveOptions options{.channel = Channel::kPeer, .tag = tag};
  // Those that have ended let go of their tensors.
  std::erase_if(sends_, [](const Work& work) { return work.completed() && (work.wait(), true); });
  if (sends_looks(action)) {
    const std::vector<Look>& looks = looks_out_[look_key(action)];
    std::vector<int64_t> header(static_cast<size_t>(kHeader));
    header[0] = std::ssize(looks);
    auto entry = header.begin() + 1;
    for (const Look& look : looks) {
      entry[0] = static_cast<int64_t>(look.dtype);
      entry[1] = look.requires_grad ? 1 : 0;
      entry[2] = look.present ? std::ssize(look.shape) : -1;
      std::ranges::copy(look.shape, entry + 3);
      entry += kEntry;
    }
    sends_.push_back(group.send(tensor(header), peer, 0, options));
  }
  const auto tensors = leaving_[action.backwards ? 1 : 0].extract(Key(action.stage, action.micro));
  for (const Tensor& one : tensors.mapped()) {
    if (one.defined()) sends_.push_back(group.send(one, peer, 0, options));
  }
}

void PipelineExecutor::receive(const Action& action) {
  const int peer = peer_of(action);
  Group& group = group_of(action.backwards);
  const std::string tag = tag_of(action);
  const CollectiveOptions options{.channel = Channel::kPeer, .tag = tag};
  if (sends_looks(action)) {
    const Tensor header = raw::zeros({kHeader}, kI64);
    group.recv(header, peer, 0, options).wait();
    const int64_t* entry = header.data_as<int64_t>();
    std::vector<Look>& looks = looks_in_[look_key(action)];
    looks.resize(static_cast<size_t>(*entry++));
    for (Look& look : looks) {
      look.dtype = static_cast<DType>(entry[0]);
      look.requires_grad = entry[1] != 0;
      look.present = entry[2] >= 0;
      const int64_t dims = std::max<int64_t>(entry[2], 0);
      look.shape = Shape(std::span(entry + 3, static_cast<size_t>(dims)));
      entry += kEntry;
    }
  }
  Arriving& arriving = arriving_[action.backwards ? 1 : 0][{action.stage, action.micro}];
  const std::vector<Look>& looks =
      action.backwards ? looks_out_[look_key(action)] : looks_in_[look_key(action)];
  for (const Look& look : looks) {
    if (action.backwards && !look.requires_grad) continue;
    if (!look.present) {
      arriving.tensors.emplace_back();
      continue;
    }
    arriving.tensors.push_back(raw::empty(look.shape, look.dtype, options_.device));
    arriving.works.push_back(group.recv(arriving.tensors.back(), peer, 0, options));
  }
}

}  // namespace tessera::distributed
