// The Accelerator's settings offload_parameters and offload_optimizer on emulated GPUs: the same
// loop, the bits of a training without them, and checkpoints that either goes on from.
#include <array>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/settings/config.h>
#include <tessera/core/cuda/device_memory.h>
#include <tessera/core/cuda/emulation/gemm.h>
#include <tessera/core/factory/pinned.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/autocast.h>
#include <tessera/precision/fp8_linear.h>

#include "gemm_model.h"
#include "nccl_fixture.h"
#include "sharded_blocks.h"

namespace tessera::distributed::test_cuda_accelerator_offload {
namespace {

using accelerate::Sharding;
using CudaAcceleratorOffload = CudaNccl;

struct Rows : data::Dataset<std::array<Tensor, 2>> {
  Rows(int64_t count, int64_t width) : count(count), width(width) {}
  int64_t size() const override { return count; }
  std::array<Tensor, 2> get(int64_t index) const override {
    return {randn({5}, {}, RandomStream{3, static_cast<uint64_t>(index)}),
            randn({width}, {}, RandomStream{4, static_cast<uint64_t>(index)})};
  }
  int64_t count, width;
};

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> values;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

struct Case {
  Sharding sharding = Sharding::kFsdp;
  std::optional<bool> parameters = {}, optimizer = {};
  std::optional<Precision> precision = {};
  std::optional<PrecisionPolicy> policy = {};
  int64_t micro = 1;
  std::optional<precision::Fp8Scaling> fp8 = {};  // with sizes that run in it
  std::string load = {}, save = {};               // before and after the epoch
};

// An epoch, of rank 0.
Outcome train(int ranks, const Case& one) {
  Outcome outcome;
  on_gpus(ranks, [&](int rank) {
    manual_seed(5);
    const int width = one.fp8 ? 32 : 9;
    const int64_t batch_size = one.fp8 ? 16 : 2;
    Blocks model(width, 2);
    Accelerator accelerator(
        {.mixed_precision = one.fp8 ? Precision::kFP8 : one.precision,
         .precision_policy = one.policy,
         .gradient_accumulation_steps = one.micro,
         .seed = 5,
         .sharding = one.sharding,
         .offload_parameters = one.parameters,
         .offload_optimizer = one.optimizer,
         .loss_scale = {.init_scale = 256},
         .fp8 = {.recipe = one.fp8, .filter = precision::Fp8Filter::kAll, .strict = true},
         .config_file = ""});
    ASSERT_EQ(accelerator.device(), cuda(rank));
    const Rows rows(6 * batch_size, width);
    data::DataLoader loader(rows, {.batch_size = batch_size, .shuffle = true});
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2, .weight_decay = 0.1});
    accelerator.prepare(model, optimizer, loader);
    const bool offloads = one.parameters.value_or(false) || one.optimizer.value_or(false);
    for (const Tensor& parameter : model.parameters()) {
      EXPECT_EQ(parameter.device().is_cpu(), offloads);
      EXPECT_TRUE(!offloads || parameter.numel() == 0 || is_pinned(parameter));
    }
    EXPECT_EQ(contains(accelerator.describe(), "optimizer states on the host"), offloads);
    if (!one.load.empty()) accelerator.load_state(one.load);
    for (const auto& batch : loader) {
      const auto micro = accelerator.accumulate(model);
      const Tensor loss = mse_loss(model(batch[0]), batch[1]);
      accelerator.backward(loss);
      const Tensor norm = accelerator.clip_grad_norm(model.parameters(), 0.5);
      optimizer.step();
      optimizer.zero_grad();
      if (rank == 0) outcome.losses.push_back(loss.to(kCpu).item());
      if (rank == 0 && micro.sync_gradients()) outcome.norms.push_back(norm.to(kCpu).item());
    }
    if (!one.save.empty()) accelerator.save_state(one.save);
    const NoGradGuard no_grad;
    if (one.fp8) {
      const precision::Fp8Layers& layers = *precision::fp8_of(model);
      const precision::Fp8Report report = layers.report();
      EXPECT_GT(report.fp8_calls(), 0);
      EXPECT_EQ(report.fallbacks(), 0);
      for (const auto& [name, value] : layers.state_dict()) {
        if (rank == 0) outcome.values.push_back(values(value));
      }
    }
    for (const Tensor& parameter : model.parameters()) {
      const Tensor whole = is_dtensor(parameter) ? full_tensor(parameter) : parameter;
      if (rank == 0) outcome.values.push_back(values(whole.to(kF32)));
    }
  });
  return outcome;
}

