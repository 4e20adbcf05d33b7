// A whole training on the device "cuda", emulated, beside the same one on the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/random.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/clip.h>

#include "gpt2/model.h"

namespace tessera::gpt2 {
namespace {

// Small, as race tracking takes its time; with batch 4, context 64 and width 64 it passes too.
constexpr int64_t kBatch = 2, kContext = 16, kWidth = 32, kVocabulary = 61;

// Steps of a GPT of two layers. A text with some order in it.
std::vector<double> losses_on(const Device& device, DType dtype, int steps) {
  manual_seed(17);
  Gpt model({.vocab_size = kVocabulary,
             .context = kContext,
             .width = kWidth,
             .layers = 2,
             .heads = 4,
             .dropout = 0.1});
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

TEST(CudaTraining, TheSameSeedGivesTheSameBits) {
  EXPECT_EQ(losses_on(cuda(1), kF32, 4), losses_on(cuda(1), kF32, 4));
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

}  // namespace
}  // namespace tessera::gpt2
