// Ranks as threads of this process: for tests, and for models that share one address space.
//
//     run_ranks(4, [](int rank) { Tensor x = full({8}, rank); all_reduce(x); });
#pragma once

#include <functional>
#include <memory>

#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

struct RunRanksOptions {
  int threads = 1;              // for compute, of each rank
  double timeout_seconds = 60;  // of collectives
  // A GPU that all ranks share, with a stream each: groups then carry its tensors too, with the
  // sums of the CPU. Ranks are tried so where there is one card; each has its own parameters.
  Device device = kCpu;
  // Replaces the world's backend on each rank.
  std::function<std::shared_ptr<Backend>(std::shared_ptr<Backend>)> decorate = {};
};
// Runs fn(rank) on `size` threads, each with its own Context, and a world group and MemoryStore of
// its own job. If ranks throw, the others' collectives raise, and the first exception is rethrown,
// with its rank in front.
void run_ranks(int size, const std::function<void(int rank)>& fn,
               const RunRanksOptions& options = {});

}  // namespace tessera::distributed
