// The Accelerator runs one plain training loop on any number of processes; gradient accumulation,
// precision and sharding are configuration.
//
//     Accelerator accelerator({.gradient_accumulation_steps = 4});
//     Gpt model(config);
//     optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-4});
//     data::DataLoader loader(dataset, {.batch_size = 8, .shuffle = true});
//     optim::CosineSchedule schedule(optimizer, {.warmup = 100, .total = 2000});
//
//     accelerator.prepare(model, optimizer, loader, schedule);  // in place: the same objects
//     for (auto& batch : loader) {
//       auto micro = accelerator.accumulate(model);
//       auto out = model(batch.inputs, batch.targets);
//       accelerator.backward(out.loss);
//       accelerator.clip_grad_norm(model.parameters(), 1.0);
//       optimizer.step(), schedule.step(), optimizer.zero_grad();
//     }
//     accelerator.save_state("run/last");
//
// The same program runs as one process and as N: `tessera launch -n N`. batch_size is that of one
// rank, learning rates are used as given, and schedules count optimizer updates. AcceleratorOptions
// in settings/settings.h has all settings.
//
// [Note: window] The micro-batches between two optimizer steps of a model are its window. Within it
// step(), zero_grad(), clip_* and a schedule's step() do nothing until the last micro-batch (the
// boundary), except that a zero_grad() before the first backward clears; the end of the loader ends
// the window early. Leaving a loop over a prepared loader by break or an exception ends the window
// without a step: its gradients are cleared, and the next micro-batch begins another window. Each
// model has its own window, so models that are trained in turn may accumulate different numbers of
// micro-batches; accumulate(a, b) opens a micro-batch of both.
//
// [Note: weight] After the boundary's backward `.grad` is the gradient of the weighted mean over
// all micro-batches of the window on all ranks, sum of weight * gradient / sum of weights, also
// where the window is short, batches differ in size or ranks have unequal numbers of tokens. The
// weight is the number of samples (the default) or tokens that the loss is a mean over. Losses are
// multiplied by weight / nominal, so that the factor is 1 for equal batches, and the sum is divided
// once. Within the window `.grad` is this rank's sum so far. Losses that depend neither on a model
// of the window nor on one that ranks share are not multiplied. LossWeighting::kHuggingFace divides
// as Accelerate does instead: every loss by gradient_accumulation_steps, their sum by the world
// size.
//
// [Note: adding up] New gradients are added to those that nobody cleared, on one rank as on many,
// so a program may divide its losses by hand, step at every k-th batch and open no micro-batches.
// If a window has one backward, its ranks first agree on their weights. If it has several
// micro-batches, earlier gradients are kept in a copy until the boundary, and `.grad` has the
// window's alone.
//
// With f32, deterministic reductions, one thread and equal micro-batches, N ranks are bit-equal to
// one process that accumulates N times as many micro-batches, dropout included: random numbers of
// prepared models are a function of (seed, global micro-batch, order of calls). With several
// micro-batches a rank this holds for zero2, zero3 and fsdp; ddp and zero1, which are equal to each
// other, first add up a rank's own micro-batches (docs/sharding.md).
//
// There is no global state. Several Accelerators live side by side, each with the bits that it has
// alone. An Accelerator belongs to the Context in which it was made and is used from its thread.
// Prepared objects may be destroyed before or after it. It forgets destroyed objects, and a
// prepared model trains alone again once the Accelerator is destroyed; but a sharded model stays
// sharded and can be prepared only once. A checkpoint needs all prepared objects (save_state).
// Preparing an object with another Accelerator transfers it.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/accelerate/deepspeed.h>
#include <tessera/accelerate/full_values.h>
#include <tessera/accelerate/graphed_step.h>
#include <tessera/accelerate/loaders/loader_plan.h>
#include <tessera/accelerate/metrics.h>
#include <tessera/accelerate/pipeline.h>
#include <tessera/accelerate/preparation.h>
#include <tessera/accelerate/process/operations.h>
#include <tessera/accelerate/process/process_control.h>
#include <tessera/accelerate/settings/settings.h>
#include <tessera/accelerate/state/model_io.h>
#include <tessera/accelerate/state/state_io.h>
#include <tessera/accelerate/tracking/tracker.h>
#include <tessera/core/source_location.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

