// Whether eight numbers add up to more than 0, learned from examples.
#include <string>

#include <tessera.h>

using namespace tessera;

struct Classifier : nn::Module<Classifier> {
  Classifier() : hidden(add<nn::Linear>("hidden", 8, 32)), head(add<nn::Linear>("head", 32, 2)) {}
  Tensor forward(const Tensor& x) { return head(gelu(hidden(x))); }
  nn::Linear& hidden;
  nn::Linear& head;
};

int main(int argc, char** argv) {
  return run(argc, argv, [](std::span<const std::string> arguments) {
    const std::string folder = arguments.empty() ? "out/epochs" : arguments[0];
    Accelerator accelerator(
        {.mixed_precision = Precision::kBF16, .gradient_accumulation_steps = 2});
    accelerator.set_seed(42);
    const Tensor x = randn({640, 8});
    const Tensor y = gt(x.sum({1}), 0.0).to(kI64);
    const data::TensorDataset<2> known(x.narrow(0, 0, 512), y.narrow(0, 0, 512));
    const data::TensorDataset<2> unseen(x.narrow(0, 512, 128), y.narrow(0, 512, 128));
    data::DataLoader train(known, {.batch_size = 8, .shuffle = true});
    data::DataLoader valid(unseen, {.batch_size = 8});
    Classifier model;
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
    const int64_t updates = 3 * train.size() / 2 / accelerator.num_processes();
    optim::CosineSchedule schedule(optimizer, {.total = updates});
    accelerator.prepare(model, optimizer, train, valid, schedule);
    for (int epoch = 0; epoch < 3; ++epoch) {
      model.train();
      for (auto& [inputs, labels] : train) {
        const auto micro = accelerator.accumulate(model);
        const Tensor loss = cross_entropy(model(inputs), labels);
        accelerator.backward(loss);
        accelerator.clip_grad_norm(model.parameters(), 1.0);
        optimizer.step();
        schedule.step();
        optimizer.zero_grad();
      }
      model.eval();
      double right = 0, seen = 0;
      for (auto& [inputs, labels] : valid) {
        const NoGradGuard no_grad;
        const Tensor guesses = model(inputs).argmax(-1);
        const auto [all, truth] = accelerator.gather_for_metrics(std::pair(guesses, labels));
        right += eq(all, truth).sum().item();
        seen += static_cast<double>(truth.size(0));
      }
      accelerator.print("epoch ", epoch, ": ", right / seen);
      TS_CHECK(epoch < 2 || right / seen > 0.9, "main", "has learned too little");
      accelerator.save_state(folder + "/epoch_" + std::to_string(epoch));
    }
    accelerator.end_training();
  });
}
