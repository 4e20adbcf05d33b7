#include <tessera/distributed/fully_shard/shard_setup.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <set>
#include <unordered_map>

#include <nlohmann/json.hpp>

#include <tessera/autograd/checkpoint.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/backward/broadcast.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {
namespace {

using Json = nlohmann::json;

bool names_part_of(const std::string& scope, const std::string& name) {
  return name == scope || (name.starts_with(scope) && name[scope.size()] == '.');
}

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

// One call of a unit's module, until it has ended, be it by an exception.
class CallOfUnit {
 public:
  // `again`: a part of a call that has ended runs again.
  CallOfUnit(std::shared_ptr<ShardUnit> unit, bool last, bool again = false)
      : unit_(std::move(unit)), last_(last), exceptions_(std::uncaught_exceptions()) {
    try {
      unit_->schedule->enter(*unit_, again);
    } catch (...) {
      unit_->schedule->leave(*unit_, last_, true);
      throw;
    }
    guard_.emplace([weak = std::weak_ptr(unit_)]() -> std::shared_ptr<void> {
      auto own = weak.lock();
      return own ? std::make_shared<CallOfUnit>(std::move(own), false, true) : nullptr;
    });
  }
  ~CallOfUnit() {
    guard_.reset();
    unit_->schedule->leave(*unit_, last_, std::uncaught_exceptions() > exceptions_);
  }
  CallOfUnit(const CallOfUnit&) = delete;
  CallOfUnit& operator=(const CallOfUnit&) = delete;

 private:
  std::shared_ptr<ShardUnit> unit_;
  bool last_;
  int exceptions_;
  std::optional<RecomputationGuard> guard_;
};

}  // namespace

std::shared_ptr<void> begin_call(const std::shared_ptr<ShardUnit>& unit, bool last) {
  schedule_under(unit);
  return std::make_shared<CallOfUnit>(unit, last);
}

namespace {

// Of several modules of a unit none is another or inside of another.
void check_apart(const std::vector<nn::ModuleBase*>& modules, std::string_view where) {
  for (nn::ModuleBase* outer : modules) {
    TS_CHECK_AS(ConfigError, std::ranges::count(modules, outer) == 1, where, "'",
                outer->dotted_name(), "' (", outer->type_name(), ") is listed twice");
    for (const auto& [name, inner] : outer->named_modules()) {
      TS_CHECK_AS(ConfigError, inner == outer || std::ranges::find(modules, inner) == modules.end(),
                  where, "'", inner->dotted_name(), "' lies inside of '", outer->dotted_name(),
                  "'; list the outer one alone");
    }
  }
}

// The unit that has this parameter.
struct Owner {
  std::shared_ptr<ShardUnit> unit;
  bool at_this_place = false;  // else at others, to which it is tied
};
Owner owner_of(const Tensor* place) {
  for (const auto& [module, weak] : ShardedModules::current().units) {
    const auto unit = weak.lock();
    if (!unit) continue;
    for (const auto& part : unit->parts) {
      for (const ShardedParam& param : part->params()) {
        const bool here = std::ranges::find(param.places, place) != param.places.end();
        if (here || param.shard.is(*place)) return {unit, here};
      }
    }
  }
  return {};
}

void check_free(const Tensor* place, const std::string& name, std::string_view where) {
  TS_CHECK_AS(ConfigError, !is_replicated(*place), where, "'", name,
              "' belongs to a Replica, which reduces whole gradients; let it go first");
  if (!is_dtensor(*place)) return;
  const Owner owner = owner_of(place);
  if (owner.unit != nullptr && owner.unit->alone) return;  // which lets it go
  TS_CHECK_AS(ConfigError, !owner.at_this_place, where, "'", name, "' belongs to ",
              owner.unit->title(),
              " already, which was sharded before; shard inner modules first, then what holds "
              "them, and take one mode for a model");
  TS_CHECK_AS(ConfigError, owner.unit == nullptr, where, "'", name, "' is ", *place,
              ", which is tied to a parameter of another unit; tied parameters belong to one "
              "unit: shard the module that holds both, and not the one inside of it");
}

// Of a parameter that is a copy along other axes and whose gradient is a summand there: it is cut
// along these, too, and no copy any more.
void take_summed_axes(ShardedParam& param, const Mesh& mesh, std::string_view where) {
  const Placements* stated = grad_placements_of(param.shard);
  if (stated == nullptr) return;
  const DTensorSpec spec = *param.across;
  std::vector<std::string_view> summed, others;
  Placements kept;
  for (size_t i = 0; i < stated->size(); ++i) {
    const std::string& axis = spec.mesh->axes()[i].name;
    if (!is_partial((*stated)[i])) {
      others.push_back(axis);
      kept.push_back(spec.placements[i]);
      continue;
    }
    TS_CHECK_AS(UnsupportedError, (*stated)[i] == Placement(Partial()), where,
                "adds gradients up; ", "that of '", param.name, "' is stated to be ",
                describe(*stated), "; state Partial() along '", axis, "'");
    summed.push_back(axis);
  }
  if (summed.empty()) return;
  param.mesh = &widened(mesh, spec.mesh->submesh(summed));
  param.across.reset();
  if (!others.empty()) param.across = DTensorSpec{&spec.mesh->submesh(others), kept, spec.shape};
}

// How a parameter lies that is a part along other axes; none of a whole one.
std::optional<DTensorSpec> spec_across(const Tensor& tensor, const std::string& name,
                                       const Mesh& mesh, std::string_view where) {
  if (!is_dtensor(tensor)) return std::nullopt;
  const DTensorSpec& spec = spec_of(tensor);
  for (const Placement& placement : spec.placements) {
    TS_CHECK_AS(UnsupportedError,
                !is_partial(placement) && !std::holds_alternative<FlatShard>(placement), where, "'",
                name, "' is ", tensor,
                ", and what is cut once more is a chunk or a copy along other axes; "
                "redistribute() it first");
  }
  try {
    joined(mesh, *spec.mesh);
  } catch (Error& error) {
    error.add_context(std::string(where) + ": '" + name + "'");
    throw;
  }
  return spec;
}

}  // namespace

