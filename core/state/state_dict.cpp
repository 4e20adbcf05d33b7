#include <tessera/core/state/state_dict.h>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

Tensor copy_elements(const Tensor& source) {
  Tensor result = raw::empty(source.shape(), source.dtype(), source.device());
  if (!source.is_meta()) kernels::copy_into(result, raw::alias(source));
  copy_guard(source, result);
  return result;
}

}  // namespace

TensorList tensors_of(const NamedTensors& named) {
  TensorList tensors;
  tensors.reserve(named.size());
  for (const NamedTensor& one : named) tensors.push_back(one.tensor);
  return tensors;
}

void StateDict::set(std::string_view name, const Tensor& tensor) {
  const auto [position, added] = positions_.try_emplace(std::string(name), entries_.size());
  if (added) {
    entries_.push_back({std::string(name), tensor});
  } else {
    entries_[position->second].tensor = tensor;
  }
}

const Tensor* StateDict::find(std::string_view name) const {
  const auto found = positions_.find(std::string(name));
  return found == positions_.end() ? nullptr : &entries_[found->second].tensor;
}

const Tensor& StateDict::at(std::string_view name) const {
  const Tensor* tensor = find(name);
  TS_CHECK(tensor != nullptr, "state_dict", "there is no entry '", name, "' among ", size(),
           "; was this state saved by another version or object?");
  return *tensor;
}

double StateDict::scalar(std::string_view name) const { return at(name).item<double>(); }

void StateDict::merge(std::string_view prefix, const StateDict& other) {
  for (const auto& [name, tensor] : other) set(std::string(prefix) + name, tensor);
}

StateDict StateDict::with_prefix(std::string_view prefix) const {
  StateDict result;
  for (const auto& [name, tensor] : entries_) {
    if (name.starts_with(prefix)) {
      result.set(std::string_view(name).substr(prefix.size()), tensor);
    }
  }
  return result;
}

StateDict StateDict::clone() const {
  StateDict result;
  for (const auto& [name, tensor] : entries_) result.set(name, copy_elements(tensor));
  return result;
}

std::map<std::string, Tensor> StateDict::to_map() const {
  std::map<std::string, Tensor> result;
  for (const auto& [name, tensor] : entries_) result.emplace(name, tensor);
  return result;
}

StateDict StateDict::from_map(const std::map<std::string, Tensor>& tensors) {
  StateDict result;
  for (const auto& [name, tensor] : tensors) result.set(name, tensor);
  return result;
}

}  // namespace tessera
