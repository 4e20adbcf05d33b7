#include <tessera/accelerate/parallelize.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/core/error.h>
#include <tessera/core/regex.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/fully_shard/zero.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/tensor_parallel/parallelize.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::accelerate {
namespace {

precision::Policy way_of_computing(PrecisionPolicy way, DType low) {
  switch (way) {
    case PrecisionPolicy::kBoundary:
      return precision::Policy::boundary(low);
    case PrecisionPolicy::kPure:
      return precision::Policy::pure(low);
    case PrecisionPolicy::kAutocast:
      break;
  }
  return precision::Policy::autocast(low);
}

DType wire_of(CommWrapper wrapper) {
  switch (wrapper) {
    case CommWrapper::kFP16:
      return kF16;
    case CommWrapper::kBF16:
      return kBF16;
    case CommWrapper::kNone:
      break;
  }
  return kF32;
}

std::shared_ptr<distributed::CommunicationHook> hook_of(const Settings& settings) {
  switch (settings.ddp_comm_hook.value) {
    case CommHook::kFP16:
      return std::make_shared<distributed::CastHook>(kF16);
    case CommHook::kBF16:
      return std::make_shared<distributed::CastHook>(kBF16);
    case CommHook::kPowerSgd:
    case CommHook::kBatchedPowerSgd:
      return std::make_shared<distributed::PowerSgdHook>(distributed::PowerSgdOptions{
          .rank = settings.ddp_power_sgd_rank,
          .start_step = settings.ddp_power_sgd_start_step,
          .batched = settings.ddp_comm_hook.value == CommHook::kBatchedPowerSgd,
          .wire = wire_of(settings.ddp_comm_wrapper.value)});
    case CommHook::kNone:
      break;
  }
  return nullptr;
}

distributed::GradientAverage average_of(const Settings& settings) {
  return settings.loss_weighting.value == LossWeighting::kHuggingFace
             ? distributed::GradientAverage::kRanks
             : distributed::GradientAverage::kWeight;
}

std::optional<DType> gradient_dtype_of(const precision::Policy& policy) {
  return policy.needs_masters() ? std::optional(policy.gradient) : std::nullopt;
}

distributed::ReplicateOptions replicate_options(const Settings& settings,
                                                const precision::Policy& policy) {
  const auto bytes = [](double megabytes) { return static_cast<int64_t>(megabytes * 1048576); };
  distributed::ReplicateOptions options;
  options.first_bucket_bytes = bytes(settings.ddp_first_bucket_mb);
  options.bucket_bytes = bytes(settings.ddp_bucket_cap_mb);
  options.gradient_as_bucket_view = settings.ddp_gradient_as_bucket_view;
  options.average = average_of(settings);
  options.axis = "loss";
  options.init_sync = settings.ddp_init_sync;
  options.broadcast_buffers = settings.ddp_broadcast_buffers;
  options.gradient_dtype = gradient_dtype_of(policy);
  return options;
}

distributed::OffloadPolicy offload_policy_of(const Settings& settings) {
  using distributed::OffloadPolicy;
  if (settings.offload_parameters) return OffloadPolicy::kParameters;
  return settings.offload_optimizer ? OffloadPolicy::kOptimizer : OffloadPolicy::kNone;
}

distributed::ZeroOptions zero_options(const Settings& settings, const precision::Policy& policy) {
  const auto bytes = [](double megabytes) { return static_cast<int64_t>(megabytes * 1048576); };
  return {.stage = settings.sharding.value == Sharding::kZero1 ? 1 : 2,
          .first_bucket_bytes = bytes(settings.ddp_first_bucket_mb),
          .bucket_bytes = bytes(settings.ddp_bucket_cap_mb),
          .gradient_dtype = gradient_dtype_of(policy),
          .average = average_of(settings),
          .init_sync = settings.ddp_init_sync,
          .broadcast_buffers = settings.ddp_broadcast_buffers,
          .offload_policy = offload_policy_of(settings)};
}

// ---- Units -------------------------------------------------------------------------------------

// Below a module that is a unit there is none.
template <class Wanted>
void collect_units(nn::ModuleBase& module, const Wanted& wanted,
                   std::vector<nn::ModuleBase*>& units) {
  for (size_t i = 0; i < module.num_children(); ++i) {
    nn::ModuleBase& child = module.child(i);
    if (wanted(module, child)) {
      units.push_back(&child);
    } else {
      collect_units(child, wanted, units);
    }
  }
}

std::vector<nn::ModuleBase*> units_by_class(nn::ModuleBase& model,
                                            const std::vector<std::string>& classes) {
  std::set<std::string> missing(classes.begin(), classes.end());
  std::vector<nn::ModuleBase*> units;
  collect_units(
      model,
      [&](const nn::ModuleBase&, const nn::ModuleBase& child) {
        const std::string name = child.type_name();
        if (std::ranges::find(classes, name) == classes.end()) return false;
        missing.erase(name);
        return true;
      },
      units);
  if (!missing.empty()) {
    std::set<std::string> known;
    for (const auto& [name, module] : model.named_modules()) known.insert(module->type_name());
    std::string list;
    for (const std::string& name : known) list += (list.empty() ? "" : ", ") + name;
    TS_THROW(ConfigError, "prepare", "fsdp_wrap_modules names the class ", *missing.begin(),
             ", of which ", model.type_name(), " has no module; it has ", list);
  }
  return units;
}

// As Accelerate's size-based policy: a module with so many parameters, those of units below it
// apart. Children come first.
int64_t units_by_size(nn::ModuleBase& module, int64_t least, bool is_root,
                      std::vector<nn::ModuleBase*>& units) {
  int64_t own = module.num_parameters();
  for (size_t i = 0; i < module.num_children(); ++i) {
    own -= units_by_size(module.child(i), least, false, units);
  }
  if (is_root || own < least) return module.num_parameters() - own;
  units.push_back(&module);
  return module.num_parameters();
}

// The blocks that a model repeats: children of one class of which their parent has several, with
// modules of their own.
std::vector<nn::ModuleBase*> repeated_blocks(nn::ModuleBase& model) {
  std::vector<nn::ModuleBase*> units;
  collect_units(
      model,
      [](const nn::ModuleBase& parent, const nn::ModuleBase& child) {
        int alike = 0;
        for (size_t i = 0; i < parent.num_children(); ++i) {
          alike += parent.child(i).type_name() == child.type_name();
        }
        return alike > 1 && child.num_children() > 0 && child.num_parameters() > 0;
      },
      units);
  return units;
}

precision::Fp8Recipe recipe_of(const Settings& settings) {
  precision::Fp8Recipe recipe{.scaling = settings.fp8_recipe.value,
                              .weight_gradient_in_low = settings.fp8_weight_gradient,
                              .in_evaluation = settings.fp8_in_evaluation,
                              .history = settings.fp8_amax_history_len,
                              .algorithm = settings.fp8_amax_compute_algo.value,
                              .margin = settings.fp8_margin,
                              .filter = settings.fp8_filter.value,
                              .exclude = settings.fp8_exclude.value,
                              .strict = settings.fp8_strict};
  if (settings.fp8_format.origin.source != Source::kDefault) {
    recipe.format = settings.fp8_format.value;
  }
  return recipe;
}

}  // namespace

