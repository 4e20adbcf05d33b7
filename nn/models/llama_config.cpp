#include <tessera/nn/models/llama_config.h>

#include <algorithm>

#include <tessera/nn/models/config_reader.h>

namespace tessera::nn::models {
namespace {

using Json = nlohmann::json;

// What rope_parameters (transformers 5) or rope_scaling (4) says of how positions turn.
class RopeReader {
 public:
  RopeReader(const ConfigReader& reader, const char* field) : reader_(reader), field_(field) {
    const Json value = reader.json().value(field, Json());
    TS_CHECK_AS(FormatError, value.is_null() || value.is_object(), reader.path(), "the field '",
                field, "' must be an object; it is ", value.dump());
    if (value.is_object()) json_ = value;
    for (const auto& [key, one] : json_.items()) {
      TS_CHECK_AS(UnsupportedError, !one.is_object(), reader.path(), "the field '", field,
                  "' has values for '", key, "' alone; all layers turn alike here");
    }
  }
  bool empty() const { return json_.empty(); }

  RotaryOptions options(int64_t context) const {
    RotaryOptions options;
    options.theta = number("rope_theta", reader_.number("rope_theta", 10000));
    options.context = context;
    TS_CHECK_AS(UnsupportedError,
                number("partial_rotary_factor", reader_.number("partial_rotary_factor", 1)) == 1,
                reader_.path(), "partial_rotary_factor other than 1");
    const Json name = json_.value("rope_type", json_.value("type", Json()));
    if (name.is_null()) {
      TS_CHECK_AS(FormatError, !json_.contains("factor"), reader_.path(), "the field '", field_,
                  "' has a factor and does not say of which rope_type");
      return options;
    }
    const auto* known =
        std::ranges::find(kRotaryScalings, name.is_string() ? name.get<std::string>() : "");
    TS_CHECK_AS(UnsupportedError, known != std::end(kRotaryScalings), reader_.path(),
                "the rotary scaling ", name.dump(),
                " is not one of default, linear, dynamic, llama3");
    options.scaling = static_cast<RotaryScaling>(known - kRotaryScalings);
    if (options.scaling == RotaryScaling::kNone) return options;
    options.factor = number("factor", {});
    if (options.scaling != RotaryScaling::kLlama3) return options;
    options.low_freq_factor = number("low_freq_factor", {});
    options.high_freq_factor = number("high_freq_factor", {});
    // The others go by the model's context. One beside the object comes first in transformers.
    constexpr const char* kTrained = "original_max_position_embeddings";
    options.context = reader_.integer(
        kTrained, static_cast<int64_t>(number(kTrained, static_cast<double>(context))));
    return options;
  }

 private:
  double number(const char* field, std::optional<double> fallback) const {
    const auto found = json_.find(field);
    if (found == json_.end() || found->is_null()) {
      TS_CHECK_AS(FormatError, fallback.has_value(), reader_.path(), "the field '", field_,
                  "' lacks '", field, "', without which its rope_type means nothing");
      return *fallback;
    }
    TS_CHECK_AS(FormatError, found->is_number(), reader_.path(), "the field '", field,
                "' of the rotary scaling must be a number; it is ", found->dump());
    return found->get<double>();
  }

  const ConfigReader& reader_;
  const char* field_;
  Json json_ = Json::object();
};

RotaryOptions read_rotary(const ConfigReader& reader, int64_t context) {
  const RopeReader now(reader, "rope_parameters"), old(reader, "rope_scaling");
  if (now.empty() || old.empty()) return (now.empty() ? old : now).options(context);
  const RotaryOptions options = now.options(context);
  TS_CHECK_AS(FormatError, options == old.options(context), reader.path(),
              "rope_parameters and rope_scaling contradict each other; take the one away that the "
              "model was not trained with");
  return options;
}

// Mistral: all layers have the window. Qwen2: those from max_window_layers on, where it is in use;
// layer_types says it again. Where sliding_window is not there, it is that of transformers' classes;
// null is none.
void read_window(const ConfigReader& reader, LlamaConfig& config) {
  const bool is_qwen = config.kind.starts_with("qwen");
  if (config.kind == "llama" || (is_qwen && !reader.flag("use_sliding_window", false))) return;
  config.window = reader.integer_or_class("sliding_window", 0, 4096);
  if (is_qwen) config.first_window_layer = reader.integer("max_window_layers", 28);
  const Json types = reader.json().value("layer_types", Json());
  if (!types.is_array() || !is_qwen || config.window == 0) return;
  config.first_window_layer = 0;
  for (const Json& type : types) config.first_window_layer += type == "full_attention" ? 1 : 0;
  for (size_t i = 0; i < types.size(); ++i) {
    const bool full = static_cast<int64_t>(i) < config.first_window_layer;
    TS_CHECK_AS(UnsupportedError, types[i] == (full ? "full_attention" : "sliding_attention"),
                reader.path(), "layer_types other than full_attention and then sliding_attention");
  }
}

}  // namespace

LlamaConfig LlamaConfig::read(const std::string& path) {
  const ConfigReader reader(path);
  LlamaConfig config;
  config.kind = reader.text("model_type");
  const bool known = config.kind == "llama" || config.kind == "mistral" || config.kind == "qwen2" ||
                     config.kind == "qwen3";
  TS_CHECK_AS(UnsupportedError, known, path, "the model_type is '", config.kind,
              "'; known are llama, mistral, qwen2 and qwen3");
  reader.require("hidden_act", "silu");
  config.vocab_size = reader.integer("vocab_size");
  // What is not said is as transformers' classes have it.
  const bool is_llama = config.kind == "llama", is_mistral = config.kind == "mistral";
  config.context = reader.integer("max_position_embeddings", is_llama     ? 2048
                                                             : is_mistral ? 131072
                                                                          : 32768);
  config.width = reader.integer("hidden_size");
  config.inner = reader.integer("intermediate_size");
  config.layers = reader.integer("num_hidden_layers");
  config.heads = reader.integer("num_attention_heads");
  config.kv_heads = reader.integer_or_class("num_key_value_heads", 0,
                                            is_llama     ? 0
                                            : is_mistral ? 8
                                                         : 32);
  config.head_dim = reader.integer("head_dim", config.kind == "qwen3" ? 128 : 0);
  config.head_norms = config.kind == "qwen3";
  config.rms_norm_eps = reader.number("rms_norm_eps", 1e-6);
  config.initializer_range = reader.number("initializer_range", 0.02);
  const auto flag = [&](const char* field) { return reader.flag(field, false); };
  config.tied = flag("tie_word_embeddings");
  config.out_bias = (is_llama || config.kind == "qwen3") && flag("attention_bias");
  config.qkv_bias = config.kind == "qwen2" || config.out_bias;
  config.mlp_bias = is_llama && flag("mlp_bias");
  config.rotary = read_rotary(reader, config.context);
  read_window(reader, config);
  const bool has_ids = is_llama || is_mistral;
  config.begin_of_text = reader.integer_or_class("bos_token_id", -1, has_ids ? 1 : -1);
  const Json end = reader.json().value("eos_token_id", has_ids ? Json(2) : Json());
  for (const Json& id : end.is_array() ? end : Json::array({end})) {
    if (id.is_number_integer()) config.end_of_text.push_back(id.get<int64_t>());
  }
  reader.check(config);
  return config;
}

}  // namespace tessera::nn::models
