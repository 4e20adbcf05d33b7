// The Accelerator's records of prepared objects. Internal: accelerator.h is the interface.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <tessera/accelerate/step/kept_gradients.h>
#include <tessera/accelerate/step/parallelized_model.h>
#include <tessera/accelerate/step/step_window.h>
#include <tessera/autograd/graph.h>
#include <tessera/core/device.h>
#include <tessera/core/error.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/data/dataloader.h>
#include <tessera/nn/module.h>
#include <tessera/optim/optimizer.h>
#include <tessera/optim/schedule.h>

namespace tessera {
// Whether an object that the Accelerator points to still exists. The token is owned by what the
// Accelerator attaches to the object (a scope around calls, a gate), and is destroyed with it.
class Life {
 public:
  using Token = std::shared_ptr<const Life>;
  Token token() {
    auto made = std::make_shared<const Life>();
    token_ = made;
    return made;
  }
  bool ended() const { return token_.expired(); }

 private:
  std::weak_ptr<const Life> token_;
};

// The record of a model.
struct ModelRecord : accelerate::ParallelizedModel {
  nn::ModuleBase* model = nullptr;
  Life life;
  std::string type_name;
  NamedTensors parameters;
  NamedTensors wholes;  // the unsharded tensors that ops read, if parameters are sharded
  // With several ranks: parameters that are not reduced, since they were frozen when it was
  // prepared.
  NamedTensors left_alone;
  // The f32 values of narrowed parameters, until their optimizer's first step.
  struct Original {
    Tensor value;  // f32
    // The version of the rounded parameter, to detect writes by others.
    uint32_t version;
    const void* data;
  };
  std::unordered_map<TensorImpl*, Original> originals;
  KeptGradients kept;
  StepWindow window;
  std::optional<int64_t> steps;
  int no_sync = 0;     // open scopes
  int triggered = 0;   // open scopes in which backward reduces in spite of no_sync
  bool local = false;  // windows are closed on this rank alone (local SGD)
  bool explicit_weights = false;
  bool consumed = true;  // an optimizer has stepped since the last backward
  // The window has gradients, and neither a step nor a zero_grad() of an optimizer has come.
  bool owes_step = false;
  // The loader of the last micro-batch, and how many loops over it had been left.
  struct Reading {
    const data::LoaderBase* loader = nullptr;
    int64_t loops_left = 0;
  };
  Reading reading;
  // The current batch, a loader's last, that has ended a window early.
  std::optional<data::LoaderCursor> short_at;
  double divisor = 1;                   // of this rank's gradients, without communication
  std::optional<double> window_weight;  // of stages: that of all data-parallel ranks
  // The norm of the last clip whose first parameter was this one of `parameters`.
  std::unordered_map<const TensorImpl*, Tensor> norms;

