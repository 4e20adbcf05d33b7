// tessera convert: files of torch.save as safetensors. Tensors go from mapped files to the new one,
// one after the other: of a model at most one tensor is in memory.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/state/model_io.h>
#include <tessera/core/error.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/core/state/torch_file.h>

namespace tessera::cli {
namespace {

constexpr std::string_view kConvert = "tessera convert";
constexpr const char* kTorchWhole = "pytorch_model.bin";
constexpr const char* kTorchIndex = "pytorch_model.bin.index.json";
namespace fs = std::filesystem;

struct ConvertRequest {
  std::string source, output, key, max_shard_size;
  bool overwrite = false;
};

// The files of a model: one, or the shards that an index names.
std::vector<fs::path> torch_files(const fs::path& source) {
  TS_CHECK_AS(IoError, fs::exists(source), kConvert, "there is no ", source.string());
  fs::path index = source;
  if (fs::is_directory(source)) {
    if (fs::exists(source / kTorchWhole)) return {source / kTorchWhole};
    index = source / kTorchIndex;
    TS_CHECK_AS(FormatError, fs::exists(index), kConvert, source.string(), " has neither ",
                kTorchWhole, " nor ", kTorchIndex, "; give the file that is meant");
  }
  if (!index.string().ends_with(".index.json")) return {source};
  const auto json = read_bounded_json(index.string());
  TS_CHECK_AS(FormatError,
              json.is_object() && json.contains("weight_map") && json["weight_map"].is_object() &&
                  !json["weight_map"].empty(),
              kConvert, index.string(), " has no \"weight_map\" of tensors and files");
  std::set<fs::path> shards;
  for (const auto& [tensor, shard] : json["weight_map"].items()) {
    // A shard lies beside its index: an index from elsewhere names no files of this machine.
    TS_CHECK_AS(FormatError,
                shard.is_string() && !shard.get<std::string>().empty() &&
                    fs::path(shard.get<std::string>()).filename() == shard.get<std::string>(),
                kConvert, index.string(), ": the file of \"", tensor,
                "\" is not the name of a file beside it: ", shard.dump());
    shards.insert(index.parent_path() / shard.get<std::string>());
  }
  return {shards.begin(), shards.end()};
}

struct Converted {
  std::vector<std::unique_ptr<TorchFile>> files;
  StoredWeights stored;
  std::vector<std::string> others, refused;
};

// The name below `key`; empty where it is not.
std::string name_below(const std::string& name, const std::string& key) {
  if (key.empty()) return name;
  return name.starts_with(key + ".") ? name.substr(key.size() + 1) : "";
}

Converted open_torch(const ConvertRequest& request) {
  Converted converted;
  std::set<std::string> names;
  for (const fs::path& path : torch_files(request.source)) {
    converted.files.push_back(std::make_unique<TorchFile>(path.string()));
    const TorchFile& file = *converted.files.back();
    std::vector<std::pair<std::string, const TorchFileEntry*>> written;  // of this file
    for (const TorchFileEntry& entry : file.entries()) {
      const std::string name = name_below(entry.name, request.key);
      if (name.empty()) continue;
      TS_CHECK_AS(FormatError, names.insert(name).second, kConvert, path.string(), " has \"", name,
                  "\", which another file has, too");
      const auto same = std::ranges::find_if(
          written, [&](const auto& other) { return other.second->is_same_as(entry); });
      if (same != written.end()) {  // a tied weight
        converted.stored.tied[name] = same->first;
        continue;
      }
      written.emplace_back(name, &entry);
      converted.stored.weights.push_back(
          {name, entry.dtype, entry.shape, [&file, &entry](const auto& take) {
             Tensor elements = file.view(entry.name);
             if (!elements.is_contiguous()) {
               elements = file.load(entry.name);
             }
             take(elements.data(), static_cast<size_t>(elements.nbytes()));
           }});
    }
    for (const std::string& other : file.others()) {
      if (const std::string name = name_below(other, request.key); !name.empty()) {
        converted.others.push_back(name);
      }
    }
    for (const auto& [tensor, what] : file.refused()) {
      if (const std::string name = name_below(tensor, request.key); !name.empty()) {
        converted.refused.push_back(name + " (" + what + ")");
      }
    }
  }
  TS_CHECK_AS(ConfigError, !converted.stored.weights.empty(), kConvert, request.source,
              " has no tensors",
              request.key.empty() ? "" : " below the key " + request.key + "; look at it without");
  return converted;
}

// What stands beside weights in a folder of transformers: config.json, vocabularies.
bool goes_along(const fs::path& file) {
  static const std::set<std::string> kKinds = {".json", ".txt", ".model", ".jinja"};
  return kKinds.contains(file.extension().string()) && !file.string().ends_with(".index.json");
}

void print_left_out(const char* title, const std::vector<std::string>& names) {
  if (names.empty()) return;
  std::printf("%s", title);
  for (size_t i = 0; i < std::min<size_t>(names.size(), 20); ++i) {
    std::printf(" %s", names[i].c_str());
  }
  if (names.size() > 20) std::printf(" and %zu more", names.size() - 20);
  std::printf("\n");
}

int convert(const ConvertRequest& request) {
  const fs::path source(request.source), output(request.output);
  const bool is_file = output.extension() == ".safetensors" && !fs::is_directory(output);
  TS_CHECK_AS(ConfigError, is_file || fs::is_directory(output) || !fs::exists(output), kConvert,
              "OUT has to be a folder, which is made, or a file named *.safetensors; ",
              request.output, " is another file");
  TS_CHECK_AS(UsageError, !is_file || request.max_shard_size.empty(), kConvert,
              "--max-shard-size makes several files; OUT has to be a folder; got ", request.output);
  std::vector<fs::path> along, targets;
  if (is_file) {
    targets.push_back(output);
  } else {
    targets = {output / "model.safetensors", output / "model.safetensors.index.json"};
    const bool same = fs::exists(output) && fs::exists(source) && fs::equivalent(source, output);
    if (fs::is_directory(source) && !same) {
      for (const auto& entry : fs::directory_iterator(source)) {
        if (!entry.is_regular_file() || !goes_along(entry.path())) continue;
        along.push_back(entry.path());
        targets.push_back(output / entry.path().filename());
      }
    }
  }
  for (const fs::path& target : targets) {
    TS_CHECK_AS(ConfigError, request.overwrite || !fs::exists(target), kConvert, target.string(),
                " exists; give --overwrite to replace it");
  }
  const Converted converted = open_torch(request);
  std::vector<fs::path> written;
  if (is_file) {
    if (output.has_parent_path()) make_folders(output.parent_path().string());
    write_weights_file(converted.stored, output.string());
    written.push_back(output);
  } else {
    const SavedModel saved =
        write_weights(converted.stored, output.string(),
                      request.max_shard_size.empty() ? SaveModelOptions().max_shard_size
                                                     : request.max_shard_size);
    for (const std::string& name : saved.files) written.push_back(output / name);
    for (const fs::path& file : along) {
      fs::copy_file(file, output / file.filename(), fs::copy_options::overwrite_existing);
      written.push_back(output / file.filename());
    }
  }
  std::printf("%zu tensors written, and %zu names of tensors that are among them:\n",
              converted.stored.weights.size(), converted.stored.tied.size());
  for (const fs::path& file : written) std::printf("  %s\n", file.c_str());
  print_left_out("left out, for they are no tensors:", converted.others);
  print_left_out("left out, for their elements cannot be read:", converted.refused);
  return 0;
}

}  // namespace

std::string byte_size_problem(const std::string& text) {
  try {
    parse_byte_size(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void add_convert(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("convert", "makes safetensors of files that torch.save wrote");
  const auto request = std::make_shared<ConvertRequest>();
  command
      ->add_option("IN", request->source,
                   "*.pt, *.pth, *.bin, an index of shards, or a folder with pytorch_model.bin")
      ->required();
  command->add_option("OUT", request->output, "*.safetensors, or a folder, which is made")
      ->required();
  command->add_option("--key", request->key,
                      "only what is below this key, without it in names (model, state_dict)");
  command
      ->add_option("--max-shard-size", request->max_shard_size,
                   "bytes of each file in a folder (5GB, 300MiB); default 10GB")
      ->check(byte_size_problem);
  command->add_flag("--overwrite", request->overwrite, "replace OUT");
  command->callback([request, &exit_code] { exit_code = convert(*request); });
}

}  // namespace tessera::cli