namespace accelerate {

struct BackwardOptions {
  // What the loss is a mean over: the number of samples or tokens of this micro-batch, in any unit
  // that is the same within a window. Default: the samples of the current batch of the active
  // prepared loader, 1 without one. Not negative.
  std::optional<double> weight = {};
  bool retain_graph = false;
  bool create_graph = false;
  // Another backward of this micro-batch follows (a second loss, a second model's), so nothing is
  // divided before that one, nor reduced where ranks keep whole gradients. The last one reduces the
  // gradients of all. Without `more` every backward of the window's last micro-batch reduces and
  // divides to a mean that the next one resumes: correct up to rounding, with one more reduction.
  // ValueError outside of accumulate().
  bool more = false;
};

struct JoinUnevenOptions {
  bool even_batches = false;
  bool throw_on_early_end = false;
};

}  // namespace accelerate

class Accelerator;
struct ModelRecord;

// An open micro-batch, made by accumulate().
class [[nodiscard]] MicroBatch {
 public:
  ~MicroBatch();
  MicroBatch(const MicroBatch&) = delete;
  MicroBatch& operator=(const MicroBatch&) = delete;
  bool sync_gradients() const { return sync_gradients_; }  // the window's last

 private:
  friend class Accelerator;
  struct Scope;
  explicit MicroBatch(std::unique_ptr<Scope> scope, bool sync_gradients);
  std::unique_ptr<Scope> scope_;
  bool sync_gradients_;
};

// A scope, of no_sync() for example, whose destructor ends it.
class [[nodiscard]] AcceleratorScope {
 public:
  explicit AcceleratorScope(std::function<void()> end) : end_(std::move(end)) {}
  AcceleratorScope(AcceleratorScope&& other) noexcept : end_(std::exchange(other.end_, nullptr)) {}
  AcceleratorScope& operator=(AcceleratorScope&&) = delete;
  ~AcceleratorScope() {
    if (end_) end_();
  }

 private:
  std::function<void()> end_;
};

class Accelerator : public ProcessControl {
 public:
  explicit Accelerator(const AcceleratorOptions& options = {});
  ~Accelerator();
  Accelerator(const Accelerator&) = delete;
  Accelerator& operator=(const Accelerator&) = delete;

  // The device on which this rank computes: the GPU of its local rank, or the CPU if there is none
  // or the setting `cpu` asks for it; the setting `device` names one. prepare() moves models and
  // batches there; move your own tensors by x.to(accelerator.device()). DeviceError if a requested
  // GPU is missing, or the node has fewer GPUs than ranks. See accelerate/process/rank_device.h.
  Device device() const;

  // ---- Preparation

  // Takes models, optimizers, loaders and schedules in any order and changes them in place:
  //   model      moves to device(), in place: whoever holds its parameters holds them there;
  //              with several ranks and a parameter that requires grad: gradients are averaged in
  //              backward, rank 0's parameters become everybody's; calls compute in the
  //              precision and return f32 (output_precision), which a loss made of the results
  //              needs; what the model keeps to itself is not converted. precision_policy pure
  //              stores its parameters in 16 bits from here on
  //   optimizer  step() and zero_grad() act at the boundary of the models whose parameters it has;
  //              one that has stepped, alike on all ranks, keeps of its state what the ranks keep
  //              of the parameters;
  //              its f32 masters of 16-bit parameters begin with the values before prepare()
  //   loader     reads this rank's share; its batches come on device()
  //   schedule   steps where its own optimizer has
  // Preparing an object again changes nothing; nullptr is ignored. Collective if there are models
  // or loaders. Throws what replicate(), LoaderPlan::prepare() and precision::apply() throw:
  // ConfigError for a model that has another policy than mixed_precision asks for, and for one that
  // was sharded before.
  template <class... Objects>
  void prepare(Objects&... objects) {
    accelerate::Preparation preparation;
    (preparation.add(objects), ...);
    run(preparation);
  }

