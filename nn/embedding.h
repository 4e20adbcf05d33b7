// Rows of a table by index.
#pragma once

#include <memory>
#include <optional>

#include <tessera/nn/module.h>

namespace tessera::nn {

struct EmbeddingOptions {
  std::optional<int64_t> padding_idx = {};  // this row starts as zeros and gets no gradient
};
// index: any shape, i64 or i32; result [..., embedding_dim]. weight: [num_embeddings,
// embedding_dim], standard normal at first.
class Embedding : public Module<Embedding> {
 public:
  Embedding(int64_t num_embeddings, int64_t embedding_dim, const EmbeddingOptions& options = {});
  Tensor forward(const Tensor& index);
  void reset_parameters();
  std::string extra_repr() const override;
  std::unique_ptr<Embedding> remake() const {
    return std::make_unique<Embedding>(num_embeddings, embedding_dim, options);
  }

  const int64_t num_embeddings;
  const int64_t embedding_dim;
  const EmbeddingOptions options;
  const Tensor& weight;
};

}  // namespace tessera::nn
