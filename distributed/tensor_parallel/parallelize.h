// Divides a model among ranks that calculate it together: tensor parallelism (Shoeybi et al. 2019),
// with sequence parallelism (Korthikanti et al. 2022).
//
//     ParallelDims dims(world(), {.dp_shard = 1, .tp = 4});
//     parallelize_module(model, dims.mesh()["tp"], {.sequence = true});
//     optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
//     loss.backward();
//     reduce_replicated_gradients(model);
//     optimizer.step();
//
// A model says by a table of names how it may be divided (nn/parallel_style.h); a plain one gets
// the table here. Parameters are cut in place, so that each rank holds its part from here on, and
// modules get boundaries, at which activations are converted (convert.h):
//
// | style       | parameters               | enters              | leaves                      |
// |-------------|--------------------------|---------------------|-----------------------------|
// | kColumnwise | weight, bias: Shard(0)   | as replicated       | as a shard of the last dim. |
// | kRowwise    | weight: Shard(1)         | as it is: that shard| as invariant                |
// | kVocabulary | weight: Shard(0)         | as it is            | as invariant                |
// | kLossHead   | weight: Shard(0)         | as replicated       | as invariant: all logits;   |
// |             |                          |                     | of a loss none              |
// | kSequence   | whole                    | as it is            | as it is                    |
//
// With `sequence` what leaves as invariant above leaves as a shard of the tokens, the last dimension
// but one, and kSequence modules take it so: their parameters are replicated, and their gradients
// are summands, which reduce_replicated_gradients() adds up in one call.
//
// Between the modules every op checks what it is given (compute_mesh_rules.cpp): a composition that would give
// other numbers than one process is an UnsupportedError of the op.
#pragma once

#include <string>
#include <vector>

#include <tessera/distributed/mesh/mesh.h>
#include <tessera/nn/module.h>
#include <tessera/nn/parallel_style.h>

namespace tessera::distributed {

struct ParallelizeOptions {
  std::vector<nn::StyledModules> styles = {};  // none: those of the model and of the modules in it
  bool sequence = false;
};

// Collective in that all ranks call it; communicates nothing. The parameters are whole and equal on
// all ranks. `mesh`: one axis, which outlives the model. ConfigError: a table without entries, a
// pattern that no module has, a module that its style does not serve, sizes that do not divide.
void parallelize_module(nn::ModuleBase& model, Mesh& mesh, const ParallelizeOptions& options = {});

// Adds up the gradients of replicated parameters over the axes along which they are so, one
// all_reduce for each axis and dtype. Collective; once between the last backward and the step.
void reduce_replicated_gradients(nn::ModuleBase& model);

}  // namespace tessera::distributed
