#include <tessera/nn/materialise.h>

#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <tessera/core/factory/initial_values.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::nn {
namespace {

struct WithoutMemory {
  std::string name;
  Tensor tensor;
  MemoryCategory category;
};
// Each once.
std::vector<WithoutMemory> tensors_without_memory(const ModuleBase& module) {
  std::vector<WithoutMemory> result;
  std::unordered_set<const TensorImpl*> seen;
  const auto take = [&](const std::string& name, const Tensor& tensor, MemoryCategory category) {
    if (tensor.is_meta() && seen.insert(tensor.impl()).second) {
      result.push_back({name, tensor, category});
    }
  };
  for (const auto& [name, tensor] : module.named_parameters()) {
    take(name, tensor, MemoryCategory::kParameter);
  }
  for (const auto& [name, tensor] : module.named_buffers()) {
    take(name, tensor, tensor.storage()->category());
  }
  return result;
}

void check_values_known(const std::vector<WithoutMemory>& tensors) {
  std::string unknown;
  for (const auto& [name, tensor, category] : tensors) {
    const std::string reason = unknown_initial_values(tensor);
    if (!reason.empty()) unknown += "\n  " + name + " (" + tensor.describe() + "): " + reason;
  }
  TS_CHECK(unknown.empty(), "materialise", "initial values that are not known:", unknown,
           "\n  fill these with nn::init when the module is made, whole or by contiguous views "
           "(init::by_range takes any rule), or pass {.initialise = false} and load them");
}

}  // namespace

void materialise(ModuleBase& module, const Device& device, const MaterialiseOptions& options) {
  TS_CHECK(!device.is_meta(), "materialise", "needs a device that has memory; got ", device);
  const NoGradGuard no_grad;
  const std::vector<WithoutMemory> tensors = tensors_without_memory(module);
  if (options.initialise) check_values_known(tensors);
  std::unordered_map<const Storage*, Tensor> made;  // of several tensors that share one
  TensorList kept;                                  // until then, so that no address comes twice
  for (const auto& [name, tensor, category] : tensors) {
    Tensor& elements = made[tensor.storage().get()];
    if (!elements.defined()) {
      const MemoryCategoryGuard guard(category);
      elements =
          raw::empty({tensor.storage()->bytes() / size_of(tensor.dtype())}, tensor.dtype(), device);
      if (options.initialise) write_initial_values(tensor, elements);
      kept.push_back(raw::alias(tensor));
    }
    tensor.set_data(raw::as_strided(elements, tensor.shape(), tensor.strides(), tensor.offset()));
    tensor.bump_version("materialise");
  }
}

}  // namespace tessera::nn
