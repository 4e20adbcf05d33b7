// Every setting of a training: the options of a program, and the resolved values.
//
//     Accelerator accelerator({.mixed_precision = Precision::kBF16});
//     accelerator.settings().mixed_precision.value;              // Precision::kBF16
//     accelerator.settings().mixed_precision.origin.describe();  // "code"
//
// A setting is a value with its default in Settings, a row in schema/ that points to it, and the
// place that uses it. A setting that a program may give also has an option in AcceleratorOptions,
// to which the row points too. config.h finds the values.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/distributed/pipeline/schedule.h>
#include <tessera/precision/fp8_recipe.h>

// ---- Words

namespace tessera {

// The precision in which prepared models compute.
enum class Precision : uint8_t {
  kNo,  // the model's own
  kBF16,
  kFP16,  // f16 with loss scaling
  kFP8,   // bf16, and linear layers in fp8 by a recipe (precision/fp8_recipe.h)
};

// How that precision is applied (precision/policy.h).
enum class PrecisionPolicy : uint8_t {
  kAutocast,  // f32 parameters, each op casts by its record
  kBoundary,  // f32 parameters, cast with the inputs where the model is entered
  kPure,      // parameters in 16 bits, their f32 masters in the optimizer, gradients in f32
};

// What one step of a prepared schedule stands for.
enum class ScheduleUnit : uint8_t {
  kUpdates,      // an optimizer update, whatever the number of ranks
  kHuggingFace,  // Accelerate's: each update counts once for every rank, unless batches are split
};

// The weight of a micro-batch in the gradient of its window.
enum class LossWeighting : uint8_t {
  kSamples,  // its samples or tokens: the window's gradient is that of their mean
  // Accelerate's: each is divided by gradient_accumulation_steps, also in a shorter window or
  // batch, and every rank has the same weight.
  kHuggingFace,
};

// The dtype of results of prepared models under mixed precision.
enum class OutputPrecision : uint8_t {
  kF32,       // 16-bit results are converted to f32
  kComputed,  // as they were computed
};

// The lowest level of lines that a Logger writes.
enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError, kOff };

}  // namespace tessera

namespace tessera::accelerate {

enum class CommHook : uint8_t { kNone, kFP16, kBF16, kPowerSgd, kBatchedPowerSgd };
enum class CommWrapper : uint8_t { kNone, kFP16, kBF16 };
enum class StateDictType : uint8_t { kSharded, kFull };
// What ranks shard of a model that they train together.
enum class Sharding : uint8_t {
  kDdp,    // nothing
  kZero1,  // the optimizer states
  kZero2,  // and the gradients
  kZero3,  // and the parameters
  kFsdp,   // the same; the root unit stays unsharded until its backward
};
using precision::AmaxAlgorithm;
using precision::Fp8Filter;
using precision::Fp8Format;
using precision::Fp8Scaling;
enum class TransportChoice : uint8_t { kAuto, kShared, kTcp };

}  // namespace tessera::accelerate

// ---- What the program says

