// What the programs of this folder train on: points on y = 2 x + 3 with noise, and the two numbers
// that describe a line. Small enough that each program shows its feature and little else.
#pragma once

#include <memory>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/data/dataset.h>
#include <tessera/nn/init.h>
#include <tessera/nn/module.h>

namespace tessera::examples {

// x and y: f32[], noise of deviation 0.1; the same numbers for everybody who gives the same seed.
inline auto make_line(int64_t size, uint64_t seed = 42) {
  const Tensor x = randn({size}, {}, RandomStream{seed, 0});
  const Tensor noise = randn({size}, {}, RandomStream{seed, 1});
  return std::make_shared<data::TensorDataset<2>>(x, x * 2 + 3 + noise * 0.1);
}

struct Line : nn::Module<Line> {
  Line() : slope(parameter("slope", Shape{})), intercept(parameter("intercept", Shape{})) {
    nn::init::constant(slope, 0);
    nn::init::constant(intercept, 0);
  }
  Tensor forward(const Tensor& x) { return x * slope + intercept; }
  const Tensor& slope;
  const Tensor& intercept;
};

}  // namespace tessera::examples
