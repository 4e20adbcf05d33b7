#include <tessera/accelerate/plan/model_outline.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/core/error.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/nn/module.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kOutline = "model";
namespace fs = std::filesystem;
using Json = nlohmann::json;

bool is_number(std::string_view word) {
  return !word.empty() &&
         std::ranges::all_of(word, [](unsigned char c) { return std::isdigit(c); });
}

// ---- config.json --------------------------------------------------------------------------------

class ConfigJson {
 public:
  ConfigJson(Json json, std::string path) : path_(std::move(path)), json_(std::move(json)) {
    TS_CHECK_AS(FormatError, json_.is_object(), kOutline, path_, " is no JSON object");
  }
  const Json& json() const { return json_; }
  std::string type() const {
    const auto kind = json_.find("model_type");
    TS_CHECK_AS(FormatError, kind != json_.end() && kind->is_string(), kOutline, path_,
                " has no \"model_type\": it is no configuration of a transformers model");
    return kind->get<std::string>();
  }
  int64_t number(std::initializer_list<const char*> names,
                 std::optional<int64_t> fallback = {}) const {
    for (const char* name : names) {
      const auto at = json_.find(name);
      if (at == json_.end() || at->is_null()) continue;
      TS_CHECK_AS(FormatError, at->is_number_integer() && at->get<int64_t>() > 0, kOutline, path_,
                  ": \"", name, "\" has to be a whole number above 0; got ", at->dump());
      return at->get<int64_t>();
    }
    TS_CHECK_AS(FormatError, fallback.has_value(), kOutline, path_, " has no \"", *names.begin(),
                "\"");
    return *fallback;
  }
  bool flag(const char* name) const {
    const auto at = json_.find(name);
    if (at == json_.end() || at->is_null()) return false;
    TS_CHECK_AS(FormatError, at->is_boolean(), kOutline, path_, ": \"", name,
                "\" has to be true or false; got ", at->dump());
    return at->get<bool>();
  }
  int64_t size_of(const char* name, int64_t fallback) const {
    const auto at = json_.find(name);
    return at != json_.end() && at->is_object() ? static_cast<int64_t>(at->size()) : fallback;
  }

 private:
  std::string path_;
  Json json_;
};

OutlineModule table(std::string name, int64_t rows, int64_t width, double kept = 0) {
  return {.name = std::move(name), .parameters = {{"weight", {rows, width}}}, .kept = kept};
}
// Its input is kept. A norm of the stream.
OutlineModule norm(std::string name, int64_t width, bool bias, double kept) {
  OutlineModule module{.name = std::move(name),
                       .parameters = {{"weight", {width}}},
                       .kept = kept,
                       .kept_bytes = bias ? 8.0 : 4.0};  // statistics
  if (bias) module.parameters.push_back({"bias", {width}});
  return module;
}
OutlineModule product(std::string name, int64_t inputs, int64_t outputs, bool bias, double kept,
                      double kept_bytes = 0) {
  OutlineModule module{.name = std::move(name),
                       .parameters = {{"weight", {outputs, inputs}}},
                       .read = OutlineRead::kProduct,
                       .kept = kept,
                       .kept_bytes = kept_bytes};
  if (bias) module.parameters.push_back({"bias", {outputs}});
  return module;
}

// With GELU, which is calculated again from what it was of.
OutlineModule activated(std::string name, int64_t inputs, int64_t outputs, double kept,
                        double kept_fused) {
  OutlineModule module = product(std::move(name), inputs, outputs, true, kept);
  module.read = OutlineRead::kActivated;
  module.kept_fused = kept_fused;
  return module;
}

// What a module keeps, of the models that the examples have, is what a plan of them shows.

