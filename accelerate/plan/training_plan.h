// Predicts memory and traffic of a training on many ranks without running it, for `tessera plan`.
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
// [Note: how a plan comes about] One rank of the training runs: the modes of
// distributed/fully_shard shard, gather and reduce a model on kMeta, over a transport with
// simulated ranks (transport/backend_fake.cpp). What it would request from the allocator is counted
// by category (core/memory/meta_memory.h), and its calls are in its trace. No separate formulas are
// used, so a plan cannot diverge from trainings.
//
// [Note: other ranks] All ranks call the same. What they hold differs in one thing: paddings make
// parts of parameters and gradients equal, and optimizers keep states of what is there alone. So
// the parts of every rank are taken from the placements of the parameters, and the optimizer says
// what it keeps of each element; its states are the same from the first step on, so that peaks
// differ by what they differ. Under Muon ranks differ in the matrices, too, that they own while a
// step makes them orthogonal (distributed/mesh/matrix_exchange.h): peaks and records are those of
// the rank that runs. The first, which runs by default, has the largest.
//
// Not included: what happens before the first step (a model that is made whole before sharding),
// loaders, checkpoints, clipping (one all-reduce of 544 bytes a step), workspace of kernels, the
// allocator's rounding. Activations are those of the model on kMeta: what its ops save on a CPU,
// where fewer ops are fused than on a GPU.
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
  std::function<Tensor()> loss;  // of a micro-batch, whose tensors are on kMeta
};

// One, or several that share the parameters.
using Optimizers = std::vector<std::unique_ptr<optim::Optimizer>>;
using OptimizerFactory = std::function<Optimizers(const NamedTensors& parameters)>;
struct NamedOptimizerOptions {
  double momentum = 0;                        // of sgd
  std::vector<std::string> not_by_muon = {};  // see optim::split_for_muon()
};
// "adamw", "adam", "sgd", "lion", or "muon": matrices by Muon, all else by AdamW. ConfigError for
// another name.
OptimizerFactory optimizer_named(const std::string& name,
                                 const NamedOptimizerOptions& options = {});

struct PlanOptions {
  // The training: sharding, its units and buckets, precision, accumulation, as prepare() reads
  // them.
  Settings settings = {};
  int ranks = 1;
  OptimizerFactory optimizer = optimizer_named("adamw");
  std::optional<Network> network = {};
  int rank = 0;   // that runs
  int steps = 3;  // the last one of which is the one that is told; buckets and casts settle before
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
  PlannedBytes persistent;  // when a step has been made and gradients are not cleared yet
  int64_t peak = 0;         // of everything together
  PlannedBytes peaks;       // of each category, whenever it came
  friend bool operator==(const RankPlan&, const RankPlan&) = default;
};

// Equal calls of a step.
struct PlannedCollective {
  distributed::Operation operation{};
  distributed::Channel channel{};
  std::string phase;  // "forward", "backward"
  std::string axis;   // of the mesh
  int64_t count = 0;
  int64_t bytes = 0;  // of tensors, as the trace counts them: gathers by input, scatters by output
  double wire_bytes = 0;  // that the rank sends
  double seconds = 0;     // see network.h; 0 without one
};
// `axes`: of the mesh, by the names of their groups; others have none.
std::vector<PlannedCollective> add_up(const std::vector<distributed::CommRecord>& records,
                                      const std::map<std::string, std::string>& axes = {},
                                      const std::optional<Network>& network = {});

// "1.50 GiB": of bytes, for people.
std::string text_of_bytes(double bytes);

struct TrainingPlan {
  std::string mode;  // "fsdp", as the setting says it
  std::string mesh;  // "mesh(dp_replicate=8, dp_shard=1024)"
  std::string precision;
  int64_t accumulation = 1;
  int64_t parameters = 0;       // elements
  std::vector<RankPlan> ranks;  // of the world
  std::vector<PlannedCollective> collectives;
  std::vector<distributed::CommRecord> records;  // of one step, in their order
  double flops = 0;  // of one step of a rank: products, convolutions, attention, recomputation too
  std::optional<Network> network;
  std::string units;  // what the engine says that it made

  double communication_seconds() const;
  // By the device, from the network's flops; 0 if they are not known.
  double compute_seconds() const;
  const RankPlan& largest() const;
  double mean_persistent() const;

  // A table for people. `memory`: bytes of a device, with which the largest rank is compared; 0:
  // none.
  std::string describe(int64_t memory = 0) const;
  // {parameters, ranks: [{persistent, peak}], collectives: [{op, phase, count, bytes}],
  // step_seconds}: docs/commands.md.
  std::string to_json() const;
};

// `make` is called once, where modules make their parameters without memory. Throws what the engine
// throws for settings that cannot be (ConfigError), ValueError for ranks below 1.
TrainingPlan plan_training(const std::function<PlannedTraining()>& make,
                           const PlanOptions& options);

}  // namespace tessera::accelerate
