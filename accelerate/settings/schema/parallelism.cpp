// The settings of the mesh of ranks.
#include <tessera/accelerate/settings/schema/row.h>

namespace tessera::accelerate {

std::vector<Setting> parallelism_settings() {
  using S = Settings;
  using O = AcceleratorOptions;
  return {
      {.key = "dp_replicate_size",
       .field = field<&S::dp_replicate_size, &O::dp_replicate_size>,
       .help = "groups of ranks that hold a whole model each, where parameters are sharded within",
       .least = 1,
       .most = 1e6,
       .aliases = {"parallelism_config_dp_replicate_size"},
       .accelerate = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE"}},
      {.key = "dp_shard_size",
       .field = field<&S::dp_shard_size, &O::dp_shard_size>,
       .help = "ranks of such a group (default: all that dp_replicate_size leaves)",
       .least = 1,
       .most = 1e6,
       .aliases = {"parallelism_config_dp_shard_size"},
       .accelerate = {"PARALLELISM_CONFIG_DP_SHARD_SIZE"}},
      {.key = "tp_size",
       .field = field<&S::tp_size>,
       .help = "ranks that share each layer (tensor parallel)",
       .least = 1,
       .most = 1e6,
       .aliases = {"parallelism_config_tp_size"},
       .accelerate = {"PARALLELISM_CONFIG_TP_SIZE"},
       .planned = true},
      {.key = "cp_size",
       .field = field<&S::cp_size>,
       .help = "ranks that share each sequence, ring attention (context parallel)",
       .least = 1,
       .most = 1e6,
       .aliases = {"parallelism_config_cp_size"},
       .accelerate = {"PARALLELISM_CONFIG_CP_SIZE"},
       .planned = true},
      {.key = "sp_size",
       .field = field<&S::sp_size>,
       .help = "ranks that share each sequence, heads exchanged (sequence parallel)",
       .least = 1,
       .most = 1e6,
       .aliases = {"parallelism_config_sp_size"},
       .accelerate = {"PARALLELISM_CONFIG_SP_SIZE"},
       .planned = true},
      {.key = "pp_size",
       .field = field<&S::pp_size, &O::pp, &PipelineParallelOptions::size>,
       .help = "ranks among which layers are dealt (pipeline parallel); accelerator.pipeline()",
       .least = 1,
       .most = 1e6,
       .aliases = {"parallelism_config_pp_size"}},
      {.key = "pp_schedule",
       .field = field<&S::pp_schedule, &O::pp, &PipelineParallelOptions::schedule>,
       .help = "order of micro-batches in a pipeline; 1f1b interleaves several stages of a rank",
       .names = {"gpipe", "1f1b", "zero_bubble_h1"}},
      {.key = "pp_stages_per_rank",
       .field = field<&S::pp_stages_per_rank, &O::pp, &PipelineParallelOptions::stages_per_rank>,
       .help = "stages that each rank of a pipeline has",
       .least = 1,
       .most = 1e3},
      {.key = "pp_cuts",
       .field = field<&S::pp_cuts, &O::pp, &PipelineParallelOptions::cuts>,
       .help = "modules with which stages 1, 2... begin; none: stages of equal arithmetic"},
  };
}

}  // namespace tessera::accelerate
