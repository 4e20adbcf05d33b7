// Stopping together: any rank may pull the trigger, all of them find it pulled at the same step.
#include <tessera.h>

#include "line.h"

using namespace tessera;

int main(int argc, char** argv) {
  bool stopped = false;
  const int failed = run(argc, argv, [&](std::span<const std::string>) {
    Accelerator accelerator;
    data::DataLoader loader(examples::make_line(256), {.batch_size = 8, .shuffle = true});
    examples::Line model;
    optim::AdamW optimizer(model.named_parameters(), {.lr = 0.1});
    accelerator.prepare(model, optimizer, loader);
    int64_t step = 0;
    for (int epoch = 0; epoch < 20 && !stopped; ++epoch) {
      for (auto& [x, y] : loader) {
        const auto micro = accelerator.accumulate(model);
        const Tensor loss = mse_loss(model(x), y);
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
        ++step;
        if (loss.item() < 0.01) accelerator.set_trigger();  // this rank has seen enough
        if (accelerator.check_trigger()) {
          stopped = true;
          break;  // on every rank
        }
      }
    }
    accelerator.print(stopped ? "stopped after step " : "not stopped after step ", step);
  });
  return failed || !stopped;
}
