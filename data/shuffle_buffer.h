// A stream shuffled within a buffer.
//
//     auto mixed = data::shuffle(stream, /*buffer_size=*/10'000, /*seed=*/1);
//     auto pass = mixed->open(epoch);
//
// The buffer holds the next `buffer_size` examples of the source; each call returns one of them,
// chosen uniformly, and the source's next example takes its place. Every example comes once. An
// example comes at most buffer_size - 1 places early; how late has no limit. The order is a pure
// function of the source's order and (seed, epoch).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/core/random.h>
#include <tessera/data/dataset.h>

namespace tessera::data {

template <class Example>
class ShuffledDataset : public IterableDataset<Example> {
 public:
  // ValueError without a source and if buffer_size < 1.
  ShuffledDataset(std::shared_ptr<const IterableDataset<Example>> source, int64_t buffer_size,
                  uint64_t seed)
      : source_(std::move(source)), buffer_size_(buffer_size), seed_(seed) {
    TS_CHECK(source_ != nullptr, "ShuffledDataset", "needs a source; got none.");
    TS_CHECK(buffer_size >= 1, "ShuffledDataset", "the buffer must hold at least 1 example; got ",
             buffer_size, ".");
  }

  // Holds the source, so the data set may be destroyed.
  std::unique_ptr<ExampleStream<Example>> open(int64_t epoch) const override {
    return std::make_unique<Stream>(source_, buffer_size_, seed_, epoch);
  }

 private:
  class Stream : public ExampleStream<Example> {
   public:
    Stream(std::shared_ptr<const IterableDataset<Example>> source, int64_t buffer_size,
           uint64_t seed, int64_t epoch)
        : source_(std::move(source)),
          stream_(source_->open(epoch)),
          buffer_size_(static_cast<size_t>(buffer_size)),
          seed_(seed),
          epoch_(static_cast<uint64_t>(epoch)) {}

    std::optional<Example> next() override {
      while (!ended_ && buffer_.size() < buffer_size_) {
        std::optional<Example> example = stream_->next();
        if (example) {
          buffer_.push_back(*std::move(example));
        } else {
          ended_ = true;
        }
      }
      if (buffer_.empty()) return std::nullopt;
      const auto bits = philox4x32(seed_, epoch_, drawn_++);
      const double even = uniform_from_bits64(bits[0], bits[1]);
      const auto chosen = static_cast<size_t>(even * static_cast<double>(buffer_.size()));
      std::swap(buffer_[chosen], buffer_.back());
      std::optional<Example> result(std::move(buffer_.back()));
      buffer_.pop_back();
      return result;
    }

   private:
    std::shared_ptr<const IterableDataset<Example>> source_;
    std::unique_ptr<ExampleStream<Example>> stream_;
    std::vector<Example> buffer_;
    size_t buffer_size_;
    uint64_t seed_, epoch_, drawn_ = 0;
    bool ended_ = false;
  };

  std::shared_ptr<const IterableDataset<Example>> source_;
  int64_t buffer_size_;
  uint64_t seed_;
};

template <class D>
std::shared_ptr<ShuffledDataset<typename D::Example>> shuffle(const std::shared_ptr<D>& source,
                                                              int64_t buffer_size, uint64_t seed) {
  return std::make_shared<ShuffledDataset<typename D::Example>>(source, buffer_size, seed);
}

}  // namespace tessera::data
