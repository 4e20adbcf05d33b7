// Gathers what all ranks computed from the samples of the current batch, each sample once.
//
//     for (auto& batch : loader) {
//       Tensor guesses = model(batch.inputs).logits.argmax(-1);
//       auto all = gather_for_metrics(std::pair(guesses, batch.targets), loaders.active());
//       correct += all.first.eq(all.second).sum();
//     }
//
// Each batch knows which of its rows count (data/dataloader.h, batch_samples()): each rank drops
// the rows that fill up its last batches before it sends. So the result is exact for all sizes,
// modes, tails and skips, and every rank gets what one process would have, in the same order.
//
// A value may be nested as for gather(). In it
//   a tensor with a row for each row of the batch: becomes the rows that count, of all ranks
//   a list of numbers, strings or what is made of such (std::vector<std::string>): the same
//   a scalar tensor: is a value of the rank, and becomes an element for each rank
//   a number or a string by itself: stays this rank's
// Any other number of rows is a ShapeError on all ranks, since it is not known whether it should be
// cut. Use gather() for values that do not belong to samples.
//
// Collective: every rank calls it for the same batch number. With uneven batches a rank may have no
// last batch and not call; then the others get a DistributedError at once, nothing was sent, and
// they may continue. Skip that batch, or use even batches (nothing is counted twice). For a stream
// that ranks read in parts this is not known: ranks that call alone get the error of the next
// collective, of the other rank's end, or of the timeout.
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
  void (*replace)(void* list, std::span<const std::string> parts);  // with those of all ranks
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
  void enter(T&) {}  // numbers, strings: this rank's own
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

// `loader`: the loader of the batch that the value was computed from, LoaderPlan::active(). Null:
// no batch, everything is gathered. `group`: the ranks that share the loader.
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
