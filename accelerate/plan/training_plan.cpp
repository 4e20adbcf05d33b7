#include <tessera/accelerate/plan/training_plan.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>
#include <utility>

#include <nlohmann/json.hpp>

#include <tessera/accelerate/parallelize.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/op.h>
#include <tessera/core/error.h>
#include <tessera/core/memory/meta_memory.h>
#include <tessera/core/parallel.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/distributed/data_parallel/data_parallel_model.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/tensor_parallel/parallelize.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/distributed/transport/rank_context.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/autocast.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kPlan = "plan_training";

using distributed::CommRecord;

// ---- One rank -----------------------------------------------------------------------------------

// This thread is one of `size` ranks, of which the others are not there.
void become_rank(int rank, int size) {
  set_num_threads(1);
  distributed::RankContext& context = distributed::rank_context();
  context.rank = context.local_rank = rank;
  context.world_size = context.local_world_size = size;
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  context.world = std::make_shared<distributed::Group>(
      "world", distributed::make_fake_backend(rank, size), std::move(ranks));
}

PlannedBytes current_bytes() {
  PlannedBytes bytes;
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    bytes[category] = memory_stats()->current(category);
  }
  return bytes;
}

// High-water marks over stretches of a run.
struct Peak {
  int64_t total = 0;
  PlannedBytes categories;
  void take() {
    total = std::max(total, memory_stats()->peak());
    for (int i = 0; i < kNumMemoryCategories; ++i) {
      const auto category = static_cast<MemoryCategory>(i);
      categories[category] = std::max(categories[category], memory_stats()->peak(category));
    }
    memory_stats()->reset_peak();
  }
};

// A model that is prepared as prepare() does, and steps as the Accelerator has it. Its first
// member goes last: the model's memory is counted in this context.
class Rehearsal {
 public:
  Rehearsal(const std::function<PlannedTraining()>& make, const PlanOptions& options)
      : settings_(options.settings), dims_(parallel_dims_of(settings_)), training_(make()) {
    TS_CHECK(training_.model != nullptr && training_.loss != nullptr, kPlan,
             "needs a model and its loss; got none");
    nn::ModuleBase& model = *training_.model;
    for (const auto& [name, tensor] : model.named_parameters()) {
      TS_CHECK_DEVICE(tensor.is_meta(), kPlan, "'", name, "' is ", tensor,
                      "; make the model inside of the function, where it gets no memory");
      elements_ += tensor.numel();
    }
    parallelize(made_, model, settings_, dims_);
    optimizers_ = options.optimizer(model.named_parameters());
  }
  Rehearsal(const Rehearsal&) = delete;
  Rehearsal& operator=(const Rehearsal&) = delete;

  // Gradients of a step.
  void gradients() {
    const int64_t count = settings_.gradient_accumulation_steps;
    for (int64_t index = 0; index < count; ++index) {
      const bool last = index + 1 == count;
      if (made_.parallel) {
        const bool sync =
            last || settings_.sync_each_batch || made_.parallel->reduces_every_backward();
        const bool divides_each = settings_.loss_weighting.value == LossWeighting::kHuggingFace &&
                                  !made_.parallel->reduces_every_backward();
        made_.parallel->set_plan({.micro_index = index,
                                  .is_last = last || divides_each,
                                  .sync_gradients = sync,
                                  .weight = static_cast<double>(index + 1),
                                  .all_reduce = last});
      }
      const Tensor loss = training_.loss();
      if (made_.parallel && made_.parallel->pass().holds_unreduced())
        made_.parallel->pass().resume_undivided();
      loss.backward();
    }
  }
  void update() {
    if (made_.policy.fp8()) made_.policy.fp8()->update();
    const NamedTensors masters = std::exchange(made_.masters, {});
    for (const auto& optimizer : optimizers_) {
      if (!masters.empty()) optimizer->begin_masters(masters);
    }
    for (const auto& optimizer : optimizers_) optimizer->step();
  }
  void clear() {
    for (const auto& optimizer : optimizers_) optimizer->zero_grad();
  }
  int64_t state_bytes_per_element(const std::string& parameter) const {
    int64_t bytes = 0;
    for (const auto& optimizer : optimizers_)
      bytes += optimizer->state_bytes_per_element(parameter);
    return bytes;
  }

