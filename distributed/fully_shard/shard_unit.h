// Parameters that are gathered together before a module runs and resharded afterwards.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/distributed/backward/backward_pass.h>
#include <tessera/distributed/backward/known_parameters.h>
#include <tessera/distributed/fully_shard/mixed_precision_policy.h>
#include <tessera/distributed/fully_shard/param_group.h>
#include <tessera/nn/module.h>

namespace tessera::distributed {

class UnitSchedule;

struct UnitScheduleOptions {
  GradientAverage average = GradientAverage::kRanks;
  // Whether gradients may add up on this rank without being reduced (no_sync).
  bool local_sums = true;
  // Whether every backward reduces, so that sums go on at the owners. False: as many backwards as
  // like add up before one reduction (ZeRO-1).
  bool reduces_every_backward = true;
};

struct ShardUnit {
  std::string name;                       // of the first module: "h.0"; "" of the root
  std::vector<nn::ModuleBase*> modules;   // gathered before the first, released after the last
  std::vector<nn::ModuleBase*> uncalled;  // of them, so far
  const nn::ModuleBase* last = nullptr;   // see ends_with()
  std::vector<std::unique_ptr<ParamGroup>> parts;  // one for each dtype
  std::optional<bool> reshard_after_forward;       // none: unless it is the root
  MixedPrecisionPolicy precision;
  ShardRanks ranks;
  // Of a model that is divided along other axes alone (local_parts.h): this rank by itself.
  std::shared_ptr<Group> alone;
  std::vector<HookHandle> handles;
  // Prefetched instead of the next one of the last forward, or of the one called before.
  std::vector<std::weak_ptr<ShardUnit>> forward_prefetch, backward_prefetch;
  // Whole tensors of modules that were frozen when they were sharded, which ranks do not share.
  NamedTensors left_whole;
  // Places of parameters that are intentionally not part of the unit: ignored, or left whole.
  ParameterPlaces left_out;
  // Made when the root is called first, for all units under it.
  std::shared_ptr<UnitSchedule> schedule;
  bool is_root = false;
  // For the root, of the model:
  UnitScheduleOptions settings = {};
  bool broadcasts_buffers = false;

  // ---- Calls and backwards under way
  int calls = 0;
  std::optional<DType> cast = {};  // in which autocast read weights in the last call, if it did
  size_t awaited = 0;              // gradients of this backward that have not come
  size_t awaited_inside = 0;       // those of units whose calls were inside of this one's
  int64_t awaited_numel = 0;       // their elements
  int64_t gather_ahead_at = 0;     // see [Note: three units]
  size_t awaited_calls = 0;        // calls of which this backward has not come to the inputs
  bool backward_done = false;
  std::vector<ShardUnit*> outer = {};  // that were in a call when this one was called, so far

  ShardUnit() = default;
  ShardUnit(const ShardUnit&) = delete;
  ShardUnit& operator=(const ShardUnit&) = delete;
  ~ShardUnit() {
    for (HookHandle& handle : handles) handle.remove();
  }

  std::string title() const { return name.empty() ? "the root unit" : "unit " + name; }
  // Whether the unit's calls of a forward end with this module's: the one with which all had been
  // called for the first time, whatever their order in the list.
  bool ends_with(const nn::ModuleBase& called) {
    if (last == nullptr && std::erase(uncalled, &called) > 0 && uncalled.empty()) last = &called;
    return last == &called;
  }
  bool reshards_after_forward() const { return reshard_after_forward.value_or(!is_root); }
  void start_gather(std::optional<DType> read_as = {}) {
    for (const auto& part : parts) part->start_gather(read_as);
  }
  void finish_gather() {
    for (const auto& part : parts) part->finish_gather();
  }
  void gather(std::optional<DType> read_as = {}) {
    start_gather(read_as);
    finish_gather();
    start_gather(read_as);  // where it was asked for ahead for other reads
    finish_gather();
  }
  void release(bool keep_part = false) noexcept {
    for (const auto& part : parts) part->release(keep_part);
  }
  void settle() {
    for (const auto& part : parts) part->settle();
  }
  void show_wholes() {
    for (const auto& part : parts) part->show_wholes();
  }
  void show_shards() {
    for (const auto& part : parts) part->show_shards();
  }
  // Whether the wholes are there, in whatever dtype, and hold what the shards hold.
  bool is_gathered() const {
    return std::ranges::all_of(
        parts, [](const auto& part) { return part->is_whole() && part->is_as_gathered(); });
  }
  bool is_gathering() const {
    return std::ranges::any_of(parts, [](const auto& part) { return part->is_gathering(); });
  }
};

// The units of the modules of this context, for as long as these live.
struct ShardedModules {
  std::unordered_map<const nn::ModuleBase*, std::weak_ptr<ShardUnit>> units;
  // The ranks of a group in fewer, by how many; see ReshardAfterForward.
  std::map<std::pair<const Group*, int>, std::weak_ptr<Group>> near;
  std::shared_ptr<ShardUnit> find(const nn::ModuleBase& module) const {
    const auto found = units.find(&module);
    return found == units.end() ? nullptr : found->second.lock();
  }
  static ShardedModules& current() { return Context::current().slot<ShardedModules>(); }
};

}  // namespace tessera::distributed
