// One rank's share of the batches of an epoch.
//
//     data::DataLoader loader(dataset, {.batch_size = 8, .shuffle = true});
//     loader.set_source(std::make_shared<data::DistributedBatchSource>(
//         std::make_shared<data::RandomSampler>(dataset.size(), seed), 8,
//         data::RankShare{.rank = 0, .world_size = 2}));
//
// For each batch all ranks together read a global batch: world_size * batch_size positions of the
// sampler's order. The cursor is the number of samples that all ranks have read, so a run may
// resume with another world size or batch size: the next global batch begins there.
//
// Every rank has its own source with the same sampler (same size, same seed) and no communication.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <tessera/data/sampler.h>

namespace tessera::data {

// Which rank gets which positions of a global batch [p, p + world_size * batch_size).
enum class Deal : uint8_t {
  kBatches,  // round robin of whole batches: rank r reads p + r * batch_size and what follows
  kSamples,  // round robin of samples: rank r reads p + r, p + r + world_size... (torch's order)
};

// How a last global batch that is not full is handled.
enum class Tail : uint8_t {
  // Filled up with the first samples of the epoch, so that all ranks have equally many: kBatches
  // fills every batch, kSamples only up to a multiple of world_size, as torch does. Some samples
  // count twice.
  kWrapAround,
  // Every sample once: the last batches differ in size, and a rank may have one batch less than
  // another. Collectives then need join (or dropping the last batch).
  kUneven,
  kDrop,  // dropped on all ranks
};

struct RankShare {
  int rank = 0;
  int world_size = 1;
  Deal deal = Deal::kBatches;
  Tail tail = Tail::kWrapAround;
};

class DistributedBatchSource : public IndexSource {
 public:
  // batch_size is that of one rank. ValueError for a missing sampler, a batch size below 1 or a
  // rank outside the world.
  DistributedBatchSource(std::shared_ptr<const Sampler> sampler, int64_t batch_size,
                         const RankShare& share);
  // Takes sampler and batch size (of one rank) from a source for one process, and Tail::kDrop if it
  // drops its last batch.
  DistributedBatchSource(const BatchSource& source, RankShare share);

  int64_t size() const override { return sampler_->size(); }
  std::optional<int64_t> next_position(int64_t position) const override;
  std::vector<int64_t> batch(int64_t epoch, int64_t position) const override;
  int64_t batches_after(int64_t position) const override;
  int64_t position_after(int64_t position, int64_t batches) const override;
  int64_t valid(int64_t position) const override;
  int64_t ranks_at(int64_t position) const override;
  int64_t order_position(int64_t position, int64_t row) const override;
  int64_t global_batch_size() const override { return batch_size_ * share_.world_size; }

  const std::shared_ptr<const Sampler>& sampler() const { return sampler_; }
  const RankShare& share() const { return share_; }
  int64_t batch_size() const { return batch_size_; }

 private:
  int64_t count_at(int64_t position) const;  // samples of this rank in the global batch there

  std::shared_ptr<const Sampler> sampler_;
  int64_t batch_size_;
  RankShare share_;
};

// Distributes whole batches of another source: rank r reads batches r, r + world_size..., as needed
// for a batch sampler's batches of different sizes. kWrapAround completes the last batches with
// copies of the epoch's first ones, whose samples do not count. share.deal is ignored.
class RoundRobinSource : public IndexSource {
 public:
  // ValueError for a missing source or a rank outside the world.
  RoundRobinSource(std::shared_ptr<const IndexSource> batches, const RankShare& share);

  int64_t size() const override { return batches_->size(); }
  std::optional<int64_t> next_position(int64_t position) const override;
  std::vector<int64_t> batch(int64_t epoch, int64_t position) const override;
  int64_t batches_after(int64_t position) const override;
  int64_t position_after(int64_t position, int64_t batches) const override;
  int64_t valid(int64_t position) const override;
  int64_t ranks_at(int64_t position) const override;
  int64_t order_position(int64_t position, int64_t row) const override;

  const std::shared_ptr<const IndexSource>& batches() const { return batches_; }
  const RankShare& share() const { return share_; }

 private:
  int64_t in_turn(int64_t position) const;    // batches of the turn that starts there
  int64_t own_batch(int64_t position) const;  // where this rank's batch of it starts

  std::shared_ptr<const IndexSource> batches_;
  RankShare share_;
};

}  // namespace tessera::data
