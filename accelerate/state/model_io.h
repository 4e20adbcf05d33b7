// A model alone, in the files of HuggingFace (core/state/weight_files.h), whole or in parts.
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

// Rank 0 of the group writes; collective, all ranks throw what it throws and return when the files
// are there. Files and errors are those of save_weights(). DTensors are written whole, gathered to
// rank 0 one by one when their turn comes; against them stands what full_state_dict() says.
SavedModel save_model(const nn::ModuleBase& model, const std::string& folder,
                      const SaveModelOptions& options = {},
                      distributed::Group& group = distributed::world());
// The same of a state, whatever it is of.
SavedModel save_state_dict(const StateDict& weights, const std::string& folder,
                           const SaveModelOptions& options = {},
                           distributed::Group& group = distributed::world());
struct LoadModelOptions {
  bool strict = true;  // missing and unexpected names are errors
  // Of the names in a checkpoint, which it is taken off: which of its models.
  std::string prefix = "model.0.";
  // Rank 0 of the group reads the files, which the others need not see, and gives every rank what
  // it keeps, tensor by tensor: beside its own parameters a rank holds some 64 MiB of them, or one
  // whole tensor where it keeps it whole. Collective; all ranks throw what one of them does.
  bool first_rank_reads = false;
};
// `path`: a safetensors file, an index, or a folder that holds either; or a checkpoint, by whatever
// number of ranks and in whatever parts it was saved, of which the model alone is read: into a plain
// model of one process as well. Reads on every rank, which copies into a DTensor its boxes out of
// the mapped file. ValueError that lists all missing,
// unexpected and misshapen names, before anything changed; not strict: the first two are returned.
// FormatError for a shard that lacks what the index says, IoError for files that are not there.
nn::LoadReport load_model(nn::ModuleBase& model, const std::string& path,
                          const LoadModelOptions& options = {},
                          distributed::Group& group = distributed::world());

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

// Those whose names begin with `prefix`, which is taken off; of a model that was saved whole those
// of its files. None where there are none. `reader` must outlive what comes of it.
StoredWeights weights_of_checkpoint(distributed::CheckpointReader& reader,
                                    const std::string& prefix);

// The folder in a checkpoint where the model that stands under `prefix` ("model.0.") was saved
// whole; empty where it lies in parts.
std::string whole_model_folder(const distributed::CheckpointReader& reader,
                               const std::string& prefix);
// Its tensors, from either; see SavedState::section().
StateDict model_of(const SavedState& saved, const std::string& prefix,
                   const std::function<Tensor(std::string_view name)>& destination = {});
// The key of that in the metadata.
std::string whole_model_key(const std::string& prefix);

}  // namespace tessera::accelerate

namespace tessera {  // what programs call, beside Accelerator and LocalSGD
using accelerate::load_model;
using accelerate::save_model;
}  // namespace tessera