namespace tessera {

using accelerate::CommHook;
using accelerate::CommWrapper;
using accelerate::Sharding;
using accelerate::StateDictType;

// How gradients of ranks are reduced; Accelerate's DistributedDataParallelKwargs. The settings are
// called ddp_bucket_cap_mb and so on.
struct DistributedDataParallelOptions {
  std::optional<double> bucket_cap_mb = {};
  std::optional<double> first_bucket_mb = {};
  std::optional<bool> broadcast_buffers = {};
  std::optional<bool> gradient_as_bucket_view = {};
  std::optional<bool> init_sync = {};
  std::optional<CommHook> comm_hook = {};
  std::optional<CommWrapper> comm_wrapper = {};
  std::optional<int64_t> power_sgd_rank = {};
  std::optional<int64_t> power_sgd_start_step = {};  // torch's start_powerSGD_iter
};

// How a model is divided into units that are gathered together; Accelerate's
// FullyShardedDataParallelPlugin. The settings are called fsdp_reshard_after_forward and so on.
struct FullyShardedDataParallelOptions {
  std::optional<bool> reshard_after_forward = {};
  std::optional<std::vector<std::string>> wrap_modules = {};  // classes; {"none"}: one unit
  std::optional<int64_t> min_num_params = {};
  std::optional<std::string> ignored_modules = {};     // a regular expression of dotted names
  std::optional<bool> activation_checkpointing = {};   // of units, in every mode
  std::optional<bool> cpu_ram_efficient_loading = {};  // only rank 0 reads, or has memory
  std::optional<StateDictType> state_dict_type = {};
};

// The loss scale of fp16; Accelerate's GradScalerKwargs. The settings are called scaler_init_scale
// and so on.
struct LossScaleOptions {
  std::optional<double> init_scale = {};
  std::optional<double> growth_factor = {};
  std::optional<double> backoff_factor = {};
  std::optional<int64_t> growth_interval = {};
  std::optional<bool> enabled = {};
  std::optional<double> min_scale = {};
  std::optional<int64_t> hysteresis = {};
  std::optional<bool> consecutive_hysteresis = {};
  std::optional<bool> on_device = {};
};

// How linear layers run under mixed_precision fp8 (precision/fp8_recipe.h); Accelerate's
// TERecipeKwargs and AORecipeKwargs. The settings are called fp8_recipe, fp8_format and so on.
struct Fp8Options {
  std::optional<precision::Fp8Scaling> recipe = {};
  std::optional<precision::Fp8Filter> filter = {};
  std::optional<std::vector<std::string>> exclude = {};  // dotted names, or ends of them
  std::optional<bool> strict = {};
  std::optional<bool> in_evaluation = {};    // use_autocast_during_eval
  std::optional<bool> weight_gradient = {};  // false: override_linear_precision's third
  std::optional<precision::Fp8Format> format = {};
  std::optional<int64_t> margin = {};  // this and the next two are for delayed scales
  std::optional<int64_t> amax_history_len = {};
  std::optional<precision::AmaxAlgorithm> amax_compute_algo = {};
};

// Pipeline parallelism: docs/pipeline.md. Settings pp_size, pp_schedule...
struct PipelineParallelOptions {
  std::optional<int64_t> size = {};  // ranks among which stages are dealt
  std::optional<distributed::PipelineSchedule> schedule = {};
  std::optional<int64_t> stages_per_rank = {};
  std::optional<std::vector<std::string>> cuts = {};  // modules with which stages 1, 2... begin
};

// The settings of the program itself. All others come from the flags of `tessera launch`, the
// environment, the configuration file and the defaults, in this order:
// accelerate/settings/config.h, whose settings have these names, and docs/configuration.md, which
// lists them.
struct AcceleratorOptions {
  std::optional<Precision> mixed_precision = {};
  std::optional<PrecisionPolicy> precision_policy = {};
  std::optional<OutputPrecision> output_precision = {};
  std::optional<int64_t> gradient_accumulation_steps = {};  // micro-batches of a window
  // Prepared optimizers clip to this norm themselves; 0: the program clips.
  std::optional<double> gradient_clipping = {};
  std::optional<bool> allow_tf32 = {};  // f32 on a GPU at the speed of 16 bits, in this Context
  // graphed_step() captures; accelerate/graphed_step.h.
  std::optional<bool> cuda_graphs = {};
  std::optional<LossWeighting> loss_weighting = {};
  std::optional<bool> sync_with_dataloader = {};          // a loader's end ends the window
  std::optional<bool> sync_each_batch = {};               // reduce in every micro-batch
  std::optional<bool> step_schedule_with_optimizer = {};  // only if the optimizer has stepped
  std::optional<ScheduleUnit> schedule_unit = {};
  std::optional<bool> split_batches = {};     // batch_size is the sum over all ranks
  std::optional<bool> even_batches = {};      // an epoch's last batches are filled up
  std::optional<bool> dispatch_batches = {};  // rank 0 reads for all
  std::optional<int64_t> seed = {};           // as set_seed()
  std::optional<int64_t> data_seed = {};      // of loaders that shuffle
  std::optional<bool> cpu = {};               // device() is the CPU
  std::optional<std::string> device =
      {};                          // "cpu", "cuda", "cuda:1"; accelerate/process/rank_device.h
  std::optional<bool> debug = {};  // operations compare the shapes of all ranks first
  std::optional<LogLevel> log_level = {};

