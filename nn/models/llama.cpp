#include <tessera/nn/models/llama.h>

#include <tessera/autograd/autograd.h>
#include <tessera/nn/init.h>

namespace tessera::nn::models {
namespace {

RmsNormOptions norm_options(const LlamaConfig& config) { return {.eps = config.rms_norm_eps}; }

// What tokens past .. past + T - 1 see of the tokens up to themselves; with a window the latest
// alone.
AttentionOptions visible(int64_t past, int64_t T, int64_t window, const Device& device) {
  AttentionOptions options{.enable_gqa = true};
  const int64_t S = past + T;
  const bool cut = window > 0 && window < S;
  if (past == 0 && !cut) {
    options.causal = true;
  } else if (T > 1 || cut) {
    const Tensor all = ones({T, S}, {.dtype = kBool, .device = device});
    options.mask = tril(cut ? triu(all, past - window + 1) : all, past);
  }
  return options;
}

}  // namespace

namespace llama {

// ---- KvCache -----------------------------------------------------------------------------------

KvCache::KvCache(const LlamaConfig& config, int64_t batch, int64_t capacity, DType dtype,
                 const Device& device) {
  const Shape shape = {batch, config.keys(), capacity, config.head()};
  for (int64_t i = 0; i < config.layers; ++i) {
    keys_.push_back(empty(shape, {.dtype = dtype, .device = device}));
    values_.push_back(empty(shape, {.dtype = dtype, .device = device}));
  }
}

KvCache::Held KvCache::append(size_t layer, const Tensor& keys, const Tensor& values) {
  const int64_t added = keys.size(2), total = length_ + added, capacity = keys_.at(layer).size(2);
  TS_CHECK_SHAPE(total <= capacity, "KvCache", "holds ", length_, " of ", capacity,
                 " tokens and cannot take ", added, " more; make it with more room");
  const NoGradGuard no_grad;
  keys_[layer].narrow(2, length_, added).copy_(keys);
  values_[layer].narrow(2, length_, added).copy_(values);
  return {keys_[layer].narrow(2, 0, total), values_[layer].narrow(2, 0, total)};
}

// ---- Blocks ------------------------------------------------------------------------------------

Attention::Attention(const LlamaConfig& config, int64_t layer)
    : config(config),
      layer(layer),
      q_proj(add<Linear>("q_proj", config.width, config.heads * config.head(),
                         LinearOptions{.bias = config.qkv_bias})),
      k_proj(add<Linear>("k_proj", config.width, config.keys() * config.head(),
                         LinearOptions{.bias = config.qkv_bias})),
      v_proj(add<Linear>("v_proj", config.width, config.keys() * config.head(),
                         LinearOptions{.bias = config.qkv_bias})),
      o_proj(add<Linear>("o_proj", config.heads * config.head(), config.width,
                         LinearOptions{.bias = config.out_bias})) {
  if (!config.head_norms) return;
  q_norm = &add<RMSNorm>("q_norm", config.head(), norm_options(config));
  k_norm = &add<RMSNorm>("k_norm", config.head(), norm_options(config));
}

Tensor Attention::forward(const Tensor& given, const Positions& positions, KvCache* cache) {
  // Tokens and heads are those that tensors have: where ranks share the layer, each has some heads.
  const Tensor x = entered(q_proj, given);
  const int64_t B = x.size(0), T = x.size(1), E = config.head();
  const auto split = [&](const Tensor& y, RMSNorm* norm = nullptr) {
    const Tensor heads = y.view({B, T, y.size(-1) / E, E});
    return (norm == nullptr ? heads : (*norm)(heads)).transpose(1, 2);
  };
  const auto& [cos, sin] = positions.angles;
  const Tensor queries = rotary_embedding(split(q_proj(x), q_norm), cos, sin);
  KvCache::Held held{rotary_embedding(split(k_proj(x), k_norm), cos, sin), split(v_proj(x))};
  if (cache != nullptr) held = cache->append(static_cast<size_t>(layer), held.keys, held.values);
  const Tensor mixed =
      scaled_dot_product_attention(queries, held.keys, held.values,
                                   config.window_of(layer) > 0 ? positions.window : positions.all);
  return o_proj(mixed.transpose(1, 2).reshape({B, T, mixed.size(1) * E}));
}

GatedMlp::GatedMlp(const LlamaConfig& config)
    : gate_proj(add<Linear>("gate_proj", config.width, config.inner,
                            LinearOptions{.bias = config.mlp_bias})),
      up_proj(add<Linear>("up_proj", config.width, config.inner,
                          LinearOptions{.bias = config.mlp_bias})),
      down_proj(add<Linear>("down_proj", config.inner, config.width,
                            LinearOptions{.bias = config.mlp_bias})) {}

DecoderLayer::DecoderLayer(const LlamaConfig& config, int64_t layer)
    : input_layernorm(add<RMSNorm>("input_layernorm", config.width, norm_options(config))),
      self_attn(add<Attention>("self_attn", config, layer)),
      post_attention_layernorm(
          add<RMSNorm>("post_attention_layernorm", config.width, norm_options(config))),
      mlp(add<GatedMlp>("mlp", config)) {}

Decoder::Decoder(const LlamaConfig& config)
    : config(config),
      embed_tokens(add<Embedding>("embed_tokens", config.vocab_size, config.width)),
      layers(add<ModuleList>("layers")),
      norm(add<RMSNorm>("norm", config.width, norm_options(config))),
      rotary_emb(add<RotaryEmbedding>("rotary_emb", config.head(), config.rotary)) {
  for (int64_t i = 0; i < config.layers; ++i) layers.append<DecoderLayer>(config, i);
}

Tensor Decoder::forward(const Tensor& tokens, KvCache* cache) {
  TS_CHECK_SHAPE(tokens.dim() == 2, "llama", "tokens must be [batch, length]; got ", tokens);
  const int64_t past = cache == nullptr ? 0 : cache->length(), T = tokens.size(1);
  Tensor x = embed_tokens(tokens);
  const Positions positions{.angles = rotary_emb.angles(past, T, x.device()),
                            .all = visible(past, T, 0, x.device()),
                            .window = visible(past, T, config.window, x.device())};
  for (size_t i = 0; i < layers.size(); ++i) x = layers.at<DecoderLayer>(i)(x, positions, cache);
  if (cache != nullptr) cache->advance(T);
  return norm(x);
}

}  // namespace llama

Llama::Llama(const LlamaConfig& config)
    : config(config),
      model([&]() -> llama::Decoder& {
        config.check();
        return add<llama::Decoder>("model", config);
      }()),
      lm_head([&]() -> Linear& {
        ParameterDefaults defaults = ParameterDefaultsGuard::current();
        if (config.tied) defaults.device = kMeta, defaults.initialise = false;  // shared below
        const ParameterDefaultsGuard guard(defaults);
        return add<Linear>("lm_head", config.width, config.vocab_size,
                           LinearOptions{.bias = false});
      }()) {
  if (config.tied) lm_head.share_parameter("weight", model.embed_tokens.weight);
  if (!ParameterDefaultsGuard::current().initialise) return;
  for (const auto& [name, tensor] : named_parameters()) {
    if (tensor.dim() == 1) {
      init::constant(tensor, name.ends_with(".weight") ? 1 : 0);
    } else {
      init::normal(tensor, 0, config.initializer_range, initial_stream(name));
    }
  }
}

LlamaOutput Llama::forward(const Tensor& tokens, const Tensor& targets, bool last_only,
                           llama::KvCache* cache) {
  const Tensor x = model(tokens, cache);
  if (!targets.defined()) {
    return {.logits = lm_head(last_only ? x.narrow(1, x.size(1) - 1, 1) : x), .loss = {}};
  }
  return {.logits = {}, .loss = linear_cross_entropy(lm_head, x, targets)};
}

std::vector<StyledModules> Llama::parallel_styles() const {
  using enum ParallelStyle;
  std::vector<StyledModules> styles{
      {"model.embed_tokens", kVocabulary},
      {"model.layers.*.*_layernorm", kSequence},
      {"model.layers.*.self_attn.q_proj", kColumnwise, 1, config.heads},
      {"model.layers.*.self_attn.k_proj", kColumnwise, 1, config.keys()},
      {"model.layers.*.self_attn.v_proj", kColumnwise, 1, config.keys()},
      {"model.layers.*.self_attn.o_proj", kRowwise},
      {"model.layers.*.mlp.gate_proj", kColumnwise},
      {"model.layers.*.mlp.up_proj", kColumnwise},
      {"model.layers.*.mlp.down_proj", kRowwise},
      {"model.norm", kSequence},
      {"lm_head", kLossHead}};
  if (config.head_norms) {
    styles.push_back({"model.layers.*.self_attn.*_norm", kHeads});
  }
  return styles;
}

}  // namespace tessera::nn::models
