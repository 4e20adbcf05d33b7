#include <tessera/distributed/fully_shard/fully_shard.h>

#include <exception>
#include <utility>

#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/fully_shard/local_parts.h>
#include <tessera/distributed/fully_shard/shard_setup.h>

namespace tessera::distributed {

namespace {

// The dimension that is cut where nobody says which: of a part the first that no other axis cuts,
// evenly where it is not dimension 0; where there is none, dimension 0 once more.
int dim_to_cut(const ShardedParam& param, int ranks) {
  const auto is_free = [&](int dim) { return !param.across || param.across->cuts(dim).empty(); };
  if (is_free(0)) return 0;
  for (int dim = 1; dim < param.shard.dim(); ++dim) {
    if (is_free(dim) && param.shard.size(dim) % ranks == 0) return dim;
  }
  return 0;
}

void place_shards(std::vector<ShardedParam>& params, const ShardPlacement& placement,
                  int unit_ranks) {
  for (ShardedParam& param : params) {
    const int ranks = param.mesh != nullptr ? param.mesh->axes().back().size : unit_ranks;
    std::optional<Shard> wanted;
    if (placement) wanted = placement(param.name, param.shard);
    if (!wanted) {
      param.shard_dim = dim_to_cut(param, ranks);
      continue;
    }
    param.shard_dim = wrap_dim(wanted->dim, param.shard.dim(), "fully_shard");
    const int64_t size = param.shard.shape()[param.shard_dim];
    TS_CHECK_AS(ConfigError, param.shard_dim == 0 || size % ranks == 0, "fully_shard", "'",
                param.name, "' is ", param.shard, ", whose dimension ", param.shard_dim, " (", size,
                ") does not divide by ", ranks,
                " ranks; cut it along dimension 0, which may be uneven");
  }
}

// The ranks of an axis in groups of so many neighbours: this rank's.
std::shared_ptr<Group> neighbours(Group& ranks, std::optional<int> wanted) {
  if (!wanted) return nullptr;
  const int count = *wanted, all = ranks.size();
  TS_CHECK_AS(ConfigError, count > 1 && count < all && all % count == 0, "fully_shard",
              "reshard_after_forward is a number of neighbours, which divides the ", all,
              " ranks and is neither 1 nor all of them; got ", count,
              "; say true for parts among all ranks, false for none");
  std::weak_ptr<Group>& known = ShardedModules::current().near[{&ranks, count}];
  std::shared_ptr<Group> group = known.lock();
  if (group == nullptr) {
    std::vector<int> members;
    for (int i = 0; i < count; ++i) members.push_back(ranks.rank() / count * count + i);
    known = group = ranks.subgroup(members);
  }
  return group;
}

}  // namespace

FullyShardedModule fully_shard(const std::vector<nn::ModuleBase*>& modules, Mesh& mesh,
                               const FullyShardOptions& options) {
  const std::string_view where = "fully_shard";
  TS_CHECK(!modules.empty(), where, "needs at least one module; got none");
  for (const nn::ModuleBase* module : modules) {
    TS_CHECK_AS(ConfigError, module != nullptr, where, "got a null pointer for one of ",
                modules.size(), " modules; give modules that exist");
    TS_CHECK_AS(ConfigError, !is_sharded(*module), where, "'", module->dotted_name(), "' (",
                module->type_name(), ") has a unit already; call it once for a module");
  }
  auto unit = std::make_shared<ShardUnit>();
  unit->name = modules.front()->dotted_name();
  unit->modules = modules;
  unit->ranks = shard_ranks(mesh, where);
  unit->reshard_after_forward = options.reshard_after_forward.reshards();
  unit->precision = options.mixed_precision;
  const MixedPrecisionPolicy& policy = options.mixed_precision;
  for (const auto& dtype : {policy.param_dtype, policy.reduce_dtype, policy.output_dtype}) {
    TS_CHECK_AS(ConfigError, !dtype || is_floating(*dtype), where,
                "mixed precision is of floating dtypes; got ", name_of(*dtype));
  }
  unit->settings.average = options.average;
  unit->broadcasts_buffers = options.broadcast_buffers;
  std::vector<ShardedParam> params = free_parameters(*unit, options.ignored, where);
  for (const ShardedParam& param : params) {
    TS_CHECK_AS(ConfigError, param.shard.dim() > 0, where, "'", param.name,
                "' is a scalar, which has no rows to cut; give it a dimension");
  }
  check_offload(params, options.offload_policy, where);
  const ReshardAfterForward& reshard = options.reshard_after_forward;
  synchronise_parameters(
      params, mesh, options.init_sync, where,
      tessera::detail::concatenate(
          "reshard_after_forward ",
          !reshard.reshards() ? std::string("by root")
          : reshard.ranks()   ? std::to_string(*reshard.ranks())
                              : std::string(*reshard.reshards() ? "true" : "false"),
          ", param_dtype ", words_of(policy.param_dtype), ", reduce_dtype ",
          words_of(policy.reduce_dtype), ", gradient_dtype ", words_of(options.gradient_dtype),
          ", average ", words_of(options.average), ", init_sync ", options.init_sync,
          ", broadcast_buffers ", options.broadcast_buffers, ", offload ",
          words_of(options.offload_policy)));
  place_shards(params, options.shard_placement, unit->ranks.shards->size());
  let_go_of_local_parts(modules);
  for (std::vector<ShardedParam>& list : by_dtype(std::move(params))) {
    const DType own = list.front().shard.dtype();
    GroupDTypes dtypes{.gradient_dtype = options.gradient_dtype};
    if (is_floating(own)) {
      dtypes.param_dtype = policy.param_dtype;
      dtypes.reduce_dtype = policy.reduce_dtype ? policy.reduce_dtype : policy.param_dtype;
    }
    const ShardRanks ranks =
        list.front().mesh != nullptr ? shard_ranks(*list.front().mesh, where) : unit->ranks;
    const bool casts =
        dtypes.param_dtype.value_or(own) != own || dtypes.reduce_dtype.value_or(own) != own;
    if (ranks.mesh->group().size() == 1 && !casts &&
        options.offload_policy == OffloadPolicy::kNone) {
      unit->parts.push_back(
          std::make_unique<FlatShards>(unit->title(), ranks, std::move(list), dtypes, true, false));
    } else {
      unit->parts.push_back(std::make_unique<RowShards>(
          unit->title(), ranks, std::move(list), dtypes, neighbours(*ranks.shards, reshard.ranks()),
          options.offload_policy));
    }
  }
  install_unit(unit);
  return FullyShardedModule(std::move(unit));
}

FullyShardedModule fully_shard(nn::ModuleBase& module, Mesh& mesh,
                               const FullyShardOptions& options) {
  return fully_shard(std::vector<nn::ModuleBase*>{&module}, mesh, options);
}

namespace {

std::shared_ptr<ShardUnit> unit_of(nn::ModuleBase& module, std::string_view where) {
  auto unit = ShardedModules::current().find(module);
  TS_CHECK(unit != nullptr, where, "the module '", module.dotted_name(), "' (", module.type_name(),
           ") has no unit; call fully_shard() for it first");
  return unit;
}

}  // namespace

FullyShardedModule fully_sharded(nn::ModuleBase& module) {
  return FullyShardedModule(unit_of(module, "fully_sharded"));
}

void FullyShardedModule::unshard(bool asynchronous) const {
  asynchronous ? unit_->start_gather() : unit_->gather();
  if (unit_->calls == 0) unit_->settle();
}

void FullyShardedModule::reshard() const { unit_->release(); }

void FullyShardedModule::set_reshard_after_forward(bool reshard, bool recurse) const {
  unit_->reshard_after_forward = reshard;
  if (!recurse) return;
  for (const auto& unit : units_under(unit_->modules)) unit->reshard_after_forward = reshard;
}

namespace {

std::vector<std::weak_ptr<ShardUnit>> units_of(const std::vector<FullyShardedModule>& modules) {
  std::vector<std::weak_ptr<ShardUnit>> units;
  for (const FullyShardedModule& module : modules) units.push_back(module.unit());
  return units;
}

const Op kTouch{.name = "touch", .flops_per_element = 0};

}  // namespace

void FullyShardedModule::set_modules_to_forward_prefetch(
    const std::vector<FullyShardedModule>& modules) const {
  unit_->forward_prefetch = units_of(modules);
}
void FullyShardedModule::set_modules_to_backward_prefetch(
    const std::vector<FullyShardedModule>& modules) const {
  unit_->backward_prefetch = units_of(modules);
}

StepPlan& FullyShardedModule::plan() const { return schedule_under(unit_)->pass().plan; }
void FullyShardedModule::set_requires_gradient_sync(bool sync) const {
  plan().sync_gradients = sync;
}
void FullyShardedModule::set_requires_all_reduce(bool all_reduce) const {
  plan().all_reduce = all_reduce;
}
void FullyShardedModule::set_reshard_after_backward(bool reshard) const {
  plan().reshard_after_backward = reshard;
}
void FullyShardedModule::set_is_last_backward(bool last) const { plan().is_last = last; }

Tensor FullyShardedModule::touch(const Tensor& x) const {
  const std::shared_ptr<void> call = begin_call(unit_, true);
  if (!grad_enabled()) return x;
  TS_CHECK_AS(UnsupportedError, x.requires_grad(), "touch", unit_->title(),
              " is gathered again in the backward of the other ranks, whose time a gradient of x "
              "would tell; got ",
              x, ", which does not require grad; give an activation on the way to the loss");
  TensorList outputs = differentiable(
      kTouch, {x}, [](Inputs in) { return TensorList{raw::alias(in[0])}; },
      [weak = std::weak_ptr(unit_)](Grads grads, const Saved&) -> TensorList {
        if (const auto unit = weak.lock()) unit->schedule->input_arrived(*unit);
        return {grads[0]};
      });
  Tensor input = x;
  Tensor* const inputs[] = {&input};
  Tensor* const results[] = {&outputs[0]};
  unit_->schedule->after_forward(*unit_, inputs, results);
  return outputs[0];
}

ShardedModel sharded_model(nn::ModuleBase& root) {
  auto unit = unit_of(root, "sharded_model");
  auto schedule = schedule_under(unit);
  return make_sharded_model(std::move(schedule), std::move(unit), "fully_shard");
}

// ---- Whole parameters for reading and writing ---------------------------------------------------

FullParametersScope::FullParametersScope(nn::ModuleBase& module, bool writes)
    : units_(units_under({&module})), writes_(writes), exceptions_(std::uncaught_exceptions()) {
  TS_CHECK(!units_.empty(), "full_parameters", "no module under '", module.dotted_name(),
           "' has sharded parameters; shard it first");
  for (const auto& unit : units_) {
    TS_CHECK_AS(UnsupportedError, unit->calls == 0, "full_parameters", unit->title(),
                " is in a call, in which its parameters are whole already");
  }
  for (const auto& unit : units_) unit->start_gather();
  for (const auto& unit : units_) {
    unit->gather();
    unit->show_wholes();
    for (const auto& part : unit->parts) part->mark_parts(true);
  }
  for (const auto& unit : units_) unit->settle();
}

FullParametersScope::~FullParametersScope() noexcept(false) {
  std::exception_ptr mistake;
  for (const auto& unit : units_) {
    unit->show_shards();
    for (const auto& part : unit->parts) part->mark_parts(false);
    try {
      for (const auto& part : unit->parts) writes_ ? part->keep_written() : part->check_unwritten();
    } catch (...) {
      mistake = std::current_exception();
    }
    unit->release();
  }
  if (mistake && std::uncaught_exceptions() == exceptions_) std::rethrow_exception(mistake);
}

}  // namespace tessera::distributed
