#include <tessera/accelerate/settings/megatron_keys.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kExperts = "mixtures of experts are not dealt over ranks";
constexpr std::string_view kBlocks = "whole blocks are calculated again";
constexpr std::string_view kFiles = "load_state() says what it reads, and save_state() writes all";

constexpr MegatronKey kMegatronKeys[] = {
    {.key = "megatron_lm_tp_degree", .setting = "tp_size"},
    {.key = "megatron_lm_pp_degree", .setting = "pp_size"},
    {.key = "megatron_lm_num_micro_batches", .setting = "gradient_accumulation_steps"},
    {.key = "megatron_lm_sequence_parallelism", .setting = "tp_sequence"},
    {.key = "megatron_lm_context_parallel_size", .setting = "cp_size"},
    {.key = "megatron_lm_gradient_clipping", .setting = "gradient_clipping"},
    {.key = "megatron_lm_recompute_activations", .setting = "fsdp_activation_checkpointing"},
    {.key = "megatron_lm_optimizer_cpu_offload", .setting = "offload_optimizer"},
    {.key = kMegatronShards},
    {.key = "megatron_lm_expert_model_parallel_size",
     .why = kExperts,
     .harmless = "1",
     .alters = true},
    {.key = "megatron_lm_expert_tensor_parallel_size",
     .why = kExperts,
     .harmless = "1",
     .alters = true},
    {.key = "megatron_lm_decoder_last_pipeline_num_layers",
     .why = "pp_cuts names the modules with which stages begin",
     .harmless = "none",
     .alters = true},
    {.key = "megatron_lm_num_layers_per_virtual_pipeline_stage",
     .why = "pp_stages_per_rank says how many stages a rank has",
     .harmless = "none",
     .alters = true},
    {.key = "megatron_lm_eod_mask_loss",
     .why = "the program's loss leaves out what it should not count",
     .harmless = "false",
     .alters = true},
    {.key = "megatron_lm_use_custom_fsdp",
     .why = "the setting sharding says what is divided",
     .harmless = "false",
     .alters = true},
    {.key = "megatron_lm_use_precision_aware_optimizer",
     .why = "an optimizer's state_dtype says what its states are kept in",
     .harmless = "false",
     .alters = true},
    {.key = "megatron_lm_overlap_cpu_optimizer_d2h_h2d",
     .why = "transfers overlap anyway",
     .harmless = "false"},
    {.key = "megatron_lm_recompute_granularity", .why = kBlocks, .harmless = "full"},
    {.key = "megatron_lm_recompute_method", .why = kBlocks, .harmless = "uniform"},
    {.key = "megatron_lm_recompute_num_layers", .why = kBlocks, .harmless = "1"},
    {.key = "megatron_lm_attention_backend",
     .why = "attention is chosen by its shapes",
     .harmless = "true"},
    {.key = "megatron_lm_no_load_optim", .why = kFiles, .harmless = "false"},
    {.key = "megatron_lm_no_save_optim", .why = kFiles, .harmless = "false"},
};

}  // namespace

std::span<const MegatronKey> megatron_keys() { return kMegatronKeys; }

}  // namespace tessera::accelerate
