// What the Accelerator keeps between calls. Internal: accelerator.h is the interface.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/step/step_window.h>
#include <tessera/accelerate/tracking/fp8_values.h>
#include <tessera/autograd/graph.h>
#include <tessera/core/device.h>
#include <tessera/core/error.h>
#include <tessera/core/random.h>
#include <tessera/distributed/data_parallel/data_parallel_model.h>
#include <tessera/distributed/transport/captured_calls.h>
#include <tessera/nn/module.h>
#include <tessera/optim/optimizer.h>
#include <tessera/optim/schedule.h>
#include <tessera/precision/autocast.h>
#include <tessera/precision/grad_scaler.h>

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

// Gradients that were there before a window and are added to its mean; see [Note: adding up].
class KeptGradients {
 public:
  bool empty() const { return entries_.empty(); }
  // Copies them, and leaves zeros.
  void take(const NamedTensors& parameters);
  void add();       // to what is there now
  void subtract();  // before more is added to the mean
  void clear() { entries_.clear(); }
  void scale(double factor);
  // Around each backward, to see what somebody else has cleared meanwhile: that is forgotten.
  void forget_cleared();
  void note_versions();

 private:
  struct Entry {
    Tensor parameter, value;
    uint32_t version;  // of `.grad`
  };
  void apply(double factor);
  std::vector<Entry> entries_;
};

// What the Accelerator knows of a model.
struct ModelRecord {
  nn::ModuleBase* model = nullptr;
  Life life;
  std::string type_name;
  NamedTensors parameters;
  NamedTensors wholes;  // that ops read in their places, where parameters are parts
  // Of several ranks, parameters that nobody reduces, as they were frozen when it was prepared.
  NamedTensors left_alone;
  std::vector<HookHandle> handles;
  precision::AppliedPolicy policy;
  // Of parameters that were narrowed: until their optimizer's first step.
  struct Original {
    Tensor value;  // f32
    // Of the parameter that holds it rounded, as long as nobody has written another.
    uint32_t version;
    const void* data;
  };
  std::unordered_map<TensorImpl*, Original> originals;
  std::unique_ptr<distributed::DataParallelModel> parallel;  // where the ranks train it together
  KeptGradients kept;
  StepWindow window;
  std::optional<int64_t> steps;
  int no_sync = 0;     // scopes that are open
  int triggered = 0;   // scopes in which backward reduces whatever no_sync says
  bool local = false;  // windows are closed on this rank alone (local SGD)
  bool explicit_weights = false;
  bool consumed = true;  // an optimizer has stepped since the last backward
  double divisor = 1;    // that this rank's gradients were divided by without communication
  // Of the last clip that began with this parameter of `parameters`.
  std::unordered_map<const TensorImpl*, Tensor> norms;

  ~ModelRecord() { let_go(); }
  // Of the model, where another record takes this one's place: optimizers may hold it for a while.
  void let_go() {
    for (HookHandle& handle : handles) handle.remove();
    policy.remove();
    parallel.reset();
  }
  // What a forward must know: buffers are synchronised where gradients will be.
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

struct Accelerator::State : std::enable_shared_from_this<State> {
  accelerate::Settings settings;
  std::unique_ptr<Trackers> trackers;  // made when first asked for
  accelerate::Fp8Values fp8_values;
  std::optional<precision::GradScaler> scaler;  // fp16
  int64_t steps = 1;
  // Of a DeepSpeed configuration: samples of a rank's micro-batch, 0 where it says none, and where
  // they come from.
  int64_t micro_batch_size = 0;
  std::string batch_arithmetic;
  // Optimizers and schedules that were made from it and not prepared yet.
  std::unordered_map<const void*, Life> configured;
  bool sync_with_dataloader = true;
  int data_rank = 0, data_ranks = 1;  // along the axis that batches are dealt over
  Device device;                      // of models and batches; known when something is prepared

  std::vector<std::shared_ptr<ModelRecord>> models;
  std::vector<std::shared_ptr<OptimizerRecord>> optimizers;
  std::vector<ScheduleRecord<optim::Schedule>> schedules;
  std::vector<ScheduleRecord<optim::PlateauSchedule>> plateau_schedules;
  // What was forgotten because it died, for checkpoints: "a model Linear".
  std::vector<std::string> gone;
  std::unique_ptr<accelerate::LoaderPlan> loader_plan;
  std::unique_ptr<accelerate::StateIo> io;    // made at the first use
  distributed::Group* dealt_ranks = nullptr;  // that batches are dealt among
  uint64_t generation = 1;                    // of models

  // The micro-batches that are open, the innermost last.
  struct OpenMicro {
    uint64_t id;
    std::vector<std::shared_ptr<ModelRecord>> records;
  };
  std::vector<OpenMicro> open;
  uint64_t next_id = 0;
  bool sync_gradients = true;
  bool joined = false;
  // What a restart must know beside the objects' own states.
  struct Counters {
    int64_t micro_batches = 0;                       // of all ranks, opened so far
    double nominal_samples = 0, nominal_weight = 0;  // 0: not known yet
    uint64_t seed = 0;
    StateDict state_dict() const;
    void load_state_dict(const StateDict& state);
  };
  Counters counters;

