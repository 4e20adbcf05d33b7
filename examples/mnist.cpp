// A convolutional network that reads handwritten digits: data set, split, loader, schedule, and
// evaluation on digits that it never saw.
//
//     mnist --data FOLDER     with t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz
//
// 8500 of the 10000 digits train, 1500 test; at least 97% of those must be right, or exit code 1.
#include <CLI/CLI.hpp>
#include <cstdio>

#include <tessera.h>

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

double accuracy(Net& net, const data::DatasetPtr<Digit>& digits) {
  NoGradGuard no_grad;
  net.eval();
  double right = 0;
  data::DataLoader<Digit> loader(digits, {.batch_size = 250});
  for (auto& [images, labels] : loader) {
    right += net(images).argmax(1).eq(labels).sum().item();
  }
  net.train();
  return right / static_cast<double>(digits->size());
}

int run(const std::string& folder, int epochs) {
  const auto parts = data::random_split(read_digits(folder), {8500, 1500}, /*seed=*/1);
  data::DataLoader<Digit> loader(
      parts[0], {.batch_size = 50, .shuffle = true, .drop_last = true, .workers = 1});

  Net net;
  optim::AdamW optimizer(net.named_parameters(), {.weight_decay = 0.05});
  optim::OneCycleSchedule schedule(optimizer, {.max_lr = 4e-3, .total = epochs * loader.size()});
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    double loss_sum = 0;
    for (auto& [images, labels] : loader) {
      const Tensor loss = cross_entropy(net(images), labels);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      schedule.step();
      loss_sum += loss.item();
    }
    std::printf("epoch %d  loss %.4f  accuracy on new digits %.2f%%\n", epoch,
                loss_sum / static_cast<double>(loader.size()), 100 * accuracy(net, parts[1]));
    std::fflush(stdout);
  }
  return accuracy(net, parts[1]) >= 0.97 ? 0 : 1;
}

int main(int argc, char** argv) {
  std::string folder;
  int epochs = 4;
  CLI::App app("Trains a digit classifier");
  app.add_option("--data", folder, "folder with the t10k files of MNIST")->required();
  app.add_option("--epochs", epochs, "passes over the digits")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    return run(folder, epochs);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