  nn::ModuleBase& model() { return *training_.model; }
  distributed::Mesh& mesh() { return dims_.mesh(); }
  int64_t elements() const { return elements_; }
  std::string layers() const { return distributed::describe_layers(*training_.model); }
  std::string units() const { return made_.parallel ? made_.parallel->describe() : std::string(); }

 private:
  const Settings& settings_;
  distributed::ParallelDims& dims_;
  PlannedTraining training_;
  int64_t elements_ = 0;
  ParallelizedModel made_;
  Optimizers optimizers_;
};

// ---- The other ranks ----------------------------------------------------------------------------

// Of every rank, by what the rehearsal's keep of each element. Parameters lie on all ranks.
std::vector<int64_t> optimizer_bytes(const Rehearsal& rehearsal, const NamedTensors& parameters,
                                     int ranks) {
  std::vector<int64_t> bytes(static_cast<size_t>(ranks));
  for (const auto& [name, parameter] : parameters) {
    const int64_t each = rehearsal.state_bytes_per_element(name);
    if (each == 0) continue;
    const std::vector<int64_t> numels = distributed::is_dtensor(parameter)
                                            ? distributed::spec_of(parameter).part_numels()
                                            : std::vector(bytes.size(), parameter.numel());
    for (size_t rank = 0; rank < bytes.size(); ++rank) bytes[rank] += each * numels[rank];
  }
  return bytes;
}

// Axes by the names of their groups.
std::map<std::string, std::string> groups_of(const distributed::Mesh& mesh) {
  std::map<std::string, std::string> axes;
  for (const distributed::MeshAxis& axis : mesh.axes()) {
    axes.try_emplace(mesh.group(axis.name).name(), axis.name);
  }
  // Products: "dp_shard_tp", of the axes along which the ranks of a group differ.
  for (const auto& group : distributed::groups_of_rank()) {
    const std::vector<int> first = mesh.coordinates_of(group->ranks().front());
    std::string name;
    int size = 1;
    for (size_t axis = 0; axis < first.size(); ++axis) {
      const bool differ = std::ranges::any_of(
          group->ranks(), [&](int rank) { return mesh.coordinates_of(rank)[axis] != first[axis]; });
      if (!differ) continue;
      name += (name.empty() ? "" : "_") + mesh.axes()[axis].name;
      size *= mesh.axes()[axis].size;
    }
    if (size == group->size()) axes.try_emplace(group->name(), name);
  }
  return axes;
}

// ---- Text ---------------------------------------------------------------------------------------

std::string of_bytes(int64_t bytes) { return text_of_bytes(static_cast<double>(bytes)); }

std::string with_commas(int64_t number) {
  std::string text = std::to_string(number);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<size_t>(at), ",");
  }
  return text;
}

std::string of_seconds(double seconds) {
  char text[40];
  plain_snprintf(text, sizeof text, seconds < 1 ? "%.2f ms" : "%.3f s",
                 seconds < 1 ? seconds * 1e3 : seconds);
  return text;
}

std::string_view words_for(distributed::Channel channel) {
  switch (channel) {
    case distributed::Channel::kGradient:
      return "gradients";
    case distributed::Channel::kParameter:
      return "parameters";
    case distributed::Channel::kControl:
      return "agreement";
    default:
      return distributed::name_of(channel);
  }
}

const char* key_of(MemoryCategory category) {
  static const char* const kKeys[] = {"parameter",    "gradient",      "optimizer", "unsharded",
                                      "weight_cache", "communication", "staging",   "activation"};
  return kKeys[static_cast<size_t>(category)];
}

}  // namespace

std::string text_of_bytes(double bytes) {
  const char* const kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) bytes /= 1024, ++unit;
  char text[40];
  plain_snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", bytes, kUnits[unit]);
  return text;
}

