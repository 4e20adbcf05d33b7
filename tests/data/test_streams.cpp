// Streams: loaders over them, shuffle buffers, errors with their place.
// ctest labels: threads
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>
#include <tessera/data/shuffle_buffer.h>

#include "data/number_data.h"

namespace tessera::data::test_streams {
namespace {

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

}  // namespace
}  // namespace tessera::data::test_streams
