// Predicts memory and traffic of a training on many ranks without running it (`tessera plan`).
//
//     const TrainingPlan plan = plan_training(
//         [] {
//           auto model = std::make_shared<Gpt>(config);  // without memory
//           const Tensor tokens = zeros({4, 1024}, {.dtype = kI64, .device = kMeta});
//           return PlannedTraining{model, [=] { return (*model)(tokens, tokens).loss; }};
//         },
//         {.settings = resolve(), .ranks = 1024});
//     std::cout << plan.describe();
//
// [Note: how a plan comes about] One rank of the training runs on kMeta: the modes of
// distributed/fully_shard shard, gather and reduce its model over a transport with simulated ranks
// (transport/backend_fake.cpp). core/memory/meta_memory.h counts by category what it would request
// from the allocator, and its trace has its calls. No separate formulas are used, so a plan cannot
// diverge from trainings.
//
// [Note: other ranks] All ranks make the same calls. Padding makes their parts of parameters and
// gradients equal, but optimizers keep states only of real elements. So each rank's parts are taken
// from the placements of the parameters, and the optimizer says what it keeps of each element.
// States are the same from the first step on, so peaks differ by as much as states do. With Muon,
// ranks also differ in the matrices that they own while a step makes them orthogonal
// (distributed/mesh/matrix_exchange.h): peaks and records are those of the rank that runs. Rank 0,
// the default, has the largest.
//
// Not included: what happens before the first step (a model that is made whole before sharding),
// loaders (with tp_size the ranks compare their places in them, 24 bytes a micro-batch),
// checkpoints, clipping (one all-reduce of 544 bytes a step), workspace of kernels (but for
// the logits that a loss computes and drops), and
// the allocator's rounding. Activations are what ops save on a CPU, where fewer ops are fused than
// on a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/accelerate/plan/network.h>
#include <tessera/accelerate/settings/config.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/distributed/transport/trace.h>
#include <tessera/nn/module.h>
#include <tessera/optim/optimizer.h>

namespace tessera::accelerate {

struct PlannedTraining {
  std::shared_ptr<nn::ModuleBase> model;
  std::function<Tensor()> loss;  // the loss of a micro-batch, whose tensors are on kMeta
};

// One module, or several that share the parameters.
using Optimizers = std::vector<std::unique_ptr<optim::Optimizer>>;
using OptimizerFactory = std::function<Optimizers(const NamedTensors& parameters)>;
struct NamedOptimizerOptions {
  double momentum = 0;                        // for sgd
  std::vector<std::string> not_by_muon = {};  // see optim::split_for_muon()
};
// "adamw", "adam", "sgd", "lion", or "muon" (matrices by Muon, the rest by AdamW). ConfigError for
// another name.
OptimizerFactory optimizer_named(const std::string& name,
                                 const NamedOptimizerOptions& options = {});

struct PlanOptions {
  // Sharding with its units and buckets, precision and accumulation, as prepare() reads them.
  Settings settings = {};
  int ranks = 1;
  OptimizerFactory optimizer = optimizer_named("adamw");
  std::optional<Network> network = {};
  int rank = 0;   // the rank that runs
  int steps = 3;  // the plan describes the last step, because buckets and casts settle before
};

// Bytes by category; see MemoryCategory.
struct PlannedBytes {
  std::array<int64_t, kNumMemoryCategories> by_category{};
  int64_t operator[](MemoryCategory category) const {
    return by_category[static_cast<size_t>(category)];
  }
  int64_t& operator[](MemoryCategory category) {
    return by_category[static_cast<size_t>(category)];
  }
  int64_t total() const;
  friend bool operator==(const PlannedBytes&, const PlannedBytes&) = default;
};

struct RankPlan {
  PlannedBytes persistent;  // after a step, before gradients are cleared
  int64_t peak = 0;         // of all categories together
  PlannedBytes peaks;       // of each category, at its own time
  friend bool operator==(const RankPlan&, const RankPlan&) = default;
};

// Equal calls of one step.
struct PlannedCollective {
  distributed::Operation operation{};
  distributed::Channel channel{};
  std::string phase;  // "forward", "backward"
  std::string axis;   // mesh axis
  int64_t count = 0;
  int64_t bytes = 0;      // of tensors, as the trace counts: inputs of gathers, outputs of scatters
  double wire_bytes = 0;  // sent by the rank
  double seconds = 0;     // see network.h; 0 without one
};
// `axes` are the mesh axes by the names of their groups; other groups have none.
std::vector<PlannedCollective> add_up(const std::vector<distributed::CommRecord>& records,
                                      const std::map<std::string, std::string>& axes = {},
                                      const std::optional<Network>& network = {});

// Bytes for people: "1.50 GiB".
std::string text_of_bytes(double bytes);

struct TrainingPlan {
  std::string mode;  // value of the setting: "fsdp"
  std::string mesh;  // "mesh(dp_replicate=8, dp_shard=1024)"
  std::string precision;
  int64_t accumulation = 1;
  int64_t parameters = 0;       // elements
  std::vector<RankPlan> ranks;  // one per rank of the world
  std::vector<PlannedCollective> collectives;
  std::vector<distributed::CommRecord> records;  // of one step, in their order
  double flops = 0;  // of a rank's step: products, convolutions, attention, recomputation
  std::optional<Network> network;
  std::string units;   // the engine's description of its units
  std::string layers;  // with tp: what the rank has of each, distributed::describe_layers()

  double communication_seconds() const;
  // Seconds of a step's flops at the network's flops per second; 0 if that is not known.
  double compute_seconds() const;
  const RankPlan& largest() const;
  double mean_persistent() const;

  // A table for people. It compares the largest rank with the `memory` of a device in bytes, unless
  // 0.
  std::string describe(int64_t memory = 0) const;
  // {parameters, ranks: [{persistent, peak}], collectives: [{op, phase, count, bytes}],
  // step_seconds}; see docs/commands.md.
  std::string to_json() const;
};

// `make` is called once, and its modules make parameters without memory. Throws ConfigError for
// settings that the engine refuses, ValueError for ranks below 1.
TrainingPlan plan_training(const std::function<PlannedTraining()>& make,
                           const PlanOptions& options);

}  // namespace tessera::accelerate
