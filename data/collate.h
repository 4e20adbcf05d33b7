// Makes a batch from examples.
//
// collate(examples) stacks: tensors get a new first dimension, numbers become a tensor of one
// dimension, strings a list; pairs, tuples, arrays and structs are collated field by field. A
// struct lists its fields as it does for modules; they must be tensors or such structs:
//
//     struct Pair {
//       Tensor inputs, targets;
//       void visit_tensors(auto&& visit) { visit(inputs), visit(targets); }
//     };
//
// A type that is not made of tensors, or that needs padding, defines its own rule:
//
//     template <>
//     struct tessera::data::Collate<Sentence> {
//       static Encoded batch(std::span<Sentence> examples);
//     };
//
// A loader may also be given a function, torch's collate_fn (data/dataloader.h).
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::data {

// Stacks along a new first dimension: n tensors [...] become [n, ...], a copy on the CPU.
// ValueError for none; ShapeError, DTypeError, DeviceError naming the first tensor that differs.
Tensor stack_examples(std::span<const Tensor> tensors);

template <class Example>
struct Collate {
  static_assert(std::is_void_v<Example>,
                "no rule makes batches of this type of example: give it a member `void "
                "visit_tensors(auto&& visit) { visit(field), ...; }` whose fields are tensors, "
                "specialise tessera::data::Collate, or give the loader a function that collates");
};

// The type of a batch of examples.
template <class Example>
using BatchOf = decltype(Collate<Example>::batch(std::declval<std::span<Example>>()));

template <class Example>
BatchOf<Example> collate(std::span<Example> examples) {
  return Collate<Example>::batch(examples);
}

template <>
struct Collate<Tensor> {
  static Tensor batch(std::span<Tensor> examples) { return stack_examples(examples); }
};

template <>
struct Collate<std::string> {
  static std::vector<std::string> batch(std::span<std::string> examples) {
    return {std::make_move_iterator(examples.begin()), std::make_move_iterator(examples.end())};
  }
};

namespace detail {

// Collects pointers to the tensors of one example, in order.
struct TensorPointers {
  std::vector<Tensor*>& out;
  void operator()(Tensor& tensor) { out.push_back(&tensor); }
  template <class T>
  void operator()(T& field) {
    static_assert(
        requires { field.visit_tensors(*this); },
        "a field of a collated struct is a Tensor or has visit_tensors; for others "
        "specialise tessera::data::Collate");
    field.visit_tensors(*this);
  }
};

// The result of collating one field of a tuple-like example.
template <class Field, class Example, class Get>
BatchOf<Field> collate_field(std::span<Example> examples, Get get) {
  if constexpr (std::is_same_v<Field, bool>) {  // std::vector<bool> has no bools to point at
    const auto fields = std::make_unique<Field[]>(examples.size());
    for (size_t i = 0; i < examples.size(); ++i) fields[i] = get(examples[i]);
    return collate(std::span<Field>(fields.get(), examples.size()));
  } else {
    std::vector<Field> fields;
    fields.reserve(examples.size());
    for (Example& example : examples) fields.push_back(std::move(get(example)));
    return collate(std::span<Field>(fields));
  }
}

}  // namespace detail

// Numbers: i64 for integers of 64 bits, i32, u8, bool, f32, f64 by their type.
template <class Number>
requires std::is_arithmetic_v<Number>
struct Collate<Number> {
  static Tensor batch(std::span<Number> examples) {
    Tensor out = raw::empty({static_cast<int64_t>(examples.size())}, dtype_of<Number>);
    Number* values = out.data_as<Number>();
    for (size_t i = 0; i < examples.size(); ++i) values[i] = examples[i];
    return out;
  }
};

template <class Example>
requires requires(Example& example, detail::TensorPointers& visitor) {
  example.visit_tensors(visitor);
}
struct Collate<Example> {
  static Example batch(std::span<Example> examples) {
    TS_CHECK(!examples.empty(), "collate", "a batch has at least one example; got none.");
    std::vector<std::vector<Tensor*>> tensors(examples.size());
    for (size_t i = 0; i < examples.size(); ++i) {
      detail::TensorPointers visitor{tensors[i]};
      examples[i].visit_tensors(visitor);
      TS_CHECK(tensors[i].size() == tensors[0].size(), "collate", "example ", i,
               " of the batch has ", tensors[i].size(), " tensors, the first has ",
               tensors[0].size(), ".");
    }
    std::vector<Tensor> column(examples.size());
    for (size_t field = 0; field < tensors[0].size(); ++field) {
      for (size_t i = 0; i < examples.size(); ++i) column[i] = *tensors[i][field];
      *tensors[0][field] = stack_examples(column);
    }
    return std::move(examples[0]);
  }
};

template <class T, size_t N>
struct Collate<std::array<T, N>> {
  static auto batch(std::span<std::array<T, N>> examples) {
    return [&]<size_t... kPlace>(std::index_sequence<kPlace...>) {
      return std::array<BatchOf<T>, N>{detail::collate_field<T>(
          examples, [](std::array<T, N>& example) -> T& { return example[kPlace]; })...};
    }
    (std::make_index_sequence<N>());
  }
};

template <class A, class B>
struct Collate<std::pair<A, B>> {
  static auto batch(std::span<std::pair<A, B>> examples) {
    using Example = std::pair<A, B>;
    return std::pair<BatchOf<A>, BatchOf<B>>(
        detail::collate_field<A>(examples, [](Example& example) -> A& { return example.first; }),
        detail::collate_field<B>(examples, [](Example& example) -> B& { return example.second; }));
  }
};

template <class... T>
struct Collate<std::tuple<T...>> {
  static auto batch(std::span<std::tuple<T...>> examples) {
    return [&]<size_t... kPlace>(std::index_sequence<kPlace...>) {
      return std::tuple<BatchOf<T>...>{detail::collate_field<T>(
          examples, [](std::tuple<T...>& example) -> T& { return std::get<kPlace>(example); })...};
    }
    (std::index_sequence_for<T...>());
  }
};

}  // namespace tessera::data
