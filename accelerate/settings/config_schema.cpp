// The table of settings, and their values as text.
#include <algorithm>
#include <charconv>
#include <cmath>

#include <tessera/accelerate/settings/config.h>
#include <tessera/accelerate/settings/edit_distance.h>
#include <tessera/accelerate/settings/letter_case.h>
#include <tessera/core/error.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kSettingsSchema = "settings";
constexpr double kMost = 1e15;

template <auto Member>
Field field(Settings& settings) {
  auto& resolved = settings.*Member;
  if constexpr (std::is_enum_v<std::remove_reference_t<decltype(resolved.value)>>) {
    return EnumField{reinterpret_cast<uint8_t*>(&resolved.value), &resolved.origin};
  } else {
    return &resolved;
  }
}

const std::vector<Setting>& table() {
  using S = Settings;
  static const std::vector<Setting> kTable = {
      {.key = "mixed_precision",
       .section = "training",
       .field = field<&S::mixed_precision>,
       .help =
           "dtype in which prepared models compute; fp16 scales losses, fp8 is bf16 with linear "
           "layers in float8 (fp8_recipe)",
       .names = {"no", "bf16", "fp16", "fp8"},
       .accelerate = {"ACCELERATE_MIXED_PRECISION"}},
      {.key = "precision_policy",
       .section = "training",
       .field = field<&S::precision_policy>,
       .help = "how mixed_precision comes about: each op by its record, inputs and parameters cast "
               "where the model is entered, or parameters stored in 16 bits with f32 masters",
       .names = {"autocast", "boundary", "pure"}},
      {.key = "output_precision",
       .section = "training",
       .field = field<&S::output_precision>,
       .help = "what calls of prepared models return under mixed precision: f32, or as computed",
       .names = {"f32", "computed"}},
      {.key = "gradient_accumulation_steps",
       .section = "training",
       .field = field<&S::gradient_accumulation_steps>,
       .help = "micro-batches of one optimizer step",
       .least = 1,
       .most = 1e9,
       .accelerate = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS"}},
      {.key = "gradient_clipping",
       .section = "training",
       .field = field<&S::gradient_clipping>,
       .help = "norm to which prepared optimizers clip all of their gradients before each step, "
               "and the most that clip_grad_norm() leaves of them; 0: the program clips",
       .least = 0,
       .most = 1e30,
       .accelerate = {"ACCELERATE_GRADIENT_CLIPPING"}},
      {.key = "cuda_graphs",
       .section = "training",
       .field = field<&S::cuda_graphs>,
       .help = "on a GPU graphed_step() captures its function as CUDA graphs; false: it runs as it "
               "is"},
      {.key = "loss_weighting",
       .section = "training",
       .field = field<&S::loss_weighting>,
       .help =
           "what a micro-batch counts for in its window: its samples or tokens, or as Accelerate "
           "one part in gradient_accumulation_steps, also in a shorter window",
       .names = {"samples", "huggingface"}},
      {.key = "sync_with_dataloader",
       .section = "training",
       .field = field<&S::sync_with_dataloader>,
       .help = "the end of a loader ends the accumulation window"},
      {.key = "sync_each_batch",
       .section = "training",
       .field = field<&S::sync_each_batch>,
       .help = "reduce gradients in every micro-batch, not in the window's last alone"},
      {.key = "step_schedule_with_optimizer",
       .section = "training",
       .field = field<&S::step_schedule_with_optimizer>,
       .help = "a prepared schedule steps only where its optimizer has",
       .aliases = {"step_scheduler_with_optimizer"}},
      {.key = "schedule_unit",
       .section = "training",
       .field = field<&S::schedule_unit>,
       .help = "what a schedule counts: optimizer updates, or as Accelerate one for every rank",
       .names = {"updates", "huggingface"}},
      {.key = "seed",
       .section = "training",
       .field = field<&S::seed>,
       .help = "of all random numbers; without it the Context's",
       .least = 0,
       .most = 9e18},
      {.key = "cpu",
       .section = "training",
       .field = field<&S::cpu>,
       .help = "Accelerator::device() is the CPU although there is a GPU, and a prepared model on "
               "another is an error",
       .aliases = {"use_cpu"},
       .accelerate = {"ACCELERATE_USE_CPU"}},
      {.key = "device",
       .section = "training",
       .field = field<&S::device>,
       .help =
           "where prepared models compute and batches come: cpu, cuda (each rank the GPU with "
           "its number on the node; it must be there) or cuda:N; empty: cuda where there is one"},
      {.key = "debug",
       .section = "training",
       .field = field<&S::debug>,
       .help = "operations on nested values compare the shapes of all ranks first, and show them "
               "where they differ",
       .accelerate = {"ACCELERATE_DEBUG_MODE"}},
      {.key = "log_level",
       .section = "training",
       .field = field<&S::log_level>,
       .help = "least weight of the lines that a Logger writes",
       .names = {"debug", "info", "warning", "error", "off"},
       .accelerate = {"ACCELERATE_LOG_LEVEL"}},

      {.key = "split_batches",
       .section = "data",
       .field = field<&S::split_batches>,
       .help = "batch_size is that of all ranks together"},
      {.key = "dispatch_batches",
       .section = "data",
       .field = field<&S::dispatch_batches>,
       .help = "rank 0 reads for all; without it streams are dispatched, indexed data is not"},
      {.key = "even_batches",
       .section = "data",
       .field = field<&S::even_batches>,
       .help = "the tail is filled up, so that all ranks have as many batches"},
      {.key = "data_seed",
       .section = "data",
       .field = field<&S::data_seed>,
       .help = "of prepared loaders that shuffle by themselves; without it each one's own",
       .least = 0,
       .most = 9e18},

      {.key = "project_dir",
       .section = "project",
       .field = field<&S::project_dir>,
       .help = "folder of checkpoints and logs"},
      {.key = "logging_dir",
       .section = "project",
       .field = field<&S::logging_dir>,
       .help = "folder of trackers; without it project_dir"},
      {.key = "automatic_checkpoint_naming",
       .section = "project",
       .field = field<&S::automatic_checkpoint_naming>,
       .help = "save_state() names its folders checkpoints/checkpoint_0, _1, ..."},
      {.key = "total_limit",
       .section = "project",
       .field = field<&S::total_limit>,
       .help = "newest checkpoints that stay; 0: all",
       .least = 0,
       .most = 1e9},
      {.key = "keep_every",
       .section = "project",
       .field = field<&S::keep_every>,
       .help = "besides, checkpoints whose number is a multiple stay; 0: none",
       .least = 0,
       .most = 1e9},
      {.key = "keep_best",
       .section = "project",
       .field = field<&S::keep_best>,
       .help = "besides, so many checkpoints with the best metric stay",
       .least = 0,
       .most = 1e9},
      {.key = "asynchronous_checkpoints",
       .section = "project",
       .field = field<&S::asynchronous_checkpoints>,
       .help = "save_state() returns when the state is copied; a thread writes"},
      {.key = "log_with",
       .section = "project",
       .field = field<&S::log_with>,
       .help = "trackers: jsonl, csv, tensorboard, all, or names that the program registers"},

      {.key = "ddp_bucket_cap_mb",
       .section = "ddp",
       .field = field<&S::ddp_bucket_cap_mb>,
       .help = "MiB of gradients that are reduced together",
       .least = 0.0001,
       .most = 1e6},
      {.key = "ddp_first_bucket_mb",
       .section = "ddp",
       .field = field<&S::ddp_first_bucket_mb>,
       .help = "MiB of the bucket that is reduced first",
       .least = 0.0001,
       .most = 1e6},
      {.key = "ddp_broadcast_buffers",
       .section = "ddp",
       .field = field<&S::ddp_broadcast_buffers>,
       .help = "rank 0's buffers become everybody's in each forward of training"},
      {.key = "ddp_gradient_as_bucket_view",
       .section = "ddp",
       .field = field<&S::ddp_gradient_as_bucket_view>,
       .help = "gradients lie in their buckets: no second copy of them"},
      {.key = "ddp_init_sync",
       .section = "ddp",
       .field = field<&S::ddp_init_sync>,
       .help = "rank 0's parameters become everybody's in prepare()"},
      {.key = "ddp_comm_hook",
       .section = "ddp",
       .field = field<&S::ddp_comm_hook>,
       .help = "how gradients travel: as they are, in 16 bits, or as low-rank factors of each "
               "matrix or of each bucket",
       .names = {"none", "fp16", "bf16", "power_sgd", "batched_power_sgd"}},
      {.key = "ddp_comm_wrapper",
       .section = "ddp",
       .field = field<&S::ddp_comm_wrapper>,
       .help = "16 bits for what power_sgd and batched_power_sgd send",
       .names = {"none", "fp16", "bf16"}},
      {.key = "ddp_power_sgd_rank",
       .section = "ddp",
       .field = field<&S::ddp_power_sgd_rank>,
       .help = "of the factors of power_sgd and batched_power_sgd",
       .least = 1,
       .most = 65536},
      {.key = "ddp_power_sgd_start_step",
       .section = "ddp",
       .field = field<&S::ddp_power_sgd_start_step>,
       .help = "reductions before power_sgd and batched_power_sgd begin",
       .least = 0,
       .most = 1e9},

      {.key = "scaler_init_scale",
       .section = "grad scaler",
       .field = field<&S::scaler_init_scale>,
       .help = "first loss scale of fp16",
       .least = 1e-9,
       .most = 1e30},
      {.key = "scaler_growth_factor",
       .section = "grad scaler",
       .field = field<&S::scaler_growth_factor>,
       .help = "of the scale after growth_interval updates without overflow",
       .least = 1,
       .most = 1e6},
      {.key = "scaler_backoff_factor",
       .section = "grad scaler",
       .field = field<&S::scaler_backoff_factor>,
       .help = "of the scale after an overflow",
       .least = 1e-6,
       .most = 1},
      {.key = "scaler_growth_interval",
       .section = "grad scaler",
       .field = field<&S::scaler_growth_interval>,
       .help = "updates without overflow until the scale grows",
       .least = 1,
       .most = 1e9},
      {.key = "scaler_min_scale",
       .section = "grad scaler",
       .field = field<&S::scaler_min_scale>,
       .help = "a scale below it is an error: such gradients are NaN or infinite by themselves",
       .least = 0,
       .most = 1e30},
      {.key = "scaler_hysteresis",
       .section = "grad scaler",
       .field = field<&S::scaler_hysteresis>,
       .help = "overflows until the scale falls, counted since it grew last; each leaves its step "
               "out",
       .least = 1,
       .most = 1e6},
      {.key = "scaler_consecutive_hysteresis",
       .section = "grad scaler",
       .field = field<&S::scaler_consecutive_hysteresis>,
       .help = "an update without overflow begins that count anew"},
      {.key = "scaler_on_device",
       .section = "grad scaler",
       .field = field<&S::scaler_on_device>,
       .help =
           "on a GPU the host does not wait to hear whether a step was left out: schedules count "
           "it"},
      {.key = "scaler_enabled",
       .section = "grad scaler",
       .field = field<&S::scaler_enabled>,
       .help = "scale losses where mixed_precision is fp16"},

      {.key = "dp_replicate_size",
       .section = "parallelism",
       .field = field<&S::dp_replicate_size>,
       .help = "groups of ranks that hold a whole model each, where parameters are sharded within",
       .least = 1,
       .most = 1e6,
       .aliases = {"parallelism_config_dp_replicate_size"},
       .accelerate = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE"}},
      {.key = "dp_shard_size",
       .section = "parallelism",
       .field = field<&S::dp_shard_size>,
       .help = "ranks of such a group (default: all that dp_replicate_size leaves)",
       .least = 1,
       .most = 1e6,
       .aliases = {"parallelism_config_dp_shard_size"},
       .accelerate = {"PARALLELISM_CONFIG_DP_SHARD_SIZE"}},
      {.key = "tp_size",
       .section = "parallelism",
       .field = field<&S::tp_size>,
       .help = "ranks that share each layer (tensor parallel)",
       .least = 1,
       .most = 1e6,
       .aliases = {"parallelism_config_tp_size"},
       .accelerate = {"PARALLELISM_CONFIG_TP_SIZE"},
       .planned = true},
      {.key = "cp_size",
       .section = "parallelism",
       .field = field<&S::cp_size>,
       .help = "ranks that share each sequence, ring attention (context parallel)",
       .least = 1,
       .most = 1e6,
       .aliases = {"parallelism_config_cp_size"},
       .accelerate = {"PARALLELISM_CONFIG_CP_SIZE"},
       .planned = true},
      {.key = "sp_size",
       .section = "parallelism",
       .field = field<&S::sp_size>,
       .help = "ranks that share each sequence, heads exchanged (sequence parallel)",
       .least = 1,
       .most = 1e6,
       .aliases = {"parallelism_config_sp_size"},
       .accelerate = {"PARALLELISM_CONFIG_SP_SIZE"},
       .planned = true},
      {.key = "pp_size",
       .section = "parallelism",
       .field = field<&S::pp_size>,
       .help = "stages among which layers are dealt (pipeline parallel)",
       .least = 1,
       .most = 1e6,
       .aliases = {"parallelism_config_pp_size"},
       .planned = true},

      {.key = "sharding",
       .section = "sharding",
       .field = field<&S::sharding>,
       .help = "what several ranks hold parts of: nothing (ddp), optimizer states (zero1), and "
               "gradients (zero2), and parameters (zero3; fsdp keeps those of the root until its "
               "backward)",
       .names = {"ddp", "zero1", "zero2", "zero3", "fsdp"}},
      {.key = "zero_stage",
       .section = "sharding",
       .field = field<&S::zero_stage>,
       .help = "sharding by its number: 0 is ddp, 1 to 3 are zero1 to zero3",
       .least = 0,
       .most = 3,
       .accelerate = {"ACCELERATE_DEEPSPEED_ZERO_STAGE"}},
      {.key = "deepspeed_config_file",
       .section = "sharding",
       .field = field<&S::deepspeed_config_file>,
       .help = "a DeepSpeed configuration, as a JSON file or the object itself: docs/deepspeed.md",
       .aliases = {"deepspeed_config"},
       .accelerate = {"ACCELERATE_DEEPSPEED_CONFIG_FILE"}},
      {.key = "fsdp_reshard_after_forward",
       .section = "sharding",
       .field = field<&S::fsdp_reshard_after_forward>,
       .help = "gathered parameters are let go of after forward and gathered again for backward",
       .accelerate = {"FSDP_RESHARD_AFTER_FORWARD"}},
      {.key = "offload_parameters",
       .section = "sharding",
       .field = field<&S::offload_parameters>,
       .help = "a GPU's parts of parameters, gradients and optimizer states lie in page-locked "
               "memory of the host, where the optimizer works; of fsdp and zero3",
       .aliases = {"fsdp_offload_params"},
       .accelerate = {"FSDP_OFFLOAD_PARAMS"}},
      {.key = "offload_optimizer",
       .section = "sharding",
       .field = field<&S::offload_optimizer>,
       .help = "the same of gradients and optimizer states, while the GPU keeps its parameters, "
               "or its parts of them; in every mode but ddp"},
      {.key = "fsdp_activation_checkpointing",
       .section = "sharding",
       .field = field<&S::fsdp_activation_checkpointing>,
       .help = "units keep their inputs alone, and their forward runs again in backward; in every "
               "mode of sharding, and of one rank",
       .accelerate = {"FSDP_ACTIVATION_CHECKPOINTING"}},
      {.key = "fsdp_cpu_ram_efficient_loading",
       .section = "sharding",
       .field = field<&S::fsdp_cpu_ram_efficient_loading>,
       .help = "rank 0 alone reads the files of load_model() and sends each rank its parts; "
               "prepare() takes models that have memory on rank 0 alone",
       .accelerate = {"FSDP_CPU_RAM_EFFICIENT_LOADING"}},
      {.key = "fsdp_wrap_modules",
       .section = "sharding",
       .field = field<&S::fsdp_wrap_modules>,
       .help = "classes of modules that are gathered as units (default: those of which a list "
               "holds several; none: the whole model is one)",
       .aliases = {"fsdp_transformer_layer_cls_to_wrap"},
       .accelerate = {"FSDP_TRANSFORMER_CLS_TO_WRAP"}},
      {.key = "fsdp_min_num_params",
       .section = "sharding",
       .field = field<&S::fsdp_min_num_params>,
       .help = "modules become units by size, from this number of parameters on",
       .least = 0,
       .most = kMost,
       .accelerate = {"FSDP_MIN_NUM_PARAMS"}},
      {.key = "fsdp_state_dict_type",
       .section = "sharding",
       .field = field<&S::fsdp_state_dict_type>,
       .help = "how save_state() writes models: in the parts that ranks hold, or whole, as "
               "save_model() does",
       .names = {"sharded", "full"},
       .accelerate = {"FSDP_STATE_DICT_TYPE"}},
      {.key = "fsdp_ignored_modules",
       .section = "sharding",
       .field = field<&S::fsdp_ignored_modules>,
       .help = "modules whose parameters stay whole on every rank: a regular expression that "
               "matches their dotted names; they have to be frozen",
       .accelerate = {"FSDP_IGNORED_MODULES"}},

      {.key = "fp8_recipe",
       .section = "fp8",
       .field = field<&S::fp8_recipe>,
       .help = "whose maxima scale the operands: of the tensor at hand (tensorwise; current is "
               "another name), of earlier steps, of rows, or of blocks",
       .names = {"tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"}},
      {.key = "fp8_filter",
       .section = "fp8",
       .field = field<&S::fp8_filter>,
       .help = "which Linears: those with dimensions that are multiples of 16 but the last one, "
               "every one, or of the default those that are large enough to gain",
       .names = {"default", "all", "pays"}},
      {.key = "fp8_exclude",
       .section = "fp8",
       .field = field<&S::fp8_exclude>,
       .help = "Linears that stay in bf16: dotted names, or ends of them"},
      {.key = "fp8_strict",
       .section = "fp8",
       .field = field<&S::fp8_strict>,
       .help = "a call of such a Linear that cannot run in float8 is an error; else it runs in "
               "bf16 and is counted with the reason"},
      {.key = "fp8_in_evaluation",
       .section = "fp8",
       .field = field<&S::fp8_in_evaluation>,
       .help = "modules in evaluation run in float8, too; Accelerate's use_autocast_during_eval",
       .accelerate = {"ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL"}},
      {.key = "fp8_weight_gradient",
       .section = "fp8",
       .field = field<&S::fp8_weight_gradient>,
       .help = "the product of a weight's gradient runs in float8, too; false is Accelerate's "
               "override_linear_precision (false, false, true)"},
      {.key = "fp8_format",
       .section = "fp8",
       .field = field<&S::fp8_format>,
       .help = "e4m3 forward and e5m2 backward (hybrid), or e4m3 for both",
       .names = {"hybrid", "e4m3"},
       .accelerate = {"ACCELERATE_FP8_FORMAT"}},
      {.key = "fp8_margin",
       .section = "fp8",
       .field = field<&S::fp8_margin>,
       .help = "bits left free above the largest value seen",
       .least = 0,
       .most = 64,
       .accelerate = {"ACCELERATE_FP8_MARGIN"}},
      {.key = "fp8_amax_history_len",
       .section = "fp8",
       .field = field<&S::fp8_amax_history_len>,
       .help = "steps whose largest values are kept",
       .least = 1,
       .most = 1e6,
       .aliases = {"fp8_amax_history_length"},
       .accelerate = {"ACCELERATE_FP8_AMAX_HISTORY_LEN"}},
      {.key = "fp8_amax_compute_algo",
       .section = "fp8",
       .field = field<&S::fp8_amax_compute_algo>,
       .help = "which of the kept values decides the scale",
       .names = {"max", "most_recent"},
       .aliases = {"fp8_amax_compute_algorithm"},
       .accelerate = {"ACCELERATE_FP8_AMAX_COMPUTE_ALGO"}},

      {.key = "ranks",
       .section = "launch",
       .field = field<&S::ranks>,
       .help = "number of ranks (default: 1, or all slots of the host file)",
       .least = 1,
       .most = 1 << 20,
       .aliases = {"num_processes"},
       .accelerate = {"ACCELERATE_NUM_PROCESSES"},
       .short_flag = "-n"},
      {.key = "nodes",
       .section = "launch",
       .field = field<&S::nodes>,
       .help = "spread the ranks over this many nodes (default: as they fit)",
       .least = 1,
       .most = 1 << 20,
       .aliases = {"num_machines"},
       .accelerate = {"ACCELERATE_NUM_MACHINES"}},
      {.key = "hostfile",
       .section = "launch",
       .field = field<&S::hostfile>,
       .help = "machines, one a line: NAME slots=N",
       .aliases = {"mpirun_hostfile"}},
      {.key = "threads",
       .section = "launch",
       .field = field<&S::threads>,
       .help = "compute threads of a rank (default: cores / local ranks)",
       .least = 1,
       .most = 4096,
       .aliases = {"num_threads", "num_cpu_threads_per_process"},
       .accelerate = {"ACCELERATE_NUM_CPU_THREADS_PER_PROCESS"}},
      {.key = "oversubscribe",
       .section = "launch",
       .field = field<&S::oversubscribe>,
       .help = "allow more ranks than slots"},
      {.key = "restarts",
       .section = "launch",
       .field = field<&S::restarts>,
       .help = "how often a failed job is started again",
       .least = 0,
       .most = 1e6,
       .aliases = {"max_restarts"},
       .accelerate = {"ACCELERATE_MAX_RESTARTS"}},
      {.key = "restart_ranks",
       .section = "launch",
       .field = field<&S::restart_ranks>,
       .help =
           "ranks of each restart, N,N,..., the last for all further ones (default: as before)"},
      {.key = "collective_timeout",
       .section = "launch",
       .field = field<&S::collective_timeout>,
       .help = "seconds a collective may wait for other ranks",
       .least = 1e-3,
       .most = 1e9},
      {.key = "first_step_timeout",
       .section = "launch",
       .field = field<&S::first_step_timeout>,
       .help = "the same until the first gradients are reduced (default: as collective_timeout)",
       .least = 1e-3,
       .most = 1e9},
      {.key = "save_timeout",
       .section = "launch",
       .field = field<&S::save_timeout>,
       .help = "the same for what a checkpoint waits for (default: as collective_timeout)",
       .least = 1e-3,
       .most = 1e9},
      {.key = "init_timeout",
       .section = "launch",
       .field = field<&S::init_timeout>,
       .help = "seconds until all ranks must have started their process group",
       .least = 1e-3,
       .most = 1e9},
      {.key = "job_timeout",
       .section = "launch",
       .field = field<&S::job_timeout>,
       .help = "seconds after which the job is killed (default: none)",
       .least = 1e-3,
       .most = 1e9},
      {.key = "start_timeout",
       .section = "launch",
       .field = field<&S::start_timeout>,
       .help = "seconds until every agent must have reported",
       .least = 1e-3,
       .most = 1e9},
      {.key = "grace",
       .section = "launch",
       .field = field<&S::grace>,
       .help = "seconds between the first failure and the killing of what still runs",
       .least = 1e-3,
       .most = 1e9},
      {.key = "wait_warning",
       .section = "launch",
       .field = field<&S::wait_warning>,
       .help = "seconds that a rank waits for others until the launcher says where all are",
       .least = 1e-3,
       .most = 1e9},
      {.key = "transport",
       .section = "launch",
       .field = field<&S::transport>,
       .help = "how bytes travel: MPI's choice, memory of one node, or TCP",
       .names = {"auto", "shared", "tcp"}},
      {.key = "interface",
       .section = "launch",
       .field = field<&S::interface>,
       .help = "network interface for TCP"},
      {.key = "store_host",
       .section = "launch",
       .field = field<&S::store_host>,
       .help = "address of this machine that the other nodes reach (default: found)",
       .aliases = {"main_process_ip"}},
      {.key = "store_port",
       .section = "launch",
       .field = field<&S::store_port>,
       .help = "port of the job's store; 0: a free one",
       .least = 0,
       .most = 65535,
       .aliases = {"main_process_port"}},
      {.key = "dump_dir",
       .section = "launch",
       .field = field<&S::dump_dir>,
       .help = "folder where ranks write what they communicated when a collective fails"},
      {.key = "remote_agent",
       .section = "launch",
       .field = field<&S::remote_agent>,
       .help = "program that runs a command on a node, as ssh does"},
  };
  return kTable;
}

std::string number_text(double value) {
  char buffer[40];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
}

template <class T>
T parse_number(const Setting& setting, std::string_view source, std::string_view text) {
  T value{};
  const char* const last = text.data() + text.size();
  const auto [end, problem] = std::from_chars(text.data(), last, value);
  const bool bounded = setting.least != 0 || setting.most != 0;
  const bool is_number =
      problem == std::errc() && end == last && std::isfinite(static_cast<double>(value));
  const std::string range =
      bounded ? " from " + number_text(setting.least) + " to " + number_text(setting.most)
              : std::string();
  TS_CHECK_AS(ConfigError,
              is_number && (!bounded || (static_cast<double>(value) >= setting.least &&
                                         static_cast<double>(value) <= setting.most)),
              kSettingsSchema, source, " has to be a ", std::is_integral_v<T> ? "whole " : "",
              "number", range, "; got \"", text, "\"");
  return value;
}

std::vector<std::string> parse_list(std::string_view source, std::string_view text) {
  std::vector<std::string> items;
  if (text.empty()) return items;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    std::string_view item = text.substr(begin, end - begin);
    while (item.starts_with(' ')) item.remove_prefix(1);
    while (item.ends_with(' ')) item.remove_suffix(1);
    TS_CHECK_AS(ConfigError, !item.empty(), kSettingsSchema, source,
                " has to be a list A,B,... without empty items; got \"", text, "\"");
    items.emplace_back(item);
    begin = end + 1;
  }
  return items;
}

// Accelerate's names and torch's numbers of state dicts: FULL_STATE_DICT, 1.
std::string state_dict_type(std::string_view source, std::string_view text) {
  std::string name = lower(text);
  constexpr std::string_view kEnd = "_state_dict";
  if (name.ends_with(kEnd)) name.resize(name.size() - kEnd.size());
  TS_CHECK_AS(UnsupportedError, name != "local" && name != "3", kSettingsSchema, source,
              " asks for LOCAL_STATE_DICT, the parts without saying what they are parts of, which "
              "only as many ranks could read; say sharded, which any number reads, or full");
  return name == "1" ? "full" : name == "2" ? "sharded" : name;
}

uint8_t parse_name(const Setting& setting, std::string_view source, std::string_view given) {
  const std::string text = setting.key == "fsdp_state_dict_type" ? state_dict_type(source, given)
                           : setting.key == "fp8_recipe" && lower(given) == "current"
                               ? "tensorwise"
                               : std::string(given);
  const auto at = std::find(setting.names.begin(), setting.names.end(), lower(text));
  if (at != setting.names.end()) return static_cast<uint8_t>(at - setting.names.begin());
  std::string names;
  for (const std::string_view name : setting.names)
    names += (names.empty() ? "" : ", ") + std::string(name);
  TS_THROW(ConfigError, kSettingsSchema, source, " has to be one of ", names, "; got \"", text,
           "\"");
}

template <class... F>
struct Overload : F... {
  using F::operator()...;
};
template <class... F>
Overload(F...) -> Overload<F...>;  // clang 14 does not deduce aggregates

std::string canonical(std::string_view key) {
  std::string result = lower(key);
  std::replace(result.begin(), result.end(), '-', '_');
  return result;
}

}  // namespace

