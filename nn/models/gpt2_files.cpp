// Folders of transformers: config.json and model.safetensors.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include <tessera/autograd/autograd.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/state/safetensors.h>

#include <tessera/nn/models/config_limits.h>
#include <tessera/nn/models/config_reader.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/made_to_load.h>
#include <tessera/nn/models/tied_head.h>
#include <tessera/nn/quantize/quantize.h>

namespace tessera::nn::models {
namespace {

using Json = nlohmann::json;

constexpr const char* kTable = "transformer.wte.weight";

// Layers that transformers stores as Conv1D, [in, out]; Linear holds [out, in].
bool is_transposed(std::string_view name) {
  return name.ends_with("c_attn.weight") || name.ends_with("c_fc.weight") ||
         name.ends_with("c_proj.weight");
}

// The causal mask, which old checkpoints hold as buffers.
bool is_mask(std::string_view name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

// Before a model is made: a damaged config.json would ask for any amount of memory. Of smaller
// differences load_state_dict() says more: which tensors are missing, and which have other shapes.
constexpr double kWorthTrying = 1 << 28;  // weights; a GiB

double weights_of(const GptConfig& config) {
  const double width = static_cast<double>(config.width);
  const double block = 4 * width * width + 2 * width * static_cast<double>(config.inner_width());
  return static_cast<double>(config.layers) * block +
         (static_cast<double>(config.vocab_size) + static_cast<double>(config.context)) * width;
}

void check_sizes(const GptConfig& config, const std::string& path, const SafeTensorsFile& weights) {
  double held = 0;
  for (const SafeTensorsEntry& entry : weights.entries()) {
    held += static_cast<double>(numel_of(entry.shape));
  }
  const double needed = weights_of(config);
  TS_CHECK_AS(FormatError, needed <= held || needed <= kWorthTrying, path, "n_layer ",
              config.layers, ", n_embd ", config.width, ", n_positions ", config.context,
              " and vocab_size ", config.vocab_size, " make ", needed, " weights; '",
              weights.path(), "' holds ", held, "; get both files again from one place");
}

}  // namespace

void GptConfig::check() const {
  const auto positive = [](const char* name, int64_t value) {
    TS_CHECK_AS(ConfigError, value > 0, "gpt2", name, " must be positive; got ", value);
  };
  positive("vocab_size", vocab_size), positive("context", context), positive("width", width);
  positive("layers", layers), positive("heads", heads);
  TS_CHECK_AS(ConfigError,
              std::max({vocab_size, context, width, inner}) < kLargestSize && inner >= 0, "gpt2",
              "vocab_size, context, width and inner must be below 2^31; got ", vocab_size, ", ",
              context, ", ", width, " and ", inner);
  TS_CHECK_AS(ConfigError, width % heads == 0, "gpt2", "width must be a multiple of heads; got ",
              width, " and ", heads);
  TS_CHECK_AS(ConfigError, dropout >= 0 && dropout < 1, "gpt2", "dropout must be in [0, 1); got ",
              dropout);
  check_extent("gpt2", layers, weights_of(*this));
}

GptConfig GptConfig::read(const std::string& path) {
  ConfigReader reader(path);
  reader.set_defaults({{"eos_token_id", 50256}});  // of transformers' class
  reader.require("model_type", "gpt2");
  reader.require("activation_function", "gelu_new");
  reader.require("scale_attn_weights", true);
  reader.require("scale_attn_by_inverse_layer_idx", false);
  reader.require("add_cross_attention", false);
  GptConfig config;
  config.vocab_size = reader.integer("vocab_size");
  config.context = reader.integer("n_positions");
  config.width = reader.integer("n_embd");
  config.layers = reader.integer("n_layer");
  config.heads = reader.integer("n_head");
  config.inner = reader.integer("n_inner", 0);
  config.dropout = reader.number("resid_pdrop", 0.1);
  config.layer_norm_eps = reader.number("layer_norm_epsilon", 1e-5);
  config.initializer_range = reader.number("initializer_range", 0.02);
  config.tied = reader.flag("tie_word_embeddings", true);
  config.end_of_text = reader.integer("eos_token_id", -1);
  config.tokenizer = reader.text("tokenizer");
  reader.check(config);
  return config;
}

void GptConfig::write(const std::string& path, DType dtype) const {
  const Json end = end_of_text >= 0 ? Json(end_of_text) : Json();
  Json json = {{"activation_function", "gelu_new"},
               {"architectures", {"GPT2LMHeadModel"}},
               {"attn_pdrop", dropout},
               {"bos_token_id", end},
               {"dtype", torch_name_of(dtype)},
               {"embd_pdrop", dropout},
               {"eos_token_id", end},
               {"initializer_range", initializer_range},
               {"layer_norm_epsilon", layer_norm_eps},
               {"model_type", "gpt2"},
               {"n_embd", width},
               {"n_head", heads},
               {"n_inner", inner > 0 ? Json(inner) : Json()},
               {"n_layer", layers},
               {"n_positions", context},
               {"resid_pdrop", dropout},
               {"tie_word_embeddings", tied},
               {"vocab_size", vocab_size}};
  if (!tokenizer.empty()) json["tokenizer"] = tokenizer;
  AtomicFile file(path);
  file.write(json.dump(2) + "\n");
  file.commit();
}

namespace {

// The tensors of a file under the model's names.
StateDict state_of(const SafeTensorsFile& file) {
  StateDict state;
  for (const SafeTensorsEntry* entry : file.readable_entries()) {
    if (is_mask(entry->name)) continue;
    const bool prefixed = entry->name.starts_with("transformer.") || entry->name == kHead;
    const std::string name = prefixed ? entry->name : "transformer." + entry->name;
    const Tensor tensor = file.view(entry->name);
    state.set(name, is_transposed(name) && tensor.dim() == 2 ? tensor.transpose(0, 1) : tensor);
  }
  return state;
}

void load(Gpt& model, const StateDict& state, const std::string& path) {
  try {
    model.load_state_dict(state);
  } catch (Error& error) {
    error.add_context(path);
    throw;
  }
}

}  // namespace

void Gpt::load_weights(const std::string& path) {
  load(*this, state_of(SafeTensorsFile(path)), path);
}

StateDict Gpt::read_weights(const std::string& path) { return state_of(SafeTensorsFile(path)); }

std::unique_ptr<Gpt> Gpt::from_pretrained(const std::string& folder,
                                          const std::function<void(ModuleBase&)>& divide) {
  const std::filesystem::path path(folder);
  const std::string config_path = (path / "config.json").string();
  GptConfig config = GptConfig::read(config_path);
  const SafeTensorsFile file((path / "model.safetensors").string());
  check_sizes(config, config_path, file);
  const StateDict state = state_of(file);
  config.tied = is_head_tied(config.tied, state, kTable, folder);
  auto model = made_to_load<Gpt>(config, divide);
  load(*model, state, file.path());
  return model;
}

void Gpt::save_pretrained(const std::string& folder,
                          const std::map<std::string, std::string>& metadata) const {
  refuse_quantized_layers(*this, "save_pretrained");
  save_pretrained(state_dict(), folder, metadata);
}

void Gpt::save_pretrained(const StateDict& weights, const std::string& folder,
                          const std::map<std::string, std::string>& metadata) const {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TS_CHECK_AS(IoError, !error, "gpt2", "cannot make the folder '", folder, "': ", error.message(),
              "; choose a folder that can be written");
  GptConfig written = config;
  written.tied = config.tied && !own_head(weights, kTable);  // merging an adapter unties
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, tensor] : weights) {
    if (written.tied && name == kHead) continue;  // transformers leaves it out, too
    const Tensor here = tensor.to(kCpu);
    tensors.emplace(name, is_transposed(name) ? here.transpose(0, 1) : here);
  }
  const std::filesystem::path path(folder);
  written.write((path / "config.json").string(), transformer.wte.weight.dtype());
  std::map<std::string, std::string> all = {{"format", "pt"}};  // transformers asks for this one
  all.insert(metadata.begin(), metadata.end());
  save_safetensors((path / "model.safetensors").string(), tensors, all);
}

}  // namespace tessera::nn::models
