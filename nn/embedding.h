// Lookup of rows of a table by index.
#pragma once

#include <memory>
#include <optional>

#include <tessera/autograd/ops.h>
#include <tessera/nn/module.h>

namespace tessera::nn {

struct EmbeddingOptions {
  std::optional<int64_t> padding_idx = {};  // this row starts as zeros and gets no gradient
};
// index: any shape, i64 or i32; result [..., embedding_dim]. weight: [num_embeddings,
// embedding_dim], standard normal at first.
class Embedding : public Module<Embedding> {
 public:
  using Options = EmbeddingOptions;
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

struct EmbeddingBagLayerOptions {
  BagMode mode = BagMode::kMean;
  bool include_last_offset = false;
  std::optional<int64_t> padding_idx = {};  // this row starts as zeros and is in no bag
};
// One row for each bag of indices: the sum, mean or maximum of their rows. index: [bags, n], or [n]
// with offsets [bags] (embedding_bag in autograd/ops.h). weight: [num_embeddings, embedding_dim],
// standard normal at first.
class EmbeddingBag : public Module<EmbeddingBag> {
 public:
  using Options = EmbeddingBagLayerOptions;
  EmbeddingBag(int64_t num_embeddings, int64_t embedding_dim,
               const EmbeddingBagLayerOptions& options = {});
  Tensor forward(const Tensor& index, const Tensor& offsets = {},
                 const Tensor& per_sample_weights = {});
  void reset_parameters();
  std::string extra_repr() const override;
  std::unique_ptr<EmbeddingBag> remake() const {
    return std::make_unique<EmbeddingBag>(num_embeddings, embedding_dim, options);
  }

  const int64_t num_embeddings;
  const int64_t embedding_dim;
  const EmbeddingBagLayerOptions options;
  const Tensor& weight;
};

}  // namespace tessera::nn