  ~ModelRecord() { let_go(); }
  // Tells a forward whether to synchronize buffers: when gradients will be.
  void plan_forward(bool sync) {
    if (parallel) parallel->pass().plan.sync_gradients = sync && no_sync == 0 && !local;
  }
  bool reduces() const { return parallel != nullptr && !local; }
  // Whether this micro-batch's gradients are reduced by default.
  bool reduces_in(bool boundary, bool each_batch) const {
    return boundary || each_batch || (parallel && parallel->reduces_every_backward());
  }
  // ConfigError for calls that know no stages.
  void check_undivided(std::string_view where) const {
    TS_CHECK_AS(ConfigError, !stages, where, "pp_size deals ", type_name, " over ",
                stages->stages(),
                " stages, whose order the pipeline knows; take `accelerator.pipeline(model)` and "
                "its step(window, loss) in place of a loop of accumulate() and backward()");
  }
  // Whether the gradient of a loss reaches a parameter, through the tensor that ops read.
  bool is_reached_by(const Tensor& loss) const {
    return leads_to_any(loss, wholes.empty() ? parameters : wholes);
  }
  // ConfigError if a rank would train one of those alone.
  void check_left_alone() const {
    for (const auto& [name, tensor] : left_alone) {
      TS_CHECK_AS(
          ConfigError, !tensor.requires_grad(), "prepare", "'", name, "' of ", type_name,
          " requires grad, and was frozen when ",
          parallel != nullptr
              ? "fsdp_ignored_modules left it whole on every rank, so that each would train "
                "it by itself; leave its module out of them"
              : "the whole model was when it was prepared, so that each rank would train it "
                "by itself; call prepare() with it again, on every rank");
    }
  }
  // Discards what backwards have added since the window began; earlier gradients stay.
  void leave_window() {
    window.leave();
    owes_step = false;
    if (parallel) parallel->pass().drop_sums();
    for (const NamedTensor& named : parameters) named.tensor.set_grad(Tensor());
    kept.restore();
  }
  bool has_weight() const {
    if (stages) return window_weight.value_or(0) != 0;
    if (!reduces()) return window.weight() != 0;
    const distributed::BackwardPass& pass = parallel->pass();
    return pass.average() != distributed::GradientAverage::kWeight || pass.window_weight() != 0;
  }
};

struct OptimizerRecord {
  optim::Optimizer* optimizer = nullptr;
  Life life;
  NamedTensors parameters;
  std::vector<std::shared_ptr<ModelRecord>> models;  // that hold its parameters
  uint64_t generation = 0;                           // of the models at the last lookup
  // A clip of all its gradients, which the next step applies as it reads them.
  struct FoldedClip {
    double before;  // the previous Optimizer::next_step()
    Tensor before_on_device;
  };
  std::optional<FoldedClip> clip;
  bool clipped = false;  // by the program, within gradient_clipping
  // zero_grad() came to a window whose last backward may still come, and then nothing is cleared.
  enum class Clearing : uint8_t { kNone, kWaits, kNow };
  Clearing clearing = Clearing::kNone;
  bool attempted = false;  // step() came to a boundary, and its outcome was not read yet
  bool skipped = false;

  bool was_skipped() {
    if (std::exchange(attempted, false)) skipped = !optimizer->skip_reason().empty();
    return skipped;
  }
};

template <class T>  // a Schedule or a PlateauSchedule
struct ScheduleRecord {
  T* schedule = nullptr;
  Life life = {};
};

// All prepared objects, and the state of their windows.
struct PreparedObjects {
  std::vector<std::shared_ptr<ModelRecord>> models;
  std::vector<std::shared_ptr<OptimizerRecord>> optimizers;
  std::vector<ScheduleRecord<optim::Schedule>> schedules;
  std::vector<ScheduleRecord<optim::PlateauSchedule>> plateau_schedules;
  uint64_t generation = 1;       // of models
  Device device;                 // of models and batches; known when something is prepared
  bool loose_gradients = false;  // as owes_step, of a backward outside of windows
  bool sync_gradients = true;    // the micro-batch that was opened last is its window's last

  std::shared_ptr<ModelRecord> find(const nn::ModuleBase& model) const;
  OptimizerRecord* find(const optim::Optimizer& optimizer) const;
  // ValueError for a model that was not prepared.
  std::shared_ptr<ModelRecord> at(const nn::ModuleBase& model, std::string_view where) const;
  ModelRecord* holder_of(const Tensor& parameter) const;
  // The models with parameters of the optimizer; looked up again after models were added or
  // removed.
  const std::vector<std::shared_ptr<ModelRecord>>& models_of(OptimizerRecord& record);
  // Whether all models of the optimizer are at the end of their windows.
  bool at_boundary(OptimizerRecord& record);
};

// The gradients of parameters that are not in `seen` yet; adds these to `seen`.
TensorList gradients_of(const NamedTensors& parameters, std::unordered_set<TensorImpl*>& seen);

}  // namespace tessera
