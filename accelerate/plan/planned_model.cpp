#include <tessera/accelerate/plan/planned_model.h>

#include <filesystem>
#include <memory>
#include <set>

#include <nlohmann/json.hpp>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/nn/models/bert.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/llama.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kModel = "model";
namespace fs = std::filesystem;
using Json = nlohmann::json;
using namespace nn::models;

Tensor indices(const Shape& shape) { return zeros(shape, {.dtype = kI64, .device = kMeta}); }

ModelDimensions dimensions_of(const GptConfig& config) {
  return {config.width, config.layers,  config.heads, config.inner_width(),       config.vocab_size,
          config.width, config.context, false,        config.width / config.heads};
}
ModelDimensions dimensions_of(const BertConfig& config) {
  return {config.width, config.layers,  config.heads, config.inner_width(),       config.vocab_size,
          config.width, config.context, false,        config.width / config.heads};
}
ModelDimensions dimensions_of(const LlamaConfig& config) {
  return {config.width,      config.layers,
          config.heads,      config.inner,
          config.vocab_size, config.keys() * config.head(),
          config.context,    true,
          config.head()};
}

Tensor loss_of(Gpt& model, int64_t batch, int64_t length) {
  const Tensor tokens = indices({batch, length});
  return model(tokens, tokens).loss;
}
Tensor loss_of(Llama& model, int64_t batch, int64_t length) {
  const Tensor tokens = indices({batch, length});
  return model(tokens, tokens).loss;
}
Tensor loss_of(Bert& model, int64_t batch, int64_t length) {
  return model(indices({batch, length}), TokenFeatures{}, indices({batch})).loss;
}

template <class Model, class Config>
PlannedModel of_config(const std::string& kind, const std::string& path) {
  const Config config = Config::read(path);
  const nn::ParameterDefaultsGuard without_memory({.device = kMeta, .initialise = false});
  Model model(config);
  return {
      .kind = kind,
      .parameters = ParameterList::of_model(model),
      .dimensions = dimensions_of(config),
      .training = [config](int64_t batch, int64_t length) -> PlannedTraining {
        const auto planned = std::make_shared<Model>(config);
        return {planned, [=] { return loss_of(*planned, batch, std::max<int64_t>(length, 1)); }};
      }};
}

PlannedModel of_list(ParameterList list) {
  const auto training = [list](int64_t, int64_t) { return training_of(list); };
  return {.kind = list.kind, .parameters = std::move(list), .training = training};
}

// A config.json, or a report.
PlannedModel of_json(const std::string& path) {
  const MappedFile file(path);
  const Json json = parse_bounded_json(file.text(), path);
  TS_CHECK_AS(FormatError, json.is_object(), kModel, path, " is no JSON object");
  if (json.contains("modules"))
    return of_list(ParameterList::parse(std::string(file.text()), path));
  const auto kind = json.find("model_type");
  TS_CHECK_AS(FormatError, kind != json.end() && kind->is_string(), kModel, path,
              " has no \"model_type\": it is no configuration of a transformers model");
  const auto type = kind->get<std::string>();
  if (type == "bert") return of_config<Bert, BertConfig>(type, path);
  if (type == "gpt2") return of_config<Gpt, GptConfig>(type, path);
  if (LlamaConfig::is_known(type)) return of_config<Llama, LlamaConfig>(type, path);
  TS_THROW(UnsupportedError, kModel, path, " is of model_type \"", type,
           "\", which is unknown; known are bert, gpt2, ", LlamaConfig::known_kinds(),
           "; give the folder of its safetensors files instead");
}

std::vector<std::string> files_of_index(const std::string& path) {
  const Json json = read_bounded_json(path);
  TS_CHECK_AS(FormatError,
              json.is_object() && json.contains("weight_map") && json["weight_map"].is_object() &&
                  !json["weight_map"].empty(),
              kModel, path, " has no \"weight_map\"");
  std::set<std::string> files;
  for (const auto& [name, shard] : json["weight_map"].items()) {
    TS_CHECK_AS(FormatError, shard.is_string(), kModel, path, ": the file of \"", name,
                "\" has to be a text");
    files.insert((fs::path(path).parent_path() / shard.get<std::string>()).string());
  }
  return {files.begin(), files.end()};
}

PlannedModel of_files(const std::vector<std::string>& files) {
  return of_list(ParameterList::of_safetensors(files));
}

PlannedModel of_folder(const fs::path& folder) {
  const std::string config = folder / "config.json",
                    index = folder / "model.safetensors.index.json",
                    weights = folder / "model.safetensors";
  if (fs::exists(config)) {
    try {
      return of_json(config);
    } catch (const UnsupportedError&) {  // its files say it too
      if (!fs::exists(index) && !fs::exists(weights)) throw;
    }
  }
  if (fs::exists(index)) return of_files(files_of_index(index));
  if (fs::exists(weights)) return of_files({weights});
  TS_THROW(FormatError, kModel, folder.string(),
           " says nothing about a model: no config.json, model.safetensors or "
           "model.safetensors.index.json; pickled weights are not read");
}

}  // namespace

PlannedModel PlannedModel::read(const std::string& path) {
  TS_CHECK_AS(IoError, fs::exists(path), kModel, "there is no ", path,
              "; models are read from this machine: give a config.json, a safetensors file, or a "
              "folder with one of them");
  if (fs::is_directory(path)) return of_folder(path);
  if (path.ends_with(".safetensors")) return of_files({path});
  if (path.ends_with(".index.json")) return of_files(files_of_index(path));
  TS_CHECK_AS(UnsupportedError, path.ends_with(".json"), kModel, path,
              " is neither a config.json nor safetensors");
  return of_json(path);
}

}  // namespace tessera::accelerate
