// Folders of transformers: config.json and model.safetensors.
#include <algorithm>
#include <filesystem>

#include <tessera/core/io/atomic_file.h>
#include <tessera/core/state/safetensors.h>

#include <tessera/nn/models/bert.h>
#include <tessera/nn/models/config_limits.h>
#include <tessera/nn/models/config_reader.h>
#include <tessera/nn/models/made_to_load.h>
#include <tessera/nn/quantize/quantize.h>

namespace tessera::nn::models {
namespace {

using Json = nlohmann::json;

// Parts of pre-training checkpoints that a classifier has no use for.
bool is_passed_over(std::string_view name) {
  return name.starts_with("cls.") || name.ends_with("embeddings.position_ids");
}

// Checkpoints made from TensorFlow's have LayerNorm.gamma and .beta; an encoder alone has no
// prefix.
std::string modern_name(std::string name) {
  const auto rename = [&](std::string_view from, std::string_view to) {
    if (name.ends_with(from)) name.replace(name.size() - from.size(), from.size(), to);
  };
  rename("LayerNorm.gamma", "LayerNorm.weight");
  rename("LayerNorm.beta", "LayerNorm.bias");
  const bool prefixed = name.starts_with("bert.") || name.starts_with("classifier.");
  return prefixed ? name : "bert." + name;
}

double weights_of(const BertConfig& config) {
  const double width = static_cast<double>(config.width);
  const double block = 4 * width * width + 2 * width * static_cast<double>(config.inner_width());
  const double rows = static_cast<double>(config.vocab_size) + static_cast<double>(config.context) +
                      static_cast<double>(config.types) + static_cast<double>(config.labels);
  return static_cast<double>(config.layers) * block + rows * width;
}

}  // namespace

void BertConfig::check() const {
  const auto positive = [](const char* name, int64_t value) {
    TS_CHECK_AS(ConfigError, value > 0, "bert", name, " must be positive; got ", value);
  };
  positive("vocab_size", vocab_size), positive("width", width), positive("layers", layers);
  positive("heads", heads), positive("context", context), positive("types", types);
  positive("labels", labels);
  TS_CHECK_AS(ConfigError,
              std::max({vocab_size, width, heads, context, types, labels, inner}) < kLargestSize &&
                  inner >= 0,
              "bert", "sizes must be below 2^31; got vocab_size ", vocab_size, ", width ", width,
              ", inner ", inner, ", context ", context, ", types ", types, ", labels ", labels);
  check_extent("bert", layers, weights_of(*this));
  TS_CHECK_AS(ConfigError, width % heads == 0, "bert", "width must be a multiple of heads; got ",
              width, " and ", heads);
  TS_CHECK_AS(ConfigError,
              dropout >= 0 && dropout < 1 && attention_dropout >= 0 && attention_dropout < 1 &&
                  classifier_dropout < 1,
              "bert", "dropouts must be in [0, 1); got ", dropout, ", ", attention_dropout,
              " (attention), ", classifier_dropout, " (classifier)");
  TS_CHECK_AS(ConfigError, padding >= 0 && padding < vocab_size, "bert",
              "the padding token must be in the vocabulary of ", vocab_size, "; it is ", padding);
  TS_CHECK_AS(ConfigError,
              label_names.empty() || static_cast<int64_t>(label_names.size()) == labels, "bert",
              "needs a name for each of ", labels, " labels or none; got ", label_names.size());
}

BertConfig BertConfig::read(const std::string& path) {
  const ConfigReader reader(path);
  reader.require("model_type", "bert");
  reader.require("hidden_act", "gelu");
  reader.require("position_embedding_type", "absolute");
  reader.require("is_decoder", false);
  reader.require("add_cross_attention", false);
  BertConfig config;
  config.vocab_size = reader.integer("vocab_size");
  config.width = reader.integer("hidden_size");
  config.layers = reader.integer("num_hidden_layers");
  config.heads = reader.integer("num_attention_heads");
  config.inner = reader.integer("intermediate_size");
  config.context = reader.integer("max_position_embeddings");
  config.types = reader.integer("type_vocab_size", 2);
  config.dropout = reader.number("hidden_dropout_prob", 0.1);
  config.attention_dropout = reader.number("attention_probs_dropout_prob", 0.1);
  config.classifier_dropout = reader.number("classifier_dropout", -1);
  config.layer_norm_eps = reader.number("layer_norm_eps", 1e-12);
  config.initializer_range = reader.number("initializer_range", 0.02);
  config.padding = reader.integer("pad_token_id", 0);
  const Json& json = reader.json();
  if (const auto names = json.find("id2label"); names != json.end() && names->is_object()) {
    config.labels = static_cast<int64_t>(names->size());
    for (int64_t i = 0; i < config.labels; ++i) {
      const auto name = names->find(std::to_string(i));
      TS_CHECK_AS(FormatError, name != names->end() && name->is_string(), path,
                  "the field 'id2label' has ", config.labels, " entries and no text for ", i,
                  "; labels are numbered from 0");
      config.label_names.push_back(name->get<std::string>());
    }
  } else {
    config.labels = reader.integer("num_labels", 2);
  }
  reader.check(config);
  return config;
}

void BertConfig::write(const std::string& path, DType dtype) const {
  Json id2label = Json::object(), label2id = Json::object();
  for (int64_t i = 0; i < labels; ++i) {
    const std::string name =
        label_names.empty() ? "LABEL_" + std::to_string(i) : label_names[static_cast<size_t>(i)];
    id2label[std::to_string(i)] = name;
    label2id[name] = i;
  }
  const Json json = {
      {"architectures", {"BertForSequenceClassification"}},
      {"attention_probs_dropout_prob", attention_dropout},
      {"classifier_dropout", classifier_dropout >= 0 ? Json(classifier_dropout) : Json()},
      {"dtype", torch_name_of(dtype)},
      {"hidden_act", "gelu"},
      {"hidden_dropout_prob", dropout},
      {"hidden_size", width},
      {"id2label", id2label},
      {"initializer_range", initializer_range},
      {"intermediate_size", inner_width()},
      {"label2id", label2id},
      {"layer_norm_eps", layer_norm_eps},
      {"max_position_embeddings", context},
      {"model_type", "bert"},
      {"num_attention_heads", heads},
      {"num_hidden_layers", layers},
      {"pad_token_id", padding},
      {"position_embedding_type", "absolute"},
      {"type_vocab_size", types},
      {"vocab_size", vocab_size}};
  write_file_atomically(path, json.dump(2) + "\n");
}

void Bert::load_weights(const std::string& path, std::vector<std::string>* fresh) {
  const SafeTensorsFile file(path);
  StateDict state;
  for (const SafeTensorsEntry* entry : file.readable_entries()) {
    if (!is_passed_over(entry->name)) state.set(modern_name(entry->name), file.view(entry->name));
  }
  if (fresh != nullptr) {
    fresh->clear();
    for (const auto& [name, tensor] : state_dict()) {
      if (state.contains(name)) continue;
      if (!name.starts_with("classifier.") && !name.starts_with("bert.pooler.")) continue;
      fresh->push_back(name);
      state.set(name, tensor);
    }
  }
  try {
    load_state_dict(state);
  } catch (Error& error) {
    error.add_context(path);
    throw;
  }
}

std::unique_ptr<Bert> Bert::from_pretrained(const std::string& folder,
                                            std::vector<std::string>* fresh,
                                            const std::function<void(ModuleBase&)>& divide) {
  const std::filesystem::path path(folder);
  const std::string config_path = (path / "config.json").string();
  const BertConfig config = BertConfig::read(config_path);
  const SafeTensorsFile weights((path / "model.safetensors").string());
  // Before a model is made: a damaged config.json would ask for any amount of memory.
  double held = 0;
  for (const SafeTensorsEntry& entry : weights.entries()) {
    held += static_cast<double>(numel_of(entry.shape));
  }
  constexpr double kWorthTrying = 1 << 28;  // weights; load_state_dict() says more of fewer
  TS_CHECK_AS(FormatError, std::max(held, kWorthTrying) >= weights_of(config), config_path,
              "makes ", weights_of(config), " weights; '", weights.path(), "' holds ", held,
              "; get both files again from one place");
  // What the file lacks keeps its initial values, so they are made where that is allowed.
  auto model = made_to_load<Bert>(config, divide, fresh != nullptr);
  model->load_weights((path / "model.safetensors").string(), fresh);
  return model;
}

void Bert::save_pretrained(const std::string& folder) const {
  refuse_quantized_layers(*this, "save_pretrained");
  save_pretrained(state_dict(), folder);
}

void Bert::save_pretrained(const StateDict& weights, const std::string& folder) const {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TS_CHECK_AS(IoError, !error, "bert", "cannot make the folder '", folder, "': ", error.message(),
              "; choose a folder that can be written");
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, tensor] : weights) tensors.emplace(name, tensor);
  const std::filesystem::path path(folder);
  config.write((path / "config.json").string(), classifier.weight.dtype());
  save_safetensors((path / "model.safetensors").string(), tensors, {{"format", "pt"}});
}

}  // namespace tessera::nn::models
