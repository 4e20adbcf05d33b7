#include <tessera/nn/models/gpt2.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include <tessera/autograd/autograd.h>
#include <tessera/nn/init.h>

namespace tessera::nn::models {

namespace gpt2 {

// ---- Blocks ------------------------------------------------------------------------------------

Attention::Attention(const GptConfig& config, size_t layer)
    : heads(config.heads),
      layer(layer),
      dropout(config.dropout),
      c_attn(add<Linear>("c_attn", config.width, 3 * config.width)),
      c_proj(add<Linear>("c_proj", config.width, config.width)) {}

Tensor Attention::forward(const Tensor& x, const SeenKeys& keys, models::KvCache* cache) {
  // Tokens and heads are those that the result has: where ranks share the layer, each has some heads.
  const Tensor all = c_attn(x);
  const int64_t B = all.size(0), T = all.size(1), E = x.size(2) / heads;
  const Tensor packed = all.view({B, T, 3, all.size(2) / (3 * E), E});
  const double drop = is_training() ? dropout : 0;
  if (cache == nullptr && keys.options.causal) {
    return c_proj(
        packed_attention(packed, {.starts = keys.options.starts, .dropout = drop, .causal = true}));
  }
  const auto part = [&](int64_t i) { return packed.select(2, i).transpose(1, 2); };
  AttentionOptions options = keys.options;
  if (cache == nullptr) options.dropout = drop;
  const Tensor y = cache ? cache->attend(layer, part(0), part(1), part(2), options)
                         : scaled_dot_product_attention(part(0), part(1), part(2), options);
  return c_proj(y.transpose(1, 2).reshape({B, T, y.size(1) * E}));
}

Block::Block(const GptConfig& config, size_t layer)
    : dropout(config.dropout),
      ln_1(add<LayerNorm>("ln_1", config.width, LayerNormOptions{.eps = config.layer_norm_eps})),
      attn(add<Attention>("attn", config, layer)),
      ln_2(add<LayerNorm>("ln_2", config.width, LayerNormOptions{.eps = config.layer_norm_eps})),
      mlp(add<Mlp>("mlp", config.width, config.inner_width(),
                   MlpOptions{.approximate = Gelu::kTanh, .inner = "c_fc", .outer = "c_proj"})) {}

Residual Block::forward(const Residual& x, const SeenKeys& keys, models::KvCache* cache) {
  const PreNormOptions options{.dropout = is_training() ? dropout : 0};
  const Residual attended = pre_norm_residual(x, ln_1, attn, options, keys, cache);
  return pre_norm_residual(attended, ln_2, mlp, options);
}

Transformer::Transformer(const GptConfig& config)
    : config(config),
      wte(add<Embedding>("wte", config.vocab_size, config.width)),
      wpe(add<Embedding>("wpe", config.context, config.width)),
      h(add<ModuleList>("h")),
      ln_f(add<LayerNorm>("ln_f", config.width, LayerNormOptions{.eps = config.layer_norm_eps})) {
  for (int64_t i = 0; i < config.layers; ++i) h.append<Block>(config, static_cast<size_t>(i));
}

Tensor Transformer::forward(const TokenRows& tokens, models::KvCache* cache,
                            const Tensor& padding) {
  check_rows("gpt2", tokens);
  const Tensor& ids = tokens.ids;
  const int64_t past = cache == nullptr ? 0 : cache->length(), T = ids.size(1);
  const VisibleKeys visible{
      .past = past, .count = T, .padding = padding, .documents = tokens.documents};
  check_padding(padding, ids);
  check_packed("gpt2", visible, cache != nullptr);
  TS_CHECK_SHAPE(tokens.documents.defined() || past + T <= config.context, "gpt2",
                 "tokens must be [batch, length] with at most ", config.context, " positions; got ",
                 ids, " behind ", past, " tokens");
  const SeenKeys keys = attention_to(visible, ids.device());
  const Tensor places = wpe(positions_of(visible, ids.device()));
  Residual x = tessera::dropout(embedding_add(wte, ids, places), config.dropout, is_training());
  for (size_t i = 0; i < h.size(); ++i) x = h.at<Block>(i)(x, keys, cache);
  if (cache != nullptr) cache->advance(T);
  return pre_norm(ln_f, x);
}

}  // namespace gpt2

// ---- Gpt ---------------------------------------------------------------------------------------

Gpt::Gpt(const GptConfig& config)
    : config((config.check(), config)),
      transformer([&]() -> gpt2::Transformer& {
        // Values come from initialise(), as GPT-2 has them.
        ParameterDefaults defaults = ParameterDefaultsGuard::current();
        defaults.initialise = false;
        const ParameterDefaultsGuard guard(defaults);
        return add<gpt2::Transformer>("transformer", config);
      }()),
      lm_head([&]() -> Linear& {
        ParameterDefaults defaults = ParameterDefaultsGuard::current();
        if (config.tied) defaults.device = kMeta;  // made without bytes: it is shared next
        defaults.initialise = false;
        const ParameterDefaultsGuard guard(defaults);
        return add<Linear>("lm_head", config.width, config.vocab_size,
                           LinearOptions{.bias = false});
      }()) {
  if (config.tied) lm_head.share_parameter("weight", transformer.wte.weight);
  if (ParameterDefaultsGuard::current().initialise) initialise();
}

std::vector<StyledModules> Gpt::parallel_styles() const {
  using enum ParallelStyle;
  return {{"transformer.wte", kVocabulary},
          {"transformer.wpe", kSequence},
          {"transformer.h.*.ln_*", kSequence},
          {"transformer.h.*.attn.c_attn", kColumnwise, 3, config.heads},
          {"transformer.h.*.attn.c_proj", kRowwise},
          {"transformer.h.*.mlp.c_fc", kColumnwise},
          {"transformer.h.*.mlp.c_proj", kRowwise},
          {"transformer.ln_f", kSequence},
          {"lm_head", kLossHead}};
}

// Normal with deviation initializer_range; projections into the residual stream are scaled by
// 1 / sqrt(their number), which keeps its variance at depth (GPT-2 paper, 2.3).
void Gpt::initialise() {
  const double residual_scale = 1 / std::sqrt(2.0 * static_cast<double>(config.layers));
  for (const auto& [name, tensor] : named_parameters()) {
    if (tensor.dim() == 1) {
      init::constant(tensor, name.ends_with(".weight") ? 1 : 0);
    } else {
      const double scale = name.ends_with("c_proj.weight") ? residual_scale : 1;
      init::normal(tensor, 0, config.initializer_range * scale, initial_stream(name));
    }
  }
}

GptOutput Gpt::forward(const TokenRows& tokens, const Tensor& targets, Logits logits,
                       KvCache* cache, const Tensor& padding) {
  const Tensor x = transformer(tokens, cache, padding);
  const auto last = [](const Tensor& all) { return all.narrow(1, all.size(1) - 1, 1); };
  if (!targets.defined()) {
    return {.logits = lm_head(logits == Logits::kLast ? last(x) : x), .loss = {}};
  }
  if (logits == Logits::kWithoutLoss) {
    return {.logits = {}, .loss = linear_cross_entropy(lm_head, x, targets)};
  }
  const Tensor flat_targets = targets.reshape({targets.numel()});
  const int64_t N = flat_targets.numel();
  const Tensor all = lm_head(x);
  return {.logits = logits == Logits::kLast ? last(all) : all,
          .loss = cross_entropy(all.view({N, config.vocab_size}), flat_targets)};
}

}  // namespace tessera::nn::models
