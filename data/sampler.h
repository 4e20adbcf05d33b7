// Orders of a data set's examples, and how they are divided into batches.
//
// An order is a pure function of (seed, epoch, position) without state, so any position of any
// epoch is known at once, on any rank, after any restart.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace tessera::data {

class Sampler {
 public:
  virtual ~Sampler() = default;
  virtual int64_t size() const = 0;  // samples in an epoch
  // The example at `position` in [0, size()) of `epoch`. Called by several threads at once.
  virtual int64_t index(int64_t epoch, int64_t position) const = 0;
  // The examples at positions [begin, begin + out.size()), as index() but faster.
  virtual void indices(int64_t epoch, int64_t begin, std::span<int64_t> out) const;
};

// 0, 1, 2, ...
class SequentialSampler : public Sampler {
 public:
  explicit SequentialSampler(int64_t size);  // ValueError if negative
  int64_t size() const override { return size_; }
  int64_t index(int64_t epoch, int64_t position) const override;

 private:
  int64_t size_;
};

// A permutation of [0, size) without a table: O(1) time and memory for any size. A generalized
// Feistel network of 8 rounds (24 for sizes under 1024) over a grid of about sqrt(size) x
// sqrt(size) cells, with cycle walking over the few cells beyond `size` (J. Black, P. Rogaway,
// "Ciphers with Arbitrary Finite Domains", 2002).
//
class Permutation {
 public:
  Permutation(int64_t size, uint64_t seed, uint64_t stream);  // ValueError if size is negative
  int64_t size() const { return static_cast<int64_t>(size_); }
  int64_t operator[](int64_t position) const;  // position in [0, size)

 private:
  static constexpr int kMaxRounds = 24;
  uint64_t size_, rows_, columns_;  // size_ <= rows_ * columns_ < size_ + columns_
  int rounds_;
  uint64_t keys_[kMaxRounds];
};

// Every example once an epoch, in a different order each epoch.
class RandomSampler : public Sampler {
 public:
  RandomSampler(int64_t size, uint64_t seed);
  int64_t size() const override { return size_; }
  int64_t index(int64_t epoch, int64_t position) const override;
  void indices(int64_t epoch, int64_t begin, std::span<int64_t> out) const override;

 private:
  int64_t size_;
  uint64_t seed_;
};

// Draws with replacement, example i with a probability in proportion to weights[i]. O(log n).
class WeightedSampler : public Sampler {
 public:
  // `size`: samples in an epoch. ValueError for no weights, or a weight that is negative or not
  // finite, or if all are 0.
  WeightedSampler(std::span<const double> weights, int64_t size, uint64_t seed);
  int64_t size() const override { return size_; }
  int64_t index(int64_t epoch, int64_t position) const override;

 private:
  std::vector<double> cumulative_;
  int64_t size_;
  uint64_t seed_;
};

// Draws without replacement: each next example with a probability in proportion to its weight among
// those not drawn yet (P. Efraimidis, P. Spirakis, "Weighted random sampling with a reservoir",
// 2006). An epoch's first use costs O(n log n); the orders of the last two epochs are kept, 8 n
// bytes each.
class WeightedOrderSampler : public Sampler {
 public:
  // ValueError as WeightedSampler, and if `size` exceeds the number of weights that are not 0.
  WeightedOrderSampler(std::span<const double> weights, int64_t size, uint64_t seed);
  int64_t size() const override { return size_; }
  int64_t index(int64_t epoch, int64_t position) const override;
  void indices(int64_t epoch, int64_t begin, std::span<int64_t> out) const override;

 private:
  using Order = std::shared_ptr<const std::vector<int64_t>>;
  Order order_of(int64_t epoch) const;

  std::vector<double> weights_;
  int64_t size_;
  uint64_t seed_;
  struct Kept {
    int64_t epoch;
    Order order;
  };
  mutable std::mutex mutex_;
  mutable std::vector<Kept> kept_;  // the latest last
};

