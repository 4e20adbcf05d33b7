// One plain training loop for every set-up: processes, accumulation and precision are
// configuration.
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
// rank, learning rates are used as given, schedules count optimizer updates. What can be set is
// AcceleratorOptions of settings/settings.h.
//
// [Note: window] The micro-batches between two optimizer steps of a model are its window. Within
// it step(), zero_grad(), clip_* and a schedule's step() do nothing until the last one (the
// boundary); the end of the loader ends the window early. A loop over a prepared loader that is left
// by break or an exception ends it without a step: its gradients go, and the next micro-batch
// begins another. Each model has its own window, so models
// that are trained in turn may accumulate at different cadences; accumulate(a, b) opens a
// micro-batch of both.
//
// [Note: weight] After the boundary's backward `.grad` is the gradient of the weighted mean over
// all micro-batches of the window on all ranks: sum of weight * gradient / sum of weights, also
// where the window is short, batches differ in size or ranks have unequal numbers of tokens. A
// weight is what its loss is a mean over: samples (the default) or tokens. Losses are multiplied
// by weight / nominal, so that a factor of 1 is left where batches are equal, and the sum is
// divided once. Within the window `.grad` is this rank's sum so far. Losses that lead to no model
// of the window, nor to one that ranks share, are not multiplied. LossWeighting::kHuggingFace
// divides as Accelerate does instead: every loss by gradient_accumulation_steps, their sum by the
// ranks.
//
// [Note: adding up] Gradients that nobody cleared stay, and what comes is added to them, on one
// rank as on many: a program that divides its losses by hand, steps at every k-th batch and opens
// no micro-batches is right. Where a window has one backward its ranks first agree on their
// weights; where it has several micro-batches, what was there before is kept apart until the
// boundary (a copy) and `.grad` has the window alone.
//
// Bits: f32, deterministic reductions, one thread and equal micro-batches: N ranks are bit-equal to
// one process that accumulates N times as many micro-batches, dropout included: random numbers of
// prepared models are a function of (seed, global micro-batch, order of calls). With several
// micro-batches a rank that holds for zero2, zero3 and fsdp; ddp and zero1, equal to each other, add
// up a rank's own first (docs/sharding.md).
//
// Nothing is global. Several Accelerators live side by side, each with the bits that it has alone.
// An Accelerator belongs to the Context in which it was made, and is used from its thread. Prepared
// objects may die before or after it: it forgets those that died, and a prepared model trains alone
// again once the Accelerator is gone; but a sharded one stays in parts, and is one Accelerator's
// for good. A checkpoint needs all that was prepared (save_state). An object that another
// Accelerator prepares is that one's from then on.
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
  // What the loss is a mean over: samples or tokens of this micro-batch. Default: the samples of
  // the batch in hand of the prepared loader that is being read; 1 where none is. Not negative. In
  // units of its own choice, the same within a window.
  std::optional<double> weight = {};
  bool retain_graph = false;
  bool create_graph = false;
  // Another backward of this micro-batch follows (a second loss, a second model's): nothing is
  // divided before that one, nor reduced where ranks keep whole gradients. Without it every
  // backward of the window's last micro-batch reduces and divides, which is a mean that the next
  // one takes up again: as right, but not to the last bit of one process, and it travels once more.
  // The last one reduces what any of them gave. ValueError outside of accumulate().
  bool more = false;
};

struct JoinUnevenOptions {
  bool even_batches = false;
  bool throw_on_early_end = false;
};

}  // namespace accelerate

class Accelerator;
struct ModelRecord;

// A micro-batch that is open; accumulate() makes it.
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