ModelOutline bert(const ConfigJson& json, bool trains) {
  ModelOutline model{.kind = "bert", .block_class = "Layer"};
  const int64_t width = json.number({"hidden_size"});
  const int64_t layers = json.number({"num_hidden_layers"});
  const int64_t inner = json.number({"intermediate_size"});
  const int64_t words = json.number({"vocab_size"});
  const int64_t positions = json.number({"max_position_embeddings"}, 512);
  const int64_t types = json.number({"type_vocab_size"}, 2);
  const int64_t heads = json.number({"num_attention_heads"});
  const auto C = static_cast<double>(width), F = static_cast<double>(inner);
  const std::string prefix = trains ? "bert." : "";
  const auto add = [&](OutlineModule module) { model.modules.push_back(std::move(module)); };
  add(table(prefix + "embeddings.word_embeddings", words, width));
  model.modules.back().buffer_bytes = 2 * positions * 8;  // position_ids, token_type_ids: i64
  add(table(prefix + "embeddings.position_embeddings", positions, width));
  add(table(prefix + "embeddings.token_type_embeddings", types, width));
  add(norm(prefix + "embeddings.LayerNorm", width, true, 2 * C));  // its input and its result
  for (OutlineModule& module : model.modules) module.block = prefix + "embeddings";
  for (int64_t i = 0; i < layers; ++i) {
    const std::string layer = prefix + "encoder.layer." + std::to_string(i) + ".";
    add(product(layer + "attention.self.query", width, width, true, C));  // queries
    add(product(layer + "attention.self.key", width, width, true, C));
    add(product(layer + "attention.self.value", width, width, true, C));
    add(product(layer + "attention.output.dense", width, width, true, C,
                4 * static_cast<double>(heads)));
    add(norm(layer + "attention.output.LayerNorm", width, true, 2 * C));
    add(activated(layer + "intermediate.dense", width, inner, 0, F));
    add(product(layer + "output.dense", inner, width, true, F));
    add(norm(layer + "output.LayerNorm", width, true, 2 * C));
  }
  add(product(prefix + "pooler.dense", width, width, true, 0));
  model.modules.back().block = prefix + "pooler";
  if (trains) {
    const int64_t labels = json.number({"num_labels"}, json.size_of("id2label", 2));
    add(product("classifier", width, labels, true, 0));
  }
  model.dimensions = {width, layers, heads, inner, words, width, positions};
  return model;
}

ModelOutline gpt2(const ConfigJson& json, bool trains) {
  ModelOutline model{.kind = "gpt2"};
  const int64_t width = json.number({"n_embd", "hidden_size"});
  const int64_t layers = json.number({"n_layer", "num_hidden_layers"});
  const int64_t words = json.number({"vocab_size"});
  const int64_t positions = json.number({"n_positions", "n_ctx"});
  const int64_t inner = json.number({"n_inner"}, 4 * width);
  const int64_t heads = json.number({"n_head", "num_attention_heads"});
  const auto C = static_cast<double>(width), F = static_cast<double>(inner);
  const std::string prefix = trains ? "transformer." : "";
  const auto add = [&](OutlineModule module) { model.modules.push_back(std::move(module)); };
  add(table(prefix + "wte", words, width));
  add(table(prefix + "wpe", positions, width));
  for (int64_t i = 0; i < layers; ++i) {
    const std::string block = prefix + "h." + std::to_string(i) + ".";
    add(norm(block + "ln_1", width, true, C));
    add(product(block + "attn.c_attn", width, 3 * width, true, 4 * C));  // input, q, k, v
    add(product(block + "attn.c_proj", width, width, true, C, 4 * static_cast<double>(heads)));
    add(norm(block + "ln_2", width, true, C));
    add(activated(block + "mlp.c_fc", width, inner, C, F));
    add(product(block + "mlp.c_proj", inner, width, true, 0));  // the activation is made again
  }
  add(norm(prefix + "ln_f", width, true, C));
  if (trains) {
    add({.name = "lm_head",
         .parameters = {},
         .read = OutlineRead::kHead,
         .kept = 2 * C,  // its input and that one's gradient, which forward makes
         .kept_once = words * width,
         .tied = prefix + "wte.weight"});
  }
  model.dimensions = {width, layers, heads, inner, words, width, positions};
  return model;
}

