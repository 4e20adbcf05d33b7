// Divides a model among ranks that calculate it together: tensor parallelism (Shoeybi et al. 2019),
// with sequence parallelism (Korthikanti et al. 2022).
//
//     ParallelDims dims(world(), {.dp_shard = 1, .tp = 4});
//     parallelize_module(model, dims.mesh()["tp"], {.sequence = true});
//     optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
//     loss.backward();
//     optimizer.step();
//
// A model says by a table of names how it may be divided (nn/parallel_style.h); a plain one gets
// the table here. Parameters become DTensors along the axis, in place, and modules get boundaries,
// at which activations are converted (convert.h):
//
// | style       | parameters               | enters              | leaves                      |
// |-------------|--------------------------|---------------------|-----------------------------|
// | kColumnwise | weight, bias: Shard(0)   | as replicated       | as a shard of the last dim. |
// | kRowwise    | weight: Shard(1)         | as it is: that shard| as invariant                |
// | kVocabulary | weight: Shard(0)         | as it is            | as invariant                |
// | kLossHead   | weight: Shard(0)         | as replicated       | as invariant: all logits;   |
// |             |                          |                     | of a loss none              |
// | kSequence   | whole                    | as it is            | as it is                    |
// | kHeads      | whole, replicated        | as it is            | as it is                    |
// | kWhole      | whole                    | as it is            | as it is                    |
//
// With `sequence` what leaves as invariant above leaves as a shard of the tokens, the last dimension
// but one, and kSequence modules take it so; kWhole ones gather it. What enters kColumnwise and
// kLossHead is kept as a rank's tokens and gathered again in backward. Parameters of kHeads, and with
// `sequence` of kSequence, are copies whose gradients are summands, which are added up when the
// backward ends.
//
// In calls of the model its modules see plain tensors with marks, this rank's parts; outside of
// them parameters and gradients are DTensors, so that optimizers, clip_grad_norm(), state_dict() and
// all ways of saving and loading are of the whole model. The sharding engine does that, as a unit
// over one data rank: sharded_model() has its plan and reports. fully_shard() and zero(), over other
// axes of the same mesh, take the parameters over and shard them once more:
//
//     Mesh& mesh = dims.mesh();  // of {.dp_shard = 2, .tp = 2}
//     parallelize_module(model, mesh["tp"], {.sequence = true});
//     for (nn::ModuleBase* block : model.blocks()) fully_shard(*block, mesh["dp_shard"]);
//     fully_shard(model, mesh["dp_shard"]);
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

// What became of the parameters, for people: a line for those of equal names but for numbers. Empty
// for a model that is not divided.
//
//     layers along tp=2: this rank has 3840 of 7328 elements
//       transformer.wte.weight             [19, 16] of [38, 16], Shard(0)
//       transformer.h.*.ln_1.weight  x 2   [16], replicated: its gradients are summands
std::string describe_layers(const nn::ModuleBase& model);

}  // namespace tessera::distributed
