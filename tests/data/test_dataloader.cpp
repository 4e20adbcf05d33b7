// Loaders over data sets: batches, workers, places in an epoch, errors, random numbers.
// ctest labels: threads
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/parallel.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>

#include "data/number_data.h"

namespace tessera::data::test_dataloader {
namespace {

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

// Its memory goes with it, and nothing says that it is there.
TEST(Loaders, ANewCursorOrLoopLetsGoOfTheBatchInHand) {
  const Numbers numbers(6);
  DataLoader loader(numbers, {.batch_size = 2});
  const auto read_one = [&] {
    for (Tensor& batch : loader) return batch;
    return Tensor();
  };
  Tensor kept = read_one();
  EXPECT_EQ(kept.use_count(), 2) << "the loop was left, and the loader still has it";
  EXPECT_EQ(loader.batch_rows(), 2);
  loader.set_cursor({0, 6});
  EXPECT_EQ(kept.use_count(), 1);
  EXPECT_EQ(loader.batch_rows(), 0);
  EXPECT_EQ(loader.batch_samples(), 0);
  EXPECT_FALSE(loader.batch_is_last()) << "of a batch that was let go";
  kept = Tensor();
  loader.set_cursor({0, 4});
  kept = read_one();
  EXPECT_TRUE(loader.batch_is_last());
  loader.load_state_dict(loader.state_dict());
  EXPECT_EQ(kept.use_count(), 1);
  EXPECT_FALSE(loader.batch_is_last());
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
  EXPECT_THROW(loader.set_cursor({0, -1}), ValueError);
  EXPECT_THROW(loader.set_cursor({0, 3}), ValueError);
  EXPECT_THROW(loader.set_epoch(-1), ValueError);
  EXPECT_THROW(loader.skip_batches(-1), ValueError);
  EXPECT_EQ(loader.cursor(), LoaderCursor());
  loader.set_cursor({1, 2});
  EXPECT_EQ(loader.cursor(), (LoaderCursor{1, 2})) << "the end is a place";
  loader.set_cursor({0, 0});
  loader.skip_batches(0);
  EXPECT_EQ(loader.cursor(), LoaderCursor());
  loader.skip_batches(2);
  EXPECT_EQ(loader.cursor(), (LoaderCursor{0, 2}));
  loader.skip_batches(1);  // there are no more
  EXPECT_EQ(loader.cursor(), (LoaderCursor{0, 2}));
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
  struct Broken : Numbers {
    using Numbers::Numbers;
    int64_t get(int64_t index) const override {
      TS_CHECK(index != 2, "Broken", "example 2 cannot be read");
      return Numbers::get(index);
    }
  };
  const Broken broken(5);
  for (const int64_t batch_size : {2, 3}) {  // not the first batch, the first
    log->lines.clear();
    DataLoader loader(broken, {.batch_size = batch_size});
    loader.set_observer(log);
    EXPECT_THROW(epoch_of(loader), ValueError);
    EXPECT_EQ(lines(), batch_size == 2 ? (Lines{"2", "end"}) : Lines{"end"});
  }
}

TEST(LoaderObserver, ThatThrowsEndsTheLoop) {
  struct Refusal : LoaderObserver {
    bool refuses = true;
    int ends = 0;
    void batch_began(LoaderBase&) override { TS_CHECK(!refuses, "Refusal", "not this batch"); }
    void loop_ended(LoaderBase&) noexcept override { ++ends; }
    void loader_gone(LoaderBase&) noexcept override {}
  };
  const auto observer = std::make_shared<Refusal>();
  const Numbers numbers(5);
  DataLoader loader(numbers, {.batch_size = 2});
  loader.set_observer(observer);
  EXPECT_THROW(epoch_of(loader), ValueError);
  EXPECT_FALSE(loader.in_loop());
  EXPECT_EQ(observer->ends, 1);
  observer->refuses = false;
  EXPECT_EQ(epoch_of(loader).size(), 3U);
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

// ---- Batches that are made already -------------------------------------------------------------

// Item i is i + 1 rows of the number i.
struct Made : Dataset<Tensor> {
  int64_t size() const override { return 4; }
  Tensor get(int64_t index) const override { return raw::full({index + 1}, index, kI64); }
};
struct MadeStream : IterableDataset<Tensor> {
  struct Stream : ExampleStream<Tensor> {
    int64_t at = 0;
    std::optional<Tensor> next() override {
      if (at == 4) return std::nullopt;
      return Made().get(at++);
    }
  };
  std::unique_ptr<ExampleStream<Tensor>> open(int64_t) const override {
    return std::make_unique<Stream>();
  }
};

template <class Loader>
void expect_made(Loader& loader) {
  int64_t number = 0;
  for (auto& batch : loader) {
    EXPECT_EQ(batch.shape(), Shape{number + 1});
    EXPECT_EQ(batch.template to_vector<int64_t>().back(), number);
    EXPECT_EQ(loader.batch_rows(), number + 1);
    EXPECT_EQ(loader.batch_samples(), number + 1);
    EXPECT_EQ(loader.cursor().position, ++number);
  }
  EXPECT_EQ(number, 4);
}

TEST(MadeBatches, ComeAsTheyAreAndCountTheirRows) {
  const Made made;
  const MadeStream stream;
  for (const int workers : {0, 2}) {
    DataLoader loader(made, {.batch_size = kNoBatching, .workers = workers});
    EXPECT_EQ(loader.size(), 4);
    expect_made(loader);
    StreamLoader reader(stream, {.batch_size = kNoBatching, .workers = workers});
    expect_made(reader);
  }
  DataLoader shuffled(made, {.batch_size = kNoBatching, .shuffle = true, .seed = 3});
  std::set<int64_t> seen;
  for (auto& batch : shuffled) seen.insert(batch.size(0));
  EXPECT_EQ(seen, (std::set<int64_t>{1, 2, 3, 4}));
}

TEST(MadeBatches, PassThroughAFunctionOfTheLoader) {
  const Made made;
  const auto doubled = [](std::span<Tensor> one) {
    EXPECT_EQ(one.size(), 1u);
    return std::pair(one[0] * 2, std::string("doubled"));
  };
  DataLoader loader(made, {.batch_size = kNoBatching}, doubled);
  int64_t number = 0;
  for (auto& [batch, name] : loader) {
    EXPECT_EQ(batch.size(0), number + 1);
    EXPECT_EQ(batch.to_vector<int64_t>().back(), 2 * number++);
    EXPECT_EQ(loader.batch_rows(), number);
  }
}

TEST(MadeBatches, AreNotBatchedByASamplerNorOfAnotherType) {
  const Numbers numbers(4);  // whose batches are tensors
  EXPECT_THROW(DataLoader(numbers, {.batch_size = kNoBatching}), ConfigError);
  EXPECT_THROW(DataLoader(numbers, {.batch_size = -1}), ValueError);
  EXPECT_THROW(DataLoader(numbers, {.batch_size = 0}), ValueError);
}

}  // namespace
}  // namespace tessera::data::test_dataloader
