#include <tessera/distributed/pipeline/executor.h>

#include <algorithm>
#include <array>

#include <tessera/autograd/autograd.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/empty.h>

namespace tessera::distributed {
namespace {

constexpr std::string_view kPipeline = "pipeline";
// A header: how many tensors, and of each dtype, requires_grad, dimensions and their sizes.
constexpr int kMostTensors = 8, kMostDims = 8, kEntry = 3 + kMostDims;
constexpr int64_t kHeader = 1 + kMostTensors * kEntry;

std::string tag_of(const Action& action) {
  return std::string(action.backwards ? "gradient" : "output") + ", micro-batch " +
         std::to_string(action.micro);
}

}  // namespace

PipelineExecutor::PipelineExecutor(PipelineTable schedule, std::vector<PipelineStage*> stages,
                                   PipelineGroups groups)
    : schedule_(std::move(schedule)),
      stages_(std::move(stages)),
      groups_(groups),
      rank_(groups.outputs.rank()) {
  TS_CHECK(schedule_.lowered(), kPipeline, "the table has no messages; lower() adds them");
  simulate(schedule_);
  for (const auto& row : schedule_.rows) {
    for (const Action& action : row) {
      TS_CHECK_AS(UnsupportedError,
                  action.act != Act::kInputGradient && action.act != Act::kWeightGradient,
                  kPipeline, "backwards in two halves (zero_bubble_h1) do not run yet; take 1f1b");
    }
  }
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

std::vector<Tensor> PipelineExecutor::step() {
  trace_.clear();
  forget();
  try {
    for (const Action& action : schedule_.rows[static_cast<size_t>(rank_)]) {
      run(action);
      trace_.push_back(action);
    }
    for (const Work& send : sends_) send.wait();
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
  looks_in_.clear();
  looks_out_.clear();
}

void PipelineExecutor::run(const Action& action) {
  switch (action.act) {
    case Act::kForward:
      return forward(action);
    case Act::kBackward:
      return backward(action);
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
    case Act::kInputGradient:
    case Act::kWeightGradient:
      return;  // refused by the constructor
  }
}

// ---- Calculations -------------------------------------------------------------------------------

void PipelineExecutor::forward(const Action& action) {
  const int stage = action.stage, last = schedule_.stages - 1;
  const Key key(stage, action.micro);
  Live& live = live_[key];
  if (stage > 0) {
    const std::vector<Look>& looks = looks_in_[stage];
    const std::vector<Tensor> received = taken(arriving_[0], key);
    for (size_t i = 0; i < received.size(); ++i) {
      live.inputs.push_back(received[i].detach().requires_grad_(looks[i].requires_grad));
    }
  }
  live.outputs = stage_of(stage).forward(action.micro, live.inputs);
  if (stage == last) {
    TS_CHECK_SHAPE(live.outputs.size() == 1 && live.outputs[0].numel() == 1, kPipeline,
                   "the last stage returns its loss, one scalar; got ", live.outputs.size(),
                   " tensors of micro-batch ", action.micro);
    losses_.push_back(live.outputs[0].detach());
    return;
  }
  std::vector<Look> looks;
  for (const Tensor& output : live.outputs) {
    looks.push_back({output.dtype(), output.requires_grad(), output.shape()});
  }
  const auto [first, is_first] = looks_out_.try_emplace(stage, looks);
  TS_CHECK_SHAPE(looks == first->second, kPipeline, "stage ", stage, " returns for micro-batch ",
                 action.micro,
                 " other shapes, dtypes or gradients than for the first; cut batches evenly");
  if (is_first) {
    const bool few = !looks.empty() && std::ssize(looks) <= kMostTensors;
    const bool flat = std::ranges::all_of(
        looks, [](const Look& look) { return std::ssize(look.shape) <= kMostDims; });
    TS_CHECK_SHAPE(few && flat, kPipeline, "a stage returns 1 to ", kMostTensors,
                   " tensors of at most ", kMostDims, " dimensions; stage ", stage, " returns ",
                   looks.size());
  }
  std::vector<Tensor> outputs;
  for (const Tensor& output : live.outputs) outputs.push_back(output.detach());
  hand_on(false, stage, action.micro, std::move(outputs));
}

void PipelineExecutor::backward(const Action& action) {
  const Key key(action.stage, action.micro);
  const Live live = std::move(live_.extract(key).mapped());
  std::vector<Tensor> outputs, gradients;
  for (const Tensor& output : live.outputs) {
    if (output.requires_grad()) outputs.push_back(output);
  }
  if (action.stage < schedule_.stages - 1) gradients = taken(arriving_[1], key);
  if (!outputs.empty()) tessera::backward(outputs, gradients);
  if (action.stage == 0) return;
  std::vector<Tensor> of_inputs;
  for (const Tensor& input : live.inputs) {
    if (!input.requires_grad()) continue;
    const Tensor gradient = input.grad();
    of_inputs.push_back(gradient.defined() ? gradient : raw::zeros_like(input));
  }
  hand_on(true, action.stage, action.micro, std::move(of_inputs));
}

// ---- Between stages -----------------------------------------------------------------------------

// To what sends it, or at once to a neighbour on this rank.
void PipelineExecutor::hand_on(bool backwards, int stage, int micro, std::vector<Tensor> tensors) {
  const size_t way = backwards ? 1 : 0;
  if (schedule_.ranks() > 1) {
    leaving_[way][{stage, micro}] = std::move(tensors);
    return;
  }
  if (!backwards) looks_in_[stage + 1] = looks_out_[stage];
  arriving_[way][{stage + (backwards ? -1 : 1), micro}].tensors = std::move(tensors);
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
  if (!action.backwards && action.micro == 0) {
    const std::vector<Look>& looks = looks_out_[action.stage];
    std::vector<int64_t> header(static_cast<size_t>(kHeader));
    header[0] = std::ssize(looks);
    auto entry = header.begin() + 1;
    for (const Look& look : looks) {
      entry[0] = static_cast<int64_t>(look.dtype);
      entry[1] = look.requires_grad ? 1 : 0;
      entry[2] = std::ssize(look.shape);
      std::ranges::copy(look.shape, entry + 3);
      entry += kEntry;
    }
    sends_.push_back(group.send(tensor(header), peer, 0, options));
  }
  const auto tensors = leaving_[action.backwards ? 1 : 0].extract(Key(action.stage, action.micro));
  for (const Tensor& one : tensors.mapped()) {
    sends_.push_back(group.send(one, peer, 0, options));
  }
}

void PipelineExecutor::receive(const Action& action) {
  const int peer = peer_of(action);
  Group& group = group_of(action.backwards);
  const std::string tag = tag_of(action);
  const CollectiveOptions options{.channel = Channel::kPeer, .tag = tag};
  if (!action.backwards && action.micro == 0) {
    const Tensor header = raw::zeros({kHeader}, kI64);
    group.recv(header, peer, 0, options).wait();
    const int64_t* entry = header.data_as<int64_t>();
    std::vector<Look>& looks = looks_in_[action.stage];
    looks.resize(static_cast<size_t>(*entry++));
    for (Look& look : looks) {
      look.dtype = static_cast<DType>(entry[0]);
      look.requires_grad = entry[1] != 0;
      look.shape = Shape(std::span(entry + 3, static_cast<size_t>(entry[2])));
      entry += kEntry;
    }
  }
  Arriving& arriving = arriving_[action.backwards ? 1 : 0][{action.stage, action.micro}];
  const std::vector<Look>& looks =
      action.backwards ? looks_out_[action.stage] : looks_in_[action.stage];
  for (const Look& look : looks) {
    if (action.backwards && !look.requires_grad) continue;
    arriving.tensors.push_back(raw::empty(look.shape, look.dtype));
    arriving.works.push_back(group.recv(arriving.tensors.back(), peer, 0, options));
  }
}

}  // namespace tessera::distributed
