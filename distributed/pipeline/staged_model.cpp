#include <tessera/distributed/pipeline/staged_model.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/leaf_hooks.h>
#include <tessera/autograd/meta_inputs.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/factory/initial_values.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/backward/broadcast.h>
#include <tessera/distributed/fully_shard/local_parts.h>
#include <tessera/distributed/fully_shard/param_group.h>
#include <tessera/distributed/fully_shard/shard_setup.h>
#include <tessera/distributed/mesh/divided_parameter.h>
#include <tessera/distributed/mesh/dtensor.h>

namespace tessera::distributed {
namespace {

constexpr std::string_view kStages = "pipeline";

// What products of a token are proportional to, in the modules of an order.
std::vector<double> arithmetic_of(nn::ModuleBase& model) {
  std::vector<double> costs;
  for (const auto& [name, module] : model.named_modules()) {
    double cost = 0;
    if (module->type_name() != "Embedding") {
      for (const auto& [parameter, tensor] : module->parameter_places()) {
        const bool own = parameter.find('.') == std::string::npos;
        if (own && tensor->defined() && whole_shape(*tensor).size() > 1) {
          cost += static_cast<double>(numel_of(whole_shape(*tensor)));
        }
      }
    }
    costs.push_back(cost);
  }
  return costs;
}

// What the tensor that ops read in a parameter's place is to the ranks that divide its layer.
uint64_t marks_of(const Tensor& parameter) {
  const DividedParameter* divided = divided_parameter(parameter);
  return divided != nullptr ? divided->marks : 0;
}

Tensor meta_of(const Tensor& x) {
  const Tensor meta = raw::empty(x.shape(), x.dtype(), kMeta);
  meta.impl()->marks = x.impl()->marks;
  if (is_floating(x.dtype()) && x.requires_grad()) meta.set_requires_grad();
  return meta;
}

}  // namespace

// ---- Cuts --------------------------------------------------------------------------------------

std::vector<std::string> even_cuts(nn::ModuleBase& model, std::span<nn::ModuleBase* const> blocks,
                                   int stages) {
  const auto count = static_cast<size_t>(stages);
  TS_CHECK_AS(ConfigError, blocks.size() >= count, kStages,
              "pp_size x pp_stages_per_rank asks for ", stages, " stages, and ", model.type_name(),
              " has ", blocks.size(),
              " blocks to begin them with; take fewer stages, or name modules in pp_cuts");
  const std::vector<double> costs = arithmetic_of(model);
  // Of each block with what follows it up to the next one.
  std::vector<double> segments;
  std::vector<std::string> names;
  double before = 0;
  const std::vector<nn::NamedModule> modules = model.named_modules();
  for (size_t i = 0; i < modules.size(); ++i) {
    if (std::ranges::find(blocks, modules[i].module) != blocks.end()) {
      segments.push_back(std::exchange(before, 0));
      names.push_back(modules[i].name);
    }
    (segments.empty() ? before : segments.back()) += costs[i];
  }
  // best[s][n]: the first n segments in s + 1 stages: the largest stage, then the sum of squares.
  struct Best {
    double largest = 0, squares = 0;
    size_t begin = 0;  // of the last stage
    bool operator<(const Best& other) const {
      return std::pair(largest, squares) < std::pair(other.largest, other.squares);
    }
  };
  const size_t total = segments.size();
  std::vector<std::vector<Best>> best(count, std::vector<Best>(total + 1));
  const auto sum = [&](size_t begin, size_t end) {
    double cost = 0;
    for (size_t i = begin; i < end; ++i) cost += segments[i];
    return cost;
  };
  for (size_t s = 0; s < count; ++s) {
    for (size_t n = s + 1; n <= total; ++n) {
      std::optional<Best> found;
      for (size_t begin = s; begin < n; ++begin) {
        if (s == 0 && begin > 0) break;
        const double own = sum(begin, n);
        const Best rest = s == 0 ? Best{} : best[s - 1][begin];
        const Best one{std::max(rest.largest, own), rest.squares + own * own, begin};
        if (!found || one < *found) found = one;
      }
      best[s][n] = *found;
    }
  }
  std::vector<std::string> cuts;
  size_t end = total;
  for (size_t s = count; s-- > 1;) {
    end = best[s][end].begin;
    cuts.insert(cuts.begin(), names[end]);
  }
  return cuts;
}

// ---- Stages ------------------------------------------------------------------------------------

struct StagedModel::Impl {
  // What one call of a stage knows, until the backward of its micro-batch.
  struct Call : MetaInputs {
    enum class Phase : uint8_t { kBefore, kStage, kBehind };
    const Impl* impl = nullptr;
    int stage = 0;
    Phase phase = Phase::kBefore;
    TensorList received, outputs;
    // Arguments at the cut, which live as long as this, and what takes their place.
    std::vector<std::pair<Tensor, Tensor>> meanings;

