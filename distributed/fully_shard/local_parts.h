// The unit of a model that is divided along other axes alone, by parallelize_module(): the sharding
// engine over one data rank. It gathers nothing and copies nothing; in calls its modules see plain
// tensors over the elements of the DTensors, and when a backward ends these have the gradients.
// Those of copies that are summands along the other axes are added up there. Internal.
//
// fully_shard() and zero() take the parameters over: the unit is gone then.
#pragma once

#include <memory>
#include <vector>

#include <tessera/distributed/fully_shard/shard_unit.h>

namespace tessera::distributed {

class LocalParts final : public ParamGroup {
 public:
  // `params`: DTensors as `shard`. With ranks.replicas their gradients are summands there.
  LocalParts(std::string tag, const ShardRanks& ranks, std::vector<ShardedParam> params);
  void bring_home() override;

 private:
  void issue_gather(std::optional<DType> cast) override;
  void free_wholes(bool) override {}
  Tensor own_part(size_t param) const override;
  void start_sum_of_copies(bool zeros) override;
  // Nothing travels.
  Tensor reduce_input(bool) override { return {}; }
  Tensor sum_of(const Tensor&, size_t) const override { return {}; }
};

// Makes the unit of all parameters of the model, which are DTensors over `mesh`.
void keep_local_parts(nn::ModuleBase& model, Mesh& mesh);
// Whether the module has a unit that is no such one.
bool is_sharded(const nn::ModuleBase& module);
// Dissolves the units that keep parameters of these modules so. Their parameters stay DTensors.
void let_go_of_local_parts(const std::vector<nn::ModuleBase*>& modules);

}  // namespace tessera::distributed
