// Memory and initial values for a module that was made without: what torch does by to_empty() and
// reset_parameters().
//
//     const nn::ParameterDefaultsGuard without_memory({.device = kMeta});
//     Gpt model(config);       // of any size; parameters may become shards now (distribute_tensor)
//     nn::materialise(model);  // on each rank: its own elements
//
// A parameter or buffer on the meta device gets memory for its own elements, and the values that
// the module would have had, had it been made with memory from the beginning: the same bits,
// however the parameter is cut and wherever its memory lies, from the seed and the names in force
// when the module was made. No more than a part is ever in memory, but for orthogonal() and
// sparse() of init.h. What has memory stays as it is. Tensors that share a storage share it
// afterwards.
//
// What is remembered is what fills did to the tensor (core/factory/initial_values.h): nn::init,
// fill_, zero_, uniform_, normal_, bernoulli_, zeros(), ones(), full(), rand(), randn(), to it or
// to contiguous views of it, then to(dtype) of the module, clone() and distribute_tensor().
// Anything else that wrote to a tensor, a copy_ of a table for one, leaves it unknown: ValueError
// that names all such tensors, before any gets memory. init::by_range and init::by_index make a
// rule of one's own known.
#pragma once

#include <tessera/nn/module.h>

namespace tessera::nn {

struct MaterialiseOptions {
  bool initialise = true;  // false: elements are left as they come, for models that are loaded next
};

// Bytes count as parameters, of buffers too where they were made so. ValueError for a device that
// has no memory.
void materialise(ModuleBase& module, const Device& device = kCpu,
                 const MaterialiseOptions& options = {});

}  // namespace tessera::nn