    // Also of a copy that a recomputed call keeps of an argument.
    Tensor meaning_of(const Tensor& meta) const {
      for (const auto& [argument, value] : meanings) {
        if (argument.storage() == meta.storage() && argument.offset() == meta.offset() &&
            argument.shape() == meta.shape() && argument.strides() == meta.strides() &&
            argument.dtype() == meta.dtype()) {
          return value;
        }
      }
      return {};
    }
    TensorList resolved(const Op& op, std::span<const Tensor> inputs, bool in_place) const override;
  };
  // A stage of this rank.
  struct Stage : PipelineStage {
    Impl* impl = nullptr;
    int number = 0;
    std::map<int, std::shared_ptr<Call>> calls;  // by micro-batch, until its backward

    void gather() override { impl->finish_gathers(number); }
    void release() override { impl->release(number); }
    void reduce() override { impl->start_reductions(number, false); }
    std::vector<Tensor> forward(int micro, std::span<const Tensor> inputs) override;
    Tensor seed(int micro, const Tensor& loss) override {
      return impl->calls.seed ? impl->calls.seed(micro, loss) : Tensor();
    }
    std::shared_ptr<void> enter_backward(int micro) override;
  };
  // Parameters of a stage of this rank that its data-parallel ranks divide.
  struct Shards {
    int stage;
    std::unique_ptr<ParamGroup> group;
    std::vector<size_t> parameters;  // their places in the list
    bool reduces = false;            // in this step, so far
  };
  // Of a parameter in one stage.
  struct Use {
    int stage;
    Tensor whole;  // a leaf that ops read; undefined on ranks that lack the stage
  };
  struct Parameter {
    std::string name;
    Tensor parameter;
    std::vector<Use> uses;     // by ascending stages; it belongs to the first one's
    Shards* shards = nullptr;  // that it is in, on ranks that have its stage
    bool arrived = false;      // a gradient in this step, on this rank
  };
  struct Place {
    Tensor* place;
    int stage;
    Tensor outside;  // of steps
    Tensor inside;   // of calls of the stage; undefined on ranks that lack it
    Tensor meta;     // in those of other stages
    bool is_buffer;
  };

  nn::ModuleBase* model = nullptr;
  Mesh* mesh = nullptr;
  int ranks = 1, rank = 0, stages = 1;
  std::vector<std::string> cuts;
  std::vector<Parameter> parameters;
  std::vector<Place> places;
  std::vector<std::pair<std::string, int>> buffers;  // persistent ones, with their stages
  std::vector<std::unique_ptr<Stage>> own;
  std::vector<HookHandle> handles;
  std::vector<double> arithmetic;  // of each stage
  StageSharding sharding = StageSharding::kNone;
  bool is_divided = false;  // by tensor parallelism
  std::vector<std::unique_ptr<Shards>> shards;

  // Within a step.
  bool in_step = false, trains = false, in_backward = false;
  Calls calls;
  std::optional<PipelineGroups> groups;
  std::vector<Work> sends;
  int shown = -1;
  Call* current = nullptr;

  int rank_of(int stage) const { return stage % ranks; }
  bool has(int stage) const { return rank_of(stage) == rank; }
  // "stage 1, which begins with 'h.6'"
  std::string title(int stage) const {
    std::string text = "stage " + std::to_string(stage);
    if (stage > 0) text += ", which begins with '" + cuts[static_cast<size_t>(stage - 1)] + "'";
    return text;
  }

