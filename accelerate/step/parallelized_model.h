// A model as the ranks train it. Internal: made by parallelize.h.
#pragma once

#include <memory>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/distributed/data_parallel/data_parallel_model.h>
#include <tessera/distributed/pipeline/staged_model.h>
#include <tessera/nn/module.h>
#include <tessera/precision/autocast.h>

namespace tessera::accelerate {

struct ParallelizedModel {
  std::vector<HookHandle> handles;
  precision::AppliedPolicy policy;
  std::unique_ptr<distributed::DataParallelModel> parallel;  // null: nothing is reduced or sharded
  std::unique_ptr<distributed::StagedModel> stages;  // pp_size above 1; `parallel` is null then
  // The f32 values of trained parameters that the policy narrowed, sharded like them, with which
  // masters begin. Without those that ModelMaterialisation supplies.
  NamedTensors masters;

  ParallelizedModel() = default;
  ParallelizedModel(const ParallelizedModel&) = delete;
  ParallelizedModel& operator=(const ParallelizedModel&) = delete;
  ~ParallelizedModel() { let_go(); }
  // Restores the model, except for dtypes and sharding.
  void let_go() {
    for (HookHandle& handle : handles) handle.remove();
    policy.remove();
    parallel.reset();
    stages.reset();
  }
};

}  // namespace tessera::accelerate
