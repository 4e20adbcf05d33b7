// Sharded data-parallel training: every rank holds a shard of each parameter, of its gradient and
// of its optimizer states; a unit of the model is unsharded on a rank only while it runs.
//
//     Gpt model(config);                                          // or on kMeta
//     for (auto& block : model.blocks()) fully_shard(*block, mesh());
//     fully_shard(model, mesh());                                 // what is left: the root
//     optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-4});
//     for (auto& batch : loader) {
//       model(batch.inputs, batch.targets).loss.backward();
//       optimizer.step(), optimizer.zero_grad();
//     }
//
// Modules change in place; names and types do not. Outside of calls every parameter is a DTensor,
// Shard(0), whose `.grad` is the same shard of the mean over the ranks; in a call of the unit's
// module it is the whole tensor. Parameters stay the same objects, so an optimizer that was made
// before holds the shards too.
//
// Call methods other than forward as model.call(&Model::encode, x), which gathers as operator()
// does; nothing has to be registered.
//
// A parameter that is a DTensor already, a chunk or a copy along other axes of the same mesh
// (tensor parallelism), is sharded once more: mesh["dp_shard"] beside mesh["tp"] makes a DTensor
// over both. In a call it is what it was before: this rank's part along the other axes, plain. The
// sharded dimension is the first that those axes leave whole and that divides, else a StridedShard
// of dimension 0.
// If its gradient is declared a summand along those axes (set_grad_placements: the weight of a norm
// whose ranks along tp have tokens of their own), it is sharded along them too, as along one axis
// with the data's: one reduce-scatter adds both up.
//
// Names and behavior are those of PyTorch's FSDP2 (torch.distributed.fsdp.fully_shard);
// docs/sharding.md lists the differences.
//
// With deterministic reductions and f32, N ranks with M micro-batches each, distributed in turn,
// have the gradients of one process that accumulates N * M and multiplies once by the inverse
// divisor, so the bits are the same for any N and M with the same product.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <tessera/distributed/fully_shard/offload_policy.h>
#include <tessera/distributed/fully_shard/sharded_model.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/nn/module.h>

namespace tessera::distributed {

// The dimension along which a parameter is sharded; 0 if empty.
using ShardPlacement =
    std::function<std::optional<Shard>(const std::string& name, const Tensor& parameter)>;

// Whether a unit is resharded after its forward and gathered again for its backward: less memory
// for more traffic. A number: it is resharded to that many neighboring ranks, those of a node for
// example, from which backward gathers: more memory for less traffic over the slow network. It must
// divide the ranks of the axis and be neither 1 nor all of them, else ConfigError. Absent: true
// except for the root, whose backward comes at once.
class ReshardAfterForward {
 public:
  ReshardAfterForward() = default;
  ReshardAfterForward(int ranks) : reshards_(true), ranks_(ranks) {}
  // What is a bool, or none.
  template <class Reshard>
  requires(std::convertible_to<Reshard, std::optional<bool>> &&
           (!std::integral<std::remove_cvref_t<Reshard>> ||
            std::same_as<std::remove_cvref_t<Reshard>, bool>))
      ReshardAfterForward(const Reshard& reshard)
      : reshards_(reshard) {}
  std::optional<bool> reshards() const { return reshards_; }
  std::optional<int> ranks() const { return ranks_; }

 private:
  std::optional<bool> reshards_;
  std::optional<int> ranks_;
};

struct FullyShardOptions {
  ReshardAfterForward reshard_after_forward = {};
  // Sends rank 0's values to all ranks before sharding. False if they are known to be equal.
  bool init_sync = true;
  // The dtypes in which parameters and gradients are sent and ops compute.
  MixedPrecisionPolicy mixed_precision = {};
  // What a GPU offloads to host memory: PyTorch's CPUOffloadPolicy is OffloadPolicy::kParameters.
  // UnsupportedError for parameters on the CPU.
  OffloadPolicy offload_policy = OffloadPolicy::kNone;
  // Gradients of narrower parameters are reduced and kept in this dtype: kF32 for models in bf16.
  std::optional<DType> gradient_dtype = {};
  // Dimensions other than the first must divide evenly, else ConfigError.
  ShardPlacement shard_placement = {};
  // Names of parameters or modules, relative to the module, that are not sharded or reduced.
  std::vector<std::string> ignored = {};
  // For the root:
  GradientAverage average = GradientAverage::kRanks;
  bool broadcast_buffers = false;  // rank 0's, in each forward in training mode
};

// A module that fully_shard() was called for.
class FullyShardedModule {
 public:
  explicit FullyShardedModule(std::shared_ptr<ShardUnit> unit) : unit_(std::move(unit)) {}