  void deal(const StagingOptions& options);
  void divide(Parameter& parameter);
  void shard();
  void finish_gathers(int stage);
  void release(int stage);
  void start_reductions(int stage, bool tied);
  void forget_shards();
  void at_cut(int stage, nn::TensorRefs inputs);
  void show(int stage);
  void hide();
  void begin();
  void finish();
  Tensor as_gradient(const Parameter& of, const Tensor& gradient) const;
};

// The stages of modules, and of the places in them.
void StagedModel::Impl::deal(const StagingOptions& options) {
  const std::vector<nn::NamedModule> modules = model->named_modules();
  const auto stage_at = [&](size_t index, const std::vector<size_t>& begins) {
    return static_cast<int>(std::ranges::upper_bound(begins, index) - begins.begin());
  };
  std::vector<size_t> begins;
  for (const std::string& cut : options.cuts) {
    const auto found = std::ranges::find(modules, cut, &nn::NamedModule::name);
    std::string last = modules.back().name;
    TS_CHECK_AS(ConfigError, found != modules.end() && !cut.empty(), kStages, "the cut '", cut,
                "' names no module of ", model->type_name(), ", whose names are like '", last, "'");
    const auto index = static_cast<size_t>(found - modules.begin());
    TS_CHECK_AS(ConfigError, begins.empty() || index > begins.back(), kStages, "the cut '", cut,
                "' does not come after '", modules[begins.empty() ? 0 : begins.back()].name,
                "' in ", model->type_name(), "; name cuts once each, in the model's order");
    begins.push_back(index);
  }
  cuts = options.cuts;
  const std::vector<double> costs = arithmetic_of(*model);
  arithmetic.assign(static_cast<size_t>(stages), 0);
  std::unordered_map<std::string, int> stage_of;
  for (size_t i = 0; i < modules.size(); ++i) {
    const int stage = stage_at(i, begins);
    stage_of[modules[i].name] = stage;
    arithmetic[static_cast<size_t>(stage)] += costs[i];
  }
  const auto stage_of_place = [&](const std::string& name) {
    const size_t dot = name.rfind('.');
    return stage_of.at(dot == std::string::npos ? std::string() : name.substr(0, dot));
  };
  for (const NamedTensor& named : model->named_parameters()) {
    const bool by_layers = divided_parameter(named.tensor) != nullptr;
    is_divided = is_divided || by_layers;
    TS_CHECK_AS(ConfigError, by_layers || element_guard(named.tensor) == nullptr, kStages, "'",
                named.name, "' is ", named.tensor,
                ": it was divided before; deal a model over stages before other ways of sharding");
    parameters.push_back({named.name, named.tensor, {}});
  }
  for (const auto& [name, place] : model->parameter_places()) {
    if (!place->defined()) continue;
    const int stage = stage_of_place(name);
    places.push_back({place, stage, *place, {}, {}, false});
    const auto of = std::ranges::find_if(
        parameters, [&](const Parameter& one) { return one.parameter.is(*place); });
    const auto at = std::ranges::lower_bound(of->uses, stage, {}, &Use::stage);
    if (at == of->uses.end() || at->stage != stage) of->uses.insert(at, {stage, {}});
  }
  const StateDict saved = model->state_dict();
  for (const auto& [name, place] : model->buffer_places()) {
    if (!place->defined()) continue;
    const int stage = stage_of_place(name);
    places.push_back({place, stage, *place, *place, meta_of(*place), true});
    if (saved.contains(name)) buffers.emplace_back(name, stage);
  }
}

// The parameter becomes a run of all elements on the ranks that have its stage, and of none on
// others. What ops read shares its elements.
void StagedModel::Impl::divide(Parameter& one) {
  const Tensor& parameter = one.parameter;
  const Shape shape = parameter.shape();
  const bool trained = parameter.requires_grad();
  const int owner = rank_of(one.uses.front().stage);
  const NoGradGuard no_grad;
  const auto leaf = [&](Tensor values) {
    values.set_requires_grad(trained);
    return values;
  };
  // Copies on ranks of later stages, before the elements go.
  for (Use& use : one.uses) {
    if (has(use.stage) && owner != rank) use.whole = leaf(clone(raw::alias(parameter)));
  }
  if (ranks == 1) {
    for (Use& use : one.uses) use.whole = leaf(raw::alias(parameter));
    one.uses.front().whole = parameter;
    return;
  }
  const int64_t numel = parameter.numel();
  Placements placements;
  for (const MeshAxis& axis : mesh->axes()) {
    placements.emplace_back(axis.name == "pp" ? Placement(FlatShard{owner * numel, numel})
                                              : Placement(Replicate()));
  }
  const Tensor part = owner == rank ? raw::view(kernels::contiguous(raw::alias(parameter)), {numel})
                                    : raw::empty({0}, parameter.dtype(), parameter.device());
  const Tensor lying = from_local(part, *mesh, placements, {.shape = shape});
  parameter.set_grad(Tensor());
  pass_initial_values(parameter, lying);
  parameter.set_data(part);
  parameter.bump_version("dealing a model over stages");
  copy_guard(lying, parameter);
  set_replaced(parameter, true);
  if (owner != rank) return;
  for (Use& use : one.uses) {
    if (has(use.stage)) use.whole = leaf(raw::view(raw::alias(parameter), shape));
  }
}

// ---- see [Note: stages that are sharded]

void StagedModel::Impl::shard() {
  const std::string data = mesh->has("dp_shard") ? "dp_shard" : "dp_replicate";
  Mesh& parts = mesh->view({{"pp_" + data, {"pp", data}}});
  // Those whose gradients are summands among the ranks that divide a layer lie on these, too.
  Group& holders = mesh->group(data);
  Group& wider = is_divided ? mesh->group({data, "tp"}) : holders;
  let_go_of_local_parts({model});
  for (Parameter& one : parameters) {  // before the elements go
    for (Use& use : one.uses) {
      if (!has(use.stage) || rank_of(one.uses.front().stage) == rank) continue;
      use.whole = clone(raw::alias(one.parameter));
      use.whole.impl()->marks = marks_of(one.parameter);
      use.whole.set_requires_grad(one.parameter.requires_grad());
    }
  }
  std::vector<ShardedParam> all;
  for (const Parameter& one : parameters) {
    ShardedParam& param = all.emplace_back(
        ShardedParam{.name = one.name, .shard = one.parameter, .whole = {}, .places = {}});
    lie_across(param, parts, kStages);
    if (!param.across) continue;
    const std::vector<int64_t> numels = param.across->part_numels();
    TS_CHECK_AS(UnsupportedError,
                std::ranges::adjacent_find(numels, std::not_equal_to<>()) == numels.end(), kStages,
                "takes parts of one size, and '", param.name, "' is ", param.shard,
                ", of which ranks hold more than others; pad it to a multiple of the ranks");
  }
  for (int stage = 0; stage < stages; ++stage) {
    std::vector<std::vector<size_t>> lists;  // of one dtype and device each
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].uses.front().stage != stage) continue;
      const auto same = std::ranges::find_if(lists, [&](const std::vector<size_t>& list) {
        const ShardedParam& other = all[list.front()];
        return other.shard.dtype() == all[i].shard.dtype() &&
               other.shard.device() == all[i].shard.device() && other.mesh == all[i].mesh;
      });
      (same == lists.end() ? lists.emplace_back() : *same).push_back(i);
    }
    for (std::vector<size_t>& list : lists) {
      std::vector<ShardedParam> params;
      for (const size_t i : list) {
        parameters[i].parameter.set_grad(Tensor());
        params.push_back(all[i]);
      }
      Mesh& over = params.front().mesh != nullptr ? *params.front().mesh : parts;
      Group& ranks_of_list = params.front().mesh != nullptr ? wider : holders;
      const int count = ranks_of_list.size(), first = rank_of(stage) * count;
      if (has(stage)) {
        auto own =
            std::make_unique<Shards>(Shards{.stage = stage, .group = {}, .parameters = list});
        const bool keeps = sharding != StageSharding::kParameters;
        own->group = std::make_unique<FlatShards>(
            "stage " + std::to_string(stage),
            ShardRanks{
                .mesh = &over, .shards = &ranks_of_list, .batches = &holders, .first = first},
            std::move(params), GroupDTypes{}, false, keeps, OffloadPolicy::kNone,
            keeps || count == 1);
        for (size_t i = 0; i < list.size(); ++i) {
          parameters[list[i]].shards = own.get();
          parameters[list[i]].uses.front().whole = own->group->params()[i].whole;
        }
        shards.push_back(std::move(own));
        continue;
      }
      const DType dtype = params.front().shard.dtype();
      const FlatRun run(params, count, alignment_of({dtype}));
      for (size_t i = 0; i < params.size(); ++i) {
        params[i].shape = params[i].shard.shape();
        become_part(params[i], raw::empty({0}, dtype, params[i].shard.device()), over,
                    FlatShard{first * run.part_numel + run.offsets[i], run.part_numel});
      }
    }
  }
  for (Parameter& one : parameters) {
    if (rank_of(one.uses.front().stage) != rank) continue;
    for (Use& use : one.uses) {
      if (!has(use.stage) || use.whole.defined()) continue;
      use.whole = raw::alias(one.uses.front().whole);
      use.whole.impl()->marks = marks_of(one.parameter);
      use.whole.set_requires_grad(one.parameter.requires_grad());
    }
  }
}

