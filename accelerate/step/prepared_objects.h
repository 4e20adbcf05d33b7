// What the Accelerator knows of the objects that it has prepared. Internal: accelerator.h is the
// interface.
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
// Whether an object that the Accelerator points to is still there. What the Accelerator hangs on
// the object (a scope around calls, a gate) owns the token, and goes with it.
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

// What the Accelerator knows of a model.
struct ModelRecord : accelerate::ParallelizedModel {
  nn::ModuleBase* model = nullptr;
  Life life;
  std::string type_name;
  NamedTensors parameters;
  NamedTensors wholes;  // that ops read in their places, where parameters are parts
  // Of several ranks, parameters that nobody reduces, as they were frozen when it was prepared.
  NamedTensors left_alone;
  // Of parameters that were narrowed: until their optimizer's first step.
  struct Original {
    Tensor value;  // f32
    // Of the parameter that holds it rounded, as long as nobody has written another.
    uint32_t version;
    const void* data;
  };
  std::unordered_map<TensorImpl*, Original> originals;
  KeptGradients kept;
  StepWindow window;
  std::optional<int64_t> steps;
  int no_sync = 0;     // scopes that are open
  int triggered = 0;   // scopes in which backward reduces whatever no_sync says
  bool local = false;  // windows are closed on this rank alone (local SGD)
  bool explicit_weights = false;
  bool consumed = true;  // an optimizer has stepped since the last backward
  // A window's gradients are there, and neither a step nor a zero_grad() of an optimizer has come.
  bool owes_step = false;
  // The loader that the last micro-batch came from, and how many loops over it had been left.
  struct Reading {
    const data::LoaderBase* loader = nullptr;
    int64_t loops_left = 0;
  };
  Reading reading;
  // The batch in hand, a loader's last, that has ended a window before its time.
  std::optional<data::LoaderCursor> short_at;
  double divisor = 1;  // that this rank's gradients were divided by without communication
  // Of the last clip that began with this parameter of `parameters`.
  std::unordered_map<const TensorImpl*, Tensor> norms;

  ~ModelRecord() { let_go(); }
  // What a forward must know: buffers are synchronized where gradients will be.
  void plan_forward(bool sync) {
    if (parallel) parallel->pass().plan.sync_gradients = sync && no_sync == 0 && !local;
  }
  bool reduces() const { return parallel != nullptr && !local; }
  // Whether this micro-batch's gradients are reduced, if nobody says otherwise.
  bool reduces_in(bool boundary, bool each_batch) const {
    return boundary || each_batch || (parallel && parallel->reduces_every_backward());
  }
  // Whether the gradient of a loss comes to a parameter: to what ops read in its place.
  bool is_reached_by(const Tensor& loss) const {
    return leads_to_any(loss, wholes.empty() ? parameters : wholes);
  }
  // ConfigError where a rank would train one of those by itself.
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
  // What backwards have added since the window began goes; what was there before it stays.
  void leave_window() {
    window.leave();
    owes_step = false;
    if (parallel) parallel->pass().drop_sums();
    for (const NamedTensor& named : parameters) named.tensor.set_grad(Tensor());
    kept.restore();
  }
  bool has_weight() const {
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
  uint64_t generation = 0;                           // of the models when they were looked up
  // A clip of all its gradients, which the next step applies as it reads them.
  struct FoldedClip {
    double before;  // Optimizer::next_step(), as it was
    Tensor before_on_device;
  };
  std::optional<FoldedClip> clip;
  bool clipped = false;    // by the program, within gradient_clipping
  bool attempted = false;  // step() came to a boundary, and nobody has looked how it ended
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

// What is prepared, and where its windows stand.
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
  // That hold parameters of the optimizer; looked up again where models came or went.
  const std::vector<std::shared_ptr<ModelRecord>>& models_of(OptimizerRecord& record);
  // Whether all models of the optimizer are at the end of their windows.
  bool at_boundary(OptimizerRecord& record);
};

// The gradients of parameters that are not in `seen` yet, which they then are.
TensorList gradients_of(const NamedTensors& parameters, std::unordered_set<TensorImpl*>& seen);

}  // namespace tessera
