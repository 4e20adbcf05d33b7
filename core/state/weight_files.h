// The weights of a model in the files of HuggingFace: one model.safetensors, or shards with an
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
// Tensors come in the order of the dictionary; a shard is closed before it would grow beyond its
// size, a tensor that is larger has one of its own. Tied weights are written once, under the first
// of their names; the file's metadata says {other name: first name}, as safetensors' own writer
// does, and loading gives every name its tensor. accelerate/state/model_io.h has the same for
// models that ranks hold parts of.
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

// "10GB", "500 MB", "2GiB", "123": bytes; KB, MB, GB, TB count in thousands, KiB, MiB, GiB, TiB in
// 1024. ConfigError for anything else ("10Gb" is bits) and for less than one byte.
int64_t parse_byte_size(std::string_view text);

struct SaveModelOptions {
  std::string max_shard_size = "10GB";
  std::map<std::string, std::string> metadata = {};  // of every file, beside {"format": "pt"}
};
struct SavedModel {
  std::vector<std::string> files;  // in the folder, the index last
  int64_t bytes = 0;               // of the tensors
};
// Whole tensors by name. All files are written and forced to the disk under `folder` before the
// first is renamed to its name; the index comes after the shards, then files of an earlier save
// that are no longer part of it go. Whenever a save is killed, what loads is the old model or the
// new one: over an index of as many shards their names end with "-b.safetensors", and in turn. IoError for a path that is a file and for what cannot be
// written, DeviceError for a tensor without bytes (meta), ConfigError for the shard size.
SavedModel save_weights(const StateDict& weights, const std::string& folder,
                        const SaveModelOptions& options = {});

// `path`: a safetensors file, an index, or a folder that holds either. Mapped, not read: all
// tensors by name, tied ones under each name; those of a dtype that tessera does not have are left
// out, which a line on stderr says. FormatError for a shard that lacks what the index
// says, IoError for files that are not there.
StateDict load_weights(const std::string& path);

// ---- From anywhere: what the functions above and `tessera merge-weights` write with

// A tensor to be written, wherever its elements are.
struct StoredWeight {
  std::string name;
  DType dtype;
  Shape shape;
  // Gives the elements to `take`, row-major, in pieces.
  std::function<void(const std::function<void(const void*, size_t)>& take)> read;

  int64_t bytes() const { return numel_of(shape) * size_of(dtype); }
};
struct StoredWeights {
  std::vector<StoredWeight> weights;
  std::map<std::string, std::string> tied = {};      // other name: name in `weights`
  std::map<std::string, std::string> metadata = {};  // of every file, beside {"format": "pt"}
};
// Files in a folder, as save_weights().
SavedModel write_weights(const StoredWeights& stored, const std::string& folder,
                         const std::string& max_shard_size);
// All in one file, whole or not at all.
SavedModel write_weights_file(const StoredWeights& stored, const std::string& path);

using WholeTensor = std::function<Tensor(const std::string& name)>;
// The tensors of a state, which `whole` gives one by one when their turn to be written comes. Those
// of the names in `untied` are written whatever they are tied to.
StoredWeights stored_weights_of(const StateDict& weights,
                                const std::map<std::string, std::string>& metadata,
                                const WholeTensor& whole, const std::set<std::string>& untied = {});

// Which names of a list are one tensor: tied weights are written once.
class TiedNames {
 public:
  // The name under which the tensor came before; nullptr where it is new.
  const std::string* first_name(const std::string& name, const Tensor& tensor);

 private:
  std::unordered_map<std::string, std::string> seen_;  // by what identifies a tensor
};

// A file as an index names it: in the index's own folder. FormatError for a path.
std::string shard_path(const std::string& folder, const std::string& name,
                       const std::string& index);

}  // namespace tessera
