// Local SGD: ranks step alone and average their parameters every eighth update.
#include <cmath>

#include <tessera.h>

#include "line.h"

using namespace tessera;

int main(int argc, char** argv) {
  bool good = false;
  const int failed = run(argc, argv, [&](std::span<const std::string>) {
    Accelerator accelerator;
    data::DataLoader loader(examples::make_line(640), {.batch_size = 4, .shuffle = true});
    examples::Line model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.05});
    accelerator.prepare(model, optimizer, loader);
    LocalSGD local(accelerator, model, {.steps = 8});
    for (auto& [x, y] : loader) {
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(mse_loss(model(x), y));
      optimizer.step();
      optimizer.zero_grad();
      local.step();
    }
    local.finish();
    const Tensor slopes = accelerator.gather(model.slope.detach());
    accelerator.print("y = ", model.slope.item(), " x + ", model.intercept.item(), " after ",
                      local.averages(), " averages");
    good = std::abs(model.slope.item() - 2) < 0.1 && std::abs(model.intercept.item() - 3) < 0.1 &&
           (slopes - model.slope).abs().max().item() == 0;  // the same on every rank
  });
  return failed || !good;
}
