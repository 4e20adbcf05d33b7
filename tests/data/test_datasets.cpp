// Data sets, how examples become a batch, windows of tokens.
// ctest labels: threads
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/data/dataloader.h>
#include <tessera/data/token_dataset.h>

#include "data/number_data.h"

namespace tessera::data::test_datasets {
namespace {

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
}  // namespace tessera::data::test_datasets

// Padding is a rule of the type's own.
template <>
struct tessera::data::Collate<tessera::data::test_datasets::Sentence> {
  static Tensor batch(std::span<test_datasets::Sentence> examples) {
    size_t longest = 0;
    for (const auto& sentence : examples) longest = std::max(longest, sentence.ids.size());
    std::vector<int64_t> ids;
    for (const auto& sentence : examples) {
      ids.insert(ids.end(), sentence.ids.begin(), sentence.ids.end());
      ids.resize(ids.size() + longest - sentence.ids.size(), -1);
    }
    return tensor(std::span<const int64_t>(ids),
                  {static_cast<int64_t>(examples.size()), static_cast<int64_t>(longest)});
  }
};

namespace tessera::data::test_datasets {
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

}  // namespace
}  // namespace tessera::data::test_datasets
