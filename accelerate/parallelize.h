// The mesh, the precision and the data-parallel mode that settings ask for. Internal: accelerator.h is the interface.
#pragma once

#include <functional>
#include <vector>

#include <tessera/accelerate/model_materialisation.h>
#include <tessera/accelerate/settings/config.h>
#include <tessera/accelerate/step/parallelized_model.h>
#include <tessera/distributed/mesh/parallel_dims.h>
#include <tessera/nn/module.h>
#include <tessera/precision/policy.h>

namespace tessera::accelerate {

// The mesh that the settings ask for, of the current context, see parallel_dims(): collective.
// ConfigError for sizes that do not multiply to the number of ranks.
distributed::ParallelDims& parallel_dims_of(const Settings& settings);

struct ParallelizeOptions {
  Device device = kCpu;  // that the model calculates on
  // What of the model has no elements yet; of parameters that are cut it gets them in between. Null:
  // they stay without (plan/training_plan.h).
  ModelMaterialisation* missing = nullptr;
  // Whether maxima of fp8 are this rank's own affair for now.
  std::function<bool()> steps_alone = {};
};
// Precision, recomputation, then sharding or replication: what prepare() does with a model, and what
// a plan does with one on kMeta. Collective; throws what precision::apply(), replicate(), zero() and
// fully_shard() throw, ConfigError for units that the model has not. `made`: also after an error.
void parallelize(ParallelizedModel& made, nn::ModuleBase& model, const Settings& settings,
                 distributed::ParallelDims& dims, const ParallelizeOptions& options = {});

// How a prepared model computes.
precision::Policy policy_of(const Settings& settings);

// Whether memory of the host holds what the optimizer works on, which one rank has too.
bool offloads(const Settings& settings);

// Whether a rank keeps a part of the parameters alone.
bool cuts_parameters(const Settings& settings);

// The modules that are gathered and calculated again as one, in the order of the model, without the
// model itself. ConfigError for a class of which it has no module.
std::vector<nn::ModuleBase*> units_of(nn::ModuleBase& model, const Settings& settings);

}  // namespace tessera::accelerate