// LlamaForCausalLM and those built like it (mistral, qwen2, gemma's widths of heads).
ModelOutline llama(const ConfigJson& json, const std::string& kind, bool qkv_bias,
                   bool head_norms) {
  ModelOutline model{.kind = kind, .block_class = "DecoderLayer"};
  const int64_t width = json.number({"hidden_size"});
  const int64_t layers = json.number({"num_hidden_layers"});
  const int64_t inner = json.number({"intermediate_size"});
  const int64_t words = json.number({"vocab_size"});
  const int64_t heads = json.number({"num_attention_heads"});
  const int64_t kv_heads = json.number({"num_key_value_heads"}, heads);
  const int64_t head = json.number({"head_dim"}, width / heads);
  const bool bias = json.flag("attention_bias"), mlp_bias = json.flag("mlp_bias");
  const bool tied = json.flag("tie_word_embeddings");
  const auto C = static_cast<double>(width), F = static_cast<double>(inner),
             Q = static_cast<double>(heads * head), K = static_cast<double>(kv_heads * head);
  const auto add = [&](OutlineModule module) { model.modules.push_back(std::move(module)); };
  add(table("model.embed_tokens", words, width));
  for (int64_t i = 0; i < layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    add(norm(layer + "input_layernorm", width, false, C));
    add(product(layer + "self_attn.q_proj", width, heads * head, bias || qkv_bias, C + Q));
    add(product(layer + "self_attn.k_proj", width, kv_heads * head, bias || qkv_bias, K));
    add(product(layer + "self_attn.v_proj", width, kv_heads * head, bias || qkv_bias, K));
    if (head_norms) {
      add(norm(layer + "self_attn.q_norm", head, false, Q));
      add(norm(layer + "self_attn.k_norm", head, false, K));
    }
    add(product(layer + "self_attn.o_proj", heads * head, width, bias, Q,
                4 * static_cast<double>(heads)));
    add(norm(layer + "post_attention_layernorm", width, false, C));
    add(product(layer + "mlp.gate_proj", width, inner, mlp_bias, C + F));
    add(product(layer + "mlp.up_proj", width, inner, mlp_bias, F));
    add(product(layer + "mlp.down_proj", inner, width, mlp_bias, F));
  }
  add(norm("model.norm", width, false, C));
  if (tied) {
    add({.name = "lm_head", .parameters = {}, .kept = 2 * C, .tied = "model.embed_tokens.weight"});
  } else {
    add(product("lm_head", width, words, false, 2 * C));
  }
  model.modules.back().read = OutlineRead::kHead;
  model.modules.back().kept_once = words * width;
  model.dimensions = {width,
                      layers,
                      heads,
                      inner,
                      words,
                      kv_heads * head,
                      json.number({"max_position_embeddings"}, 2048),
                      true};
  return model;
}

// ---- Reports ------------------------------------------------------------------------------------

// In the order of OutlineRead.
constexpr std::string_view kReads[] = {"as stored", "product", "activated", "head"};

OutlineModule module_of_report(const Json& json, const std::string& path, size_t at) {
  const std::string where = "\"modules\"[" + std::to_string(at) + "]";
  const auto check = [&](bool fits, const std::string& key, const char* what) {
    TS_CHECK_AS(FormatError, fits, kOutline, path, ": ", where, key, " has to be ", what);
  };
  check(json.is_object(), "", "an object");
  OutlineModule module;
  for (const auto& [key, value] : json.items()) {
    const std::string name = ".\"" + key + "\"";
    if (key == "name" || key == "tied") {
      check(value.is_string(), name, "a text");
      (key == "name" ? module.name : module.tied) = value.get<std::string>();
    } else if (key == "read") {
      const auto at = std::ranges::find(kReads, value.is_string() ? value.get<std::string>() : "");
      check(at != std::end(kReads), name, "as stored, product, activated or head");
      module.read = static_cast<OutlineRead>(at - std::begin(kReads));
    } else if (key == "kept_once") {
      check(value.is_number_integer() && value.get<int64_t>() >= 0, name, "a whole number");
      module.kept_once = value.get<int64_t>();
    } else if (key == "kept" || key == "kept_bytes" || key == "kept_fused") {
      check(value.is_number() && value.get<double>() >= 0, name, "a number that is not negative");
      double& kept = key == "kept"         ? module.kept
                     : key == "kept_bytes" ? module.kept_bytes
                                           : module.kept_fused;
      kept = value.get<double>();
    } else if (key == "parameters") {
      check(value.is_array(), name, "a list of [name, shape]");
      for (const Json& parameter : value) {
        const bool pair = parameter.is_array() && parameter.size() == 2 &&
                          parameter[0].is_string() && parameter[1].is_array() &&
                          std::ranges::all_of(parameter[1], [](const Json& size) {
                            return size.is_number_integer() && size.get<int64_t>() >= 0;
                          });
        check(pair, name, "a list of [name, shape]");
        module.parameters.push_back(
            {parameter[0].get<std::string>(), Shape(parameter[1].get<std::vector<int64_t>>())});
      }
    } else {
      TS_THROW(FormatError, kOutline, path, ": ", where, name,
               " is unknown; known are name, parameters, read, kept, kept_bytes, kept_fused, "
               "kept_once, tied");
    }
  }
  return module;
}