OptimizerFactory optimizer_named(const std::string& name, const NamedOptimizerOptions& options) {
  const auto one = [](const auto& make) -> OptimizerFactory {
    return [make](const NamedTensors& parameters) {
      Optimizers optimizers;
      optimizers.push_back(make(parameters));
      return optimizers;
    };
  };
  if (name == "adamw") {
    return one([](const NamedTensors& all) { return std::make_unique<optim::AdamW>(all); });
  }
  if (name == "adam") {
    return one([](const NamedTensors& all) { return std::make_unique<optim::Adam>(all); });
  }
  if (name == "lion") {
    return one([](const NamedTensors& all) { return std::make_unique<optim::Lion>(all); });
  }
  if (name == "sgd") {
    return one([momentum = options.momentum](const NamedTensors& all) {
      optim::SGDOptions sgd;
      sgd.momentum = momentum;
      return std::make_unique<optim::SGD>(all, sgd);
    });
  }
  TS_CHECK_AS(ConfigError, name == "muon", kPlan,
              "--optimizer is adamw, adam, sgd, lion or muon; got '", name, "'");
  return [not_by_muon = options.not_by_muon](const NamedTensors& parameters) {
    const auto [matrices, others] = optim::split_for_muon(parameters, not_by_muon);
    TS_CHECK_AS(ConfigError, !matrices.empty(), kPlan,
                "muon updates matrices of hidden layers, and no parameter is known to be one; "
                "take another --optimizer");
    Optimizers optimizers;
    optimizers.push_back(std::make_unique<optim::Muon>(matrices));
    if (!others.empty()) optimizers.push_back(std::make_unique<optim::AdamW>(others));
    return optimizers;
  };
}

int64_t PlannedBytes::total() const {
  return std::accumulate(by_category.begin(), by_category.end(), int64_t{0});
}

std::vector<PlannedCollective> add_up(const std::vector<CommRecord>& records,
                                      const std::map<std::string, std::string>& axes,
                                      const std::optional<Network>& network) {
  std::vector<PlannedCollective> sums;
  for (const CommRecord& record : records) {
    if (record.group_size < 2) continue;
    const auto known = axes.find(record.group);
    const std::string axis = known == axes.end() ? std::string() : known->second;
    auto sum = std::ranges::find_if(sums, [&](const PlannedCollective& other) {
      return other.operation == record.operation && other.channel == record.channel &&
             other.phase == record.phase && other.axis == axis;
    });
    if (sum == sums.end()) {
      sum = sums.insert(sum, {.operation = record.operation,
                              .channel = record.channel,
                              .phase = record.phase,
                              .axis = axis});
    }
    ++sum->count;
    sum->bytes += record.bytes;
    sum->wire_bytes += record.wire_bytes();
    if (network) sum->seconds += network->seconds(record, axis);
  }
  return sums;
}

