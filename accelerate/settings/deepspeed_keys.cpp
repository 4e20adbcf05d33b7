#include <tessera/accelerate/settings/deepspeed_keys.h>

#include <utility>

#include <tessera/accelerate/settings/edit_distance.h>
#include <tessera/accelerate/settings/letter_case.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kByUnits =
    "the sizes of units decide, and one is gathered ahead: docs/sharding.md";
constexpr std::string_view kAlways = "always so";
constexpr std::string_view kOneDivision =
    "gradients are added up in f32 and divided once; leave it out";
constexpr std::string_view kMonitor =
    "metrics are the program's to log: log_with, init_trackers() and log(); leave it out";
constexpr std::string_view kSilent = "the library prints nothing by itself; leave it out";
constexpr std::string_view kQuantized =
    "parameters and gradients travel in the dtypes of the model; leave it out";
constexpr std::string_view kOldOffload =
    "an older name; write \"offload_optimizer\" or \"offload_param\": {\"device\": \"cpu\"}";
constexpr std::string_view kRecompute =
    "what is calculated again is said by fsdp_activation_checkpointing, or by checkpoint() in the "
    "program; leave it out";
constexpr std::string_view kWide = "masters, their gradients and states are f32; leave it out";

// https://www.deepspeed.ai/docs/config-json, and the fields of deepspeed/runtime/zero/config.py.
constexpr DeepSpeedKey kKeys[] = {
    {.path = "train_batch_size", .kind = ValueKind::kWhole, .automatic = true},
    {.path = "train_micro_batch_size_per_gpu", .kind = ValueKind::kWhole, .automatic = true},
    {.path = "gradient_accumulation_steps", .kind = ValueKind::kWhole, .automatic = true},
    {.path = "gradient_clipping", .kind = ValueKind::kNumber, .automatic = true},
    {.path = "prescale_gradients", .harmless = "false", .refused = kOneDivision},
    {.path = "gradient_predivide_factor",
     .kind = ValueKind::kNumber,
     .harmless = "1.0",
     .refused = kOneDivision},
    {.path = "sparse_gradients",
     .harmless = "false",
     .refused = "gradients of embeddings are dense; leave it out"},
    {.path = "communication_data_type", .kind = ValueKind::kText},
    {.path = "seq_parallel_communication_data_type",
     .kind = ValueKind::kText,
     .note = "sequences are not split among ranks"},
    {.path = "data_types", .kind = ValueKind::kSection},
    {.path = "data_types.grad_accum_dtype",
     .kind = ValueKind::kText,
     .harmless = "\"fp32\"|\"float32\"|null",
     .refused = "gradients are added up in f32; say fp32, or leave it out"},
    {.path = "zero_allow_untested_optimizer", .note = "every optimizer trains in every mode"},
    {.path = "zero_force_ds_cpu_optimizer", .note = "no optimizer takes another one's place"},
    {.path = "steps_per_print", .kind = ValueKind::kAny, .note = "programs print what they like"},
    {.path = "wall_clock_breakdown", .harmless = "false", .refused = kSilent},
    {.path = "memory_breakdown", .harmless = "false", .refused = kSilent},
    {.path = "dump_state", .harmless = "false", .refused = kSilent},
    {.path = "disable_allgather",
     .harmless = "false",
     .refused = "ranks would train with old parameters; leave it out"},
    {.path = "dataloader_drop_last",
     .harmless = "false",
     .refused = "the program makes its loaders: say drop_last there, and leave it out"},
    {.path = "graph_harvesting",
     .harmless = "false",
     .refused = "steps are captured by the program: accelerate/graphed_step.h"},
    {.path = "use_data_before_expert_parallel_", .note = "there are no expert groups"},

    {.path = "optimizer", .kind = ValueKind::kSection},
    {.path = "optimizer.type", .kind = ValueKind::kText},
    {.path = "optimizer.params", .kind = ValueKind::kAny},
    {.path = "optimizer.legacy_fusion",
     .harmless = "false",
     .refused = "it is an old form of DeepSpeed's own; leave it out"},
    {.path = "scheduler", .kind = ValueKind::kSection},
    {.path = "scheduler.type", .kind = ValueKind::kText},
    {.path = "scheduler.params", .kind = ValueKind::kAny},

    {.path = "fp16", .kind = ValueKind::kSection},
    {.path = "fp16.enabled", .automatic = true},
    {.path = "fp16.auto_cast", .note = "what enters the model is cast anyway"},
    {.path = "fp16.loss_scale", .kind = ValueKind::kNumber},
    {.path = "fp16.initial_scale_power", .kind = ValueKind::kWhole},
    {.path = "fp16.loss_scale_window",
     .kind = ValueKind::kWhole,
     .setting = "scaler_growth_interval"},
    {.path = "fp16.hysteresis", .kind = ValueKind::kWhole, .setting = "scaler_hysteresis"},
    {.path = "fp16.consecutive_hysteresis", .setting = "scaler_consecutive_hysteresis"},
    {.path = "fp16.min_loss_scale", .kind = ValueKind::kNumber},
    {.path = "fp16.fp16_master_weights_and_grads", .harmless = "false", .refused = kWide},
    {.path = "bf16", .kind = ValueKind::kSection},
    {.path = "bf16.enabled", .automatic = true},
    {.path = "bf16.immediate_grad_update", .note = kAlways},
    {.path = "bf16.check_grad_overflow",
     .harmless = "false",
     .refused = "bf16 reaches as far as f32, and no step is left out; leave it out"},
    {.path = "bf16.bf16_master_weights_and_grads", .harmless = "false", .refused = kWide},
    {.path = "bf16.bf16_optimizer_states", .harmless = "false", .refused = kWide},
    {.path = "torch_autocast", .kind = ValueKind::kSection},
    {.path = "torch_autocast.enabled"},
    {.path = "torch_autocast.dtype", .kind = ValueKind::kText},
    {.path = "torch_autocast.lower_precision_safe_modules",
     .kind = ValueKind::kAny,
     .harmless = "null|[]",
     .refused = "each op decides by its record (docs/precision.md); leave it out"},
    {.path = "amp", .kind = ValueKind::kSwitch, .refused = "it is NVIDIA Apex's; say bf16 or fp16"},
    {.path = "msamp", .kind = ValueKind::kSwitch, .refused = "it is MS-AMP's; say bf16 or fp16"},

    {.path = "zero_optimization", .kind = ValueKind::kSection},
    {.path = "zero_optimization.stage", .kind = ValueKind::kWhole, .automatic = true},
    {.path = "zero_optimization.contiguous_gradients", .note = kAlways},
    {.path = "zero_optimization.reduce_scatter", .note = kAlways},
    {.path = "zero_optimization.reduce_bucket_size", .kind = ValueKind::kWhole, .automatic = true},
    {.path = "zero_optimization.allgather_bucket_size",
     .kind = ValueKind::kWhole,
     .note = "parameters are gathered in the buckets of reduce_bucket_size",
     .automatic = true},
    {.path = "zero_optimization.use_multi_rank_bucket_allreduce",
     .note = "each rank receives its own sums alone"},
    {.path = "zero_optimization.allgather_partitions", .note = kAlways},
    {.path = "zero_optimization.overlap_comm", .note = kAlways, .automatic = true},
    {.path = "zero_optimization.round_robin_gradients", .note = "each rank has its part"},
    {.path = "zero_optimization.ignore_unused_parameters",
     .harmless = "true",
     .refused = "a parameter without a gradient counts as zeros and is no error; leave it out"},
    {.path = "zero_optimization.load_from_fp32_weights",
     .harmless = "true",
     .refused = "checkpoints hold the masters, and training goes on with them; leave it out"},
    {.path = "zero_optimization.elastic_checkpoint",
     .note = "any number of ranks reads every checkpoint"},
    {.path = "zero_optimization.legacy_stage1",
     .harmless = "false",
     .refused = "it is an old form of DeepSpeed's own; leave it out"},
    {.path = "zero_optimization.offload_param", .kind = ValueKind::kSection},
    {.path = "zero_optimization.offload_param.device", .kind = ValueKind::kText, .automatic = true},
    {.path = "zero_optimization.offload_param.nvme_path",
     .kind = ValueKind::kText,
     .note = "see device"},
    {.path = "zero_optimization.offload_param.buffer_count",
     .kind = ValueKind::kWhole,
     .note = "see device"},
    {.path = "zero_optimization.offload_param.buffer_size",
     .kind = ValueKind::kWhole,
     .note = "see device",
     .automatic = true},
    {.path = "zero_optimization.offload_param.max_in_cpu",
     .kind = ValueKind::kWhole,
     .note = "see device"},
    {.path = "zero_optimization.offload_param.pin_memory", .note = "see device"},
    {.path = "zero_optimization.offload_optimizer", .kind = ValueKind::kSection},
    {.path = "zero_optimization.offload_optimizer.device",
     .kind = ValueKind::kText,
     .automatic = true},
    {.path = "zero_optimization.offload_optimizer.nvme_path",
     .kind = ValueKind::kText,
     .note = "see device"},
    {.path = "zero_optimization.offload_optimizer.buffer_count",
     .kind = ValueKind::kWhole,
     .note = "see device"},
    {.path = "zero_optimization.offload_optimizer.pin_memory", .note = "see device"},
    {.path = "zero_optimization.offload_optimizer.pipeline_read", .note = "see device"},
    {.path = "zero_optimization.offload_optimizer.pipeline_write", .note = "see device"},
    {.path = "zero_optimization.offload_optimizer.fast_init", .note = "see device"},
    {.path = "zero_optimization.offload_optimizer.ratio",
     .kind = ValueKind::kNumber,
     .harmless = "1.0",
     .refused = "all of the optimizer's states are treated alike; leave it out"},
    {.path = "zero_optimization.offload_optimizer.super_offload",
     .harmless = "false",
     .refused = "the optimizer works in memory of the host, or on the GPU; leave it out"},
    {.path = "zero_optimization.cpu_offload", .harmless = "false|null", .refused = kOldOffload},
    {.path = "zero_optimization.cpu_offload_param",
     .harmless = "false|null",
     .refused = kOldOffload},
    {.path = "zero_optimization.cpu_offload_params",
     .harmless = "false|null",
     .refused = kOldOffload},
    {.path = "zero_optimization.cpu_offload_use_pin_memory", .note = "see offload_optimizer"},
    {.path = "zero_optimization.sub_group_size",
     .kind = ValueKind::kWhole,
     .note = "the optimizer goes over all parts at once"},
    {.path = "zero_optimization.stage3_prefetch_bucket_size",
     .kind = ValueKind::kWhole,
     .note = kByUnits,
     .automatic = true},
    {.path = "zero_optimization.stage3_param_persistence_threshold",
     .kind = ValueKind::kWhole,
     .note = kByUnits,
     .automatic = true},
    {.path = "zero_optimization.stage3_model_persistence_threshold",
     .kind = ValueKind::kWhole,
     .note = kByUnits},
    {.path = "zero_optimization.model_persistence_threshold",
     .kind = ValueKind::kWhole,
     .note = kByUnits},
    {.path = "zero_optimization.stage3_max_live_parameters",
     .kind = ValueKind::kWhole,
     .note = kByUnits},
    {.path = "zero_optimization.stage3_max_reuse_distance",
     .kind = ValueKind::kWhole,
     .note = kByUnits},
    {.path = "zero_optimization.stage3_use_all_reduce_for_fetch_params",
     .note = "parameters come by an all-gather"},
    {.path = "zero_optimization.stage3_allgather_sequential", .note = kByUnits},
    {.path = "zero_optimization.stage3_module_granularity_threshold",
     .kind = ValueKind::kWhole,
     .harmless = "0",
     .refused = "say which modules are units: fsdp_wrap_modules or fsdp_min_num_params"},
    {.path = "zero_optimization.module_granularity_threshold",
     .kind = ValueKind::kWhole,
     .harmless = "0",
     .refused = "say which modules are units: fsdp_wrap_modules or fsdp_min_num_params"},
    {.path = "zero_optimization.leaf_module",
     .kind = ValueKind::kAny,
     .harmless = "null|{}",
     .refused = "say which classes are gathered as one unit: fsdp_wrap_modules"},
    {.path = "zero_optimization.stage3_gather_16bit_weights_on_model_save",
     .note = "save_model() writes whole weights in every mode",
     .automatic = true},
    {.path = "zero_optimization.stage3_gather_fp16_weights_on_model_save",
     .note = "save_model() writes whole weights in every mode"},
    {.path = "zero_optimization.zero_hpz_partition_size",
     .kind = ValueKind::kWhole,
     .harmless = "1",
     .refused = "a second copy within a node is fully_shard()'s reshard_after_forward = N, in a "
                "program without this file; leave it out"},
    {.path = "zero_optimization.zero_quantized_weights",
     .harmless = "false",
     .refused = kQuantized},
    {.path = "zero_optimization.zero_quantized_nontrainable_weights",
     .harmless = "false",
     .refused = kQuantized},
    {.path = "zero_optimization.zero_quantized_gradients",
     .harmless = "false",
     .refused = kQuantized},
    {.path = "zero_optimization.zeropp_loco_param",
     .kind = ValueKind::kAny,
     .harmless = "null",
     .refused = kQuantized},
    {.path = "zero_optimization.mics_shard_size", .kind = ValueKind::kWhole},
    {.path = "zero_optimization.mics_hierarchical_params_gather",
     .harmless = "false",
     .refused = "units are gathered in one collective; leave it out"},
    {.path = "zero_optimization.memory_efficient_linear",
     .note = "weights that are let go are no part of the graph"},
    {.path = "zero_optimization.pipeline_loading_checkpoint",
     .note = "each rank reads what it keeps"},
    {.path = "zero_optimization.override_module_apply", .note = "modules have no apply()"},
    {.path = "zero_optimization.log_trace_cache_warnings", .note = "there is no trace to lose"},
    {.path = "zero_optimization.enable_sanity_checks", .note = kAlways},
    {.path = "zero_optimization.save_muon_momentum_buffer_in_memory", .note = kAlways},
    {.path = "zero_optimization.zenflow",
     .kind = ValueKind::kAny,
     .harmless = "null",
     .refused = "every gradient is used in its own step; leave it out"},

    {.path = "activation_checkpointing", .kind = ValueKind::kSection},
    {.path = "activation_checkpointing.partition_activations",
     .harmless = "false",
     .refused = kRecompute},
    {.path = "activation_checkpointing.cpu_checkpointing",
     .harmless = "false",
     .refused = kRecompute},
    {.path = "activation_checkpointing.contiguous_memory_optimization",
     .harmless = "false",
     .refused = kRecompute},
    {.path = "activation_checkpointing.number_checkpoints",
     .kind = ValueKind::kAny,
     .note = "it is of contiguous_memory_optimization"},
    {.path = "activation_checkpointing.synchronize_checkpoint_boundary",
     .harmless = "false",
     .refused = kRecompute},
    {.path = "activation_checkpointing.profile", .harmless = "false", .refused = kSilent},
    {.path = "checkpoint", .kind = ValueKind::kSection},
    {.path = "checkpoint.tag_validation",
     .kind = ValueKind::kText,
     .note = "the ranks agree on each folder"},
    {.path = "checkpoint.load_universal", .note = "any number of ranks reads every checkpoint"},
    {.path = "checkpoint.use_node_local_storage",
     .harmless = "false",
     .refused = "all ranks write into one folder; leave it out"},
    {.path = "checkpoint.parallel_write", .kind = ValueKind::kAny, .note = kAlways},
    {.path = "aio", .kind = ValueKind::kAny, .note = "it is of nvme alone"},
    {.path = "timers", .kind = ValueKind::kAny, .note = "nothing is timed without being asked for"},
    {.path = "pipeline",
     .kind = ValueKind::kAny,
     .harmless = "{}|null",
     .refused = "layers are not dealt among ranks; leave it out"},
    {.path = "tensor_parallel",
     .kind = ValueKind::kAny,
     .harmless = "{}|null|{\"autotp_size\":0}|{\"autotp_size\":1}",
     .refused = "layers are not split among ranks; leave it out"},
    {.path = "sparse_attention",
     .kind = ValueKind::kAny,
     .harmless = "{}|null",
     .refused = "the model says what attends to what; leave it out"},
    {.path = "tensorboard", .kind = ValueKind::kSwitch, .refused = kMonitor},
    {.path = "wandb", .kind = ValueKind::kSwitch, .refused = kMonitor},
    {.path = "comet", .kind = ValueKind::kSwitch, .refused = kMonitor},
    {.path = "csv_monitor", .kind = ValueKind::kSwitch, .refused = kMonitor},
    {.path = "flops_profiler",
     .kind = ValueKind::kSwitch,
     .refused = "profile in the program: docs/tracking.md"},
    {.path = "comms_logger",
     .kind = ValueKind::kSwitch,
     .refused = "accelerator.describe() says what a step sends; leave it out"},
    {.path = "autotuning", .kind = ValueKind::kSwitch, .refused = "settings are not searched for"},
    {.path = "elasticity",
     .kind = ValueKind::kSwitch,
     .refused = "tessera launch --restarts K --restart-ranks N says on how many ranks a job goes "
                "on"},
    {.path = "compression_training",
     .kind = ValueKind::kSwitch,
     .refused = "weights are not quantized in training"},
    {.path = "quantize_training",
     .kind = ValueKind::kSwitch,
     .refused = "weights are not quantized in training"},
    {.path = "data_efficiency",
     .kind = ValueKind::kSwitch,
     .refused = "the program says what it reads"},
    {.path = "curriculum_learning",
     .kind = ValueKind::kSwitch,
     .refused = "the program says what it reads"},
    {.path = "progressive_layer_drop",
     .kind = ValueKind::kSwitch,
     .refused = "the model says which layers run"},
    {.path = "eigenvalue",
     .kind = ValueKind::kSwitch,
     .refused = "it is of quantize_training alone"},
    {.path = "hybrid_engine",
     .kind = ValueKind::kSwitch,
     .refused = "a model generates as it trains"},
    {.path = "compile", .kind = ValueKind::kSwitch, .refused = "there is no graph compiler"},
    {.path = "nebula", .kind = ValueKind::kSwitch, .refused = "save_state() writes checkpoints"},
};

