// A whole training on the device "cuda" beside the same one on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/random.h>
#include <tessera/nn/materialise.h>
#include <tessera/nn/models/bert.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "on_emulation.h"

namespace tessera::nn::models::test_cuda_training {
namespace {

// Small, as race tracking takes its time; with batch 4, context 64 and width 64 it passes too.
constexpr int64_t kBatch = 2, kContext = 16, kWidth = 32, kVocabulary = 61;

// Steps of a GPT of two layers. A text with some order in it.
std::vector<double> losses_on(const Device& device, DType dtype, int steps, double dropout = 0.1) {
  manual_seed(17);
  Gpt model({.vocab_size = kVocabulary,
             .context = kContext,
             .width = kWidth,
             .layers = 2,
             .heads = 4,
             .dropout = dropout});
  model.to(dtype);
  model.to(device);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-3});
  std::vector<double> losses;
  uint32_t state = 1;
  for (int step = 0; step < steps; ++step) {
    std::vector<int64_t> ids(kBatch * (kContext + 1));
    for (size_t i = 0; i < ids.size(); ++i) {
      state = state * 1664525u + 1013904223u;
      ids[i] = static_cast<int64_t>(i % 5 == 0 ? state >> 27 : (i * i) % kVocabulary);
    }
    const Tensor tokens = tensor(ids, {kBatch, kContext + 1}, kI64).to(device);
    const Tensor loss = model(tokens.narrow(1, 0, kContext), tokens.narrow(1, 1, kContext)).loss;
    loss.backward();
    optim::clip_grad_norm(model.parameters(), 1, {.fold_into = &optimizer});
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item());
  }
  return losses;
}

TEST(CudaTraining, AGptLearnsWhatItLearnsOnTheCpu) {
  const std::vector<double> expected = losses_on(kCpu, kF32, 20),
                            got = losses_on(cuda(0), kF32, 20);
  EXPECT_LT(expected.back(), 0.98 * expected.front());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(got[i], expected[i], 1e-5 * expected[i]) << "step " << i;
  }
}

// Without dropout the products add to the residual stream.
TEST(CudaTraining, AGptWithoutDropoutLearnsWhatItLearnsOnTheCpu) {
  const std::vector<double> expected = losses_on(kCpu, kF32, 10, 0),
                            got = losses_on(cuda(0), kF32, 10, 0);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(got[i], expected[i], 1e-5 * expected[i]) << "step " << i;
  }
}

// With rows enough that a GPU makes query, key and value in one product, and with fewer.
TEST(CudaTraining, ABertLearnsWhatItLearnsOnTheCpu) {
  for (const int64_t context : {64, 24}) {
    const auto losses = [&](const Device& device) {
      manual_seed(17);
      nn::models::Bert model(
          {.vocab_size = kVocabulary, .width = 32, .layers = 2, .heads = 4, .context = context});
      model.to(device);
      optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-3});
      std::vector<int64_t> ids(static_cast<size_t>(kBatch * context));
      for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * i % kVocabulary);
      const Tensor tokens = tensor(ids, {kBatch, context}, kI64).to(device);
      const Tensor labels = tensor({0.0, 1.0}, kI64).to(device);
      const Tensor lengths = tensor({static_cast<double>(context), 11.0}, kI64).to(device);
      std::vector<double> list;
      for (int step = 0; step < 5; ++step) {
        const Tensor loss =
            model(tokens, nn::models::TokenFeatures{.lengths = lengths}, labels).loss;
        loss.backward();
        optim::clip_grad_norm(model.parameters(), 1, {.fold_into = &optimizer});
        optimizer.step();
        optimizer.zero_grad();
        list.push_back(loss.item());
      }
      return list;
    };
    const std::vector<double> expected = losses(kCpu), got = losses(cuda(0));
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(got[i], expected[i], 1e-4 * expected[i]) << "step " << i << " of " << context;
    }
  }
}

// Loss, count of targets, norm and clip factor stay on the device: the host queues step after step.
TEST(CudaTraining, AStepDoesNotWaitForTheDevice) {
  TS_NEEDS_EMULATION("counts waits of the host");
  manual_seed(17);
  Gpt model({.vocab_size = kVocabulary,
             .context = kContext,
             .width = kWidth,
             .layers = 1,
             .heads = 4,
             .dropout = 0.1});
  model.to(cuda(0));
  optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-3});
  std::vector<int64_t> ids(kBatch * (kContext + 1), 5);
  Tensor loss, norm;
  const auto step = [&] {
    const Tensor tokens = tensor(ids, {kBatch, kContext + 1}, kI64).to(cuda(0));
    loss = model(tokens.narrow(1, 0, kContext), tokens.narrow(1, 1, kContext)).loss;
    loss.backward();
    norm = optim::clip_grad_norm(model.parameters(), 0.1, {.fold_into = &optimizer});
    optimizer.step();
    optimizer.zero_grad();
  };
  step();  // makes the optimizer's state
  const double first = loss.item();
  const gpu::HostWaits waits;
  step();
  EXPECT_EQ(waits.count(), 0);
  EXPECT_EQ(norm.device(), cuda(0));
  EXPECT_GT(norm.item(), 0.1);
  EXPECT_LT(loss.item(), first);
}

