#include <tessera/accelerate/state/model_io.h>

#include <algorithm>
#include <exception>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include <tessera/accelerate/state/saved_state.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/distributed/checkpoint/commit.h>
#include <tessera/distributed/checkpoint/full_state.h>
#include <tessera/distributed/checkpoint/parts.h>
#include <tessera/distributed/checkpoint/reader.h>
#include <tessera/distributed/mesh/dtensor_inputs.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/nn/lora/lora.h>

namespace tessera::accelerate {
namespace {

using Json = nlohmann::json;

constexpr const char* kSave = "save_model";
constexpr const char* kLoad = "load_model";

}  // namespace

SavedModel save_model(const nn::ModuleBase& model, const std::string& folder,
                      const SaveModelOptions& options, distributed::Group& group) {
  return save_state_dict(model.state_dict(), folder, options, group);
}

SavedModel save_state_dict(const StateDict& weights, const std::string& folder,
                           const SaveModelOptions& options, distributed::Group& group) {
  SavedModel saved;
  distributed::with_whole_tensors(weights, group, kSave, [&](const WholeTensor& whole) {
    saved = write_weights(stored_weights_of(weights, options.metadata, whole), folder,
                          options.max_shard_size);
  });
  return saved;
}

void save_lora(nn::ModuleBase& model, const std::string& folder, distributed::Group& group) {
  const StateDict all = model.state_dict();
  StateDict state;
  for (const std::string& name : nn::lora_state_names(model)) state.set(name, all.at(name));
  distributed::with_whole_tensors(state, group, "save_lora", [&](const WholeTensor& whole) {
    nn::save_lora(model, folder, whole);
  });
}

SavedModel save_merged_lora(nn::ModuleBase& model, const std::string& folder,
                            const SaveModelOptions& options, distributed::Group& group) {
  const StateDict state = model.state_dict();
  std::map<std::string, nn::LoraMerge> merges;
  const std::vector<std::string> parts = nn::lora_part_names(model);
  const std::set<std::string> of_adapters(parts.begin(), parts.end());
  std::set<std::string> adapted;
  for (nn::LoraMerge& merge : nn::lora_merges(model)) {
    adapted.insert(merge.weight);
    merges.emplace(merge.weight, std::move(merge));
  }
  StateDict written;
  for (const auto& [name, tensor] : state) {
    if (!of_adapters.contains(name)) written.set(name, tensor);
  }
  SavedModel saved;
  distributed::with_whole_tensors(state, group, "save_merged_lora", [&](const WholeTensor& whole) {
    const auto merged = [&](const std::string& name) {
      const auto merge = merges.find(name);
      if (merge == merges.end()) return whole(name);
      const auto& [weight, a, b, calculate] = merge->second;
      return calculate(whole(weight), whole(a), whole(b));
    };
    saved = write_weights(stored_weights_of(written, options.metadata, merged, adapted), folder,
                          options.max_shard_size);
  });
  return saved;
}

namespace {

// Bytes of this rank's parts that are copied into the model at a time.
constexpr int64_t kReceivedBytes = int64_t{64} << 20;

// A model's files, or a checkpoint's model, of which what goes into a DTensor comes as one.
StateDict weights_at(const std::string& path, const LoadModelOptions& options,
                     const Destination& destination = {}) {
  if (!distributed::is_checkpoint(path)) return load_weights(path);
  distributed::CheckpointReader reader(path);
  StateDict weights = model_of(SavedState(reader), options.prefix, destination);
  TS_CHECK(!weights.empty(), kLoad, "the checkpoint '", path,
           "' has no tensor whose name begins with ", shown(options.prefix),
           "; give the prefix of a model, as the manifest has it.");
  return weights;
}

// What rank 0 has found at `path`, on the other ranks without elements. Throws on all ranks what it
// throws there.
StateDict weights_of_first_rank(const std::string& path, const LoadModelOptions& options,
                                distributed::Group& group) {
  const bool reads = group.rank() == 0;
  StateDict weights;
  std::exception_ptr error;
  Json list = Json::array();
  try {
    if (reads) weights = weights_at(path, options);
    for (const auto& [name, tensor] : weights) {
      list.push_back({name, std::string(name_of(tensor.dtype())), tensor.shape().to_vector()});
    }
  } catch (...) {
    error = std::current_exception();
  }
  distributed::throw_together(error, kLoad, group);
  const distributed::CollectiveOptions control{.channel = distributed::Channel::kControl,
                                               .tag = kLoad};
  list = distributed::broadcast_object(list, 0, group, control);
  if (reads) return weights;
  for (const Json& entry : list) {
    const auto sizes = entry.at(2).get<std::vector<int64_t>>();
    weights.set(
        entry.at(0).get<std::string>(),
        raw::empty(Shape(sizes), parse_dtype(entry.at(1).get<std::string>()).value(), kMeta));
  }
  return weights;
}

nn::LoadReport load_from_first_rank(nn::ModuleBase& model, const std::string& path,
                                    const LoadModelOptions& options, distributed::Group& group) {
  const StateDict weights = weights_of_first_rank(path, options, group);
  // The models are alike, and so is what they say; what one rank throws all throw.
  nn::LoadReport report = model.compare_state_dict(weights);
  if (!report.misshapen.empty() || (options.strict && !report.complete())) {
    StateDict names;
    for (const auto& [name, tensor] : weights) {
      names.set(name, raw::empty(tensor.shape(), tensor.dtype(), kMeta));
    }
    model.load_state_dict(names, {.strict = options.strict});  // throws
  }
  StateDict received;
  int64_t bytes = 0;
  const auto copy_received = [&] {
    model.load_state_dict(received, {.strict = false});
    received = StateDict();
    bytes = 0;
  };
  for (const auto& [name, target] : model.state_dict()) {
    const Tensor* const whole = weights.find(name);
    if (whole == nullptr) continue;
    received.set(name, distributed::scatter_whole(*whole, target, group));
    bytes += received.at(name).nbytes();
    if (bytes >= kReceivedBytes) copy_received();
  }
  copy_received();
  return report;
}

}  // namespace

nn::LoadReport load_model(nn::ModuleBase& model, const std::string& path,
                          const LoadModelOptions& options, distributed::Group& group) {
  try {
    if (options.first_rank_reads && group.size() > 1) {
      return load_from_first_rank(model, path, options, group);
    }
    return model.load_state_dict(weights_at(path, options, in_state(model.state_dict())),
                                 {.strict = options.strict});
  } catch (Error& error) {
    error.add_context("load_model '" + path + "'");
    throw;
  }
}

std::string whole_model_key(const std::string& prefix) { return "whole:" + prefix; }

std::string whole_model_folder(const distributed::CheckpointReader& reader,
                               const std::string& prefix) {
  const auto found = reader.metadata().find(whole_model_key(prefix));
  if (found == reader.metadata().end()) return {};
  return shard_path(reader.folder(), found->second, "the checkpoint");
}

StateDict model_of(const SavedState& saved, const std::string& prefix,
                   const std::function<Tensor(std::string_view name)>& destination) {
  const std::string whole = whole_model_folder(saved.reader(), prefix);
  return whole.empty() ? saved.section(prefix, destination) : load_weights(whole);
}

StoredWeights weights_of_checkpoint(distributed::CheckpointReader& reader,
                                    const std::string& prefix) {
  if (const std::string whole = whole_model_folder(reader, prefix); !whole.empty()) {
    const StateDict weights = load_weights(whole);
    return stored_weights_of(weights, {},
                             [weights](const std::string& name) { return weights.at(name); });
  }
  StoredWeights stored;
  for (auto entry = reader.tensors().lower_bound(prefix);
       entry != reader.tensors().end() && entry->first.starts_with(prefix); ++entry) {
    const std::string& name = entry->first;
    const distributed::SavedTensor& tensor = entry->second;
    // By rows, so that a tensor of many chunks is never whole in memory.
    const auto read = [&reader, &name, &tensor](const auto& take) {
      const auto give = [&](const distributed::Box& box) {
        const Tensor rows = reader.view(name, box);
        take(rows.data(), static_cast<size_t>(rows.nbytes()));
      };
      const auto whole = distributed::Box::whole(tensor.shape);
      if (tensor.shape.empty() || tensor.shape[0] == 0) return give(whole);
      const int64_t row_bytes =
          std::max<int64_t>(1, static_cast<int64_t>(tensor.bytes()) / tensor.shape[0]);
      const int64_t step = std::max<int64_t>(1, distributed::kChunkBytes / row_bytes);
      for (int64_t row = 0; row < tensor.shape[0]; row += step) {
        give(whole.rows(row, std::min(row + step, tensor.shape[0])));
      }
    };
    stored.weights.push_back({name.substr(prefix.size()), tensor.dtype, tensor.shape, read});
  }
  const std::string tied_prefix = "tied:" + prefix;
  for (const auto& [key, kept] : reader.metadata()) {
    if (key.starts_with(tied_prefix) && kept.starts_with(prefix)) {
      stored.tied[key.substr(tied_prefix.size())] = kept.substr(prefix.size());
    }
  }
  return stored;
}

SavedModel export_checkpoint(const std::string& checkpoint, const std::string& folder,
                             const ExportOptions& options) {
  distributed::CheckpointReader reader(checkpoint);
  const StoredWeights stored = weights_of_checkpoint(reader, options.prefix);
  TS_CHECK(!stored.weights.empty(), "export_checkpoint", "'", checkpoint,
           "' has no tensor whose name begins with ", shown(options.prefix),
           "; give the prefix of a model, as the manifest has it.");
  return write_weights(stored, folder, options.max_shard_size);
}

}  // namespace tessera::accelerate
