#include <tessera/core/state/weight_files.h>

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/placement.h>

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Metadata = std::map<std::string, std::string>;

constexpr const char* kSave = "save_model";
constexpr const char* kLoad = "load_model";
constexpr const char* kWeightsName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";

// What the names of shards end with. An index that is there keeps its shards until the next one has
// its name: of as many shards these are called otherwise.
constexpr std::string_view kShardEnds[] = {".safetensors", "-b.safetensors"};

// "model-00002-of-00003.safetensors"
std::string shard_name(size_t index, size_t count, std::string_view end) {
  if (count == 1) return kWeightsName;
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu", index + 1, count);
  return std::string(name).append(end);
}
bool is_digits(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}
// What an earlier save of this kind may have left.
bool is_own_name(std::string_view name) {
  if (name == kWeightsName || name == kIndexName) return true;
  constexpr std::string_view kBegin = "model-";
  return std::ranges::any_of(kShardEnds, [&](std::string_view end) {
    if (!name.starts_with(kBegin) || !name.ends_with(end)) return false;
    const std::string_view numbers =
        name.substr(kBegin.size(), name.size() - kBegin.size() - end.size());
    const size_t of = numbers.find("-of-");
    return of != numbers.npos && is_digits(numbers.substr(0, of)) &&
           is_digits(numbers.substr(of + 4));
  });
}

// The first by which the index in the folder, if there is one, names no shard of as many.
std::string_view free_shard_end(const std::string& folder, size_t count) {
  const fs::path path = fs::path(folder) / kIndexName;
  std::error_code error;
  std::set<std::string> named;
  if (fs::is_regular_file(path, error)) {
    const MappedFile file(path.string());
    const Json index = Json::parse(file.text().begin(), file.text().end(), nullptr, false);
    const auto map = index.is_object() ? index.find("weight_map") : index.end();
    if (index.is_object() && map != index.end() && map->is_object()) {
      for (const auto& [name, shard] : map->items()) {
        if (shard.is_string()) named.insert(shard.get<std::string>());
      }
    }
  }
  for (const std::string_view end : kShardEnds) {
    bool taken = false;
    for (size_t i = 0; i < count; ++i) taken |= named.contains(shard_name(i, count, end));
    if (!taken) return end;
  }
  return kShardEnds[0];
}

std::vector<std::vector<const StoredWeight*>> cut_shards(const std::vector<StoredWeight>& sources,
                                                         int64_t limit) {
  std::vector<std::vector<const StoredWeight*>> shards(1);
  int64_t bytes = 0;
  for (const StoredWeight& source : sources) {
    if (!shards.back().empty() && bytes + source.bytes() > limit) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().push_back(&source);
    bytes += source.bytes();
  }
  return shards;
}

// A folder inside the target for files that are not complete; gone with all it holds at the end.
class StagingFolder {
 public:
  explicit StagingFolder(const std::string& folder) {
    std::error_code error;
    TS_CHECK_AS(IoError, !fs::exists(folder, error) || fs::is_directory(folder, error), kSave, "'",
                folder, "' must be a folder or not exist; it is a file: nothing was saved; choose ",
                "another path.");
    make_folders(folder);
    remove_leftovers(folder);
    std::string pattern =
        (fs::path(folder) / (kPrefix + std::to_string(::getpid()) + "-XXXXXX")).string();
    TS_CHECK_AS(IoError, ::mkdtemp(pattern.data()) != nullptr, kSave, "cannot write to '", folder,
                "': ", std::generic_category().message(errno), "; choose one that can be written.");
    path_ = pattern;
  }
  ~StagingFolder() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  StagingFolder(const StagingFolder&) = delete;
  StagingFolder& operator=(const StagingFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  inline static const std::string kPrefix = ".saving-";
  // Of saves that were killed: of processes that are gone from this machine.
  static void remove_leftovers(const std::string& folder) {
    std::vector<fs::path> left;
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
         entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      std::error_code status;
      if (!name.starts_with(kPrefix) || !entry->is_directory(status)) continue;
      const std::string owner =
          name.substr(kPrefix.size(), name.find('-', kPrefix.size()) - kPrefix.size());
      const bool names_owner =
          is_digits(owner) && owner.size() < 10 && name.size() > kPrefix.size() + owner.size();
      if (names_owner && (::kill(std::stoi(owner), 0) == 0 || errno != ESRCH)) continue;
      left.push_back(entry->path());
    }
    for (const fs::path& path : left) fs::remove_all(path, error);
  }
  fs::path path_;
};

