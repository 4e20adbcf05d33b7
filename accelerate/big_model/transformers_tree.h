// The modules of transformers' class for a configuration, by its names: what a device map for that
// library's models is made from. It also has their modules without weights (dropout) and buffers.
#pragma once

#include <string>
#include <vector>

#include <tessera/accelerate/big_model/model_tree.h>
#include <tessera/accelerate/plan/planned_model.h>

namespace tessera::accelerate {

// The class of modules that transformers does not divide (_no_split_modules).
inline const std::string kUndivided = "undivided";

// Weights are f32. UnsupportedError for other models than those whose config.json PlannedModel
// reads: files alone say nothing about blocks.
ModelTree transformers_tree(const PlannedModel& model);

}  // namespace tessera::accelerate
