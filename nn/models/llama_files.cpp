// Folders of transformers: config.json, and model.safetensors or shards with an index.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include <tessera/core/io/atomic_file.h>
#include <tessera/core/state/weight_files.h>
#include <tessera/nn/models/config_limits.h>
#include <tessera/nn/models/llama.h>
#include <tessera/nn/models/made_to_load.h>
#include <tessera/nn/models/tied_head.h>
#include <tessera/nn/quantize/quantize.h>

namespace tessera::nn::models {

using Json = nlohmann::json;

constexpr const char* kTokenTable = "model.embed_tokens.weight";

namespace {

// Of all matrices but a head of its own.
double weights_of(const LlamaConfig& config) {
  const auto C = static_cast<double>(config.width), E = static_cast<double>(config.head());
  const double attention =
      2 * C * E * (static_cast<double>(config.heads) + static_cast<double>(config.keys()));
  return static_cast<double>(config.vocab_size) * C +
         static_cast<double>(config.layers) *
             (attention + 3 * C * static_cast<double>(config.inner));
}

}  // namespace

void LlamaConfig::check() const {
  for (const auto& [name, value] :
       {std::pair("vocab_size", vocab_size), std::pair("max_position_embeddings", context),
        std::pair("hidden_size", width), std::pair("intermediate_size", inner),
        std::pair("num_hidden_layers", layers), std::pair("num_attention_heads", heads)}) {
    TS_CHECK_AS(ConfigError, value > 0 && value < kLargestSize, "llama", name,
                " must be positive and below 2^31; got ", value);
  }
  TS_CHECK_AS(ConfigError,
              head_dim < kLargestSize && (head_dim > 0 || width % heads == 0) && head() > 0 &&
                  head() % 2 == 0,
              "llama", "a head has an even number of features; got ", width, " for ", heads,
              " heads, and head_dim ", head_dim);
  TS_CHECK_AS(ConfigError, heads % keys() == 0, "llama",
              "num_attention_heads must be a multiple of num_key_value_heads; got ", heads, " and ",
              keys());
  TS_CHECK_AS(ConfigError, window >= 0, "llama", "sliding_window must not be negative; got ",
              window);
  check_extent("llama", layers, weights_of(*this));
  TS_CHECK_AS(ConfigError, windowed.empty() || windowed.size() == static_cast<size_t>(layers),
              "llama", "layer_types says of ", windowed.size(), " layers; there are ", layers);
  TS_CHECK_AS(ConfigError,
              rotated > 0 && rotated <= 1 && rotated_features() > 0 && rotated_features() % 2 == 0,
              "llama", "partial_rotary_factor rotates an even number of a head's ", head(),
              " features; got ", rotated);
  TS_CHECK_AS(ConfigError, attention_dropout >= 0 && attention_dropout < 1, "llama",
              "attention_dropout must be in [0, 1); got ", attention_dropout);
  TS_CHECK_AS(ConfigError, attention_dropout == 0 || score_cap == 0, "llama",
              "has no attention_dropout of capped scores (attn_logit_softcapping); got ",
              attention_dropout, "; set it to 0");
  TS_CHECK_AS(ConfigError, query_scalar >= 0 && score_cap >= 0 && logit_cap >= 0, "llama",
              "query_pre_attn_scalar, attn_logit_softcapping and final_logit_softcapping must be "
              "above 0; got ",
              query_scalar, ", ", score_cap, " and ", logit_cap);
  TS_CHECK_AS(ConfigError, !joined || (!qkv_bias && !mlp_bias), "llama",
              "a model of joined projections has no biases");
}

// Before a model is made: a damaged config.json would ask for any amount of memory.
static void check_sizes(const LlamaConfig& config, const StateDict& weights,
                        const std::string& folder) {
  double held = 0;
  for (const auto& [name, tensor] : weights) held += static_cast<double>(tensor.numel());
  const double needed = weights_of(config);
  constexpr double kWorthTrying = 1 << 28;  // load_state_dict() says more of smaller differences
  TS_CHECK_AS(FormatError, needed <= held || needed <= kWorthTrying, folder, "config.json makes ",
              needed, " weights and the safetensors hold ", held,
              "; get both again from one place");
}

std::unique_ptr<Llama> Llama::from_pretrained(const std::string& folder,
                                              const std::function<void(ModuleBase&)>& divide) {
  LlamaConfig config = LlamaConfig::read((std::filesystem::path(folder) / "config.json").string());
  const StateDict weights = tessera::load_weights(folder);
  config.tied = is_head_tied(config.tied, weights, kTokenTable, folder);
  StateDict state;
  for (const auto& [name, tensor] : weights) {
    if (config.tied && name == kHead && weights.contains(kTokenTable)) continue;  // the same twice
    if (name.ends_with("rotary_emb.inv_freq")) continue;  // of old checkpoints
    state.set(name, tensor);
  }
  check_sizes(config, state, folder);
  auto model = made_to_load<Llama>(config, divide);
  try {
    model->load_state_dict(state);
  } catch (Error& error) {
    error.add_context(folder);
    throw;
  }
  return model;
}

void Llama::save_pretrained(const std::string& folder, const std::string& max_shard_size) const {
  refuse_quantized_layers(*this, "save_pretrained");
  const StateDict weights = state_dict();
  save_weights(weights, folder, {.max_shard_size = max_shard_size});
  LlamaConfig written = config;
  written.tied = config.tied && !own_head(weights, kTokenTable);  // merging an adapter unties
  written.write((std::filesystem::path(folder) / "config.json").string(),
                model.embed_tokens.weight.dtype());
}

}  // namespace tessera::nn::models