precision::Policy policy_of(const Settings& settings) {
  if (settings.mixed_precision.value == Precision::kNo) return precision::Policy::f32();
  const DType low = settings.mixed_precision.value == Precision::kFP16 ? kF16 : kBF16;
  precision::Policy policy = way_of_computing(settings.precision_policy.value, low);
  if (settings.mixed_precision.value == Precision::kFP8) policy.fp8_recipe = recipe_of(settings);
  if (settings.output_precision.value == OutputPrecision::kF32) policy.output = kF32;
  return policy;
}

distributed::ParallelDims& parallel_dims_of(const Settings& settings) {
  const auto size = [](const Resolved<int64_t>& said) {
    return distributed::ParallelSize(static_cast<int>(said.value), said.origin.describe());
  };
  distributed::ParallelSizes sizes{.pp = size(settings.pp_size),
                                   .dp_replicate = size(settings.dp_replicate_size),
                                   .dp_shard = size(settings.dp_shard_size),
                                   .cp = size(settings.cp_size),
                                   .tp = size(settings.tp_size)};
  // Of the data-parallel sizes the one that nobody says is what the others leave.
  if (settings.sharding.value == Sharding::kDdp ||
      (settings.dp_shard_size > 1 && settings.dp_replicate_size == 1)) {
    sizes.dp_replicate = -1;
  } else if (settings.dp_shard_size == 1) {
    sizes.dp_shard = -1;
  }
  return distributed::parallel_dims(sizes);
}