void StagedModel::Impl::finish_gathers(int stage) {
  for (const auto& own : shards) {
    if (own->stage != stage) continue;
    own->group->start_gather();
    own->group->finish_gather();
  }
}

void StagedModel::Impl::release(int stage) {
  for (const auto& own : shards) {
    if (own->stage != stage) continue;
    own->group->check_unwritten();
    own->group->release();
  }
}

// Those of tied parameters wait for the gradients of the other places.
void StagedModel::Impl::start_reductions(int stage, bool tied) {
  for (const auto& own : shards) {
    if (own->stage != stage || own->reduces) continue;
    const bool is_tied = std::ranges::any_of(
        own->parameters, [&](size_t i) { return parameters[i].uses.size() > 1; });
    if (is_tied && !tied) continue;
    for (const size_t i : own->parameters) {
      parameters[i].arrived = parameters[i].uses.front().whole.grad().defined();
    }
    own->group->start_reduce(false, true);
    own->reduces = true;
  }
}

// What a step that failed left behind, without waiting for ranks that may have failed as well.
void StagedModel::Impl::forget_shards() {
  for (const auto& own : shards) {
    own->group->let_go();
    own->reduces = false;
  }
}

StagedModel::StagedModel(nn::ModuleBase& model, Mesh* mesh, const StagingOptions& options)
    : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.model = &model;
  impl.mesh = mesh;
  impl.ranks = mesh == nullptr ? 1 : mesh->size("pp");
  impl.rank = mesh == nullptr ? 0 : mesh->coordinate("pp");
  impl.stages = impl.ranks * options.stages_per_rank;
  TS_CHECK_AS(ConfigError, std::ssize(options.cuts) == impl.stages - 1, kStages, impl.ranks,
              " ranks with ", options.stages_per_rank, " stages each take ", impl.stages - 1,
              " cuts; got ", options.cuts.size(),
              "; a cut is the name of the module with which a further stage begins");
  impl.deal(options);
  impl.sharding = options.sharding;
  TensorList metas;
  for (const Impl::Parameter& parameter : impl.parameters) {
    metas.push_back(meta_of(parameter.parameter));
    metas.back().impl()->marks = marks_of(parameter.parameter);
  }
  const bool shards = impl.sharding != StageSharding::kNone || impl.is_divided;
  if (shards) {
    TS_CHECK_AS(
        ConfigError, impl.ranks > 1 && mesh->has("dp_shard") != mesh->has("dp_replicate"), kStages,
        "the ranks of a stage that divide its parameters are neighbours along "
        "'dp_shard'; got ",
        mesh == nullptr ? std::string("one rank") : mesh->describe(), "; leave dp_replicate out");
    const NoGradGuard no_grad;
    impl.shard();
  }
  for (size_t i = 0; i < impl.parameters.size(); ++i) {
    Impl::Parameter& parameter = impl.parameters[i];
    if (!shards) impl.divide(parameter);
    for (Impl::Place& place : impl.places) {
      if (place.is_buffer || !place.outside.is(parameter.parameter)) continue;
      place.meta = metas[i];
      place.inside = std::ranges::find(parameter.uses, place.stage, &Impl::Use::stage)->whole;
    }
  }
  for (int stage = impl.rank; stage < impl.stages; stage += impl.ranks) {
    impl.own.push_back(std::make_unique<Impl::Stage>());
    impl.own.back()->impl = &impl;
    impl.own.back()->number = stage;
  }
  for (int stage = 1; stage < impl.stages; ++stage) {
    nn::ModuleBase& module = model.submodule(impl.cuts[static_cast<size_t>(stage - 1)]);
    impl.handles.push_back(module.register_forward_pre_hook(
        [&impl, stage](nn::ModuleBase&, nn::TensorRefs inputs) { impl.at_cut(stage, inputs); }));
  }
  if (impl.ranks == 1) return;
  impl.handles.push_back(
      model.register_call_scope([&impl](nn::ModuleBase& module) -> std::shared_ptr<void> {
        TS_CHECK_AS(ConfigError, impl.in_step, "pipeline", module.type_name(), " is dealt over ",
                    impl.stages,
                    " stages, of which this rank has some; call it in what pipeline.step() and "
                    "pipeline.evaluate() are given");
        return nullptr;
      }));
}

