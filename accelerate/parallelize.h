// Which data-parallel mode the settings ask for. Internal: accelerator.h is the interface.
#pragma once

#include <memory>
#include <vector>

#include <tessera/accelerate/model_materialisation.h>
#include <tessera/accelerate/settings/config.h>
#include <tessera/distributed/data_parallel/data_parallel_model.h>
#include <tessera/distributed/mesh/parallel_dims.h>
#include <tessera/nn/module.h>
#include <tessera/precision/policy.h>

namespace tessera::accelerate {

// The mesh that the settings ask for, of the current context, see parallel_dims(): collective.
// ConfigError for sizes that do not multiply to the number of ranks.
distributed::ParallelDims& parallel_dims_of(const Settings& settings);

// The model as the ranks of that mesh train it. `policy` was applied to it before. Collective; throws
// what the mode's own function throws (replicate()). `missing`: what of the
// model has no elements yet; of parameters that are cut it gets them in between. Null: they stay
// without (plan/training_plan.h).
std::unique_ptr<distributed::DataParallelModel> make_data_parallel(nn::ModuleBase& model,
                                                                   const Settings& settings,
                                                                   distributed::ParallelDims& dims,
                                                                   const precision::Policy& policy,
                                                                   ModelMaterialisation* missing);

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