bool offloads(const Settings& settings) {
  return settings.offload_parameters || settings.offload_optimizer;
}

bool cuts_parameters(const Settings& settings) {
  return settings.sharding.value == Sharding::kZero3 || settings.sharding.value == Sharding::kFsdp;
}

std::vector<nn::ModuleBase*> units_of(nn::ModuleBase& model, const Settings& settings) {
  const std::vector<std::string>& classes = settings.fsdp_wrap_modules.value;
  if (classes.size() == 1 && classes[0] == "none") return {};
  if (!classes.empty()) return units_by_class(model, classes);
  if (settings.fsdp_min_num_params > 0) {
    std::vector<nn::ModuleBase*> units;
    units_by_size(model, settings.fsdp_min_num_params, true, units);
    return units;
  }
  return repeated_blocks(model);
}

namespace {

// ---- Modules that stay whole -------------------------------------------------------------------

// Dotted names of modules that have parameters, outermost ones.
std::vector<std::string> ignored_modules(nn::ModuleBase& model, const Settings& settings) {
  const auto& [pattern, origin] = settings.fsdp_ignored_modules;
  if (pattern.empty()) return {};
  const std::string source = "fsdp_ignored_modules=" + pattern + " (" + origin.describe() + ")";
  const Regex expression(pattern, "prepare: " + source);
  std::vector<std::string> names;
  bool matches = false;
  for (const auto& [name, module] : model.named_modules()) {
    if (name.empty() || !expression.matches(name)) continue;
    matches = true;
    const bool inside = std::ranges::any_of(names, [&, own = &name](const std::string& outer) {
      return own->starts_with(outer + ".");
    });
    if (inside) continue;
    const NamedTensors parameters = module->named_parameters();
    for (const auto& [parameter, tensor] : parameters) {
      TS_CHECK_AS(ConfigError, !tensor.requires_grad(), "prepare", source, " leaves '", name, ".",
                  parameter,
                  "' whole on every rank, and it requires grad, which nobody would reduce; freeze "
                  "it, or leave the module out");
    }
    if (!parameters.empty()) names.push_back(name);
  }
  TS_CHECK_AS(ConfigError, matches, "prepare", source, " matches the whole name of no module of ",
              model.type_name(), "; names are like '", model.named_modules().back().name, "'");
  return names;
}

// Those of `names` that lie in the module, from there on; nothing where it lies in one itself.
std::optional<std::vector<std::string>> ignored_below(const nn::ModuleBase& model,
                                                      const nn::ModuleBase& module,
                                                      const std::vector<std::string>& names) {
  std::string own = module.dotted_name();
  if (!model.dotted_name().empty()) own = own.substr(model.dotted_name().size() + 1);
  std::vector<std::string> below;
  for (const std::string& name : names) {
    if (own == name || own.starts_with(name + ".")) return std::nullopt;
    if (name.starts_with(own + ".")) below.push_back(name.substr(own.size() + 1));
  }
  return below;
}

std::unique_ptr<distributed::DataParallelModel> make_fully_sharded(nn::ModuleBase& model,
                                                                   const Settings& settings,
                                                                   distributed::ParallelDims& dims,
                                                                   const precision::Policy& policy,
                                                                   ModelMaterialisation* missing) {
  distributed::Mesh& mesh = dims.parameter_mesh();
  distributed::FullyShardOptions options{
      .reshard_after_forward = settings.fsdp_reshard_after_forward.value,
      .init_sync = settings.ddp_init_sync,
      .offload_policy = offload_policy_of(settings),
      .gradient_dtype = gradient_dtype_of(policy),
      .average = average_of(settings),
      .broadcast_buffers = settings.ddp_broadcast_buffers};
  const std::vector<std::string> ignored = ignored_modules(model, settings);
  for (nn::ModuleBase* unit : units_of(model, settings)) {
    const auto below = ignored_below(model, *unit, ignored);
    if (!below) continue;
    options.ignored = *below;
    distributed::fully_shard(*unit, mesh, options);
  }
  options.ignored = ignored;
  const bool whole = settings.sharding.value == Sharding::kZero3;
  if (!whole) options.reshard_after_forward = {};
  if (!settings.fsdp_reshard_after_forward) options.reshard_after_forward = false;
  distributed::fully_shard(model, mesh, options);
  if (missing != nullptr) missing->make_memory();
  return std::make_unique<distributed::ShardedModel>(distributed::sharded_model(model));
}

std::unique_ptr<distributed::DataParallelModel> make_data_parallel(nn::ModuleBase& model,
                                                                   const Settings& settings,
                                                                   distributed::ParallelDims& dims,
                                                                   const precision::Policy& policy,
                                                                   ModelMaterialisation* missing) {
  switch (settings.sharding.value) {
    case Sharding::kZero1:
    case Sharding::kZero2:
      return std::make_unique<distributed::ShardedModel>(
          distributed::zero(model, dims.parameter_mesh(), zero_options(settings, policy)));
    case Sharding::kZero3:
    case Sharding::kFsdp:
      return make_fully_sharded(model, settings, dims, policy, missing);
    case Sharding::kDdp:
      break;
  }
  if (dims.mesh().has("tp")) {  // a shard for one data rank: nothing is gathered, weights divide
    distributed::Mesh& mesh = dims.mesh();
    distributed::fully_shard(model, mesh[mesh.has("dp_shard") ? "dp_shard" : "dp_replicate"],
                             {.reshard_after_forward = false,
                              .init_sync = settings.ddp_init_sync,
                              .gradient_dtype = gradient_dtype_of(policy),
                              .average = average_of(settings)});
    if (missing != nullptr) missing->make_memory();
    return std::make_unique<distributed::ShardedModel>(distributed::sharded_model(model));
  }
  auto replica = std::make_unique<distributed::Replica>(
      distributed::replicate(model, dims.mesh(), replicate_options(settings, policy)));
  if (auto hook = hook_of(settings)) replica->set_communication_hook(std::move(hook));
  return replica;
}

// ---- Ranks that share layers --------------------------------------------------------------------

void check_divides(const Settings& settings, distributed::ParallelDims& dims) {
  const std::string said = "tp_size=" + std::to_string(settings.tp_size) + " (" +
                           settings.tp_size.origin.describe() + ")";
  const int data_ranks = dims.loss_ranks().size();
  TS_CHECK_AS(ConfigError, data_ranks == 1 || settings.sharding.value != Sharding::kDdp, "prepare",
              said, " leaves ", data_ranks,
              " ranks with batches of their own, and copies of a model whose layers are shared are "
              "not built (sharding=ddp); set sharding to fsdp, or tp_size to the number of ranks");
}

// The values of the group's first rank, on all that divide the model: parts of different models
// would be none.
void share_values(const nn::ModuleBase& model, distributed::Group& ranks) {
  distributed::CoalescedScope calls(ranks, {.tag = "tp_init"});
  for (const NamedTensors& list : {model.named_parameters(), model.named_buffers()}) {
    for (const auto& [name, tensor] : list) {
      if (!tensor.is_meta() && tensor.numel() > 0) calls.broadcast(tensor.detach(), 0);
    }
  }
  calls.finish().wait();
}

void divide_layers(nn::ModuleBase& model, const Settings& settings,
                   distributed::ParallelDims& dims) {
  distributed::Mesh& tp = dims.mesh()["tp"];
  if (settings.ddp_init_sync) share_values(model, tp.group());
  distributed::parallelize_module(model, tp, {.sequence = settings.tp_sequence});
}

// Activation checkpointing that finds nothing to do would be none.
std::vector<nn::ModuleBase*> units_to_checkpoint(nn::ModuleBase& model, const Settings& settings) {
  std::vector<nn::ModuleBase*> units = units_of(model, settings);
  TS_CHECK_AS(ConfigError, !units.empty(), "prepare", "fsdp_activation_checkpointing (",
              settings.fsdp_activation_checkpointing.origin.describe(),
              ") calculates units of a model again, and ", model.type_name(),
              " has none; name the classes of its blocks in fsdp_wrap_modules, or leave it out");
  return units;
}

void reduce_maxima(precision::Fp8Layers& layers, distributed::Group& ranks,
                   std::function<bool()> steps_alone) {
  if (ranks.size() == 1) return;
  layers.set_reduction([&ranks, steps_alone = std::move(steps_alone)](const Tensor& maxima) {
    if (steps_alone && steps_alone()) return;
    ranks
        .all_reduce(maxima, distributed::ReduceOp::kMax,
                    {.channel = distributed::Channel::kControl, .tag = "fp8_maxima"})
        .wait();
  });
}

// Masters are cut as the parameters, or rank 0's become everybody's as the parameters did.
NamedTensors masters_of(ParallelizedModel& made, const NamedTensors& parameters,
                        const Settings& settings, distributed::Group& ranks, bool planned) {
  NamedTensors values = made.policy.take_originals();
  const auto parameter_of = [&](const NamedTensor& value) -> const Tensor& {
    return std::ranges::find(parameters, value.name, &NamedTensor::name)->tensor;
  };
  std::erase_if(values, [&](const NamedTensor& value) {
    return !parameter_of(value).requires_grad() || (value.tensor.is_meta() && !planned);
  });
  distributed::CoalescedScope calls(ranks, {.tag = "masters"});
  for (NamedTensor& value : values) {
    const Tensor& parameter = parameter_of(value);
    if (!distributed::is_dtensor(parameter)) {
      if (ranks.size() > 1 && settings.ddp_init_sync) calls.broadcast(value.tensor, 0);
      continue;
    }
    value.tensor = distributed::distribute_tensor(value.tensor, distributed::mesh_of(parameter),
                                                  distributed::placements_of(parameter));
    if (value.tensor.device() != parameter.device()) {  // those lie with the host
      const Tensor moved = raw::alias(value.tensor).to(parameter.device());
      copy_guard(parameter, moved);
      value.tensor = moved;
    }
  }
  calls.finish().wait();
  return values;
}

}  // namespace

