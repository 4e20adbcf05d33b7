// The training loop of the facade: windows, weights, gates, and that ranks change no bits.
// ctest labels: threads
#include "accelerator_fixture.h"

#include <tessera/core/error.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/linear.h>

namespace tessera {
namespace {

// ---- One loop for every set-up -----------------------------------------------------------------

struct Net : nn::Module<Net> {
  Net()
      : first(add<nn::Linear>("first", 1, 16)),
        dropout(add<nn::Dropout>("dropout", 0.25)),
        second(add<nn::Linear>("second", 16, 1)) {}
  Tensor forward(const Tensor& x) { return second(dropout(relu(first(x)))); }
  nn::Linear& first;
  nn::Dropout& dropout;
  nn::Linear& second;
};

// Trains over `samples` lines and returns the parameters.
std::vector<std::vector<float>> train(int64_t steps, int64_t samples, int epochs = 2) {
  manual_seed(11);
  const Line line(samples);
  Accelerator accelerator({.gradient_accumulation_steps = steps});
  Net net;
  optim::AdamW optimizer(net.named_parameters(), {.lr = 1e-2});
  data::DataLoader loader(line, {.batch_size = 4, .shuffle = true, .seed = 5});
  optim::CosineSchedule schedule(optimizer, {.warmup = 2, .total = 20});
  accelerator.prepare(schedule, loader, optimizer, net);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (auto& [x, y] : loader) {
      auto micro = accelerator.accumulate(net);
      accelerator.backward(squared_error(net(x), y));
      accelerator.clip_grad_norm(net.parameters(), 0.5);
      optimizer.step(), schedule.step(), optimizer.zero_grad();
    }
  }
  return values_of(net);
}

void expect_near(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b,
                 double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size());
    for (size_t j = 0; j < a[i].size(); ++j)
      EXPECT_NEAR(a[i][j], b[i][j], tolerance) << i << " " << j;
  }
}

// SCR-10 with bits instead of bounds, and dropout.
TEST(Accelerator, RanksWithOneMicroBatchHaveTheBitsOfOneProcessThatAccumulates) {
  for (const int ranks : {2, 4}) {
    const auto expected = train(ranks, 64);
    on_ranks(ranks, [&](int) { EXPECT_EQ(train(1, 64), expected) << ranks << " ranks"; });
  }
}

TEST(Accelerator, RanksThatAccumulateDifferFromOneProcessByTheRoundingOfTheirSums) {
  for (const int ranks : {2, 4}) {
    const auto expected = train(4 * ranks, 128);
    on_ranks(ranks, [&](int) { expect_near(train(4, 128), expected, 1e-5); });
  }
}

}  // namespace
}  // namespace tessera
