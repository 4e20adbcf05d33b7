// A model as the ranks train it, and what makes it so. Internal: parallelize.h does it.
#pragma once

#include <memory>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/distributed/data_parallel/data_parallel_model.h>
#include <tessera/nn/module.h>
#include <tessera/precision/autocast.h>

namespace tessera::accelerate {

struct ParallelizedModel {
  std::vector<HookHandle> handles;
  precision::AppliedPolicy policy;
  std::unique_ptr<distributed::DataParallelModel> parallel;  // null where nothing is reduced or cut
  // Of trained parameters that the policy narrowed the f32 values, which lie as the parameters do:
  // what masters begin with. Without those that ModelMaterialisation gives.
  NamedTensors masters;

  ParallelizedModel() = default;
  ParallelizedModel(const ParallelizedModel&) = delete;
  ParallelizedModel& operator=(const ParallelizedModel&) = delete;
  ~ParallelizedModel() { let_go(); }
  // The model is as if nobody had prepared it, but for dtypes and parts.
  void let_go() {
    for (HookHandle& handle : handles) handle.remove();
    policy.remove();
    parallel.reset();
  }
};

}  // namespace tessera::accelerate
