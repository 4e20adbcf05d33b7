#include <tessera/nn/embedding.h>

#include <tessera/autograd/ops.h>
#include <tessera/nn/init.h>
#include <tessera/nn/parallel_style.h>

namespace tessera::nn {

namespace {

template <class Options>
Options wrap_padding(const char* type, Options options, int64_t num_embeddings) {
  if (options.padding_idx) {
    int64_t& index = *options.padding_idx;
    TS_CHECK_INDEX(index >= -num_embeddings && index < num_embeddings, type,
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
      options(wrap_padding("Embedding", options, num_embeddings)),
      weight(parameter("weight", Shape{num_embeddings, embedding_dim})) {
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}

void Embedding::reset_parameters() {
  init::normal(weight, 0, 1, initial_stream("weight"));
  if (options.padding_idx) init::zeros(weight.detach().select(0, *options.padding_idx));
}

Tensor Embedding::forward(const Tensor& index) {
  if (const Boundary* const at = boundary())
    return at->embedding(index, weight, options.padding_idx);
  return embedding(index, weight, options.padding_idx);
}

std::string Embedding::extra_repr() const {
  std::string text = std::to_string(num_embeddings) + ", " + std::to_string(embedding_dim);
  if (options.padding_idx) text += ", padding_idx=" + std::to_string(*options.padding_idx);
  return text;
}

EmbeddingBag::EmbeddingBag(int64_t num_embeddings, int64_t embedding_dim,
                           const EmbeddingBagLayerOptions& options)
    : num_embeddings(num_embeddings),
      embedding_dim(embedding_dim),
      options(wrap_padding("EmbeddingBag", options, num_embeddings)),
      weight(parameter("weight", Shape{num_embeddings, embedding_dim})) {
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}

void EmbeddingBag::reset_parameters() {
  init::normal(weight, 0, 1, initial_stream("weight"));
  if (options.padding_idx) init::zeros(weight.detach().select(0, *options.padding_idx));
}

Tensor EmbeddingBag::forward(const Tensor& index, const Tensor& offsets,
                             const Tensor& per_sample_weights) {
  return embedding_bag(index, weight, offsets,
                       {.mode = options.mode,
                        .per_sample_weights = per_sample_weights,
                        .include_last_offset = options.include_last_offset,
                        .padding_idx = options.padding_idx});
}

std::string EmbeddingBag::extra_repr() const {
  std::string text = std::to_string(num_embeddings) + ", " + std::to_string(embedding_dim);
  if (options.padding_idx) text += ", padding_idx=" + std::to_string(*options.padding_idx);
  constexpr const char* kModes[] = {"sum", "mean", "max"};
  return text + ", mode='" + kModes[static_cast<int>(options.mode)] + "'";
}

}  // namespace tessera::nn
