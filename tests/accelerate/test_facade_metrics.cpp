// gather_for_metrics: every sample once, whatever the sizes. IDs (DDL-8, MET) are the scenarios of
// docs/accelerate-scenarios.md; traps are those that other libraries fell into.
// ctest labels: threads
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>

#include <tessera/accelerate/loaders/loader_plan.h>
#include <tessera/accelerate/metrics.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>

#include "accelerate/loader_fixture.h"

namespace tessera::accelerate::test_facade_metrics {
namespace {

using Values = std::vector<double>;

Indices first_numbers(int64_t size) {
  Indices numbers(static_cast<size_t>(size));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

std::vector<LoaderPlanOptions> all_modes() {
  std::vector<LoaderPlanOptions> modes;
  for (const bool split : {false, true}) {
    for (const bool dispatch : {false, true}) {
      modes.push_back({.split_batches = split, .dispatch_batches = dispatch});
    }
  }
  return modes;
}

// What gather_for_metrics returns in an epoch, in order.
template <class Loader>
Indices gathered_epoch(Loader& loader, LoaderPlan& plan) {
  Indices all;
  for (Tensor& batch : loader) {
    const Indices turn =
        gather_for_metrics(batch, plan.active(), plan.ranks()).to_vector<int64_t>();
    all.insert(all.end(), turn.begin(), turn.end());
  }
  return all;
}

TEST(FacadeMetrics, DDL_8_TheRanksHaveEverySampleOnce) {
  for (const int n : {1, 2, 3, 4}) {
    compared_ranks(n, [n](int) {
      for (const LoaderPlanOptions& mode : all_modes()) {
        for (const int64_t size : {22, 1, 2, 5, 12, 24, 25}) {
          SCOPED_TRACE(testing::Message() << n << " ranks, " << size << " samples");
          LoaderPlan plan(world(), mode);
          const int64_t batch_size = mode.split_batches ? 12 : 4;
          const auto numbers = std::make_shared<Numbers>(size);
          DataLoader plain(numbers, {.batch_size = batch_size});
          DataLoader shuffled(numbers, {.batch_size = batch_size, .shuffle = true, .seed = 3});
          StreamLoader<int64_t> stream(std::make_shared<NumberStream>(size),
                                       {.batch_size = batch_size});
          plan.prepare(plain), plan.prepare(shuffled), plan.prepare(stream);
          EXPECT_EQ(gathered_epoch(plain, plan), first_numbers(size));  // one process's order
          EXPECT_EQ(gathered_epoch(stream, plan), first_numbers(size));
          for (int epoch = 0; epoch < 2; ++epoch) {
            Indices all = gathered_epoch(shuffled, plan);
            std::ranges::sort(all);
            EXPECT_EQ(all, first_numbers(size));
          }
        }
      }
    });
  }
}

TEST(FacadeMetrics, DDL_8_BatchesOfABatchSamplerHaveEverySampleOnce) {
  for (const int n : {1, 2, 3, 4}) {
    compared_ranks(n, [](int) {
      for (const bool dispatch : {false, true}) {
        LoaderPlan plan(world(), {.dispatch_batches = dispatch});
        DataLoader loader(std::make_shared<Numbers>(14),
                          std::make_shared<data::BatchList>(std::vector<Indices>{
                              {0, 1, 2}, {3, 4}, {5, 6, 7, 8}, {9, 10, 11}, {12, 13}}));
        plan.prepare(loader);
        EXPECT_EQ(gathered_epoch(loader, plan), first_numbers(14));
      }
    });
  }
}

TEST(FacadeMetrics, MET_1_CountsAreExactForAnySizeAndMode) {
  for (const int n : {2, 4}) {
    compared_ranks(n, [n](int) {
      for (const LoaderPlanOptions& mode : all_modes()) {
        for (const int64_t size : {99, 512}) {
          LoaderPlan plan(world(), mode);
          DataLoader loader(std::make_shared<Numbers>(size), {.batch_size = 16, .workers = 1});
          plan.prepare(loader);
          int64_t predictions = 0, targets = 0, losses = 0;
          for (Tensor& batch : loader) {
            const Tensor x = batch.to(kF32);
            const auto all =
                gather_for_metrics(std::tuple(x * 2.0, x.unsqueeze(1), x.sum()), plan.active());
            predictions += std::get<0>(all).size(0);
            targets += std::get<1>(all).size(0);
            losses += std::get<2>(all).size(0);
          }
          EXPECT_EQ(predictions, size);
          EXPECT_EQ(targets, size);
          // Trap: a value of each rank is no sample, and not cut.
          EXPECT_EQ(losses, n * loader.size());
        }
      }
    });
  }
}

// Two classes in the plane with noise, and a classifier that is not learned.
struct Point {
  Tensor place, label;
  void visit_tensors(auto&& visit) { visit(place), visit(label); }
};
struct Points : data::Dataset<Point> {
  explicit Points(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  Point get(int64_t index) const override {
    const auto bits = philox4x32(11, 0, static_cast<uint64_t>(index));
    const double x = uniform_from_bits64(bits[0], bits[1]),
                 y = uniform_from_bits64(bits[2], bits[3]);
    const bool noise = bits[0] % 7 == 0;
    return {tensor({x, y}),
            scalar_tensor(static_cast<int64_t>((x + 0.3 * y > 0.7) != noise), kI64)};
  }
  int64_t size_;
};
struct Scores {
  double accuracy, f1;
};
Scores scores_of(DataLoader<Point>& loader, LoaderPlan& plan) {
  int64_t right = 0, all = 0, true_positive = 0, positive = 0, predicted = 0;
  for (Point& batch : loader) {
    const Tensor score = batch.place.select(1, 0) + batch.place.select(1, 1);
    const auto [scores, labels] = gather_for_metrics(std::pair(score, batch.label), plan.active());
    const Values s = scores.to_vector();
    const Indices l = labels.to_vector<int64_t>();
    for (size_t i = 0; i < s.size(); ++i) {
      const bool guess = s[i] > 1, label = l[i] == 1;
      ++all, right += guess == label, positive += label, predicted += guess;
      true_positive += guess && label;
    }
  }
  return {static_cast<double>(right) / static_cast<double>(all),
          2.0 * static_cast<double>(true_positive) / static_cast<double>(positive + predicted)};
}

TEST(FacadeMetrics, MET_2_AccuracyAndF1AreThoseOfOneProcess) {
  const auto points = std::make_shared<Points>(408);  // MRPC's validation set has as many
  Scores alone;
  {
    LoaderPlan plan;
    DataLoader<Point> loader(points, {.batch_size = 16});
    plan.prepare(loader);
    alone = scores_of(loader, plan);
  }
  EXPECT_GT(alone.accuracy, 0.6);
  EXPECT_LT(alone.accuracy, 0.95);
  for (const int n : {2, 3, 4}) {
    compared_ranks(n, [&](int) {
      for (const LoaderPlanOptions& mode : all_modes()) {
        LoaderPlan plan(world(), mode);
        DataLoader<Point> loader(points, {.batch_size = 24});
        plan.prepare(loader);
        const Scores together = scores_of(loader, plan);
        EXPECT_EQ(together.accuracy, alone.accuracy);
        EXPECT_EQ(together.f1, alone.f1);
      }
    });
  }
}

TEST(FacadeMetrics, MET_3_AStreamOf30ItemsGives30TensorsAndObjects) {
  for (const int n : {1, 2, 4}) {
    compared_ranks(n, [](int) {
      for (const bool dispatch : {false, true}) {
        LoaderPlan plan(world(), {.dispatch_batches = dispatch});
        StreamLoader<int64_t> loader(std::make_shared<NumberStream>(30), {.batch_size = 4});
        plan.prepare(loader);
        Indices numbers, lengths;
        std::vector<std::string> names;
        for (Tensor& batch : loader) {
          std::vector<std::string> own_names;
          std::vector<std::vector<int>> own_lists;
          for (const int64_t i : batch.to_vector<int64_t>()) {
            own_names.push_back("item " + std::to_string(i));
            own_lists.emplace_back(static_cast<size_t>(i), 1);
          }
          const auto [all, all_names, lists, text] = gather_for_metrics(
              std::tuple(batch, own_names, own_lists, std::string("mine")), plan.active());
          for (const int64_t i : all.to_vector<int64_t>()) numbers.push_back(i);
          names.insert(names.end(), all_names.begin(), all_names.end());
          for (const auto& list : lists) lengths.push_back(static_cast<int64_t>(list.size()));
          EXPECT_EQ(text, "mine");
        }
        EXPECT_EQ(numbers, first_numbers(30));
        EXPECT_EQ(lengths, first_numbers(30));
        ASSERT_EQ(names.size(), 30U);
        EXPECT_EQ(names.back(), "item 29");
      }
    });
  }
}

TEST(FacadeMetrics, MET_4_DropLastCutsNothing) {
  for (const int n : {1, 2, 3}) {
    compared_ranks(n, [n](int) {
      for (const bool dispatch : {false, true}) {
        LoaderPlan plan(world(), {.dispatch_batches = dispatch});
        DataLoader loader(std::make_shared<Numbers>(10 * n + 1),
                          {.batch_size = 5, .drop_last = true});
        plan.prepare(loader);
        EXPECT_EQ(loader.remainder(), 0);
        Indices sizes;
        for (Tensor& batch : loader) {
          sizes.push_back(gather_for_metrics(batch, plan.active()).size(0));
        }
        EXPECT_EQ(sizes, (Indices{5 * n, 5 * n}));
      }
    });
  }
}

// Trap 15: upstream's loader that skips batches forgets drop_last, and a full last batch is cut.
TEST(FacadeMetrics, MET_4_SkippingBatchesWithDropLastCutsNothing) {
  compared_ranks(2, [](int) {
    LoaderPlan plan;
    DataLoader loader(std::make_shared<Numbers>(23), {.batch_size = 5, .drop_last = true});
    plan.prepare(loader);
    loader.skip_batches(1);
    EXPECT_EQ(gathered_epoch(loader, plan), (Indices{10, 11, 12, 13, 14, 15, 16, 17, 18, 19}));
    EXPECT_EQ(gathered_epoch(loader, plan), first_numbers(20));
  });
}

TEST(FacadeMetrics, MET_4_SkippingBatchesLeavesOutWhatFillsUp) {
  compared_ranks(2, [](int) {
    for (const bool dispatch : {false, true}) {
      LoaderPlan plan(world(), {.dispatch_batches = dispatch});
      DataLoader loader(std::make_shared<Numbers>(23), {.batch_size = 5});
      StreamLoader<int64_t> stream(std::make_shared<NumberStream>(23), {.batch_size = 5});
      plan.prepare(loader), plan.prepare(stream);
      loader.skip_batches(2), stream.skip_batches(2);
      EXPECT_EQ(gathered_epoch(loader, plan), (Indices{20, 21, 22}));
      EXPECT_EQ(gathered_epoch(stream, plan), (Indices{20, 21, 22}));
    }
  });
}

// Trap 16: upstream cuts by the remainder where nothing was filled up.
TEST(FacadeMetrics, MET_1_UnevenBatchesAreNotCut) {
  compared_ranks(2, [](int rank) {
    LoaderPlan plan(world(), {.even_batches = false});
    DataLoader loader(std::make_shared<Numbers>(7), {.batch_size = 2});
    plan.prepare(loader);
    Indices own;
    for (Tensor& batch : loader) own.push_back(batch.size(0));
    EXPECT_EQ(own, (rank == 0 ? Indices{2, 2} : Indices{2, 1}));
    EXPECT_EQ(gathered_epoch(loader, plan), first_numbers(7));
  });
}

// Upstream hangs.
TEST(FacadeMetrics, MET_1_ATurnInWhichARankHasNoBatchIsAnErrorAtOnceAndTheRanksGoOn) {
  compared_ranks(3, [](int rank) {
    for (const bool dispatch : {false, true}) {
      for (const bool sampler : {false, true}) {
        LoaderPlan plan(world(), {.dispatch_batches = dispatch, .even_batches = false});
        const auto numbers = std::make_shared<Numbers>(9);
        const auto batches = std::make_shared<data::BatchList>(
            std::vector<Indices>{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8}});
        const auto loader = sampler ? std::make_unique<DataLoader<int64_t>>(numbers, batches)
                                    : std::make_unique<DataLoader<int64_t>>(
                                          numbers, data::DataLoaderOptions{.batch_size = 2});
        plan.prepare(*loader);
        int64_t turns = 0;
        for (Tensor& batch : *loader) {
          if (++turns == 1) {
            EXPECT_EQ(values_of(gather_for_metrics(batch, plan.active())), first_numbers(6));
            continue;
          }
          EXPECT_LT(rank, 2);
          try {
            gather_for_metrics(batch, plan.active());
            ADD_FAILURE() << "nothing was thrown";
          } catch (const DistributedError& error) {
            EXPECT_NE(std::string(error.what()).find("ranks from 2 on have no batch"),
                      std::string::npos)
                << error.what();
          }
        }
        EXPECT_EQ(turns, rank < 2 ? 2 : 1);
        plan.set_even_batches(true);
        EXPECT_EQ(gathered_epoch(*loader, plan), first_numbers(9));
      }
    }
  });
}

// Trap 17: upstream catches everything and returns what it has not cut.
TEST(FacadeMetrics, MET_1_RowsThatAreNotTheBatchsAreAnErrorOnAllRanks) {
  compared_ranks(2, [](int rank) {
    LoaderPlan plan;
    DataLoader loader(std::make_shared<Numbers>(7), {.batch_size = 2});
    plan.prepare(loader);
    for (Tensor& batch : loader) {
      const Tensor wrong = rank == 1 ? raw::zeros({3, 2}, kF32) : batch;  // one rank's mistake
      try {
        gather_for_metrics(wrong, plan.active());
        ADD_FAILURE() << "nothing was thrown";
      } catch (const ShapeError& error) {
        EXPECT_NE(std::string(error.what()).find("rank 1: f32[3, 2]"), std::string::npos)
            << error.what();
      }
      EXPECT_THROW(gather_for_metrics(std::vector<int>(5), plan.active()), ShapeError);
    }
    EXPECT_EQ(gathered_epoch(loader, plan), first_numbers(7));  // the ranks go on
  });
}

TEST(FacadeMetrics, MET_1_TheInnermostLoopDecides) {
  compared_ranks(2, [](int) {
    LoaderPlan plan;
    DataLoader outer(std::make_shared<Numbers>(5), {.batch_size = 2});
    DataLoader inner(std::make_shared<Numbers>(3), {.batch_size = 3});
    plan.prepare(outer), plan.prepare(inner);
    Indices all;
    for (Tensor& batch : outer) {
      for (Tensor& validation : inner) {
        EXPECT_EQ(gather_for_metrics(validation, plan.active()).size(0), 3);
        break;  // trap 5: a loop that is left early stays the active one upstream
      }
      const Indices turn = gather_for_metrics(batch, plan.active()).to_vector<int64_t>();
      all.insert(all.end(), turn.begin(), turn.end());
    }
    EXPECT_EQ(all, first_numbers(5));
    // Outside of loops nothing is known of samples, and nothing is cut.
    EXPECT_EQ(gather_for_metrics(raw::zeros({4}, kF32), plan.active()).size(0), 8);
  });
}

TEST(FacadeMetrics, MET_1_OneProcessGetsWhatItHas) {
  LoaderPlan plan;
  DataLoader loader(std::make_shared<Numbers>(5), {.batch_size = 2});
  plan.prepare(loader);
  for (Tensor& batch : loader) {
    const auto [rows, scalar] =
        gather_for_metrics(std::pair(batch, scalar_tensor(1.5, kF32)), plan.active());
    EXPECT_EQ(rows.data(), batch.data());
    EXPECT_EQ(scalar.shape(), Shape({1}));
  }
}

}  // namespace
}  // namespace tessera::accelerate::test_facade_metrics
