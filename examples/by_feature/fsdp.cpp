// Fully sharded training: every rank keeps its rows of each parameter, gradient and state. What it
// saves goes on in any other mode, with the same bits.
//
//     fsdp [FOLDER]      default: out/fsdp
#include <filesystem>
#include <iostream>

#include <tessera.h>

#include "curve.h"
#include "line.h"

using namespace tessera;
using accelerate::Sharding;

namespace {

struct Outcome {
  std::vector<std::vector<float>> parameters;
  double loss = 0;
};

// 12 batches of each rank; from the checkpoint in `load` on, if there is one, and only up to the
// one that goes to `save`.
Outcome train(Sharding sharding, const std::string& load, const std::string& save) {
  constexpr int64_t kBatches = 12, kSaved = 5;
  Accelerator accelerator({.seed = 1, .sharding = sharding});
  data::DataLoader loader(examples::make_line(accelerator.num_processes() * kBatches * 8),
                          {.batch_size = 8, .shuffle = true});
  examples::Curve model;
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  accelerator.prepare(model, optimizer, loader);
  int64_t kept = 0;
  for (const Tensor& parameter : model.parameters()) kept += parameter.numel();
  if (load.empty()) accelerator.print(accelerator.describe());
  if (!load.empty()) accelerator.load_state(load);

  Outcome outcome;
  int64_t done = load.empty() ? 0 : kSaved;
  for (auto& [x, y] : loader) {
    {
      const auto micro = accelerator.accumulate(model);
      const Tensor loss = mse_loss(model(x), y);
      accelerator.backward(loss);
      accelerator.clip_grad_norm(model.parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();
      outcome.loss = loss.item();
    }
    if (++done < kSaved || save.empty()) continue;
    accelerator.save_state(save);
    break;
  }
  outcome.parameters = examples::whole_parameters(model);
  std::cout << "rank " << accelerator.process_index() << " keeps " << kept << " numbers"
            << std::endl;
  return outcome;
}

}  // namespace

int main(int argc, char** argv) {
  bool good = true;
  const int failed = run(argc, argv, [&](std::span<const std::string> arguments) {
    const std::string folder = (arguments.empty() ? "out/fsdp" : arguments[0]) + "/state";
    ProcessControl ranks;
    ranks.main_process_first([&] { std::filesystem::remove_all(folder); });
    const Outcome whole = train(Sharding::kFsdp, "", "");
    train(Sharding::kFsdp, "", folder);
    for (const Sharding mode :
         {Sharding::kFsdp, Sharding::kZero3, Sharding::kZero1, Sharding::kDdp}) {
      good = good && train(mode, folder, "").parameters == whole.parameters;
    }
    ranks.print(good ? "every mode goes on with the same bits" : "other numbers than in one go");
    ranks.print("loss ", whole.loss);
    good = good && whole.loss < 1;
  });
  return failed || !good;
}
