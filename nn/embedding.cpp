#include <tessera/nn/embedding.h>

#include <tessera/autograd/ops.h>
#include <tessera/nn/init.h>

namespace tessera::nn {

namespace {

EmbeddingOptions wrap_padding(EmbeddingOptions options, int64_t num_embeddings) {
  if (options.padding_idx) {
    int64_t& index = *options.padding_idx;
    TS_CHECK_INDEX(index >= -num_embeddings && index < num_embeddings, "Embedding",
                   "padding_idx must be in [", -num_embeddings, ", ", num_embeddings, "); got ",
                   index);
    if (index < 0) index += num_embeddings;
  }
  return options;
}

}  // namespace

Embedding::Embedding(int64_t num_embeddings, int64_t embedding_dim, const EmbeddingOptions& options)
    : num_embeddings(num_embeddings),
      embedding_dim(embedding_dim),
      options(wrap_padding(options, num_embeddings)),
      weight(parameter("weight", Shape{num_embeddings, embedding_dim})) {
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}

void Embedding::reset_parameters() {
  init::normal(weight, 0, 1, initial_stream("weight"));
  if (options.padding_idx) init::zeros(weight.detach().select(0, *options.padding_idx));
}

Tensor Embedding::forward(const Tensor& index) {
  return embedding(index, weight, options.padding_idx);
}

std::string Embedding::extra_repr() const {
  std::string text = std::to_string(num_embeddings) + ", " + std::to_string(embedding_dim);
  if (options.padding_idx) text += ", padding_idx=" + std::to_string(*options.padding_idx);
  return text;
}

}  // namespace tessera::nn