  // Unshards the unit's parameters now, or reshards them. Asynchronous: waits in the next unshard()
  // or call; nobody may write parameters until then. Collective, like all of these.
  void unshard(bool asynchronous = false) const;
  void reshard() const;
  // Sets this unit, and with `recurse` all under its module. The number of neighbors given to
  // fully_shard() is kept.
  void set_reshard_after_forward(bool reshard, bool recurse = true) const;
  // The units to prefetch, in this order, when a call (or backward) of this unit begins, instead of
  // the one unit that followed it (preceded it) before. Empty restores that.
  void set_modules_to_forward_prefetch(const std::vector<FullyShardedModule>& modules) const;
  void set_modules_to_backward_prefetch(const std::vector<FullyShardedModule>& modules) const;

  // ---- For the whole model of the module, from the next backward on: fields of its StepPlan.
  // Before the model's first call the module must be its outermost unit.
  // False: whole gradients add up on this rank, in reduce_dtype, until a backward that reduces.
  void set_requires_gradient_sync(bool sync) const;
  // False: replicas do not reduce their sums; for all but the last micro-batch of a step.
  void set_requires_all_reduce(bool all_reduce) const;
  // False: parameters stay unsharded between micro-batches.
  void set_reshard_after_backward(bool reshard) const;
  // False: further backwards add to these sums, and the last one divides them.
  void set_is_last_backward(bool last) const;

  // Replaces a call of the module on a rank that skips it (an expert without tokens), at the place
  // where other ranks call it: takes part in their all-gathers and reductions, with zeros, and
  // returns x. UnsupportedError for an x that does not require grad when gradients are recorded,
  // since its gradient tells when the others run the module's backward.
  [[nodiscard]] Tensor touch(const Tensor& x) const;

  const std::shared_ptr<ShardUnit>& unit() const { return unit_; }

 private:
  StepPlan& plan() const;
  std::shared_ptr<ShardUnit> unit_;
};

// Makes one unit of the module's parameters that belong to no unit yet: call it for blocks first,
// then for the modules that contain them. The list form makes one unit of several modules that run
// one after the other, in any order of the list, gathered before the first and resharded after the
// last. `mesh` has one axis, whose ranks hold the shards; or two, of which the first replicates and
// the second shards (HSDP). Collective over the mesh, and over the outermost mesh if a parameter is
// a part along other axes. Throws ConfigError for a module that has a unit already, for a parameter
// that another unit holds (weights that are tied across units), for a scalar parameter, for an
// unknown ignored name. The mesh must outlive the model, else the next call of the model is an
// UnsupportedError. Once the outermost module has its unit, no trainable parameter may be added to
// or removed from the model: the next call would be a ConfigError.
FullyShardedModule fully_shard(nn::ModuleBase& module, Mesh& mesh,
                               const FullyShardOptions& options = {});
FullyShardedModule fully_shard(const std::vector<nn::ModuleBase*>& modules, Mesh& mesh,
                               const FullyShardOptions& options = {});
// The handle of a module that has a unit; ValueError for others.
FullyShardedModule fully_sharded(nn::ModuleBase& module);

// The distributed model: plans, no_sync, reports. `root`: the outermost module that fully_shard()
// was called for; no unit may be added afterwards. ValueError if it has none.
ShardedModel sharded_model(nn::ModuleBase& root);

// In the scope the parameters of the module and of all under it are whole, in parameters() too.
// With `writes` the values written there, the same on all ranks, are kept; otherwise a write is an
// error at the end of the scope. A parameter that is a part along other axes is a DTensor along
// these axes in the scope: full_tensor() reads it whole, to_local() is this rank's to read and
// write. Collective. Not inside of a call of the module.
class [[nodiscard]] FullParametersScope {
 public:
  FullParametersScope(nn::ModuleBase& module, bool writes);
  ~FullParametersScope() noexcept(false);
  FullParametersScope(const FullParametersScope&) = delete;
  FullParametersScope& operator=(const FullParametersScope&) = delete;

 private:
  std::vector<std::shared_ptr<ShardUnit>> units_;
  bool writes_;
  int exceptions_;
};
struct FullParametersOptions {
  bool writes = false;
};
inline FullParametersScope full_parameters(nn::ModuleBase& module,
                                           const FullParametersOptions& options = {}) {
  return {module, options.writes};
}

}  // namespace tessera::distributed
