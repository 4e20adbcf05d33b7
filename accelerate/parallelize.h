// The mesh, the precision and the data-parallel mode that settings ask for. Internal: accelerator.h
// is the interface.
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

// The mesh that the settings ask for, in the current context, see parallel_dims(): collective.
// ConfigError for sizes that do not multiply to the world size.
distributed::ParallelDims& parallel_dims_of(const Settings& settings);

struct ParallelizeOptions {
  Device device = kCpu;  // device of the model's computation
  // Allocates and initializes meta parameters, sharded ones during sharding. Null: they stay on the
  // meta device (plan/training_plan.h).
  ModelMaterialisation* missing = nullptr;
  // Whether maxima of fp8 are not reduced over ranks for now.
  std::function<bool()> steps_alone = {};
};
// Precision, recomputation, then sharding or replication: what prepare() does with a model, and a
// plan with one on kMeta. Collective; throws what precision::apply(), replicate(), zero() and
// fully_shard() throw, ConfigError for units that the model lacks. `made` is set also after an
// error.
void parallelize(ParallelizedModel& made, nn::ModuleBase& model, const Settings& settings,
                 distributed::ParallelDims& dims, const ParallelizeOptions& options = {});

// The precision in which a prepared model computes.
precision::Policy policy_of(const Settings& settings);

// Whether the optimizer's state is offloaded to host memory, which works on one rank too.
bool offloads(const Settings& settings);

// Whether a rank keeps only a shard of the parameters.
bool cuts_parameters(const Settings& settings);

// The modules that are sharded and recomputed as one, in the order of the model, without the model
// itself. ConfigError for a class without a module.
std::vector<nn::ModuleBase*> units_of(nn::ModuleBase& model, const Settings& settings);

}  // namespace tessera::accelerate
