// The settings of loaders.
#include <tessera/accelerate/settings/schema/row.h>

namespace tessera::accelerate {

std::vector<Setting> data_settings() {
  using S = Settings;
  using O = AcceleratorOptions;
  return {
      {.key = "split_batches",
       .field = field<&S::split_batches, &O::split_batches>,
       .help = "batch_size is that of all ranks together"},
      {.key = "dispatch_batches",
       .field = field<&S::dispatch_batches, &O::dispatch_batches>,
       .help = "rank 0 reads for all; without it streams are dispatched, indexed data is not"},
      {.key = "even_batches",
       .field = field<&S::even_batches, &O::even_batches>,
       .help = "the tail is filled up, so that all ranks have as many batches"},
      {.key = "data_seed",
       .field = field<&S::data_seed, &O::data_seed>,
       .help = "of prepared loaders that shuffle by themselves; without it each one's own",
       .least = 0,
       .most = 9e18},
  };
}

}  // namespace tessera::accelerate
