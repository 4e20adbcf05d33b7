// One training loop for every set-up, as a program of the user has it: what one_loop_program runs
// as ranks and test_one_loop compares. Everything but the loop comes from a file of settings.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>
#include <tessera/optim/optimizers.h>

namespace tessera::one_loop {

inline constexpr int64_t kSamples = 256, kWidth = 4, kEpochs = 3;

// Products: for bits.
struct Net : nn::Module<Net> {
  Net() : first(add<nn::Linear>("first", kWidth, 16)), second(add<nn::Linear>("second", 16, 1)) {}
  Tensor forward(const Tensor& x) { return second(tanh(first(x))); }
  nn::Linear& first;
  nn::Linear& second;
};
// Two numbers, no products: for SCR-10's bounds in every precision.
struct Line : nn::Module<Line> {
  Line() : a(parameter("a", raw::zeros({1}, kF32))), b(parameter("b", raw::zeros({1}, kF32))) {}
  Tensor forward(const Tensor& x) { return x.narrow(1, 0, 1) * a + b; }
  const Tensor& a;
  const Tensor& b;
};

inline std::array<Tensor, 2> all_samples() {
  const NoGradGuard no_grad;
  const Tensor x = rand({kSamples, kWidth}, {}, RandomStream{42, 0}) * 2 - 1;
  const Tensor noise = randn({kSamples, 1}, {}, RandomStream{42, 1});
  return {x, x.narrow(1, 0, 1) * 2 + 3 + noise * 0.1};
}

inline Tensor loss_of(const Tensor& prediction, const Tensor& target) {
  const Tensor difference = prediction - target;
  return (difference * difference).mean();
}

using Values = std::vector<std::vector<double>>;
template <class Model>
Values values_of(const Model& model) {
  Values values;
  for (const auto& [name, tensor] : model.named_parameters()) values.push_back(tensor.to_vector());
  return values;
}

// The loop. `settings`: a file.
template <class Model>
Values train(const std::string& settings, int64_t batch_size) {
  manual_seed(7);
  Accelerator accelerator({.config_file = settings});
  const auto [x, y] = all_samples();
  Model model;
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
  data::DataLoader loader(std::make_shared<data::TensorDataset<2>>(x, y),
                          {.batch_size = batch_size});
  accelerator.prepare(model, optimizer, loader);
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (auto& [inputs, targets] : loader) {
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(loss_of(model(inputs), targets));
      optimizer.step(), optimizer.zero_grad();
    }
  }
  return values_of(model);
}

}  // namespace tessera::one_loop