  std::optional<std::string> project_dir = {};
  std::optional<std::string> logging_dir = {};
  std::optional<std::vector<std::string>> log_with = {};  // trackers, or "all"
  std::optional<bool> automatic_checkpoint_naming = {};
  std::optional<int64_t> total_limit = {};
  std::optional<int64_t> keep_every = {};
  std::optional<int64_t> keep_best = {};
  std::optional<bool> larger_is_better = {};
  std::optional<bool> asynchronous_checkpoints = {};

  // What ranks shard: docs/sharding.md.
  std::optional<Sharding> sharding = {};
  std::optional<bool> offload_parameters = {};  // from a GPU to host memory
  std::optional<bool> offload_optimizer = {};   // gradients and states only
  std::optional<int64_t> dp_replicate_size = {}, dp_shard_size = {};
  // Ranks that share each layer, by the model's parallel_styles(): docs/tensor-parallel.md.
  std::optional<int64_t> tp_size = {};
  std::optional<bool> tp_sequence = {};  // between layers each has its tokens
  // A DeepSpeed configuration, as a JSON file or the object itself: docs/deepspeed.md. Accelerate's
  // DeepSpeedPlugin(hf_ds_config). The setting is called deepspeed_config_file.
  std::optional<std::string> deepspeed_config = {};
  PipelineParallelOptions pp = {};
  FullyShardedDataParallelOptions fsdp = {};
  DistributedDataParallelOptions ddp = {};
  LossScaleOptions loss_scale = {};
  Fp8Options fp8 = {};
  std::optional<double> collective_timeout = {};  // seconds; Accelerate's InitProcessGroupKwargs

  std::optional<std::string> config_file = {};  // "": none
};

}  // namespace tessera

// ---- What came of it

namespace tessera::accelerate {

// The source of a value; later ones have priority.
enum class Source : uint8_t { kDefault, kFile, kAccelerate, kEnvironment, kLaunchFlag, kCode };

struct Origin {
  Source source = Source::kDefault;
  std::string name = {};  // the variable, the flag, the file
  // "default", "file job.json", "TESSERA_SEED", "--seed", "code"
  std::string describe() const;
};

template <class T>
struct Resolved {
  T value{};
  Origin origin = {};
  operator const T&() const { return value; }
};

struct DeepSpeedConfig;  // deepspeed_config.h

// All values, each with its origin. This is the only place of the defaults; rows (schema/) and
// docs/configuration.md give the meaning of each setting.
struct Settings {
  // training
  Resolved<Precision> mixed_precision{Precision::kNo};
  Resolved<PrecisionPolicy> precision_policy{PrecisionPolicy::kAutocast};
  Resolved<OutputPrecision> output_precision{OutputPrecision::kF32};
  Resolved<int64_t> gradient_accumulation_steps{1};
  Resolved<double> gradient_clipping{0};
  Resolved<bool> allow_tf32{false};
  Resolved<bool> cuda_graphs{true};
  Resolved<LossWeighting> loss_weighting{LossWeighting::kSamples};
  Resolved<bool> sync_with_dataloader{true};
  Resolved<bool> sync_each_batch{false};
  Resolved<bool> step_schedule_with_optimizer{true};
  Resolved<ScheduleUnit> schedule_unit{ScheduleUnit::kUpdates};
  Resolved<std::optional<int64_t>> seed;
  Resolved<bool> cpu{false};
  Resolved<std::string> device;
  Resolved<bool> debug{false};
  Resolved<LogLevel> log_level{LogLevel::kWarning};

  // data
  Resolved<bool> split_batches{false};
  Resolved<std::optional<bool>> dispatch_batches;
  Resolved<bool> even_batches{true};
  Resolved<std::optional<int64_t>> data_seed;

  // project
  Resolved<std::string> project_dir{"."};
  Resolved<std::string> logging_dir;
  Resolved<bool> automatic_checkpoint_naming{false};
  Resolved<int64_t> total_limit{0};
  Resolved<int64_t> keep_every{0};
  Resolved<int64_t> keep_best{0};
  Resolved<bool> larger_is_better{false};
  Resolved<bool> asynchronous_checkpoints{false};
  Resolved<std::vector<std::string>> log_with;

