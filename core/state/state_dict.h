// Named tensors: parameters as optimizers take them, and the ordered map for the state of modules,
// optimizers and schedules.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

struct NamedTensor {
  std::string name;
  Tensor tensor;
};
using NamedTensors = std::vector<NamedTensor>;
TensorList tensors_of(const NamedTensors& named);

// name -> Tensor in the order of insertion. Tensors are handles: the dictionary of a live module
// sees its later values; clone() takes a snapshot.
class StateDict {
 public:
  // Adds a tensor, or replaces the one of an existing name.
  void set(std::string_view name, const Tensor& tensor);
  bool contains(std::string_view name) const { return find(name) != nullptr; }
  const Tensor* find(std::string_view name) const;  // nullptr where absent
  const Tensor& at(std::string_view name) const;    // throws ValueError
  double scalar(std::string_view name) const;       // at(name) as a number

  size_t size() const { return entries_.size(); }
  size_t count(std::string_view name) const { return contains(name) ? 1 : 0; }  // as a map has it
  bool empty() const { return entries_.empty(); }
  NamedTensors::const_iterator begin() const { return entries_.begin(); }
  NamedTensors::const_iterator end() const { return entries_.end(); }

  // All entries of `other` under `prefix` + name, and back: the entries that begin with `prefix`,
  // without it. One file can so hold a model, its optimizer and its schedule.
  void merge(std::string_view prefix, const StateDict& other);
  StateDict with_prefix(std::string_view prefix) const;
  StateDict clone() const;  // with elements of its own

  std::map<std::string, Tensor> to_map() const;
  static StateDict from_map(const std::map<std::string, Tensor>& tensors);

 private:
  NamedTensors entries_;
  std::unordered_map<std::string, size_t> positions_;
};

}  // namespace tessera
