#include <tessera/accelerate/step/prepared_objects.h>

#include <algorithm>

namespace tessera {

std::shared_ptr<ModelRecord> PreparedObjects::find(const nn::ModuleBase& model) const {
  for (const auto& record : models) {
    if (record->model == &model) return record;
  }
  return nullptr;
}

OptimizerRecord* PreparedObjects::find(const optim::Optimizer& optimizer) const {
  for (const auto& record : optimizers) {
    if (record->optimizer == &optimizer) return record.get();
  }
  return nullptr;
}

std::shared_ptr<ModelRecord> PreparedObjects::at(const nn::ModuleBase& model,
                                                 std::string_view where) const {
  auto record = find(model);
  TS_CHECK(record != nullptr, where, "the model ", model.type_name(),
           " was not prepared; call prepare(model) first");
  return record;
}

ModelRecord* PreparedObjects::holder_of(const Tensor& parameter) const {
  for (const auto& record : models) {
    for (const auto& [name, tensor] : record->parameters) {
      if (tensor.is(parameter)) return record.get();
    }
  }
  return nullptr;
}

const std::vector<std::shared_ptr<ModelRecord>>& PreparedObjects::models_of(
    OptimizerRecord& record) {
  if (record.generation == generation) return record.models;
  record.generation = generation;
  record.models.clear();
  std::unordered_set<TensorImpl*> tensors;
  for (const auto& [name, tensor] : record.parameters) tensors.insert(tensor.impl());
  for (const auto& model : models) {
    if (std::ranges::any_of(model->parameters, [&](const NamedTensor& named) {
          return tensors.contains(named.tensor.impl());
        })) {
      record.models.push_back(model);
    }
  }
  return record.models;
}

bool PreparedObjects::at_boundary(OptimizerRecord& record) {
  const auto& models = models_of(record);
  if (models.empty()) return sync_gradients;
  return std::ranges::all_of(models, [](const auto& model) { return model->window.is_boundary(); });
}

TensorList gradients_of(const NamedTensors& parameters, std::unordered_set<TensorImpl*>& seen) {
  TensorList gradients;
  for (const auto& [name, tensor] : parameters) {
    if (!seen.insert(tensor.impl()).second) continue;
    if (Tensor gradient = tensor.grad(); gradient.defined()) {
      gradients.push_back(std::move(gradient));
    }
  }
  return gradients;
}

}  // namespace tessera