// Undoes what it stands for when it goes: no_sync().
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

  // Where this rank computes: the GPU with its number on the node, or the CPU where there is none
  // or the setting `cpu` asks for it; the setting `device` names one. prepare() brings models and
  // batches there; tensors of the program's own go by x.to(accelerator.device()). DeviceError where
  // a GPU is asked for and not there, or the node has fewer than ranks. See
  // accelerate/process/rank_device.h.
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
  // Preparing an object again changes nothing; nullptr is passed over. Collective where there are
  // models or loaders. Throws what replicate(), LoaderPlan::prepare() and precision::apply() throw:
  // a model that has a policy of its own and gets another by mixed_precision is a ConfigError, and
  // so is one that was sharded before.
  template <class... Objects>
  void prepare(Objects&... objects) {
    accelerate::Preparation preparation;
    (preparation.add(objects), ...);
    run(preparation);
  }

  // What the sections "optimizer" and "scheduler" of deepspeed_config_file describe, to be prepared
  // beside the model: see deepspeed.h, which has their errors. Where there is such a section
  // prepare() takes no optimizer, or no schedule, that was made otherwise: ConfigError.
  std::unique_ptr<optim::Optimizer> optimizer_from_config(
      const nn::ModuleBase& model, const accelerate::ConfiguredOptimizerOptions& options = {});
  std::unique_ptr<optim::Optimizer> optimizer_from_config(
      const std::vector<accelerate::ConfiguredGroup>& groups,
      const accelerate::ConfiguredOptimizerOptions& options = {});
  std::unique_ptr<optim::Schedule> schedule_from_config(
      optim::Optimizer& optimizer, const accelerate::ConfiguredScheduleOptions& options = {});

  // ---- The loop

  // Opens the next micro-batch of the models' windows, until the result goes. ValueError for a
  // model that was not prepared. `ends_window` makes it the last of its window. UnsupportedError in
  // the capture of a graph that is not graphed_step()'s, as from backward(), recorded calls of
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
  // Of all models, or of one from its next window on. ValueError below 1; ConfigError where a
  // DeepSpeed file says another number, or sizes of batches that do not multiply with it.
  void set_gradient_accumulation_steps(int64_t steps);
  void set_gradient_accumulation_steps(nn::ModuleBase& model, int64_t steps);
  int64_t gradient_accumulation_steps() const;
  // Whether the micro-batch that was opened last is its window's last; true before the first.
  bool sync_gradients() const;

  using BackwardOptions = accelerate::BackwardOptions;
  // Adds the gradient of a loss of one element to the window; see [Note: weight]. Outside of
  // accumulate() a backward is a window of its own; under no_sync() backwards then add up
  // undivided. Collective where gradients are reduced. ValueError for a second backward of one
  // micro-batch with another weight, and for any weight with LossWeighting::kHuggingFace.
  void backward(const Tensor& loss, const BackwardOptions& options = {},
                const SourceLocation& where = SourceLocation::current());

  // Backwards in the scope add up on this rank; forward and backward both belong in it. What ran
  // forward in it is not reduced by its backward outside either, unless that runs in a scope of
  // trigger_sync_in_backward().
  AcceleratorScope no_sync(nn::ModuleBase& model);
  AcceleratorScope trigger_sync_in_backward(nn::ModuleBase& model);
  // At the boundary: clips and returns the norm before, f64, one element: of the true, reduced
  // gradients of any subset of parameters. Where they are all that one prepared optimizer or
  // several have gradients of, the next step of each applies the factor as it reads them: no pass
  // over the gradients, which keep their values until then, and on a GPU the host waits for nothing
  // but a norm that it reads. Off the boundary nothing is clipped, and the norm is that of the last
  // boundary (NaN before the first, and where no prepared model has the first parameter), so that a
  // program may log it in every micro-batch.
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

  // Ops in the scope compute as calls of prepared models do under mixed_precision, for what a
  // program computes outside of them; not `enabled`: in the dtypes of their arguments.
  AcceleratorScope autocast(bool enabled = true) const;

  // fp16: what losses, and so gradients until the step, are multiplied by; 1 otherwise. Steps whose
  // gradients overflowed are left out and lower it (precision/grad_scaler.h).
  double loss_scale() const;

  // Whether any prepared optimizer, or this one, left its last step out at a boundary (an overflow,
  // a window without weight). UnsupportedError where the loss scale stays on a GPU
  // (LossScaleOptions::on_device): the host does not hear of it, and schedules count such steps.
  bool optimizer_step_was_skipped() const;
  bool optimizer_step_was_skipped(const optim::Optimizer& optimizer) const;

  // Runs the body, in which ranks may have different numbers of batches of the model: at its end a
  // rank answers the others' reductions with zeros until all are done
  // (distributed/data_parallel/join.h). Prepared loaders hand out everything once meanwhile, unless
  // even_batches says otherwise; their setting comes back however the body ends. An exception
  // leaves at once. Every rank's number of batches must fill its windows: ValueError. Collective.
  using JoinUnevenOptions = accelerate::JoinUnevenOptions;
  void join_uneven_inputs(nn::ModuleBase& model, const std::function<void()>& body,
                          const JoinUnevenOptions& options = {},
                          const SourceLocation& where = SourceLocation::current());

  // The body of the loop as CUDA graphs where the device is a GPU: accelerate/graphed_step.h. The
  // Accelerator must outlive the steps. ValueError for an empty function or options that cannot
  // work, UnsupportedError with several ranks unless the mode is ddp.
  accelerate::GraphedStep graphed_step(accelerate::GraphedStep::Function function,
                                       const accelerate::GraphedStepOptions& options = {});

  // ---- Random numbers

  // Seeds this Context and the streams of prepared models. device_specific: every rank gets a seed
  // of its own, mixed from seed and rank. deterministic: what has other bits in each run by itself,
  // gradients of attention on a GPU, has the same ones in this Context from here on, and is slower;
  // false leaves it as it is.
  void set_seed(uint64_t seed, bool device_specific = false, bool deterministic = false);
  // Rank 0's seed and position become everybody's. Collective.
  void synchronize_rng_states(const SourceLocation& where = SourceLocation::current());

  // ---- Tracking: accelerate/tracking/tracker.h, with the settings log_with and logging_dir (else
  // project_dir). Calls are the same on all ranks; the main one writes.

  // For trackers of one's own, before init_trackers(), and for what stands below in short.
  Trackers& trackers();
  void init_trackers(const std::string& project, const TrackedValues& configuration = {}) {
    trackers().start(project, configuration);
  }
  // Of prepared models in fp8 their counts stand beside the values:
  // accelerate/tracking/fp8_values.h.
  void log(const TrackedValues& values, int64_t step);
  Tracker& get_tracker(std::string_view name) { return trackers().get(name); }
  // Finishes the trackers and waits for all ranks. Collective.
  void end_training(const SourceLocation& where = SourceLocation::current());

  // ---- Looking

  // The loader that is being read: the innermost of nested loops; null outside.
  data::LoaderBase* active_loader() const;
  bool end_of_dataloader() const;  // its batch in hand is the last
  // The loader itself, whose next loop leaves out its first batches: for a program that counts its
  // steps itself. After load_state() there is nothing to skip, and skipping is a ConfigError.
  //
  //     for (auto& batch : accelerator.skip_first_batches(loader, 100)) ...
  template <class Loader>
  Loader& skip_first_batches(Loader& loader, int64_t batches) {
    loader.skip_batches(batches);
    return loader;
  }
  // Of its batch in hand, f32 [rows]: 1 for rows that count, 0 for copies that fill the batch up
  // (even_batches). backward() weighs the batch by the rows that count, but a plain mean over all
  // rows has the copies in it; this one has not:
  //     (losses * accelerator.row_mask()).sum() / std::max<int64_t>(1, loader.batch_samples())
  // ValueError where no loader is being read.
  Tensor row_mask() const;
  accelerate::LoaderPlan& loader_plan();

  // ---- Values of all ranks: accelerate/process/operations.h and metrics.h among data_ranks().
  // With the setting `debug` the ranks compare their shapes first.
  template <class T>
  T gather(T value, const SourceLocation& where = SourceLocation::current()) const {
    return accelerate::gather(std::move(value), data_ranks(), operation(where));
  }
  // What was computed from the batch in hand of active_loader(), each sample once; see metrics.h.
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
  // The ranks among which batches are dealt: "dp" of the mesh that the settings make.
  distributed::Group& data_ranks() const;

  // How the ranks train together: "ddp", "zero1", ... "fsdp"; "no" where there is one.
  std::string distributed_type() const;
  // What is set up: ranks, settings with their origin, models, loaders.
  std::string describe() const;
  const accelerate::Settings& settings() const;
  std::vector<nn::ModuleBase*> models() const;
  std::vector<optim::Optimizer*> optimizers() const;
  std::vector<optim::Schedule*> schedules() const;
  std::vector<optim::PlateauSchedule*> plateau_schedules() const;
  std::vector<data::LoaderBase*> loaders() const;

  // ---- State: accelerate/state/state_io.h with all prepared objects, in the order of preparation

  // Between windows: ValueError while one is open, between a backward and the step (or zero_grad())
  // that its gradients are for, and where a model, an optimizer or a schedule
  // died since it was prepared: a checkpoint would silently be without it. Collective.
  std::string save_state(const std::string& folder = {},
                         const accelerate::SaveStateOptions& options = {},
                         const SourceLocation& where = SourceLocation::current());
  accelerate::LoadedState load_state(const std::string& folder = {},
                                     const accelerate::LoadStateOptions& options = {},
                                     const SourceLocation& where = SourceLocation::current());
  // Of automatic_checkpoint_naming the checkpoint with the best save_state(..., {.metric = ...}): the
  // least, with the setting larger_is_better the largest. Nothing where none has a metric.
  // Collective.
  std::optional<std::string> best_checkpoint() { return state_io().best_checkpoint(); }
  // More objects, hooks, and an asynchronous save's end. Made at the first use.
  accelerate::StateIo& state_io();
  template <class... T>
  void register_for_checkpointing(T&&... objects) {
    state_io().register_for_checkpointing(std::forward<T>(objects)...);
  }
  // The model alone, in the files of HuggingFace (accelerate/state/model_io.h). Collective.
  SavedModel save_model(const nn::ModuleBase& model, const std::string& folder,
                        const SaveModelOptions& options = {},
                        const SourceLocation& where = SourceLocation::current()) const;
  // Such files, or a checkpoint's model, into a model, prepared or not. With fsdp_cpu_ram_efficient_loading rank 0 alone
  // reads them; collective then.
  nn::LoadReport load_model(nn::ModuleBase& model, const std::string& path,
                            accelerate::LoadModelOptions options = {},
                            const SourceLocation& where = SourceLocation::current()) const;
  // Its adapters (nn/lora/lora.h) in PEFT's files, and its weights with them merged, from whatever
  // parts the ranks hold. Collective.
  void save_lora(nn::ModuleBase& model, const std::string& folder,
                 const SourceLocation& where = SourceLocation::current()) const;
  SavedModel save_merged_lora(nn::ModuleBase& model, const std::string& folder,
                              const SaveModelOptions& options = {},
                              const SourceLocation& where = SourceLocation::current()) const;
  // Its tensors by name, on every rank; they share elements with the model. Of a model whose
  // parameters are parts: whole tensors on the CPU of rank 0 and none elsewhere, gathered one by
  // one; collective then.
  StateDict get_state_dict(const nn::ModuleBase& model) const;

  // The whole f32 parameters, gradients and optimizer states of a prepared model, one at a time,
  // read and written by name, whatever each rank holds of them: full_values.h. ValueError for a
  // model that was not prepared.
  accelerate::FullValues full_values(nn::ModuleBase& model);

  // Lets go of all prepared objects, those that died included: they train alone again. Counters
  // begin anew. Then the objects given here go, in this order: pointers that own and optionals are
  // reset, others become null.
  template <class... Objects>
  void free_memory(Objects&... objects) {
    let_go();
    (reset(objects), ...);
  }

 private:
  friend class MicroBatch;
  friend class LocalSGD;
  friend class accelerate::GraphedStep;
  struct State;
  // Windows of the model end on this rank alone in the scope: its gradients are the weighted mean
  // of its own micro-batches. For algorithms that bring the ranks together otherwise.
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
