// What all ranks computed from the samples of the batch in hand, each sample once.
//
//     for (auto& batch : loader) {
//       Tensor guesses = model(batch.inputs).logits.argmax(-1);
//       auto all = gather_for_metrics(std::pair(guesses, batch.targets), loaders.active());
//       correct += all.first.eq(all.second).sum();
//     }
//
// Which rows count is known with each batch (data/dataloader.h, batch_samples()): those that fill
// up the last batches of an epoch are left out on the rank that has them, before anything travels.
// So it is exact for all sizes, modes, tails and skips, and what every rank gets is what one
// process would have, in its order.
//
// A value may be nested as for gather(). In it
//   a tensor with a row for each row of the batch: becomes the rows that count, of all ranks
//   a list of numbers, strings or what is made of such (std::vector<std::string>): the same
//   a scalar tensor: is a value of the rank, and becomes an element for each rank
//   a number or a string by itself: stays this rank's
// Any other number of rows is a ShapeError on all ranks: whether it should be cut is not known. Use
// gather() for what does not belong to samples.
//
// Collective: every rank calls it for the same turn. Where batches are uneven, a rank may be
// without one in the last turn and does not call: then the others get a DistributedError at once,
// nothing was sent, and they may go on. Leave that turn out, or use even batches (nothing is
// counted twice). Of a stream that ranks read unevenly it is not known: there ranks that call in
// vain get the error of the next collective, of the other rank's end, or of the timeout.
#pragma once

#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/accelerate/loaders/batch_codec.h>
#include <tessera/accelerate/process/operations.h>
#include <tessera/data/dataloader.h>

namespace tessera::accelerate {

namespace detail {

// Types in which gather_for_metrics() looks for tensors and lists of samples.
template <class T>
struct IsStructure : std::bool_constant<VisitableStruct<T>> {};
template <>
struct IsStructure<Tensor> : std::true_type {};
template <class T>
struct IsStructure<std::optional<T>> : IsStructure<T> {};
template <class T>
struct IsStructure<std::vector<T>> : IsStructure<T> {};
template <class T, size_t N>
struct IsStructure<std::array<T, N>> : IsStructure<T> {};
template <class A, class B>
struct IsStructure<std::pair<A, B>> : std::disjunction<IsStructure<A>, IsStructure<B>> {};
template <class... T>
struct IsStructure<std::tuple<T...>> : std::disjunction<IsStructure<T>...> {};
template <class Key, class T>
struct IsStructure<std::map<Key, T>> : IsStructure<T> {};

// A list with an element for each sample, of a type that only its functions know.
struct SampleList {
  void* list;
  size_t size;
  void (*encode)(void* list, size_t count, ByteWriter& out);
  void (*replace)(void* list, std::span<const std::string> parts);  // by those of all ranks
};

struct MetricLeaves {
  std::vector<Tensor*> tensors;
  std::vector<SampleList> lists;

  template <class T>
  void operator()(T& value) {
    if constexpr (std::is_base_of_v<Tensor, T>) {
      if (value.defined()) tensors.push_back(&value);
    } else if constexpr (VisitableStruct<T>) {
      value.visit_tensors(*this);
    } else {
      enter(value);
    }
  }

 private:
  template <class T>
  void enter(T&) {}  // numbers, strings: this rank's
  template <class T>
  void enter(std::optional<T>& value) {
    if (value) (*this)(*value);
  }
  template <class A, class B>
  void enter(std::pair<A, B>& value) {
    (*this)(value.first), (*this)(value.second);
  }
  template <class... T>
  void enter(std::tuple<T...>& value) {
    std::apply([&](auto&... field) { ((*this)(field), ...); }, value);
  }
  template <class T, size_t N>
  void enter(std::array<T, N>& value) {
    for (T& element : value) (*this)(element);
  }
  template <class Key, class T>
  void enter(std::map<Key, T>& value) {
    for (auto& [key, element] : value) (*this)(element);
  }
  template <class T>
  void enter(std::vector<T>& value) {
    if constexpr (IsStructure<T>::value) {
      for (T& element : value) (*this)(element);
    } else {
      lists.push_back({&value, value.size(),
                       [](void* list, size_t count, ByteWriter& out) {
                         const auto& all = *static_cast<std::vector<T>*>(list);
                         std::vector<T> kept(all.begin(), all.begin() + static_cast<long>(count));
                         Encoder{out}(kept);
                       },
                       [](void* list, std::span<const std::string> parts) {
                         auto& all = *static_cast<std::vector<T>*>(list);
                         all.clear();
                         for (const std::string& part : parts) {
                           ByteReader in(part);
                           std::vector<T> elements;
                           Decoder{in}(elements);
                           for (auto&& element : elements) all.push_back(std::move(element));
                         }
                       }});
    }
  }
};

void gather_for_metrics(MetricLeaves& leaves, const data::LoaderBase* loader,
                        distributed::Group& group, const OperationOptions& options);

}  // namespace detail

// `loader`: whose batch in hand the value was computed from, LoaderPlan::active(). Null: from no
// batch, everything is gathered. `group`: the ranks that share the loader.
template <class T>
T gather_for_metrics(T value, const data::LoaderBase* loader,
                     distributed::Group& group = distributed::world(),
                     const OperationOptions& options = {}) {
  static_assert(detail::holds_tensors<T>,
                "tensors, lists with an element for each sample, and "
                "what is made of them");
  detail::MetricLeaves leaves;
  leaves(value);
  detail::gather_for_metrics(leaves, loader, group, options);
  return value;
}

}  // namespace tessera::accelerate
