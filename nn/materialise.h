// Memory and initial values for a module made on the meta device; torch uses to_empty() and
// reset_parameters().
//
//     const nn::ParameterDefaultsGuard without_memory({.device = kMeta});
//     Gpt model(config);       // of any size; parameters may become shards now (distribute_tensor)
//     nn::materialise(model);  // on each rank: its own elements
//
// A parameter or buffer on the meta device gets memory for its own elements, with the bits that it
// would have had if the module had been made with memory, from the seed and the names in force when
// it was made, whatever its sharding and device. Only the shard is ever in memory, except for
// orthogonal() and sparse() of init.h. Tensors that have memory do not change. Tensors that share a
// storage share it afterwards.
//
// Fills of a tensor are recorded (core/factory/initial_values.h): nn::init, fill_, zero_, uniform_,
// normal_, bernoulli_, zeros(), ones(), full(), rand(), randn(), on it or on contiguous views of
// it, followed by to(dtype) of the module, clone() and distribute_tensor(). After any other write,
// such as copy_ from a table, the value is unknown: ValueError names all such tensors before any
// gets memory. init::by_range and init::by_index make your own formula a fill.
#pragma once

#include <tessera/nn/module.h>

namespace tessera::nn {

struct MaterialiseOptions {
  bool initialise = true;  // false: only allocates, for models that are loaded next
};

// Memory is counted as parameters, for buffers too if they were made so. ValueError for a device
// that has no memory.
void materialise(ModuleBase& module, const Device& device = kCpu,
                 const MaterialiseOptions& options = {});

}  // namespace tessera::nn
