// The settings of what ranks hold parts of: FullyShardedDataParallelOptions and DeepSpeed.
#include <tessera/accelerate/settings/letter_case.h>
#include <tessera/accelerate/settings/schema/row.h>
#include <tessera/core/error.h>

namespace tessera::accelerate {
namespace {

// Accelerate's names and torch's numbers of state dicts: FULL_STATE_DICT, 1.
std::string state_dict_type(std::string_view source, std::string_view text) {
  std::string name = lower(text);
  constexpr std::string_view kEnd = "_state_dict";
  if (name.ends_with(kEnd)) name.resize(name.size() - kEnd.size());
  TS_CHECK_AS(UnsupportedError, name != "local" && name != "3", "settings", source,
              " asks for LOCAL_STATE_DICT, the parts without saying what they are parts of, which "
              "only as many ranks could read; say sharded, which any number reads, or full");
  return name == "1" ? "full" : name == "2" ? "sharded" : name;
}

}  // namespace

std::vector<Setting> sharding_settings() {
  using S = Settings;
  using O = AcceleratorOptions;
  using Fsdp = FullyShardedDataParallelOptions;
  return {
      {.key = "sharding",
       .field = field<&S::sharding, &O::sharding>,
       .help = "what several ranks hold parts of: nothing (ddp), optimizer states (zero1), and "
               "gradients (zero2), and parameters (zero3; fsdp keeps those of the root until its "
               "backward)",
       .names = {"ddp", "zero1", "zero2", "zero3", "fsdp"}},
      {.key = "zero_stage",
       .field = field<&S::zero_stage>,
       .help = "sharding by its number: 0 is ddp, 1 to 3 are zero1 to zero3",
       .least = 0,
       .most = 3,
       .accelerate = {"ACCELERATE_DEEPSPEED_ZERO_STAGE"}},
      {.key = "deepspeed_config_file",
       .field = field<&S::deepspeed_config_file, &O::deepspeed_config>,
       .help = "a DeepSpeed configuration, as a JSON file or the object itself: docs/deepspeed.md",
       .aliases = {"deepspeed_config"},
       .accelerate = {"ACCELERATE_DEEPSPEED_CONFIG_FILE"}},
      {.key = "fsdp_reshard_after_forward",
       .field = field<&S::fsdp_reshard_after_forward, &O::fsdp, &Fsdp::reshard_after_forward>,
       .help = "gathered parameters are let go of after forward and gathered again for backward",
       .accelerate = {"FSDP_RESHARD_AFTER_FORWARD"}},
      {.key = "offload_parameters",
       .field = field<&S::offload_parameters, &O::offload_parameters>,
       .help = "a GPU's parts of parameters, gradients and optimizer states lie in page-locked "
               "memory of the host, where the optimizer works; of fsdp and zero3",
       .aliases = {"fsdp_offload_params"},
       .accelerate = {"FSDP_OFFLOAD_PARAMS"}},
      {.key = "offload_optimizer",
       .field = field<&S::offload_optimizer, &O::offload_optimizer>,
       .help = "the same of gradients and optimizer states, while the GPU keeps its parameters, "
               "or its parts of them; in every mode but ddp"},
      {.key = "fsdp_activation_checkpointing",
       .field = field<&S::fsdp_activation_checkpointing, &O::fsdp, &Fsdp::activation_checkpointing>,
       .help = "units keep their inputs alone, and their forward runs again in backward; in every "
               "mode of sharding, and of one rank",
       .accelerate = {"FSDP_ACTIVATION_CHECKPOINTING"}},
      {.key = "fsdp_cpu_ram_efficient_loading",
       .field =
           field<&S::fsdp_cpu_ram_efficient_loading, &O::fsdp, &Fsdp::cpu_ram_efficient_loading>,
       .help = "rank 0 alone reads the files of load_model() and sends each rank its parts; "
               "prepare() takes models that have memory on rank 0 alone",
       .accelerate = {"FSDP_CPU_RAM_EFFICIENT_LOADING"}},
      {.key = "fsdp_wrap_modules",
       .field = field<&S::fsdp_wrap_modules, &O::fsdp, &Fsdp::wrap_modules>,
       .help = "classes of modules that are gathered as units (default: those of which a list "
               "holds several; none: the whole model is one)",
       .aliases = {"fsdp_transformer_layer_cls_to_wrap"},
       .accelerate = {"FSDP_TRANSFORMER_CLS_TO_WRAP"}},
      {.key = "fsdp_min_num_params",
       .field = field<&S::fsdp_min_num_params, &O::fsdp, &Fsdp::min_num_params>,
       .help = "modules become units by size, from this number of parameters on",
       .least = 0,
       .most = 1e15,
       .accelerate = {"FSDP_MIN_NUM_PARAMS"}},
      {.key = "fsdp_state_dict_type",
       .field = field<&S::fsdp_state_dict_type, &O::fsdp, &Fsdp::state_dict_type>,
       .help = "how save_state() writes models: in the parts that ranks hold, or whole, as "
               "save_model() does",
       .names = {"sharded", "full"},
       .accelerate = {"FSDP_STATE_DICT_TYPE"},
       .other_word = state_dict_type},
      {.key = "fsdp_ignored_modules",
       .field = field<&S::fsdp_ignored_modules, &O::fsdp, &Fsdp::ignored_modules>,
       .help = "modules whose parameters stay whole on every rank: a regular expression that "
               "matches their dotted names; they have to be frozen",
       .accelerate = {"FSDP_IGNORED_MODULES"}},
  };
}

}  // namespace tessera::accelerate