  // The optimizer and the schedule that the sections "optimizer" and "scheduler" of
  // deepspeed_config_file describe, to be prepared with the model; deepspeed.h lists errors. With
  // such a section prepare() takes no optimizer, or no schedule, that was made otherwise:
  // ConfigError.
  std::unique_ptr<optim::Optimizer> optimizer_from_config(
      const nn::ModuleBase& model, const accelerate::ConfiguredOptimizerOptions& options = {});
  std::unique_ptr<optim::Optimizer> optimizer_from_config(
      const std::vector<accelerate::ConfiguredGroup>& groups,
      const accelerate::ConfiguredOptimizerOptions& options = {});
  std::unique_ptr<optim::Schedule> schedule_from_config(
      optim::Optimizer& optimizer, const accelerate::ConfiguredScheduleOptions& options = {});

  // ---- The loop

  // Opens the next micro-batch of the models' windows, until the result is destroyed. `ends_window`
  // makes it the last of its window. ValueError for a model that was not prepared. UnsupportedError
  // in the capture of a graph that is not graphed_step()'s, as from backward(), recorded calls of
  // prepared models and steps of prepared optimizers.
  struct AccumulateOptions {
    bool ends_window = false;
  };
  template <std::derived_from<nn::ModuleBase>... Models>
  MicroBatch accumulate(Models&... models) {
    nn::ModuleBase* const list[] = {&models...};
    return open(list, AccumulateOptions());
  }
  MicroBatch accumulate(std::initializer_list<nn::ModuleBase*> models,
                        const AccumulateOptions& options) {
    return open({models.begin(), models.size()}, options);
  }
  // Sets the steps of all models, or of one, from the next window on. ValueError below 1;
  // ConfigError if a DeepSpeed file has another number, or batch sizes that do not multiply with
  // it.
  void set_gradient_accumulation_steps(int64_t steps);
  void set_gradient_accumulation_steps(nn::ModuleBase& model, int64_t steps);
  int64_t gradient_accumulation_steps() const;
  // Whether the latest micro-batch is its window's last; true before the first.
  bool sync_gradients() const;

  using BackwardOptions = accelerate::BackwardOptions;
  // Adds the gradient of a loss of one element to the window; see [Note: weight]. Outside of
  // accumulate() each backward is a window; under no_sync() backwards then add up undivided.
  // Collective if gradients are reduced. ValueError for a second backward of one micro-batch with
  // another weight, and for any weight with LossWeighting::kHuggingFace.
  void backward(const Tensor& loss, const BackwardOptions& options = {},
                const SourceLocation& where = SourceLocation::current());

  // In the scope backwards only accumulate on this rank; forward and backward must both be in it. A
  // backward outside of the scope of a forward inside is not reduced either, unless it runs in a
  // scope of trigger_sync_in_backward().
  AcceleratorScope no_sync(nn::ModuleBase& model);
  AcceleratorScope trigger_sync_in_backward(nn::ModuleBase& model);
  // At the boundary, clips the reduced, unscaled gradients of any subset of parameters and returns
  // their norm before clipping, f64, one element. If they are all the gradients of one or several
  // prepared optimizers, the next step of each applies the factor as it reads them, so the
  // gradients keep their values until then, no pass over them is needed, and on a GPU the host
  // waits only when it reads the norm. Off the boundary nothing is clipped and the norm is that of
  // the last boundary (NaN before the first, and if no prepared model has the first parameter), so
  // that a program may log it in every micro-batch.
  Tensor clip_grad_norm(const TensorList& parameters, double max_norm, double norm_type = 2);
  void clip_grad_value(const TensorList& parameters, double limit);
  template <std::same_as<NamedTensors> Named>
  Tensor clip_grad_norm(const Named& parameters, double max_norm, double norm_type = 2) {
    return clip_grad_norm(tensors_of(parameters), max_norm, norm_type);
  }
  template <std::same_as<NamedTensors> Named>
  void clip_grad_value(const Named& parameters, double limit) {
    clip_grad_value(tensors_of(parameters), limit);
  }

