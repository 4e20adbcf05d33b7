// ZeRO-1 and 2: every rank has the whole parameters, and keeps its part of the optimizer's states,
// and of the gradients. The numbers are those of replicas.
//
//     zero [FOLDER]      default: out/zero
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
  int64_t state_bytes = 0;  // of this rank's optimizer
};

// An epoch; the model alone goes to `save`, and begins with what is in `load`.
Outcome train(Sharding sharding, const std::string& load, const std::string& save) {
  Accelerator accelerator({.seed = 1, .sharding = sharding});
  data::DataLoader loader(examples::make_line(accelerator.num_processes() * 96),
                          {.batch_size = 8, .shuffle = true});
  examples::Curve model;
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  accelerator.prepare(model, optimizer, loader);
  if (!load.empty()) load_model(model, load);
  for (auto& [x, y] : loader) {
    const auto micro = accelerator.accumulate(model);
    accelerator.backward(mse_loss(model(x), y));
    accelerator.clip_grad_norm(model.parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
  Outcome outcome;
  for (const auto& [name, state] : optimizer.state_dict()) outcome.state_bytes += state.nbytes();
  outcome.parameters = examples::whole_parameters(model);
  if (!save.empty()) accelerator.save_model(model, save);
  return outcome;
}

}  // namespace

int main(int argc, char** argv) {
  bool good = true;
  const int failed = run(argc, argv, [&](std::span<const std::string> arguments) {
    const std::string folder = (arguments.empty() ? "out/zero" : arguments[0]) + "/model";
    ProcessControl ranks;
    const Outcome replicas = train(Sharding::kDdp, "", folder);
    const Outcome again = train(Sharding::kDdp, folder, "");
    for (const Sharding stage : {Sharding::kZero1, Sharding::kZero2}) {
      const Outcome first = train(stage, "", folder);  // whole files, whatever mode wrote them
      const Outcome second = train(stage, folder, "");
      good =
          good && first.parameters == replicas.parameters && second.parameters == again.parameters;
      std::cout << "rank " << ranks.process_index() << " of stage "
                << (stage == Sharding::kZero1 ? 1 : 2) << ": " << first.state_bytes
                << " bytes of states; replicas: " << replicas.state_bytes << std::endl;
      if (ranks.num_processes() > 1) good = good && first.state_bytes < replicas.state_bytes;
    }
    ranks.print(good ? "the same bits in every stage" : "other numbers than replicas");
  });
  return failed || !good;
}