StagedModel::~StagedModel() {
  for (HookHandle& handle : impl_->handles) handle.remove();
  if (impl_->ranks == 1) return;
  for (const Impl::Parameter& one : impl_->parameters) set_replaced(one.parameter, false);
}

int StagedModel::ranks() const { return impl_->ranks; }
int StagedModel::stages() const { return impl_->stages; }
const std::vector<std::string>& StagedModel::cuts() const { return impl_->cuts; }
bool StagedModel::is_in_step() const { return impl_->in_step; }

std::vector<PipelineStage*> StagedModel::own_stages() {
  std::vector<PipelineStage*> stages;
  for (const auto& stage : impl_->own) stages.push_back(stage.get());
  return stages;
}

std::string StagedModel::describe() const {
  const Impl& impl = *impl_;
  std::vector<int64_t> bytes(static_cast<size_t>(impl.stages));
  for (const Impl::Parameter& one : impl.parameters) {
    const int64_t size =
        numel_of(whole_shape(one.parameter)) * static_cast<int64_t>(size_of(one.parameter.dtype()));
    for (const Impl::Use& use : one.uses) bytes[static_cast<size_t>(use.stage)] += size;
  }
  double total = 0;
  for (const double cost : impl.arithmetic) total += cost;
  std::string text, divided;
  if (impl.sharding != StageSharding::kNone) {
    const std::string ranks = std::to_string(impl.mesh->size("dp_shard")) + " ranks";
    divided = impl.sharding == StageSharding::kStates ? " (states divided by " + ranks + ")"
                                                      : " (divided by " + ranks + ")";
  }
  for (int stage = 0; stage < impl.stages; ++stage) {
    const auto at = static_cast<size_t>(stage);
    char numbers[128];
    plain_snprintf(numbers, sizeof numbers, ": %.1f MB of parameters%s, %.0f%% of the arithmetic\n",
                   static_cast<double>(bytes[at]) / 1e6, divided.c_str(),
                   total > 0 ? 100 * impl.arithmetic[at] / total : 0.0);
    text += "stage " + std::to_string(stage) + " on rank " + std::to_string(impl.rank_of(stage)) +
            ", from " + (stage == 0 ? "the inputs" : "'" + impl.cuts[at - 1] + "'") + numbers;
  }
  return text;
}

// ---- Calls -------------------------------------------------------------------------------------

TensorList StagedModel::Impl::Call::resolved(const Op& op, std::span<const Tensor> inputs,
                                             bool in_place) const {
  TensorList all(inputs.begin(), inputs.end());
  if (phase != Phase::kStage) {
    TS_CHECK_AS(DeviceError, !in_place || all[0].is_meta(), op, "writes into ", all[0],
                " what another stage than ", impl->title(stage),
                " calculates; make a new tensor, or cut elsewhere");
    for (Tensor& input : all) {
      if (input.defined() && !input.is_meta()) input = meta_of(input);
    }
    return all;
  }
  for (Tensor& input : all) {
    if (!input.defined() || !input.is_meta()) continue;
    const Tensor value = meaning_of(input);
    TS_CHECK_AS(DeviceError, value.defined(), op, "reads ", input, " in ", impl->title(stage),
                ", and another stage calculates it",
                stage == 0 ? "; cut behind the modules that it comes from"
                           : ": it crosses the cut unseen; pass it among the arguments of that "
                             "module as it is, or cut elsewhere");
    TS_CHECK_AS(
        UnsupportedError, !impl->in_backward || !value.requires_grad(), op, "reads ", value, " in ",
        impl->title(stage),
        ", where a module behind the cut is recomputed: the gradient of what passes its cut "
        "beside it would be lost; recompute smaller modules, or cut elsewhere");
    input = value;
  }
  return all;
}

