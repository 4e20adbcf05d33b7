// The weights of a model in HuggingFace's file layout: one model.safetensors, or shards with an
// index.
//
//     save_weights(model.state_dict(), "out", {.max_shard_size = "5GB"});
//     model.load_state_dict(load_weights("out"));
//
//     model.safetensors                                     where all fits into one shard
//     model-00001-of-00003.safetensors ...                  else
//     model.safetensors.index.json                          {"metadata": {"total_size": ...},
//                                                            "weight_map": {name: file}}
//
// Tensors come in the order of the dictionary. A shard is closed before it would grow beyond the
// shard size; a larger tensor has a shard of its own. Tied weights are written once, under the
// first of their names, and the file's metadata says {other name: first name}, as the writer of
// safetensors does; loading gives every name its tensor. accelerate/state/model_io.h saves and
// loads models whose parameters are sharded over ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <tessera/core/state/state_dict.h>

namespace tessera {

// Bytes from "10GB", "500 MB", "2GiB" or "123". KB, MB, GB and TB are powers of 1000; KiB, MiB, GiB
// and TiB are powers of 1024. ConfigError for anything else ("10Gb" is bits) and for less than one
// byte.
int64_t parse_byte_size(std::string_view text);

struct SaveModelOptions {
  std::string max_shard_size = "10GB";
  std::map<std::string, std::string> metadata = {};  // every file has {"format": "pt"}, too
};
struct SavedModel {
  std::vector<std::string> files;  // in the folder, the index last
  int64_t bytes = 0;               // of the tensors
};
// Saves whole tensors by name. All files are written and flushed to the disk under `folder` before
// the first is renamed; the index comes after the shards, and files of an earlier save that are no
// longer needed are deleted last. Whenever a save is killed, the old model or the new one loads: if
// an index has as many shards already, the new names end with "-b.safetensors", and the next save's
// do not. Throws IoError if `folder` is a file or cannot be written, DeviceError for a tensor
// without bytes (meta), ConfigError for the shard size.
SavedModel save_weights(const StateDict& weights, const std::string& folder,
                        const SaveModelOptions& options = {});

// Loads all tensors by name, tied ones under each name. `path` is a safetensors file, an index, or
// a folder that holds either; files are mapped, not read. Tensors whose dtype tessera lacks are
// left out with a warning on stderr. Throws FormatError if a shard lacks what the index lists,
// IoError for missing files.
StateDict load_weights(const std::string& path);

// ---- What the functions above and `tessera merge-weights` write with

// A tensor to be written, from any source.
struct StoredWeight {
  std::string name;
  DType dtype;
  Shape shape;
  // Passes the elements to `take`, row-major, in pieces.
  std::function<void(const std::function<void(const void*, size_t)>& take)> read;

  int64_t bytes() const { return numel_of(shape) * size_of(dtype); }
};
struct StoredWeights {
  std::vector<StoredWeight> weights;
  std::map<std::string, std::string> tied = {};      // other name: name in `weights`
  std::map<std::string, std::string> metadata = {};  // every file has {"format": "pt"}, too
};
// Writes files into a folder, as save_weights() does.
SavedModel write_weights(const StoredWeights& stored, const std::string& folder,
                         const std::string& max_shard_size);
// Writes all tensors into one file, atomically.
SavedModel write_weights_file(const StoredWeights& stored, const std::string& path);

using WholeTensor = std::function<Tensor(const std::string& name)>;
// The tensors of a state. `whole` gives each one when it is written. Names in `untied` are written
// even if they are tied to another.
StoredWeights stored_weights_of(const StateDict& weights,
                                const std::map<std::string, std::string>& metadata,
                                const WholeTensor& whole, const std::set<std::string>& untied = {});

// Finds the names in a list that share one tensor, because tied weights are written once.
class TiedNames {
 public:
  // The earlier name of the tensor; nullptr if it is new.
  const std::string* first_name(const std::string& name, const Tensor& tensor);

 private:
  std::unordered_map<std::string, std::string> seen_;  // by the identity of a tensor
};

// The path of a file in the index's own folder. FormatError if `name` is a path.
std::string shard_path(const std::string& folder, const std::string& name,
                       const std::string& index);

}  // namespace tessera
