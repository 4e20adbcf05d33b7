// Training of adapters by ranks, in any sharded mode, whose values are compared to the bit.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include <tessera/nn/lora/lora.h>
#include <tessera/optim/optimizers.h>

#include "distributed/sharded_fixture.h"

namespace tessera::nn {

// Rows that no block of a quantized weight divides, so that blocks reach over the ends of rows and
// of ranks' parts.
struct Adapted : Module<Adapted> {
  Adapted()
      : first(add<Linear>("first", 8, 33)),
        second(add<Linear>("second", 33, 16)),
        third(add<Linear>("third", 16, 12)) {}
  Tensor forward(const Tensor& x) { return third(relu(second(relu(first(x))))); }
  Linear& first;
  Linear& second;
  Linear& third;
};

// Whole values after three steps. `prepare` adds the adapters, before the model is sharded.
inline std::map<std::string, std::vector<float>> trained_by_ranks(
    int ranks, distributed::Way way, const std::function<void(Adapted&)>& prepare) {
  std::map<std::string, std::vector<float>> result;
  distributed::compared_ranks(ranks, [&](int rank) {
    manual_seed(3);
    Adapted model;
    prepare(model);
    distributed::Mesh mesh(distributed::world());
    const auto parallel = distributed::shard_in(way, model, mesh);
    optim::AdamW optimizer(trainable_parameters(model), {.lr = 1e-2, .weight_decay = 0.1});
    for (int step = 0; step < 3; ++step) {
      parallel->set_plan(distributed::StepPlan::of(0, 1));
      distributed::loss_of(model, step * ranks + rank).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto values = distributed::whole_values(model);
    if (rank == 0) result = values;
  });
  return result;
}

}  // namespace tessera::nn