void StagedModel::Impl::at_cut(int stage, nn::TensorRefs inputs) {
  if (current == nullptr) {
    TS_CHECK_AS(ConfigError, !in_backward, kStages, "the cut '",
                cuts[static_cast<size_t>(stage - 1)],
                "' lies inside of a module whose calls are recomputed in backward; cut at that "
                "module, or recompute smaller ones");
    return;
  }
  Call& call = *current;
  using Phase = Call::Phase;
  const auto twice = [&](bool again) {
    TS_CHECK_AS(ConfigError, !again, kStages, "the module '", cuts[static_cast<size_t>(stage - 1)],
                "' is called several times for a micro-batch, and a cut is passed once; cut "
                "elsewhere");
  };
  if (stage == call.stage) {
    twice(call.phase != Phase::kBefore);
    call.phase = Phase::kStage;
    TS_CHECK_AS(ConfigError, inputs.size() == call.received.size(), kStages, "'",
                cuts[static_cast<size_t>(stage - 1)], "' has ", inputs.size(),
                " tensors as arguments here and ", call.received.size(),
                " on the rank before; ranks call it alike");
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensor& given = *inputs[i];
      const Tensor& value = call.received[i];
      TS_CHECK_SHAPE(!given.defined() || !value.defined() || given.shape() == value.shape(),
                     kStages, "argument ", i, " of '", cuts[static_cast<size_t>(stage - 1)],
                     "' is ", given, " here, and what the stage before sends is ", value,
                     "; all ranks of a pipeline read the same batches");
      if (given.defined() && value.defined()) {
        value.impl()->marks = given.impl()->marks;
        call.meanings.emplace_back(given, value);
      }
      given = value;
    }
  } else if (stage == call.stage + 1) {
    twice(call.phase == Phase::kBehind);
    TS_CHECK_AS(ConfigError, call.phase == Phase::kStage, kStages, "'",
                cuts[static_cast<size_t>(stage - 1)], "' is called before '",
                cuts[static_cast<size_t>(call.stage - 1)],
                "'; give cuts in the order of their calls");
    call.phase = Phase::kBehind;
    for (Tensor* input : inputs) {
      if (!input->defined()) {
        call.outputs.emplace_back();
        continue;
      }
      if (input->is_meta()) {
        const Tensor value = call.meaning_of(*input);
        TS_CHECK_AS(DeviceError, value.defined(), kStages, "an argument of '",
                    cuts[static_cast<size_t>(stage - 1)], "' is ", *input, " in ",
                    title(call.stage),
                    ", and another stage calculates it: it crosses the cut unseen; cut elsewhere");
        call.outputs.push_back(value);
      } else {
        call.outputs.push_back(*input);
      }
      *input = meta_of(call.outputs.back());
    }
  }
}

std::vector<Tensor> StagedModel::Impl::Stage::forward(int micro, std::span<const Tensor> inputs) {
  Impl& all = *impl;
  all.finish_gathers(number);  // evaluations have no action for it
  all.show(number);
  const auto call = std::make_shared<Call>();
  call->impl = impl;
  call->stage = number;
  call->phase = number == 0 ? Call::Phase::kStage : Call::Phase::kBefore;
  call->received.assign(inputs.begin(), inputs.end());
  Tensor loss;
  {
    const ScopedValue<Call*> current(all.current, call.get());
    const ScopedValue<const MetaInputs*> rules(Context::current().slot<MetaInputsSlot>().rules,
                                               call.get());
    try {
      loss = all.calls.call(micro);
    } catch (Error& error) {
      error.add_context(all.title(number));
      throw;
    }
  }
  const auto missed = [&](int stage) {
    TS_THROW(
        ConfigError, kStages, "the call of ", all.model->type_name(), " ended without one of '",
        all.cuts[static_cast<size_t>(stage - 1)], "', with which stage ", stage,
        " begins; the loss comes from the last stage, and each module at a cut is called once");
  };
  if (call->phase == Call::Phase::kBefore) missed(number);
  const bool is_last = number + 1 == all.stages;
  if (!is_last && call->phase == Call::Phase::kStage) missed(number + 1);
  if (is_last) {
    TS_CHECK_AS(ConfigError, loss.defined() && !loss.is_meta(), kStages,
                "the loss does not come from the last stage (", all.title(number),
                "); return what ", all.model->type_name(), "'s results lead to");
  }
  std::vector<Tensor> outputs = is_last ? std::vector<Tensor>{loss} : std::move(call->outputs);
  call->outputs.clear();
  call->received.clear();
  call->phase = Call::Phase::kStage;
  if (all.trains) calls[micro] = call;
  return outputs;
}

