// Settings of the facade: each reaches what it is for, from the program or from the environment.
// ctest labels: threads
#include "accelerate/accelerator_fixture.h"

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include <tessera/core/context.h>
#include <tessera/core/error.h>
#include <tessera/core/gemm_options.h>

namespace tessera::test_accelerator_settings {
namespace {

// KW-1
TEST(Settings, ReachWhatTheyAreFor) {
  on_ranks(2, [](int) {
    Accelerator accelerator({.mixed_precision = Precision::kFP16,
                             .ddp = {.bucket_cap_mb = 15},
                             .loss_scale = {.init_scale = 1024, .growth_factor = 4}});
    EXPECT_EQ(accelerator.settings().scaler_growth_factor.value, 4);
    EXPECT_EQ(accelerator.settings().scaler_backoff_factor.value, 0.5);  // not given: the default
    EXPECT_EQ(accelerator.loss_scale(), 1024);
    EXPECT_EQ(accelerator.settings().ddp_bucket_cap_mb.value, 15);
    Net net;
    accelerator.prepare(net);
    const std::string text = accelerator.describe();
    for (const char* part : {"rank ", "ddp_bucket_cap_mb = 15  (code)",
                             "scaler_backoff_factor = 0.5", "model Net", "bucket 0"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
    }
  });
}

TEST(Settings, AllowTf32IsThatOfTheContextWhereSomebodySaysIt) {
  Context context;
  const ContextGuard guard(context);
  const bool& tf32 = Context::current().slot<GemmOptions>().tf32;
  const Accelerator silent;
  EXPECT_FALSE(tf32);
  const Accelerator fast({.allow_tf32 = true});
  EXPECT_TRUE(tf32);
  const Accelerator silent_again;
  EXPECT_TRUE(tf32);
  const Accelerator exact({.allow_tf32 = false});
  EXPECT_FALSE(tf32);
}

// Their own values differ by rank and shape; only `debug` sees that before they are mixed.
TEST(Settings, DebugComparesShapesInEveryOperationOfTheFacade) {
  on_ranks(2, [](int rank) {
    const Tensor value = zeros(rank == 0 ? Shape{2, 3} : Shape{3, 2});
    const Accelerator plain;
    EXPECT_EQ(plain.gather(value).size(0), rank == 0 ? 4 : 6);
    const Accelerator accelerator({.debug = true});
    using accelerate::OperationMismatch;
    EXPECT_THROW(accelerator.gather(value), OperationMismatch);
    EXPECT_THROW(accelerator.reduce(value), OperationMismatch);
    EXPECT_THROW(accelerator.broadcast(value), OperationMismatch);
  });
  ::setenv("ACCELERATE_DEBUG_MODE", "1", 1);
  EXPECT_TRUE(Accelerator().settings().debug);
  ::unsetenv("ACCELERATE_DEBUG_MODE");
}

// SCR-8
TEST(Settings, TheDataSeedIsThatOfLoadersThatShuffle) {
  const auto order = [](std::optional<int64_t> data_seed, bool own_sampler = false) {
    const Line line(32);
    Accelerator accelerator({.data_seed = data_seed});
    const data::DataLoaderOptions options{.batch_size = 8, .shuffle = !own_sampler, .seed = 3};
    data::DataLoader<std::array<Tensor, 2>> loader =
        own_sampler ? data::DataLoader<std::array<Tensor, 2>>(
                          {std::shared_ptr<void>(), &line},
                          std::make_shared<data::SequentialSampler>(32), options)
                    : data::DataLoader<std::array<Tensor, 2>>(line, options);
    accelerator.prepare(loader);
    accelerator.prepare(loader);
    std::vector<std::vector<float>> batches;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& [x, y] : loader) batches.push_back(x.to_vector<float>());
    }
    return batches;
  };
  EXPECT_EQ(order(42), order(42));
  EXPECT_NE(order(42), order(43));
  EXPECT_EQ(order(3), order({}));
  EXPECT_NE(order(42), order({}));
  EXPECT_EQ(order(42, true), order({}, true));
}

TEST(Settings, TheDeviceIsTheCpuWhereThereIsNoGpu) {
  EXPECT_EQ(Accelerator().device(), kCpu);
  EXPECT_EQ(Accelerator({.cpu = true}).device(), kCpu);
  EXPECT_EQ(Accelerator({.device = "cpu"}).device(), kCpu);
  EXPECT_THROW(Accelerator({.device = "cuda"}).device(), DeviceError);
  EXPECT_THROW(Accelerator({.device = "tpu"}).device(), ConfigError);
  EXPECT_THROW(Accelerator({.cpu = true, .device = "cuda"}), ConfigError);
}

// Trap 3: the environment beats the program.
TEST(Settings, TheProgramBeatsTheEnvironment) {
  ::setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8", 1);
  EXPECT_EQ(Accelerator({.gradient_accumulation_steps = 2}).gradient_accumulation_steps(), 2);
  const Accelerator accelerator;
  EXPECT_EQ(accelerator.gradient_accumulation_steps(), 8);
  EXPECT_NE(accelerator.describe().find("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
            std::string::npos);
  ::unsetenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS");
}

// HOOK-1
TEST(Settings, CompressedGradientsTrainAsPlainOnesDo) {
  using accelerate::CommHook;
  using accelerate::CommWrapper;
  std::vector<DistributedDataParallelOptions> ways{{.comm_hook = CommHook::kFP16},
                                                   {.comm_hook = CommHook::kBF16}};
  for (const CommHook hook : {CommHook::kPowerSgd, CommHook::kBatchedPowerSgd}) {
    for (const auto wrapper : {CommWrapper::kNone, CommWrapper::kFP16, CommWrapper::kBF16}) {
      // Rank 1 of a whole bucket is too little for a few steps.
      ways.push_back({.comm_hook = hook,
                      .comm_wrapper = wrapper,
                      .power_sgd_rank = hook == CommHook::kPowerSgd ? 1 : 64,
                      .power_sgd_start_step = 0});
    }
  }
  for (const DistributedDataParallelOptions& way : ways) {
    on_ranks(2, [&](int) {
      const auto run = [&](const DistributedDataParallelOptions& ddp) {
        manual_seed(4);
        const Line line(64);
        Accelerator accelerator({.ddp = ddp});
        Net net;
        net.eval();  // without dropout
        optim::SGD optimizer(net.named_parameters(), {.lr = 0.01});
        data::DataLoader loader(line, {.batch_size = 4});
        accelerator.prepare(net, optimizer, loader);
        for (auto& [x, y] : loader) {
          accelerator.backward(squared_error(net(x), y));
          optimizer.step(), optimizer.zero_grad();
        }
        return values_of(net);
      };
      expect_near(run(way), run({}), 1e-2);
    });
  }
}

}  // namespace
}  // namespace tessera::test_accelerator_settings
