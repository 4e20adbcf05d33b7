#include <tessera/nn/models/llama.h>

#include <cmath>

#include <tessera/autograd/autograd.h>
#include <tessera/nn/init.h>

namespace tessera::nn::models {
namespace {

RmsNormOptions norm_options(const LlamaConfig& config) {
  return {.eps = config.rms_norm_eps, .plus_one = config.norms_plus_one};
}

// cap * tanh(x / cap), below the cap on both sides.
Tensor capped(const Tensor& x, double cap) { return tanh(x / cap) * cap; }

// scaled_dot_product_attention of scores that are capped before the mask, in ops: [B, H, T, S] is in
// memory. A query that sees no key, as of padding, takes the mean of all.
Tensor capped_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& mask, double scale, double cap) {
  const int64_t B = query.size(0), H = query.size(1), T = query.size(2), E = query.size(3);
  const int64_t Hk = key.size(1), S = key.size(2), group = H / Hk;
  // The queries that share keys are rows of one product.
  const Tensor rows = query.reshape({B, Hk, group * T, E});
  Tensor scores = matmul(rows, key.transpose(2, 3)).view({B, Hk, group, T, S});
  if (is_low_precision(scores.dtype())) scores = scores.to(kF32);
  const Tensor hidden = logical_not(mask.dim() == 2 ? mask : mask.unsqueeze(1));
  constexpr double kHidden = -1e30;
  const Tensor weights = softmax(capped(scores * scale, cap).masked_fill(hidden, kHidden), -1);
  return matmul(weights.to(value.dtype()).view({B, Hk, group * T, S}), value)
      .view({B, H, T, value.size(3)});
}

// A part of the features is turned, the rest stays.
Tensor turned(const Tensor& x, const RotaryAngles& angles) {
  const int64_t part = 2 * angles.cos.size(-1), rest = x.size(-1) - part;
  if (rest == 0) return rotary_embedding(x, angles.cos, angles.sin);
  const Tensor head = rotary_embedding(x.narrow(-1, 0, part), angles.cos, angles.sin);
  return cat({head, x.narrow(-1, part, rest)}, -1);
}

Tensor activated(const Tensor& gate, GatedActivation activation) {
  if (activation == GatedActivation::kSilu) return silu(gate);
  return gelu(gate, activation == GatedActivation::kGeluTanh ? Gelu::kTanh : Gelu::kNone);
}

}  // namespace