  // Ops in the scope compute under mixed_precision as calls of prepared models do, for computations
  // outside of them. Without `enabled`: in the dtypes of their arguments.
  AcceleratorScope autocast(bool enabled = true) const;

  // fp16: the factor of losses, and of gradients until the step; 1 otherwise. Steps whose gradients
  // overflowed are skipped and lower it (precision/grad_scaler.h).
  double loss_scale() const;

  // Whether any prepared optimizer, or this one, skipped its last step at a boundary (an overflow,
  // a window without weight). UnsupportedError if the loss scale stays on a GPU
  // (LossScaleOptions::on_device): the host does not learn of it, and schedules count such steps.
  bool optimizer_step_was_skipped() const;
  bool optimizer_step_was_skipped(const optim::Optimizer& optimizer) const;

  // Runs the body, in which ranks may have different numbers of batches of the model: a rank that
  // ends it answers the others' reductions with zeros until all are done
  // (distributed/data_parallel/join.h). Meanwhile prepared loaders return every sample once, unless
  // even_batches is set; their setting is restored however the body ends. An exception leaves at
  // once. ValueError if a rank's number of batches does not fill its windows. Collective.
  using JoinUnevenOptions = accelerate::JoinUnevenOptions;
  void join_uneven_inputs(nn::ModuleBase& model, const std::function<void()>& body,
                          const JoinUnevenOptions& options = {},
                          const SourceLocation& where = SourceLocation::current());

  // Runs the body of the loop as CUDA graphs if the device is a GPU: accelerate/graphed_step.h. The
  // Accelerator must outlive the steps. ValueError for an empty function or invalid options,
  // UnsupportedError with several ranks unless the mode is ddp.
  accelerate::GraphedStep graphed_step(accelerate::GraphedStep::Function function,
                                       const accelerate::GraphedStepOptions& options = {});

  // The loop over micro-batches by pipeline stages, or as it is where pp_size is 1:
  // accelerate/pipeline.h. Prepares the model if it is not yet; then options.cuts is the place to
  // say where stages begin (ConfigError for others than prepare() took). Collective in that case.
  accelerate::Pipeline pipeline(nn::ModuleBase& model,
                                const accelerate::PipelineOptions& options = {});

  // ---- Random numbers

  // Seeds this Context and the streams of prepared models. device_specific: each data-parallel
  // rank gets its own seed; ranks along tp and pp, which calculate its micro-batches, share it.
  // deterministic: gradients of attention on a GPU, which otherwise differ in bits between runs, are
  // reproducible in this Context from here on, and slower; false changes nothing.
  void set_seed(uint64_t seed, bool device_specific = false, bool deterministic = false);
  // Sends rank 0's seed and position to all ranks. Collective.
  void synchronize_rng_states(const SourceLocation& where = SourceLocation::current());

  // ---- Tracking: accelerate/tracking/tracker.h, with the settings log_with and logging_dir (else
  // project_dir). Calls are the same on all ranks; the main one writes.

  // For your own trackers, before init_trackers(); the calls below are short forms.
  Trackers& trackers();
  void init_trackers(const std::string& project, const TrackedValues& configuration = {}) {
    trackers().start(project, configuration);
  }
  // If prepared models have fp8 layers, adds their counts: accelerate/tracking/fp8_values.h.
  void log(const TrackedValues& values, int64_t step);
  Tracker& get_tracker(std::string_view name) { return trackers().get(name); }
  // Finishes the trackers and waits for all ranks. Collective.
  void end_training(const SourceLocation& where = SourceLocation::current());

