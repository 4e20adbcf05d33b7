// How ranks share loaders. IDs (SCR, DDL, DL) are the scenarios of docs/accelerate-scenarios.md;
// traps are those that other libraries fell into.
// ctest labels: threads
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <numeric>
#include <set>

#include <tessera/accelerate/loader_plan.h>
#include <tessera/accelerate/operations.h>
#include <tessera/core/factory.h>
#include <tessera/distributed/run_ranks.h>

namespace tessera::accelerate {
namespace {

using data::DataLoader;
using data::StreamLoader;
using distributed::run_ranks;
using distributed::world;
using Indices = std::vector<int64_t>;
using Batches = std::vector<Indices>;
using Ranks = std::vector<Batches>;

// Example i is i.
struct Numbers : data::Dataset<int64_t> {
  explicit Numbers(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  int64_t get(int64_t index) const override { return index; }
  int64_t size_;
};

// 0, 1, 2... that counts how often it was opened.
struct NumberStream : data::IterableDataset<int64_t> {
  explicit NumberStream(int64_t size) : size_(size) {}
  std::unique_ptr<data::ExampleStream<int64_t>> open(int64_t) const override {
    struct Pass : data::ExampleStream<int64_t> {
      explicit Pass(const NumberStream& stream) : stream_(stream) {}
      std::optional<int64_t> next() override {
        if (next_ == stream_.size_) return std::nullopt;
        ++stream_.read;
        return next_++;
      }
      const NumberStream& stream_;
      int64_t next_ = 0;
    };
    ++opened;
    return std::make_unique<Pass>(*this);
  }
  int64_t size_;
  mutable std::atomic<int> opened{0}, read{0};
};

Indices values_of(const Tensor& tensor) { return tensor.to_vector<int64_t>(); }

template <class Loader>
Batches epoch_of(Loader& loader) {
  Batches batches;
  for (Tensor& batch : loader) batches.push_back(values_of(batch));
  return batches;
}

// How many rows of each batch count.
template <class Loader>
Indices samples_of(Loader& loader) {
  Indices samples;
  for (Tensor& batch : loader) {
    EXPECT_EQ(loader.batch_rows(), batch.size(0));
    samples.push_back(loader.batch_samples());
  }
  return samples;
}

// One epoch on each of `n` ranks.
template <class Make>
Ranks on_ranks(int n, const LoaderPlanOptions& options, Make make) {
  Ranks ranks(static_cast<size_t>(n));
  run_ranks(n, [&](int rank) {
    auto loader = make();
    LoaderPlan plan(world(), options);
    plan.prepare(*loader);
    ranks[static_cast<size_t>(rank)] = epoch_of(*loader);
  });
  return ranks;
}

auto numbers_loader(int64_t size, int64_t batch_size, bool drop_last = false) {
  return [=] {
    return std::make_unique<DataLoader<int64_t>>(
        std::make_shared<Numbers>(size),
        data::DataLoaderOptions{.batch_size = batch_size, .drop_last = drop_last});
  };
}
auto stream_loader(int64_t size, int64_t batch_size, bool drop_last = false) {
  return [=] {
    return std::make_unique<StreamLoader<int64_t>>(
        std::make_shared<NumberStream>(size),
        data::DataLoaderOptions{.batch_size = batch_size, .drop_last = drop_last});
  };
}

enum class Way { kEven, kUneven, kDropLast };

// ---- DL-1: the tables
// -----------------------------------------------------------------------------

struct Row {
  int64_t size, batch_size;
  bool split;
  Way way;
  size_t rounds;   // of rank 0
  Indices r0, r1;  // in the last round; empty: no batch
};

const Indices kNone;

TEST(FacadeLoaders, DL_1_TablesOfTwoRanks) {
  const Row rows[] = {
      {24, 3, false, Way::kEven, 4, {18, 19, 20}, {21, 22, 23}},
      {24, 3, false, Way::kUneven, 4, {18, 19, 20}, {21, 22, 23}},
      {24, 3, false, Way::kDropLast, 4, {18, 19, 20}, {21, 22, 23}},
      {21, 3, false, Way::kEven, 4, {18, 19, 20}, {0, 1, 2}},
      {21, 3, false, Way::kUneven, 4, {18, 19, 20}, kNone},
      {21, 3, false, Way::kDropLast, 3, {12, 13, 14}, {15, 16, 17}},
      {22, 3, false, Way::kEven, 4, {18, 19, 20}, {21, 0, 1}},
      {22, 3, false, Way::kUneven, 4, {18, 19, 20}, {21}},
      {22, 3, false, Way::kDropLast, 3, {12, 13, 14}, {15, 16, 17}},
      {20, 3, false, Way::kEven, 4, {18, 19, 0}, {1, 2, 3}},
      {20, 3, false, Way::kUneven, 4, {18, 19}, kNone},
      {20, 3, false, Way::kDropLast, 3, {12, 13, 14}, {15, 16, 17}},
      {2, 3, false, Way::kEven, 1, {0, 1, 0}, {1, 0, 1}},
      {2, 3, false, Way::kUneven, 1, {0, 1}, kNone},
      {2, 3, false, Way::kDropLast, 0, kNone, kNone},
      {24, 4, true, Way::kEven, 6, {20, 21}, {22, 23}},
      {24, 4, true, Way::kUneven, 6, {20, 21}, {22, 23}},
      {24, 4, true, Way::kDropLast, 6, {20, 21}, {22, 23}},
      {22, 4, true, Way::kEven, 6, {20, 21}, {0, 1}},
      {22, 4, true, Way::kUneven, 6, {20, 21}, kNone},
      {22, 4, true, Way::kDropLast, 5, {16, 17}, {18, 19}},
      {21, 4, true, Way::kEven, 6, {20, 0}, {1, 2}},
      {21, 4, true, Way::kUneven, 6, {20}, kNone},
      {21, 4, true, Way::kDropLast, 5, {16, 17}, {18, 19}},
      {2, 4, true, Way::kEven, 1, {0, 1}, {0, 1}},
      {2, 4, true, Way::kUneven, 1, {0, 1}, kNone},
      {2, 4, true, Way::kDropLast, 0, kNone, kNone},
  };
  for (const Row& row : rows) {
    for (const bool dispatch : {false, true}) {
      for (const bool stream : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << row.size << " samples, batches of " << row.batch_size << ", split "
                     << row.split << ", way " << static_cast<int>(row.way) << ", dispatch "
                     << dispatch << ", stream " << stream);
        const LoaderPlanOptions options{.split_batches = row.split,
                                        .dispatch_batches = dispatch,
                                        .even_batches = row.way == Way::kEven};
        const bool drop = row.way == Way::kDropLast;
        const Ranks ranks =
            stream ? on_ranks(2, options, stream_loader(row.size, row.batch_size, drop))
                   : on_ranks(2, options, numbers_loader(row.size, row.batch_size, drop));
        const int64_t own = row.split ? row.batch_size / 2 : row.batch_size;
        for (const size_t rank : {0U, 1U}) {
          const Indices& last = rank == 0 ? row.r0 : row.r1;
          const size_t full = row.rounds - (row.rounds > 0 ? 1 : 0);
          ASSERT_EQ(ranks[rank].size(), full + (last.empty() ? 0 : 1));
          for (size_t round = 0; round < full; ++round) {  // the plain round robin
            Indices expected(static_cast<size_t>(own));
            std::iota(expected.begin(), expected.end(),
                      static_cast<int64_t>(round) * 2 * own + static_cast<int64_t>(rank) * own);
            EXPECT_EQ(ranks[rank][round], expected);
          }
          if (!last.empty()) {
            EXPECT_EQ(ranks[rank].back(), last);
          }
        }
      }
    }
  }
}

TEST(FacadeLoaders, DL_1_BatchesOfAnySize) {
  const Indices A{0, 1, 2}, B{3, 4}, C{5, 6, 7, 8}, D{9, 10, 11}, E{12, 13};
  const auto loader_of = [](Batches batches, bool drop_last) {
    return [=] {
      return std::make_unique<DataLoader<int64_t>>(std::make_shared<Numbers>(14),
                                                   std::make_shared<data::BatchList>(batches),
                                                   data::DataLoaderOptions{.drop_last = drop_last});
    };
  };
  for (const bool dispatch : {false, true}) {
    const LoaderPlanOptions even{.dispatch_batches = dispatch};
    const LoaderPlanOptions uneven{.dispatch_batches = dispatch, .even_batches = false};
    const Batches five{A, B, C, D, E};
    EXPECT_EQ(on_ranks(2, uneven, loader_of(five, false)), (Ranks{{A, C, E}, {B, D}}));
    EXPECT_EQ(on_ranks(2, even, loader_of(five, false)), (Ranks{{A, C, E}, {B, D, A}}));
    EXPECT_EQ(on_ranks(2, even, loader_of(five, true)), (Ranks{{A, C}, {B, D}}));
    EXPECT_EQ(on_ranks(2, even, loader_of({A}, false)), (Ranks{{A}, {A}}));
    EXPECT_EQ(on_ranks(2, uneven, loader_of({A}, false)), (Ranks{{A}, {}}));
    const Indices b[] = {{0}, {1, 2}, {3}, {4, 5, 6}, {7}, {8}, {9}};
    EXPECT_EQ(on_ranks(3, even, loader_of({b[0], b[1], b[2], b[3], b[4], b[5], b[6]}, false)),
              (Ranks{{b[0], b[3], b[6]}, {b[1], b[4], b[0]}, {b[2], b[5], b[1]}}));
  }
}

TEST(FacadeLoaders, DL_1_CopiesThatCompleteATurnDoNotCount) {
  run_ranks(2, [](int rank) {
    LoaderPlan plan;
    const auto fixed = numbers_loader(20, 3)();
    const auto listed = std::make_unique<DataLoader<int64_t>>(
        std::make_shared<Numbers>(5),
        std::make_shared<data::BatchList>(Batches{{0, 1}, {2, 3, 4}, {1}}));
    const auto stream = stream_loader(20, 3)();
    plan.prepare(*fixed), plan.prepare(*listed), plan.prepare(*stream);
    EXPECT_EQ(samples_of(*fixed), (rank == 0 ? Indices{3, 3, 3, 2} : Indices{3, 3, 3, 0}));
    EXPECT_EQ(samples_of(*listed), (rank == 0 ? Indices{2, 1} : Indices{3, 0}));
    EXPECT_EQ(samples_of(*stream), (rank == 0 ? Indices{3, 3, 3, 2} : Indices{3, 3, 3, 0}));
  });
}

TEST(FacadeLoaders, DL_1_SplitRefusesSizesThatDoNotDivide) {
  run_ranks(2, [](int) {
    for (const bool dispatch : {false, true}) {
      LoaderPlan plan(world(), {.split_batches = true, .dispatch_batches = dispatch});
      const auto odd = numbers_loader(10, 3)();
      const auto odd_stream = stream_loader(10, 3)();
      DataLoader<int64_t> listed(std::make_shared<Numbers>(5),
                                 std::make_shared<data::BatchList>(Batches{{0, 1}, {2, 3}}));
      try {
        plan.prepare(*odd);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find("round multiple"), std::string::npos);
      }
      EXPECT_THROW(plan.prepare(*odd_stream), ConfigError);
      EXPECT_THROW(plan.prepare(listed), ConfigError);  // a size that is not known
      EXPECT_EQ(epoch_of(*odd).size(), 4U);             // as it was
    }
  });
}

}  // namespace
}  // namespace tessera::accelerate
