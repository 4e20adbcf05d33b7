// visit_tensors(value, visit): calls `visit(Tensor&)` for every tensor inside a value, in order.
// Hooks, devices and sharding see the arguments and results of modules through it.
//
// It knows Tensor, optional, pair, tuple, array, vector, span, map and what they contain; numbers,
// strings and other types without tensors are ignored. A struct lists its fields:
//
//     struct Output {
//       Tensor logits, loss;
//       void visit_tensors(auto&& visit) { visit(logits), visit(loss); }
//     };
//
// An aggregate without that member does not compile as a module's argument or result, so that no
// tensor is missed. For types of other libraries, specialize VisitTensors<T>. References to modules
// and other objects are not visited.
#pragma once

#include <array>
#include <concepts>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/core/device.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::nn {

// A callable that accepts whatever a struct's visit_tensors passes to it, for checks.
struct AnyVisitor {
  template <class T>
  void operator()(T&) const {}
};

namespace detail {
template <bool kVisible>
constexpr void check_visible() {
  static_assert(kVisible,
                "this struct passes through a module: give it a member "
                "`void visit_tensors(auto&& visit) { visit(field)...; }`, empty if it holds "
                "no tensors");
}
}  // namespace detail

template <class T>
struct VisitTensors {
  static constexpr bool kHasMember = requires(T & value, AnyVisitor visitor) {
    value.visit_tensors(visitor);
  };
  static void visit(T& value, auto& visitor) {
    if constexpr (kHasMember) {
      value.visit_tensors(visitor);
    } else {
      detail::check_visible<!std::is_aggregate_v<T>>();
    }
  }
};

template <class T>
void visit_tensors(T& value, auto&& visitor);

namespace detail {
// Called by a struct's visit_tensors for each field: passes tensors to the visitor and visits the
// contents of other fields.
template <class Visitor>
struct FieldVisitor {
  Visitor& visitor;
  template <class T>
  void operator()(T& field) const {
    nn::visit_tensors(field, visitor);
  }
};
template <class T>
inline constexpr bool is_opaque =
    std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_pointer_v<T> || std::is_const_v<T>;
// False for a struct without visit_tensors, given or returned by value or by reference, so that a
// call can say so before other errors. A reference to const that cannot be copied is ignored.
template <class T>
inline constexpr bool is_visible = !(std::is_aggregate_v<std::remove_cvref_t<T>> &&
                                     (std::is_copy_constructible_v<std::remove_cvref_t<T>> ||
                                      !std::is_const_v<std::remove_reference_t<T>>)&&requires {
                                       requires !VisitTensors<std::remove_cvref_t<T>>::kHasMember;
                                     });
}  // namespace detail

template <class T>
void visit_tensors(T& value, auto&& visitor) {
  static_assert(!std::is_same_v<T, const Tensor>,
                "hooks may replace tensors: pass a TensorList, not a span of const Tensor");
  if constexpr (std::is_base_of_v<Tensor, T>) {
    visitor(static_cast<Tensor&>(value));
  } else if constexpr (!detail::is_opaque<T>) {
    detail::FieldVisitor<std::remove_reference_t<decltype(visitor)>> fields{visitor};
    VisitTensors<T>::visit(value, fields);
  }
}

// Structs of core without tensors.
template <>
struct VisitTensors<RandomStream> {
  static void visit(RandomStream&, auto&) {}
};
template <>
struct VisitTensors<Device> {
  static void visit(Device&, auto&) {}
};

template <class T>
struct VisitTensors<std::optional<T>> {
  static void visit(std::optional<T>& value, auto& visitor) {
    if (value) visitor(*value);
  }
};
template <class A, class B>
struct VisitTensors<std::pair<A, B>> {
  static void visit(std::pair<A, B>& value, auto& visitor) {
    visitor(value.first), visitor(value.second);
  }
};
template <class... T>
struct VisitTensors<std::tuple<T...>> {
  static void visit(std::tuple<T...>& value, auto& visitor) {
    std::apply([&](auto&... field) { (visitor(field), ...); }, value);
  }
};
template <class T, size_t N>
struct VisitTensors<std::array<T, N>> {
  static void visit(std::array<T, N>& value, auto& visitor) {
    for (T& element : value) visitor(element);
  }
};
template <class T>
struct VisitTensors<std::vector<T>> {
  static void visit(std::vector<T>& value, auto& visitor) {
    if constexpr (!std::is_same_v<T, bool>) {
      for (T& element : value) visitor(element);
    }
  }
};
template <class T, size_t N>
struct VisitTensors<std::span<T, N>> {
  static void visit(std::span<T, N>& value, auto& visitor) {
    for (T& element : value) visitor(element);
  }
};
template <class Key, class T>
struct VisitTensors<std::map<Key, T>> {
  static void visit(std::map<Key, T>& value, auto& visitor) {
    for (auto& [key, element] : value) visitor(element);
  }
};

}  // namespace tessera::nn
