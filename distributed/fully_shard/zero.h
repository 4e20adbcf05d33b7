// ZeRO-1 and ZeRO-2: every rank holds the whole parameters, and a shard of the optimizer states
// and, with ZeRO-2, of the gradients.
//
//     Gpt model(config);
//     ShardedModel zero1 = zero(model, mesh(), {.stage = 1});
//     optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-4});  // of this rank's parts
//
// Parameters lie one behind the other in a few flat buffers, each of which is split into equal
// shards. Outside of calls a parameter is its shard on this rank, a DTensor (FlatShard), which an
// optimizer made before or after updates. In calls of the model it is whole; the other ranks'
// shards are gathered in place before the first call after a step.
//
// A parameter that is a DTensor already (tensor parallelism, see fully_shard.h) is split into runs
// of this rank's part; in calls it is that part. UnsupportedError if parts along the other axes
// differ in size, and for one that is frozen or whose gradient is a summand there.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <tessera/distributed/backward/buckets.h>
#include <tessera/distributed/fully_shard/offload_policy.h>
#include <tessera/distributed/fully_shard/sharded_model.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/nn/module.h>

namespace tessera::distributed {

struct ZeroOptions {
  // 1: whole gradients add up and are reduced once a step. 2: every backward reduces them, and a
  // rank keeps only its shard.
  int stage = 1;
  int64_t first_bucket_bytes = kFirstBucketBytes;
  int64_t bucket_bytes = kBucketBytes;  // minimum size of a flat buffer
  std::optional<DType> gradient_dtype = {};
  GradientAverage average = GradientAverage::kRanks;
  bool init_sync = true;
  bool broadcast_buffers = true;  // as ReplicateOptions
  std::vector<std::string> ignored = {};
  // kOptimizer: the shards that the optimizer updates, their gradients and states are in host
  // memory, for a GPU (ZeRO-Offload). ConfigError for kParameters, since ops read whole parameters
  // on the device. UnsupportedError for parameters on the CPU.
  OffloadPolicy offload_policy = OffloadPolicy::kNone;
};
// `mesh` has one axis. Collective. Throws ConfigError for another stage, for a module inside that
// is sharded already, and as fully_shard() does; DistributedError on every rank if models or
// options differ among the ranks.
ShardedModel zero(nn::ModuleBase& model, Mesh& mesh, const ZeroOptions& options = {});

}  // namespace tessera::distributed
