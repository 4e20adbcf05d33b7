// Data sets, samplers, collation, loaders, windows of tokens; tokenizers in several threads.
// ctest labels: threads
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/allocator.h>
#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/parallel.h>
#include <tessera/core/random.h>
#include <tessera/data/bpe.h>
#include <tessera/data/dataloader.h>
#include <tessera/data/shuffle_buffer.h>
#include <tessera/data/text.h>
#include <tessera/data/token_dataset.h>
#include <tessera/data/wordpiece.h>

namespace tessera::data {
namespace {

// Example i is i.
class Numbers : public Dataset<int64_t> {
 public:
  explicit Numbers(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  int64_t get(int64_t index) const override { return index; }

 private:
  int64_t size_;
};

std::vector<int64_t> values_of(const Tensor& batch) { return batch.to_vector<int64_t>(); }

template <class Loader>
std::vector<std::vector<int64_t>> epoch_of(Loader& loader) {
  std::vector<std::vector<int64_t>> batches;
  for (Tensor& batch : loader) batches.push_back(values_of(batch));
  return batches;
}

std::vector<int64_t> flatten(const std::vector<std::vector<int64_t>>& batches) {
  std::vector<int64_t> all;
  for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

std::vector<int64_t> range(int64_t count) {
  std::vector<int64_t> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// ---- Orders -------------------------------------------------------------------------------------

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

// ---- Data sets and collation --------------------------------------------------------------------

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

TEST(Datasets, TensorRowsAreExamplesAndBatchesStackThem) {
  const Tensor x = tensor({0, 1, 2, 3, 4, 5}, kF32);
  const Tensor rows = raw::view(x, {3, 2});
  const Tensor columns = raw::transpose(raw::view(x, {2, 3}), 0, 1);  // not contiguous
  const TensorDataset dataset(rows, columns);
  EXPECT_EQ(dataset.size(), 3);
  DataLoader loader(dataset, {.batch_size = 2});
  EXPECT_EQ(loader.size(), 2);
  int batches = 0;
  for (auto& [a, b] : loader) {
    if (batches++ == 0) {
      EXPECT_EQ(a.shape(), (Shape{2, 2}));
      EXPECT_EQ(values_of(a), (std::vector<int64_t>{0, 1, 2, 3}));
      EXPECT_EQ(values_of(b), (std::vector<int64_t>{0, 3, 1, 4}));
    } else {
      EXPECT_EQ(values_of(a), (std::vector<int64_t>{4, 5}));
      EXPECT_EQ(values_of(b), (std::vector<int64_t>{2, 5}));
    }
  }
  EXPECT_EQ(batches, 2);
  EXPECT_THROW(dataset.get(3), IndexError);
  EXPECT_THROW((TensorDataset(rows, x)), ShapeError);
}

TEST(Datasets, CombinatorsComposeAndCheckIndices) {
  const auto ten = std::make_shared<Numbers>(10);
  const DatasetPtr<int64_t> odd =
      std::make_shared<Subset<int64_t>>(ten, std::vector<int64_t>{1, 3, 5, 7, 9});
  const ConcatDataset<int64_t> both({odd, ten, std::make_shared<Numbers>(0), odd});
  EXPECT_EQ(both.size(), 20);
  EXPECT_EQ(both.get(4), 9);
  EXPECT_EQ(both.get(5), 0);
  EXPECT_EQ(both.get(19), 9);
  EXPECT_THROW(both.get(20), IndexError);
  EXPECT_THROW(both.get(-1), IndexError);
  EXPECT_THROW(Subset<int64_t>(ten, {10}), IndexError);
  const auto squares = map(ten, [](int64_t i) { return static_cast<double>(i * i); });
  EXPECT_EQ(squares->get(3), 9.0);
  EXPECT_EQ(ConcatDataset<int64_t>({}).size(), 0);
}

TEST(Datasets, RandomSplitsAreDisjointAndComplete) {
  const auto numbers = std::make_shared<Numbers>(100);
  const auto parts = random_split(numbers, {80, 15, 5}, 3);
  std::vector<int64_t> all;
  for (const auto& part : parts) {
    for (int64_t i = 0; i < part->size(); ++i) all.push_back(part->get(i));
  }
  EXPECT_NE(all, range(100));
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, range(100));
  EXPECT_EQ(random_split(numbers, {50, 50}, 3)[0]->get(0), parts[0]->get(0));
  EXPECT_THROW(random_split(numbers, {50, 49}, 3), ValueError);
  EXPECT_THROW(random_split(numbers, {50, 51}, 3), ValueError);
  EXPECT_THROW(random_split(numbers, {101, -1}, 3), ValueError);
}

struct Inner {
  Tensor a, b;
  void visit_tensors(auto&& visit) { visit(a), visit(b); }
};
struct Outer {
  Tensor x;
  Inner inner;
  void visit_tensors(auto&& visit) { visit(x), visit(inner); }
};
struct Sentence {
  std::vector<int64_t> ids;
};

}  // namespace

// Padding is a rule of the type's own.
template <>
struct Collate<Sentence> {
  static Tensor batch(std::span<Sentence> examples) {
    size_t longest = 0;
    for (const Sentence& sentence : examples) longest = std::max(longest, sentence.ids.size());
    std::vector<int64_t> ids;
    for (const Sentence& sentence : examples) {
      ids.insert(ids.end(), sentence.ids.begin(), sentence.ids.end());
      ids.resize(ids.size() + longest - sentence.ids.size(), -1);
    }
    return tensor(std::span<const int64_t>(ids),
                  {static_cast<int64_t>(examples.size()), static_cast<int64_t>(longest)});
  }
};

namespace {

TEST(Collation, GoesThroughNestedStructsTuplesNumbersAndStrings) {
  std::vector<Outer> structs;
  for (int i = 0; i < 3; ++i) {
    structs.push_back(
        {scalar_tensor(i, kI64), {scalar_tensor(10 + i, kI64), scalar_tensor(20 + i, kI64)}});
  }
  const Outer batch = collate(std::span<Outer>(structs));
  EXPECT_EQ(values_of(batch.x), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(values_of(batch.inner.a), (std::vector<int64_t>{10, 11, 12}));
  EXPECT_EQ(values_of(batch.inner.b), (std::vector<int64_t>{20, 21, 22}));

  using Row = std::tuple<Tensor, int64_t, std::string, std::pair<float, bool>>;
  std::vector<Row> rows = {{scalar_tensor(1, kF32), 2, "a", {0.5f, true}},
                           {scalar_tensor(3, kF32), 4, "b", {1.5f, false}}};
  const auto [tensors, integers, strings, pairs] = collate(std::span<Row>(rows));
  EXPECT_EQ(tensors.shape(), (Shape{2}));
  EXPECT_EQ(values_of(integers), (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(strings, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(pairs.first.to_vector<double>(), (std::vector<double>{0.5, 1.5}));
  EXPECT_EQ(pairs.second.dtype(), kBool);

  std::vector<Sentence> sentences = {{{1, 2, 3}}, {{4}}};
  EXPECT_EQ(values_of(collate(std::span<Sentence>(sentences))),
            (std::vector<int64_t>{1, 2, 3, 4, -1, -1}));
}

TEST(Collation, NamesTheExampleThatDoesNotFit) {
  std::vector<Tensor> shapes = {raw::zeros({2}, kF32), raw::zeros({2}, kF32),
                                raw::zeros({3}, kF32)};
  try {
    stack_examples(shapes);
    FAIL();
  } catch (const ShapeError& error) {
    EXPECT_NE(std::string(error.what()).find("number 2 is f32[3] cpu"), std::string::npos)
        << error.what();
  }
  const std::vector<Tensor> dtypes = {raw::zeros({2}, kF32), raw::zeros({2}, kF64)};
  EXPECT_THROW(stack_examples(dtypes), DTypeError);
  const std::vector<Tensor> devices = {raw::empty({2}, kF32, kMeta)};
  EXPECT_THROW(stack_examples(devices), DeviceError);
  EXPECT_THROW(stack_examples({}), ValueError);
}

// ---- Loaders ------------------------------------------------------------------------------------

TEST(Loaders, GiveTheSameBatchesForAnyNumberOfWorkers) {
  const Numbers numbers(103);
  for (const bool shuffle : {false, true}) {
    std::vector<std::vector<std::vector<int64_t>>> expected;
    for (const int workers : {0, 1, 2, 5}) {
      DataLoader loader(
          numbers,
          {.batch_size = 4, .shuffle = shuffle, .seed = 9, .workers = workers, .prefetch = 3});
      std::vector<std::vector<std::vector<int64_t>>> epochs = {epoch_of(loader), epoch_of(loader)};
      EXPECT_EQ(epochs[0].size(), 26u);
      EXPECT_EQ(epochs[0].back().size(), 3u);
      std::vector<int64_t> all = flatten(epochs[1]);
      EXPECT_EQ(all == range(103), !shuffle);
      EXPECT_EQ(epochs[0] == epochs[1], !shuffle);
      std::sort(all.begin(), all.end());
      EXPECT_EQ(all, range(103));
      if (expected.empty()) expected = epochs;
      EXPECT_EQ(epochs, expected) << workers << " workers";
      EXPECT_EQ(loader.cursor(), (LoaderCursor{2, 0}));
    }
  }
}

TEST(Loaders, DropTheLastBatchWhereAsked) {
  const Numbers numbers(10);
  DataLoader loader(numbers, {.batch_size = 4, .drop_last = true, .workers = 2});
  EXPECT_EQ(loader.size(), 2);
  EXPECT_EQ(epoch_of(loader), (std::vector<std::vector<int64_t>>{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(epoch_of(loader).size(), 2u);
}

TEST(Loaders, ResumeAtAnyBatchExactly) {
  const Numbers numbers(50);
  const DataLoaderOptions options = {.batch_size = 4, .shuffle = true, .seed = 3, .workers = 2};
  DataLoader whole(numbers, options);
  std::vector<std::vector<int64_t>> expected;
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (auto& batch : epoch_of(whole)) expected.push_back(std::move(batch));
  }
  for (size_t stop = 0; stop <= expected.size(); ++stop) {
    DataLoader first(numbers, options);
    std::vector<std::vector<int64_t>> got;
    while (got.size() < stop) {
      if (std::optional<Tensor> batch = first.next()) got.push_back(values_of(*batch));
    }
    const StateDict state = first.state_dict();
    DataLoader second(numbers, options);
    second.load_state_dict(state);
    // The state of an epoch's last batch is the next epoch's start.
    const LoaderCursor at = first.cursor();
    EXPECT_EQ(second.cursor(), at.position == 50 ? (LoaderCursor{at.epoch + 1, 0}) : at);
    while (second.cursor().epoch < 3) {
      for (auto& batch : epoch_of(second)) got.push_back(std::move(batch));
    }
    EXPECT_EQ(got, expected) << "stopped after " << stop << " batches";
  }
}

TEST(Loaders, ResumeWithAnotherBatchSizeGoesOnAtTheSameSample) {
  const Numbers numbers(20);
  DataLoader first(numbers, {.batch_size = 4, .shuffle = true});
  std::vector<int64_t> all = values_of(*first.next());
  DataLoader second(numbers, {.batch_size = 5, .shuffle = true});
  second.set_cursor(first.cursor());
  for (const int64_t value : flatten(epoch_of(second))) all.push_back(value);
  DataLoader whole(numbers, {.batch_size = 20, .shuffle = true});
  EXPECT_EQ(all, values_of(*whole.next()));
}

TEST(Loaders, ALoopLeftEarlyGivesUpItsEpoch) {
  const Numbers numbers(100);
  DataLoader loader(numbers, {.batch_size = 10, .workers = 3});
  for (Tensor& batch : loader) {
    EXPECT_EQ(values_of(batch)[0], 0);
    EXPECT_EQ(loader.cursor(), (LoaderCursor{0, 10})) << "the batch in hand counts";
    break;
  }
  EXPECT_EQ(flatten(epoch_of(loader)), range(100)) << "the next loop is the next epoch";
  EXPECT_EQ(loader.cursor(), (LoaderCursor{2, 0}));
  loader.set_cursor({4, 90});
  EXPECT_EQ(epoch_of(loader),
            (std::vector<std::vector<int64_t>>{{90, 91, 92, 93, 94, 95, 96, 97, 98, 99}}));
  loader.set_cursor({4, 100});
  EXPECT_TRUE(epoch_of(loader).empty()) << "an epoch that was finished gives no batch again";
  EXPECT_EQ(loader.cursor(), (LoaderCursor{5, 0}));
}

TEST(Loaders, NextCrossesEpochs) {
  const Numbers numbers(3);
  DataLoader loader(numbers, {.batch_size = 2});
  EXPECT_EQ(values_of(*loader.next()), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(values_of(*loader.next()), (std::vector<int64_t>{2}));
  EXPECT_FALSE(loader.next().has_value());
  EXPECT_EQ(values_of(*loader.next()), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(loader.cursor(), (LoaderCursor{1, 2}));
}

TEST(Loaders, EmptyDataGivesNoBatches) {
  const Numbers none(0);
  for (const int workers : {0, 4}) {
    DataLoader loader(none, {.batch_size = 4, .shuffle = true, .workers = workers});
    EXPECT_EQ(loader.size(), 0);
    EXPECT_TRUE(epoch_of(loader).empty());
    EXPECT_FALSE(loader.next().has_value());
    EXPECT_EQ(loader.cursor().epoch, 2);
  }
}

TEST(Loaders, MoreWorkersThanSamplesAreFine) {
  const Numbers two(2);
  DataLoader loader(two, {.batch_size = 8, .workers = 64});
  EXPECT_EQ(epoch_of(loader), (std::vector<std::vector<int64_t>>{{0, 1}}));
}

TEST(Loaders, OptionsOutOfRangeAreValueErrors) {
  const Numbers numbers(2);
  using Loader = DataLoader<int64_t>;
  EXPECT_THROW(Loader(numbers, {.batch_size = 0}), ValueError);
  EXPECT_THROW(Loader(numbers, {.batch_size = -1}), ValueError);
  EXPECT_THROW(Loader(numbers, {.workers = -1}), ValueError);
  EXPECT_THROW(Loader(numbers, {.workers = 1, .prefetch = 0}), ValueError);
  EXPECT_THROW(Loader(numbers, {.workers = 1025}), ValueError);
  EXPECT_THROW(Loader(numbers, {.prefetch = 1'000'001}), ValueError);
  EXPECT_NO_THROW(Loader(numbers, {.workers = 1024, .prefetch = 1'000'000}));
  EXPECT_NO_THROW(Loader(numbers, {.batch_size = 1, .workers = 1, .prefetch = 1}));
  Loader loader(numbers);
  EXPECT_THROW(loader.set_cursor({-1, 0}), ValueError);
  EXPECT_THROW(loader.set_cursor({0, 3}), ValueError);
  EXPECT_THROW(loader.set_source(nullptr), ValueError);
}

TEST(Loaders, AStateOfOtherDataOrSeedIsRefused) {
  const Numbers ten(10), eleven(11);
  DataLoader a(ten, {.shuffle = true, .seed = 1}), b(eleven, {.shuffle = true, .seed = 1}),
      c(ten, {.shuffle = true, .seed = 2});
  EXPECT_THROW(b.load_state_dict(a.state_dict()), ConfigError);
  EXPECT_THROW(c.load_state_dict(a.state_dict()), ConfigError);
  EXPECT_THROW(a.load_state_dict(StateDict()), ValueError);
}

class Failing : public Numbers {
 public:
  using Numbers::Numbers;
  int64_t get(int64_t index) const override {
    if (index == 17 && broken) throw FormatError("parse: line 3 is broken");
    if (index == 33) throw std::runtime_error("cable");
    if (index == 41) throw 7;
    return index;
  }
  std::atomic<bool> broken{true};
};

TEST(Loaders, AnErrorComesInItsTurnWithTheExamplesIndex) {
  for (const int workers : {0, 1, 4}) {
    Failing numbers(100);
    DataLoader loader(numbers, {.batch_size = 5, .workers = workers});
    int64_t batches = 0;
    try {
      for (Tensor& batch : loader) batches += batch.size(0) == 5;
      FAIL() << "no error";
    } catch (const FormatError& error) {
      EXPECT_STREQ(error.what(), "DataLoader: example 17 of epoch 0: parse: line 3 is broken");
    }
    EXPECT_EQ(batches, 3) << workers;
    EXPECT_EQ(loader.cursor(), (LoaderCursor{0, 15}));
    EXPECT_THROW(loader.next(), FormatError) << "it is tried again";
    numbers.broken = false;
    EXPECT_EQ(values_of(*loader.next()), (std::vector<int64_t>{15, 16, 17, 18, 19}));
    loader.set_cursor({0, 30});
    try {
      loader.next();
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "DataLoader: example 33 of epoch 0: cable");
      EXPECT_THROW(std::rethrow_if_nested(error), std::runtime_error);
    }
    loader.set_cursor({0, 40});
    EXPECT_THROW(loader.next(), Error);
  }
}

// Counts how many examples were asked for at most ahead of the consumer.
class Counting : public Numbers {
 public:
  using Numbers::Numbers;
  int64_t get(int64_t index) const override {
    ++calls;
    return index;
  }
  mutable std::atomic<int64_t> calls{0};
};

TEST(Loaders, WorkersDoNotRunFurtherAheadThanAsked) {
  const Counting numbers(1000);
  DataLoader loader(numbers, {.batch_size = 1, .workers = 2, .prefetch = 3});
  int64_t consumed = 0;
  for (Tensor& batch : loader) {
    (void)batch;
    ++consumed;
    if (consumed % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_LE(numbers.calls, consumed + 6);
  }
  EXPECT_EQ(consumed, 1000);
  EXPECT_EQ(numbers.calls, 1000);
}

class Allocating : public Dataset<Tensor> {
 public:
  int64_t size() const override { return 64; }
  Tensor get(int64_t) const override {
    stats = memory_stats().get();
    threads = num_threads();
    return raw::zeros({1024}, kF32);
  }
  mutable std::atomic<const MemoryStats*> stats{nullptr};
  mutable std::atomic<int> threads{0};
};

TEST(Loaders, WorkersCountTheirMemoryForTheContextThatMadeTheLoop) {
  Context training;
  const ContextGuard guard(training);
  const Allocating dataset;
  DataLoader loader(dataset, {.batch_size = 8, .workers = 2});
  const int64_t before = memory_stats()->current();
  for (Tensor& batch : loader) {
    EXPECT_EQ(dataset.stats, memory_stats().get());
    EXPECT_EQ(dataset.threads, 1);
    EXPECT_GE(memory_stats()->current() - before, batch.nbytes());
  }
  EXPECT_EQ(memory_stats()->current(), before);
}

// What a source for rank 1 of 2 looks like: half of each global batch, positions of the whole.
class SecondOfTwo : public IndexSource {
 public:
  SecondOfTwo(std::shared_ptr<const Sampler> sampler, int64_t share)
      : global_(std::move(sampler), 2 * share, true), share_(share) {}
  int64_t size() const override { return global_.size(); }
  std::optional<int64_t> next_position(int64_t position) const override {
    return global_.next_position(position);
  }
  std::vector<int64_t> batch(int64_t epoch, int64_t position) const override {
    const std::vector<int64_t> all = global_.batch(epoch, position);
    return {all.begin() + share_, all.end()};
  }
  int64_t batches_after(int64_t position) const override { return global_.batches_after(position); }

 private:
  BatchSource global_;
  int64_t share_;
};

TEST(Loaders, TheIndexSourceIsReplaceable) {
  const Numbers numbers(12);
  DataLoader loader(numbers, {.batch_size = 2, .workers = 2});
  EXPECT_EQ(values_of(*loader.next()), (std::vector<int64_t>{0, 1}));
  const auto before = std::dynamic_pointer_cast<const BatchSource>(loader.source());
  ASSERT_NE(before, nullptr);
  loader.set_source(std::make_shared<SecondOfTwo>(before->sampler(), before->batch_size()));
  EXPECT_EQ(loader.size(), 3);
  EXPECT_EQ(loader.cursor(), (LoaderCursor{0, 2})) << "the cursor counts samples of all ranks";
  EXPECT_EQ(values_of(*loader.next()), (std::vector<int64_t>{4, 5}));
  EXPECT_EQ(loader.cursor(), (LoaderCursor{0, 6}));
  EXPECT_EQ(values_of(*loader.next()), (std::vector<int64_t>{8, 9}));
  EXPECT_FALSE(loader.next().has_value());
}

TEST(Loaders, ASamplerOfOnesOwnDecidesTheOrder) {
  const auto numbers = std::make_shared<Numbers>(3);
  const std::vector<double> weights = {0, 0, 1};
  DataLoader loader(numbers, std::make_shared<WeightedSampler>(weights, 5, 0), {.batch_size = 4});
  EXPECT_EQ(epoch_of(loader), (std::vector<std::vector<int64_t>>{{2, 2, 2, 2}, {2}}));
}

// ---- Streams ------------------------------------------------------------------------------------

class Counter : public IterableDataset<int64_t> {
 public:
  explicit Counter(int64_t count) : count_(count) {}
  std::unique_ptr<ExampleStream<int64_t>> open(int64_t epoch) const override {
    struct Stream : ExampleStream<int64_t> {
      int64_t next_value, end;
      std::optional<int64_t> next() override {
        if (next_value == end) return std::nullopt;
        if (next_value == 666) throw FormatError("bad record");
        return next_value++;
      }
    };
    auto stream = std::make_unique<Stream>();
    stream->next_value = 100 * epoch;
    stream->end = 100 * epoch + count_;
    return stream;
  }

 private:
  int64_t count_;
};

TEST(Streams, AreReadInOrderAndResumedExactly) {
  for (const int workers : {0, 1, 4}) {
    const Counter counter(10);
    const DataLoaderOptions options = {.batch_size = 4, .workers = workers};
    StreamLoader loader(counter, options);
    EXPECT_EQ(epoch_of(loader),
              (std::vector<std::vector<int64_t>>{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}}));
    EXPECT_EQ(values_of(*loader.next()), (std::vector<int64_t>{100, 101, 102, 103}));
    StreamLoader second(counter, options);
    second.load_state_dict(loader.state_dict());
    EXPECT_EQ(flatten(epoch_of(second)), (std::vector<int64_t>{104, 105, 106, 107, 108, 109}));
    StreamLoader dropping(counter, {.batch_size = 4, .drop_last = true, .workers = workers});
    EXPECT_EQ(epoch_of(dropping).size(), 2u);
    const Counter none(0);
    StreamLoader empty(none, options);
    EXPECT_TRUE(epoch_of(empty).empty());
  }
  const Counter one(1);
  EXPECT_THROW(StreamLoader(one, {.shuffle = true}), ValueError);
}

TEST(Streams, AShuffleBufferHandsOutEachExampleOnceAndNoneEarlierThanItReaches) {
  const auto counter = std::make_shared<Counter>(50);
  const auto order = [&](int64_t buffer_size, uint64_t seed, int64_t epoch) {
    std::vector<int64_t> values;
    const auto stream = shuffle(counter, buffer_size, seed)->open(epoch);  // outlives its data set
    while (const auto value = stream->next()) values.push_back(*value);
    EXPECT_FALSE(stream->next());
    return values;
  };
  std::vector<int64_t> sorted(50);
  std::iota(sorted.begin(), sorted.end(), 0);
  for (const int64_t buffer_size : {1, 2, 8, 50, 1000}) {
    std::vector<int64_t> values = order(buffer_size, 3, 0);
    for (int64_t i = 0; i < 50; ++i) EXPECT_LT(values[static_cast<size_t>(i)], i + buffer_size);
    EXPECT_EQ(values == sorted, buffer_size == 1);
    std::ranges::sort(values);
    EXPECT_EQ(values, sorted);
  }
  EXPECT_EQ(order(8, 3, 0), order(8, 3, 0));
  EXPECT_NE(order(8, 3, 0), order(8, 4, 0));

  // The first of three in a buffer of three: each as often.
  const auto three = std::make_shared<Counter>(3);
  std::map<int64_t, int> firsts;
  for (uint64_t seed = 0; seed < 3000; ++seed) ++firsts[*shuffle(three, 3, seed)->open(0)->next()];
  // Binomial: 1000 with a standard deviation of 26.
  for (const int64_t value : {0, 1, 2}) EXPECT_NEAR(firsts[value], 1000, 5 * 26);

  // A loader resumes it exactly.
  const auto mixed = shuffle(counter, 8, 3);
  StreamLoader loader(*mixed, {.batch_size = 20, .workers = 2});
  loader.next();
  StreamLoader second(*mixed, {.batch_size = 20, .workers = 2});
  second.load_state_dict(loader.state_dict());
  const std::vector<int64_t> all = order(8, 3, 0);
  EXPECT_EQ(flatten(epoch_of(second)), std::vector<int64_t>(all.begin() + 20, all.end()));
  EXPECT_THROW(shuffle(counter, 0, 0), ValueError);
  EXPECT_THROW(shuffle(std::shared_ptr<Counter>(), 4, 0), ValueError);
}

TEST(Streams, AnErrorNamesThePlaceInTheStream) {
  const Counter counter(100);
  StreamLoader loader(counter, {.batch_size = 40, .workers = 1});
  loader.set_cursor({6, 0});
  EXPECT_EQ(loader.next()->size(0), 40);
  try {
    loader.next();
    FAIL() << "no error";
  } catch (const FormatError& error) {
    EXPECT_STREQ(error.what(), "DataLoader: example 66 of epoch 6: bad record");
  }
}

// ---- Windows of tokens --------------------------------------------------------------------------

TokenArray ids_up_to(int64_t count) {
  std::vector<TokenId> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  return TokenArray::from_ids(ids);
}

TEST(Windows, AreAFunctionOfSeedStepAndRow) {
  const RandomWindows windows(ids_up_to(100), 8, 5, 4);
  const TokenExample batch = windows.batch(3, 4);
  EXPECT_EQ(batch.inputs.shape(), (Shape{4, 8}));
  const std::vector<int64_t> inputs = values_of(batch.inputs), targets = values_of(batch.targets);
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_EQ(targets[i], inputs[i] + 1);
  for (int64_t row = 0; row < 4; ++row) {
    EXPECT_EQ(inputs[static_cast<size_t>(row * 8)], windows.start(3, row));
    EXPECT_EQ(values_of(windows.get(3 * 4 + row).inputs),
              std::vector<int64_t>(inputs.begin() + row * 8, inputs.begin() + row * 8 + 8));
  }
  const TokenExample half = windows.batch(3, 2, 2);
  EXPECT_EQ(values_of(half.inputs), std::vector<int64_t>(inputs.begin() + 16, inputs.end()));
  DataLoader loader(windows, {.batch_size = 4, .workers = 2});
  loader.set_cursor({0, 12});
  EXPECT_EQ(values_of(loader.next()->inputs), inputs);
}

TEST(Windows, ReachEveryPlaceEquallyOften) {
  const RandomWindows windows(ids_up_to(11), 4, 1);  // starts 0 to 6
  std::vector<int> counts(7);
  for (int64_t step = 0; step < 7000; ++step) {
    ++counts.at(static_cast<size_t>(windows.start(step, 0)));
  }
  for (const int count : counts) EXPECT_NEAR(count, 1000, 5 * 29.3);  // binomial
  const RandomWindows only(ids_up_to(5), 4, 1);
  EXPECT_EQ(only.start(9, 9), 0);
}

TEST(Windows, SideBySideCoverEveryTargetOnce) {
  for (const int64_t count : {0, 1, 2, 8, 9, 10, 17}) {
    const ConsecutiveWindows windows(ids_up_to(count), 8);
    std::vector<int64_t> targets;
    for (int64_t i = 0; i < windows.size(); ++i) {
      const TokenExample window = windows.get(i);
      const std::vector<int64_t> in = values_of(window.inputs), out = values_of(window.targets);
      for (size_t j = 0; j < out.size(); ++j) {
        if (out[j] == kIgnoreTarget) continue;
        EXPECT_EQ(in[j] + 1, out[j]);
        targets.push_back(out[j]);
      }
    }
    std::vector<int64_t> expected;
    for (int64_t i = 1; i < count; ++i) expected.push_back(i);
    EXPECT_EQ(targets, expected);
    EXPECT_EQ(windows.num_targets(), static_cast<int64_t>(expected.size()));
  }
}

TEST(Windows, ImpossibleOnesAreValueErrors) {
  EXPECT_THROW(RandomWindows(ids_up_to(8), 8, 0), ValueError);
  EXPECT_THROW(RandomWindows(TokenArray(), 1, 0), ValueError);
  EXPECT_THROW(RandomWindows(ids_up_to(8), 0, 0), ValueError);
  EXPECT_THROW(RandomWindows(ids_up_to(8), 2, 0, 0), ValueError);
  EXPECT_THROW(ConsecutiveWindows(ids_up_to(8), 0), ValueError);
  EXPECT_THROW(ConsecutiveWindows(ids_up_to(8), 2).get(4), IndexError);
  EXPECT_THROW(RandomWindows(ids_up_to(8), 2, 0, 2, 3).get(6), IndexError);
  EXPECT_THROW(RandomWindows(ids_up_to(8), 2, 0).batch(0, 0), ValueError);
}

// ---- Tokenizers
// -----------------------------------------------------------------------------------

TEST(Tokenizers, SeveralThreadsGiveTheIdsOfOne) {
  const char* folder = std::getenv("TESSERA_DATA_DIR");
  if (folder == nullptr) GTEST_SKIP() << "TESSERA_DATA_DIR is not set: no vocabularies to read";
  const std::string base(folder);
  const BpeTokenizer gpt2 = BpeTokenizer::from_folder(base + "/gpt2");
  const WordPieceTokenizer bert = WordPieceTokenizer::from_file(base + "/bert/vocab.txt");
  const std::string text = read_text(base + "/text/wikitext2-raw-valid.txt").substr(0, 50'000);
  const std::vector<TokenId> expected = gpt2.encode(text), expected_bert = bert.encode(text);
  std::array<std::vector<TokenId>, 4> got, got_bert;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < got.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int repeat = 0; repeat < 3; ++repeat) {
        got[i] = gpt2.encode(text);
        got_bert[i] = bert.encode(text);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i], expected);
    EXPECT_EQ(got_bert[i], expected_bert);
  }
}

// ---- Random numbers -----------------------------------------------------------------------------

// Example i is (i, two numbers drawn for it), as an augmentation draws them.
class Noisy : public Dataset<std::array<Tensor, 3>> {
 public:
  explicit Noisy(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  std::array<Tensor, 3> get(int64_t index) const override {
    const Tensor first = rand({1}), second = rand({1});
    return {scalar_tensor(index, kI64), first, second};
  }

 private:
  int64_t size_;
};

// Of `epochs` epochs: (epoch, example) -> its two numbers.
using Drawn = std::map<std::pair<int, int64_t>, std::pair<float, float>>;
Drawn drawn(const Dataset<std::array<Tensor, 3>>& dataset, const DataLoaderOptions& options,
            int epochs = 2) {
  Drawn numbers;
  DataLoader loader(dataset, options);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (auto& [index, first, second] : loader) {
      for (int64_t row = 0; row < index.numel(); ++row) {
        numbers[{epoch, index.to_vector<int64_t>()[static_cast<size_t>(row)]}] = {
            first.to_vector<float>()[static_cast<size_t>(row)],
            second.to_vector<float>()[static_cast<size_t>(row)]};
      }
    }
  }
  return numbers;
}

TEST(LoaderRandom, AnExampleDrawsTheSameNumbersForAnyNumberOfWorkersAndNewOnesEachEpoch) {
  const Noisy dataset(40);
  for (const bool shuffle : {false, true}) {
    const Drawn expected = drawn(dataset, {.batch_size = 3, .shuffle = shuffle, .seed = 5});
    std::set<float> all;
    for (const auto& [place, numbers] : expected) all.insert({numbers.first, numbers.second});
    // 24 bits each: of 160 numbers two are equal with a probability of 0.08%; the seed is fixed.
    EXPECT_EQ(all.size(), 160U);
    for (const int workers : {1, 2, 4}) {
      EXPECT_EQ(
          drawn(dataset, {.batch_size = 3, .shuffle = shuffle, .seed = 5, .workers = workers}),
          expected)
          << workers << " workers";
    }
    EXPECT_NE(drawn(dataset, {.batch_size = 3, .shuffle = shuffle, .seed = 6}), expected);
  }
}

TEST(LoaderRandom, WithoutASeedOfItsOwnALoaderFollowsManualSeed) {
  const Noisy dataset(40);
  const auto run = [&](uint64_t seed, int workers) {
    manual_seed(seed);
    return drawn(dataset, {.batch_size = 4, .workers = workers});
  };
  const Numbers numbers(50);
  const auto order = [&](uint64_t seed) {
    manual_seed(seed);
    DataLoader loader(numbers, {.batch_size = 5, .shuffle = true});
    return epoch_of(loader);
  };
  for (const int workers : {0, 2}) {
    EXPECT_EQ(run(1, workers), run(1, workers));
    EXPECT_NE(run(1, workers), run(2, workers));
  }
  EXPECT_EQ(order(1), order(1));
  EXPECT_NE(order(1), order(2));
  manual_seed(0);
}

TEST(LoaderRandom, ALoopLeavesTheNumbersOfItsThreadAlone) {
  const Noisy dataset(6);
  for (const int workers : {0, 1}) {
    manual_seed(3);
    const std::vector<float> expected = rand({4}).to_vector<float>();
    manual_seed(3);
    drawn(dataset, {.batch_size = 2, .workers = workers});
    EXPECT_EQ(rand({4}).to_vector<float>(), expected) << workers << " workers";
  }
  manual_seed(0);
}

TEST(LoaderRandom, AnExampleMayKnowItsEpoch) {
  struct Epochs : Dataset<int64_t> {
    int64_t size() const override { return 3; }
    int64_t get(int64_t index) const override {
      const std::optional<ExamplePlace> place = example_place();
      return place ? 100 * place->epoch + 10 * place->position + index : -1;
    }
  };
  const Epochs dataset;
  for (const int workers : {0, 1}) {
    DataLoader loader(dataset, {.batch_size = 2, .workers = workers});
    EXPECT_EQ(flatten(epoch_of(loader)), (std::vector<int64_t>{0, 11, 22}));
    EXPECT_EQ(flatten(epoch_of(loader)), (std::vector<int64_t>{100, 111, 122}));
  }
  EXPECT_EQ(dataset.get(0), -1);  // nobody's example
}

TEST(LoaderRandom, AResumedLoopDrawsWhatTheWholeOneDraws) {
  const Noisy dataset(12);
  const DataLoaderOptions options{.batch_size = 2, .shuffle = true, .seed = 1, .workers = 2};
  DataLoader whole(dataset, options), resumed(dataset, options);
  std::vector<std::vector<float>> expected, found;
  for (auto& batch : whole) expected.push_back(batch[1].to_vector<float>());
  resumed.set_cursor({0, 6});
  for (auto& batch : resumed) found.push_back(batch[1].to_vector<float>());
  EXPECT_EQ(found, (std::vector(expected.begin() + 3, expected.end())));
}

TEST(LoaderRandom, AStreamDrawsTheSameNumbersWithAndWithoutAWorker) {
  struct Pass : ExampleStream<Tensor> {
    int left = 9;
    std::optional<Tensor> next() override {
      if (left-- == 0) return std::nullopt;
      return rand({1});
    }
  };
  struct Noise : IterableDataset<Tensor> {
    std::unique_ptr<ExampleStream<Tensor>> open(int64_t) const override {
      return std::make_unique<Pass>();
    }
  };
  const Noise stream;
  const auto read = [&](uint64_t seed, int workers) {
    StreamLoader loader(stream, {.batch_size = 2, .seed = seed, .workers = workers});
    std::vector<float> all;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (Tensor& batch : loader) {
        const std::vector<float> values = batch.to_vector<float>();
        all.insert(all.end(), values.begin(), values.end());
      }
    }
    return all;
  };
  const std::vector<float> expected = read(1, 0);
  EXPECT_EQ(std::set(expected.begin(), expected.end()).size(), 18U);
  EXPECT_EQ(read(1, 1), expected);
  EXPECT_NE(read(2, 0), expected);
}

// ---- Loops --------------------------------------------------------------------------------------

TEST(Loaders, ASecondLoopInsideOfALoopIsRefused) {
  const Numbers numbers(8);
  DataLoader loader(numbers, {.batch_size = 2});
  int batches = 0;
  try {
    for ([[maybe_unused]] Tensor& outer : loader) {
      for ([[maybe_unused]] Tensor& inner : loader) ASSERT_LT(++batches, 100) << "does not end";
    }
    ADD_FAILURE() << "two loops over one loader";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("a second loader"), std::string::npos) << error.what();
  }
  EXPECT_EQ(batches, 0);
  EXPECT_EQ(epoch_of(loader).size(), 4U);  // the loop that was left by the exception has ended
}

TEST(Loaders, SkippingAfterALoadIsRefusedWhereItWouldSkipTwice) {
  const Numbers numbers(20);
  const DataLoaderOptions options{.batch_size = 2};
  DataLoader first(numbers, options);
  for (int i = 0; i < 3; ++i) first.next();
  DataLoader second(numbers, options);
  second.load_state_dict(first.state_dict());
  try {
    second.skip_batches(3);
    ADD_FAILURE() << "skipped twice";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("loaded"), std::string::npos) << error.what();
  }
  second.skip_batches(0);
  EXPECT_EQ(epoch_of(second).size(), 7U);  // where the state says
  second.skip_batches(3);                  // of the next epoch
  EXPECT_EQ(epoch_of(second).size(), 7U);
  second.load_state_dict(first.state_dict());
  second.set_cursor({0, 0});  // a cursor of one's own
  second.skip_batches(3);
  EXPECT_EQ(epoch_of(second).size(), 7U);
}

TEST(Loaders, AnEpochSetAfterALoadKeepsThePlaceInIt) {
  const Numbers numbers(20);
  const DataLoaderOptions options{.batch_size = 2};
  DataLoader first(numbers, options);
  epoch_of(first);
  for (int i = 0; i < 3; ++i) first.next();
  DataLoader second(numbers, options);
  second.load_state_dict(first.state_dict());
  second.set_epoch(1);  // as the loop over epochs of a training does
  EXPECT_EQ(second.cursor(), (LoaderCursor{1, 6}));
  EXPECT_EQ(epoch_of(second).size(), 7U);
  second.set_epoch(1);
  EXPECT_EQ(epoch_of(second).size(), 10U);
  second.load_state_dict(first.state_dict());
  second.set_epoch(0);
  EXPECT_EQ(second.cursor(), (LoaderCursor{0, 0}));
}

TEST(Loaders, AStreamSavedAtItsLastBatchGoesOnWithTheNextEpoch) {
  const Counter counter(10);
  for (const bool look_ahead : {false, true}) {
    StreamLoader first(counter, {.batch_size = 4});
    first.set_look_ahead(look_ahead);
    std::optional<StateDict> saved;
    for ([[maybe_unused]] Tensor& batch : first) saved = first.state_dict();
    StreamLoader second(counter, {.batch_size = 4});
    second.load_state_dict(*saved);
    EXPECT_EQ(flatten(epoch_of(second)),
              (std::vector<int64_t>{100, 101, 102, 103, 104, 105, 106, 107, 108, 109}));
    EXPECT_EQ(second.cursor(), (LoaderCursor{2, 0}));
  }
}

TEST(Loaders, AStateSavedAtTheLastBatchGoesOnWithTheNextEpoch) {
  for (const bool drop_last : {false, true}) {
    const Numbers numbers(11);
    const DataLoaderOptions options{.batch_size = 2, .drop_last = drop_last, .workers = 1};
    DataLoader first(numbers, options);
    std::optional<StateDict> saved;
    for ([[maybe_unused]] Tensor& batch : first) saved = first.state_dict();
    DataLoader second(numbers, options);
    second.load_state_dict(*saved);
    EXPECT_EQ(second.cursor(), (LoaderCursor{1, 0}));
    second.skip_batches(0);
    second.set_epoch(1);
    EXPECT_EQ(epoch_of(second).size(), drop_last ? 5U : 6U);
  }
}

TEST(LoaderObserver, SeesEachBatchAndTheEndOfALoopHoweverItEnds) {
  struct Log : LoaderObserver {
    std::vector<std::string> lines;
    void batch_began(LoaderBase& loader) override {
      lines.push_back(std::to_string(loader.batch_samples()) +
                      (loader.batch_is_last() ? " last" : ""));
    }
    void loop_ended(LoaderBase&) noexcept override { lines.push_back("end"); }
    void loader_gone(LoaderBase&) noexcept override { lines.push_back("gone"); }
  };
  using Lines = std::vector<std::string>;
  const auto log = std::make_shared<Log>();
  const auto lines = [&] { return std::exchange(log->lines, {}); };
  const Numbers numbers(5);
  {
    DataLoader loader(numbers, {.batch_size = 2});
    loader.set_observer(log);
    epoch_of(loader);
    EXPECT_EQ(lines(), (Lines{"2", "2", "1 last", "end"}));
    for (Tensor& batch : loader) {
      EXPECT_EQ(batch.numel(), 2);
      break;
    }
    EXPECT_EQ(lines(), (Lines{"2", "end"}));
    EXPECT_THROW(
        {
          for (Tensor& batch : loader) throw ValueError(batch.describe());
        },
        ValueError);
    EXPECT_EQ(lines(), (Lines{"2", "end"}));
    loader.set_look_ahead(true);
    EXPECT_EQ(epoch_of(loader), (std::vector<std::vector<int64_t>>{{0, 1}, {2, 3}, {4}}));
    EXPECT_EQ(lines(), (Lines{"2", "2", "1 last", "end"}));
  }
  EXPECT_EQ(lines(), (Lines{"gone"}));
}

}  // namespace
}  // namespace tessera::data