TrainingPlan plan_training(const std::function<PlannedTraining()>& make,
                           const PlanOptions& options) {
  TS_CHECK(options.ranks >= 1, kPlan, "needs at least one rank; got ", options.ranks);
  TS_CHECK(options.rank >= 0 && options.rank < options.ranks, kPlan, "rank ", options.rank,
           " is none of ", options.ranks);
  TS_CHECK(options.steps >= 2, kPlan, "needs two steps, for what settles in the first; got ",
           options.steps);
  check_consistent(options.settings);
  Context context;
  const ContextGuard in_context(context);
  const MetaMemoryGuard counted;
  const nn::ParameterDefaultsGuard without_memory({.device = kMeta, .initialise = false});
  become_rank(options.rank, options.ranks);
  Rehearsal rehearsal(make, options);

  TrainingPlan plan;
  plan.parameters = rehearsal.elements();
  plan.accumulation = options.settings.gradient_accumulation_steps;
  plan.mode = text(*find_setting("sharding"), options.settings);
  plan.precision = precision::describe(policy_of(options.settings));
  plan.network = options.network;

  Peak before_states, with_states;
  PlannedBytes persistent;
  FlopCounter& flops = Context::current().slot<FlopCounter>();
  memory_stats()->reset_peak();
  for (int step = 0; step < options.steps; ++step) {
    const bool told = step + 1 == options.steps;
    const distributed::CommTrace::Scope scope(*distributed::rank_context().trace);
    flops = {.enabled = told};
    rehearsal.gradients();
    (step == 0 ? before_states : with_states).take();
    rehearsal.update();
    persistent = current_bytes();
    with_states.take();
    rehearsal.clear();
    if (told) plan.records = scope.records();
  }
  plan.flops = std::exchange(flops, {}).total;

  const NamedTensors parameters = rehearsal.model().named_parameters();
  const std::vector<int64_t> states = optimizer_bytes(rehearsal, parameters, options.ranks);
  const int64_t own = persistent[MemoryCategory::kOptimizer];
  plan.ranks.reserve(states.size());
  for (const int64_t bytes : states) {
    RankPlan rank{.persistent = persistent, .peaks = before_states.categories};
    rank.persistent[MemoryCategory::kOptimizer] = bytes;
    rank.peak = std::max(before_states.total, with_states.total - own + bytes);
    for (int i = 0; i < kNumMemoryCategories; ++i) {
      const auto category = static_cast<MemoryCategory>(i);
      rank.peaks[category] = std::max(rank.peaks[category], with_states.categories[category]);
    }
    rank.peaks[MemoryCategory::kOptimizer] = bytes;
    plan.ranks.push_back(rank);
  }
  plan.mesh = rehearsal.mesh().describe();
  plan.collectives = add_up(plan.records, groups_of(rehearsal.mesh()), options.network);
  plan.units = rehearsal.units();
  plan.layers = rehearsal.layers();
  return plan;
}

// ---- Looking ------------------------------------------------------------------------------------

double TrainingPlan::communication_seconds() const {
  double seconds = 0;
  for (const PlannedCollective& one : collectives) seconds += one.seconds;
  return seconds;
}
double TrainingPlan::compute_seconds() const {
  return network && network->flops > 0 ? flops / network->flops : 0;
}
const RankPlan& TrainingPlan::largest() const {
  return *std::ranges::max_element(ranks, {}, &RankPlan::peak);
}
double TrainingPlan::mean_persistent() const {
  double sum = 0;
  for (const RankPlan& rank : ranks) sum += static_cast<double>(rank.persistent.total());
  return sum / static_cast<double>(ranks.size());
}