ModelOutline outline_of_report(const Json& json, const std::string& path) {
  ModelOutline outline{.kind = "report"};
  TS_CHECK_AS(FormatError, json.at("modules").is_array() && !json.at("modules").empty(), kOutline,
              path, ": \"modules\" has to be a list of modules");
  for (const Json& module : json.at("modules")) {
    outline.modules.push_back(module_of_report(module, path, outline.modules.size()));
  }
  for (const auto& [key, value] : json.items()) {
    if (key == "modules") continue;
    if (key == "width") {
      TS_CHECK_AS(FormatError, value.is_number_integer() && value.get<int64_t>() > 0, kOutline,
                  path, ": \"width\" has to be a whole number above 0; got ", value.dump());
      outline.dimensions.width = value.get<int64_t>();
    } else if (key == "kind" || key == "block_class") {
      TS_CHECK_AS(FormatError, value.is_string(), kOutline, path, ": \"", key,
                  "\" has to be a text; got ", value.dump());
      (key == "kind" ? outline.kind : outline.block_class) = value.get<std::string>();
    } else {
      TS_THROW(FormatError, kOutline, path, ": \"", key,
               "\" is unknown; a report has modules, kind, block_class, width");
    }
  }
  return outline;
}

// ---- Safetensors --------------------------------------------------------------------------------

// A guess from names, which say no more.
OutlineRead read_of(const OutlineModule& module) {
  for (const char* word : {"emb", "wte", "wpe", "norm", "ln_"}) {
    if (module.name.find(word) != std::string::npos) return OutlineRead::kAsStored;
  }
  const bool matrix = std::ranges::any_of(
      module.parameters, [](const auto& parameter) { return parameter.second.size() >= 2; });
  return matrix ? OutlineRead::kProduct : OutlineRead::kAsStored;
}

std::vector<std::string> files_of_index(const std::string& path) {
  std::ifstream file(path);
  TS_CHECK_AS(IoError, file.is_open(), kOutline, "cannot read ", path);
  const auto json = Json::parse(file, nullptr, false);
  TS_CHECK_AS(FormatError,
              json.is_object() && json.contains("weight_map") && json["weight_map"].is_object() &&
                  !json["weight_map"].empty(),
              kOutline, path, " has no \"weight_map\"");
  std::set<std::string> files;
  for (const auto& [name, shard] : json["weight_map"].items()) {
    TS_CHECK_AS(FormatError, shard.is_string(), kOutline, path, ": the file of \"", name,
                "\" has to be a text");
    files.insert((fs::path(path).parent_path() / shard.get<std::string>()).string());
  }
  return {files.begin(), files.end()};
}

// ---- The module ---------------------------------------------------------------------------------

// They read weights as products do, or as they are stored. Input 1 is the weight, input 2 what is
// kept, input 3 the bias; the gradient of a product's input reads the weight, whose cast stays.
const Op kOutlineProduct{
    .name = "outline_product", .autocast = Autocast::kLow, .reads = {inputs(1, 2), inputs(2)}};
const Op kOutlineActivated{
    .name = "outline_activated", .autocast = Autocast::kLow, .reads = {inputs(1, 2, 3), inputs(2)}};
const Op kOutlineHead{.name = "outline_head", .autocast = Autocast::kLow, .reads = {inputs(2)}};
const Op kOutlineRead{.name = "outline_read", .reads = {inputs(2)}};

const Op& op_of(OutlineRead read) {
  switch (read) {
    case OutlineRead::kProduct:
      return kOutlineProduct;
    case OutlineRead::kActivated:
      return kOutlineActivated;
    case OutlineRead::kHead:
      return kOutlineHead;
    case OutlineRead::kAsStored:
      break;
  }
  return kOutlineRead;
}
const Op kOutlineLoss{.name = "outline_loss"};

class OutlinedModule final : public nn::Module<OutlinedModule> {
 public:
  explicit OutlinedModule(std::string type) : type_(std::move(type)) {}
  std::string type_name() const override { return type_; }

