// tessera estimate-memory: what a model takes, from its configuration or from the headers of its
// files; no element is read.
//
//   parameters    count x bytes of the dtype (int4: half a byte; index buffers as they are in f32)
//   gradients     f32: as the parameters; 16 bits: 16 bits each; reduced in f32: 4 bytes
//   optimizer     Adam's two moments in f32, and f32 masters where parameters are narrower
//   activations   of one micro-batch, see activation_bytes()
// ZeRO-1 divides the optimizer's part by the ranks, ZeRO-2 gradients too, ZeRO-3 parameters too.
// "Training (Adam)" of the first table is Accelerate's figure: four times the size in f32, twice
// the f32 size for 16 bits.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/core/error.h>
#include <tessera/core/safetensors.h>

namespace tessera::cli {
namespace {

constexpr std::string_view kEstimate = "tessera estimate-memory";
namespace fs = std::filesystem;

// A block that stays together on one device: embeddings, a layer.
struct Part {
  std::string name;
  double elements = 0;  // in units of 4 bytes where they are f32
};

struct Dimensions {  // of a transformer, for its activations; all 0: not known
  int64_t width = 0, layers = 0, heads = 0, inner = 0, vocabulary = 0, kv_width = 0;
  bool gated = false;
};

struct Model {
  std::string kind;
  std::vector<Part> parts;
  Dimensions shape;
  double elements() const {
    double sum = 0;
    for (const Part& part : parts) sum += part.elements;
    return sum;
  }
  const Part& largest() const {
    return *std::max_element(parts.begin(), parts.end(),
                             [](const Part& a, const Part& b) { return a.elements < b.elements; });
  }
};

int64_t number(const nlohmann::json& json, const std::string& path,
               std::initializer_list<const char*> names, std::optional<int64_t> fallback = {}) {
  for (const char* name : names) {
    const auto at = json.find(name);
    if (at == json.end() || at->is_null()) continue;
    TS_CHECK_AS(FormatError, at->is_number_integer() && at->get<int64_t>() > 0, kEstimate, path,
                ": \"", name, "\" has to be a whole number above 0; got ", at->dump());
    return at->get<int64_t>();
  }
  TS_CHECK_AS(FormatError, fallback.has_value(), kEstimate, path, " has no \"", *names.begin(),
              "\"");
  return *fallback;
}

void add(Model& model, std::string name, int64_t elements) {
  model.parts.push_back({std::move(name), static_cast<double>(elements)});
}

// BertModel of transformers: embeddings with their two index buffers, encoder, pooler.
Model bert(const nlohmann::json& json, const std::string& path) {
  Model model;
  const int64_t width = number(json, path, {"hidden_size"});
  const int64_t layers = number(json, path, {"num_hidden_layers"});
  const int64_t inner = number(json, path, {"intermediate_size"});
  const int64_t words = number(json, path, {"vocab_size"});
  const int64_t positions = number(json, path, {"max_position_embeddings"}, 512);
  const int64_t types = number(json, path, {"type_vocab_size"}, 2);
  constexpr int64_t kIndexUnits = 2;  // an i64 is two f32
  add(model, "embeddings",
      (words + positions + types) * width + 2 * width + 2 * positions * kIndexUnits);
  for (int64_t i = 0; i < layers; ++i) {
    add(model, "encoder.layer." + std::to_string(i),
        4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width);
  }
  add(model, "pooler", width * width + width);
  model.shape = {width, layers, number(json, path, {"num_attention_heads"}), inner, words, width};
  return model;
}

// GPT2Model: the head is the embedding.
Model gpt2(const nlohmann::json& json, const std::string& path) {
  Model model;
  const int64_t width = number(json, path, {"n_embd", "hidden_size"});
  const int64_t layers = number(json, path, {"n_layer", "num_hidden_layers"});
  const int64_t words = number(json, path, {"vocab_size"});
  const int64_t positions = number(json, path, {"n_positions", "n_ctx"});
  const int64_t inner = number(json, path, {"n_inner"}, 4 * width);
  add(model, "wte", words * width);
  add(model, "wpe", positions * width);
  for (int64_t i = 0; i < layers; ++i) {
    add(model, "h." + std::to_string(i),
        4 * width * width + 4 * width + 2 * width * inner + inner + width + 4 * width);
  }
  add(model, "ln_f", 2 * width);
  model.shape = {width, layers, number(json, path, {"n_head", "num_attention_heads"}),
                 inner, words,  width};
  return model;
}

// LlamaForCausalLM and those built like it (mistral, qwen2, gemma's widths of heads).
Model llama(const nlohmann::json& json, const std::string& path, bool qkv_bias, bool head_norms) {
  Model model;
  const int64_t width = number(json, path, {"hidden_size"});
  const int64_t layers = number(json, path, {"num_hidden_layers"});
  const int64_t inner = number(json, path, {"intermediate_size"});
  const int64_t words = number(json, path, {"vocab_size"});
  const int64_t heads = number(json, path, {"num_attention_heads"});
  const int64_t kv_heads = number(json, path, {"num_key_value_heads"}, heads);
  const int64_t head = number(json, path, {"head_dim"}, width / heads);
  const bool bias = json.value("attention_bias", false);
  int64_t layer =
      2 * width * heads * head + 2 * width * kv_heads * head + 3 * width * inner + 2 * width;
  if (qkv_bias || bias) layer += (heads + 2 * kv_heads) * head;
  if (bias) layer += width;
  if (json.value("mlp_bias", false)) layer += 2 * inner + width;
  if (head_norms) layer += 2 * head;
  add(model, "model.embed_tokens", words * width);
  for (int64_t i = 0; i < layers; ++i) add(model, "model.layers." + std::to_string(i), layer);
  add(model, "model.norm", width);
  if (!json.value("tie_word_embeddings", false)) add(model, "lm_head", words * width);
  model.shape = {width, layers, heads, inner, words, kv_heads * head, true};
  return model;
}

Model from_config(const std::string& path) {
  std::ifstream file(path);
  TS_CHECK_AS(IoError, file.is_open(), kEstimate, "cannot read ", path);
  const auto json = nlohmann::json::parse(file, nullptr, false);
  TS_CHECK_AS(FormatError, json.is_object(), kEstimate, path, " is no JSON object");
  const auto kind = json.find("model_type");
  TS_CHECK_AS(FormatError, kind != json.end() && kind->is_string(), kEstimate, path,
              " has no \"model_type\": it is no configuration of a transformers model");
  const auto type = kind->get<std::string>();
  Model model;
  if (type == "bert") {
    model = bert(json, path);
  } else if (type == "gpt2") {
    model = gpt2(json, path);
  } else if (type == "llama" || type == "mistral") {
    model = llama(json, path, false, false);
  } else if (type == "qwen2") {
    model = llama(json, path, true, false);
  } else if (type == "qwen3") {
    model = llama(json, path, false, true);
  } else {
    TS_THROW(UnsupportedError, kEstimate, path, " is of model_type \"", type,
             "\", which is unknown; known are bert, gpt2, llama, mistral, qwen2, qwen3; "
             "give the folder of its safetensors files instead");
  }
  model.kind = type;
  return model;
}

// "model.layers.3.mlp.up.weight" belongs to "model.layers.3"; others to their module.
std::string block_of(const std::string& name) {
  for (size_t at = 0; at < name.size();) {
    const size_t end = std::min(name.find('.', at), name.size());
    const std::string word = name.substr(at, end - at);
    if (at > 0 && !word.empty() && word.find_first_not_of("0123456789") == std::string::npos) {
      return name.substr(0, end);
    }
    at = end + 1;
  }
  const size_t last = name.rfind('.');
  return last == std::string::npos ? name : name.substr(0, last);
}

Model from_safetensors(const std::vector<std::string>& files) {
  Model model;
  model.kind = std::to_string(files.size()) + " safetensors file" + (files.size() == 1 ? "" : "s");
  std::set<std::string> names;
  std::map<std::string, double> blocks;
  std::vector<std::string> order;
  for (const std::string& path : files) {
    const SafeTensorsFile file(path);
    for (const SafeTensorsEntry& entry : file.entries()) {
      TS_CHECK_AS(FormatError, names.insert(entry.name).second, kEstimate, "\"", entry.name,
                  "\" is in two files, the second is ", path);
      double elements = 1;
      for (const int64_t size : entry.shape) elements *= static_cast<double>(size);
      // Indices and masks stay what they are.
      const bool floating = entry.dtype_name[0] == 'F' || entry.dtype_name[0] == 'B';
      if (!floating || entry.dtype_name == "BOOL") {
        elements = static_cast<double>(entry.end - entry.begin) / 4;
      }
      const std::string block = block_of(entry.name);
      if (blocks.find(block) == blocks.end()) order.push_back(block);
      blocks[block] += elements;
    }
  }
  TS_CHECK_AS(FormatError, !order.empty(), kEstimate, files[0], " holds no tensors");
  for (const std::string& block : order) model.parts.push_back({block, blocks[block]});
  return model;
}

std::vector<std::string> files_of_index(const std::string& path) {
  std::ifstream file(path);
  TS_CHECK_AS(IoError, file.is_open(), kEstimate, "cannot read ", path);
  const auto json = nlohmann::json::parse(file, nullptr, false);
  TS_CHECK_AS(FormatError,
              json.is_object() && json.contains("weight_map") && json["weight_map"].is_object() &&
                  !json["weight_map"].empty(),
              kEstimate, path, " has no \"weight_map\"");
  std::set<std::string> files;
  for (const auto& [name, shard] : json["weight_map"].items()) {
    TS_CHECK_AS(FormatError, shard.is_string(), kEstimate, path, ": the file of \"", name,
                "\" has to be a text");
    files.insert((fs::path(path).parent_path() / shard.get<std::string>()).string());
  }
  return {files.begin(), files.end()};
}

Model read_model(const std::string& path) {
  TS_CHECK_AS(IoError, fs::exists(path), kEstimate, "there is no ", path,
              "; models are read from this machine: give a config.json, a safetensors file, or a "
              "folder with one of them");
  if (!fs::is_directory(path)) {
    if (path.ends_with(".safetensors")) return from_safetensors({path});
    if (path.ends_with(".index.json")) return from_safetensors(files_of_index(path));
    TS_CHECK_AS(UnsupportedError, path.ends_with(".json"), kEstimate, path,
                " is neither a config.json nor safetensors");
    return from_config(path);
  }
  const fs::path folder(path);
  if (fs::exists(folder / "config.json")) {
    try {
      return from_config((folder / "config.json").string());
    } catch (const UnsupportedError&) {  // its files say it too
      if (!fs::exists(folder / "model.safetensors.index.json") &&
          !fs::exists(folder / "model.safetensors")) {
        throw;
      }
    }
  }
  if (fs::exists(folder / "model.safetensors.index.json")) {
    return from_safetensors(files_of_index((folder / "model.safetensors.index.json").string()));
  }
  if (fs::exists(folder / "model.safetensors")) {
    return from_safetensors({(folder / "model.safetensors").string()});
  }
  TS_THROW(FormatError, kEstimate, path,
           " says nothing about a model: no config.json, model.safetensors or "
           "model.safetensors.index.json; pickled weights are not read");
}

struct Dtype {
  std::string name;
  double bytes;
};
const Dtype kDtypes[] = {{"f32", 4}, {"f16", 2}, {"bf16", 2}, {"fp8", 1}, {"int4", 0.5}};

const Dtype& dtype_named(const std::string& name) {
  const std::map<std::string, std::string> kOthers = {{"float32", "f32"},
                                                      {"float16", "f16"},
                                                      {"bfloat16", "bf16"},
                                                      {"fp16", "f16"},
                                                      {"fp32", "f32"}};
  const auto other = kOthers.find(name);
  const std::string wanted = other == kOthers.end() ? name : other->second;
  for (const Dtype& dtype : kDtypes) {
    if (dtype.name == wanted) return dtype;
  }
  TS_THROW(ConfigError, kEstimate, "--dtypes has to be of f32, f16, bf16, fp8, int4; got \"", name,
           "\"");
}

std::string human(double bytes) {
  const char* const kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) bytes /= 1024, ++unit;
  char text[40];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", bytes, kUnits[unit]);
  return text;
}

// What forward keeps for backward, of B sequences of T tokens, with C = width, F = inner, K = the
// width of keys and values, V = the vocabulary, s = bytes of the compute dtype. A layer of ours:
//   both norms' inputs and results 4 C, queries C, keys and values 2 K, attention's result C and
//   its statistics (f32, heads), the projection's result is not kept; feed-forward: its inner
//   values before and after the activation 2 F (gated: 3 F)
// and once the embedding C, the last norm 2 C, and logits V where the head is not fused with the
// loss. Attention is computed in tiles: no T x T.
double activation_bytes(const Dimensions& m, double batch, double tokens, double s) {
  const auto C = static_cast<double>(m.width), F = static_cast<double>(m.inner),
             K = static_cast<double>(m.kv_width), V = static_cast<double>(m.vocabulary);
  const double layer =
      (4 * C + 2 * C + 2 * K + (m.gated ? 3 : 2) * F) * s + 4 * static_cast<double>(m.heads);
  return batch * tokens * (static_cast<double>(m.layers) * layer + (3 * C + V) * s);
}

struct EstimateRequest {
  std::string path;
  std::string dtypes = "f32,f16,fp8,int4";
  int64_t ranks = 1;
  int64_t batch = 0;
  int64_t tokens = 0;
  bool json = false;
};

struct ModeRow {
  std::string mode;
  double parameters, gradients, optimizer, activations;
  double total() const { return parameters + gradients + optimizer + activations; }
};

// How a training comes to its dtype (precision/policy.h).
struct Way {
  const char* key;                          // in JSON
  const char* label;                        // after the dtype's name
  double parameters, gradients, optimizer;  // bytes of an element, with Adam's two f32 moments
};
std::vector<Way> ways_of(const Dtype& dtype) {
  if (dtype.bytes < 2) return {};  // nothing is trained in narrower ones alone
  if (dtype.bytes == 4) return {{"per_rank", "", 4, 4, 8}};
  return {{"per_rank", " autocast (the default): f32 parameters and their 16-bit copies", 6, 4, 8},
          {"per_rank_pure", " pure (precision_policy = pure): 16-bit parameters, f32 masters", 2, 4,
           12}};
}

// Of one rank.
std::vector<ModeRow> modes(const Model& model, const Dtype& dtype, const Way& way,
                           const EstimateRequest& request) {
  const double elements = model.elements();
  const auto ranks = static_cast<double>(request.ranks);
  const double parameters = elements * way.parameters;
  const double gradients = elements * way.gradients;
  const double optimizer = elements * way.optimizer;
  const double activations =
      request.batch == 0 ? 0
                         : activation_bytes(model.shape, static_cast<double>(request.batch),
                                            static_cast<double>(request.tokens), dtype.bytes);
  std::vector<ModeRow> rows = {{"one rank", parameters, gradients, optimizer, activations}};
  if (request.ranks == 1) return rows;
  rows.push_back({"DDP", parameters, gradients, optimizer, activations});
  rows.push_back({"ZeRO-1", parameters, gradients, optimizer / ranks, activations});
  rows.push_back({"ZeRO-2", parameters, gradients / ranks, optimizer / ranks, activations});
  rows.push_back({"ZeRO-3", parameters / ranks, gradients / ranks, optimizer / ranks, activations});
  return rows;
}

int estimate(const EstimateRequest& request) {
  const Model model = read_model(request.path);
  TS_CHECK_AS(ConfigError, (request.batch == 0) == (request.tokens == 0), kEstimate,
              "activations need --batch-size and --sequence-length");
  TS_CHECK_AS(UnsupportedError, request.batch == 0 || model.shape.width > 0, kEstimate,
              "activations are known of bert, gpt2, llama, mistral and qwen by their config.json; "
              "this is ",
              model.kind);
  std::vector<Dtype> dtypes;
  for (size_t begin = 0; begin <= request.dtypes.size();) {
    const size_t end = std::min(request.dtypes.find(',', begin), request.dtypes.size());
    dtypes.push_back(dtype_named(request.dtypes.substr(begin, end - begin)));
    begin = end + 1;
  }
  const double f32 = 4 * model.elements();
  // Accelerate's rule, of weights, gradients, optimizer and the step itself.
  const auto adam = [&](const Dtype& dtype) {
    return dtype.bytes == 4 ? 4 * f32 : dtype.bytes == 2 ? 2 * f32 : 0;
  };

  if (request.json) {
    nlohmann::ordered_json out = {{"model", model.kind}, {"largest_layer", model.largest().name}};
    for (const Dtype& dtype : dtypes) {
      nlohmann::ordered_json row = {
          {"dtype", dtype.name},
          {"largest_layer_bytes", static_cast<int64_t>(model.largest().elements * dtype.bytes)},
          {"total_bytes", static_cast<int64_t>(model.elements() * dtype.bytes)},
          {"training_bytes", static_cast<int64_t>(adam(dtype))}};
      for (const Way& way : ways_of(dtype)) {
        for (const ModeRow& mode : modes(model, dtype, way, request)) {
          row[way.key][mode.mode] = {{"parameters", static_cast<int64_t>(mode.parameters)},
                                     {"gradients", static_cast<int64_t>(mode.gradients)},
                                     {"optimizer", static_cast<int64_t>(mode.optimizer)},
                                     {"activations", static_cast<int64_t>(mode.activations)},
                                     {"total", static_cast<int64_t>(mode.total())}};
        }
      }
      out["dtypes"].push_back(row);
    }
    std::printf("%s\n", out.dump(2).c_str());
    return 0;
  }
  std::printf("%s: %s, %.0f elements, largest layer %s\n\n", request.path.c_str(),
              model.kind.c_str(), model.elements(), model.largest().name.c_str());
  std::printf("%-6s %14s %14s %16s\n", "dtype", "largest layer", "total size", "training (Adam)");
  for (const Dtype& dtype : dtypes) {
    std::printf("%-6s %14s %14s %16s\n", dtype.name.c_str(),
                human(model.largest().elements * dtype.bytes).c_str(),
                human(model.elements() * dtype.bytes).c_str(),
                adam(dtype) == 0 ? "-" : human(adam(dtype)).c_str());
  }
  const auto print_modes = [&](const Dtype& dtype, const Way& way) {
    std::printf(
        "\ntraining in %s%s\nbytes of each of %lld rank%s%s\n%-9s %12s %12s %12s %12s %12s\n",
        dtype.name.c_str(), way.label, static_cast<long long>(request.ranks),
        request.ranks == 1 ? "" : "s", request.batch == 0 ? ", without activations" : "", "mode",
        "parameters", "gradients", "optimizer", "activations", "total");
    for (const ModeRow& row : modes(model, dtype, way, request)) {
      std::printf(
          "%-9s %12s %12s %12s %12s %12s\n", row.mode.c_str(), human(row.parameters).c_str(),
          human(row.gradients).c_str(), human(row.optimizer).c_str(),
          request.batch == 0 ? "-" : human(row.activations).c_str(), human(row.total()).c_str());
    }
  };
  for (const Dtype& dtype : dtypes) {
    for (const Way& way : ways_of(dtype)) print_modes(dtype, way);
  }
  return 0;
}

}  // namespace

void add_estimate_memory(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "estimate-memory", "memory of a model: its size, and what training takes on each rank");
  const auto request = std::make_shared<EstimateRequest>();
  command
      ->add_option("PATH", request->path,
                   "config.json of transformers, a safetensors file or index, or a folder")
      ->required();
  command->add_option("--dtypes", request->dtypes, "of f32, f16, bf16, fp8, int4")
      ->capture_default_str();
  command->add_option("-n,--num-processes,--ranks", request->ranks, "ranks of DDP and ZeRO")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  command->add_option("--batch-size", request->batch, "sequences of a micro-batch, for activations")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  command->add_option("--sequence-length", request->tokens, "tokens of each")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  command->add_flag("--json", request->json, "exact bytes, for programs");
  command->callback([request, &exit_code] { exit_code = estimate(*request); });
}

}  // namespace tessera::cli
