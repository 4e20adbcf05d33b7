// Sharded data-parallel training: every rank holds a part of each parameter, of its gradient and of
// its optimizer states; a unit of the model is whole on a rank only while it runs.
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
// module it is the whole tensor. Parameters stay the objects that they were: an optimizer that was
// made before holds the shards, too.
//
// Another method than forward is called as model.call(&Model::encode, x), which gathers as
// operator() does; there is nothing to register.
//
// The names are those of PyTorch's FSDP2 (torch.distributed.fsdp.fully_shard), and so is what they
// do: see docs/sharding.md for what differs.
//
// Bits: with deterministic reductions and f32, N ranks with M micro-batches each, dealt in turn,
// give the gradients of one process that adds up N * M and multiplies once by what they are divided
// by: the same for any N and M.
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

// How a parameter is cut: along dimension 0 where there is none.
using ShardPlacement =
    std::function<std::optional<Shard>(const std::string& name, const Tensor& parameter)>;

// Whether a unit is released after its forward and gathered again for its backward: less memory for
// more traffic. A number: to a part among so many neighbouring ranks, those of a node for example,
// from which backward gathers: more memory for less traffic far away. It divides the ranks of the
// axis and is neither 1 nor all of them, else ConfigError. None: true unless it is the root, whose
// backward comes at once.
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
  // Rank 0's values become everybody's before they are cut. False where they are known to be equal.
  bool init_sync = true;
  // In which dtypes parameters and gradients travel, and ops calculate.
  MixedPrecisionPolicy mixed_precision = {};
  // What a GPU keeps in memory of the host: PyTorch's CPUOffloadPolicy is
  // OffloadPolicy::kParameters. UnsupportedError for parameters on the CPU, which lie there anyway.
  OffloadPolicy offload_policy = OffloadPolicy::kNone;
  // Gradients of narrower parameters are reduced and kept in this dtype: kF32 for models in bf16.
  std::optional<DType> gradient_dtype = {};
  // Other dimensions than the first are cut evenly, else ConfigError.
  ShardPlacement shard_placement = {};
  // Names of parameters or modules, relative to the module, that stay each rank's own affair.
  std::vector<std::string> ignored = {};
  // Of the root:
  GradientAverage average = GradientAverage::kRanks;
  bool broadcast_buffers = false;  // rank 0's, in each forward in training mode
};

// A module that fully_shard() was called for.
class FullyShardedModule {
 public:
  explicit FullyShardedModule(std::shared_ptr<ShardUnit> unit) : unit_(std::move(unit)) {}

  // Gathers the unit's parameters now (asynchronous: waits where they are first used), or lets them
  // go. Collective, as all of these.
  void unshard(bool asynchronous = false) const;
  void reshard() const;
  // Of this unit, and with `recurse` of all under its module. Neighbours that fully_shard() was
  // given stay.
  void set_reshard_after_forward(bool reshard, bool recurse = true) const;
  // What is gathered ahead when a call of this unit (a backward of one) begins, in this order, in
  // place of the one unit that followed it (that was called before it). None: that again.
  void set_modules_to_forward_prefetch(const std::vector<FullyShardedModule>& modules) const;
  void set_modules_to_backward_prefetch(const std::vector<FullyShardedModule>& modules) const;

  // ---- Of the whole model that the module belongs to, for backwards from now on: fields of its
  // StepPlan. Before the model's first call this must be its outermost unit.
  // False: gradients add up whole on this rank, in reduce_dtype, until a backward that reduces.
  void set_requires_gradient_sync(bool sync) const;
  // False: replicas do not add their sums; for all but the last micro-batch of a step.
  void set_requires_all_reduce(bool all_reduce) const;
  // False: parameters stay gathered between micro-batches.
  void set_reshard_after_backward(bool reshard) const;
  // False: more backwards add to these sums, which are divided in the last one.
  void set_is_last_backward(bool last) const;

  // Stands for a call of the module on a rank that leaves it out (an expert without tokens), at the
  // place where other ranks call it: takes part in what they gather and reduce, with zeros, and
  // returns x. UnsupportedError for an x that does not require grad where gradients are recorded:
  // its gradient tells when the others go back through the module.
  [[nodiscard]] Tensor touch(const Tensor& x) const;

  const std::shared_ptr<ShardUnit>& unit() const { return unit_; }

 private:
  StepPlan& plan() const;
  std::shared_ptr<ShardUnit> unit_;
};

// Makes one unit of the module's parameters that no earlier call has taken: call it for blocks
// first, then for what holds them. The list form: several modules that run one after the other,
// gathered before the first and released after the last. `mesh`: one axis, whose ranks hold the
// parts; or two, of which the first replicates what the second cuts (HSDP). Collective over the
// mesh. Throws ConfigError for a module that has a unit already, for a parameter that another unit
// holds (weights that are tied across units), for a scalar parameter, for an ignored name that is
// not there.
// The mesh must outlive the model, else the next call of the model is an UnsupportedError. When the
// outermost module has its unit, no parameter that trains may come to the model and none may leave
// it: the next call would be a ConfigError.
FullyShardedModule fully_shard(nn::ModuleBase& module, Mesh& mesh,
                               const FullyShardOptions& options = {});
FullyShardedModule fully_shard(const std::vector<nn::ModuleBase*>& modules, Mesh& mesh,
                               const FullyShardOptions& options = {});
// The handle of a module that has a unit; ValueError for others.
FullyShardedModule fully_sharded(nn::ModuleBase& module);

// The model as the ranks train it: plans, no_sync, reports. `root`: the outermost module that
// fully_shard() was called for; no unit may be added afterwards. ValueError where it has none.
ShardedModel sharded_model(nn::ModuleBase& root);

// In the scope the parameters of the module and of all under it are whole, in parameters() too.
// With `writes` what is written to them there, the same on all ranks, is kept; otherwise a write is
// an error at the end of the scope. Collective. Not inside of a call of the module.
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
