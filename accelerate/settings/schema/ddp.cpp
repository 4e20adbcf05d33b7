// The settings of ranks that hold whole models: DistributedDataParallelOptions.
#include <tessera/accelerate/settings/schema/row.h>

namespace tessera::accelerate {

std::vector<Setting> ddp_settings() {
  using S = Settings;
  using O = AcceleratorOptions;
  using Ddp = DistributedDataParallelOptions;
  return {
      {.key = "ddp_bucket_cap_mb",
       .field = field<&S::ddp_bucket_cap_mb, &O::ddp, &Ddp::bucket_cap_mb>,
       .help = "MiB of gradients that are reduced together",
       .least = 0.0001,
       .most = 1e6},
      {.key = "ddp_first_bucket_mb",
       .field = field<&S::ddp_first_bucket_mb, &O::ddp, &Ddp::first_bucket_mb>,
       .help = "MiB of the bucket that is reduced first",
       .least = 0.0001,
       .most = 1e6},
      {.key = "ddp_broadcast_buffers",
       .field = field<&S::ddp_broadcast_buffers, &O::ddp, &Ddp::broadcast_buffers>,
       .help = "rank 0's buffers become everybody's in each forward of training"},
      {.key = "ddp_gradient_as_bucket_view",
       .field = field<&S::ddp_gradient_as_bucket_view, &O::ddp, &Ddp::gradient_as_bucket_view>,
       .help = "gradients lie in their buckets: no second copy of them"},
      {.key = "ddp_init_sync",
       .field = field<&S::ddp_init_sync, &O::ddp, &Ddp::init_sync>,
       .help = "rank 0's parameters become everybody's in prepare()"},
      {.key = "ddp_comm_hook",
       .field = field<&S::ddp_comm_hook, &O::ddp, &Ddp::comm_hook>,
       .help = "how gradients travel: as they are, in 16 bits, or as low-rank factors of each "
               "matrix or of each bucket",
       .names = {"none", "fp16", "bf16", "power_sgd", "batched_power_sgd"}},
      {.key = "ddp_comm_wrapper",
       .field = field<&S::ddp_comm_wrapper, &O::ddp, &Ddp::comm_wrapper>,
       .help = "16 bits for what power_sgd and batched_power_sgd send",
       .names = {"none", "fp16", "bf16"}},
      {.key = "ddp_power_sgd_rank",
       .field = field<&S::ddp_power_sgd_rank, &O::ddp, &Ddp::power_sgd_rank>,
       .help = "of the factors of power_sgd and batched_power_sgd",
       .least = 1,
       .most = 65536},
      {.key = "ddp_power_sgd_start_step",
       .field = field<&S::ddp_power_sgd_start_step, &O::ddp, &Ddp::power_sgd_start_step>,
       .help = "reductions before power_sgd and batched_power_sgd begin",
       .least = 0,
       .most = 1e9},
  };
}

}  // namespace tessera::accelerate
