// A model of blocks that tests of sharding train on emulated GPUs.
#pragma once

#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>

namespace tessera::distributed {

// Rows that no number of ranks divides.
struct Block : nn::Module<Block> {
  explicit Block(int width)
      : norm(add<nn::LayerNorm>("norm", width)),
        up(add<nn::Linear>("up", width, 2 * width)),
        down(add<nn::Linear>("down", 2 * width, width)) {}
  Tensor forward(const Tensor& x) { return x + down(relu(up(norm(x)))); }
  nn::LayerNorm& norm;
  nn::Linear& up;
  nn::Linear& down;
};
struct Blocks : nn::Module<Blocks> {
  explicit Blocks(int width = 9, int count = 4) : in(parameter("in", full({width, 5}, 0.1))) {
    for (int i = 0; i < count; ++i) blocks.push_back(&add<Block>("h" + std::to_string(i), width));
  }
  Tensor forward(const Tensor& x) {
    Tensor y = matmul(x.to(in.dtype()), in.t());
    for (Block* block : blocks) y = (*block)(y);
    return y;
  }
  const Tensor& in;
  std::vector<Block*> blocks;
};

// On `device`; parameters may lie elsewhere.
inline Tensor loss_of(Blocks& model, int step, int rank, const Device& device) {
  const RandomStream stream{7, static_cast<uint64_t>(10 * step + rank)};
  const Tensor y = model(randn({3, 5}, {}, stream).to(device));
  return (y * y).mean();
}
inline Tensor loss_of(Blocks& model, int step, int rank) {
  return loss_of(model, step, rank, cuda(rank));
}

}  // namespace tessera::distributed
