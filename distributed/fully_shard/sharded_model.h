// A sharded model as the ranks train it together, set up by fully_shard() and zero().
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/distributed/data_parallel/data_parallel_model.h>
#include <tessera/distributed/fully_shard/unit_schedule.h>

namespace tessera::distributed {

// The memory and traffic of one unit, calculated from shapes.
struct UnitReport {
  std::string name;
  int64_t parameters = 0;               // elements of the whole tensors, of all dtypes
  int64_t whole_bytes = 0;              // of an all-gather, padding included
  int64_t part_bytes = 0;               // of this rank's shard
  int64_t reduced_bytes = 0;            // bytes of one reduction, padding included
  int64_t gathers = 0, reductions = 0;  // of a micro-batch
  bool reshards_after_forward = false;
  // With offload (offload_policy.h), else 0: bytes copied to the device for the all-gathers of a
  // micro-batch (kParameters) or of a step (kOptimizer), and to the host after the reduction of a
  // step's last micro-batch and of an earlier one. If replicas continue sums, these are copied to
  // the device before.
  OffloadPolicy offload = OffloadPolicy::kNone;
  int64_t uploaded_bytes = 0, downloaded_bytes = 0, partial_downloaded_bytes = 0;
  int64_t continued_bytes = 0;
};

class ShardedModel final : public DataParallelModel {
 public:
  ShardedModel(ShardedModel&&) noexcept = default;
  ShardedModel& operator=(ShardedModel&&) noexcept = default;

  // UnsupportedError: a rank without batches would have to run the model to take part in its
  // all-gathers.
  Join join(const JoinOptions& options = {}) override;
  void set_forward_observer(std::function<BeforeBackward()> observer) override;
  bool reduces_every_backward() const override { return schedule_->reduces_every_backward(); }
  TensorList wholes() const override;
  std::string describe() const override;

  std::vector<UnitReport> report() const;
  UnitSchedule& schedule() const { return *schedule_; }

 private:
  friend ShardedModel make_sharded_model(std::shared_ptr<UnitSchedule>, std::shared_ptr<ShardUnit>,
                                         std::string_view);
  ShardedModel(std::shared_ptr<UnitSchedule> schedule, std::shared_ptr<ShardUnit> root,
               std::string_view mode)
      : DataParallelModel({schedule, &schedule->pass()}),
        schedule_(std::move(schedule)),
        root_(std::move(root)),
        mode_(mode) {}

  std::shared_ptr<UnitSchedule> schedule_;
  std::shared_ptr<ShardUnit> root_;
  std::string_view mode_;
};

// For fully_shard.h and zero.h, which make them. `mode`: a name for describe().
ShardedModel make_sharded_model(std::shared_ptr<UnitSchedule> schedule,
                                std::shared_ptr<ShardUnit> root, std::string_view mode);

}  // namespace tessera::distributed