void write_shard(const std::string& path, const std::vector<const StoredWeight*>& shard,
                 const Metadata& metadata) {
  std::vector<SafeTensorsWriter::Entry> entries;
  std::map<std::string_view, const StoredWeight*> by_name;
  for (const StoredWeight* source : shard) {
    entries.push_back({source->name, source->dtype, source->shape});
    by_name.emplace(source->name, source);
  }
  SafeTensorsWriter writer(path, std::move(entries), metadata);
  for (const auto& entry : writer.order()) {
    by_name.at(entry.name)->read([&](const void* data, size_t bytes) {
      writer.write(entry.name, data, bytes);
    });
  }
  writer.commit();
}

Metadata metadata_of(const StoredWeights& stored, const std::vector<const StoredWeight*>& shard) {
  Metadata all = {{"format", "pt"}};  // transformers asks for this one
  for (const auto& [key, value] : stored.metadata) all[key] = value;
  std::set<std::string_view> names;
  for (const StoredWeight* weight : shard) names.insert(weight->name);
  for (const auto& [alias, kept] : stored.tied) {
    if (names.contains(kept)) all[alias] = kept;
  }
  return all;
}

}  // namespace

int64_t parse_byte_size(std::string_view text) {
  const auto refuse = [&]() {
    TS_THROW(ConfigError, "byte size",
             "must be a number and a unit such as 10GB, 500MB, 2GiB, or "
             "a number of bytes; got ",
             shown(text),
             text.ends_with('b') ? "; a small b counts bits: write B" : "; write it so.");
  };
  size_t digits = 0;
  double number = 0, place = 1;
  bool point = false, any = false;
  for (; digits < text.size() && digits < 20; ++digits) {
    const char c = text[digits];
    if (c == '.' && !point) {
      point = true;
    } else if (c >= '0' && c <= '9') {
      any = true;
      number = point ? number + (place /= 10) * (c - '0') : number * 10 + (c - '0');
    } else {
      break;
    }
  }
  std::string_view unit = text.substr(digits);
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  constexpr std::pair<std::string_view, double> kUnits[] = {
      {"", 1},      {"B", 1},        {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
      {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  const auto* const factor =
      std::ranges::find(kUnits, unit, &std::pair<std::string_view, double>::first);
  if (!any || factor == std::end(kUnits) || (unit.empty() && point)) refuse();
  const double bytes = std::floor(number * factor->second);
  if (bytes < 1 || bytes > 0x1p62) refuse();
  return static_cast<int64_t>(bytes);
}

SavedModel write_weights_file(const StoredWeights& stored, const std::string& path) {
  SavedModel saved{{path}, 0};
  std::vector<const StoredWeight*> all;
  for (const StoredWeight& weight : stored.weights) {
    all.push_back(&weight);
    saved.bytes += weight.bytes();
  }
  write_shard(path, all, metadata_of(stored, all));
  return saved;
}

SavedModel write_weights(const StoredWeights& stored, const std::string& folder,
                         const std::string& max_shard_size) {
  const int64_t limit = parse_byte_size(max_shard_size);
  const StagingFolder staging(folder);
  const auto shards = cut_shards(stored.weights, limit);
  const std::string_view end = free_shard_end(folder, shards.size());
  SavedModel saved;
  Json weight_map = Json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size(), end);
    for (const StoredWeight* weight : shards[i]) {
      weight_map[weight->name] = name;
      saved.bytes += weight->bytes();
    }
    write_shard((staging.path() / name).string(), shards[i], metadata_of(stored, shards[i]));
    saved.files.push_back(name);
  }
  if (shards.size() > 1) {
    const Json index = {{"metadata", {{"total_size", saved.bytes}}}, {"weight_map", weight_map}};
    write_file_atomically((staging.path() / kIndexName).string(), index.dump(2) + "\n");
    saved.files.push_back(kIndexName);
  }
  // Everything is on the disk: from here on there are only renames. What is loaded is the old or
  // the new, as the last one decides.
  for (const std::string& name : saved.files) {
    if (name == kIndexName) sync_folder(folder);
    std::error_code error;
    fs::rename(staging.path() / name, fs::path(folder) / name, error);
    TS_CHECK_AS(IoError, !error, kSave, "cannot rename to '", (fs::path(folder) / name).string(),
                "': ", error.message(), "; check the folder.");
  }
  sync_folder(folder);
  std::vector<fs::path> stale;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (is_own_name(name) && std::ranges::find(saved.files, name) == saved.files.end()) {
      stale.push_back(entry.path());
    }
  }
  for (const fs::path& path : stale) {
    std::error_code error;
    fs::remove(path, error);
    TS_CHECK_AS(IoError, !error, kSave, "cannot remove '", path.string(),
                "' of an earlier save: ", error.message(), "; remove it by hand.");
  }
  if (!stale.empty()) sync_folder(folder);
  return saved;
}

