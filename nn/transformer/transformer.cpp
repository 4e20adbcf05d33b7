#include <tessera/nn/transformer/transformer.h>

#include <tessera/autograd/ops.h>

namespace tessera::nn {
namespace {

using Options = TransformerLayerOptions;

MultiheadAttentionOptions attention_options(const Options& options) {
  return {.dropout = options.dropout, .bias = options.bias, .batch_first = options.batch_first};
}
LayerNormOptions norm_options(const Options& options) {
  return {.eps = options.layer_norm_eps, .bias = options.bias};
}
Tensor activate(const Tensor& x, const Options& options) {
  return options.activation == Options::Activation::kRelu ? relu(x) : gelu(x);
}

}  // namespace

// ---- Encoder layer -----------------------------------------------------------------------------

TransformerEncoderLayer::TransformerEncoderLayer(int64_t d_model, int64_t nhead,
                                                 const TransformerLayerOptions& options)
    : d_model(d_model),
      nhead(nhead),
      options(options),
      self_attn(add<MultiheadAttention>("self_attn", d_model, nhead, attention_options(options))),
      linear1(add<Linear>("linear1", d_model, options.dim_feedforward,
                          LinearOptions{.bias = options.bias})),
      dropout(add<Dropout>("dropout", options.dropout)),
      linear2(add<Linear>("linear2", options.dim_feedforward, d_model,
                          LinearOptions{.bias = options.bias})),
      norm1(add<LayerNorm>("norm1", d_model, norm_options(options))),
      norm2(add<LayerNorm>("norm2", d_model, norm_options(options))),
      dropout1(add<Dropout>("dropout1", options.dropout)),
      dropout2(add<Dropout>("dropout2", options.dropout)) {}

Tensor TransformerEncoderLayer::attend(const Tensor& x, const EncoderMasks& masks) {
  const AttentionMasks attention{.key_padding_mask = masks.src_key_padding_mask,
                                 .attn_mask = masks.src_mask,
                                 .causal = masks.causal};
  return dropout1(self_attn(x, x, x, attention).output);
}
Tensor TransformerEncoderLayer::feed_forward(const Tensor& x) {
  return dropout2(linear2(dropout(activate(linear1(x), options))));
}

Tensor TransformerEncoderLayer::forward(const Tensor& src, const EncoderMasks& masks) {
  if (options.norm_first) {
    const Tensor x = src + attend(norm1(src), masks);
    return x + feed_forward(norm2(x));
  }
  const Tensor x = norm1(src + attend(src, masks));
  return norm2(x + feed_forward(x));
}

// ---- Decoder layer -----------------------------------------------------------------------------

TransformerDecoderLayer::TransformerDecoderLayer(int64_t d_model, int64_t nhead,
                                                 const TransformerLayerOptions& options)
    : d_model(d_model),
      nhead(nhead),
      options(options),
      self_attn(add<MultiheadAttention>("self_attn", d_model, nhead, attention_options(options))),
      multihead_attn(
          add<MultiheadAttention>("multihead_attn", d_model, nhead, attention_options(options))),
      linear1(add<Linear>("linear1", d_model, options.dim_feedforward,
                          LinearOptions{.bias = options.bias})),
      dropout(add<Dropout>("dropout", options.dropout)),
      linear2(add<Linear>("linear2", options.dim_feedforward, d_model,
                          LinearOptions{.bias = options.bias})),
      norm1(add<LayerNorm>("norm1", d_model, norm_options(options))),
      norm2(add<LayerNorm>("norm2", d_model, norm_options(options))),
      norm3(add<LayerNorm>("norm3", d_model, norm_options(options))),
      dropout1(add<Dropout>("dropout1", options.dropout)),
      dropout2(add<Dropout>("dropout2", options.dropout)),
      dropout3(add<Dropout>("dropout3", options.dropout)) {}

Tensor TransformerDecoderLayer::attend(const Tensor& x, const DecoderMasks& masks) {
  const AttentionMasks attention{.key_padding_mask = masks.tgt_key_padding_mask,
                                 .attn_mask = masks.tgt_mask,
                                 .causal = masks.causal};
  return dropout1(self_attn(x, x, x, attention).output);
}
Tensor TransformerDecoderLayer::attend_memory(const Tensor& x, const Tensor& memory,
                                              const DecoderMasks& masks) {
  const AttentionMasks attention{.key_padding_mask = masks.memory_key_padding_mask,
                                 .attn_mask = masks.memory_mask};
  return dropout2(multihead_attn(x, memory, memory, attention).output);
}
Tensor TransformerDecoderLayer::feed_forward(const Tensor& x) {
  return dropout3(linear2(dropout(activate(linear1(x), options))));
}

Tensor TransformerDecoderLayer::forward(const Tensor& tgt, const Tensor& memory,
                                        const DecoderMasks& masks) {
  if (options.norm_first) {
    const Tensor x = tgt + attend(norm1(tgt), masks);
    const Tensor y = x + attend_memory(norm2(x), memory, masks);
    return y + feed_forward(norm3(y));
  }
  const Tensor x = norm1(tgt + attend(tgt, masks));
  const Tensor y = norm2(x + attend_memory(x, memory, masks));
  return norm3(y + feed_forward(y));
}

// ---- Stacks ------------------------------------------------------------------------------------

TransformerEncoder::TransformerEncoder(int64_t d_model, int64_t nhead, int64_t num_layers,
                                       const TransformerLayerOptions& options, bool final_norm)
    : layers(add<ModuleList>("layers")) {
  TS_CHECK(num_layers > 0, "TransformerEncoder", "num_layers must be positive; got ", num_layers);
  for (int64_t i = 0; i < num_layers; ++i) {
    layers.append<TransformerEncoderLayer>(d_model, nhead, options);
  }
  if (final_norm) norm = &add<LayerNorm>("norm", d_model, norm_options(options));
}
Tensor TransformerEncoder::forward(const Tensor& src, const EncoderMasks& masks) {
  Tensor x = src;
  for (size_t i = 0; i < layers.size(); ++i) x = layers.at<TransformerEncoderLayer>(i)(x, masks);
  return norm != nullptr ? (*norm)(x) : x;
}
std::unique_ptr<TransformerEncoder> TransformerEncoder::remake() const {
  const auto& first = layers.at<TransformerEncoderLayer>(0);
  return std::make_unique<TransformerEncoder>(first.d_model, first.nhead,
                                              static_cast<int64_t>(layers.size()), first.options,
                                              norm != nullptr);
}

TransformerDecoder::TransformerDecoder(int64_t d_model, int64_t nhead, int64_t num_layers,
                                       const TransformerLayerOptions& options, bool final_norm)
    : layers(add<ModuleList>("layers")) {
  TS_CHECK(num_layers > 0, "TransformerDecoder", "num_layers must be positive; got ", num_layers);
  for (int64_t i = 0; i < num_layers; ++i) {
    layers.append<TransformerDecoderLayer>(d_model, nhead, options);
  }
  if (final_norm) norm = &add<LayerNorm>("norm", d_model, norm_options(options));
}
Tensor TransformerDecoder::forward(const Tensor& tgt, const Tensor& memory,
                                   const DecoderMasks& masks) {
  Tensor x = tgt;
  for (size_t i = 0; i < layers.size(); ++i) {
    x = layers.at<TransformerDecoderLayer>(i)(x, memory, masks);
  }
  return norm != nullptr ? (*norm)(x) : x;
}
std::unique_ptr<TransformerDecoder> TransformerDecoder::remake() const {
  const auto& first = layers.at<TransformerDecoderLayer>(0);
  return std::make_unique<TransformerDecoder>(first.d_model, first.nhead,
                                              static_cast<int64_t>(layers.size()), first.options,
                                              norm != nullptr);
}

}  // namespace tessera::nn
