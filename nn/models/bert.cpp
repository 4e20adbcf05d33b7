#include <tessera/nn/models/bert.h>

#include <tessera/autograd/autograd.h>
#include <tessera/nn/init.h>
#include <tessera/nn/transformer/positions.h>

namespace tessera::nn::models {
namespace {

LayerNormOptions norm_options(const BertConfig& config) { return {.eps = config.layer_norm_eps}; }

}  // namespace

namespace bert {

Embeddings::Embeddings(const BertConfig& config)
    : config(config),
      word_embeddings(add<Embedding>("word_embeddings", config.vocab_size, config.width,
                                     EmbeddingOptions{.padding_idx = config.padding})),
      position_embeddings(add<Embedding>("position_embeddings", config.context, config.width)),
      token_type_embeddings(add<Embedding>("token_type_embeddings", config.types, config.width)),
      norm(add<LayerNorm>("LayerNorm", config.width, norm_options(config))) {}

Tensor Embeddings::forward(const TokenRows& rows, const Tensor& type_ids) {
  check_rows("bert", rows);
  const Tensor& ids = rows.ids;
  TS_CHECK_SHAPE(rows.documents.defined() || ids.size(1) <= config.context, "bert",
                 "ids must be [batch, length] with at most ", config.context, " positions; got ",
                 ids, "; cut the sequences");
  const Tensor types = token_type_embeddings(
      type_ids.defined() ? type_ids : zeros({1}, {.dtype = kI64, .device = ids.device()}));
  const Tensor sum =
      embedding_add(word_embeddings, ids, types + position_embeddings(positions(rows)));
  return dropout(norm(sum), config.dropout, is_training());
}

SelfAttention::SelfAttention(const BertConfig& config)
    : heads(config.heads),
      dropout(config.attention_dropout),
      query(add<Linear>("query", config.width, config.width)),
      key(add<Linear>("key", config.width, config.width)),
      value(add<Linear>("value", config.width, config.width)) {}

Tensor SelfAttention::forward(const Tensor& given, const VisibleKeys& keys) {
  // As many heads as the layers give: where ranks share them, each has some.
  const Tensor x = entered(query, given);
  const int64_t B = x.size(0), T = x.size(1), E = x.size(2) / heads;
  const AttentionOptions options{.mask = keys.mask,
                                 .lengths = keys.lengths,
                                 .starts = keys.starts,
                                 .ends = keys.ends,
                                 .dropout = is_training() ? dropout : 0};
  const Tensor packed = stacked_linear({&query, &key, &value}, x);
  if (packed.defined()) return packed_attention(packed.view({B, T, 3, heads, E}), options);
  const auto by_head = [&](const Tensor& y) {
    return y.view({B, T, y.size(2) / E, E}).transpose(1, 2);
  };
  const Tensor y =
      scaled_dot_product_attention(by_head(query(x)), by_head(key(x)), by_head(value(x)), options);
  return y.transpose(1, 2).reshape({B, T, y.size(1) * E});
}

SublayerOutput::SublayerOutput(int64_t inputs, const BertConfig& config)
    : dropout(config.dropout),
      dense(add<Linear>("dense", inputs, config.width)),
      norm(add<LayerNorm>("LayerNorm", config.width, norm_options(config))) {}

Tensor SublayerOutput::forward(const Tensor& x, const Tensor& residual) {
  return residual_layer_norm(norm, dense(x), residual, is_training() ? dropout : 0).normalized;
}

Attention::Attention(const BertConfig& config)
    : self(add<SelfAttention>("self", config)),
      output(add<SublayerOutput>("output", config.width, config)) {}

Tensor Attention::forward(const Tensor& x, const VisibleKeys& keys) {
  return output(self(x, keys), x);
}

Intermediate::Intermediate(const BertConfig& config)
    : dense(add<Linear>("dense", config.width, config.inner_width())) {}

Tensor Intermediate::forward(const Tensor& x) { return linear_gelu(dense, x); }

Layer::Layer(const BertConfig& config)
    : attention(add<Attention>("attention", config)),
      intermediate(add<Intermediate>("intermediate", config)),
      output(add<SublayerOutput>("output", config.inner_width(), config)) {}

Tensor Layer::forward(const Tensor& x, const VisibleKeys& keys) {
  const Tensor attended = attention(x, keys);
  return output(intermediate(attended), attended);
}

Encoder::Encoder(const BertConfig& config) : layer(add<ModuleList>("layer")) {
  for (int64_t i = 0; i < config.layers; ++i) layer.append<Layer>(config);
}

Tensor Encoder::forward(const Tensor& x, const VisibleKeys& keys) {
  Tensor y = x;
  for (size_t i = 0; i < layer.size(); ++i) y = layer.at<Layer>(i)(y, keys);
  return y;
}

Pooler::Pooler(const BertConfig& config)
    : dense(add<Linear>("dense", config.width, config.width)) {}

Tensor Pooler::forward(const Tensor& x) { return dense(x.select(1, 0)).tanh(); }

Model::Model(const BertConfig& config)
    : embeddings(add<Embeddings>("embeddings", config)),
      encoder(add<Encoder>("encoder", config)),
      pooler(add<Pooler>("pooler", config)) {}

Tensor Model::forward(const TokenRows& ids, const TokenFeatures& features) {
  VisibleKeys keys{
      .lengths = features.lengths, .starts = ids.documents.starts, .ends = ids.documents.ends};
  TS_CHECK(!ids.documents.defined() ||
               (!features.attention_mask.defined() && !features.lengths.defined()),
           "bert",
           "packed documents take no attention_mask and no lengths; padding behind the last "
           "document is a document of its own");
  if (features.attention_mask.defined()) {
    TS_CHECK(!features.lengths.defined(), "bert", "takes attention_mask or lengths, not both");
    TS_CHECK_SHAPE(features.attention_mask.shape() == ids.ids.shape(), "bert",
                   "attention_mask must have the shape of ids; got ", features.attention_mask,
                   " and ", ids.ids);
    // Every query sees the keys that are tokens: [B, 1, 1, T].
    keys.mask = ne(features.attention_mask, 0).unsqueeze(1).unsqueeze(1);
  }
  return encoder(embeddings(ids, features.type_ids), keys);
}

}  // namespace bert

Bert::Bert(const BertConfig& config)
    : config((config.check(), config)),
      bert([&]() -> models::bert::Model& {
        // Values come from initialise(), as BERT has them.
        ParameterDefaults defaults = ParameterDefaultsGuard::current();
        defaults.initialise = false;
        const ParameterDefaultsGuard guard(defaults);
        return add<models::bert::Model>("bert", config);
      }()),
      classifier(add<Linear>("classifier", config.width, config.labels)) {
  if (ParameterDefaultsGuard::current().initialise) initialise();
}

std::vector<StyledModules> Bert::parallel_styles() const {
  using enum ParallelStyle;
  std::vector<StyledModules> styles{{"bert.embeddings.word_embeddings", kVocabulary}};
  for (const char* part : {"query", "key", "value"}) {
    styles.push_back(
        {std::string("bert.encoder.layer.*.attention.self.") + part, kColumnwise, 1, config.heads});
  }
  styles.push_back({"bert.encoder.layer.*.attention.output.dense", kRowwise});
  styles.push_back({"bert.encoder.layer.*.intermediate.dense", kColumnwise});
  styles.push_back({"bert.encoder.layer.*.output.dense", kRowwise});
  for (const char* table : {"position_embeddings", "token_type_embeddings", "LayerNorm"}) {
    styles.push_back({std::string("bert.embeddings.") + table, kSequence});
  }
  styles.push_back({"bert.encoder.layer.*.attention.output.LayerNorm", kSequence});
  styles.push_back({"bert.encoder.layer.*.output.LayerNorm", kSequence});
  styles.push_back({"bert.pooler", kWhole});  // of the first token
  return styles;
}

// Normal with deviation initializer_range, biases zero, as google-research/bert.
void Bert::initialise() {
  for (const auto& [name, tensor] : named_parameters()) {
    if (tensor.dim() == 1) {
      init::constant(tensor, name.ends_with("LayerNorm.weight") ? 1 : 0);
    } else {
      init::normal(tensor, 0, config.initializer_range, initial_stream(name));
    }
  }
  const NoGradGuard no_grad;
  bert.embeddings.word_embeddings.weight.select(0, config.padding).zero_();
}

BertOutput Bert::forward(const TokenRows& ids, const TokenFeatures& features,
                         const Tensor& labels) {
  Tensor states = bert(ids, features);
  if (ids.documents.defined()) {  // the first token of each: [documents, 1, C]
    const Tensor& places = ids.documents.position_ids;
    const Tensor first = nonzero(eq(places.reshape({places.numel()}), 0)).squeeze(1);
    states = index_select(states.reshape({places.numel(), states.size(2)}), 0, first).unsqueeze(1);
  }
  const Tensor pooled = bert.pooler(states);
  const double rate = config.classifier_dropout >= 0 ? config.classifier_dropout : config.dropout;
  BertOutput output;
  output.logits = classifier(dropout(pooled, rate, is_training()));
  if (labels.defined()) output.loss = cross_entropy(output.logits, labels);
  return output;
}

}  // namespace tessera::nn::models