void parallelize(ParallelizedModel& made, nn::ModuleBase& model, const Settings& settings,
                 distributed::ParallelDims& dims, const ParallelizeOptions& options) {
  const NamedTensors parameters = model.named_parameters();
  const bool trains = std::ranges::any_of(
      parameters, [](const NamedTensor& named) { return named.tensor.requires_grad(); });
  const bool several = dims.loss_ranks().size() > 1;
  const precision::Policy policy = policy_of(settings);
  // One rank too keeps the f32 gradients of 16-bit parameters in the engine's buckets, and may have
  // the optimizer's part lie with the host.
  // Stages reduce their gradients themselves, when the last backward has ended.
  const bool staged = settings.pp_size > 1;
  const bool divides = dims.mesh().has("tp") && trains;
  const bool parallel =
      (several || divides || policy.needs_masters() || offloads(settings)) && trains && !staged;
  if (divides) check_divides(settings, dims);
  if (options.missing != nullptr) {
    options.missing->begin(parallel && (divides || (several && cuts_parameters(settings))),
                           parallel && (several || divides));
  }
  if (policy != precision::Policy::f32()) {
    precision::check(policy, options.device);
    made.policy = precision::apply(model, policy);
  }
  if (divides) divide_layers(model, settings, dims);
  if (made.policy.fp8()) {
    // Each stage notes those of its own layers, and all ranks have all scales.
    reduce_maxima(*made.policy.fp8(), staged ? dims.state_ranks() : dims.fp8_ranks(),
                  options.steps_alone);
  }
  if (settings.fsdp_activation_checkpointing && trains) {
    for (nn::ModuleBase* unit : units_to_checkpoint(model, settings)) {
      made.handles.push_back(unit->checkpoint_calls());
    }
  }
  if (parallel) {
    made.parallel = make_data_parallel(model, settings, dims, policy, options.missing);
    for (const Tensor& whole : made.parallel->wholes()) made.policy.add_parameters({whole});
  }
  made.masters =
      masters_of(made, parameters, settings, dims.loss_ranks(), options.missing == nullptr);
}

}  // namespace tessera::accelerate