  // ---- Looking

  // The loader that is being read, the innermost of nested loops; null outside.
  data::LoaderBase* active_loader() const;
  bool end_of_dataloader() const;  // whether its current batch is the last
  // Returns the loader itself, whose next loop skips its first batches, for a program that counts
  // its steps itself. After load_state() there is nothing to skip, and skipping is a ConfigError.
  //
  //     for (auto& batch : accelerator.skip_first_batches(loader, 100)) ...
  template <class Loader>
  Loader& skip_first_batches(Loader& loader, int64_t batches) {
    loader.skip_batches(batches);
    return loader;
  }
  // For the rows of the current batch, f32 [rows]: 1 for rows that count, 0 for copies that fill
  // the batch up (even_batches). backward() weights the batch by the rows that count, but a plain
  // mean over all rows includes the copies; this one does not:
  //     (losses * accelerator.row_mask()).sum() / std::max<int64_t>(1, loader.batch_samples())
  // ValueError if no loader is being read.
  Tensor row_mask() const;
  accelerate::LoaderPlan& loader_plan();

  // ---- Values of all ranks: accelerate/process/operations.h and metrics.h among data_ranks().
  // With the setting `debug` the ranks compare their shapes first.
  template <class T>
  T gather(T value, const SourceLocation& where = SourceLocation::current()) const {
    return accelerate::gather(std::move(value), data_ranks(), operation(where));
  }
  // Gathers what was computed from the current batch of active_loader(), each sample once; see
  // metrics.h.
  template <class T>
  T gather_for_metrics(T value, const SourceLocation& where = SourceLocation::current()) const {
    return accelerate::gather_for_metrics(std::move(value), active_loader(), data_ranks(),
                                          operation(where));
  }
  template <class T>
  T reduce(T value, accelerate::RankReduction reduction = accelerate::RankReduction::kMean,
           const SourceLocation& where = SourceLocation::current()) const {
    return accelerate::reduce(std::move(value), reduction, data_ranks(), operation(where));
  }
  template <class T>
  T broadcast(T value, int from = 0,
              const SourceLocation& where = SourceLocation::current()) const {
    return accelerate::broadcast(std::move(value), from, data_ranks(), operation(where));
  }
  template <class T>
  T pad_across_processes(T value, const accelerate::PadOptions& pad = {},
                         const SourceLocation& where = SourceLocation::current()) const {
    return accelerate::pad_across_processes(std::move(value), pad, data_ranks(), operation(where));
  }
  template <class T>
  std::vector<T> gather_object(const std::vector<T>& own,
                               const SourceLocation& where = SourceLocation::current()) const {
    return accelerate::gather_object(own, data_ranks(), operation(where));
  }
  template <class T>
  T broadcast_object(const T& object, int from = 0,
                     const SourceLocation& where = SourceLocation::current()) const {
    return accelerate::broadcast_object(object, from, data_ranks(), operation(where));
  }
  // The ranks that share the batches: "dp" of the mesh that the settings make.
  distributed::Group& data_ranks() const;

  // How the ranks train together: "ddp", "zero1", ... "fsdp"; "no" for one rank.
  std::string distributed_type() const;
  // The configuration: ranks, settings with their origin, models, loaders.
  std::string describe() const;
  const accelerate::Settings& settings() const;
  std::vector<nn::ModuleBase*> models() const;
  std::vector<optim::Optimizer*> optimizers() const;
  std::vector<optim::Schedule*> schedules() const;
  std::vector<optim::PlateauSchedule*> plateau_schedules() const;
  std::vector<data::LoaderBase*> loaders() const;

  // ---- State: accelerate/state/state_io.h with all prepared objects, in the order of preparation