std::shared_ptr<void> StagedModel::Impl::Stage::enter_backward(int micro) {
  struct Scope {
    Impl& impl;
    std::shared_ptr<Call> call;
    ScopedValue<const MetaInputs*> rules;
    ScopedValue<bool> in_backward;
  };
  impl->show(number);
  std::shared_ptr<Call> call = std::move(calls.extract(micro).mapped());
  const MetaInputs*& slot = Context::current().slot<MetaInputsSlot>().rules;
  return std::shared_ptr<void>(
      new Scope{*impl, call, {slot, call.get()}, {impl->in_backward, true}},
      [](void* scope) { delete static_cast<Scope*>(scope); });
}

// ---- Steps -------------------------------------------------------------------------------------

void StagedModel::Impl::show(int stage) {
  if (shown == stage) return;
  for (Place& place : places) {
    const bool was = shown >= 0 && place.stage == shown;
    if (was && place.is_buffer) place.inside = place.outside = *place.place;
    *place.place = place.stage == stage ? place.inside : place.meta;
  }
  shown = stage;
}

void StagedModel::Impl::hide() {
  for (Place& place : places) {
    if (place.is_buffer && place.stage == shown) place.inside = place.outside = *place.place;
    *place.place = place.outside;
  }
  shown = -1;
}

Tensor StagedModel::Impl::as_gradient(const Parameter& of, const Tensor& gradient) const {
  const DTensorSpec& spec = spec_of(of.parameter);
  return from_local(gradient, *spec.mesh, spec.placements, {.shape = spec.shape});
}

void StagedModel::Impl::begin() {
  const NoGradGuard no_grad;
  for (Place& place : places) {
    if (place.is_buffer) {
      if (!place.place->is(place.outside)) {
        place.outside = place.inside = *place.place;
        place.meta = meta_of(*place.place);
      }
      continue;
    }
    TS_CHECK_AS(UnsupportedError, place.place->is(place.outside), kStages, "a parameter of ",
                model->type_name(), " was replaced by ", *place.place,
                "; copy_() values into the parameters of a model that is dealt over stages");
    place.meta.set_requires_grad(place.outside.requires_grad());
  }
  in_step = true;
  for (const auto& own : shards) {
    own->reduces = false;
    own->group->follow_requires_grad();
    if (trains) own->group->begin_backward();
    own->group->start_gather();
  }
  for (Parameter& one : parameters) {
    const bool trained = one.parameter.requires_grad();
    const int owner = rank_of(one.uses.front().stage);
    one.arrived = false;
    for (size_t i = 0; i < one.uses.size(); ++i) {
      Use& use = one.uses[i];
      const int user = rank_of(use.stage);
      if (i > 0 && user != owner && rank == owner) {
        if (one.shards != nullptr) finish_gathers(one.shards->stage);
        sends.push_back(groups->outputs.send(one.uses.front().whole.detach(), user, 0,
                                             {.channel = Channel::kPeer, .tag = "tied value"}));
      }
      if (!use.whole.defined() || use.whole.is(one.parameter)) continue;
      use.whole.set_requires_grad(trained);
      Tensor gradient;
      if (i == 0 && trained && one.shards == nullptr && one.parameter.grad().defined()) {
        gradient = raw::view(raw::alias(one.parameter.grad()), use.whole.shape());
      }
      use.whole.set_grad(gradient);
      if (i > 0 && user != owner) {
        const Tensor values = raw::alias(use.whole);
        groups->outputs.recv(values, owner, 0, {.channel = Channel::kPeer, .tag = "tied value"})
            .wait();
        use.whole.bump_version("a tied value");
      }
    }
  }
}

void StagedModel::Impl::finish() {
  hide();
  const NoGradGuard no_grad;
  const CollectiveOptions tied{.channel = Channel::kPeer, .tag = "tied gradient"};
  for (Parameter& one : parameters) {
    const int owner = rank_of(one.uses.front().stage);
    Use& first = one.uses.front();
    if (trains && one.parameter.requires_grad()) {
      for (size_t i = 1; i < one.uses.size(); ++i) {
        Use& use = one.uses[i];
        const int user = rank_of(use.stage);
        Tensor gradient = use.whole.defined() ? use.whole.grad() : Tensor();
        if (user != owner) {
          if (rank == user) {
            gradient = gradient.defined() ? kernels::contiguous(gradient.detach())
                                          : raw::zeros_like(raw::alias(use.whole));
            sends.push_back(groups->gradients.send(gradient, owner, 0, tied));
          } else if (rank == owner) {
            gradient = raw::empty(first.whole.shape(), first.whole.dtype(), first.whole.device());
            groups->gradients.recv(gradient, user, 0, tied).wait();
          }
        }
        if (rank == owner && gradient.defined()) {
          const Tensor sum = first.whole.grad();
          first.whole.set_grad(sum.defined() ? add(sum.detach(), gradient) : gradient);
        }
      }
    }
    for (Use& use : one.uses) {
      if (!use.whole.defined() || use.whole.is(one.parameter)) continue;
      if (&use == &first && one.shards != nullptr) continue;
      const Tensor gradient = use.whole.grad();
      use.whole.set_grad(Tensor());
      if (&use != &first || !trains) continue;
      one.parameter.set_grad(
          gradient.defined() ? as_gradient(one, raw::view(kernels::contiguous(raw::alias(gradient)),
                                                          {gradient.numel()}))
                             : Tensor());
    }
  }
  for (const Work& send : sends) send.wait();
  sends.clear();
  for (const auto& own : shards) {
    if (trains) start_reductions(own->stage, true);
    release(own->stage);
  }
  in_step = false;
}

