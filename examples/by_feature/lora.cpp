// LoRA on a model that several ranks hold in parts: a frozen base in 16 bits, adapters in f32,
// saved in PEFT's files and as merged weights, whatever the mode of sharding.
//
//     lora [FOLDER]                               default: out/lora
//     tessera launch -n 2 --sharding fsdp lora
#include <cmath>
#include <string>

#include <tessera.h>

#include "curve.h"
#include "line.h"

using namespace tessera;

namespace {

double loss_of(examples::Curve& model, data::DataLoader<std::array<Tensor, 2>>& loader,
               Accelerator& accelerator) {
  const NoGradGuard no_grad;
  double sum = 0;
  int64_t samples = 0;
  for (auto& [x, y] : loader) {
    const auto [got, wanted] = accelerator.gather_for_metrics(std::pair(model(x), y));
    sum += (got - wanted).pow(2).sum().item();
    samples += wanted.size(0);
  }
  return sum / static_cast<double>(samples);
}

}  // namespace

int main(int argc, char** argv) {
  bool good = true;
  const int failed = run(argc, argv, [&](std::span<const std::string> arguments) {
    const std::string folder = arguments.empty() ? "out/lora" : arguments[0];
    Accelerator accelerator({.mixed_precision = Precision::kBF16, .seed = 1});
    data::DataLoader loader(examples::make_line(accelerator.num_processes() * 512),
                            {.batch_size = 16, .shuffle = true});
    data::DataLoader validation(examples::make_line(101, 7), {.batch_size = 16});

    examples::Curve model;
    const nn::LoraSummary lora = nn::add_lora(
        model, {.names = {"up", "down", "last"}, .rank = 4, .alpha = 16, .base_dtype = kBF16});
    optim::AdamW optimizer(nn::trainable_parameters(model), {.lr = 1e-2});
    accelerator.prepare(model, optimizer, loader, validation);
    accelerator.print("trains ", lora.trainable, " of ", lora.total, " numbers");

    const double before = loss_of(model, validation, accelerator);
    for (auto& [x, y] : loader) {
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(mse_loss(model(x), y));
      optimizer.step();
      optimizer.zero_grad();
    }
    const double after = loss_of(model, validation, accelerator);
    accelerator.print("loss ", before, " before, ", after, " afterwards");
    accelerator.save_lora(model, folder + "/adapter");  // PeftModel.from_pretrained(base, folder)
    accelerator.save_merged_lora(model, folder + "/merged");

    // The same numbers without adapters and alone, rounded once to the base's dtype.
    examples::Curve merged;
    load_model(merged, folder + "/merged");
    const double alone = loss_of(merged, validation, accelerator);
    accelerator.print("merged ", alone);
    good = after < before / 2 && std::abs(alone - after) < 0.1 * (1 + after);
  });
  return failed || !good;
}
