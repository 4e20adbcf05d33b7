// What the tests of sharded training share: a training in any mode, whose parameters, losses and
// norms are compared to the bit.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/fully_shard/zero.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/optim/clip.h>

#include "distributed/replicate_fixture.h"

namespace tessera::distributed {

enum class Way { kReplicate, kZero1, kZero2, kFully, kFullyKept, kZero3 };
inline const char* name_of(Way way) {
  static const char* const names[] = {"ddp", "zero1", "zero2", "fsdp", "fsdp kept", "zero3"};
  return names[static_cast<int>(way)];
}

// Rows that do not divide by the ranks, fewer rows than ranks, and weights that are used twice.
struct Odd : nn::Module<Odd> {
  Odd()
      : first(add<nn::Linear>("first", 8, 33)),
        narrow(add<nn::Linear>("narrow", 33, 1)),
        second(add<nn::Linear>("second", 33, 33)),
        third(add<nn::Linear>("third", 33, 7)),
        scale(parameter("scale", tessera::ones({33}, {.device = device()}))) {}
  static Device device() { return nn::ParameterDefaultsGuard::current().device; }
  Tensor forward(const Tensor& x) {
    Tensor h = relu(first(x)) * scale;
    if (in_the_middle) h = in_the_middle(h);
    return third(second(relu(second(h))) + narrow(h));
  }
  std::function<Tensor(const Tensor&)> in_the_middle;
  nn::Linear& first;
  nn::Linear& narrow;
  nn::Linear& second;
  nn::Linear& third;
  const Tensor& scale;
};

// Values of whole parameters by name, of sharded ones gathered. Collective.
inline std::map<std::string, std::vector<float>> whole_values(const nn::ModuleBase& model) {
  std::map<std::string, std::vector<float>> values;
  const NoGradGuard no_grad;
  for (const auto& [name, tensor] : model.named_parameters()) {
    values[name] = (is_dtensor(tensor) ? full_tensor(tensor) : tensor).to_vector<float>();
  }
  return values;
}
inline std::map<std::string, std::vector<float>> whole_gradients(const nn::ModuleBase& model) {
  std::map<std::string, std::vector<float>> values;
  const NoGradGuard no_grad;
  for (const auto& [name, tensor] : model.named_parameters()) {
    const Tensor grad = tensor.grad();
    if (!grad.defined()) continue;
    values[name] = (is_dtensor(grad) ? full_tensor(grad) : grad).to_vector<float>();
  }
  return values;
}

struct ShardIn {
  GradientAverage average = GradientAverage::kRanks;
  int64_t bucket_bytes = 6000;
  MixedPrecisionPolicy precision = {};
  ShardPlacement placement = {};
  std::optional<DType> gradient_dtype = {};
};

// The model's direct children are units, and so is what is left.
template <class Model>
std::unique_ptr<DataParallelModel> shard_in(Way way, Model& model, Mesh& mesh,
                                            const ShardIn& options = {}) {
  switch (way) {
    case Way::kReplicate: {
      ReplicateOptions buckets = small_buckets();
      buckets.average = options.average;
      buckets.bucket_bytes = options.bucket_bytes;
      buckets.gradient_dtype = options.gradient_dtype;
      return std::make_unique<Replica>(replicate(model, mesh, buckets));
    }
    case Way::kZero1:
    case Way::kZero2:
      return std::make_unique<ShardedModel>(zero(model, mesh,
                                                 {.stage = way == Way::kZero1 ? 1 : 2,
                                                  .first_bucket_bytes = options.bucket_bytes / 6,
                                                  .bucket_bytes = options.bucket_bytes,
                                                  .gradient_dtype = options.gradient_dtype,
                                                  .average = options.average}));
    case Way::kFully:
    case Way::kFullyKept:
    case Way::kZero3:
      break;
  }
  std::optional<bool> reshard;
  if (way == Way::kFullyKept) reshard = false;
  if (way == Way::kZero3) reshard = true;
  const FullyShardOptions unit{.reshard_after_forward = reshard,
                               .mixed_precision = options.precision,
                               .gradient_dtype = options.gradient_dtype,
                               .shard_placement = options.placement,
                               .average = options.average};
  for (const auto& [name, child] : model.named_children()) {
    if (!child->parameters().empty()) fully_shard(*child, mesh, unit);
  }
  fully_shard(model, mesh, unit);
  return std::make_unique<ShardedModel>(sharded_model(model));
}

// Gathers and reductions of sharded parameters in the order of issue: "G unit h.0", "R unit h.0";
// "A unit h.0" along a replicated axis.
inline std::vector<std::string> unit_events(const std::vector<CommRecord>& records) {
  std::vector<std::string> events;
  for (const CommRecord& record : records) {
    const bool parameters = record.channel == Channel::kParameter;
    if (parameters && record.operation == Operation::kAllGather)
      events.push_back("G " + record.tag);
    if (record.channel != Channel::kGradient) continue;
    if (record.operation == Operation::kReduceScatter) events.push_back("R " + record.tag);
    if (record.operation == Operation::kAllReduce) events.push_back("A " + record.tag);
  }
  return events;
}

}  // namespace tessera::distributed
