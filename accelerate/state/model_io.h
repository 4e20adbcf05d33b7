// Saves and loads a model alone, in HuggingFace's files (core/state/weight_files.h), whole or
// sharded.
//
//     save_model(model, "out", {.max_shard_size = "5GB"});
//     nn::LoadReport report = load_model(model, "out");
//     load_model(model, "runs/1/checkpoints/checkpoint_12");   // the model of a checkpoint
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include <tessera/core/state/weight_files.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/nn/module.h>

namespace tessera::distributed {
class CheckpointReader;
}

namespace tessera::accelerate {

class SavedState;

// Rank 0 of the group writes. Collective: all ranks throw what it throws and return when the files
// exist. Files and errors are those of save_weights(). DTensors are written whole, gathered to rank
// 0 one by one; full_state_dict() lists what can go wrong.
SavedModel save_model(const nn::ModuleBase& model, const std::string& folder,
                      const SaveModelOptions& options = {},
                      distributed::Group& group = distributed::world());
// The same for any state.
SavedModel save_state_dict(const StateDict& weights, const std::string& folder,
                           const SaveModelOptions& options = {},
                           distributed::Group& group = distributed::world());
struct LoadModelOptions {
  bool strict = true;  // missing and unexpected names are errors
  // Selects the model in a checkpoint: the prefix of its names, which is removed.
  std::string prefix = "model.0.";
  // Rank 0 of the group reads the files, which the others need not see, and sends every rank what
  // it keeps, tensor by tensor: besides its own parameters a rank holds some 64 MiB of them, or one
  // whole tensor if it keeps it whole. Collective; all ranks throw what one of them does.
  bool first_rank_reads = false;
};
// `path`: a safetensors file, an index, or a folder with either; or a checkpoint of any number of
// ranks and any sharding, of which only the model is read, also into a plain model of one process.
// Every rank reads, and copies its boxes of a DTensor out of the mapped file. ValueError lists all
// missing, unexpected and misshapen names before anything changes; not strict: the first two are
// returned. FormatError for a shard that lacks what the index lists, IoError for missing files.
nn::LoadReport load_model(nn::ModuleBase& model, const std::string& path,
                          const LoadModelOptions& options = {},
                          distributed::Group& group = distributed::world());

// ---- Adapters (nn/lora/lora.h) of a model in parts
// PEFT's folder, as nn::save_lora() writes it: rank 0 writes and gathers only the adapters.
// Collective; all ranks throw what it throws.
void save_lora(nn::ModuleBase& model, const std::string& folder,
               distributed::Group& group = distributed::world());
// The files of save_model() with merged weights and without adapters, under the names that the
// model had before, as after merge_lora() and remove_lora(). The model does not change. Rank 0
// holds an adapted weight twice while it is written. Collective; ValueError as merge_lora().
SavedModel save_merged_lora(nn::ModuleBase& model, const std::string& folder,
                            const SaveModelOptions& options = {},
                            distributed::Group& group = distributed::world());

// ---- From checkpoints
struct ExportOptions {
  std::string prefix = "model.0.";  // of the tensors' names; removed
  std::string max_shard_size = "10GB";
};
// Exports the model of a checkpoint folder (distributed/checkpoint) of any number of ranks to such
// files, chunk by chunk, with at most a few MiB in memory. ValueError if no tensor has the prefix;
// else as save_model and CheckpointReader.
SavedModel export_checkpoint(const std::string& checkpoint, const std::string& folder,
                             const ExportOptions& options = {});

// The tensors whose names begin with `prefix`, which is removed; for a model that was saved whole
// those of its files. Empty if there are none. `reader` must outlive the result.
StoredWeights weights_of_checkpoint(distributed::CheckpointReader& reader,
                                    const std::string& prefix);

// The folder in a checkpoint where the model with `prefix` ("model.0.") was saved whole; empty if
// it is sharded.
std::string whole_model_folder(const distributed::CheckpointReader& reader,
                               const std::string& prefix);
// The model's tensors, from either; see SavedState::section().
StateDict model_of(const SavedState& saved, const std::string& prefix,
                   const std::function<Tensor(std::string_view name)>& destination = {});
// The metadata key of that folder.
std::string whole_model_key(const std::string& prefix);

}  // namespace tessera::accelerate

namespace tessera {  // what programs call, beside Accelerator and LocalSGD
using accelerate::load_model;
using accelerate::save_model;
}  // namespace tessera
