// Collectives over everything in a nested value: a struct, a vector, a map, a tuple of tensors.
//
//     auto all = accelerate::gather(predictions);                      // rows of all ranks
//     auto mean = accelerate::reduce(losses, accelerate::RankReduction::kMean);
//     auto even = accelerate::pad_across_processes(ids, {.dim = 1, .pad_index = 0});
//
// Every function takes the value by value and returns one of the same type with other tensors; the
// caller's value is never written to. Tensors are found by nn::visit_tensors, in order; a struct
// lists its tensors. Undefined tensors stay undefined. Results carry no gradient history.
//
// All ranks of `group` (the data-parallel ranks, by default the world) pass values of one
// structure. Differences are a DistributedError on every rank, in bounded time: calls, dtypes and
// numbers of elements are compared before data moves. In debug mode the ranks first compare the
// shapes of all tensors too, and OperationMismatch shows them by rank.
//
// A sharded tensor (a DTensor) is an UnsupportedError: use full_tensor().
//
// With one rank nothing is communicated and nothing is copied.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/core/source_location.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/nn/visit_tensors.h>

namespace tessera::accelerate {

// Ranks called an operation with tensors that do not match. The message names the operation and has
// a line for each rank.
class OperationMismatch : public DistributedError {
 public:
  using DistributedError::DistributedError;
};

struct OperationOptions {
  // Compare the shapes of all ranks before the operation: one more collective of a few bytes.
  bool debug = false;
  SourceLocation where = SourceLocation::current();
};

enum class RankReduction : uint8_t {
  kSum,
  kMean,  // DTypeError for integers
  kMax,
  kNone,  // every rank keeps its value
};

struct PadOptions {
  int64_t dim = 0;         // negative: from the end
  double pad_index = 0;    // value of the new elements
  bool pad_first = false;  // new elements come before the old ones
};

namespace detail {

using Leaves = std::vector<Tensor*>;

template <class T>
inline constexpr bool holds_tensors = !std::is_arithmetic_v<T> && !std::is_enum_v<T> &&
                                      !std::is_pointer_v<T> && !std::is_same_v<T, std::string>;
// A copied span sees the caller's elements.
template <class T, size_t N>
inline constexpr bool holds_tensors<std::span<T, N>> = false;

// The defined tensors of a value.
template <class T>
Leaves leaves_of(T& value) {
  static_assert(holds_tensors<T>,
                "operations on tensors; for other values take gather_object and "
                "broadcast_object, or scalar_tensor(value, dtype)");
  Leaves leaves;
  nn::visit_tensors(value, [&](Tensor& tensor) {
    if (tensor.defined()) leaves.push_back(&tensor);
  });
  return leaves;
}

// Each replaces the tensors that `leaves` point at.
void gather(const Leaves& leaves, distributed::Group& group, const OperationOptions& options);
void reduce(const Leaves& leaves, RankReduction reduction, distributed::Group& group,
            const OperationOptions& options);
void broadcast(const Leaves& leaves, int from, distributed::Group& group,
               const OperationOptions& options);
void pad(const Leaves& leaves, const PadOptions& pad, distributed::Group& group,
         const OperationOptions& options);

// Every rank's JSON lists, concatenated.
nlohmann::json gather_lists(const nlohmann::json& own, distributed::Group& group,
                            const OperationOptions& options);
nlohmann::json broadcast_json(const nlohmann::json& object, int from, distributed::Group& group,
                              const OperationOptions& options);

// OperationMismatch on every rank unless all call with the same description.
void check_equal_on_all_ranks(std::string_view operation, const std::string& description,
                              std::string_view remedy, distributed::Group& group,
                              const OperationOptions& options);

}  // namespace detail

// Concatenates tensors of all ranks along dimension 0 in rank order. A scalar becomes one element
// for each rank. Numbers of rows must be equal; see pad_across_processes.
template <class T>
T gather(T value, distributed::Group& group = distributed::world(),
         const OperationOptions& options = {}) {
  detail::gather(detail::leaves_of(value), group, options);
  return value;
}

// The elementwise sum, mean or maximum over the ranks.
template <class T>
T reduce(T value, RankReduction reduction = RankReduction::kMean,
         distributed::Group& group = distributed::world(), const OperationOptions& options = {}) {
  detail::reduce(detail::leaves_of(value), reduction, group, options);
  return value;
}

// The value of rank `from` of the group. Tensors of all ranks have the same shapes and dtypes; see
// copy_from_owner for ranks that have none.
template <class T>
T broadcast(T value, int from = 0, distributed::Group& group = distributed::world(),
            const OperationOptions& options = {}) {
  detail::broadcast(detail::leaves_of(value), from, group, options);
  return value;
}

// Pads tensors along `dim` to the longest of any rank. A tensor without that dimension does not
// change. OperationMismatch if the ranks' tensors differ in number of dimensions or dtype, with and
// without debug mode.
template <class T>
T pad_across_processes(T value, const PadOptions& pad = {},
                       distributed::Group& group = distributed::world(),
                       const OperationOptions& options = {}) {
  detail::pad(detail::leaves_of(value), pad, group, options);
  return value;
}

// Copies a tensor that one rank has (it is undefined on the others) to all ranks, with its shape
// and dtype. The others receive it on `device`. DistributedError on every rank if none or several
// have one.
Tensor copy_from_owner(const Tensor& tensor, distributed::Group& group = distributed::world(),
                       const Device& device = kCpu);

// The elements of all ranks' lists, in rank order. T must be convertible to JSON (include
// nlohmann/json and, for types of your own, define to_json and from_json); NaN and infinities are
// preserved.
template <class T, class Json = nlohmann::json>
std::vector<T> gather_object(const std::vector<T>& own,
                             distributed::Group& group = distributed::world(),
                             const OperationOptions& options = {}) {
  if (group.size() == 1) return own;
  const Json all = detail::gather_lists(Json(own), group, options);
  return all.template get<std::vector<T>>();
}

// The value of rank `from`. Types as for gather_object.
template <class T, class Json = nlohmann::json>
T broadcast_object(const T& object, int from = 0, distributed::Group& group = distributed::world(),
                   const OperationOptions& options = {}) {
  if (group.size() == 1) return object;
  const Json received = detail::broadcast_json(Json(object), from, group, options);
  return received.template get<T>();
}

}  // namespace tessera::accelerate
