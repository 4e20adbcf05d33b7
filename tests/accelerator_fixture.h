// What the tests of the facade share: a regression in one dimension, its data, and the ranks.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>

#include "compared_ranks.h"

namespace tessera {

// y = a x + b with two scalars that begin at 0.
struct Regression : nn::Module<Regression> {
  Regression()
      : a(parameter("a", raw::zeros({1}, kF32))), b(parameter("b", raw::zeros({1}, kF32))) {}
  Tensor forward(const Tensor& x) { return x * a + b; }
  const Tensor& a;
  const Tensor& b;
};

// Example i: x in [-1, 1], y = 2 x + 3 with noise.
class Line : public data::Dataset<std::array<Tensor, 2>> {
 public:
  explicit Line(int64_t size, uint64_t seed = 42) {
    const NoGradGuard no_grad;
    x_ = rand({size, 1}, {}, RandomStream{seed, 0}) * 2 - 1;
    y_ = x_ * 2 + 3 + randn({size, 1}, {}, RandomStream{seed, 1}) * 0.1;
  }
  int64_t size() const override { return x_.size(0); }
  std::array<Tensor, 2> get(int64_t index) const override {
    return {raw::select(x_, 0, index), raw::select(y_, 0, index)};
  }
  // Rows [begin, end) as one batch.
  std::array<Tensor, 2> rows(int64_t begin, int64_t end) const {
    return {raw::narrow(x_, 0, begin, end - begin), raw::narrow(y_, 0, begin, end - begin)};
  }

 private:
  Tensor x_, y_;
};

// A small network with dropout, which needs the right random numbers on every rank.
struct Net : nn::Module<Net> {
  Net()
      : first(add<nn::Linear>("first", 1, 16)),
        dropout(add<nn::Dropout>("dropout", 0.25)),
        second(add<nn::Linear>("second", 16, 1)) {}
  Tensor forward(const Tensor& x) { return second(dropout(relu(first(x)))); }
  nn::Linear& first;
  nn::Dropout& dropout;
  nn::Linear& second;
};

inline Tensor squared_error(const Tensor& prediction, const Tensor& target) {
  const Tensor difference = prediction - target;
  return (difference * difference).mean();
}

template <class Model>
std::vector<std::vector<float>> values_of(const Model& model) {
  std::vector<std::vector<float>> values;
  for (const auto& [name, tensor] : model.named_parameters()) {
    values.push_back(tensor.template to_vector<float>());
  }
  return values;
}
template <class Model>
std::vector<std::vector<float>> gradients_of(const Model& model) {
  std::vector<std::vector<float>> values;
  for (const auto& [name, tensor] : model.named_parameters()) {
    values.push_back(tensor.grad().defined() ? tensor.grad().template to_vector<float>()
                                             : std::vector<float>());
  }
  return values;
}

inline void expect_near(const std::vector<std::vector<float>>& a,
                        const std::vector<std::vector<float>>& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size());
    for (size_t j = 0; j < a[i].size(); ++j)
      EXPECT_NEAR(a[i][j], b[i][j], tolerance) << i << " " << j;
  }
}

// All ranks do the same collectives in the same order.
inline void on_ranks(int size, const std::function<void(int rank)>& body) {
  distributed::compared_ranks(size, body);
}

}  // namespace tessera
