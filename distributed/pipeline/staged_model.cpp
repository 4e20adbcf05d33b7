#include <tessera/distributed/pipeline/staged_model.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/leaf_hooks.h>
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
#include <tessera/distributed/mesh/divided_parameter.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/pipeline/staged_model_impl.h>

namespace tessera::distributed {
namespace {

Tensor meta_of(const Tensor& x) {
  const Tensor meta = raw::empty(x.shape(), x.dtype(), kMeta);
  meta.impl()->marks = x.impl()->marks;
  if (is_floating(x.dtype()) && x.requires_grad()) meta.set_requires_grad();
  return meta;
}

}  // namespace

// ---- Stages ------------------------------------------------------------------------------------

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
    if (saved.contains(name)) buffers.push_back({.name = name, .stage = stage});
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
  TS_CHECK_AS(AutogradError, !is_last || !all.trains || loss.requires_grad(), kStages, "the loss ",
              loss,
              " does not require grad: no input of its calculation does, or grad mode was off");
  std::vector<Tensor> outputs = is_last ? std::vector<Tensor>{loss} : std::move(call->outputs);
  call->outputs.clear();
  call->received.clear();
  call->phase = Call::Phase::kStage;
  if (all.trains) calls[micro] = call;
  return outputs;
}

std::shared_ptr<void> StagedModel::Impl::Stage::enter_backward(int micro, bool ends) {
  struct Scope {
    Impl& impl;
    std::shared_ptr<Call> call;
    ScopedValue<const MetaInputs*> rules;
    ScopedValue<bool> in_backward;
  };
  impl->show(number);
  const auto found = calls.find(micro);
  const std::shared_ptr<Call> call = found->second;
  if (ends) calls.erase(found);
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
  const auto requires_grad = [](const Parameter& one) { return one.parameter.requires_grad(); };
  TS_CHECK_AS(AutogradError, !trains || std::ranges::any_of(parameters, requires_grad), kStages,
              "no parameter of ", model->type_name(),
              " requires grad, and a step is for gradients; unfreeze some, or take evaluate()");
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
      // Also of what was frozen since.
      if (i == 0 && one.shards == nullptr && one.parameter.grad().defined()) {
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
  std::vector<Impl::Buffer>& buffers = impl_->buffers;
  TensorList own(buffers.size());
  for (const auto& [name, place] : impl_->model->buffer_places()) {
    const auto known = std::ranges::find(buffers, name, &Impl::Buffer::name);
    if (known != buffers.end()) own[static_cast<size_t>(known - buffers.begin())] = *place;
  }
  // Constants may be large: only what some rank has written goes.
  Group& group = impl_->mesh->group("pp");
  const Tensor written = raw::empty({std::ssize(buffers)}, kI32);
  auto* const flags = written.data_as<int32_t>();
  for (size_t i = 0; i < buffers.size(); ++i) {
    flags[i] = own[i].defined() && !buffers[i].is_unwritten(own[i]) ? 1 : 0;
  }
  group
      .all_reduce(written, ReduceOp::kMax, {.channel = Channel::kControl, .tag = "written buffers"})
      .wait();
  for (int from = 0; from < impl_->ranks; ++from) {
    NamedTensors values;
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (flags[i] == 0 || impl_->rank_of(buffers[i].stage) != from) continue;
      values.push_back({buffers[i].name, raw::alias(own[i])});
    }
    if (!values.empty()) broadcast_tensors(values, group, from, "buffers");
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (own[i].defined()) buffers[i].note(own[i]);
  }
}

void StagedModel::follow_buffers(Group& ranks) {
  const NoGradGuard no_grad;
  TensorList own;
  NamedTensors values;
  for (const Impl::Place& place : impl_->places) {
    if (!place.is_buffer || place.stage != impl_->shown) continue;
    own.push_back(raw::alias(*place.place));
    values.push_back({std::to_string(values.size()), clone(own.back())});
  }
  if (values.empty()) return;
  broadcast_tensors(values, ranks, 0, "buffers");
  // Backwards of earlier micro-batches are still to come: what they saved is not written without need.
  for (size_t i = 0; i < own.size(); ++i) {
    if (any(ne(own[i], values[i].tensor)).item() != 0) copy_(own[i], values[i].tensor);
  }
}

}  // namespace tessera::distributed
