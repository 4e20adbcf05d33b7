// Data sets with random access, and combinations of them.
//
//     struct Digit { Tensor image, label; void visit_tensors(auto&& visit) {...} };
//     class Digits : public Dataset<Digit> {
//      public:
//       int64_t size() const override { return 60'000; }
//       Digit get(int64_t index) const override { ... }
//     };
//
// Combinators share ownership of the data sets that they use.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/data/sampler.h>

namespace tessera::data {

template <class ExampleType>
class Dataset {
 public:
  using Example = ExampleType;
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;
  // index in [0, size()). The workers of a loader call it at the same time. Its random numbers
  // belong to the example, and example_place() has the epoch (example_place.h).
  virtual Example get(int64_t index) const = 0;
};

template <class Example>
using DatasetPtr = std::shared_ptr<const Dataset<Example>>;

namespace detail {
inline void check_index(int64_t index, int64_t size, std::string_view where) {
  TS_CHECK_INDEX(index >= 0 && index < size, where, "index ", index, " is outside the ", size,
                 " examples.");
}
}  // namespace detail

// Example i is row i of each of N tensors: `TensorDataset dataset(images, labels)`. No copy: rows
// are views.
template <size_t N>
class TensorDataset : public Dataset<std::array<Tensor, N>> {
 public:
  // ShapeError unless all have a first dimension of one size.
  template <std::same_as<Tensor>... Tensors>
  requires(sizeof...(Tensors) == N) explicit TensorDataset(const Tensors&... tensors)
      : tensors_{tensors...} {
    for (const Tensor& tensor : tensors_) {
      TS_CHECK_SHAPE(tensor.dim() > 0 && tensor.size(0) == tensors_[0].size(0), "TensorDataset",
                     "all tensors have as many rows as there are examples; the first is ",
                     tensors_[0], ", another is ", tensor, ".");
    }
  }
  int64_t size() const override { return tensors_[0].size(0); }
  std::array<Tensor, N> get(int64_t index) const override {
    detail::check_index(index, size(), "TensorDataset");
    std::array<Tensor, N> example;
    for (size_t i = 0; i < N; ++i) example[i] = raw::select(tensors_[i], 0, index);
    return example;
  }

 private:
  std::array<Tensor, N> tensors_;
};
template <class... Tensors>
TensorDataset(const Tensors&...) -> TensorDataset<sizeof...(Tensors)>;

// Chosen examples of another data set, in the order of `indices`.
template <class Example>
class Subset : public Dataset<Example> {
 public:
  // IndexError for an index outside the data set.
  Subset(DatasetPtr<Example> dataset, std::vector<int64_t> indices)
      : dataset_(std::move(dataset)), indices_(std::move(indices)) {
    for (const int64_t index : indices_) detail::check_index(index, dataset_->size(), "Subset");
  }
  int64_t size() const override { return static_cast<int64_t>(indices_.size()); }
  Example get(int64_t index) const override {
    detail::check_index(index, size(), "Subset");
    return dataset_->get(indices_[static_cast<size_t>(index)]);
  }

 private:
  DatasetPtr<Example> dataset_;
  std::vector<int64_t> indices_;
};

// Disjoint random parts of the given lengths; the same for the same seed. ValueError unless the
// lengths add up to the size.
template <class Example>
std::vector<std::shared_ptr<Subset<Example>>> random_split(const DatasetPtr<Example>& dataset,
                                                           std::span<const int64_t> lengths,
                                                           uint64_t seed) {
  int64_t total = 0;
  for (const int64_t length : lengths) {
    TS_CHECK(length >= 0 && length <= dataset->size() - total, "random_split",
             "lengths must not be negative and must add up to the ", dataset->size(),
             " examples; got ", length, " after ", total, ".");
    total += length;
  }
  TS_CHECK(total == dataset->size(), "random_split", "lengths must add up to the ", dataset->size(),
           " examples; they give ", total, ".");
  const Permutation permutation(total, seed, 0);
  std::vector<std::shared_ptr<Subset<Example>>> parts;
  int64_t position = 0;
  for (const int64_t length : lengths) {
    std::vector<int64_t> indices(static_cast<size_t>(length));
    for (int64_t& index : indices) index = permutation[position++];
    parts.push_back(std::make_shared<Subset<Example>>(dataset, std::move(indices)));
  }
  return parts;
}
template <class D, class Example = typename D::Example>
auto random_split(const std::shared_ptr<D>& dataset, std::initializer_list<int64_t> lengths,
                  uint64_t seed) {
  return random_split<Example>(DatasetPtr<Example>(dataset),
                               std::span(lengths.begin(), lengths.end()), seed);
}

// One data set after the other.
template <class Example>
class ConcatDataset : public Dataset<Example> {
 public:
  explicit ConcatDataset(std::vector<DatasetPtr<Example>> parts) : parts_(std::move(parts)) {
    for (const DatasetPtr<Example>& part : parts_) ends_.push_back(size() + part->size());
  }
  int64_t size() const override { return ends_.empty() ? 0 : ends_.back(); }
  Example get(int64_t index) const override {
    detail::check_index(index, size(), "ConcatDataset");
    const size_t part =
        static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin());
    return parts_[part]->get(part == 0 ? index : index - ends_[part - 1]);
  }

 private:
  std::vector<DatasetPtr<Example>> parts_;
  std::vector<int64_t> ends_;
};

// f(example) instead of each example. Several threads call f at once.
template <class From, class Function>
class MappedDataset : public Dataset<std::invoke_result_t<const Function&, From>> {
 public:
  MappedDataset(DatasetPtr<From> dataset, Function function)
      : dataset_(std::move(dataset)), function_(std::move(function)) {}
  int64_t size() const override { return dataset_->size(); }
  std::invoke_result_t<const Function&, From> get(int64_t index) const override {
    return function_(dataset_->get(index));
  }

 private:
  DatasetPtr<From> dataset_;
  Function function_;
};
template <class D, class Function>
auto map(const std::shared_ptr<D>& dataset, Function function) {
  return std::make_shared<MappedDataset<typename D::Example, Function>>(dataset,
                                                                        std::move(function));
}

// Examples that come one after the other: a stream, a file too long to index.
template <class ExampleType>
class ExampleStream {
 public:
  virtual ~ExampleStream() = default;
  virtual std::optional<ExampleType> next() = 0;  // nothing at the end
};
template <class ExampleType>
class IterableDataset {
 public:
  using Example = ExampleType;
  virtual ~IterableDataset() = default;
  // Starts a new pass. The same epoch gives the same examples in the same order.
  virtual std::unique_ptr<ExampleStream<Example>> open(int64_t epoch) const = 0;

  // Parts that can be read independently, files for example, so that several ranks read without
  // reading twice: rank r of n reads parts r, r + n... Together the parts are what open() reads. 1:
  // there are none.
  virtual int64_t num_parts() const { return 1; }
  // Starts a new pass over `part` in [0, num_parts()).
  virtual std::unique_ptr<ExampleStream<Example>> open_part(int64_t epoch, int64_t part) const {
    detail::check_index(part, 1, "IterableDataset");
    return open(epoch);
  }
};

}  // namespace tessera::data