constexpr std::string_view kOneBit =
    "its gradients travel in one bit after a while; take AdamW, and ddp_comm_hook to send less";
constexpr std::string_view kMu = "the program scales rates by width; take AdamW or SGD with groups";
constexpr DeepSpeedType kOptimizerTypes[] = {
    {"adam"},
    {"adamw"},
    {"lion"},
    {"adagrad"},
    {"sgd"},
    {"rmsprop"},
    {"adadelta"},
    {"adamax"},
    {"nadam"},
    {"radam"},
    {"muon",
     "its groups say by a flag which parameters are matrices; make optim::Muon of "
     "optim::split_for_muon(), and AdamW of the others, in the program"},
    {"lamb", "there is no optimizer of this name; take AdamW"},
    {"onebitadam", kOneBit},
    {"zerooneadam", kOneBit},
    {"onebitlamb", kOneBit},
    {"muadam", kMu},
    {"muadamw", kMu},
    {"musgd", kMu},
};
constexpr DeepSpeedType kScheduleTypes[] = {
    {"warmuplr"}, {"warmupdecaylr"}, {"warmupcosinelr"}, {"lrrangetest"}, {"onecycle"}};

// Other names of the same.
constexpr std::pair<std::string_view, std::string_view> kRenamed[] = {
    {"bfloat16", "bf16"},
    {"fp16.min_scale", "fp16.min_loss_scale"},
    {"zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"},
    {"zero_optimization.param_persistence_threshold",
     "zero_optimization.stage3_param_persistence_threshold"},
    {"zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters"},
    {"zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance"},
    {"zero_optimization.gather_16bit_weights_on_model_save",
     "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
    {"zero_optimization.use_all_reduce_for_fetch_params",
     "zero_optimization.stage3_use_all_reduce_for_fetch_params"},
    {"zero_optimization.allgather_sequential", "zero_optimization.stage3_allgather_sequential"},
};

std::string_view last_word(std::string_view path) { return path.substr(path.rfind('.') + 1); }

}  // namespace

