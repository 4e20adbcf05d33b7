// What the tests of the sharded facade share: a small language model and its data.
#pragma once

#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/nn/container.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/norm.h>

#include "accelerate/accelerator_fixture.h"

namespace tessera {

struct Block : nn::Module<Block> {
  explicit Block(int64_t width)
      : norm(add<nn::LayerNorm>("norm", width)),
        up(add<nn::Linear>("up", width, 2 * width)),
        down(add<nn::Linear>("down", 2 * width, width)),
        dropout(add<nn::Dropout>("dropout", 0.1)) {}
  Tensor forward(const Tensor& x) { return x + dropout(down(gelu(up(norm(x))))); }
  nn::LayerNorm& norm;
  nn::Linear& up;
  nn::Linear& down;
  nn::Dropout& dropout;
};

// A small language model whose head is its embedding; 131 rows of 18.
struct Words : nn::Module<Words> {
  Words()
      : embedding(add<nn::Embedding>("embedding", 131, 18)),
        blocks(add<nn::ModuleList>("blocks")),
        norm(add<nn::LayerNorm>("norm", 18)) {
    for (int i = 0; i < 3; ++i) blocks.append<Block>(18);
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding(tokens);
    for (size_t i = 0; i < blocks.num_children(); ++i) x = blocks.child(i).call_tensor(x);
    return matmul(norm(x), embedding.weight.t());
  }
  nn::Embedding& embedding;
  nn::ModuleList& blocks;
  nn::LayerNorm& norm;
};

class Tokens : public data::Dataset<std::array<Tensor, 2>> {
 public:
  explicit Tokens(int64_t size) : tokens_(randint(0, 131, {size, 7}, kI64, RandomStream{11, 0})) {}
  int64_t size() const override { return tokens_.size(0); }
  std::array<Tensor, 2> get(int64_t index) const override {
    const Tensor row = raw::select(tokens_, 0, index);
    return {raw::narrow(row, 0, 0, 6), raw::narrow(row, 0, 1, 6)};
  }

 private:
  Tensor tokens_;
};

// Gathered where they are parts: collective.
inline std::vector<std::vector<float>> whole_values(const nn::ModuleBase& model) {
  const NoGradGuard no_grad;
  std::vector<std::vector<float>> values;
  for (const auto& [name, tensor] : model.named_parameters()) {
    values.push_back((distributed::is_dtensor(tensor) ? distributed::full_tensor(tensor) : tensor)
                         .to_vector<float>());
  }
  return values;
}

}  // namespace tessera
