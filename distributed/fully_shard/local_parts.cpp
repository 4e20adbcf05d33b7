#include <tessera/distributed/fully_shard/local_parts.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/leaf_hooks.h>
#include <tessera/core/error.h>
#include <tessera/core/kernels/copy/full.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/backward/mutant.h>
#include <tessera/distributed/fully_shard/shard_setup.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {

LocalParts::LocalParts(std::string tag, const ShardRanks& ranks, std::vector<ShardedParam> params)
    : ParamGroup({.tag = std::move(tag), .ranks = ranks, .keeps_wholes = true}, std::move(params)) {
  alone_ = true;
  for (ShardedParam& param : params_) {
    part_numel_ += param.shard.numel();
    if (param.shard.requires_grad()) gradient_numel_ += param.shard.numel();
    param.whole = leaf_over(param.shard, param);
    set_replaced(param.shard, true);
  }
}

// A parameter that got other memory (it was loaded, or given memory) is read there.
void LocalParts::bring_home() {
  for (ShardedParam& param : params_) {
    const Tensor &own = param.shard, &whole = param.whole;
    if (whole.storage() == own.storage() && whole.offset() == own.offset()) continue;
    TS_CHECK_SHAPE(whole.shape() == own.shape(), tag_, "'", param.name, "' was given data of ",
                   own.shape(), ", and this rank's part has ", whole.shape(),
                   "; load whole values, of which each rank takes its part");
    whole.set_data(raw::alias(own));
    whole.bump_version("other memory");
    take_device(own.device());
  }
}

void LocalParts::issue_gather(std::optional<DType>) { bring_home(); }

Tensor LocalParts::own_part(size_t param) const { return raw::alias(params_[param].whole); }

// A rank whose data did not use a parameter takes part as well.
void LocalParts::start_sum_of_copies(bool zeros) {
  if (ranks_.replicas == nullptr) return;
  CoalescedScope calls(*ranks_.replicas, on(Channel::kGradient));
  for (size_t i = 0; i < num_trained(); ++i) {
    const Tensor& whole = trained(i).whole;
    if (zeros || !whole.grad().defined()) whole.set_grad(raw::zeros_like(whole));
    if (TS_MUTANT(kCopiesTwice)) whole.grad().mul_(2);
    calls.all_reduce(whole.grad());
  }
  replica_sum_ = calls.finish();
}

namespace {

// The ranks along the axes on which the gradient is a summand; nullptr for none.
Mesh* summed_mesh(const Tensor& parameter) {
  const Placements* const stated = grad_placements_of(parameter);
  if (stated == nullptr) return nullptr;
  const Mesh& mesh = mesh_of(parameter);
  std::vector<std::string_view> axes;
  for (size_t i = 0; i < stated->size(); ++i) {
    if (is_partial((*stated)[i])) axes.push_back(mesh.axes()[i].name);
  }
  return axes.empty() ? nullptr : &mesh.submesh(axes);
}

}  // namespace

void keep_local_parts(nn::ModuleBase& model, Mesh& mesh) {
  let_go_of_local_parts({&model});
  auto unit = std::make_shared<ShardUnit>();
  unit->name = model.dotted_name();
  unit->modules = {&model};
  unit->reshard_after_forward = false;
  const int own = mesh.group().ranks()[static_cast<size_t>(mesh.group().rank())];
  unit->alone = std::make_shared<Group>("rank " + std::to_string(own) + " alone", nullptr,
                                        std::vector<int>{own});
  unit->ranks = {.mesh = &mesh, .shards = unit->alone.get(), .batches = unit->alone.get()};
  std::vector<ShardedParam> params;
  std::unordered_map<const TensorImpl*, size_t> known;
  for (const auto& [name, place] : model.parameter_places()) {
    if (!place->defined()) continue;
    const auto [at, added] = known.try_emplace(place->impl(), params.size());
    if (added) {
      params.push_back({.name = unit->name.empty() ? name : unit->name + "." + name,
                        .shard = *place,
                        .whole = {},
                        .places = {},
                        .across = spec_of(*place),
                        .mesh = summed_mesh(*place)});
    }
    params[at->second].places.push_back(place);
  }
  for (std::vector<ShardedParam>& list : by_dtype(std::move(params))) {
    ShardRanks ranks = unit->ranks;
    if (Mesh* const summed = list.front().mesh; summed != nullptr && summed->size() > 1) {
      ranks.replicas = &summed->group();
    }
    unit->parts.push_back(std::make_unique<LocalParts>(unit->title(), ranks, std::move(list)));
  }
  install_unit(unit);
}

bool is_sharded(const nn::ModuleBase& module) {
  const auto unit = ShardedModules::current().find(module);
  return unit != nullptr && unit->alone == nullptr;
}

void let_go_of_local_parts(const std::vector<nn::ModuleBase*>& modules) {
  ParameterPlaces places;
  for (nn::ModuleBase* module : modules) {
    for (const auto& [name, place] : module->parameter_places()) places.insert(place);
  }
  auto& known = ShardedModules::current().units;
  for (auto entry = known.begin(); entry != known.end();) {
    const auto unit = entry->second.lock();
    const auto keeps = [&](const auto& part) {
      return std::ranges::any_of(part->params(), [&](const ShardedParam& param) {
        return std::ranges::any_of(param.places, [&](Tensor* at) { return places.contains(at); });
      });
    };
    if (!unit || !unit->alone || !std::ranges::any_of(unit->parts, keeps)) {
      ++entry;
      continue;
    }
    TS_CHECK_AS(ConfigError, unit->calls == 0, "fully_shard", unit->title(),
                " is in a call; shard the model before or after it");
    for (HookHandle& handle : unit->handles) handle.remove();
    entry = known.erase(entry);
  }
}

}  // namespace tessera::distributed