  // ddp
  Resolved<double> ddp_bucket_cap_mb{25};
  Resolved<double> ddp_first_bucket_mb{1};
  Resolved<bool> ddp_broadcast_buffers{true};
  Resolved<bool> ddp_gradient_as_bucket_view{true};
  Resolved<bool> ddp_init_sync{true};
  Resolved<CommHook> ddp_comm_hook{CommHook::kNone};
  Resolved<CommWrapper> ddp_comm_wrapper{CommWrapper::kNone};
  Resolved<int64_t> ddp_power_sgd_rank{1};
  Resolved<int64_t> ddp_power_sgd_start_step{1000};

  // grad scaler
  Resolved<double> scaler_init_scale{65536};
  Resolved<double> scaler_growth_factor{2};
  Resolved<double> scaler_backoff_factor{0.5};
  Resolved<int64_t> scaler_growth_interval{2000};
  Resolved<double> scaler_min_scale{0x1p-32};
  Resolved<int64_t> scaler_hysteresis{1};
  Resolved<bool> scaler_consecutive_hysteresis{false};
  Resolved<bool> scaler_enabled{true};
  Resolved<bool> scaler_on_device{false};

  // parallelism
  Resolved<int64_t> dp_replicate_size{1};
  Resolved<int64_t> dp_shard_size{1};
  Resolved<int64_t> tp_size{1};
  Resolved<bool> tp_sequence{true};
  Resolved<int64_t> cp_size{1};
  Resolved<int64_t> sp_size{1};
  Resolved<int64_t> pp_size{1};
  Resolved<distributed::PipelineSchedule> pp_schedule{distributed::PipelineSchedule::kOneFOneB};
  Resolved<int64_t> pp_stages_per_rank{1};
  Resolved<std::vector<std::string>> pp_cuts;

  // sharding
  Resolved<Sharding> sharding{Sharding::kDdp};
  Resolved<int64_t> zero_stage{0};
  Resolved<std::string> deepspeed_config_file;
  Resolved<bool> fsdp_reshard_after_forward{true};
  Resolved<bool> offload_parameters{false};
  Resolved<bool> offload_optimizer{false};
  Resolved<bool> fsdp_activation_checkpointing{false};
  Resolved<bool> fsdp_cpu_ram_efficient_loading{false};
  Resolved<std::vector<std::string>> fsdp_wrap_modules;
  Resolved<int64_t> fsdp_min_num_params{0};
  Resolved<StateDictType> fsdp_state_dict_type{StateDictType::kSharded};
  Resolved<std::string> fsdp_ignored_modules;

  // fp8
  Resolved<Fp8Scaling> fp8_recipe{Fp8Scaling::kTensorwise};
  Resolved<Fp8Filter> fp8_filter{Fp8Filter::kDefault};
  Resolved<std::vector<std::string>> fp8_exclude;
  Resolved<bool> fp8_strict{false};
  Resolved<bool> fp8_in_evaluation{true};
  Resolved<bool> fp8_weight_gradient{true};
  Resolved<Fp8Format> fp8_format{Fp8Format::kHybrid};
  Resolved<int64_t> fp8_margin{0};
  Resolved<int64_t> fp8_amax_history_len{1024};
  Resolved<AmaxAlgorithm> fp8_amax_compute_algo{AmaxAlgorithm::kMostRecent};

  // launch
  Resolved<std::optional<int64_t>> ranks;
  Resolved<std::optional<int64_t>> nodes;
  Resolved<std::string> hostfile;
  Resolved<std::optional<int64_t>> threads;
  Resolved<bool> oversubscribe{false};
  Resolved<int64_t> restarts{0};
  Resolved<std::vector<std::string>> restart_ranks;
  Resolved<double> collective_timeout{600};
  Resolved<std::optional<double>> first_step_timeout;
  Resolved<std::optional<double>> save_timeout;
  Resolved<double> init_timeout{600};
  Resolved<std::optional<double>> job_timeout;
  Resolved<double> start_timeout{60};
  Resolved<double> grace{30};
  Resolved<double> wait_warning{30};
  Resolved<TransportChoice> transport{TransportChoice::kAuto};
  Resolved<std::string> interface;
  Resolved<std::string> store_host;
  Resolved<int64_t> store_port{0};
  Resolved<std::string> dump_dir;
  Resolved<std::string> remote_agent;

  // The contents of deepspeed_config_file, if resolve() has read it: its settings are among those
  // above, its sections of optimizer and scheduler and its batch sizes are not.
  std::shared_ptr<const DeepSpeedConfig> deepspeed;
};

}  // namespace tessera::accelerate