  // Gradients that a finite norm was taken of, as they were then: their step need not look for
  // overflow. Held until then, or until the next backward, so that an address is one gradient.
  struct FiniteGradient {
    Tensor gradient;
    uint32_t version;
    Tensor norm;
  };
  std::unordered_map<TensorImpl*, FiniteGradient> finite_gradients;

  RandomState random;
  int forward_depth = 0;

  std::shared_ptr<ModelRecord> find(const nn::ModuleBase& model) const {
    for (const auto& record : models) {
      if (record->model == &model) return record;
    }
    return nullptr;
  }
  std::shared_ptr<ModelRecord> at(const nn::ModuleBase& model, std::string_view where) const {
    auto record = find(model);
    TS_CHECK(record != nullptr, where, "the model ", model.type_name(),
             " was not prepared; call prepare(model) first");
    return record;
  }
  ModelRecord* holder_of(const Tensor& parameter) const {
    for (const auto& record : models) {
      for (const auto& [name, tensor] : record->parameters) {
        if (tensor.is(parameter)) return record.get();
      }
    }
    return nullptr;
  }
  OptimizerRecord* find(const optim::Optimizer& optimizer) const {
    for (const auto& record : optimizers) {
      if (record->optimizer == &optimizer) return record.get();
    }
    return nullptr;
  }

  void settle_batch_sizes();
  void check_micro_batch() const;
  void check_configured(const void* object, bool has_section, std::string_view section,
                        std::string_view made);
  void prepare_model(nn::ModuleBase& model);
  void prepare_optimizer(optim::Optimizer& optimizer);
  void prepare_loader(const LoaderRequest& request);
  template <class T>
  void prepare_schedule(std::vector<ScheduleRecord<T>>& known, T& schedule);
  // Before anything that looks at prepared objects.
  void forget_dead();
  void check_complete(std::string_view where);
  void check_between_windows(std::string_view where) const;
  accelerate::TrainingState training_state();
  void keep_originals(ModelRecord& record);
  void begin_masters(OptimizerRecord& record);

  // ---- Loss scaling
  void make_scaler();
  bool scales_on_device() const {
    return scaler && scaler->options().on_device && device.is_cuda();
  }
  void check_steps_are_known() const;
  void update_scale();
  void note_norm(const TensorList& parameters, const Tensor& norm);
  Tensor take_finite_norm(const optim::Optimizer& optimizer);

  // ---- Clipping
  OptimizerRecord* owner_of(const TensorList& parameters);
  Tensor fold_clip(OptimizerRecord& owner, const TensorList& parameters, double max_norm,
                   double norm_type);
  void clip_by_setting(OptimizerRecord& record);
  static void drop_clip(OptimizerRecord& record);
  void apply_clip(OptimizerRecord& record);

  // ---- Windows
  // What a graphed step (graphed_step.h) must know of the calls that its graph will repeat.
  struct CaptureNotes {
    std::vector<std::shared_ptr<ModelRecord>> opened;
    int micro_batches = 0;
    RandomState programs;  // random numbers outside of prepared models
    distributed::CapturedCalls calls;
  };
  CaptureNotes* capturing = nullptr;
  bool in_graphed_step = false;  // norms are written to one place, which every graph knows
  // A graph repeats what the device did, and nothing of what stands below; a graphed step does.
  void refuse_in_capture(std::string_view where) const;
  // Of numbers of the host that a graphed step does not know.
  void refuse_in_graphed_step(bool given, std::string_view where, std::string_view what) const;
  void begin_random_numbers();
  double weigh(std::optional<double> weight);
  distributed::StepPlan plan_backward(const ModelRecord& record, const StepWindow* window,
                                      bool more, double weight) const;
  double agree_on_nominal(double weight);
  void divide(std::span<const std::shared_ptr<ModelRecord>> records, bool undivided);
  void resume(ModelRecord& record);
  void begin_sum(ModelRecord& record, const Tensor& loss, bool at_once);
  double seed_of(const Tensor& loss, double weight,
                 std::span<const std::shared_ptr<ModelRecord>> own, bool undivided) const;
  bool divides_as_huggingface() const {
    return settings.loss_weighting.value == LossWeighting::kHuggingFace;
  }
  const std::vector<std::shared_ptr<ModelRecord>>& models_of(OptimizerRecord& record);
  optim::StepDecision may_step(OptimizerRecord& record);
  optim::StepDecision may_step_schedule_of(const optim::Optimizer& optimizer);
  bool at_boundary(OptimizerRecord& record);
  bool clips(const TensorList& parameters) const;
};

}  // namespace tessera
