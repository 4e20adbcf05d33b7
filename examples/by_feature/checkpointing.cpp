// Checkpoints: a training that is left in the middle of an epoch and taken up by new objects ends
// with the same bits.
//
//     checkpointing [FOLDER]      default: out/checkpointing
#include <filesystem>

#include <tessera.h>

#include "line.h"

using namespace tessera;

namespace {

// Slope and intercept after `batches` more batches, from the newest checkpoint if `resume`.
std::vector<double> train(const std::string& folder, int64_t batches, bool resume, bool save) {
  Accelerator accelerator(
      {.seed = 1, .project_dir = folder, .automatic_checkpoint_naming = true, .total_limit = 2});
  data::DataLoader loader(examples::make_line(160), {.batch_size = 4, .shuffle = true});
  examples::Line model;
  optim::AdamW optimizer(model.named_parameters(), {.lr = 0.05});
  optim::CosineSchedule schedule(optimizer, {.warmup = 5, .total = 60});
  accelerator.prepare(model, optimizer, loader, schedule);
  if (resume) accelerator.print("resumes ", accelerator.load_state().folder);
  for (int64_t done = 0; done < batches;) {
    for (auto& [x, y] : loader) {
      {
        const auto micro = accelerator.accumulate(model);
        accelerator.backward(mse_loss(model(x), y));
        optimizer.step();
        schedule.step();
        optimizer.zero_grad();
      }
      if (++done == batches) break;
    }
  }
  if (save) accelerator.print("saved ", accelerator.save_state());
  return {model.slope.item(), model.intercept.item()};
}

}  // namespace

int main(int argc, char** argv) {
  bool equal = false;
  const int failed = run(argc, argv, [&](std::span<const std::string> arguments) {
    const std::string folder = arguments.empty() ? "out/checkpointing" : arguments[0];
    // Of an earlier run of this program.
    ProcessControl ranks;
    ranks.main_process_first([&] { std::filesystem::remove_all(folder + "/checkpoints"); });
    const auto whole = train(folder, 50, false, false);
    train(folder, 27, false, true);  // in the midst of its epoch
    equal = train(folder, 23, true, false) == whole;
    ranks.print(equal ? "the same bits" : "other numbers than in one go");
  });
  return failed || !equal;
}
