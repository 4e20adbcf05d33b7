// ZeRO-1 and ZeRO-2: every rank holds the whole parameters, and its part of the optimizer states
// and, with ZeRO-2, of the gradients.
//
//     Gpt model(config);
//     ShardedModel zero1 = zero(model, mesh(), {.stage = 1});
//     optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-4});  // of this rank's parts
//
// Parameters lie one behind the other in a few pieces of memory, each of which is cut into equal
// parts. Outside of calls a parameter is its part on this rank, a DTensor (FlatShard): what an
// optimizer made before or after updates. In calls of the model it is whole; the parts of the other
// ranks are gathered in place before the first call after a step.
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
  // 1: gradients add up in whole and are reduced once a step. 2: every backward reduces them, and a
  // rank keeps its part alone.
  int stage = 1;
  int64_t first_bucket_bytes = kFirstBucketBytes;
  int64_t bucket_bytes = kBucketBytes;  // of a piece of memory, at least
  std::optional<DType> gradient_dtype = {};
  GradientAverage average = GradientAverage::kRanks;
  bool init_sync = true;
  bool broadcast_buffers = true;  // as ReplicateOptions
  std::vector<std::string> ignored = {};
  // kOptimizer: the parts that the optimizer works on, their gradients and states lie in memory of
  // the host, for a GPU (ZeRO-Offload). ConfigError for kParameters: whole parameters are of use
  // where ops read them. UnsupportedError for parameters on the CPU.
  OffloadPolicy offload_policy = OffloadPolicy::kNone;
};
// `mesh`: one axis. Collective. Throws ConfigError for another stage, where a module inside is
// sharded already and as fully_shard() does; DistributedError on every rank where models or options
// differ among the ranks.
ShardedModel zero(nn::ModuleBase& model, Mesh& mesh, const ZeroOptions& options = {});

}  // namespace tessera::distributed