namespace llama {

// ---- Blocks ------------------------------------------------------------------------------------

Attention::Attention(const LlamaConfig& config, int64_t layer)
    : config(config), layer(layer), o_proj([&]() -> Linear& {
        const auto linear = [&](const char* name, int64_t heads) {
          return &add<Linear>(name, config.width, heads * config.head(),
                              LinearOptions{.bias = config.qkv_bias});
        };
        if (config.joined) {
          qkv_proj = linear("qkv_proj", config.heads + 2 * config.keys());
        } else {
          q_proj = linear("q_proj", config.heads);
          k_proj = linear("k_proj", config.keys());
          v_proj = linear("v_proj", config.keys());
        }
        return add<Linear>("o_proj", config.heads * config.head(), config.width,
                           LinearOptions{.bias = config.out_bias});
      }()) {
  if (!config.head_norms) return;
  q_norm = &add<RMSNorm>("q_norm", config.head(), norm_options(config));
  k_norm = &add<RMSNorm>("k_norm", config.head(), norm_options(config));
}

Attention::Projected Attention::project(const Tensor& given) {
  // Tokens and heads are those that tensors have: where ranks share the layer, each has some heads.
  const int64_t E = config.head();
  const auto split = [&](const Tensor& y, RMSNorm* norm = nullptr) {
    const Tensor heads = y.view({y.size(0), y.size(1), y.size(-1) / E, E});
    return (norm == nullptr ? heads : (*norm)(heads)).transpose(1, 2);
  };
  if (config.joined) {
    const Tensor heads = split((*qkv_proj)(given));
    const int64_t H = config.heads, Hk = config.keys();
    return {heads.narrow(1, 0, H), heads.narrow(1, H, Hk), heads.narrow(1, H + Hk, Hk)};
  }
  const Tensor x = entered(*q_proj, given);
  return {split((*q_proj)(x), q_norm), split((*k_proj)(x), k_norm), split((*v_proj)(x))};
}

Tensor Attention::forward(const Tensor& given, const Positions& positions, models::KvCache* cache) {
  const View& view = config.window_of(layer) > 0 ? positions.window : positions.all;
  const auto [query, key, value] = project(given);
  const Tensor queries = turned(query, view.angles);
  const Tensor keys = turned(key, view.angles);
  AttentionOptions options = view.keys.options;
  if (config.query_scalar > 0) options.scale = 1 / std::sqrt(config.query_scalar);
  if (is_training()) options.dropout = config.attention_dropout;
  const auto E = static_cast<double>(config.head());
  const auto place = static_cast<size_t>(layer);
  Tensor mixed;
  if (config.score_cap > 0) {
    const auto held = cache ? cache->append(place, keys, value) : KvCache::Held{keys, value};
    mixed = capped_attention(queries, held.keys, held.values, options.mask,
                             options.scale.value_or(1 / std::sqrt(E)), config.score_cap);
  } else {
    mixed = cache ? cache->attend(place, queries, keys, value, options)
                  : scaled_dot_product_attention(queries, keys, value, options);
  }
  const int64_t B = mixed.size(0), T = mixed.size(2);
  return o_proj(mixed.transpose(1, 2).reshape({B, T, mixed.size(1) * mixed.size(3)}));
}

GatedMlp::GatedMlp(const LlamaConfig& config)
    : activation(config.activation), down_proj([&]() -> Linear& {
        const LinearOptions options{.bias = config.mlp_bias};
        if (config.joined) {
          gate_up_proj = &add<Linear>("gate_up_proj", config.width, 2 * config.inner, options);
        } else {
          gate_proj = &add<Linear>("gate_proj", config.width, config.inner, options);
          up_proj = &add<Linear>("up_proj", config.width, config.inner, options);
        }
        return add<Linear>("down_proj", config.inner, config.width, options);
      }()) {}

Tensor GatedMlp::forward(const Tensor& given) {
  if (gate_up_proj != nullptr) {
    const TensorList both = (*gate_up_proj)(given).chunk(2, -1);
    return down_proj(activated(both[0], activation) * both[1]);
  }
  const Tensor x = entered(*gate_proj, given);
  return down_proj(activated((*gate_proj)(x), activation) * (*up_proj)(x));
}

DecoderLayer::DecoderLayer(const LlamaConfig& config, int64_t layer)
    : input_layernorm(add<RMSNorm>("input_layernorm", config.width, norm_options(config))),
      self_attn(add<Attention>("self_attn", config, layer)),
      post_attention_layernorm(
          add<RMSNorm>("post_attention_layernorm", config.width, norm_options(config))),
      mlp([&]() -> GatedMlp& {
        if (config.post_norms) {
          const auto norm = [&](const char* name) {
            return &add<RMSNorm>(name, config.width, norm_options(config));
          };
          pre_feedforward_layernorm = norm("pre_feedforward_layernorm");
          post_feedforward_layernorm = norm("post_feedforward_layernorm");
        }
        return add<GatedMlp>("mlp", config);
      }()) {}

Tensor DecoderLayer::forward(const Tensor& x, const Positions& positions, models::KvCache* cache) {
  const Tensor attended = self_attn(input_layernorm(x), positions, cache);
  if (post_feedforward_layernorm == nullptr) {
    const Tensor middle = x + attended;
    return middle + mlp(post_attention_layernorm(middle));
  }
  const Tensor middle = x + post_attention_layernorm(attended);
  return middle + (*post_feedforward_layernorm)(mlp((*pre_feedforward_layernorm)(middle)));
}

Decoder::Decoder(const LlamaConfig& config)
    : config(config),
      embed_tokens(add<Embedding>("embed_tokens", config.vocab_size, config.width)),
      layers(add<ModuleList>("layers")),
      norm(add<RMSNorm>("norm", config.width, norm_options(config))),
      rotary_emb(add<RotaryEmbedding>("rotary_emb", config.rotated_features(), config.rotary)) {
  if (config.window_rotary) {
    window_rotary_emb = &add<RotaryEmbedding>("window_rotary_emb", config.rotated_features(),
                                              *config.window_rotary);
  }
  for (int64_t i = 0; i < config.layers; ++i) layers.append<DecoderLayer>(config, i);
}

Tensor Decoder::forward(const TokenRows& tokens, models::KvCache* cache, const Tensor& padding) {
  check_rows("llama", tokens);
  check_padding(padding, tokens.ids);
  const int64_t past = cache == nullptr ? 0 : cache->length(), T = tokens.ids.size(1);
  VisibleKeys keys{.past = past, .count = T, .padding = padding, .documents = tokens.documents};
  check_packed("llama", keys, cache != nullptr);
  Tensor x = embed_tokens(tokens.ids);
  if (config.scaled_embedding) {
    const double root = std::sqrt(static_cast<double>(config.width));
    x = x * full({1}, root, {.dtype = x.dtype()}).item();  // rounded
  }
  const auto view = [&](const RotaryEmbedding& rotary, int64_t window) {
    keys.window = window;
    View result{.angles = tokens.documents.defined() ? rotary.angles(tokens.documents.position_ids)
                          : padding.defined()
                              ? rotary.angles(positions_of(keys, x.device()).unsqueeze(1), past + T)
                              : rotary.angles(past, T, x.device()),
                .keys = attention_to(keys, x.device())};
    if (config.score_cap > 0) {
      result.keys = {.options = {.mask = mask_of(keys, x.device())}};
    }
    return result;
  };
  const Positions positions{
      .all = view(rotary_emb, 0),
      .window = config.window == 0
                    ? View{}
                    : view(window_rotary_emb ? *window_rotary_emb : rotary_emb, config.window)};
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
      // Biases are 0, and so are weights of norms that add 1 to them.
      init::constant(tensor, name.ends_with(".weight") && !config.norms_plus_one ? 1 : 0);
    } else {
      init::normal(tensor, 0, config.initializer_range, initial_stream(name));
    }
  }
}

LlamaOutput Llama::forward(const TokenRows& tokens, const Tensor& targets, bool last_only,
                           KvCache* cache, const Tensor& padding) {
  const Tensor x = model(tokens, cache, padding);
  const auto logits_of = [&](const Tensor& rows) {
    const Tensor logits = lm_head(rows);
    return config.logit_cap > 0 ? capped(logits, config.logit_cap) : logits;
  };
  if (!targets.defined()) {
    return {.logits = logits_of(last_only ? x.narrow(1, x.size(1) - 1, 1) : x), .loss = {}};
  }
  if (config.logit_cap == 0) {
    return {.logits = {}, .loss = linear_cross_entropy(lm_head, x, targets)};
  }
  const int64_t rows = targets.numel();
  return {.logits = {},
          .loss = cross_entropy(logits_of(x).reshape({rows, config.vocab_size}),
                                targets.reshape({rows}))};
}

std::vector<StyledModules> Llama::parallel_styles() const {
  using enum ParallelStyle;
  // Unequal blocks of qkv_proj are not divided, so such a model does not say how it may be.
  if (config.joined) return {};
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
