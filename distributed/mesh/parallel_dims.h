// Divides the ranks of a training into one mesh, and names the groups that act together in it.
//
//     ParallelDims dims(world(), {.dp_replicate = 2, .dp_shard = -1, .tp = 2});  // of 8 ranks
//     dims.mesh().describe();        // mesh(dp_replicate=2, dp_shard=2, tp=2)
//     dims.mesh()["dp"].size();      // 4: ranks with batches of their own
//     fully_shard(model, dims.parameter_mesh());
//
// The axes, the slowest first; those of size 1 are left out:
//
//     pp            pipeline stages
//     dp_replicate  replicas of what the axes to its right hold together
//     dp_shard      shards of parameters, gradients and states; each rank has its own batches
//     cp            parts of each sequence
//     tp            parts of each layer
//
// Products of axes have the names that torchtitan gives them:
//
//     dp     dp_replicate x dp_shard            loss   dp_replicate x dp_shard x cp
//     fsdp   dp_shard x cp                      stage  all but pp
//
// A mesh whose data-parallel axes are all 1 keeps one of size 1, so that dp, loss and stage always
// exist; fsdp exists if dp_shard or cp does.
//
// Each collective purpose has its own group below; without tp, cp and pp they are the same. All
// groups are made here, at once and in one order, because a stage that first asked for a group
// where the others do not would wait forever.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <tessera/distributed/mesh/mesh.h>

namespace tessera::distributed {

struct ParallelSize {
  // NOLINTNEXTLINE(google-explicit-constructor): a number alone says it
  ParallelSize(int size = 1, std::string from = {}) : ranks(size), source(std::move(from)) {}
  int ranks;           // -1 (for one axis at most): the ranks that the others leave
  std::string source;  // the setting that gives the size, for messages
};
struct ParallelSizes {
  ParallelSize pp = 1, dp_replicate = 1, dp_shard = -1, cp = 1, tp = 1;
};

class ParallelDims {
 public:
  // Collective: every rank of `world`, which must outlive it, gives the same sizes. One split for
  // each axis and product that is not the world. ConfigError where the sizes do not multiply to the
  // number of ranks, which names the settings and what would fit.
  explicit ParallelDims(Group& world, const ParallelSizes& sizes = {});

  Mesh& mesh() { return mesh_; }

  Group& batch_ranks() const { return mesh_.group("dp"); }  // deal batches, compare their values
  // This rank's place in the order of micro-batches, by which random numbers are drawn: ranks that
  // calculate one micro-batch together draw the same ones.
  int random_coordinate() const { return mesh_.coordinate("dp"); }
  Group& loss_ranks() const { return mesh_.group("loss"); }  // add up weights and gradients
  Group& fp8_ranks() const { return mesh_.group("stage"); }  // have one maximum of each operand
  // Step or leave a step out together, ranks of local steps included.
  Group& found_inf_ranks() const { return mesh_.group(); }
  Group& state_ranks() const { return mesh_.group(); }  // hold the model and its states together

  // Between the stages of a pipeline, for outputs and for gradients: a queue each. ConfigError
  // without pp.
  Group& pipeline_outputs() const { return pipeline_group(pipeline_outputs_); }
  Group& pipeline_gradients() const { return pipeline_group(pipeline_gradients_); }

  // What parameters lie on: dp_replicate, where there is one, and dp_shard, or fsdp where there is
  // cp. ConfigError for copies alone.
  Mesh& parameter_mesh();

 private:
  friend ParallelDims& parallel_dims(const ParallelSizes& sizes);
  ParallelDims(Group& world, std::vector<MeshAxis> axes);
  static Group& pipeline_group(const std::shared_ptr<Group>& group);
  Mesh mesh_;
  std::shared_ptr<Group> pipeline_outputs_, pipeline_gradients_;
};

// That of world() and these sizes in the current context, which keeps it: made at the first call,
// which is collective, and the same object each time.
ParallelDims& parallel_dims(const ParallelSizes& sizes = {});

}  // namespace tessera::distributed
