// Data sets of numbers, and loaders over them on rank threads.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include <tessera/accelerate/loaders/loader_plan.h>
#include <tessera/core/tensor/tensor.h>

#include "data/number_data.h"
#include "distributed/compared_ranks.h"

namespace tessera::accelerate {

using data::DataLoader;
using data::epoch_of;
using data::Numbers;
using data::StreamLoader;
using data::values_of;
using distributed::compared_ranks;
using distributed::world;
using Indices = std::vector<int64_t>;
using Batches = std::vector<Indices>;
using Ranks = std::vector<Batches>;

// 0, 1, 2... that counts how often it was opened.
struct NumberStream : data::IterableDataset<int64_t> {
  explicit NumberStream(int64_t size) : size_(size) {}
  std::unique_ptr<data::ExampleStream<int64_t>> open(int64_t) const override {
    struct Pass : data::ExampleStream<int64_t> {
      explicit Pass(const NumberStream& stream) : stream_(stream) {}
      std::optional<int64_t> next() override {
        if (next_ == stream_.size_) return std::nullopt;
        ++stream_.read;
        return next_++;
      }
      const NumberStream& stream_;
      int64_t next_ = 0;
    };
    ++opened;
    return std::make_unique<Pass>(*this);
  }
  int64_t size_;
  mutable std::atomic<int> opened{0}, read{0};
};

// Four parts of 3, 5, 2 and 2 numbers: 0 1 2, 10 11 12 13 14, 20 21, 30 31.
struct NumberParts : data::IterableDataset<int64_t> {
  struct Pass : data::ExampleStream<int64_t> {
    explicit Pass(Indices numbers) : numbers_(std::move(numbers)) {}
    std::optional<int64_t> next() override {
      return next_ == numbers_.size() ? std::nullopt : std::optional(numbers_[next_++]);
    }
    Indices numbers_;
    size_t next_ = 0;
  };
  static Indices numbers_of(int64_t part) {
    Indices numbers(std::array<size_t, 4>{3, 5, 2, 2}[static_cast<size_t>(part)]);
    std::iota(numbers.begin(), numbers.end(), 10 * part);
    return numbers;
  }
  std::unique_ptr<data::ExampleStream<int64_t>> open(int64_t) const override {
    Indices all;
    for (int64_t part = 0; part < 4; ++part) {
      for (const int64_t number : numbers_of(part)) all.push_back(number);
    }
    return std::make_unique<Pass>(all);
  }
  int64_t num_parts() const override { return 4; }
  std::unique_ptr<data::ExampleStream<int64_t>> open_part(int64_t, int64_t part) const override {
    ++opened;
    return std::make_unique<Pass>(numbers_of(part));
  }
  mutable std::atomic<int> opened{0};
};

// How many rows of each batch count.
template <class Loader>
Indices samples_of(Loader& loader) {
  Indices samples;
  for (Tensor& batch : loader) {
    EXPECT_EQ(loader.batch_rows(), batch.size(0));
    samples.push_back(loader.batch_samples());
  }
  return samples;
}

// One epoch on each of `n` ranks.
template <class Make>
Ranks on_ranks(int n, const LoaderPlanOptions& options, Make make) {
  Ranks ranks(static_cast<size_t>(n));
  compared_ranks(n, [&](int rank) {
    auto loader = make();
    LoaderPlan plan(world(), options);
    plan.prepare(*loader);
    ranks[static_cast<size_t>(rank)] = epoch_of(*loader);
  });
  return ranks;
}

inline auto numbers_loader(int64_t size, int64_t batch_size, bool drop_last = false) {
  return [=] {
    return std::make_unique<DataLoader<int64_t>>(
        std::make_shared<Numbers>(size),
        data::DataLoaderOptions{.batch_size = batch_size, .drop_last = drop_last});
  };
}
inline auto stream_loader(int64_t size, int64_t batch_size, bool drop_last = false) {
  return [=] {
    return std::make_unique<StreamLoader<int64_t>>(
        std::make_shared<NumberStream>(size),
        data::DataLoaderOptions{.batch_size = batch_size, .drop_last = drop_last});
  };
}

enum class Way { kEven, kUneven, kDropLast };

}  // namespace tessera::accelerate