  Tensor forward(const Tensor& x) {
    Tensor y = x;
    if (what_) y = read(y);
    for (size_t i = 0; i < num_children(); ++i) {
      y = static_cast<OutlinedModule&>(child(i))(y);
    }
    return y;
  }

  OutlinedModule& descend(const std::string& word, const std::string& type) {
    for (size_t i = 0; i < num_children(); ++i) {
      if (child(i).name() == word) return static_cast<OutlinedModule&>(child(i));
    }
    return add<OutlinedModule>(word, type);
  }
  void become(const OutlineModule& what) {
    what_ = &what;
    for (const auto& [name, shape] : what.parameters) parameter(name, shape);
    places_ = parameter_places();
  }
  void tie(const Tensor& tensor) {
    share_parameter("weight", tensor);
    places_ = parameter_places();
  }

 private:
  Tensor read(const Tensor& x) {
    const OutlineModule& what = *what_;
    const bool is_product = what.read != OutlineRead::kAsStored;
    const int64_t tokens = x.size(0);
    // Input 2 is what backward reads beside weight and bias: saved as any input is, so that
    // activation checkpointing lets it go.
    TensorList inputs{x, *places_.front().tensor, kept_of(x)};
    for (size_t i = 1; i < places_.size(); ++i) inputs.push_back(*places_[i].tensor);
    double operations = 0;
    for (const nn::ParameterPlace& place : places_) {
      if (is_product && place.tensor->dim() == 2) {
        operations += 2.0 * static_cast<double>(place.tensor->numel() * tokens);
      }
    }
    return differentiable(
        op_of(what.read), inputs,
        [&, stream = x.dtype()](Inputs in, Extras& extras) {
          count_flops(operations);
          const double beside = what.kept_fused * static_cast<double>(tokens);
          const int64_t fused = static_cast<int64_t>(beside) + (tokens > 0 ? what.kept_once : 0);
          if (extras.wanted() && fused > 0) {
            extras.save(raw::empty({fused}, in[0].dtype(), kMeta));
          }
          return raw::empty(in[0].shape(), stream, kMeta);
        },
        [operations, read = what.read, count = inputs.size(), keeps = inputs[2].defined()](
            Grads, const Saved& saved) -> TensorList {
          // Asked for, so that what a checkpoint has let go is made again.
          TensorList read_again;
          if (keeps) read_again.push_back(saved.input(2));
          const bool reads_weight =
              read == OutlineRead::kProduct || read == OutlineRead::kActivated;
          if (reads_weight && saved.needs(0)) read_again.push_back(saved.input(1));
          count_flops(2 * operations);
          TensorList gradients;
          for (size_t i = 0; i < count; ++i) {
            const auto input = static_cast<int>(i);
            gradients.push_back(saved.needs(input) ? raw::empty(saved.input_shape(input),
                                                                saved.input_dtype(input), kMeta)
                                                   : Tensor());
          }
          return gradients;
        });
  }

  // In bytes. Products keep in the dtype that they compute in.
  Tensor kept_of(const Tensor& x) const {
    if (!grad_enabled()) return {};
    const AutocastMode& autocast = Context::current().slot<AutocastMode>();
    const bool casts = what_->read != OutlineRead::kAsStored && autocast.enabled;
    const auto element = static_cast<double>(size_of(casts ? autocast.dtype : x.dtype()));
    const double bytes = what_->kept * element + what_->kept_bytes;
    const auto all = static_cast<int64_t>(bytes * static_cast<double>(x.size(0)));
    return all > 0 ? raw::empty({all}, kU8, kMeta) : Tensor();
  }

  std::string type_;
  const OutlineModule* what_ = nullptr;
  std::vector<nn::ParameterPlace> places_;  // of its own parameters
};

struct OutlinedTraining {
  ModelOutline outline;  // modules point to it
  std::shared_ptr<OutlinedModule> model;
};

Tensor outline_loss(const Tensor& x) {
  return differentiable(
      kOutlineLoss, {x}, [](Inputs) { return raw::empty({}, kF32, kMeta); },
      [](Grads, const Saved& saved) {
        return raw::empty(saved.input_shape(0), saved.input_dtype(0), kMeta);
      });
}

}  // namespace

