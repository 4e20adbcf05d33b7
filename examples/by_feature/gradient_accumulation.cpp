// Accumulation: four micro-batches of 4 make the step of one batch of 16, also at the end of the
// data, where the last window is short.
#include <cmath>
#include <cstdio>

#include <tessera.h>

#include "line.h"

using namespace tessera;

// Slope and intercept after three epochs of 72 points a rank.
std::pair<double, double> train(int64_t batch_size, int64_t accumulate) {
  Accelerator accelerator({.gradient_accumulation_steps = accumulate});
  data::DataLoader loader(examples::make_line(72 * accelerator.num_processes()),
                          {.batch_size = batch_size});
  examples::Line model;
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
  accelerator.prepare(model, optimizer, loader);
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (auto& [x, y] : loader) {
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(mse_loss(model(x), y));
      optimizer.step();       // nothing within a window
      optimizer.zero_grad();  // nothing either
    }
  }
  accelerator.print(accumulate, " micro-batches of ", batch_size, ": y = ", model.slope.item(),
                    " x + ", model.intercept.item());
  return {model.slope.item(), model.intercept.item()};
}

int main(int argc, char** argv) {
  bool equal = false;
  const int failed = run(argc, argv, [&](std::span<const std::string>) {
    const auto [slope, intercept] = train(16, 1);
    const auto [same_slope, same_intercept] = train(4, 4);
    equal = std::abs(slope - same_slope) < 1e-5 && std::abs(intercept - same_intercept) < 1e-5;
  });
  return failed || !equal;
}
