// What the programs about sharding train: a network of a few equal blocks, each a unit of its own,
// that learns the line of line.h.
#pragma once

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/nn/container.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>

namespace tessera::examples {

struct CurveBlock : nn::Module<CurveBlock> {
  explicit CurveBlock(int64_t width)
      : up(add<nn::Linear>("up", width, 4 * width)),
        down(add<nn::Linear>("down", 4 * width, width)) {}
  Tensor forward(const Tensor& x) { return x + down(gelu(up(x))); }
  nn::Linear& up;
  nn::Linear& down;
};

struct Curve : nn::Module<Curve> {
  explicit Curve(int64_t width = 32)
      : first(add<nn::Linear>("first", 1, width)),
        blocks(add<nn::ModuleList>("blocks")),
        last(add<nn::Linear>("last", width, 1)) {
    for (int i = 0; i < 4; ++i) blocks.append<CurveBlock>(width);
  }
  // [N] to [N].
  Tensor forward(const Tensor& x) {
    Tensor h = first(x.reshape({-1, 1}));
    for (size_t i = 0; i < blocks.num_children(); ++i) h = blocks.at<CurveBlock>(i)(h);
    return last(h).reshape({-1});
  }
  nn::Linear& first;
  nn::ModuleList& blocks;
  nn::Linear& last;
};

// The whole parameters on every rank, whatever each keeps of them. Collective.
inline std::vector<std::vector<float>> whole_parameters(const nn::ModuleBase& model) {
  const NoGradGuard no_grad;
  std::vector<std::vector<float>> values;
  for (const auto& [name, parameter] : model.named_parameters()) {
    const bool in_parts = distributed::is_dtensor(parameter);
    values.push_back(
        (in_parts ? distributed::full_tensor(parameter) : parameter).to_vector<float>());
  }
  return values;
}

}  // namespace tessera::examples
