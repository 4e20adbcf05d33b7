// What the tests of the facade share: a regression in one dimension, its data, and the ranks.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>

#include "distributed/compared_ranks.h"

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

// One vector per parameter.
using Values = std::vector<std::vector<float>>;

template <class Model>
Values values_of(const Model& model) {
  Values values;
  for (const auto& [name, tensor] : model.named_parameters()) {
    values.push_back(tensor.template to_vector<float>());
  }
  return values;
}
template <class Model>
Values gradients_of(const Model& model) {
  Values values;
  for (const auto& [name, tensor] : model.named_parameters()) {
    values.push_back(tensor.grad().defined() ? tensor.grad().template to_vector<float>()
                                             : std::vector<float>());
  }
  return values;
}

inline void expect_near(const Values& a, const Values& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size());
    for (size_t j = 0; j < a[i].size(); ++j)
      EXPECT_NEAR(a[i][j], b[i][j], tolerance) << i << " " << j;
  }
}

inline bool near(const Values& a, const Values& b, double tolerance = 1e-5) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size()) return false;
    for (size_t j = 0; j < a[i].size(); ++j) {
      if (!(std::abs(a[i][j] - b[i][j]) <= tolerance * (1 + std::abs(b[i][j])))) return false;
    }
  }
  return true;
}

inline Tensor loss_of(Regression& model, const std::array<Tensor, 2>& batch) {
  return squared_error(model(batch[0]), batch[1]);
}

// The gradient that one process has for the mean loss over some rows of a line.
inline Values gradient_over(const Line& line,
                            const std::vector<std::pair<int64_t, int64_t>>& parts) {
  Regression model;
  double total = 0;
  for (const auto& [begin, end] : parts) total += static_cast<double>(end - begin);
  for (const auto& [begin, end] : parts) {
    const double weight = static_cast<double>(end - begin) / total;
    (loss_of(model, line.rows(begin, end)) * weight).backward();
  }
  return gradients_of(model);
}

// Rank r's batch of 16 rows in turn `turn`.
inline std::pair<int64_t, int64_t> share(int turn, int rank, int ranks) {
  const int64_t begin = (turn * ranks + rank) * 16;
  return {begin, begin + 16};
}

// All ranks do the same collectives in the same order.
inline void on_ranks(int size, const std::function<void(int rank)>& body) {
  distributed::compared_ranks(size, body);
}

}  // namespace tessera
