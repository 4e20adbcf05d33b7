// fp8 on several GPUs: whole parameters, parts that are gathered, copies that are let go between
// forward and backward, all with the same bits.
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/emulation/gemm.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/fully_shard/zero.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/autocast.h>
#include <tessera/precision/fp8_linear.h>

#include "gemm_model.h"
#include "nccl_fixture.h"

namespace tessera::distributed::test_cuda_fp8_sharding {
namespace {

using precision::Fp8Recipe;
using precision::Fp8Scaling;

constexpr int64_t kWidth = 32;
constexpr int kSteps = 3;

struct Layer : nn::Module<Layer> {
  Layer()
      : norm(add<nn::LayerNorm>("norm", kWidth)),
        mix(add<nn::Linear>("mix", kWidth, kWidth)),
        mlp(add<nn::Mlp>("mlp", kWidth, 48)) {}
  Tensor forward(const Tensor& x) { return x + mlp(mix(norm(x))); }
  nn::LayerNorm& norm;
  nn::Linear& mix;
  nn::Mlp& mlp;
};
struct Net : nn::Module<Net> {
  Net() {
    for (int i = 0; i < 2; ++i) layers.push_back(&add<Layer>("h" + std::to_string(i)));
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (Layer* layer : layers) y = (*layer)(y);
    return y.to(kF32);
  }
  std::vector<Layer*> layers;
};

struct Way {
  const char* name;
  bool shards = false, zero = false, keeps = false, recomputes = false;
};

using Outcome = std::map<std::string, std::vector<float>>;

class CudaFp8Sharding : public CudaNccl {
 protected:
  CudaFp8Sharding() { gpu::emulation::set_gemm_model(gpu::run_by_model); }
  ~CudaFp8Sharding() override { gpu::emulation::set_gemm_model(nullptr); }
};

// Weights travel as a byte an element from the second step on, forward and backward.
void expect_bytes(const CommTrace::Scope& scope, Fp8Scaling scaling, const Way& way) {
  constexpr int64_t kWeights = kWidth * kWidth + 2 * kWidth * 48;
  constexpr int64_t kOthers = 4 * 2 * kWidth + 2 * (2 * kWidth + 48);  // f32 and, of biases, bf16
  int64_t units = 0, maxima = 0;
  for (const CommRecord& record : scope.records()) {
    maxima += record.tag == "fp8_maxima";
    if (record.channel != Channel::kParameter) continue;
    ++units;
    EXPECT_EQ(record.dtype, kU8) << record.tag;
    EXPECT_GE(record.bytes, (kWeights + kOthers) / 2) << record.tag;
    EXPECT_LE(record.bytes, (kWeights + kOthers) / 2 + 8 * 16 + 3 * 24) << record.tag;
  }
  EXPECT_EQ(units, way.keeps ? 2 : 4);
  EXPECT_EQ(maxima, scaling == Fp8Scaling::kTensorwise ? 1 : 0);
}

// Of rank 0.
Outcome train(const Way& way, Fp8Scaling scaling) {
  Outcome outcome;
  on_gpus(2, [&](int rank) {
    manual_seed(3);
    Net model;
    model.to(cuda(rank));
    Mesh mesh(world());
    precision::AppliedPolicy applied = precision::apply(
        model, precision::Policy::fp8(
                   {.scaling = scaling, .filter = precision::Fp8Filter::kAll, .strict = true}));
    applied.fp8()->set_reduction([](const Tensor& maxima) {
      world().all_reduce(maxima, ReduceOp::kMax, {.channel = Channel::kControl}).wait();
    });
    std::unique_ptr<DataParallelModel> parallel;
    if (way.shards) {
      FullyShardOptions options;
      options.reshard_after_forward = !way.keeps;
      for (Layer* layer : model.layers) fully_shard(*layer, mesh, options);
      fully_shard(model, mesh, options);
      parallel = std::make_unique<ShardedModel>(sharded_model(model));
    } else {
      parallel = std::make_unique<Replica>(replicate(model, mesh));
    }
    if (way.recomputes) {
      for (Layer* layer : model.layers) layer->checkpoint_calls();
    }
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
    for (int step = 0; step < kSteps; ++step) {
      const RandomStream stream{7, static_cast<uint64_t>(10 * step + rank)};
      const Tensor x = randn({16, kWidth}, {}, stream).to(cuda(rank));
      const CommTrace::Scope scope(*rank_context().trace);
      const Tensor loss = mean(square(model(x) - x));
      loss.backward();
      applied.fp8()->update();
      optimizer.step();
      optimizer.zero_grad();
      if (way.shards && step > 0) expect_bytes(scope, scaling, way);
      if (rank == 0) outcome["losses"].push_back(static_cast<float>(loss.to(kCpu).item()));
    }
    const NoGradGuard no_grad;
    for (const auto& [name, parameter] : model.named_parameters()) {
      const Tensor whole = is_dtensor(parameter) ? full_tensor(parameter) : parameter;
      const Tensor host = whole.to(kCpu);
      if (rank == 0) outcome[name] = host.to_vector<float>();
    }
    const auto report = applied.fp8()->report();
    if (rank == 0) {
      outcome["calls"] = {static_cast<float>(report.fp8_calls())};
      for (const auto& layer : report.layers) {
        const auto& weight = layer.operands[static_cast<size_t>(Fp8Role::kWeight)];
        outcome["weight of " + layer.name] = {
            weight.amax, static_cast<float>(weight.elements), static_cast<float>(weight.saturated),
            static_cast<float>(weight.underflown), static_cast<float>(weight.not_finite)};
      }
      for (const auto& [name, value] : applied.fp8()->state_dict()) {
        outcome["state of " + name] = value.to_vector<float>();
      }
    }
  });
  return outcome;
}

TEST_F(CudaFp8Sharding, EveryWayHasTheBitsOfReplicas) {
  for (const Fp8Scaling scaling : {Fp8Scaling::kTensorwise, Fp8Scaling::kDelayed}) {
    const Outcome expected = train({"replicas"}, scaling);
    EXPECT_EQ(expected.at("calls"), std::vector<float>{3.0f * 2 * kSteps});
    for (const Way& way : {Way{.name = "parts", .shards = true},
                           Way{.name = "parts that are kept", .shards = true, .keeps = true},
                           Way{.name = "recomputed", .shards = true, .recomputes = true}}) {
      SCOPED_TRACE(std::string(way.name) + ", " + std::string(precision::name_of(scaling)));
      const Outcome own = train(way, scaling);
      ASSERT_EQ(own.size(), expected.size());
      for (const auto& [name, values] : expected) EXPECT_EQ(own.at(name), values) << name;
    }
  }
}

}  // namespace
}  // namespace tessera::distributed::test_cuda_fp8_sharding
