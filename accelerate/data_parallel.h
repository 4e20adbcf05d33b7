// Which data-parallel mode the settings ask for. Internal: accelerator.h is the interface.
#pragma once

#include <memory>

#include <tessera/accelerate/settings/config.h>
#include <tessera/distributed/shard/data_parallel_model.h>
#include <tessera/nn/module.h>
#include <tessera/precision/policy.h>

namespace tessera::accelerate {

// The model as all ranks of the current mesh train it. `policy` was applied to it before.
// Collective; throws what the mode's own function throws (replicate()).
std::unique_ptr<distributed::DataParallelModel> make_data_parallel(nn::ModuleBase& model,
                                                                   const Settings& settings,
                                                                   const precision::Policy& policy);

}  // namespace tessera::accelerate