std::vector<std::string> ModelOutline::not_by_muon() const {
  std::vector<std::string> names;
  for (const OutlineModule& module : modules) {
    const bool hidden =
        module.read == OutlineRead::kProduct || module.read == OutlineRead::kActivated;
    if (hidden) continue;
    for (const auto& [own, shape] : module.parameters) {
      names.push_back(module.name.empty() ? own : module.name + "." + own);
    }
  }
  return names;
}

int64_t ModelOutline::num_parameters() const {
  int64_t sum = 0;
  for (const OutlineModule& module : modules) {
    for (const auto& [name, shape] : module.parameters) sum += numel_of(shape);
  }
  return sum;
}

// "model.layers.3.mlp.up" belongs to "model.layers.3"; others to themselves.
std::string ModelOutline::block_of(const std::string& module) {
  for (size_t at = 0; at < module.size();) {
    const size_t end = std::min(module.find('.', at), module.size());
    if (at > 0 && is_number(std::string_view(module).substr(at, end - at))) {
      return module.substr(0, end);
    }
    at = end + 1;
  }
  return module;
}

ModelOutline ModelOutline::of_config(const std::string& path, bool trains) {
  std::ifstream file(path);
  TS_CHECK_AS(IoError, file.is_open(), kOutline, "cannot read ", path);
  const ConfigJson json(Json::parse(file, nullptr, false), path);
  if (json.json().contains("modules")) return outline_of_report(json.json(), path);
  const std::string type = json.type();
  if (type == "bert") return bert(json, trains);
  if (type == "gpt2") return gpt2(json, trains);
  if (type == "llama" || type == "mistral") return llama(json, type, false, false);
  if (type == "qwen2") return llama(json, type, true, false);
  if (type == "qwen3") return llama(json, type, false, true);
  TS_THROW(UnsupportedError, kOutline, path, " is of model_type \"", type,
           "\", which is unknown; known are bert, gpt2, llama, mistral, qwen2, qwen3; "
           "give the folder of its safetensors files instead");
}

ModelOutline ModelOutline::parse(const std::string& text, const std::string& path) {
  const ConfigJson json(Json::parse(text, nullptr, false), path);
  TS_CHECK_AS(FormatError, json.json().contains("modules"), kOutline, path, " has no \"modules\"");
  return outline_of_report(json.json(), path);
}

std::string ModelOutline::to_json() const {
  nlohmann::ordered_json json = {{"kind", kind}, {"block_class", block_class}};
  if (dimensions.width > 0) json["width"] = dimensions.width;
  for (const OutlineModule& module : modules) {
    nlohmann::ordered_json entry = {{"name", module.name},
                                    {"parameters", nlohmann::ordered_json::array()}};
    for (const auto& [name, shape] : module.parameters) {
      entry["parameters"].push_back({name, std::vector<int64_t>(shape.begin(), shape.end())});
    }
    entry["read"] = kReads[static_cast<size_t>(module.read)];
    if (module.kept > 0) entry["kept"] = module.kept;
    if (module.kept_bytes > 0) entry["kept_bytes"] = module.kept_bytes;
    if (module.kept_fused > 0) entry["kept_fused"] = module.kept_fused;
    if (module.kept_once > 0) entry["kept_once"] = module.kept_once;
    if (!module.tied.empty()) entry["tied"] = module.tied;
    json["modules"].push_back(std::move(entry));
  }
  return json.dump(1);
}

ModelOutline ModelOutline::of_model(nn::ModuleBase& model) {
  ModelOutline outline{.kind = model.type_name()};
  std::map<const TensorImpl*, std::string> known;
  for (const auto& [name, module] : model.named_modules()) {
    OutlineModule one{.name = name, .parameters = {}};
    const std::string type = module->type_name();
    if (type == "Linear") one.read = OutlineRead::kProduct;
    if (!name.empty() && is_number(module->name())) outline.block_class = type;
    for (const auto& [own, place] : module->parameter_places()) {
      if (own.find('.') != std::string::npos || !place->defined()) continue;
      const auto [at, added] =
          known.try_emplace(place->impl(), name.empty() ? own : name + "." + own);
      if (added) {
        one.parameters.push_back({own, place->shape()});
      } else {
        one.tied = at->second;
      }
    }
    if (!one.parameters.empty() || !one.tied.empty()) outline.modules.push_back(std::move(one));
  }
  return outline;
}

