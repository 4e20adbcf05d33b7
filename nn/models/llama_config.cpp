#include <tessera/nn/models/llama_config.h>

#include <algorithm>

#include <tessera/nn/models/config_reader.h>

namespace tessera::nn::models {
namespace {

using Json = nlohmann::json;

// A field of the object that says how positions turn, or of the file.
double rope_number(const ConfigReader& reader, const Json& rope, const char* field,
                   double fallback) {
  const auto found = rope.is_object() ? rope.find(field) : rope.end();
  if (found == rope.end() || found->is_null()) return fallback;
  TS_CHECK_AS(FormatError, found->is_number(), reader.path(), "the field '", field,
              "' of the rotary scaling must be a number; it is ", found->dump());
  return found->get<double>();
}

RotaryOptions read_rotary(const ConfigReader& reader, int64_t context) {
  const Json& json = reader.json();
  const bool is_new = json.contains("rope_parameters") && json["rope_parameters"].is_object();
  const Json rope = is_new ? json["rope_parameters"] : json.value("rope_scaling", Json());
  RotaryOptions options;
  options.theta = rope_number(reader, rope, "rope_theta", reader.number("rope_theta", 10000));
  options.context = context;
  if (!rope.is_object()) return options;
  const Json name = rope.contains("rope_type") ? rope["rope_type"] : rope.value("type", Json());
  const auto* known =
      std::ranges::find(kRotaryScalings, name.is_string() ? name.get<std::string>() : "");
  TS_CHECK_AS(UnsupportedError, known != std::end(kRotaryScalings), reader.path(),
              "the rotary scaling ", name.dump(),
              " is not one of default, linear, dynamic, llama3");
  TS_CHECK_AS(UnsupportedError, rope_number(reader, rope, "partial_rotary_factor", 1) == 1,
              reader.path(), "partial_rotary_factor other than 1");
  options.scaling = static_cast<RotaryScaling>(known - kRotaryScalings);
  options.factor = rope_number(reader, rope, "factor", 1);
  options.low_freq_factor = rope_number(reader, rope, "low_freq_factor", 1);
  options.high_freq_factor = rope_number(reader, rope, "high_freq_factor", 4);
  if (options.scaling == RotaryScaling::kLlama3) {  // the others go by the model's context
    options.context = static_cast<int64_t>(rope_number(
        reader, rope, "original_max_position_embeddings", static_cast<double>(context)));
  }
  return options;
}

// Mistral: all layers have the window. Qwen2: those from max_window_layers on, where it is in use;
// layer_types says it again.
void read_window(const ConfigReader& reader, LlamaConfig& config) {
  const Json& json = reader.json();
  const bool is_qwen = config.kind.starts_with("qwen");
  if (config.kind == "llama" || (is_qwen && json.value("use_sliding_window", false) == false)) {
    return;
  }
  config.window = reader.integer("sliding_window", 0);
  if (is_qwen) config.first_window_layer = reader.integer("max_window_layers", 28);
  const Json types = json.value("layer_types", Json());
  if (!types.is_array() || !is_qwen) return;
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
  config.context = reader.integer("max_position_embeddings", 2048);
  config.width = reader.integer("hidden_size");
  config.inner = reader.integer("intermediate_size");
  config.layers = reader.integer("num_hidden_layers");
  config.heads = reader.integer("num_attention_heads");
  config.kv_heads = reader.integer("num_key_value_heads", config.kind == "mistral" ? 8 : 0);
  config.head_dim = reader.integer("head_dim", config.kind == "qwen3" ? 128 : 0);
  config.head_norms = config.kind == "qwen3";
  config.rms_norm_eps = reader.number("rms_norm_eps", 1e-6);
  config.initializer_range = reader.number("initializer_range", 0.02);
  const auto flag = [&](const char* field) { return reader.json().value(field, Json()) == true; };
  config.tied = flag("tie_word_embeddings");
  config.out_bias = (config.kind == "llama" || config.kind == "qwen3") && flag("attention_bias");
  config.qkv_bias = config.kind == "qwen2" || config.out_bias;
  config.mlp_bias = config.kind == "llama" && flag("mlp_bias");
  config.rotary = read_rotary(reader, config.context);
  read_window(reader, config);
  config.begin_of_text = reader.integer("bos_token_id", -1);
  const Json end = reader.json().value("eos_token_id", Json());
  for (const Json& id : end.is_array() ? end : Json::array({end})) {
    if (id.is_number_integer()) config.end_of_text.push_back(id.get<int64_t>());
  }
  reader.check(config);
  return config;
}

}  // namespace tessera::nn::models
