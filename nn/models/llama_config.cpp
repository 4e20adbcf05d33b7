#include <tessera/nn/models/llama_config.h>

#include <algorithm>
#include <cmath>

#include <tessera/core/io/atomic_file.h>
#include <tessera/nn/models/config_limits.h>
#include <tessera/nn/models/config_reader.h>
#include <tessera/nn/models/llama_rope.h>

namespace tessera::nn::models {
namespace {

using Json = nlohmann::json;

constexpr std::pair<const char*, GatedActivation> kActivations[] = {
    {"silu", GatedActivation::kSilu},
    {"swish", GatedActivation::kSilu},
    {"gelu", GatedActivation::kGelu},
    {"gelu_pytorch_tanh", GatedActivation::kGeluTanh}};

// A class of transformers (its models/*/configuration_*.py of 5.24): its name, what fields have its
// config where config.json has none, and which of them it knows.
struct Kind {
  const char* name;
  const char* architecture;
  Json defaults;
  const char* activation = "hidden_act";
  bool has_layer_types = false;  // qwen2, qwen3, gemma2, gemma3_text
  bool has_window = false;
  bool has_attention_bias = false;
  bool has_query_scalar = false;

  bool is_gemma() const { return std::string_view(name).starts_with("gemma"); }
  bool is_qwen() const { return std::string_view(name).starts_with("qwen"); }
  bool has_post_norms() const { return is_gemma() && has_layer_types; }
};

const std::vector<Kind>& kinds() {
  const auto with = [](Json base, const Json& more) {
    base.update(more);
    return base;
  };
  static const std::vector<Kind> all = [&] {
    const Json llama = {{"vocab_size", 32000},
                        {"hidden_size", 4096},
                        {"intermediate_size", 11008},
                        {"num_hidden_layers", 32},
                        {"num_attention_heads", 32},
                        {"hidden_act", "silu"},
                        {"max_position_embeddings", 2048},
                        {"initializer_range", 0.02},
                        {"rms_norm_eps", 1e-6},
                        {"bos_token_id", 1},
                        {"eos_token_id", 2},
                        {"tie_word_embeddings", false}};
    const Json mistral = with(llama, {{"intermediate_size", 14336},
                                      {"num_key_value_heads", 8},
                                      {"max_position_embeddings", 131072},
                                      {"sliding_window", 4096}});
    const Json qwen2 = with(llama, {{"vocab_size", 151936},
                                    {"intermediate_size", 22016},
                                    {"num_key_value_heads", 32},
                                    {"max_position_embeddings", 32768},
                                    {"use_sliding_window", false},
                                    {"sliding_window", 4096},
                                    {"max_window_layers", 28},
                                    {"bos_token_id", nullptr},
                                    {"eos_token_id", nullptr}});
    const Json gemma = {{"vocab_size", 256000},
                        {"hidden_size", 3072},
                        {"intermediate_size", 24576},
                        {"num_hidden_layers", 28},
                        {"num_attention_heads", 16},
                        {"num_key_value_heads", 16},
                        {"head_dim", 256},
                        {"hidden_act", "gelu_pytorch_tanh"},
                        {"hidden_activation", "gelu_pytorch_tanh"},
                        {"max_position_embeddings", 8192},
                        {"initializer_range", 0.02},
                        {"rms_norm_eps", 1e-6},
                        {"pad_token_id", 0},
                        {"bos_token_id", 2},
                        {"eos_token_id", 1},
                        {"tie_word_embeddings", true}};
    const Json gemma2 = with(gemma, {{"hidden_size", 2304},
                                     {"intermediate_size", 9216},
                                     {"num_hidden_layers", 26},
                                     {"num_attention_heads", 8},
                                     {"num_key_value_heads", 4},
                                     {"query_pre_attn_scalar", 256},
                                     {"sliding_window", 4096},
                                     {"final_logit_softcapping", 30.0},
                                     {"attn_logit_softcapping", 50.0},
                                     {"sliding_window_pattern", 2}});
    const Json gemma3 = with(gemma2, {{"vocab_size", 262208},
                                      {"max_position_embeddings", 131072},
                                      {"final_logit_softcapping", nullptr},
                                      {"attn_logit_softcapping", nullptr},
                                      {"sliding_window_pattern", 6}});
    const Json phi3 = with(llama, {{"vocab_size", 32064},
                                   {"hidden_size", 3072},
                                   {"intermediate_size", 8192},
                                   {"max_position_embeddings", 4096},
                                   {"original_max_position_embeddings", 4096},
                                   {"rms_norm_eps", 1e-5},
                                   {"pad_token_id", 32000},
                                   {"eos_token_id", 32000}});
    return std::vector<Kind>{
        {.name = "llama",
         .architecture = "LlamaForCausalLM",
         .defaults = llama,
         .has_attention_bias = true},
        {.name = "mistral",
         .architecture = "MistralForCausalLM",
         .defaults = mistral,
         .has_window = true},
        {.name = "qwen2",
         .architecture = "Qwen2ForCausalLM",
         .defaults = qwen2,
         .has_layer_types = true,
         .has_window = true},
        {.name = "qwen3",
         .architecture = "Qwen3ForCausalLM",
         .defaults = with(qwen2, {{"head_dim", 128}}),
         .has_layer_types = true,
         .has_window = true,
         .has_attention_bias = true},
        {.name = "gemma",
         .architecture = "GemmaForCausalLM",
         .defaults = gemma,
         .has_attention_bias = true},
        {.name = "gemma2",
         .architecture = "Gemma2ForCausalLM",
         .defaults = gemma2,
         .activation = "hidden_activation",
         .has_layer_types = true,
         .has_window = true,
         .has_attention_bias = true,
         .has_query_scalar = true},
        {.name = "gemma3_text",
         .architecture = "Gemma3ForCausalLM",
         .defaults = gemma3,
         .activation = "hidden_activation",
         .has_layer_types = true,
         .has_window = true,
         .has_attention_bias = true,
         .has_query_scalar = true},
        {.name = "phi3", .architecture = "Phi3ForCausalLM", .defaults = phi3, .has_window = true}};
  }();
  return all;
}

const Kind* find_kind(const std::string& name) {
  const auto found = std::ranges::find(kinds(), name, &Kind::name);
  return found == kinds().end() ? nullptr : &*found;
}

GatedActivation read_activation(const ConfigReader& reader, const Kind& kind) {
  const std::string name = reader.text(kind.activation);
  // Files of Gemma 1 say gelu and mean its approximation.
  if (std::string_view(kind.name) == "gemma" && name == "gelu") return GatedActivation::kGeluTanh;
  const auto* found = std::ranges::find(kActivations, std::string_view(name), [](const auto& each) {
    return std::string_view(each.first);
  });
  TS_CHECK_AS(UnsupportedError, found != std::end(kActivations), reader.path(), "the field '",
              kind.activation, "' is ", reader.json().at(kind.activation).dump(),
              "; this model has silu, gelu and gelu_pytorch_tanh");
  return found->second;
}

// What some classes of transformers can do and is not built here.
void refuse_what_is_missing(const ConfigReader& reader, const Kind& kind) {
  const auto refuse = [&](const char* field, const char* why) {
    const Json value = reader.json().value(field, Json());
    const bool asked = !value.is_null() && value != false && value != 0;
    TS_CHECK_AS(UnsupportedError, !asked, reader.path(), "the field '", field, "' is ",
                value.dump().substr(0, 100), "; ", why);
  };
  refuse("quantization_config", "quantized weights are not read; dequantize and save them first");
  refuse("use_bidirectional_attention", "tokens see those before them only");
  refuse("resid_pdrop", "there is no dropout of a block's result; set it to 0");
  refuse("embd_pdrop", "there is no dropout of embeddings; set it to 0");
  if (std::string_view(kind.name) == "gemma3_text") {
    refuse("attn_logit_softcapping", "Gemma 3 does not cap scores, nor does transformers' class");
  }
  const auto has_own = [&](const char* field, bool built) {
    if (!built) refuse(field, "this kind of model has none in transformers either");
  };
  const std::string_view name = kind.name;
  has_own("mlp_bias", name == "llama");
  has_own("attention_bias", kind.has_attention_bias);
}

// layer_types, or what each class has in its place.
std::vector<bool> read_window_layers(const ConfigReader& reader, const Kind& kind,
                                     const LlamaConfig& config) {
  std::vector<bool> windowed;
  const Json types = reader.json().value("layer_types", Json());
  if (types.is_null()) {
    const int64_t first = kind.is_qwen() ? reader.integer("max_window_layers") : 0;
    const int64_t period = kind.has_post_norms() ? reader.integer("sliding_window_pattern") : 0;
    TS_CHECK_AS(FormatError, period > 0 || !kind.has_post_norms(), reader.path(),
                "the field 'sliding_window_pattern' must be above 0; it is ", period);
    for (int64_t i = 0; i < config.layers; ++i) {
      windowed.push_back(i >= first && (period == 0 || (i + 1) % period != 0));
    }
    return windowed;
  }
  TS_CHECK_AS(FormatError, types.is_array() && types.size() == static_cast<size_t>(config.layers),
              reader.path(), "the field 'layer_types' must be a list of num_hidden_layers, ",
              config.layers, " names; it is ", types.dump().substr(0, 200));
  for (const Json& type : types) {
    TS_CHECK_AS(UnsupportedError, type == "full_attention" || type == "sliding_attention",
                reader.path(), "the field 'layer_types' has ", type.dump(),
                "; this model has full_attention and sliding_attention");
    windowed.push_back(type == "sliding_attention");
  }
  return windowed;
}

void read_window(const ConfigReader& reader, const Kind& kind, LlamaConfig& config) {
  if (!kind.has_window || (kind.is_qwen() && !reader.flag("use_sliding_window", false))) return;
  config.window = reader.integer("sliding_window", 0);
  if (config.window == 0 || config.layers < 0 || config.layers > kMostLayers) return;
  const std::vector<bool> windowed = read_window_layers(reader, kind, config);
  if (std::ranges::find(windowed, false) != windowed.end()) config.windowed = windowed;
  // Mistral and Phi-3 have one mask for all layers in transformers.
  TS_CHECK_AS(UnsupportedError, kind.has_layer_types || config.windowed.empty(), reader.path(),
              "the field 'layer_types' differs between layers, which a ", kind.name,
              " does not; all layers have its sliding_window");
}

void read_ends(const ConfigReader& reader, LlamaConfig& config) {
  config.begin_of_text = reader.integer("bos_token_id", -1);
  config.padding_token = reader.integer("pad_token_id", -1);
  const Json end = reader.json().value("eos_token_id", Json());
  for (const Json& id : end.is_array() ? end : Json::array({end})) {
    if (id.is_number_integer()) config.end_of_text.push_back(id.get<int64_t>());
  }
}

void read_biases(const ConfigReader& reader, const Kind& kind, LlamaConfig& config) {
  config.out_bias = kind.has_attention_bias && reader.flag("attention_bias", false);
  config.qkv_bias = config.kind == "qwen2" || config.out_bias;
  config.mlp_bias = config.kind == "llama" && reader.flag("mlp_bias", false);
}

}  // namespace

bool LlamaConfig::is_known(const std::string& kind) { return find_kind(kind) != nullptr; }

std::string LlamaConfig::known_kinds() {
  std::string text;
  for (const Kind& kind : kinds()) text += (text.empty() ? "" : ", ") + std::string(kind.name);
  return text;
}

LlamaConfig LlamaConfig::read(const std::string& path) {
  ConfigReader reader(path);
  LlamaConfig config;
  config.kind = reader.text("model_type");
  const Kind* const kind = find_kind(config.kind);
  TS_CHECK_AS(UnsupportedError, kind != nullptr, path, "the model_type is '", config.kind,
              "'; known are ", known_kinds(),
              config.kind == "gemma3" ? ", and of a gemma3 with images its text_config" : "");
  reader.set_defaults(kind->defaults);
  refuse_what_is_missing(reader, *kind);
  config.activation = read_activation(reader, *kind);
  config.vocab_size = reader.integer("vocab_size");
  config.context = reader.integer("max_position_embeddings");
  config.width = reader.integer("hidden_size");
  config.inner = reader.integer("intermediate_size");
  config.layers = reader.integer("num_hidden_layers");
  config.heads = reader.integer("num_attention_heads");
  config.kv_heads = reader.integer("num_key_value_heads", 0);
  config.head_dim = reader.integer("head_dim", 0);
  config.rms_norm_eps = reader.number("rms_norm_eps", 1e-6);
  config.initializer_range = reader.number("initializer_range", 0.02);
  config.tied = reader.flag("tie_word_embeddings", false);
  config.attention_dropout = reader.number("attention_dropout", 0);
  config.head_norms = config.kind == "qwen3" || config.kind == "gemma3_text";
  config.joined = config.kind == "phi3";
  config.norms_plus_one = config.scaled_embedding = kind->is_gemma();
  config.post_norms = kind->has_post_norms();
  if (kind->has_query_scalar) {
    config.query_scalar = reader.number("query_pre_attn_scalar", 0);
    config.score_cap = reader.number("attn_logit_softcapping", 0);
    config.logit_cap = reader.number("final_logit_softcapping", 0);
  }
  read_biases(reader, *kind, config);
  read_rope(reader, config);
  read_window(reader, *kind, config);
  read_ends(reader, config);
  reader.check(config);
  return config;
}

void LlamaConfig::write(const std::string& path, DType dtype) const {
  const Kind* const known = find_kind(kind);
  TS_CHECK_AS(UnsupportedError, known != nullptr, path, "the kind '", kind,
              "' has no config.json; known are ", known_kinds());
  const auto* act =
      std::ranges::find(kActivations, activation, [](const auto& each) { return each.second; });
  const Json window_or_null = window > 0 ? Json(window) : Json();
  Json json = {{"architectures", {known->architecture}},
               {"attention_dropout", attention_dropout},
               {"bos_token_id", begin_of_text >= 0 ? Json(begin_of_text) : Json()},
               {"dtype", torch_name_of(dtype)},
               {"torch_dtype", torch_name_of(dtype)},
               {"eos_token_id", end_of_text.empty()       ? Json()
                                : end_of_text.size() == 1 ? Json(end_of_text[0])
                                                          : Json(end_of_text)},
               {"head_dim", head()},
               {known->activation, act->first},
               {"hidden_size", width},
               {"initializer_range", initializer_range},
               {"intermediate_size", inner},
               {"max_position_embeddings", context},
               {"model_type", kind},
               {"num_attention_heads", heads},
               {"num_hidden_layers", layers},
               {"num_key_value_heads", keys()},
               {"pad_token_id", padding_token >= 0 ? Json(padding_token) : Json()},
               {"rms_norm_eps", rms_norm_eps},
               {"tie_word_embeddings", tied},
               {"vocab_size", vocab_size}};
  json.update(written_rope(*this));
  if (known->has_attention_bias) json["attention_bias"] = out_bias;
  if (kind == "llama") json["mlp_bias"] = mlp_bias;
  if (known->has_window) json["sliding_window"] = window_or_null;
  if (known->has_layer_types) {
    Json types = Json::array();
    int64_t first = 0;  // layer with a window
    for (int64_t i = 0; i < layers; ++i) {
      types.push_back(window_of(i) > 0 ? "sliding_attention" : "full_attention");
      if (window_of(i) == 0 && first == i) ++first;
    }
    json["layer_types"] = types;
    if (known->is_qwen()) {
      json.update({{"use_sliding_window", window > 0}, {"max_window_layers", first}});
    }
  }
  if (known->has_query_scalar) {
    const auto cap = [](double value) { return value > 0 ? Json(value) : Json(); };
    // An integer in transformers' class.
    json["query_pre_attn_scalar"] =
        std::llround(query_scalar > 0 ? query_scalar : static_cast<double>(head()));
    json["attn_logit_softcapping"] = cap(score_cap);
    json["final_logit_softcapping"] = cap(logit_cap);
  }
  write_file_atomically(path, json.dump(2) + "\n");
}

}  // namespace tessera::nn::models
