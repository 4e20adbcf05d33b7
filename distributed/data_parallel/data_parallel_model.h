// A model that the ranks of a group train together, replicated or sharded.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <tessera/distributed/backward/backward_pass.h>
#include <tessera/distributed/backward/step_plan.h>
#include <tessera/distributed/data_parallel/join.h>

namespace tessera::distributed {

// Backwards in the scope accumulate locally.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(std::shared_ptr<BackwardPass> pass)
      : pass_(std::move(pass)), previous_(pass_->plan.sync_gradients) {
    pass_->plan.sync_gradients = false;
  }
  ~NoSync() { pass_->plan.sync_gradients = previous_; }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<BackwardPass> pass_;
  bool previous_;
};

class DataParallelModel {
 public:
  virtual ~DataParallelModel() = default;

  // The backward pass of its parameters.
  BackwardPass& pass() const { return *pass_; }
  NoSync no_sync() const { return NoSync(pass_); }
  void set_plan(const StepPlan& plan) const { pass_->plan = plan; }
  const StepPlan& plan() const { return pass_->plan; }

  // Whether every backward's gradients are reduced, also those of micro-batches before the last:
  // ranks keep only their shard of the sums.
  virtual bool reduces_every_backward() const { return false; }
  // The tensors that ops read if parameters are sharded: the whole ones.
  virtual TensorList wholes() const { return {}; }
  // Ranks may have different numbers of batches in the scope; see join.h.
  virtual Join join(const JoinOptions& options = {}) = 0;
  // Called in each recorded forward of the model. Its result, if any, is called when a gradient of
  // that forward's outputs has arrived, before the backward begins that follows the plan.
  using BeforeBackward = std::function<void()>;
  virtual void set_forward_observer(std::function<BeforeBackward()> observer) = 0;
  // Describes the configuration and the cost of a step.
  virtual std::string describe() const = 0;

 protected:
  explicit DataParallelModel(std::shared_ptr<BackwardPass> pass) : pass_(std::move(pass)) {}
  DataParallelModel(const DataParallelModel&) = default;
  DataParallelModel(DataParallelModel&&) noexcept = default;
  DataParallelModel& operator=(const DataParallelModel&) = default;
  DataParallelModel& operator=(DataParallelModel&&) noexcept = default;

 private:
  std::shared_ptr<BackwardPass> pass_;
};

}  // namespace tessera::distributed