std::span<const Setting> schema() { return table(); }

const Setting* find_setting(std::string_view key) {
  const std::string wanted = canonical(key);
  for (const Setting& setting : table()) {
    if (setting.key == wanted) return &setting;
    for (const std::string_view alias : setting.aliases) {
      if (alias == wanted) return &setting;
    }
  }
  return nullptr;
}

std::string nearest_key(std::string_view key, std::optional<size_t> most) {
  const std::string wanted = canonical(key);
  std::string best;
  size_t least = most.value_or(wanted.size() / 3 + 1) + 1;
  for (const Setting& setting : table()) {
    const auto look = [&](std::string_view name) {
      const size_t distance = edit_distance(wanted, name);
      if (distance >= least) return;
      least = distance;
      best = name;
    };
    look(setting.key);
    for (const std::string_view alias : setting.aliases) look(alias);
  }
  return best;
}

std::string_view Setting::type() const {
  Settings settings;
  return std::visit(
      Overload{[](Resolved<bool>*) { return std::string_view("bool"); },
               [](Resolved<std::optional<bool>>*) { return std::string_view("bool"); },
               [](Resolved<int64_t>*) { return std::string_view("int"); },
               [](Resolved<std::optional<int64_t>>*) { return std::string_view("int"); },
               [](Resolved<double>*) { return std::string_view("number"); },
               [](Resolved<std::optional<double>>*) { return std::string_view("number"); },
               [](Resolved<std::string>*) { return std::string_view("text"); },
               [](Resolved<std::vector<std::string>>*) { return std::string_view("list"); },
               [](EnumField) { return std::string_view("choice"); }},
      field(settings));
}