StagedModel::Step::Step(StagedModel& staged, PipelineGroups groups, Calls calls, bool trains)
    : staged_(staged) {
  Impl& impl = *staged.impl_;
  impl.groups.emplace(groups);
  impl.calls = std::move(calls);
  impl.trains = trains;
  try {
    impl.begin();
  } catch (...) {
    impl.forget_shards();
    impl.in_step = false;
    throw;
  }
}
StagedModel::Step::~Step() {
  Impl& impl = *staged_.impl_;
  if (!finished_) {
    impl.hide();
    impl.in_step = false;
    for (Work& send : impl.sends) send.forget();
    impl.sends.clear();
    impl.forget_shards();
    for (Impl::Parameter& one : impl.parameters) {
      for (Impl::Use& use : one.uses) {
        if (use.whole.defined() && !use.whole.is(one.parameter)) use.whole.set_grad(Tensor());
      }
    }
  }
  // Reductions that nobody has ended: waiting for them would hold up the error that is why.
  for (const auto& own : impl.shards) {
    if (std::exchange(own->reduces, false) && own->group->trains()) own->group->let_go();
  }
  for (const auto& stage : impl.own) stage->calls.clear();
  impl.calls = {};
  impl.groups.reset();
}
void StagedModel::Step::finish() {
  staged_.impl_->finish();
  finished_ = true;
}

// ---- Gradients and buffers ---------------------------------------------------------------------

std::vector<bool> StagedModel::own_gradients() const {
  std::vector<bool> has;
  for (const Impl::Parameter& one : impl_->parameters) {
    has.push_back(impl_->has(one.uses.front().stage) &&
                  (one.arrived || one.parameter.grad().defined()));
  }
  return has;
}

TensorList StagedModel::gradients_to_reduce(const std::vector<bool>& has) {
  TensorList gradients;
  for (size_t i = 0; i < has.size(); ++i) {
    const Impl::Parameter& one = impl_->parameters[i];
    if (!has[i] || one.shards != nullptr || !impl_->has(one.uses.front().stage)) continue;
    if (!one.parameter.grad().defined()) {
      one.parameter.set_grad(impl_->as_gradient(one, raw::zeros_like(raw::alias(one.parameter))));
    }
    gradients.push_back(raw::alias(one.parameter.grad()));
  }
  return gradients;
}

void StagedModel::finish_reductions(const std::vector<bool>& has) {
  const NoGradGuard no_grad;
  for (const auto& own : impl_->shards) {
    ParamGroup& group = *own->group;
    if (!own->reduces || !group.trains()) continue;
    try {
      group.wait_reduce(true);
    } catch (Error& error) {
      error.add_context("reduction of stage " + std::to_string(own->stage));
      throw;
    }
    group.finish_sum(1);
    for (size_t i = 0; i < own->parameters.size(); ++i) {
      if (has[own->parameters[i]] && group.params()[i].trains()) group.hand_out(i);
    }
    group.end_backward();
    own->reduces = false;
  }
}

void StagedModel::complete_gradients(const std::vector<bool>& has) {
  for (size_t i = 0; i < has.size(); ++i) {
    const Impl::Parameter& one = impl_->parameters[i];
    if (impl_->has(one.uses.front().stage)) continue;
    const Tensor& parameter = one.parameter;
    if (has[i] && parameter.grad().defined()) continue;
    parameter.set_grad(
        has[i] ? impl_->as_gradient(one, raw::empty({0}, parameter.dtype(), parameter.device()))
               : Tensor());
  }
}

void StagedModel::share_buffers() {
  if (impl_->ranks == 1 || impl_->buffers.empty()) return;
  const NoGradGuard no_grad;
  for (int from = 0; from < impl_->ranks; ++from) {
    NamedTensors values;
    for (const auto& [name, place] : impl_->model->buffer_places()) {
      const auto known =
          std::ranges::find(impl_->buffers, name, &std::pair<std::string, int>::first);
      if (known == impl_->buffers.end() || impl_->rank_of(known->second) != from) continue;
      values.push_back({name, raw::alias(*place)});
    }
    if (!values.empty()) broadcast_tensors(values, impl_->mesh->group("pp"), from, "buffers");
  }
}

}  // namespace tessera::distributed