void lie_across(ShardedParam& param, Mesh& mesh, std::string_view where) {
  param.across = spec_across(param.shard, param.name, mesh, where);
  if (param.across) take_summed_axes(param, mesh, where);
}

std::vector<ShardedParam> free_parameters(ShardUnit& unit, const std::vector<std::string>& ignored,
                                          std::string_view where) {
  const std::vector<nn::ModuleBase*>& modules = unit.modules;
  check_apart(modules, where);
  ParameterPlaces taken;
  for (const auto& unit : units_under(modules)) {
    if (unit->alone) continue;
    for (const auto& part : unit->parts) {
      for (const ShardedParam& param : part->params()) {
        taken.insert(param.places.begin(), param.places.end());
      }
    }
  }
  std::vector<ShardedParam> params;
  std::unordered_map<const TensorImpl*, size_t> known;
  std::set<std::string> found;
  for (nn::ModuleBase* module : modules) {
    for (const auto& [name, place] : module->parameter_places()) {
      if (!place->defined() || taken.contains(place)) continue;
      const auto scope = std::ranges::find_if(
          ignored, [&](const std::string& one) { return names_part_of(one, name); });
      if (scope != ignored.end()) {
        found.insert(*scope);
        unit.left_out.insert(place);
        continue;
      }
      const std::string full = joined(module->dotted_name(), name);
      check_free(place, full, where);
      const auto [at, added] = known.try_emplace(place->impl(), params.size());
      if (added) {
        params.push_back({.name = full, .shard = *place, .whole = {}, .places = {}});
        lie_across(params.back(), *unit.ranks.mesh, where);
      }
      params[at->second].places.push_back(place);
    }
  }
  for (const std::string& name : ignored) {
    TS_CHECK_AS(ConfigError, found.contains(name), where, "the ignored '", name,
                "' is no parameter or module with any; correct the name");
  }
  return params;
}

void check_offload(const std::vector<ShardedParam>& params, OffloadPolicy policy,
                   std::string_view where) {
  if (policy == OffloadPolicy::kNone) return;
  for (const ShardedParam& param : params) {
    TS_CHECK_AS(UnsupportedError, param.shard.device().is_cuda() || param.shard.is_meta(), where,
                "moves parts of a GPU's parameters to memory of the host; '", param.name, "' is ",
                param.shard, ", which lies there; leave offload out, or move the model to a GPU");
  }
}

void synchronise_parameters(const std::vector<ShardedParam>& params, Mesh& mesh, bool init_sync,
                            std::string_view where, const std::string& options) {
  Group& ranks = mesh.group();
  if (ranks.size() == 1 || !ranks.backend().moves_data()) return;
  Json own = Json::array();
  NamedTensors values;
  for (const ShardedParam& param : params) {
    const Tensor& tensor = param.shard;
    own.push_back(
        tessera::detail::concatenate("'", param.name, "' ", tensor.dtype(), tensor.shape(),
                                     tensor.requires_grad() ? ", which requires grad" : ""));
    if (!tensor.is_meta()) values.push_back({param.name, raw::alias(tensor)});
  }
  own.push_back(options);
  std::vector<Json> all =
      all_gather_objects(ranks, own, {.channel = Channel::kControl, .tag = where});
  for (size_t rank = 1; rank < all.size(); ++rank) {
    TS_CHECK_AS(DistributedError, all[rank].back() == all[0].back(), where,
                "all ranks must take the same options; those of rank ", rank, " are ",
                all[rank].back().get<std::string>(), " (rank 0: ", all[0].back().get<std::string>(),
                ")");
  }
  for (Json& list : all) list.erase(list.size() - 1);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    size_t i = 0;
    while (i < all[0].size() && i < all[rank].size() && all[0][i] == all[rank][i]) ++i;
    const auto text = [i](const Json& list) {
      return i < list.size() ? list[i].get<std::string>() : std::string("none");
    };
    TS_THROW(DistributedError, where, "all ranks must hold the same model; parameter ", i,
             " of rank ", rank, " is ", text(all[rank]), " (rank 0: ", text(all[0]),
             "); make the models alike before they are sharded");
  }
  if (init_sync && !values.empty()) broadcast_tensors(values, ranks, 0, "parameters");
}