ModelOutline ModelOutline::of_safetensors(const std::vector<std::string>& files) {
  ModelOutline model;
  model.kind = std::to_string(files.size()) + " safetensors file" + (files.size() == 1 ? "" : "s");
  std::set<std::string> names;
  std::map<std::string, size_t> known;
  for (const std::string& path : files) {
    const SafeTensorsFile file(path);
    for (const SafeTensorsEntry& entry : file.entries()) {
      TS_CHECK_AS(FormatError, names.insert(entry.name).second, kOutline, "\"", entry.name,
                  "\" is in two files, the second is ", path);
      const size_t dot = entry.name.rfind('.');
      const std::string owner = dot == std::string::npos ? "" : entry.name.substr(0, dot);
      const auto [at, added] = known.try_emplace(owner, model.modules.size());
      if (added) model.modules.push_back({.name = owner, .parameters = {}});
      OutlineModule& module = model.modules[at->second];
      // Indices and masks stay what they are.
      const bool floating =
          (entry.dtype_name[0] == 'F' || entry.dtype_name[0] == 'B') && entry.dtype_name != "BOOL";
      if (floating) {
        module.parameters.push_back({entry.name.substr(dot + 1), Shape(entry.shape)});
      } else {
        module.buffer_bytes += static_cast<int64_t>(entry.end - entry.begin);
      }
    }
  }
  TS_CHECK_AS(FormatError, !model.modules.empty(), kOutline, files[0], " holds no tensors");
  for (OutlineModule& module : model.modules) module.read = read_of(module);
  return model;
}

ModelOutline ModelOutline::read(const std::string& path, bool trains) {
  TS_CHECK_AS(IoError, fs::exists(path), kOutline, "there is no ", path,
              "; models are read from this machine: give a config.json, a safetensors file, or a "
              "folder with one of them");
  if (!fs::is_directory(path)) {
    if (path.ends_with(".safetensors")) return of_safetensors({path});
    if (path.ends_with(".index.json")) return of_safetensors(files_of_index(path));
    TS_CHECK_AS(UnsupportedError, path.ends_with(".json"), kOutline, path,
                " is neither a config.json nor safetensors");
    return of_config(path, trains);
  }
  const fs::path folder(path);
  if (fs::exists(folder / "config.json")) {
    try {
      return of_config((folder / "config.json").string(), trains);
    } catch (const UnsupportedError&) {  // its files say it too
      if (!fs::exists(folder / "model.safetensors.index.json") &&
          !fs::exists(folder / "model.safetensors")) {
        throw;
      }
    }
  }
  if (fs::exists(folder / "model.safetensors.index.json")) {
    return of_safetensors(files_of_index((folder / "model.safetensors.index.json").string()));
  }
  if (fs::exists(folder / "model.safetensors")) {
    return of_safetensors({(folder / "model.safetensors").string()});
  }
  TS_THROW(FormatError, kOutline, path,
           " says nothing about a model: no config.json, model.safetensors or "
           "model.safetensors.index.json; pickled weights are not read");
}

PlannedTraining training_of(const ModelOutline& outline, const OutlineTrainingOptions& options) {
  const auto training = std::make_shared<OutlinedTraining>();
  training->outline = outline;
  training->model = std::make_shared<OutlinedModule>("Model");
  std::vector<std::pair<OutlinedModule*, std::string>> ties;
  for (const OutlineModule& module : training->outline.modules) {
    OutlinedModule* at = training->model.get();
    for (size_t begin = 0; begin < module.name.size();) {
      const size_t end = std::min(module.name.find('.', begin), module.name.size());
      const std::string word = module.name.substr(begin, end - begin);
      at = &at->descend(word, is_number(word) ? outline.block_class : word);
      begin = end + 1;
    }
    at->become(module);
    if (!module.tied.empty()) ties.emplace_back(at, module.tied);
  }
  for (const auto& [module, name] : ties) module->tie(training->model->get_parameter(name));
  const int64_t width = std::max<int64_t>(outline.dimensions.width, 1);
  return {std::shared_ptr<nn::ModuleBase>(training, training->model.get()),
          [model = training->model.get(), tokens = options.tokens, width] {
            return outline_loss((*model)(raw::empty({tokens, width}, kF32, kMeta)));
          }};
}

}  // namespace tessera::accelerate