std::string TrainingPlan::describe(int64_t memory) const {
  PlainText<std::ostringstream> out;
  char line[200];
  const RankPlan& most = largest();
  const auto row = [&](const char* name, const std::string& value, const std::string& note = {}) {
    plain_snprintf(line, sizeof line, "  %-16s %12s  %s", name, value.c_str(), note.c_str());
    std::string text(line);
    text.resize(text.find_last_not_of(' ') + 1);
    out << text << "\n";
  };
  out << with_commas(parameters) << " parameters, " << mode << " on " << mesh << ", " << precision
      << ", " << accumulation << (accumulation == 1 ? " micro-batch" : " micro-batches")
      << " a step\n\nmemory of the largest of " << ranks.size()
      << (ranks.size() == 1 ? " rank" : " ranks") << "\n";
  using C = MemoryCategory;
  row("parameters", of_bytes(most.persistent[C::kParameter]));
  row("gradients", of_bytes(most.persistent[C::kGradient]));
  row("optimizer", of_bytes(most.persistent[C::kOptimizer]));
  if (most.persistent[C::kWeightCache] > 0) {
    row("16-bit copies", of_bytes(most.persistent[C::kWeightCache]));
  }
  row("peak", of_bytes(most.peak), "of a step; by kind, whenever each is highest:");
  row("", "",
      "units gathered " + of_bytes(most.peaks[C::kUnsharded]) + ", gradients " +
          of_bytes(most.peaks[C::kGradient]) + ", on their way " +
          of_bytes(most.peaks[C::kCommunication]) + ", activations and all else " +
          of_bytes(most.peaks[C::kActivation]));
  if (memory > 0) {
    const double share = static_cast<double>(most.peak) / static_cast<double>(memory);
    plain_snprintf(line, sizeof line, "%.0f%% of %s", 100 * share, of_bytes(memory).c_str());
    row(share <= 1 ? "fits:" : "DOES NOT FIT:", line);
  }
  if (!layers.empty()) out << "\n" << layers;
  out << "\na step of a rank sends\n";
  plain_snprintf(line, sizeof line, "  %-9s %-15s %-11s %-13s %7s %12s %12s%s\n", "phase", "call",
                 "of", "axis", "calls", "tensors", "on the wire", network ? "      seconds" : "");
  out << line;
  double wire = 0;
  for (const PlannedCollective& one : collectives) {
    plain_snprintf(line, sizeof line, "  %-9s %-15s %-11s %-13s %7lld %12s %12s", one.phase.c_str(),
                   std::string(distributed::name_of(one.operation)).c_str(),
                   std::string(words_for(one.channel)).c_str(), one.axis.c_str(),
                   static_cast<long long>(one.count), of_bytes(one.bytes).c_str(),
                   text_of_bytes(one.wire_bytes).c_str());
    out << line;
    if (network) {
      plain_snprintf(line, sizeof line, " %12s", of_seconds(one.seconds).c_str());
      out << line;
    }
    out << "\n";
    wire += one.wire_bytes;
  }
  if (collectives.empty()) out << "  nothing\n";
  plain_snprintf(line, sizeof line, "  %-74s %12s", "together", text_of_bytes(wire).c_str());
  if (!collectives.empty()) out << line << (network ? "" : "\n");
  if (!network) return out.str();
  plain_snprintf(line, sizeof line, " %12s\n", of_seconds(communication_seconds()).c_str());
  if (!collectives.empty()) out << line;
  const double calls = communication_seconds(), work = compute_seconds();
  if (work > 0) {
    out << "\nstep: " << of_seconds(std::max(calls, work)) << " where all calls are hidden behind "
        << "products, " << of_seconds(calls + work) << " where none is (products "
        << of_seconds(work) << ", calls " << of_seconds(calls) << ")\n";
  } else {
    out << "\nstep: at least " << of_seconds(calls)
        << "; say what a device calculates (flops_per_second) for the rest\n";
  }
  return out.str();
}

std::string TrainingPlan::to_json() const {
  using Json = nlohmann::ordered_json;
  const auto bytes_json = [](const PlannedBytes& bytes) {
    Json json;
    for (int i = 0; i < kNumMemoryCategories; ++i) {
      const auto category = static_cast<MemoryCategory>(i);
      const bool always = i <= static_cast<int>(MemoryCategory::kOptimizer);
      if (always || bytes[category] > 0) json[key_of(category)] = bytes[category];
    }
    return json;
  };
  Json json = {{"parameters", parameters},
               {"sharding", mode},
               {"mesh", mesh},
               {"precision", precision},
               {"accumulate", accumulation}};
  json["ranks"] = Json::array();
  for (const RankPlan& rank : ranks) {
    json["ranks"].push_back({{"persistent", bytes_json(rank.persistent)},
                             {"peak", rank.peak},
                             {"peaks", bytes_json(rank.peaks)}});
  }
  json["collectives"] = Json::array();
  for (const PlannedCollective& one : collectives) {
    Json entry = {{"op", distributed::name_of(one.operation)},
                  {"phase", one.phase},
                  {"of", words_for(one.channel)},
                  {"axis", one.axis},
                  {"count", one.count},
                  {"bytes", one.bytes},
                  {"wire_bytes", one.wire_bytes}};
    if (network) entry["seconds"] = one.seconds;
    json["collectives"].push_back(std::move(entry));
  }
  json["flops"] = flops;
  json["step_seconds"] = nullptr;
  if (network) {
    const double calls = communication_seconds(), work = compute_seconds();
    json["step_seconds"] = {{"communication", calls},
                            {"compute", work > 0 ? Json(work) : Json()},
                            {"least", std::max(calls, work)},
                            {"most", work > 0 ? Json(calls + work) : Json()}};
  }
  return json.dump(1);
}

}  // namespace tessera::accelerate
