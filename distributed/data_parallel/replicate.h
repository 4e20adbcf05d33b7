// Data-parallel training: every rank holds the whole model and works on batches of its own;
// gradients are averaged while backward runs.
//
//     Gpt model(config);
//     Replica replica = replicate(model, distributed::mesh());  // in place
//     optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-4});
//     for (auto& batch : loader) {
//       model(batch.inputs, batch.targets).loss.backward();  // `.grad`: the mean of all ranks
//       optimizer.step(), optimizer.zero_grad();
//     }
//
// Accumulation over m micro-batches: all but the last backward under no_sync(), or a StepPlan for
// each. Parameters that a backward does not use, weights used several times, recomputed activations
// (checkpoint()) and control flow that differs between ranks need no option; see
// bucket_schedule.h.
//
// Bits: with deterministic reductions and f32, N ranks give the gradients of one process that runs
// the N batches one after the other and multiplies once by 1/N, to the bit, whatever the buckets.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/distributed/data_parallel/bucket_schedule.h>
#include <tessera/distributed/data_parallel/data_parallel_model.h>
#include <tessera/distributed/data_parallel/report.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/nn/module.h>

namespace tessera::distributed {

// Replaces the broadcast of buffers: makes them equal on all ranks of the group.
using BufferHook = std::function<void(const NamedTensors& buffers, Group& ranks)>;

struct ReplicateOptions {
  std::string axis = "dp";  // of the mesh
  int64_t first_bucket_bytes = kFirstBucketBytes;
  int64_t bucket_bytes = kBucketBytes;
  // `.grad` is a view of its bucket: no second copy of the gradients. False: it stays its own.
  bool gradient_as_bucket_view = true;
  bool rebuild_buckets = true;  // once, in the order in which rank 0's gradients came
  // Gradients of narrower parameters are added up, reduced and kept in this dtype: kF32 for models
  // in bf16 or f16. Needs gradient_as_bucket_view.
  std::optional<DType> gradient_dtype = {};
  GradientAverage average = GradientAverage::kRanks;
  // Rank 0's parameters and buffers become everybody's. False where they are known to be equal.
  bool init_sync = true;
  // Rank 0's buffers become everybody's in each forward in training mode whose gradients are
  // synchronised.
  bool broadcast_buffers = true;
  BufferHook buffer_hook = {};
  // Names of parameters, buffers or modules that are each rank's own affair.
  std::vector<std::string> ignored = {};
};

// What replicate() has set up. The model trains alone again when it goes.
class Replica final : public DataParallelModel {
 public:
  Replica(Replica&&) noexcept;
  Replica& operator=(Replica&&) noexcept;
  ~Replica() override;

  // Once, before the first backward. Collective: ranks compare the hooks' names. Throws
  // DistributedError where they differ, ValueError for a second one.
  void set_communication_hook(std::shared_ptr<CommunicationHook> hook);

  Join join(const JoinOptions& options = {}) override;
  void set_forward_observer(std::function<BeforeBackward()> observer) override;
  std::string describe() const override { return report().describe(); }

  // What is set up and what one step costs.
  ShardReport report() const;
  const BucketSchedule& schedule() const;

 private:
  friend Replica replicate(nn::ModuleBase&, Mesh&, const ReplicateOptions&);
  struct State;
  explicit Replica(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

// Collective over the axis. The ranks first compare what they hold: number, names, shapes, dtypes
// of parameters and buffers, which of them require grad, and the options; where any rank differs
// all throw one DistributedError that names it. `model` must outlive the Replica or not be called
// any more, `mesh` must outlive both. Throws ConfigError for an axis that the mesh lacks and for an
// ignored name that the model lacks.
Replica replicate(nn::ModuleBase& model, Mesh& mesh, const ReplicateOptions& options = {});

// Whether a Replica of this context that lives reduces the parameter's gradients.
bool is_replicated(const Tensor& parameter);

}  // namespace tessera::distributed
