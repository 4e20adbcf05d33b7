// Orders: permutations without a table, samplers, weights.
// ctest labels: threads
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/data/sampler.h>

#include "data/number_data.h"

namespace tessera::data::test_samplers {
namespace {

TEST(Permutations, VisitEveryPositionOnceForEverySize) {
  for (const int64_t size : {0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 63, 64, 65, 100, 1000, 12345}) {
    for (const uint64_t seed : {0u, 1u, 99u}) {
      const Permutation permutation(size, seed, 3);
      std::vector<int64_t> seen;
      for (int64_t i = 0; i < size; ++i) seen.push_back(permutation[i]);
      std::sort(seen.begin(), seen.end());
      EXPECT_EQ(seen, range(size)) << "size " << size << " seed " << seed;
    }
  }
}

TEST(Permutations, OfHugeSizesNeedNoTable) {
  const int64_t size = int64_t{1} << 62;
  const Permutation permutation(size, 7, 0);
  std::set<int64_t> seen;
  for (int64_t i = 0; i < 1000; ++i) {
    const int64_t value = permutation[size - 1 - i];
    EXPECT_TRUE(value >= 0 && value < size);
    seen.insert(value);
  }
  EXPECT_EQ(seen.size(), 1000u);
  EXPECT_THROW(permutation[size], IndexError);
  EXPECT_THROW(permutation[-1], IndexError);
  EXPECT_THROW(Permutation(-1, 0, 0), ValueError);
}

// Over many seeds each value must come to each position equally often, and each ordered pair to the
// first two positions. Chi-square with n - 1 degrees of freedom stays below n + 6 sqrt(2 n) for all
// but about one case in a billion.
TEST(Permutations, AreUniform) {
  for (const int64_t size : {2, 3, 5, 6, 10, 23}) {
    const int trials = 20'000;
    std::vector<double> position_of_0(static_cast<size_t>(size)),
        pairs(static_cast<size_t>(size * size));
    for (int trial = 0; trial < trials; ++trial) {
      const Permutation permutation(size, static_cast<uint64_t>(trial), 1);
      const int64_t first = permutation[0], second = permutation[1];
      ++pairs[static_cast<size_t>(first * size + second)];
      for (int64_t i = 0; i < size; ++i) {
        if (permutation[i] == 0) ++position_of_0[static_cast<size_t>(i)];
      }
    }
    const auto chi_square = [](const std::vector<double>& counts, double expected, bool diagonal,
                               int64_t size) {
      double sum = 0;
      for (size_t i = 0; i < counts.size(); ++i) {
        if (diagonal && static_cast<int64_t>(i) % (size + 1) == 0) continue;
        sum += (counts[i] - expected) * (counts[i] - expected) / expected;
      }
      return sum;
    };
    const auto limit = [](double cells) { return cells + 6 * std::sqrt(2 * cells); };
    EXPECT_LT(chi_square(position_of_0, trials / static_cast<double>(size), false, size),
              limit(static_cast<double>(size)))
        << size;
    const auto cells = static_cast<double>(size * (size - 1));
    EXPECT_LT(chi_square(pairs, trials / cells, true, size), limit(cells)) << size;
  }
}

TEST(Samplers, TheRandomOrderIsAFunctionOfSeedAndEpoch) {
  const auto order = [](uint64_t seed, int64_t epoch) {
    const RandomSampler sampler(50, seed);
    std::vector<int64_t> out;
    for (int64_t i = 0; i < 50; ++i) out.push_back(sampler.index(epoch, i));
    return out;
  };
  EXPECT_EQ(order(1, 0), order(1, 0));
  EXPECT_NE(order(1, 0), order(1, 1));
  EXPECT_NE(order(1, 0), order(2, 0));
  EXPECT_NE(order(1, 0), range(50));
  EXPECT_THROW(RandomSampler(50, 0).index(0, 50), IndexError);
  EXPECT_THROW(SequentialSampler(50).index(0, -1), IndexError);
}

TEST(Samplers, WeightsAreProportions) {
  const std::vector<double> weights = {0, 1, 0, 3, 0};
  const WeightedSampler sampler(weights, 40'000, 5);
  std::map<int64_t, int> counts;
  for (int64_t i = 0; i < sampler.size(); ++i) ++counts[sampler.index(0, i)];
  EXPECT_EQ(counts.size(), 2u);
  // Binomial: 10000 with a standard deviation of 87.
  EXPECT_NEAR(counts[1], 10'000, 5 * 87);
  std::vector<int64_t> first(50), second(50);
  sampler.indices(0, 0, first);
  sampler.indices(1, 0, second);
  EXPECT_NE(first, second);
  EXPECT_THROW(WeightedSampler({}, 1, 0), ValueError);
  EXPECT_THROW(WeightedSampler(std::vector<double>{0, 0}, 1, 0), ValueError);
  EXPECT_THROW(WeightedSampler(std::vector<double>{1, -1}, 1, 0), ValueError);
  EXPECT_THROW(WeightedSampler(std::vector<double>{1, NAN}, 1, 0), ValueError);
  EXPECT_THROW(WeightedSampler(std::vector<double>{INFINITY}, 1, 0), ValueError);
}

TEST(Samplers, WeightsWithoutReplacementDrawTheRestInProportion) {
  const std::vector<double> weights = {1, 0, 2, 3};
  const WeightedOrderSampler sampler(weights, 3, 5);
  constexpr int kEpochs = 3000;
  std::map<std::vector<int64_t>, int> counts;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    std::vector<int64_t> order(3);
    sampler.indices(epoch, 0, order);
    EXPECT_EQ(sampler.index(epoch, 2), order[2]);
    ++counts[order];
  }
  EXPECT_EQ(counts.size(), 6u);  // the permutations of {0, 2, 3}
  // 3 of 6 and then 2 of 3: binomial with p = 1/3, a standard deviation of 26.
  EXPECT_NEAR((counts[{3, 2, 0}]), kEpochs / 3, 5 * 26);
  // 1 of 6 and then 2 of 5: p = 1/15, 14.
  EXPECT_NEAR((counts[{0, 2, 3}]), kEpochs / 15, 5 * 14);

  const std::vector<double> many(1000, 0.5);
  const WeightedOrderSampler a(many, 10, 7), b(many, 10, 7);
  for (const int64_t epoch : {3, 0, 2, 3}) {  // in any order of epochs
    EXPECT_EQ(a.index(epoch, 9), b.index(epoch, 9));
  }
  EXPECT_THROW(sampler.index(0, 3), IndexError);
  EXPECT_THROW(WeightedOrderSampler(weights, 4, 0), ValueError);
  EXPECT_THROW(WeightedOrderSampler(std::vector<double>{1, NAN}, 1, 0), ValueError);
}

// Threads that ask for orders of different epochs drop each other's: little to sort, so that they
// meet at the list of orders rather than in sorting.
TEST(Samplers, WorkersShareWeightedOrders) {
  const std::vector<double> weights = {1, 2, 3};
  constexpr int kThreads = 4, kEpochs = 7, kTurns = 30'000;
  const WeightedOrderSampler shared(weights, 3, 5), alone(weights, 3, 5);
  std::vector<int64_t> expected;
  for (int epoch = 0; epoch < kEpochs; ++epoch) expected.push_back(alone.index(epoch, 2));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < kTurns; ++i) {
        const int epoch = (i + thread) % kEpochs;
        wrong += shared.index(epoch, 2) != expected[static_cast<size_t>(epoch)];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// Every bound: on it there is an order, beside it an error.
TEST(Samplers, SizesWeightsAndPositionsReachToTheirBoundsAndNoFurther) {
  const std::vector<double> weights = {0, 1, 0.5};
  const auto nothing = [](const Sampler& sampler) {
    EXPECT_EQ(sampler.size(), 0);
    EXPECT_THROW(sampler.index(0, 0), IndexError);
  };
  nothing(SequentialSampler(0));
  nothing(RandomSampler(0, 1));
  nothing(WeightedSampler(weights, 0, 1));
  nothing(WeightedOrderSampler(weights, 0, 1));
  EXPECT_THROW(SequentialSampler(-1), ValueError);
  EXPECT_THROW(RandomSampler(-1, 1), ValueError);
  EXPECT_THROW(WeightedSampler(weights, -1, 1), ValueError);
  EXPECT_THROW(WeightedOrderSampler(weights, -1, 1), ValueError);
  const auto two = [](const Sampler& sampler) {
    for (const int64_t beside : {-1, 2}) EXPECT_THROW(sampler.index(0, beside), IndexError);
    for (const int64_t within : {0, 1}) {
      EXPECT_GE(sampler.index(0, within), 0);
      EXPECT_LT(sampler.index(0, within), 3);
    }
  };
  two(SequentialSampler(2));
  two(RandomSampler(2, 1));
  two(WeightedSampler(weights, 2, 1));
  two(WeightedOrderSampler(weights, 2, 1));  // both that can be drawn
  EXPECT_THROW(WeightedOrderSampler(weights, 3, 1), ValueError);
  const double least = std::numeric_limits<double>::denorm_min();
  const double most = std::numeric_limits<double>::max();
  for (const std::vector<double>& refused :
       {std::vector<double>{}, {0}, {1, -least}, {most, most}, {1, INFINITY}, {NAN, 1}}) {
    EXPECT_THROW(WeightedSampler(refused, 1, 1), ValueError);
    EXPECT_THROW(WeightedOrderSampler(refused, 1, 1), ValueError);
  }
  for (const std::vector<double>& accepted : {std::vector<double>{0, 1}, {0, least}, {0, most}}) {
    EXPECT_EQ(WeightedSampler(accepted, 1, 1).index(0, 0), 1);
    EXPECT_EQ(WeightedOrderSampler(accepted, 1, 1).index(0, 0), 1);
  }
  const auto sampler = std::make_shared<SequentialSampler>(3);
  EXPECT_THROW(BatchSource(nullptr, 1, false), ValueError);
  for (const int64_t refused : {-1, 0}) {
    EXPECT_THROW(BatchSource(sampler, refused, false), ValueError);
  }
  EXPECT_EQ(BatchSource(sampler, 1, false).batches_after(0), 3);
  EXPECT_EQ(BatchSource(sampler, 3, true).batches_after(0), 1);
  EXPECT_EQ(BatchSource(sampler, 4, true).batches_after(0), 0);
  EXPECT_EQ(BatchSource(sampler, 4, false).batches_after(0), 1);
  EXPECT_EQ(BatchSource(sampler, 3, true).next_position(0), 3);
  EXPECT_EQ(BatchSource(sampler, 4, true).next_position(0), std::nullopt);
  EXPECT_EQ(BatchSource(sampler, 4, false).next_position(0), 3);
  EXPECT_EQ(BatchSource(sampler, 4, false).next_position(3), std::nullopt);
  EXPECT_EQ(BatchSource(sampler, 3, true).batch(0, 0), range(3));
  EXPECT_EQ(BatchSource(sampler, 2, true).position_after(0, 1), 2) << "behind the last whole one";
  EXPECT_EQ(BatchSource(sampler, 2, true).position_after(0, 2), 3) << "the end";
  EXPECT_EQ(BatchSource(sampler, 1, false).batches_after(2), 1);
  EXPECT_EQ(BatchSource(sampler, 1, false).batches_after(3), 0);
}

}  // namespace
}  // namespace tessera::data::test_samplers