const std::string* TiedNames::first_name(const std::string& name, const Tensor& tensor) {
  if (tensor.is_meta()) return nullptr;
  const TensorPlacement* placement = tensor_placement(tensor);
  // Of a part that has no elements the memory says nothing: there it is the counter of writes,
  // which all handles of a tensor share.
  const void* identity = tensor.numel() > 0 ? tensor.data() : nullptr;
  if (placement != nullptr) identity = tensor.impl()->version.get();
  if (identity == nullptr) return nullptr;
  const std::string key = detail::concatenate(
      identity, ' ', tensor.impl()->offset, tensor.shape(), tensor.strides(), tensor.dtype(),
      placement != nullptr ? placement->describe_whole(tensor) : "");
  const auto [first, added] = seen_.try_emplace(key, name);
  return added ? nullptr : &first->second;
}

StoredWeights stored_weights_of(const StateDict& weights,
                                const std::map<std::string, std::string>& metadata,
                                const WholeTensor& whole, const std::set<std::string>& untied) {
  StoredWeights stored{.weights = {}, .metadata = metadata};
  TiedNames tied;
  for (const auto& [name, tensor] : weights) {
    TS_CHECK(tensor.defined(), kSave, shown(name), " is undefined; leave it out.");
    TS_CHECK_DEVICE(!tensor.is_meta(), kSave, shown(name), " is ", tensor,
                    " and has no elements; load the model first.");
    if (!untied.contains(name)) {
      if (const std::string* first = tied.first_name(name, tensor)) {
        stored.tied[name] = *first;
        continue;
      }
    }
    const auto read = [whole, name = name](const auto& take) {
      const Tensor elements = kernels::contiguous(whole(name));
      take(elements.data(), static_cast<size_t>(elements.nbytes()));
    };
    stored.weights.push_back({name, tensor.dtype(), whole_shape(tensor), read});
  }
  return stored;
}

SavedModel save_weights(const StateDict& weights, const std::string& folder,
                        const SaveModelOptions& options) {
  for (const auto& [name, tensor] : weights) check_whole(tensor, kSave);
  const auto whole = [&](const std::string& name) {
    const Tensor& tensor = weights.at(name);
    if (tensor.device().is_cpu()) return tensor;
    const Tensor here = raw::empty(tensor.shape(), tensor.dtype());
    kernels::copy_into(here, tensor);
    return here;
  };
  return write_weights(stored_weights_of(weights, options.metadata, whole), folder,
                       options.max_shard_size);
}

std::string shard_path(const std::string& folder, const std::string& name,
                       const std::string& index) {
  TS_CHECK_AS(FormatError,
              !name.empty() && name != "." && name != ".." && name.find('/') == name.npos, kLoad,
              "'", index, "': a shard is a file beside the index; got ", shown(name),
              "; get the files again.");
  return (fs::path(folder) / name).string();
}

namespace {

// Adds a file's tensors and the other names of tied ones.
void add_file(const std::string& path, const std::set<std::string>* wanted, StateDict& weights) {
  const SafeTensorsFile file(path);
  for (const SafeTensorsEntry* entry : file.readable_entries()) {
    if (wanted != nullptr && !wanted->contains(entry->name)) continue;
    weights.set(entry->name, file.view(entry->name));
  }
  if (wanted != nullptr) {
    for (const std::string& name : *wanted) {
      TS_CHECK_AS(FormatError, file.contains(name), kLoad, "'", path, "': the index says that ",
                  shown(name), " is here, and it is not; get the files again.");
    }
  }
  for (const auto& [alias, kept] : file.metadata()) {
    if (weights.contains(kept) && !file.contains(alias)) weights.set(alias, file.view(kept));
  }
}

StateDict load_index(const fs::path& path) {
  const Json index = read_bounded_json(path.string());
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  TS_CHECK_AS(FormatError, index.is_object() && map != index.end() && map->is_object(), kLoad, "'",
              path.string(),
              "' must be a JSON object with a 'weight_map'; it is not; get the file again.");
  std::map<std::string, std::set<std::string>> shards;
  for (const auto& [name, shard] : map->items()) {
    TS_CHECK_AS(FormatError, shard.is_string(), kLoad, "'", path.string(), "': the shard of ",
                shown(name), " must be a file's name; get the file again.");
    shards[shard.get<std::string>()].insert(name);
  }
  StateDict weights;
  for (const auto& [shard, names] : shards) {
    add_file(shard_path(path.parent_path().string(), shard, path.string()), &names, weights);
  }
  return weights;
}

}  // namespace

StateDict load_weights(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    const fs::path index = fs::path(path) / kIndexName, whole = fs::path(path) / kWeightsName;
    if (fs::exists(whole, error)) return load_weights(whole.string());
    TS_CHECK_AS(IoError, fs::exists(index, error), kLoad, "'", path, "' has neither ", kWeightsName,
                " nor ", kIndexName, "; give the folder of a model.");
    return load_index(index);
  }
  if (path.ends_with(".json")) return load_index(path);
  StateDict weights;
  add_file(path, nullptr, weights);
  return weights;
}

}  // namespace tessera