std::span<const DeepSpeedKey> deepspeed_key_table() { return kKeys; }
std::span<const DeepSpeedType> deepspeed_types(std::string_view section) {
  if (section == "optimizer") return kOptimizerTypes;
  return kScheduleTypes;
}

const DeepSpeedKey* find_key(std::string_view path) {
  for (const auto& [other, name] : kRenamed) {
    if (path == other || (path.starts_with(other) && path[other.size()] == '.')) {
      return find_key(std::string(name) + std::string(path.substr(other.size())));
    }
  }
  for (const DeepSpeedKey& key : kKeys) {
    if (key.path == path) return &key;
  }
  return nullptr;
}

std::string nearest_path(std::string_view path) {
  const auto section = [](std::string_view of) {
    return of.substr(0, of.size() - last_word(of).size());
  };
  const std::string wanted = lower(last_word(path));
  std::string_view best;
  size_t least = wanted.size() / 3 + 2;
  for (const DeepSpeedKey& key : kKeys) {
    if (section(key.path) != section(path)) continue;
    const size_t distance = edit_distance(wanted, last_word(key.path));
    if (distance >= least) continue;
    least = distance;
    best = key.path;
  }
  if (!best.empty()) return std::string(best);
  least = 2;
  for (const DeepSpeedKey& key : kKeys) {
    const size_t distance = edit_distance(wanted, last_word(key.path));
    if (distance >= least) continue;
    least = distance;
    best = key.path;
  }
  return std::string(best);
}

}  // namespace tessera::accelerate
