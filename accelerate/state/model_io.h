// A model alone, in the files of HuggingFace: one model.safetensors, or shards with an index.
//
//     save_model(model, "out", {.max_shard_size = "5GB"});
//     nn::LoadReport report = load_model(model, "out");
//
//     model.safetensors                                     where all fits into one shard
//     model-00001-of-00003.safetensors ...                  else
//     model.safetensors.index.json                          {"metadata": {"total_size": ...},
//                                                            "weight_map": {name: file}}
//
// Tensors come in the order of state_dict(); a shard is closed before it would grow beyond its
// size, a tensor that is larger has one of its own. Tied weights are written once, under the first
// of their names; the file's metadata says {other name: first name}, as safetensors' own writer
// does, and loading gives every name its tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/distributed/transport/group.h>
#include <tessera/nn/module.h>

namespace tessera::distributed {
class CheckpointReader;
}

namespace tessera::accelerate {

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
// Rank 0 of the group writes; collective, all ranks throw what it throws and return when the files
// are there. DTensors are written whole, gathered to rank 0 one by one when their turn comes. All
// files are written and forced to the disk under `folder` before the first is renamed to its name;
// the index comes after the shards, then files of an earlier save that are no longer part of it go.
// IoError for a path that is a file and for what cannot be written, DeviceError for a tensor
// without bytes (meta), ConfigError for the shard size; against DTensors what full_state_dict()
// says.
SavedModel save_model(const nn::ModuleBase& model, const std::string& folder,
                      const SaveModelOptions& options = {},
                      distributed::Group& group = distributed::world());
// The same of a state, whatever it is of.
SavedModel save_state_dict(const StateDict& weights, const std::string& folder,
                           const SaveModelOptions& options = {},
                           distributed::Group& group = distributed::world());
// The same of whole tensors by name, on this rank alone.
SavedModel save_weights(const StateDict& weights, const std::string& folder,
                        const SaveModelOptions& options = {});

struct LoadModelOptions {
  bool strict = true;  // missing and unexpected names are errors
  // Rank 0 of the group reads the files, which the others need not see, and gives every rank what
  // it keeps, tensor by tensor: beside its own parameters a rank holds some 64 MiB of them, or one
  // whole tensor where it keeps it whole. Collective; all ranks throw what one of them does.
  bool first_rank_reads = false;
};
// `path`: a safetensors file, an index, or a folder that holds either. Reads on every rank, which
// copies into a DTensor its boxes out of the mapped file. ValueError that lists all missing,
// unexpected and misshapen names, before anything changed; not strict: the first two are returned.
// FormatError for a shard that lacks what the index says, IoError for files that are not there.
nn::LoadReport load_model(nn::ModuleBase& model, const std::string& path,
                          const LoadModelOptions& options = {},
                          distributed::Group& group = distributed::world());
// Mapped, not read: all tensors of such files by name, tied ones under each name.
StateDict load_weights(const std::string& path);

// ---- Adapters (nn/lora/lora.h) of a model in parts
// PEFT's folder, as nn::save_lora() writes it: rank 0, which gathers what belongs to the adapters
// alone. Collective; all ranks throw what it throws.
void save_lora(nn::ModuleBase& model, const std::string& folder,
               distributed::Group& group = distributed::world());
// The files of save_model() with merged weights and without adapters, under the names that the
// model had before: what merge_lora() and remove_lora() would leave. The model stays as it is. Rank
// 0 holds an adapted weight twice while it is written. Collective; ValueError as merge_lora().
SavedModel save_merged_lora(nn::ModuleBase& model, const std::string& folder,
                            const SaveModelOptions& options = {},
                            distributed::Group& group = distributed::world());

// ---- From checkpoints
struct ExportOptions {
  std::string prefix = "model.0.";  // of the tensors' names; taken off
  std::string max_shard_size = "10GB";
};
// The model in a checkpoint folder (distributed/checkpoint), whatever number of ranks saved it, as
// such files: chunk by chunk, with no more in memory than a few MiB. ValueError where no tensor has
// the prefix; else as save_model and CheckpointReader.
SavedModel export_checkpoint(const std::string& checkpoint, const std::string& folder,
                             const ExportOptions& options = {});

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
// Files in a folder, as save_model().
SavedModel write_weights(const StoredWeights& stored, const std::string& folder,
                         const std::string& max_shard_size);
// All in one file, whole or not at all.
SavedModel write_weights_file(const StoredWeights& stored, const std::string& path);
// Those whose names begin with `prefix`, which is taken off; of a model that was saved whole those
// of its files. None where there are none. `reader` must outlive what comes of it.
StoredWeights weights_of_checkpoint(distributed::CheckpointReader& reader,
                                    const std::string& prefix);

// The folder in a checkpoint where the model that stands under `prefix` ("model.0.") was saved
// whole; empty where it lies in parts.
std::string whole_model_folder(const distributed::CheckpointReader& reader,
                               const std::string& prefix);
// The key of that in the metadata.
std::string whole_model_key(const std::string& prefix);

}  // namespace tessera::accelerate

namespace tessera {  // what programs call, beside Accelerator and LocalSGD
using accelerate::load_model;
using accelerate::save_model;
}  // namespace tessera
