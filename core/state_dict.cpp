#include <tessera/core/state_dict.h>

#include <cstring>

#include <tessera/core/factory.h>
#include <tessera/core/placement_slot.h>

namespace tessera {
namespace {

// Row-major copy of any strided tensor; core has no ops, and state is copied rarely.
Tensor copy_elements(const Tensor& source) {
  Tensor result = raw::empty(source.shape(), source.dtype(), source.device());
  copy_placement(source, result);
  if (source.is_meta() || source.numel() == 0) return result;
  const size_t width = static_cast<size_t>(size_of(source.dtype()));
  const char* from = static_cast<const char*>(source.data());
  char* to = static_cast<char*>(result.data());
  if (source.is_contiguous()) {
    std::memcpy(to, from, static_cast<size_t>(source.nbytes()));
    return result;
  }
  const int dims = source.dim();
  Shape index = Shape::filled(dims, 0);
  for (int64_t i = 0; i < source.numel(); ++i) {
    int64_t position = 0;
    for (int d = 0; d < dims; ++d) position += index[d] * source.strides()[d];
    std::memcpy(to + static_cast<size_t>(i) * width, from + position * static_cast<int64_t>(width),
                width);
    for (int d = dims - 1; d >= 0 && ++index[d] == source.shape()[d]; --d) index[d] = 0;
  }
  return result;
}

}  // namespace

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
