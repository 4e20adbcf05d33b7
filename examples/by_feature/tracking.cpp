// Tracking: the same numbers as JSON lines, CSV and TensorBoard events, with a progress line.
//
//     tracking [FOLDER]      default: out/tracking
#include <tessera.h>

#include "line.h"

using namespace tessera;

int main(int argc, char** argv) {
  return run(argc, argv, [](std::span<const std::string> arguments) {
    const std::string folder = arguments.empty() ? "out/tracking" : arguments[0];
    Accelerator accelerator({.logging_dir = folder, .log_with = std::vector<std::string>{"all"}});
    const double lr = 0.1;
    accelerator.init_trackers("line",
                              {{"lr", lr}, {"optimizer", {{"name", "sgd"}, {"momentum", 0.9}}}});

    data::DataLoader loader(examples::make_line(256), {.batch_size = 8, .shuffle = true});
    examples::Line model;
    optim::SGD optimizer(model.named_parameters(), {.lr = lr, .momentum = 0.9});
    accelerator.prepare(model, optimizer, loader);
    Progress progress(
        4 * loader.size(),
        {.description = "training", .enabled = accelerator.is_main_process(), .unit = "steps"});
    int64_t step = 0;
    for (int epoch = 0; epoch < 4; ++epoch) {
      for (auto& [x, y] : loader) {
        const auto micro = accelerator.accumulate(model);
        const Tensor loss = mse_loss(model(x), y);
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
        // The mean over ranks; a rank's own loss would need no collective.
        const Tensor mean = accelerator.reduce(loss.detach());
        accelerator.log({{"train", {{"loss", mean}, {"slope", model.slope}}}}, step++);
        progress.set_note("loss " + to_text(mean.item()));
        progress.advance();
      }
    }
    accelerator.end_training();
  });
}
