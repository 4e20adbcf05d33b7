// Index sources of several ranks: together they read what one would, in every division.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include <tessera/core/error.h>
#include <tessera/data/distributed_source.h>

namespace tessera::data::test_distributed_data {
namespace {

using Indices = std::vector<int64_t>;

std::shared_ptr<const Sampler> in_order(int64_t size) {
  return std::make_shared<SequentialSampler>(size);
}

// The batches of one rank from `position` to the end of the epoch.
std::vector<Indices> batches_of(const IndexSource& source, int64_t position = 0,
                                int64_t epoch = 0) {
  std::vector<Indices> batches;
  const int64_t expected = source.batches_after(position);
  while (const auto next = source.next_position(position)) {
    batches.push_back(source.batch(epoch, position));
    EXPECT_GT(*next, position);
    position = *next;
  }
  EXPECT_EQ(static_cast<int64_t>(batches.size()), expected);
  return batches;
}

std::vector<std::vector<Indices>> deal(int64_t size, int64_t batch_size, int world, Deal deal,
                                       Tail tail, int64_t position = 0) {
  std::vector<std::vector<Indices>> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.push_back(batches_of(
        DistributedBatchSource(in_order(size), batch_size, {rank, world, deal, tail}), position));
  }
  return ranks;
}

TEST(DistributedData, BatchesAreDealtRoundRobin) {
  EXPECT_EQ(deal(8, 2, 2, Deal::kBatches, Tail::kWrapAround),
            (std::vector<std::vector<Indices>>{{{0, 1}, {4, 5}}, {{2, 3}, {6, 7}}}));
}

TEST(DistributedData, SamplesAreDealtAsTorchDoes) {
  // torch: list(DistributedSampler(range(7), num_replicas=2, rank=r, shuffle=False)) is
  // [0, 2, 4, 6] and [1, 3, 5, 0].
  EXPECT_EQ(deal(7, 3, 2, Deal::kSamples, Tail::kWrapAround),
            (std::vector<std::vector<Indices>>{{{0, 2, 4}, {6}}, {{1, 3, 5}, {0}}}));
}

TEST(DistributedData, WrapAroundFillsEveryBatchWithTheFirstSamples) {
  EXPECT_EQ(deal(5, 2, 2, Deal::kBatches, Tail::kWrapAround),
            (std::vector<std::vector<Indices>>{{{0, 1}, {4, 0}}, {{2, 3}, {1, 2}}}));
  // Fewer samples than one global batch, more than once around.
  EXPECT_EQ(deal(2, 3, 2, Deal::kBatches, Tail::kWrapAround),
            (std::vector<std::vector<Indices>>{{{0, 1, 0}}, {{1, 0, 1}}}));
  EXPECT_EQ(deal(1, 2, 3, Deal::kSamples, Tail::kWrapAround),
            (std::vector<std::vector<Indices>>{{{0}}, {{0}}, {{0}}}));
}

TEST(DistributedData, UnevenGivesEverySampleOnce) {
  EXPECT_EQ(deal(5, 2, 2, Deal::kBatches, Tail::kUneven),
            (std::vector<std::vector<Indices>>{{{0, 1}, {4}}, {{2, 3}}}));
  EXPECT_EQ(deal(5, 2, 3, Deal::kSamples, Tail::kUneven),
            (std::vector<std::vector<Indices>>{{{0, 3}}, {{1, 4}}, {{2}}}));
}

TEST(DistributedData, DropLeavesOutAnUnfullGlobalBatch) {
  EXPECT_EQ(deal(7, 2, 2, Deal::kBatches, Tail::kDrop),
            (std::vector<std::vector<Indices>>{{{0, 1}}, {{2, 3}}}));
  EXPECT_EQ(deal(3, 2, 2, Deal::kSamples, Tail::kDrop),
            (std::vector<std::vector<Indices>>{{}, {}}));
}

TEST(DistributedData, AllDivisionsReadTheEpochAndKeepOneCursor) {
  for (const int64_t size : {0, 1, 7, 24, 25, 47}) {
    for (const int world : {1, 2, 3, 8}) {
      for (const int64_t batch_size : {1, 2, 5}) {
        for (const Deal by : {Deal::kBatches, Deal::kSamples}) {
          for (const Tail tail : {Tail::kWrapAround, Tail::kUneven, Tail::kDrop}) {
            SCOPED_TRACE(testing::Message()
                         << size << " samples, " << world << " ranks of " << batch_size << ", deal "
                         << static_cast<int>(by) << ", tail " << static_cast<int>(tail));
            std::map<int64_t, int> seen;
            std::vector<size_t> counts, samples;
            for (const auto& batches : deal(size, batch_size, world, by, tail)) {
              counts.push_back(batches.size());
              samples.push_back(0);
              for (const Indices& batch : batches) {
                ASSERT_FALSE(batch.empty());
                ASSERT_LE(static_cast<int64_t>(batch.size()), batch_size);
                samples.back() += batch.size();
                for (const int64_t index : batch) ++seen[index];
              }
            }
            const int64_t once = std::ranges::count_if(seen, [](auto& s) { return s.second == 1; });
            if (tail == Tail::kUneven) {
              EXPECT_EQ(once, size);
            } else {
              EXPECT_EQ(std::ranges::count(counts, counts[0]), world);
              EXPECT_EQ(std::ranges::count(samples, samples[0]), world);
            }
            if (tail == Tail::kWrapAround) {
              EXPECT_EQ(static_cast<int64_t>(seen.size()), size);
            }
            if (tail == Tail::kDrop) {
              EXPECT_EQ(once, size / (world * batch_size) * (world * batch_size));
            }
          }
        }
      }
    }
  }
}

TEST(DistributedData, ARunGoesOnWithAnotherNumberOfRanks) {
  const auto sampler = std::make_shared<RandomSampler>(50, 7);
  Indices order(50);
  sampler->indices(3, 0, order);
  Indices read;
  int64_t position = 0;
  const auto run = [&](int world, int64_t batch_size, int turns) {
    for (int turn = 0; turn < turns; ++turn) {
      std::optional<int64_t> next;
      for (int rank = 0; rank < world; ++rank) {
        const DistributedBatchSource source(sampler, batch_size,
                                            {rank, world, Deal::kBatches, Tail::kUneven});
        const Indices batch = source.batch(3, position);
        read.insert(read.end(), batch.begin(), batch.end());
        next = source.next_position(position).value_or(next.value_or(position));
      }
      position = *next;
    }
  };
  run(2, 4, 2), run(4, 3, 1), run(1, 6, 1), run(3, 2, 3);
  EXPECT_EQ(position, 50);
  EXPECT_EQ(read, order);  // in the order of one process
}

TEST(DistributedData, SkippingIsWalking) {
  const auto expect_walks = [](const IndexSource& source) {
    int64_t position = 0;
    const int64_t all = source.batches_after(0);
    for (int64_t batches = 0; batches <= all; ++batches) {
      EXPECT_EQ(source.position_after(0, batches), position);
      EXPECT_EQ(source.batches_after(position), all - batches);
      const auto next = source.next_position(position);
      ASSERT_EQ(next.has_value(), batches < all);
      if (!next) break;
      const auto rows = static_cast<int64_t>(source.batch(0, position).size());
      EXPECT_GE(source.valid(position), 0);
      EXPECT_LE(std::min(source.valid(position), rows), rows);
      position = *next;
    }
    EXPECT_EQ(source.position_after(0, all + 1), source.size());
    EXPECT_EQ(source.position_after(0, int64_t{1} << 62), source.size());
  };
  const auto list = std::make_shared<BatchList>(
      std::vector<Indices>{{0, 1, 2}, {3}, {4, 5}, {6, 7, 8}, {9}, {1}, {2}});
  for (const int64_t size : {0, 1, 7, 24, 25}) {
    for (const bool drop_last : {false, true})
      expect_walks(BatchSource(in_order(size), 3, drop_last));
    for (const int world : {1, 2, 3, 8}) {
      for (int rank = 0; rank < world; ++rank) {
        for (const Tail tail : {Tail::kWrapAround, Tail::kUneven, Tail::kDrop}) {
          for (const Deal by : {Deal::kBatches, Deal::kSamples}) {
            expect_walks(DistributedBatchSource(in_order(size), 3, {rank, world, by, tail}));
          }
          expect_walks(RoundRobinSource(std::make_shared<BatchSamplerSource>(list),
                                        {.rank = rank, .world_size = world, .tail = tail}));
        }
      }
    }
  }
}

TEST(DistributedData, RowsThatCountAreThoseThatWereNotReadBefore) {
  for (const int64_t size : {1, 2, 7, 24, 25}) {
    for (const int world : {2, 3}) {
      for (const Deal by : {Deal::kBatches, Deal::kSamples}) {
        std::map<int64_t, int> counted;
        for (int rank = 0; rank < world; ++rank) {
          const DistributedBatchSource source(in_order(size), 2,
                                              {rank, world, by, Tail::kWrapAround});
          for (int64_t position = 0; source.next_position(position);
               position = *source.next_position(position)) {
            const Indices batch = source.batch(0, position);
            for (size_t i = 0; i < batch.size(); ++i) {
              if (static_cast<int64_t>(i) < source.valid(position)) ++counted[batch[i]];
            }
          }
        }
        EXPECT_EQ(static_cast<int64_t>(counted.size()), size);
        for (const auto& [index, times] : counted) EXPECT_EQ(times, 1) << index;
      }
    }
  }
}

TEST(DistributedData, AWorldOfOneReadsWhatABatchSourceReads) {
  const auto sampler = std::make_shared<RandomSampler>(23, 1);
  for (const bool drop_last : {false, true}) {
    const BatchSource plain(sampler, 4, drop_last);
    const DistributedBatchSource one(plain, {.tail = Tail::kUneven});
    EXPECT_EQ(batches_of(one, 0, 2), batches_of(plain, 0, 2));
  }
}

TEST(DistributedData, ImpossibleSharesAreRefused) {
  EXPECT_THROW(DistributedBatchSource(nullptr, 1, {}), ValueError);
  EXPECT_THROW(DistributedBatchSource(in_order(3), 0, {}), ValueError);
  EXPECT_THROW(DistributedBatchSource(in_order(3), 1, {.rank = 2, .world_size = 2}), ValueError);
  EXPECT_THROW(DistributedBatchSource(in_order(3), 1, {.rank = -1, .world_size = 2}), ValueError);
  EXPECT_THROW(DistributedBatchSource(in_order(3), 1, {.rank = 0, .world_size = 0}), ValueError);
  EXPECT_EQ(DistributedBatchSource(in_order(3), 1, {.rank = 0, .world_size = 1}).batches_after(0),
            3);
  EXPECT_NO_THROW(DistributedBatchSource(in_order(3), 1, {.rank = 1, .world_size = 2}));
  EXPECT_THROW(RoundRobinSource(nullptr, {}), ValueError);
  EXPECT_THROW(RoundRobinSource(std::make_shared<BatchSource>(in_order(3), 1, false),
                                {.rank = 2, .world_size = 2}),
               ValueError);
  EXPECT_THROW(BatchSamplerSource(nullptr), ValueError);
}

}  // namespace
}  // namespace tessera::data::test_distributed_data