void expect_same(const Outcome& outcome, const Outcome& expected) {
  EXPECT_EQ(outcome.losses, expected.losses);
  EXPECT_EQ(outcome.norms, expected.norms);
  EXPECT_TRUE(outcome == expected);
}

TEST_F(CudaAcceleratorOffload, EveryModeAndPrecisionHasTheBitsOfTheDevice) {
  const Precision bf16 = Precision::kBF16;
  const PrecisionPolicy autocast = PrecisionPolicy::kAutocast, pure = PrecisionPolicy::kPure;
  for (const Case& device : {
           Case{.sharding = Sharding::kFsdp, .micro = 2},
           Case{.sharding = Sharding::kFsdp, .precision = bf16, .policy = autocast},
           Case{.sharding = Sharding::kFsdp, .precision = bf16, .policy = pure},
           Case{.sharding = Sharding::kFsdp, .precision = Precision::kFP16, .policy = autocast},
           Case{.sharding = Sharding::kZero1, .precision = bf16, .policy = autocast},
           Case{.sharding = Sharding::kZero2, .precision = bf16, .policy = pure, .micro = 2},
       }) {
    SCOPED_TRACE(testing::Message()
                 << "mode " << static_cast<int>(device.sharding) << ", precision "
                 << static_cast<int>(device.precision.value_or(Precision::kNo)) << ", policy "
                 << static_cast<int>(device.policy.value_or(autocast)));
    const Outcome expected = train(2, device);
    Case offloaded = device;
    offloaded.optimizer = true;
    expect_same(train(2, offloaded), expected);
    if (device.sharding != Sharding::kFsdp) continue;
    offloaded.optimizer = {};
    offloaded.parameters = true;
    expect_same(train(2, offloaded), expected);
  }
}

// Weights that are brought up whole, and bytes that travel between devices.
TEST_F(CudaAcceleratorOffload, Fp8HasTheBitsOfTheDevice) {
  using enum precision::Fp8Scaling;
  gpu::emulation::set_gemm_model(gpu::run_by_model);
  for (const Case& device :
       {Case{.micro = 2, .fp8 = kTensorwise}, Case{.fp8 = kDelayed}, Case{.fp8 = kRowwise},
        Case{.fp8 = kBlockwise}, Case{.sharding = Sharding::kZero2, .micro = 2, .fp8 = kDelayed}}) {
    SCOPED_TRACE(precision::name_of(*device.fp8));
    const Outcome expected = train(2, device);
    Case offloaded = device;
    offloaded.optimizer = true;
    expect_same(train(2, offloaded), expected);
    if (device.sharding != Sharding::kFsdp) continue;
    offloaded.optimizer = {};
    offloaded.parameters = true;
    expect_same(train(2, offloaded), expected);
  }
  gpu::emulation::set_gemm_model(nullptr);
}

TEST_F(CudaAcceleratorOffload, OneGpuHasItToo) {
  const Outcome expected = train(1, {.sharding = Sharding::kDdp});
  expect_same(train(1, {.sharding = Sharding::kZero1, .optimizer = true}), expected);
  expect_same(train(1, {.parameters = true}), expected);
}

TEST_F(CudaAcceleratorOffload, ACheckpointGoesOnWithAndWithout) {
  const std::string device = testing::TempDir() + "offload_device";
  const std::string host = testing::TempDir() + "offload_host";
  for (const std::string& folder : {device, host}) std::filesystem::remove_all(folder);
  const Precision bf16 = Precision::kBF16;
  const PrecisionPolicy pure = PrecisionPolicy::kPure;  // with masters
  train(2, {.precision = bf16, .policy = pure, .save = device});
  train(2, {.parameters = true, .precision = bf16, .policy = pure, .save = host});
  const Outcome expected = train(2, {.precision = bf16, .policy = pure, .load = device});
  for (const std::string& folder : {device, host}) {
    for (const bool parameters : {false, true}) {
      expect_same(
          train(2, {.parameters = parameters, .precision = bf16, .policy = pure, .load = folder}),
          expected);
    }
  }
}

}  // namespace
}  // namespace tessera::distributed::test_cuda_accelerator_offload
