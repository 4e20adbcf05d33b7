// The Accelerator's state between calls. Internal: accelerator.h is the interface.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/step/clipping.h>
#include <tessera/accelerate/step/loss_scaling.h>
#include <tessera/accelerate/step/prepared_objects.h>
#include <tessera/accelerate/step/window_weights.h>
#include <tessera/accelerate/tracking/fp8_values.h>
#include <tessera/core/error.h>
#include <tessera/core/random.h>
#include <tessera/distributed/mesh/parallel_dims.h>
#include <tessera/distributed/transport/captured_calls.h>

namespace tessera {

struct Accelerator::State : PreparedObjects, std::enable_shared_from_this<State> {
  accelerate::Settings settings;
  std::unique_ptr<Trackers> trackers;  // made when first asked for
  accelerate::Fp8Values fp8_values;
  WindowWeights weights{settings, *this};
  LossScaling loss_scaling{settings, *this};
  Clipping clipping{settings, *this, loss_scaling};
  int64_t steps = 1;
  // From a DeepSpeed configuration: samples of a rank's micro-batch, 0 if it sets none, and the
  // place that sets them.
  int64_t micro_batch_size = 0;
  std::string batch_arithmetic;
  // Optimizers and schedules that were made from it and not prepared yet.
  std::unordered_map<const void*, Life> configured;
  bool sync_with_dataloader = true;
  int data_ranks = 1;  // number of ranks that share batches
  // Destroyed objects, for checkpoints: "a model Linear".
  std::vector<std::string> gone;
  std::unique_ptr<accelerate::LoaderPlan> loader_plan;
  std::unique_ptr<accelerate::StateIo> io;    // made at the first use
  distributed::ParallelDims* dims = nullptr;  // the groups of ranks for each purpose

  // The open micro-batches, the innermost last.
  struct OpenMicro {
    uint64_t id;
    std::vector<std::shared_ptr<ModelRecord>> records;
  };
  std::vector<OpenMicro> open;
  uint64_t next_id = 0;
  bool joined = false;
  bool has_told_of_cuts = false;
  // State that a restart needs besides the objects' own.
  struct Counters {
    int64_t micro_batches = 0;  // of all ranks, opened so far
    WindowWeights::Nominal nominal = {};
    uint64_t seed = 0;
    StateDict state_dict() const;
    void load_state_dict(const StateDict& state);
  };
  Counters counters;

  RandomState random;
  int forward_depth = 0;
  std::vector<std::string> cuts;  // of the model that is prepared next; none: the settings'

  void settle_batch_sizes();
  // Sets another number of steps, for all models or one, against the sizes in the file.
  void settle_steps(int64_t other, bool of_all);
  void check_micro_batch() const;
  void check_configured(const void* object, bool has_section, std::string_view section,
                        std::string_view made);
  void prepare_model(nn::ModuleBase& model);
  void deal_over_stages(ModelRecord& record);
  void prepare_optimizer(optim::Optimizer& optimizer);
  void prepare_loader(const accelerate::LoaderRequest& request);
  template <class T>
  void prepare_schedule(std::vector<ScheduleRecord<T>>& known, T& schedule);
  // Called before anything that looks at prepared objects.
  void forget_dead();
  void check_complete(std::string_view where);
  void check_between_windows(std::string_view where);
  accelerate::TrainingState training_state();
  void begin_masters(OptimizerRecord& record);

  // ---- Steps
  // What a graphed step (graphed_step.h) must know of the calls that its graph will repeat.
  struct CaptureNotes {
    std::vector<std::shared_ptr<ModelRecord>> opened;
    int micro_batches = 0;
    RandomState programs;  // random numbers outside of prepared models
    distributed::CapturedCalls calls;
  };
  CaptureNotes* capturing = nullptr;
  // A graph repeats only the device's work; a graphed step also does the following.
  void refuse_in_capture(std::string_view where) const;
  // For host values that a graphed step does not know.
  void refuse_in_graphed_step(bool given, std::string_view where, std::string_view what) const;
  void begin_random_numbers();
  double weigh(std::optional<double> given);
  // Collective among the ranks that calculate a micro-batch together: ValueError unless all read one.
  void check_one_batch(double weight) const;
  distributed::StepPlan plan_backward(const ModelRecord& record, const StepWindow* window,
                                      bool more, double weight) const;
  class BackwardCall;
  // Windows whose loop over a loader ended by break or an exception.
  void end_left_windows();
  // A step or zero_grad() has come to its models' gradients.
  void settle_gradients(OptimizerRecord& record);
  // Called before the next loss is scaled.
  void update_scale();
  optim::StepDecision may_step(OptimizerRecord& record);
  bool may_clear(OptimizerRecord& record);
  // The optimizers of these models whose zero_grad() waits for a backward, and its doing where none
  // will come.
  std::vector<OptimizerRecord*> awaiting(const std::vector<std::shared_ptr<ModelRecord>>& of);
  void clear_awaited(const std::vector<std::shared_ptr<ModelRecord>>& of);
  optim::StepDecision may_step_schedule_of(const optim::Optimizer& optimizer);
};

}  // namespace tessera