// The order that a loader reads: an epoch divided into batches. Positions count samples of the
// whole epoch, over all ranks, so a cursor (epoch, position) is valid for any world size and batch
// size. A source for one of several ranks returns its share of each global batch and advances by
// the global batch.
class IndexSource {
 public:
  virtual ~IndexSource() = default;
  virtual int64_t size() const = 0;  // samples in an epoch, over all ranks
  // Position after the batch that starts at `position`; nothing if the epoch has no further batch.
  virtual std::optional<int64_t> next_position(int64_t position) const = 0;
  // The examples of the batch that starts at `position`, for this reader. Called by several threads
  // at once.
  virtual std::vector<int64_t> batch(int64_t epoch, int64_t position) const = 0;
  // Batches from `position` to the end of the epoch.
  virtual int64_t batches_after(int64_t position) const = 0;
  // Position after the next `batches` batches, or the end of the epoch.
  virtual int64_t position_after(int64_t position, int64_t batches) const;
  // The first `valid` examples of the batch that starts at `position` count; the others were read
  // before and fill it up. Larger than the batch: all count.
  virtual int64_t valid(int64_t /*position*/) const { return kAllValid; }
  static constexpr int64_t kAllValid = std::numeric_limits<int64_t>::max();
  // The place in the epoch's order of row `row` of the batch that starts at `position`: a number
  // that no other example of the epoch has, the same for any world size. The example's random
  // numbers follow from it (example_place.h). A source for one of several ranks overrides it.
  virtual int64_t order_position(int64_t position, int64_t row) const { return position + row; }
  // The number of ranks that have a batch at `position`: the first ones.
  virtual int64_t ranks_at(int64_t /*position*/) const { return kAllRanks; }
  static constexpr int64_t kAllRanks = std::numeric_limits<int64_t>::max();
  // Samples that all ranks read for each batch; 0 if that varies.
  virtual int64_t global_batch_size() const { return 0; }
};

// Batches of one size. The last one is smaller, or dropped.
class BatchSource : public IndexSource {
 public:
  // ValueError if batch_size < 1.
  BatchSource(std::shared_ptr<const Sampler> sampler, int64_t batch_size, bool drop_last);
  int64_t size() const override { return sampler_->size(); }
  std::optional<int64_t> next_position(int64_t position) const override;
  std::vector<int64_t> batch(int64_t epoch, int64_t position) const override;
  int64_t batches_after(int64_t position) const override;
  int64_t position_after(int64_t position, int64_t batches) const override;
  int64_t global_batch_size() const override { return batch_size_; }

  const std::shared_ptr<const Sampler>& sampler() const { return sampler_; }
  int64_t batch_size() const { return batch_size_; }
  bool drop_last() const { return drop_last_; }

 private:
  std::shared_ptr<const Sampler> sampler_;
  int64_t batch_size_;
  bool drop_last_;
};

// Batches of any sizes, in their own order: lengths sorted into buckets, or a number of tokens
// instead of a number of examples.
class BatchSampler {
 public:
  virtual ~BatchSampler() = default;
  virtual int64_t size() const = 0;  // batches in an epoch
  // The examples of batch `number` in [0, size()). Called by several threads at once.
  virtual std::vector<int64_t> batch(int64_t epoch, int64_t number) const = 0;
};

// The same batches in every epoch.
class BatchList : public BatchSampler {
 public:
  explicit BatchList(std::vector<std::vector<int64_t>> batches) : batches_(std::move(batches)) {}
  int64_t size() const override { return static_cast<int64_t>(batches_.size()); }
  std::vector<int64_t> batch(int64_t epoch, int64_t number) const override;  // IndexError

 private:
  std::vector<std::vector<int64_t>> batches_;
};

// What a BatchSampler says. Positions and size() count batches.
class BatchSamplerSource : public IndexSource {
 public:
  explicit BatchSamplerSource(std::shared_ptr<const BatchSampler> sampler);  // ValueError for null
  int64_t size() const override { return sampler_->size(); }
  std::optional<int64_t> next_position(int64_t position) const override;
  std::vector<int64_t> batch(int64_t epoch, int64_t position) const override;
  int64_t batches_after(int64_t position) const override;
  int64_t position_after(int64_t position, int64_t batches) const override;
  // Rows of a batch come after its number: batches may be of any size up to 2^24.
  int64_t order_position(int64_t position, int64_t row) const override {
    return (position << 24) + row;
  }

  const std::shared_ptr<const BatchSampler>& sampler() const { return sampler_; }

 private:
  std::shared_ptr<const BatchSampler> sampler_;
};

}  // namespace tessera::data
