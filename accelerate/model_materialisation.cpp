#include <tessera/accelerate/model_materialisation.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/initial_values.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/mesh/dtensor_inputs.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/nn/materialise.h>

namespace tessera::accelerate {
namespace {

using Json = nlohmann::json;

constexpr const char* kPrepare = "prepare";

// Parameters, each once, and buffers.
NamedTensors tensors_of(const nn::ModuleBase& model) {
  NamedTensors tensors = model.named_parameters();
  for (NamedTensor& buffer : model.named_buffers()) tensors.push_back(std::move(buffer));
  return tensors;
}

// What of `value`, whose initial values are known, lies in the target.
Tensor part_of_initial(const Tensor& value, const Tensor& target) {
  Tensor part = value;
  if (distributed::is_dtensor(target)) {
    part = distributed::distribute_tensor(value, distributed::mesh_of(target),
                                          distributed::placements_of(target));
  }
  const Tensor elements =
      raw::empty({part.storage()->bytes() / size_of(part.dtype())}, part.dtype(), target.device());
  write_initial_values(part, elements);
  part.set_data(raw::as_strided(elements, part.shape(), part.strides(), part.offset()));
  return part;
}

}  // namespace

ModelMaterialisation::ModelMaterialisation(nn::ModuleBase& model, const Settings& settings,
                                           distributed::Group& ranks, const Device& device)
    : model_(model), ranks_(ranks), device_(device) {
  Json own = Json::array();
  std::string unknown;
  for (const auto& [name, tensor] : tensors_of(model)) {
    if (!tensor.is_meta()) continue;
    own.push_back(name);
    const std::string reason = unknown_initial_values(tensor);
    if (!reason.empty() && unknown.empty()) unknown = "'" + name + "' (" + reason + ")";
  }
  std::vector<Json> all = {own};
  if (ranks.size() > 1 && ranks.backend().moves_data()) {
    all = distributed::all_gather_objects(
        ranks, own, {.channel = distributed::Channel::kControl, .tag = kPrepare});
  }
  std::set<std::string> names;
  for (const Json& list : all) {
    for (const Json& name : list) names.insert(name.get<std::string>());
  }
  missing_.assign(names.begin(), names.end());
  if (missing_.empty()) return;
  const std::string type = model.type_name();
  if (std::ranges::all_of(all, [&](const Json& list) { return list == all[0]; })) {
    state_ = State::kNoRank;
    TS_CHECK(unknown.empty(), kPrepare, "no rank has elements of ", type, ", and the values of ",
             unknown,
             " are not known; make the model on rank 0 with memory, load it there, and set "
             "fsdp_cpu_ram_efficient_loading, or fill it with nn::init when it is made");
    return;
  }
  TS_CHECK_AS(ConfigError, all[0].empty(), kPrepare, "rank 0 has no elements of '",
              all[0].empty() ? std::string() : all[0][0].get<std::string>(), "' of ", type,
              ", which other ranks have, and rank 0's values become everybody's; make the whole "
              "model with memory on rank 0, or on no rank");
  const auto& loading = settings.fsdp_cpu_ram_efficient_loading;
  const auto lacks = std::ranges::find_if(all, [](const Json& list) { return !list.empty(); });
  TS_CHECK_AS(ConfigError, loading.value, kPrepare, "rank ", lacks - all.begin(),
              " has no elements of '", (*lacks)[0].get<std::string>(), "' of ", type,
              ", and rank 0 has; set fsdp_cpu_ram_efficient_loading (", loading.origin.describe(),
              ") to true, by which rank 0's become everybody's, or make the models alike");
  state_ = State::kFirstRank;
}

void ModelMaterialisation::begin(bool cuts_parameters, bool synchronises) {
  if (!any()) return;
  const NoGradGuard no_grad;
  cuts_ = cuts_parameters;
  if (state_ == State::kNoRank) {
    if (!cuts_) nn::materialise(model_, device_);
    for (const auto& [name, tensor] : model_.named_parameters()) {
      if (!tensor.is_meta()) continue;
      const Tensor value = raw::empty(tensor.shape(), tensor.dtype(), kMeta);
      pass_initial_values(tensor, value);
      values_.set(name, value);
    }
    return;
  }
  const std::set<std::string> missing(missing_.begin(), missing_.end());
  const bool gives = ranks_.rank() == 0;
  // A model that is cut is so on all ranks alike: without memory for any parameter.
  const NamedTensors parameters = model_.named_parameters();
  const bool all = cuts_ && std::ranges::any_of(parameters, [&](const NamedTensor& named) {
                     return missing.contains(named.name);
                   });
  const auto keep = [&](const std::string& name, const Tensor& tensor) {
    const Tensor without = raw::empty(tensor.shape(), tensor.dtype(), kMeta);
    values_.set(name, gives ? raw::alias(tensor) : without);
    return without;
  };
  for (const auto& [name, tensor] : parameters) {
    if (cuts_ ? !all : synchronises || !missing.contains(name)) continue;
    const Tensor without = keep(name, tensor);
    if (all && !tensor.is_meta()) tensor.set_data(without);
  }
  // Those that other ranks have are no more than initial values.
  for (const auto& [name, tensor] : model_.named_buffers()) keep(name, tensor);
  if (!cuts_) nn::materialise(model_, device_, {.initialise = false});
}

void ModelMaterialisation::make_memory() {
  if (!any() || !cuts_) return;
  nn::materialise(model_, device_, {.initialise = state_ == State::kNoRank});
}

void ModelMaterialisation::give(const Take& take) {
  const NoGradGuard no_grad;
  if (state_ == State::kNoRank) {
    for (const auto& [name, target] : model_.named_parameters()) {
      const Tensor* const value = values_.find(name);
      if (value == nullptr || value->dtype() == target.dtype()) continue;
      take(target, part_of_initial(*value, target));
    }
  }
  if (state_ != State::kFirstRank) return;
  for (const auto& [name, target] : tensors_of(model_)) {
    if (!values_.contains(name)) continue;
    const Tensor value = distributed::scatter_whole(values_.at(name), target, ranks_);
    // Nobody needs the whole any more.
    values_.set(name, raw::empty(value.shape(), value.dtype(), kMeta));
    copy_(raw::alias(target), raw::alias(value));
    take(target, value);
  }
}

}  // namespace tessera::accelerate