ShardRanks shard_ranks(Mesh& mesh, std::string_view where) {
  const std::vector<MeshAxis>& axes = mesh.axes();
  TS_CHECK_AS(ConfigError, axes.size() == 1 || axes.size() == 2, where,
              "takes a mesh of one axis, or of two of which the first replicates; got ",
              mesh.describe(), "; take a sub-mesh, mesh.submesh({...})");
  ShardRanks ranks{.mesh = &mesh, .shards = &mesh.group(axes.back().name)};
  if (axes.size() == 2 && axes[0].size > 1) {
    TS_CHECK_AS(ConfigError, axes[1].size > 1, where, "has nothing to cut along '", axes[1].name,
                "' of ", mesh.describe(), "; replicate() trains whole copies");
    ranks.replicas = &mesh.group(axes[0].name);
  }
  return ranks;
}

std::vector<std::vector<ShardedParam>> by_dtype(std::vector<ShardedParam> params) {
  std::vector<std::vector<ShardedParam>> lists;
  for (ShardedParam& param : params) {
    auto list = std::ranges::find_if(lists, [&](const auto& one) {
      return one[0].shard.dtype() == param.shard.dtype() &&
             one[0].shard.device() == param.shard.device() && one[0].mesh == param.mesh;
    });
    if (list == lists.end()) list = lists.insert(lists.end(), std::vector<ShardedParam>());
    list->push_back(std::move(param));
  }
  return lists;
}

std::vector<std::shared_ptr<ShardUnit>> units_under(const std::vector<nn::ModuleBase*>& modules) {
  std::vector<std::shared_ptr<ShardUnit>> units;
  const ShardedModules& known = ShardedModules::current();
  for (nn::ModuleBase* module : modules) {
    for (const auto& [name, child] : module->named_modules()) {
      auto unit = known.find(*child);
      if (unit && std::ranges::find(units, unit) == units.end()) units.push_back(std::move(unit));
    }
  }
  return units;
}

std::shared_ptr<UnitSchedule> schedule_under(const std::shared_ptr<ShardUnit>& root) {
  if (root->schedule) return root->schedule;
  std::vector<std::shared_ptr<ShardUnit>> units = units_under(root->modules);
  for (const auto& unit : units) {
    TS_CHECK_AS(ConfigError, !unit->schedule, "fully_shard", unit->title(),
                " was called by itself before ", root->title(),
                ", which holds it; call the outermost module first");
  }
  for (const auto& unit : units) {  // of a model made without memory, which has it by now
    for (const auto& part : unit->parts) part->bring_home();
  }
  root->is_root = true;
  auto schedule = std::make_shared<UnitSchedule>(units, root->ranks.batch_ranks(), root->settings);
  schedule->install();
  for (const auto& unit : units) unit->schedule = schedule;
  if (root->broadcasts_buffers) {
    schedule->before_root = [model = root->modules.front(), ranks = &root->ranks.mesh->group(),
                             pass = &schedule->pass()] {
      if (!model->is_training() || !pass->plan.sync_gradients) return;
      const NamedTensors buffers = model->named_buffers();
      if (!buffers.empty()) broadcast_tensors(buffers, *ranks, 0, "buffers");
    };
  }
  return schedule;
}

void install_unit(const std::shared_ptr<ShardUnit>& unit) {
  auto& known = ShardedModules::current().units;
  std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
  unit->uncalled = unit->modules;
  for (nn::ModuleBase* module : unit->modules) {
    known[module] = unit;
    // The module's hooks own the unit, which goes with it.
    unit->handles.push_back(
        module->register_call_scope([unit](nn::ModuleBase& called) -> std::shared_ptr<void> {
          return begin_call(unit, unit->ends_with(called));
        }));
    if (const auto dtype = unit->precision.param_dtype;
        dtype && unit->precision.cast_forward_inputs) {
      unit->handles.push_back(module->register_forward_pre_hook(
          [dtype = *dtype](nn::ModuleBase&, nn::TensorRefs inputs) {
            for (Tensor* input : inputs) {
              if (is_floating(input->dtype()) && input->dtype() != dtype) {
                *input = input->to(dtype);
              }
            }
          }));
    }
    unit->handles.push_back(module->register_forward_hook(
        [weak = std::weak_ptr(unit)](nn::ModuleBase&, nn::TensorRefs inputs,
                                     nn::TensorRefs outputs) {
          if (const auto own = weak.lock()) own->schedule->after_forward(*own, inputs, outputs);
        }));
    // It runs when all gradients of a call's inputs have come, whatever else reads the inputs.
    unit->handles.push_back(module->register_full_backward_hook(
        [weak = std::weak_ptr(unit)](nn::ModuleBase&, nn::TensorRefs grad_inputs, nn::TensorRefs) {
          const auto own = weak.lock();
          if (own && !grad_inputs.empty()) own->schedule->input_arrived(*own);
        }));
  }
}

}  // namespace tessera::distributed