bool Setting::optional() const {
  Settings settings;
  return std::visit(
      Overload{[](Resolved<std::optional<bool>>*) { return true; },
               [](Resolved<std::optional<int64_t>>*) { return true; },
               [](Resolved<std::optional<double>>*) { return true; }, [](auto) { return false; }},
      field(settings));
}

std::string Setting::environment() const { return "TESSERA_" + upper(key); }

std::string Setting::flag() const {
  std::string flag = "--" + std::string(key);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

std::vector<std::string> Setting::flags() const {
  std::vector<std::string> all;
  if (!short_flag.empty()) all.emplace_back(short_flag);
  all.push_back(flag());
  for (const std::string_view alias : aliases) {
    std::string name = "--" + std::string(alias);
    std::replace(name.begin(), name.end(), '_', '-');
    all.push_back(name);
  }
  return all;
}

std::string text(const Setting& setting, const Settings& settings) {
  const auto of_number = [](auto value) {
    if constexpr (std::is_same_v<decltype(value), bool>) {
      return std::string(value ? "true" : "false");
    } else if constexpr (std::is_integral_v<decltype(value)>) {
      return std::to_string(value);
    } else {
      return number_text(value);
    }
  };
  // The field is only read.
  return std::visit(Overload{[](const Resolved<std::string>* at) { return at->value; },
                             [](const Resolved<std::vector<std::string>>* at) {
                               std::string list;
                               for (const std::string& item : at->value)
                                 list += (list.empty() ? "" : ",") + item;
                               return list;
                             },
                             [&](EnumField at) { return std::string(setting.names[*at.value]); },
                             [&](const auto* at) {
                               if constexpr (requires { at->value.has_value(); }) {
                                 return at->value ? of_number(*at->value) : std::string();
                               } else {
                                 return of_number(at->value);
                               }
                             }},
                    setting.field(const_cast<Settings&>(settings)));
}

const Origin& origin(const Setting& setting, const Settings& settings) {
  return std::visit(Overload{[](EnumField at) -> const Origin& { return *at.origin; },
                             [](const auto* at) -> const Origin& { return at->origin; }},
                    setting.field(const_cast<Settings&>(settings)));
}

bool parse_bool(std::string_view source, std::string_view text) {
  const std::string word = lower(text);
  for (const std::string_view yes : {"y", "yes", "t", "true", "on", "1"}) {
    if (word == yes) return true;
  }
  for (const std::string_view no : {"n", "no", "f", "false", "off", "0"}) {
    if (word == no) return false;
  }
  TS_THROW(ConfigError, kSettingsSchema, source, " has to be true or false; got \"", text, "\"");
}

void assign(const Setting& setting, Settings& settings, std::string_view text,
            const Origin& origin) {
  const std::string source = origin.source == Source::kFile || origin.source == Source::kCode
                                 ? std::string(setting.key) + " (" + origin.describe() + ")"
                                 : origin.name;
  std::visit(Overload{[&](Resolved<bool>* at) {
                        *at = {parse_bool(source, text), origin};
                      },
                      [&](Resolved<std::optional<bool>>* at) {
                        *at = {parse_bool(source, text), origin};
                      },
                      [&](Resolved<std::string>* at) {
                        *at = {std::string(text), origin};
                      },
                      [&](Resolved<std::vector<std::string>>* at) {
                        *at = {parse_list(source, text), origin};
                      },
                      [&](EnumField at) {
                        *at.value = parse_name(setting, source, text);
                        *at.origin = origin;
                      },
                      [&]<class T>(Resolved<T>* at) {
                        *at = {parse_number<T>(setting, source, text), origin};
                      },
                      [&]<class T>(Resolved<std::optional<T>>* at) {
                        *at = {parse_number<T>(setting, source, text), origin};
                      }},
             setting.field(settings));
}

std::string Origin::describe() const {
  switch (source) {
    case Source::kDefault:
      return "default";
    case Source::kCode:
      return "code";
    case Source::kFile:
      return "file " + name;
    case Source::kAccelerate:
    case Source::kEnvironment:
    case Source::kLaunchFlag:
      break;
  }
  return name;
}

}  // namespace tessera::accelerate