  // Both save and load all prepared objects. ValueError within a window, between a backward and its
  // step (or zero_grad()), and if a prepared model, optimizer or schedule was destroyed, since the
  // checkpoint would lack it. Collective.
  std::string save_state(const std::string& folder = {},
                         const accelerate::SaveStateOptions& options = {},
                         const SourceLocation& where = SourceLocation::current());
  accelerate::LoadedState load_state(const std::string& folder = {},
                                     const accelerate::LoadStateOptions& options = {},
                                     const SourceLocation& where = SourceLocation::current());
  // With automatic_checkpoint_naming, the checkpoint with the best save_state(..., {.metric =
  // ...}): the least, with the setting larger_is_better the largest. Nothing if none has a metric.
  // Collective.
  std::optional<std::string> best_checkpoint() { return state_io().best_checkpoint(); }
  // For more objects, hooks, and the end of an asynchronous save. Made at the first use.
  accelerate::StateIo& state_io();
  template <class... T>
  void register_for_checkpointing(T&&... objects) {
    state_io().register_for_checkpointing(std::forward<T>(objects)...);
  }
  // Saves the model alone, in HuggingFace's files (accelerate/state/model_io.h). Collective.
  SavedModel save_model(const nn::ModuleBase& model, const std::string& folder,
                        const SaveModelOptions& options = {},
                        const SourceLocation& where = SourceLocation::current()) const;
  // Loads such files, or a checkpoint's model, into a model, prepared or not. With
  // fsdp_cpu_ram_efficient_loading only rank 0 reads them, and the call is collective.
  nn::LoadReport load_model(nn::ModuleBase& model, const std::string& path,
                            accelerate::LoadModelOptions options = {},
                            const SourceLocation& where = SourceLocation::current()) const;
  // Saves the model's adapters (nn/lora/lora.h) in PEFT's files, or its weights with them merged,
  // whatever the sharding. Collective.
  void save_lora(nn::ModuleBase& model, const std::string& folder,
                 const SourceLocation& where = SourceLocation::current()) const;
  SavedModel save_merged_lora(nn::ModuleBase& model, const std::string& folder,
                              const SaveModelOptions& options = {},
                              const SourceLocation& where = SourceLocation::current()) const;
  // The model's tensors by name, on every rank; they share memory with the model. If the model's
  // parameters are sharded: whole tensors on the CPU of rank 0, gathered one by one, and none on
  // other ranks; collective then.
  StateDict get_state_dict(const nn::ModuleBase& model) const;

  // Reads and writes the whole f32 parameters, gradients and optimizer states of a prepared model
  // by name, one at a time, whatever the sharding: full_values.h. ValueError for a model that was
  // not prepared.
  accelerate::FullValues full_values(nn::ModuleBase& model);

  // Releases all prepared objects, destroyed ones included: they train alone again, and counters
  // restart. Then destroys the given objects in this order: owning pointers and optionals are
  // reset, other pointers become null.
  template <class... Objects>
  void free_memory(Objects&... objects) {
    let_go();
    (reset(objects), ...);
  }

 private:
  friend class MicroBatch;
  friend class LocalSGD;
  friend class accelerate::GraphedStep;
  friend class accelerate::Pipeline;
  struct State;
  // In the scope the model's windows end on this rank alone: its gradients are the weighted mean of
  // its own micro-batches. For algorithms that synchronize ranks in another way.
  AcceleratorScope without_reduction(nn::ModuleBase& model);
  Accelerator(accelerate::Settings settings, std::shared_ptr<State> state);
  template <class T>
  static void reset(T& object) {
    if constexpr (requires { object.reset(), *object; }) {
      object.reset();
    } else if constexpr (std::is_pointer_v<T>) {
      object = nullptr;
    }
  }
  void let_go();
  accelerate::OperationOptions operation(const SourceLocation& where) const {
    return {.debug = settings().debug, .where = where};
  }
  void run(const accelerate::Preparation& preparation);
  void note_short_window(ModelRecord& record);
  MicroBatch open(std::span<nn::ModuleBase* const> models, const AccumulateOptions& options);

  std::shared_ptr<State> state_;
};

}  // namespace tessera
