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
// To accumulate m micro-batches run all but the last backward under no_sync(), or set a StepPlan
// for each. Parameters that a backward does not use, weights used several times, recomputed
// activations (checkpoint()) and control flow that differs between ranks need no option; see
// bucket_schedule.h.
//
// With deterministic reductions and f32, N ranks have the gradients of one process that runs the N
// batches one after the other and multiplies once by 1/N, to the bit, for any buckets.
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
  // `.grad` is a view of its bucket, which saves a second copy of the gradients. False: a separate
  // tensor.
  bool gradient_as_bucket_view = true;
  bool rebuild_buckets = true;  // once, in the order in which rank 0's gradients came
  // The dtype in which gradients of narrower parameters are added up, reduced and kept: kF32 for
  // models in bf16 or f16. Needs gradient_as_bucket_view.
  std::optional<DType> gradient_dtype = {};
  GradientAverage average = GradientAverage::kRanks;
  // Sends rank 0's parameters and buffers to all ranks. False if they are known to be equal.
  bool init_sync = true;
  // Sends rank 0's buffers to all ranks in each forward in training mode whose gradients are
  // synchronized.
  bool broadcast_buffers = true;
  BufferHook buffer_hook = {};
  // Names of parameters, buffers or modules that ranks do not share.
  std::vector<std::string> ignored = {};
};

// The result of replicate(). The model trains alone again when it is destroyed.
class Replica final : public DataParallelModel {
 public:
  Replica(Replica&&) noexcept;
  Replica& operator=(Replica&&) noexcept;
  ~Replica() override;

  // May be called once, before the first backward. Collective: ranks compare the hooks' names.
  // Throws DistributedError if they differ, ValueError for a second call.
  void set_communication_hook(std::shared_ptr<CommunicationHook> hook);

  Join join(const JoinOptions& options = {}) override;
  void set_forward_observer(std::function<BeforeBackward()> observer) override;
  std::string describe() const override { return report().describe(); }

  // Describes the configuration and the cost of a step.
  ShardReport report() const;
  const BucketSchedule& schedule() const;

 private:
  friend Replica replicate(nn::ModuleBase&, Mesh&, const ReplicateOptions&);
  struct State;
  explicit Replica(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

// Collective over the axis. The ranks first compare number, names, shapes, dtypes of parameters and
// buffers, which of them require grad, and the options; if any rank differs all throw one
// DistributedError that names it. `model` must outlive the Replica or not be called any more,
// `mesh` must outlive both. Throws ConfigError for an axis that the mesh lacks and for an ignored
// name that the model lacks.
Replica replicate(nn::ModuleBase& model, Mesh& mesh, const ReplicateOptions& options = {});

// Whether an existing Replica of this context reduces the parameter's gradients.
bool is_replicated(const Tensor& parameter);

}  // namespace tessera::distributed
