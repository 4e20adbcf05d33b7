// A convolutional network that reads handwritten digits: the plain loop of the Accelerator, as one
// process or many, with evaluation on digits that it never saw.
//
//     cv_example --data FOLDER      with t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz
//     tessera launch -n 2 cv_example --data FOLDER --batch-size 25
//
// 8500 of the 10000 digits train, 1500 test; at least 97% of those must be right, or exit code 1.
#include <CLI/CLI.hpp>
#include <cstdio>

#include <tessera.h>

#include "common/classification.h"

using namespace tessera;

struct Net : nn::Module<Net> {
  Net()
      : features(add<nn::Sequential>(
            "features", nn::layer<nn::Conv2d>(1, 16, 5), nn::layer<nn::ReLU>(),
            nn::layer<nn::MaxPool2d>(2), nn::layer<nn::Conv2d>(16, 32, 5), nn::layer<nn::ReLU>(),
            nn::layer<nn::MaxPool2d>(2), nn::layer<nn::Flatten>(), nn::layer<nn::Dropout>(0.25))),
        classifier(add<nn::Linear>("classifier", 32 * 4 * 4, 10)) {}
  Tensor forward(const Tensor& images) { return classifier(features(images)); }
  nn::Sequential& features;
  nn::Linear& classifier;
};

using Digit = std::array<Tensor, 2>;  // image f32[1, 28, 28] in [0, 1], label i64[]

data::DatasetPtr<Digit> read_digits(const std::string& folder) {
  const Tensor images = data::read_idx(folder + "/t10k-images-idx3-ubyte.gz");
  const Tensor labels = data::read_idx(folder + "/t10k-labels-idx1-ubyte.gz");
  return std::make_shared<data::TensorDataset<2>>(to(images, kF32).unsqueeze(1) / 255,
                                                  to(labels, kI64));
}

double accuracy(Accelerator& accelerator, Net& net, data::DataLoader<Digit>& loader) {
  const NoGradGuard no_grad;
  net.eval();
  examples::ClassificationScore score(10);
  for (auto& [images, labels] : loader) {
    const auto [predictions, truth] =
        accelerator.gather_for_metrics(std::pair(net(images).argmax(1), labels));
    score.add(predictions, truth);
  }
  net.train();
  return score.accuracy();
}

int train(const std::string& folder, int64_t epochs, int64_t batch_size, Precision precision) {
  Accelerator accelerator({.mixed_precision = precision});
  const auto parts = data::random_split(read_digits(folder), {8500, 1500}, /*seed=*/1);
  data::DataLoader<Digit> loader(
      parts[0], {.batch_size = batch_size, .shuffle = true, .drop_last = true, .workers = 1});
  data::DataLoader<Digit> test(parts[1], {.batch_size = 250});

  Net net;
  optim::AdamW optimizer(net.named_parameters(), {.weight_decay = 0.05});
  accelerator.prepare(net, optimizer, loader, test);
  optim::OneCycleSchedule schedule(optimizer, {.max_lr = 4e-3, .total = epochs * loader.size()});
  accelerator.prepare(schedule);

  double right = 0;
  for (int64_t epoch = 1; epoch <= epochs; ++epoch) {
    double loss_sum = 0;
    for (auto& [images, labels] : loader) {
      const auto micro = accelerator.accumulate(net);
      const Tensor loss = cross_entropy(net(images), labels);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      schedule.step();
      loss_sum += loss.item();
    }
    right = accuracy(accelerator, net, test);
    char line[100];
    std::snprintf(line, sizeof line, "epoch %lld  loss %.4f  accuracy on new digits %.2f%%",
                  static_cast<long long>(epoch), loss_sum / static_cast<double>(loader.size()),
                  100 * right);
    accelerator.print(line);
  }
  return right >= 0.97 ? 0 : 1;
}

int main(int argc, char** argv) {
  std::string folder, precision = "no";
  int64_t epochs = 4, batch_size = 50;
  CLI::App app("Trains a digit classifier");
  app.add_option("--data", folder, "folder with the t10k files of MNIST")->required();
  app.add_option("--epochs", epochs, "passes over the digits")->check(CLI::PositiveNumber);
  app.add_option("--batch-size", batch_size, "digits of a step, of one rank")
      ->check(CLI::PositiveNumber);
  app.add_option("--mixed-precision", precision)->check(CLI::IsMember({"no", "bf16", "fp16"}));
  CLI11_PARSE(app, argc, argv);
  int code = 0;
  const int failed = run(argc, argv, [&](std::span<const std::string>) {
    code = train(folder, epochs, batch_size,
                 precision == "bf16"   ? Precision::kBF16
                 : precision == "fp16" ? Precision::kFP16
                                       : Precision::kNo);
  });
  return failed != 0 ? failed : code;
}
