// tessera merge-weights: the shards of a model as one safetensors file, or as fewer shards. Tensors
// go from mapped files to the new one, one after the other: the model is never in memory.
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
#include <tessera/core/state/safetensors.h>
#include <tessera/distributed/checkpoint/reader.h>

namespace tessera::cli {
namespace {

constexpr std::string_view kMerge = "tessera merge-weights";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kWhole = "model.safetensors";
namespace fs = std::filesystem;

struct MergeRequest {
  std::string source, output;
  std::string max_shard_size;
  int64_t model = 0;
  bool remove_source = false;
  bool overwrite = false;
};

// What is merged. Mapped where that can be: of a tensor a piece is in memory.
struct Source {
  fs::path index;  // empty: a checkpoint
  std::vector<fs::path> shards;
  std::vector<std::unique_ptr<SafeTensorsFile>> files;
  std::unique_ptr<distributed::CheckpointReader> checkpoint;
  StoredWeights stored;
};

// DIR, or an index file itself.
fs::path find_index(const fs::path& source) {
  TS_CHECK_AS(IoError, fs::exists(source), kMerge, "there is no ", source.string());
  if (!fs::is_directory(source)) return source;
  if (fs::exists(source / kIndex)) return source / kIndex;
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(source)) {
    if (entry.path().string().ends_with(".safetensors.index.json")) found.push_back(entry.path());
  }
  TS_CHECK_AS(FormatError, found.size() == 1, kMerge, source.string(), " has ", found.size(),
              " files named *.safetensors.index.json; ",
              found.empty() ? "shards without an index cannot be told to be complete"
                            : "give the one that is meant");
  return found[0];
}

Source open_source(const std::string& path) {
  Source source;
  source.index = find_index(path);
  const auto json = read_bounded_json(source.index.string());
  TS_CHECK_AS(FormatError,
              json.is_object() && json.contains("weight_map") && json["weight_map"].is_object() &&
                  !json["weight_map"].empty(),
              kMerge, source.index.string(), " has no \"weight_map\" of tensors and files");
  std::map<std::string, std::string> where;
  std::set<std::string> names;
  for (const auto& [tensor, shard] : json["weight_map"].items()) {
    TS_CHECK_AS(FormatError, shard.is_string(), kMerge, source.index.string(), ": the file of \"",
                tensor, "\" has to be a text");
    const auto name = shard.get<std::string>();
    // A shard lies beside its index: an index from elsewhere names no files of this machine.
    TS_CHECK_AS(FormatError, !name.empty() && fs::path(name).filename() == fs::path(name), kMerge,
                source.index.string(), ": \"", tensor, "\" is in \"", name,
                "\", which is not the name of a file beside it");
    where[tensor] = name;
    names.insert(name);
  }
  for (const std::string& name : names) {
    const fs::path shard = source.index.parent_path() / name;
    TS_CHECK_AS(IoError, fs::exists(shard), kMerge, source.index.string(), " needs ",
                shard.string(), ", which is not there");
    source.shards.push_back(shard);
  }
  std::map<std::string, const SafeTensorsFile*> by_name;
  for (const fs::path& shard : source.shards) {
    const std::string name = shard.filename().string();
    source.files.push_back(std::make_unique<SafeTensorsFile>(shard.string()));
    const SafeTensorsFile& opened = *source.files.back();
    by_name[name] = &opened;
    for (const SafeTensorsEntry& entry : opened.entries()) {
      const auto at = where.find(entry.name);
      TS_CHECK_AS(FormatError, at != where.end() && at->second == name, kMerge, shard.string(),
                  " has \"", entry.name, "\", which the index ",
                  at == where.end() ? "does not know" : "has in " + at->second);
    }
    for (const auto& [key, value] : opened.metadata()) {
      const auto [at, is_new] = source.stored.metadata.emplace(key, value);
      TS_CHECK_AS(FormatError, is_new || at->second == value, kMerge, shard.string(),
                  ": the metadata \"", key, "\" is \"", value, "\", and another shard's \"",
                  at->second, "\"");
    }
  }
  for (const auto& [tensor, name] : where) {
    TS_CHECK_AS(FormatError, by_name[name]->contains(tensor), kMerge,
                (source.index.parent_path() / name).string(), " lacks \"", tensor,
                "\", which the index has there");
    const SafeTensorsEntry& entry = by_name[name]->entry(tensor);
    TS_CHECK_AS(UnsupportedError, entry.dtype.has_value(), kMerge,
                (source.index.parent_path() / name).string(), ": \"", tensor, "\" is of the dtype ",
                entry.dtype_name, ", which tessera does not have");
    source.stored.weights.push_back({tensor, *entry.dtype, entry.shape,
                                     [file = by_name[name], tensor = tensor](const auto& take) {
                                       const Tensor elements = file->view(tensor);
                                       take(elements.data(),
                                            static_cast<size_t>(elements.nbytes()));
                                     }});
  }
  return source;
}

// A folder of save_state(): the model with the number, every chunk checked as it is read.
Source open_checkpoint(const std::string& folder, int64_t model) {
  Source source;
  source.checkpoint = std::make_unique<distributed::CheckpointReader>(folder);
  source.stored =
      accelerate::weights_of_checkpoint(*source.checkpoint, "model." + std::to_string(model) + ".");
  TS_CHECK_AS(ConfigError, !source.stored.weights.empty(), kMerge, "the checkpoint ", folder,
              " has no model with the number ", model);
  return source;
}

int merge(const MergeRequest& request) {
  const bool is_checkpoint = distributed::is_checkpoint(request.source);
  TS_CHECK_AS(ConfigError, !is_checkpoint || !request.remove_source, kMerge, request.source,
              " holds a whole training, not weights alone; --remove-source does not remove it");
  const Source source =
      is_checkpoint ? open_checkpoint(request.source, request.model) : open_source(request.source);
  const fs::path output(request.output);
  std::vector<fs::path> written;
  if (request.max_shard_size.empty()) {
    const bool is_file = output.extension() == ".safetensors" && !fs::is_directory(output);
    TS_CHECK_AS(ConfigError, is_file || fs::is_directory(output) || !fs::exists(output), kMerge,
                "OUT has to be a folder, which is made, or a file named *.safetensors; ",
                request.output, " is another file");
    const fs::path file = is_file ? output : output / kWhole;
    TS_CHECK_AS(ConfigError, request.overwrite || !fs::exists(file), kMerge, file.string(),
                " exists; give --overwrite to replace it");
    for (const fs::path& shard : source.shards) {
      TS_CHECK_AS(ConfigError, !fs::exists(file) || !fs::equivalent(shard, file), kMerge,
                  file.string(), " is one of the shards; choose another OUT");
    }
    if (file.has_parent_path()) make_folders(file.parent_path().string());
    write_weights_file(source.stored, file.string());
    written.push_back(file);
  } else {
    TS_CHECK_AS(UsageError, output.extension() != ".safetensors", kMerge,
                "--max-shard-size makes several files; OUT has to be a folder; got ",
                request.output);
    TS_CHECK_AS(ConfigError,
                is_checkpoint || !fs::exists(output) ||
                    !fs::equivalent(output, fs::absolute(source.index).parent_path()),
                kMerge, "shards cannot be written among those that are read; choose another OUT");
    for (const char* name : {kIndex, kWhole}) {
      TS_CHECK_AS(ConfigError, request.overwrite || !fs::exists(output / name), kMerge,
                  (output / name).string(), " exists; give --overwrite to replace it");
    }
    const SavedModel saved = write_weights(source.stored, output.string(), request.max_shard_size);
    for (const std::string& name : saved.files) written.push_back(output / name);
  }
  if (is_checkpoint) {
    std::printf("%zu tensors of a checkpoint written:\n", source.stored.weights.size());
  } else {
    std::printf("%zu tensors of %zu shards written:\n", source.stored.weights.size(),
                source.shards.size());
  }
  for (const fs::path& file : written) std::printf("  %s\n", file.c_str());
  if (!request.remove_source) return 0;
  // Only what was merged goes; a folder goes where nothing else is in it.
  const fs::path folder = fs::absolute(source.index).parent_path();
  std::error_code problem;
  for (const fs::path& shard : source.shards) {
    TS_CHECK_AS(IoError, fs::remove(shard, problem), kMerge, "the new file is complete, but ",
                shard.string(), " cannot be removed: ", problem.message());
  }
  TS_CHECK_AS(IoError, fs::remove(source.index, problem), kMerge, "the new file is complete, but ",
              source.index.string(), " cannot be removed: ", problem.message());
  if (fs::is_empty(folder, problem)) fs::remove(folder, problem);
  std::printf("removed: %zu shards and their index\n", source.shards.size());
  return 0;
}

}  // namespace

void add_merge_weights(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "merge-weights", "makes one safetensors file, or fewer, of a model's shards");
  const auto request = std::make_shared<MergeRequest>();
  command
      ->add_option("DIR", request->source,
                   "folder with shards and their index, the index, or a checkpoint of save_state()")
      ->required();
  command->add_option("OUT", request->output, "*.safetensors, or a folder, which is made")
      ->required();
  command
      ->add_option("--max-shard-size", request->max_shard_size,
                   "bytes of each file (5GB, 300MiB, 1000); without it one file")
      ->check(byte_size_problem);
  command->add_flag("--remove-source,--remove-checkpoint-dir", request->remove_source,
                    "remove the shards and their index afterwards");
  command->add_option("--model", request->model, "of a checkpoint: number of the model")
      ->capture_default_str();
  command->add_flag("--overwrite", request->overwrite, "replace OUT");
  command->callback([request, &exit_code] { exit_code = merge(*request); });
}

}  // namespace tessera::cli
