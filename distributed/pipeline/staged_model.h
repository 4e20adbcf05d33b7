// A model whose modules are dealt over the stages of a pipeline.
//
//     ParallelDims dims(world(), {.pp = 2, .dp_shard = 1});
//     StagedModel staged(model, &dims.mesh(), {.cuts = {"transformer.h.6"}});
//     staged.describe();
//
// Every rank builds the whole model, with the same names. Modules belong to stages in the order of
// their construction: a stage begins with the module that its cut names. A parameter becomes a
// DTensor of which the ranks along "pp" that have its stage hold all elements, as one run, and the
// others none (FlatShard), so optimizers, clipping, checkpoints and averages see one list
// everywhere. In a call of a stage the parameters and buffers of all other stages are meta, and
// `forward` runs as it is: [Note: calls of a stage].
//
// [Note: calls of a stage] The modules before the stage calculate on kMeta, which costs shapes
// alone, and take their numbers from random streams, so that the stage's own are those of one
// process. At the call of the module at the cut what was received takes the place of its arguments,
// every tensor among them (masks and angles too); at that of the next cut the arguments are kept,
// to be sent, and meta ones go on. An op that gets meta and other inputs calculates on kMeta before
// and behind the stage. In the stage a meta input that was an argument at the cut means what was
// received, wherever it is read; any other one crossed the cut unseen: a DeviceError that names the
// cut.
//
// [Note: tied parameters] A parameter with places in several stages belongs to the first one, which
// alone steps it and counts it. The ranks of the others get its value when a step begins, and send
// their gradient when it ends; the owner adds these to its own by ascending stages. So the gradient
// of a tied table is (sum over micro-batches of the embedding's) + (that of the head's), while one
// process adds both micro-batch by micro-batch; StagedModel on one rank gives its bits.
//
// [Note: stages that are sharded] The ranks along "dp_shard" with one stage may divide its
// parameters into equal runs, of which a rank holds, and its optimizer updates, one (FlatShards
// along the product of "pp" and "dp_shard", of which other stages' ranks hold nothing). They are
// gathered when a step begins, stay whole until the stage's last backward of it, and then the
// gradients, whole so far, are reduced once, each to the rank with its elements.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/pipeline/executor.h>
#include <tessera/nn/module.h>

namespace tessera::distributed {

// What the data-parallel ranks of a stage divide, see [Note: stages that are sharded].
enum class StageSharding : uint8_t {
  kNone,
  kStates,      // gradients and optimizer states between steps: parameters stay whole (ZeRO-1)
  kParameters,  // and the parameters: they are whole within steps alone
};

struct StagingOptions {
  std::vector<std::string> cuts;  // dotted names of the modules with which stages 1, 2... begin
  int stages_per_rank = 1;
  StageSharding sharding = StageSharding::kNone;
};

// Cuts at some of these blocks, given in the model's order, so that the stage with the most
// arithmetic has as little as can be. It is counted as elements of matrices outside of embeddings,
// to which the products of a token are proportional; what comes before the first block is the first
// stage's, what follows the last one (the head) the last stage's. ConfigError for more stages than
// blocks.
std::vector<std::string> even_cuts(nn::ModuleBase& model, std::span<nn::ModuleBase* const> blocks,
                                   int stages);

class StagedModel {
 public:
  // `mesh`: has an axis "pp", along which stage s is on coordinate s % ranks; null: one rank has all
  // stages, and parameters stay as they are. Frees the memory of parameters of other ranks. The
  // model outlives it. ConfigError for cuts that the model lacks, that are not in its order or whose
  // number does not fit, for parameters that are divided already but by parallelize_module() along
  // "tp" of the same mesh, and for sharding over a mesh in which "dp_shard" does not follow "pp".
  // UnsupportedError for parts along "tp" that differ in size. Collective.
  StagedModel(nn::ModuleBase& model, Mesh* mesh, const StagingOptions& options);
  ~StagedModel();
  StagedModel(const StagedModel&) = delete;
  StagedModel& operator=(const StagedModel&) = delete;

  int ranks() const;
  int stages() const;
  const std::vector<std::string>& cuts() const;
  // Each stage: its rank, its first module, bytes of parameters, share of the arithmetic.
  std::string describe() const;

  // The model's call and its loss for one micro-batch. The loss of other stages than the last is
  // meta and says nothing.
  using Call = std::function<Tensor(int micro)>;
  using Seed = std::function<Tensor(int micro, const Tensor& loss)>;
  struct Calls {
    Call call;
    Seed seed = {};  // PipelineStage::seed
  };
  // This rank's stages, as an executor takes them; they live as long as this.
  std::vector<PipelineStage*> own_stages();
  int last_rank() const { return (stages() - 1) % ranks(); }

  // A step, or an evaluation: in between the model's places hold what stages calculate with. Tied
  // values travel through `groups`. The rank's own parameters have the gradients that are there;
  // finish() adds those of tied places and gives `.grad` back to the parameters.
  class Step {
   public:
    Step(StagedModel& staged, PipelineGroups groups, Calls calls, bool trains);
    ~Step();  // without finish(): the places are restored, gradients of the step are dropped
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;
    void finish();

   private:
    StagedModel& staged_;
    bool finished_ = false;
  };
  // After finish(): for each parameter, in the order of named_parameters(), whether this rank has a
  // gradient of it; and what makes ranks without elements have an empty one wherever `has` says so.
  std::vector<bool> own_gradients() const;
  void complete_gradients(const std::vector<bool>& has);
  // The gradients of this rank's own parameters that require one, zeros where `has` says that
  // another rank has one and there is none: to be reduced in place over data-parallel ranks.
  TensorList gradients_to_reduce(const std::vector<bool>& has);
  // Of stages that are sharded: ends their reductions, and parameters have their parts of the sums
  // over the stage's ranks wherever `has` says that one of these has a gradient. Collective.
  void finish_reductions(const std::vector<bool>& has);
  // The ranks of other stages get the persistent buffers that some rank has written since the last
  // time. Collective along "pp".
  void share_buffers();
  // Within a call of a stage: its buffers become those of rank 0 of `ranks`. Collective along them.
  void follow_buffers(Group& ranks);
  bool is_in_step() const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::distributed
