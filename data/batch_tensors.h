// Finds the tensors inside a batch: Tensor, optional, pair, tuple, array, vector, map and what they
// contain, and structs that list their tensors by visit_tensors, as modules' arguments do. Numbers
// and strings are ignored.
#pragma once

#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera::data {

struct BatchTensors {
  std::vector<Tensor*> tensors;  // the defined ones, in order
  // The name of a type whose tensors are unknown; null if all are known.
  const std::type_info* opaque = nullptr;

  template <class T>
  void operator()(T& value) {
    if constexpr (std::is_base_of_v<Tensor, T>) {
      if (value.defined()) tensors.push_back(&value);
    } else if constexpr (requires { value.visit_tensors(kAnyVisitor); }) {
      value.visit_tensors(*this);
    } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                         std::is_same_v<T, std::string>) {
    } else if constexpr (requires { value.has_value(), *value; }) {
      if (value.has_value()) (*this)(*value);
    } else if constexpr (requires { std::tuple_size<T>::value; }) {
      std::apply([&](auto&... fields) { ((*this)(fields), ...); }, value);
    } else if constexpr (requires { typename T::mapped_type; }) {
      for (auto& [key, element] : value) (*this)(element);
    } else if constexpr (requires {
                           value.begin(), value.end();
                           typename T::value_type;
                         }) {
      if constexpr (!std::is_same_v<typename T::value_type, bool>) {
        for (auto& element : value) (*this)(element);
      }
    } else {
      opaque = &typeid(T);
    }
  }

 private:
  struct AnyVisitor {
    template <class T>
    void operator()(T&) const {}
  };
  static constexpr AnyVisitor kAnyVisitor{};
};

// Finds the tensors of a batch of a type that only its loader knows.
using FindBatchTensors = void (*)(void* batch, BatchTensors& found);
template <class Batch>
void find_batch_tensors(void* batch, BatchTensors& found) {
  found(*static_cast<Batch*>(batch));
}

}  // namespace tessera::data