// Of gradients in both lanes, over several chunks of some tensors: the tree on the device is the
// one that the host walks in multi_tensor_norm(). The 2-norm has the CPU's bits.
TEST(CudaTraining, NormAndClipFactorAreThoseThatTheHostFinds) {
  TensorList here, there;
  for (const int64_t size : {0, 3, 70000, 16384, 33000, 1}) {
    const Tensor x = randn({size}, {.dtype = size == 33000 ? kF64 : size == 3 ? kBF16 : kF32});
    here.push_back(x);
    there.push_back(x.to(cuda(0)));
  }
  for (const double p : {2.0, 1.0, HUGE_VAL}) {
    for (const double max_norm : {0.5, 1e9}) {
      const auto got = kernels::multi_tensor_clip_factor(there, p, 0.25, max_norm).to_vector();
      const auto on_cpu = kernels::multi_tensor_clip_factor(here, p, 0.25, max_norm).to_vector();
      const double norm = kernels::multi_tensor_norm(there, p) * 0.25;
      EXPECT_EQ(got, (std::vector<double>{norm, std::min(1.0, max_norm / (norm + 1e-6)), 0})) << p;
      EXPECT_NEAR(got[0], on_cpu[0], 1e-14 * on_cpu[0]) << p;
      EXPECT_NEAR(got[1], on_cpu[1], 1e-14) << p;
      if (p == 2) {
        EXPECT_EQ(got, on_cpu);
      }
      EXPECT_EQ(on_cpu[2], 0) << p;
    }
  }
  EXPECT_EQ(kernels::multi_tensor_found_nonfinite(there).to_vector(), (std::vector<double>{0}));
  for (TensorList* const tensors : {&here, &there}) {
    (*tensors)[2].fill_(std::nan(""));
    const auto of_nan = kernels::multi_tensor_clip_factor(*tensors, 2, 1, 1).to_vector();
    EXPECT_TRUE(std::isnan(of_nan[0]));
    EXPECT_TRUE(std::isnan(of_nan[1]));
    EXPECT_EQ(of_nan[2], 1);
    EXPECT_EQ(kernels::multi_tensor_found_nonfinite(*tensors).to_vector(),
              (std::vector<double>{1}));
  }
  for (const double norm : {HUGE_VAL, std::nan(""), 3.0}) {  // of a norm
    const Tensor one = scalar_tensor(norm, kF64).to(cuda(0));
    EXPECT_EQ(kernels::multi_tensor_found_nonfinite({&one, 1}).item(), norm == 3 ? 0 : 1);
  }
}

// A factor that waits on the device is that of the next step alone, also for an optimizer that has
// to read it.
TEST(CudaTraining, AFactorOnTheDeviceIsAppliedOnce) {
  for (const Device& device : {kCpu, cuda(0)}) {
    Tensor weight = tensor({1.0, 2.0}).to(device);
    weight.set_requires_grad();
    optim::AdamW optimizer({{"weight", weight}}, {.lr = 0.5, .betas = {0, 0}, .weight_decay = 0});
    const Tensor quarter = tensor({0.25}, kF64).to(device);
    const auto step = [&] {
      weight.set_grad(tensor({4.0, -4.0}).to(device));
      optimizer.step();
      return optimizer.state_dict().at("state.weight.exp_avg").to_vector();
    };
    optimizer.scale_next_step(quarter);
    EXPECT_EQ(step(), (std::vector<double>{1, -1})) << device;
    EXPECT_EQ(step(), (std::vector<double>{4, -4})) << device;
    optimizer.scale_next_step(quarter);
    optimizer.zero_grad();
    EXPECT_EQ(step(), (std::vector<double>{4, -4})) << device;
  }
}

TEST(CudaTraining, TheSameSeedGivesTheSameBits) {
  const Device last = gpu::last_device();
  EXPECT_EQ(losses_on(last, kF32, 4), losses_on(last, kF32, 4));
}

// The setting `cpu`.
TEST(CudaTraining, TheAcceleratorNamesTheGpuUnlessTheCpuIsAskedFor) {
  EXPECT_EQ(Accelerator().device(), cuda(0));
  Accelerator accelerator({.cpu = true});
  EXPECT_EQ(accelerator.device(), kCpu);
  Gpt model({.vocab_size = 8, .context = 4, .width = 8, .layers = 1, .heads = 2});
  accelerator.prepare(model);
  accelerator.free_memory();
  model.to(cuda(0));
  EXPECT_THROW(accelerator.prepare(model), ConfigError);
}

// Made without memory, filled there.
TEST(CudaMaterialise, HasTheInitialValuesOfTheCpu) {
  const GptConfig config = {
      .vocab_size = kVocabulary, .context = kContext, .width = kWidth, .layers = 1, .heads = 4};
  manual_seed(17);
  const Gpt expected(config);
  const nn::ParameterDefaultsGuard without_memory({.device = kMeta});
  Gpt model(config);
  nn::materialise(model, cuda(0));
  const NamedTensors parameters = model.named_parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    ASSERT_TRUE(tensor.device().is_cuda()) << name;
    EXPECT_EQ(tensor.to_vector(), expected.parameters()[i].to_vector()) << name;
  }
}

}  // namespace
}  // namespace tessera::nn::models::test_cuda_training
