// How ranks share loaders. IDs (SCR, DDL, DL) are the scenarios of docs/accelerate-scenarios.md;
// traps are those that other libraries fell into.
// ctest labels: threads
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include <tessera/accelerate/loaders/loader_plan.h>
#include <tessera/accelerate/process/operations.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/nn/linear.h>

#include "accelerate/loader_fixture.h"

namespace tessera::accelerate::test_facade_loaders {
namespace {

// ---- DL-1: the tables
// ----------------------------------------------------------------------------

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
  compared_ranks(2, [](int rank) {
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
  compared_ranks(2, [](int) {
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

// ---- SCR-6 to 9
// ----------------------------------------------------------------------------------

TEST(FacadeLoaders, SCR_6_GatheredBatchesAreTheDataSet) {
  for (const int n : {1, 2, 4}) {
    compared_ranks(n, [n](int) {
      for (const bool split : {false, true}) {
        for (const bool dispatch : {false, true}) {
          for (const bool shuffle : {false, true}) {
            LoaderPlan plan(world(), {.split_batches = split, .dispatch_batches = dispatch});
            DataLoader loader(std::make_shared<Numbers>(32 * n),
                              {.batch_size = 8, .shuffle = shuffle});
            plan.prepare(loader);
            Indices all;
            for (Tensor& batch : loader) {
              EXPECT_EQ(batch.size(0), split ? 8 / n : 8);
              const Indices turn = values_of(gather(batch));
              all.insert(all.end(), turn.begin(), turn.end());
            }
            Indices expected(static_cast<size_t>(32 * n));
            std::iota(expected.begin(), expected.end(), 0);
            if (shuffle) {
              EXPECT_NE(all, expected);
              std::ranges::sort(all);
            }
            EXPECT_EQ(all, expected);
          }
        }
      }
    });
  }
}

TEST(FacadeLoaders, SCR_7_ABatchSamplerOfTheUserStaysInTheShard) {
  compared_ranks(2, [](int) {
    const auto sampler = std::make_shared<data::BatchList>(Batches{{0, 1}, {2}, {3, 4}, {5}});
    DataLoader<int64_t> loader(std::make_shared<Numbers>(6), sampler);
    LoaderPlan plan;
    plan.prepare(loader);
    const auto* share = dynamic_cast<const data::RoundRobinSource*>(loader.source().get());
    ASSERT_NE(share, nullptr);
    const auto* whole = dynamic_cast<const data::BatchSamplerSource*>(share->batches().get());
    ASSERT_NE(whole, nullptr);
    EXPECT_EQ(whole->sampler(), sampler);
  });
}

TEST(FacadeLoaders, SCR_8_AnEpochIsTheSameWheneverItIsRead) {
  compared_ranks(2, [](int) {
    const auto epochs_of = [](uint64_t seed, int64_t first, int count) {
      LoaderPlan plan;
      DataLoader loader(std::make_shared<Numbers>(48),
                        {.batch_size = 4, .shuffle = true, .seed = seed});
      plan.prepare(loader);
      loader.set_epoch(first);
      std::vector<Batches> epochs;
      for (int i = 0; i < count; ++i) epochs.push_back(epoch_of(loader));
      return epochs;
    };
    const auto epochs = epochs_of(42, 0, 3);
    EXPECT_EQ(epochs_of(42, 0, 3), epochs);
    EXPECT_EQ(epochs_of(42, 1, 2), (std::vector<Batches>{epochs[1], epochs[2]}));
    EXPECT_NE(epochs[0], epochs[1]);  // upstream once had the same order in each epoch
    EXPECT_NE(epochs_of(43, 0, 3), epochs);
    // Trap 22: upstream adds seed and epoch, so that (42, epoch 1) is (43, epoch 0).
    EXPECT_NE(epochs_of(43, 0, 1)[0], epochs[1]);
  });
}

TEST(FacadeLoaders, SCR_9_TheSamplerInTheShardIsTheLoadersOwn) {
  compared_ranks(2, [](int) {
    DataLoader loader(std::make_shared<Numbers>(8), {.batch_size = 2, .shuffle = true});
    const auto* whole = dynamic_cast<const data::BatchSource*>(loader.source().get());
    ASSERT_NE(whole, nullptr);
    const std::shared_ptr<const data::Sampler> sampler = whole->sampler();
    EXPECT_NE(dynamic_cast<const data::RandomSampler*>(sampler.get()), nullptr);
    LoaderPlan plan;
    plan.prepare(loader);
    const auto* share = dynamic_cast<const data::DistributedBatchSource*>(loader.source().get());
    ASSERT_NE(share, nullptr);
    EXPECT_EQ(share->sampler(), sampler);
  });
}

// ---- DDL
// -----------------------------------------------------------------------------------------

Ranks sizes_of(const Ranks& ranks) {
  Ranks sizes = ranks;
  for (Batches& batches : sizes) {
    for (Indices& batch : batches) batch = {static_cast<int64_t>(batch.size())};
  }
  return sizes;
}

TEST(FacadeLoaders, DDL_1_ThreeSamplesOneByOne) {
  EXPECT_EQ(sizes_of(on_ranks(2, {}, numbers_loader(3, 1))), (Ranks{{{1}, {1}}, {{1}, {1}}}));
}
TEST(FacadeLoaders, DDL_2_SevenSamplesTwoByTwo) {
  EXPECT_EQ(sizes_of(on_ranks(2, {}, numbers_loader(7, 2))), (Ranks{{{2}, {2}}, {{2}, {2}}}));
}
TEST(FacadeLoaders, DDL_3_UnevenGivesWhatThereIs) {
  const LoaderPlanOptions uneven{.even_batches = false};
  EXPECT_EQ(sizes_of(on_ranks(2, uneven, numbers_loader(3, 1))), (Ranks{{{1}, {1}}, {{1}}}));
  EXPECT_EQ(sizes_of(on_ranks(2, uneven, numbers_loader(7, 2))), (Ranks{{{2}, {2}}, {{2}, {1}}}));
}

TEST(FacadeLoaders, DDL_4_UnevenRanksTrainUnderJoin) {
  compared_ranks(2, [](int rank) {
    nn::Linear model(1, 1);
    distributed::Mesh mesh(world());
    auto replica = distributed::replicate(model, mesh);
    LoaderPlan plan;
    DataLoader loader(std::make_shared<Numbers>(3), {.batch_size = 1});
    plan.prepare(loader);
    Indices turns;
    {
      const EvenBatchesScope uneven(plan, false);
      distributed::Join join = replica.join();
      for (Tensor& batch : loader) {
        model(batch.to(kF32).view({1, 1})).sum().backward();
        turns.push_back(static_cast<int64_t>(turns.size()));
        for (const auto& [name, parameter] : model.named_parameters()) parameter.zero_grad();
      }
      join.finish();
    }
    EXPECT_EQ(turns, (rank == 0 ? Indices{0, 1} : Indices{0}));
    EXPECT_EQ(epoch_of(loader).size(), 2U);
  });
}

TEST(FacadeLoaders, DDL_5_EvenBatchesAreLiveAndComeBack) {
  compared_ranks(2, [](int rank) {
    const size_t uneven_batches = rank == 0 ? 2 : 1;
    LoaderPlan plan;
    const auto train = numbers_loader(3, 1)(), validation = numbers_loader(3, 1)();
    plan.prepare(*train), plan.prepare(*validation);
    {
      const EvenBatchesScope scope(plan, false);
      EXPECT_FALSE(plan.even_batches());
      EXPECT_EQ(epoch_of(*train).size(), uneven_batches);
      EXPECT_EQ(epoch_of(*validation).size(), uneven_batches);
    }
    EXPECT_TRUE(plan.even_batches());
    EXPECT_EQ(epoch_of(*train).size(), 2U);
    EXPECT_EQ(epoch_of(*validation).size(), 2U);
    EXPECT_THROW(
        {
          const EvenBatchesScope scope(plan, false);
          throw ValueError("in the scope");
        },
        ValueError);
    EXPECT_TRUE(plan.even_batches());
    // In the middle of a loop: from the next batch on, and the batch in hand stays.
    Batches seen;
    for (Tensor& batch : *train) {
      plan.set_even_batches(false);
      seen.push_back(values_of(batch));
    }
    EXPECT_EQ(seen.size(), uneven_batches);
  });
}

// Upstream can only warn about iterable loaders; here they change as the others do.
TEST(FacadeLoaders, DDL_6_StreamsAreOverriddenAndRestoredToo) {
  compared_ranks(2, [](int rank) {
    LoaderPlan plan;
    const auto indexed = numbers_loader(3, 1)();
    const auto stream = stream_loader(3, 1)();
    plan.prepare(*indexed), plan.prepare(*stream);
    for (const bool even : {true, false, true}) {
      const EvenBatchesScope scope(plan, even);
      const size_t expected = even || rank == 0 ? 2 : 1;
      EXPECT_EQ(epoch_of(*indexed).size(), expected);
      EXPECT_EQ(epoch_of(*stream).size(), expected);
    }
  });
}

// A loader that is thrown away after k batches and another one that goes on from its state.
template <class Make>
void expect_resumes_anywhere(const LoaderPlanOptions& options, Make make) {
  Ranks epochs[2];
  epochs[0].resize(2), epochs[1].resize(2);
  compared_ranks(2, [&](int rank) {
    LoaderPlan plan(world(), options);
    const auto loader = make();
    plan.prepare(*loader);
    for (Ranks& epoch : epochs) epoch[static_cast<size_t>(rank)] = epoch_of(*loader);
  });
  for (size_t stop = 0; stop <= epochs[0][0].size(); ++stop) {
    SCOPED_TRACE(testing::Message() << "after " << stop << " batches");
    compared_ranks(2, [&](int rank) {
      const Batches& all = epochs[0][static_cast<size_t>(rank)];
      StateDict state;
      {
        LoaderPlan plan(world(), options);
        const auto loader = make();
        plan.prepare(*loader);
        size_t read = 0;
        if (stop == 0) state = loader->state_dict();
        for ([[maybe_unused]] Tensor& batch : *loader) {
          if (++read == stop) {
            state = loader->state_dict();
            break;
          }
        }
      }
      LoaderPlan plan(world(), options);
      const auto loader = make();
      plan.prepare(*loader);
      loader->load_state_dict(state);
      // A state of the last batch is the next epoch's start: no loop is empty.
      if (stop < all.size()) {
        EXPECT_EQ(epoch_of(*loader),
                  Batches(all.begin() + static_cast<std::ptrdiff_t>(stop), all.end()));
      }
      EXPECT_EQ(epoch_of(*loader), epochs[1][static_cast<size_t>(rank)]);  // epoch 1
    });
  }
}

TEST(FacadeLoaders, DDL_9_DL_7_StateAtEveryPositionGoesOnWithTheSameBatches) {
  for (const int workers : {0, 2}) {
    for (const bool dispatch : {false, true}) {
      for (const bool drop_last : {false, true}) {
        const LoaderPlanOptions mode{.dispatch_batches = dispatch};
        const data::DataLoaderOptions options{.batch_size = 3,
                                              .shuffle = true,
                                              .seed = 5,
                                              .drop_last = drop_last,
                                              .workers = workers};
        expect_resumes_anywhere(mode, [&] {
          return std::make_unique<DataLoader<int64_t>>(std::make_shared<Numbers>(22), options);
        });
        data::DataLoaderOptions in_order = options;
        in_order.shuffle = false;
        expect_resumes_anywhere(mode, [&] {
          return std::make_unique<StreamLoader<int64_t>>(std::make_shared<NumberStream>(22),
                                                         in_order);
        });
        expect_resumes_anywhere(mode, [&] {
          return std::make_unique<StreamLoader<int64_t>>(std::make_shared<NumberParts>(), in_order);
        });
        expect_resumes_anywhere(mode, [&] {
          return std::make_unique<DataLoader<int64_t>>(
              std::make_shared<Numbers>(9),
              std::make_shared<data::BatchList>(Batches{{0, 1}, {2}, {3, 4, 5}, {6}, {7, 8}}),
              in_order);
        });
      }
    }
  }
}

TEST(FacadeLoaders, DDL_9_ARunGoesOnWithAnotherNumberOfRanks) {
  Indices read;
  StateDict state;
  const auto loader_of = [] {
    return DataLoader<int64_t>(std::make_shared<Numbers>(24),
                               {.batch_size = 2, .shuffle = true, .seed = 1});
  };
  compared_ranks(3, [&](int rank) {
    auto loader = loader_of();
    LoaderPlan plan;
    plan.prepare(loader);
    for (int i = 0; i < 2; ++i) {
      const Indices turn = values_of(gather(*loader.next()));
      if (rank == 0) read.insert(read.end(), turn.begin(), turn.end());
    }
    if (rank == 0) state = loader.state_dict();
  });
  auto alone = loader_of();
  alone.load_state_dict(state);
  for (const Indices& batch : epoch_of(alone)) read.insert(read.end(), batch.begin(), batch.end());
  auto whole = loader_of();
  Indices expected;
  for (const Indices& batch : epoch_of(whole)) {
    expected.insert(expected.end(), batch.begin(), batch.end());
  }
  EXPECT_EQ(read, expected);
}

// ---- Random numbers of examples -----------------------------------------------------------------

// Example i is (i, a number drawn for it).
class Noisy : public data::Dataset<std::array<Tensor, 2>> {
 public:
  int64_t size() const override { return 22; }
  std::array<Tensor, 2> get(int64_t index) const override {
    return {scalar_tensor(index, kI64), rand({1})};
  }
};

TEST(FacadeLoaders, AnExampleDrawsTheSameNumbersOnAnyNumberOfRanks) {
  using Numbers = std::map<int64_t, float>;
  const auto add = [](Numbers& numbers, const std::array<Tensor, 2>& batch) {
    const Indices indices = values_of(batch[0]);
    const std::vector<float> drawn = batch[1].to_vector<float>();
    for (size_t i = 0; i < indices.size(); ++i) {
      // Copies that fill a batch up are equal to their originals.
      EXPECT_EQ(numbers.try_emplace(indices[i], drawn[i]).first->second, drawn[i]);
    }
  };
  Numbers expected;
  manual_seed(11);
  DataLoader alone(std::make_shared<Noisy>(), {.batch_size = 4, .shuffle = true});
  for (auto& batch : alone) add(expected, batch);
  EXPECT_EQ(expected.size(), 22U);
  manual_seed(0);
  for (const auto& options :
       {LoaderPlanOptions{}, {.split_batches = true}, {.dispatch_batches = true}}) {
    std::vector<Numbers> found(2);
    std::array<uint64_t, 2> seeds{};
    compared_ranks(2, [&](int rank) {
      manual_seed(rank == 0 ? 11 : 99);  // the loader's becomes rank 0's
      DataLoader loader(std::make_shared<Noisy>(),
                        {.batch_size = 4, .shuffle = true, .workers = rank});
      LoaderPlan plan(world(), options);
      plan.prepare(loader);
      for (auto& batch : loader) add(found[static_cast<size_t>(rank)], batch);
      seeds[static_cast<size_t>(rank)] = random_state().seed;
    });
    EXPECT_EQ(seeds, (std::array<uint64_t, 2>{11, 99}));  // the threads' own are left alone
    for (const auto& [index, number] : found[1]) found[0].try_emplace(index, number);
    EXPECT_EQ(found[0], expected);
  }
}

// ---- DL-3: skipping
// ------------------------------------------------------------------------------

TEST(FacadeLoaders, DL_3_SkippingBatchesLeavesTheFirstOnesOutOnce) {
  const auto loader = numbers_loader(16, 4)();
  EXPECT_EQ(loader->remaining_batches(), 4);
  loader->skip_batches(2);
  EXPECT_EQ(loader->remaining_batches(), 2);
  EXPECT_EQ(epoch_of(*loader), (Batches{{8, 9, 10, 11}, {12, 13, 14, 15}}));
  EXPECT_EQ(epoch_of(*loader).size(), 4U);
  loader->skip_batches(9);
  EXPECT_TRUE(epoch_of(*loader).empty());
  EXPECT_THROW(loader->skip_batches(-1), ValueError);
}

TEST(FacadeLoaders, DL_3_SkippingTakesNoTimeAndReadsNothing) {
  compared_ranks(2, [](int rank) {
    const int64_t huge = int64_t{1} << 50;
    const auto loader = numbers_loader(huge, 4)();
    LoaderPlan plan;
    plan.prepare(*loader);
    loader->skip_batches(huge / 8 - 1);
    EXPECT_EQ(epoch_of(*loader).size(), 1U);
    EXPECT_EQ(loader->cursor(), (data::LoaderCursor{1, 0}));
    loader->skip_batches(int64_t{1} << 40);
    EXPECT_EQ((*loader->begin()).to_vector<int64_t>()[0], 8 * (int64_t{1} << 40) + 4 * rank);
  });
}

// Traps: upstream's loader that skips batches forgets drop_last.
TEST(FacadeLoaders, DL_3_SkippingKeepsDropLast) {
  compared_ranks(2, [](int rank) {
    for (const bool dispatch : {false, true}) {
      LoaderPlan plan(world(), {.dispatch_batches = dispatch});
      const auto indexed = numbers_loader(23, 5, true)();
      const auto stream = stream_loader(23, 5, true)();
      plan.prepare(*indexed), plan.prepare(*stream);
      indexed->skip_batches(1), stream->skip_batches(1);
      const Batches expected{rank == 0 ? Indices{10, 11, 12, 13, 14} : Indices{15, 16, 17, 18, 19}};
      EXPECT_EQ(epoch_of(*indexed), expected);
      EXPECT_EQ(epoch_of(*stream), expected);
    }
  });
}

// ---- DL-4, DL-5
// ----------------------------------------------------------------------------------

template <class Loader>
void expect_end_only_at_last(LoaderPlan& plan, Loader& loader, size_t expected) {
  std::vector<bool> flags;
  EXPECT_FALSE(plan.end_of_loader());
  for ([[maybe_unused]] Tensor& batch : loader) flags.push_back(plan.end_of_loader());
  EXPECT_FALSE(plan.end_of_loader());
  std::vector<bool> only_last(expected);
  if (expected > 0) only_last.back() = true;
  EXPECT_EQ(flags, only_last);
}

TEST(FacadeLoaders, DL_4_TheEndFlagIsTrueOnTheLastBatchOnly) {
  for (const int n : {1, 2, 3}) {
    compared_ranks(n, [n](int rank) {
      for (const bool dispatch : {false, true}) {
        for (const Way way : {Way::kEven, Way::kUneven, Way::kDropLast}) {
          for (const int64_t size : {1, 12, 13, 22, 23, 24}) {
            SCOPED_TRACE(testing::Message()
                         << n << " ranks, " << size << " samples, way " << static_cast<int>(way));
            LoaderPlan plan(world(),
                            {.dispatch_batches = dispatch, .even_batches = way == Way::kEven});
            const bool drop = way == Way::kDropLast;
            const auto indexed = numbers_loader(size, 4, drop)();
            const auto stream = stream_loader(size, 4, drop)();
            plan.prepare(*indexed), plan.prepare(*stream);
            const int64_t turns = size / (4 * n), over = size % (4 * n);
            const bool partial =
                over > 0 &&
                (n == 1 ? !drop : way == Way::kEven || (way == Way::kUneven && over > 4 * rank));
            const size_t expected = static_cast<size_t>(turns + (partial ? 1 : 0));
            for (int pass = 0; pass < 2; ++pass) {
              expect_end_only_at_last(plan, *indexed, expected);
              expect_end_only_at_last(plan, *stream, expected);
            }
            if (turns > 0) {  // on all ranks
              indexed->skip_batches(1), stream->skip_batches(1);
              expect_end_only_at_last(plan, *indexed, expected - 1);
              expect_end_only_at_last(plan, *stream, expected - 1);
            }
          }
        }
      }
      LoaderPlan plan;
      StreamLoader<int64_t> parts(std::make_shared<NumberParts>(), {.batch_size = 2});
      plan.prepare(parts);
      if (n == 2) expect_end_only_at_last(plan, parts, 4);
    });
  }
}

TEST(FacadeLoaders, DL_4_ALoopOverOneLoaderHoldsTheFlagOfAnother) {
  LoaderPlan plan;
  const auto outer = numbers_loader(4, 2)(), inner = numbers_loader(3, 1)();
  plan.prepare(*outer), plan.prepare(*inner);
  std::vector<bool> outer_flags;
  for ([[maybe_unused]] Tensor& batch : *outer) {
    EXPECT_EQ(plan.active(), outer.get());
    std::vector<bool> inner_flags;
    for ([[maybe_unused]] Tensor& other : *inner) {
      EXPECT_EQ(plan.active(), inner.get());
      inner_flags.push_back(plan.end_of_loader());
    }
    EXPECT_EQ(inner_flags, (std::vector<bool>{false, false, true}));
    EXPECT_EQ(plan.active(), outer.get());
    outer_flags.push_back(plan.end_of_loader());
  }
  EXPECT_EQ(outer_flags, (std::vector<bool>{false, true}));
  EXPECT_EQ(plan.active(), nullptr);
}

// Trap 5: upstream's stack of loaders keeps one whose loop was left by break or by an exception.
TEST(FacadeLoaders, DL_4_LeavingALoopEarlyEndsIt) {
  LoaderPlan plan;
  const auto outer = numbers_loader(8, 2)(), inner = numbers_loader(3, 1)();
  plan.prepare(*outer), plan.prepare(*inner);
  for ([[maybe_unused]] Tensor& batch : *outer) {
    for ([[maybe_unused]] Tensor& other : *inner) break;
    EXPECT_EQ(plan.active(), outer.get());
    try {
      for ([[maybe_unused]] Tensor& other : *inner) throw ValueError("in the loop");
    } catch (const ValueError&) {
    }
    EXPECT_EQ(plan.active(), outer.get());
    // Batches taken without a loop do not take the loop's place.
    inner->next();
    EXPECT_EQ(plan.active(), outer.get());
  }
  inner->set_epoch(0);
  EXPECT_EQ(epoch_of(*inner).size(), 3U);
  EXPECT_EQ(plan.active(), nullptr);
  while (inner->next()) EXPECT_EQ(plan.active(), inner.get());
  EXPECT_EQ(plan.active(), nullptr);
}

TEST(FacadeLoaders, DL_4_ALoopThatIsLeftEarlyIsFollowedByTheNextEpochOnAllRanks) {
  compared_ranks(2, [](int rank) {
    for (const bool dispatch : {false, true}) {
      LoaderPlan plan(world(), {.dispatch_batches = dispatch});
      DataLoader indexed(std::make_shared<Numbers>(16), {.batch_size = 2, .workers = 2});
      const auto stream = stream_loader(16, 2)();
      plan.prepare(indexed), plan.prepare(*stream);
      for ([[maybe_unused]] Tensor& batch : indexed) break;
      for ([[maybe_unused]] Tensor& batch : *stream) break;
      const Indices first = rank == 0 ? Indices{0, 1} : Indices{2, 3};
      EXPECT_EQ(epoch_of(indexed).front(), first);
      EXPECT_EQ(epoch_of(*stream).front(), first);
      EXPECT_EQ(indexed.cursor().epoch, 2);
    }
  });
}

TEST(FacadeLoaders, DL_5_SetEpochReachesTheSamplerAndSkippingKeepsTheEpoch) {
  struct Recorder : data::BatchSampler {
    int64_t size() const override { return 4; }
    Indices batch(int64_t epoch, int64_t number) const override { return {10 * epoch + number}; }
  };
  compared_ranks(2, [](int rank) {
    LoaderPlan plan;
    DataLoader<int64_t> loader(std::make_shared<Numbers>(100), std::make_shared<Recorder>());
    plan.prepare(loader);
    EXPECT_EQ(epoch_of(loader), (rank == 0 ? Batches{{0}, {2}} : Batches{{1}, {3}}));
    EXPECT_EQ(epoch_of(loader), (rank == 0 ? Batches{{10}, {12}} : Batches{{11}, {13}}));
    loader.set_epoch(7);
    EXPECT_EQ(epoch_of(loader), (rank == 0 ? Batches{{70}, {72}} : Batches{{71}, {73}}));
    loader.skip_batches(1);
    EXPECT_EQ(loader.cursor().epoch, 8);
    EXPECT_EQ(epoch_of(loader), (rank == 0 ? Batches{{82}} : Batches{{83}}));
    for ([[maybe_unused]] Tensor& batch : loader) break;
    loader.skip_batches(1);  // of the next loop, which is the next epoch
    EXPECT_EQ(epoch_of(loader), (rank == 0 ? Batches{{102}} : Batches{{103}}));
  });
}

// ---- DL-6 and what prepare() promises
// ------------------------------------------------------------

TEST(FacadeLoaders, DL_6_LoadersAndPlansMayGoInAnyOrder) {
  compared_ranks(2, [](int) {
    const auto loader = numbers_loader(8, 2)();
    const auto source = loader->source();
    {
      LoaderPlan plan;
      {
        const auto short_lived = numbers_loader(8, 2)();
        plan.prepare(*short_lived), plan.prepare(*loader);
        short_lived->next();
        EXPECT_EQ(plan.active(), short_lived.get());
        EXPECT_EQ(plan.loaders().size(), 2U);
      }
      EXPECT_EQ(plan.active(), nullptr);
      EXPECT_EQ(plan.loaders(), std::vector<data::LoaderBase*>{loader.get()});
      plan.set_even_batches(false);  // touches no loader that is gone
      EXPECT_NE(loader->source(), source);
    }
    EXPECT_EQ(loader->source(), source);  // alone again
    EXPECT_EQ(epoch_of(*loader).size(), 4U);
  });
}

TEST(FacadeLoaders, DL_6_PrepareChangesALoaderOnceAndReleaseUndoesIt) {
  compared_ranks(2, [](int rank) {
    LoaderPlan plan, other;
    const auto loader = numbers_loader(6, 2)();
    const auto stream = stream_loader(6, 2)();
    plan.prepare(*loader), plan.prepare(*stream);
    const auto share = loader->source();
    plan.prepare(*loader), plan.prepare(*stream);
    EXPECT_EQ(loader->source(), share);
    EXPECT_THROW(other.prepare(*loader), ConfigError);
    EXPECT_THROW(other.prepare(*stream), ConfigError);
    EXPECT_EQ(plan.describe(*loader),
              "sharded, 2 ranks x 2 samples, even batches, 2 batches a rank");
    EXPECT_EQ(plan.describe(*stream), "dispatched from rank 0, 2 ranks x 2 samples, even batches");
    EXPECT_THROW(other.mode(*loader), ValueError);
    EXPECT_EQ(epoch_of(*loader).front(), (rank == 0 ? Indices{0, 1} : Indices{2, 3}));
    plan.release_all();
    other.prepare(*loader);
    EXPECT_EQ(epoch_of(*loader).size(), 2U);
    EXPECT_EQ(epoch_of(*stream).size(), 3U);
    // A share that somebody gave it by hand.
    const auto dealt = numbers_loader(6, 2)();
    dealt->set_source(share);
    EXPECT_THROW(plan.prepare(*dealt), ConfigError);
  });
}

TEST(FacadeLoaders, DL_6_OneRankChangesAndCommunicatesNothing) {
  const distributed::CommTrace::Scope scope(world().trace());
  LoaderPlan plan(world(), {.split_batches = true, .dispatch_batches = true});
  const auto loader = numbers_loader(5, 2)();
  const auto stream = stream_loader(5, 2)();
  const auto source = loader->source();
  plan.prepare(*loader), plan.prepare(*stream);
  EXPECT_EQ(loader->source(), source);
  EXPECT_EQ(loader->relay(), nullptr);
  EXPECT_EQ(stream->relay(), nullptr);
  EXPECT_EQ(plan.mode(*loader), LoaderMode::kWhole);
  EXPECT_EQ(epoch_of(*loader), (Batches{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(epoch_of(*stream), (Batches{{0, 1}, {2, 3}, {4}}));
  EXPECT_TRUE(scope.records().empty());
}

TEST(FacadeLoaders, DL_6_LoadersThatDifferBetweenRanksAreRefusedByName) {
  const auto refused = [](auto make) {
    compared_ranks(2, [&](int rank) {
      auto loader = make(rank);
      LoaderPlan plan;
      try {
        plan.prepare(*loader);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const OperationMismatch& error) {
        EXPECT_NE(std::string(error.what()).find("rank 1: loader of"), std::string::npos)
            << error.what();
      }
    });
  };
  refused([](int rank) { return numbers_loader(6, 2 + rank)(); });
  refused([](int rank) { return numbers_loader(6 + rank, 2)(); });
  refused([](int rank) {  // one order for each rank: some samples twice, some never
    return std::make_unique<DataLoader<int64_t>>(
        std::make_shared<Numbers>(64),
        data::DataLoaderOptions{.shuffle = true, .seed = static_cast<uint64_t>(rank)});
  });
  refused([](int rank) { return stream_loader(6, 2 + rank)(); });
}

// The axis decides, not the world: ranks that differ along another axis have the same batches.
TEST(FacadeLoaders, DL_6_RanksOfAnotherAxisReadTheSame) {
  for (const bool dispatch : {false, true}) {
    Ranks ranks(4);
    compared_ranks(4, [&](int rank) {
      distributed::Mesh mesh(world(), {{"dp", 2}, {"tp", 2}});
      LoaderPlan plan(mesh.group("dp"), {.dispatch_batches = dispatch});
      const auto loader = numbers_loader(7, 2)();
      plan.prepare(*loader);
      EXPECT_EQ(loader->total_batch_size(), 4);
      ranks[static_cast<size_t>(rank)] = epoch_of(*loader);
    });
    EXPECT_EQ(ranks[0], (Batches{{0, 1}, {4, 5}}));
    EXPECT_EQ(ranks[2], (Batches{{2, 3}, {6, 0}}));
    EXPECT_EQ(ranks[1], ranks[0]);
    EXPECT_EQ(ranks[3], ranks[2]);
  }
}

TEST(FacadeLoaders, DL_6_SizesAreThoseOfAllRanks) {
  compared_ranks(2, [](int) {
    LoaderPlan plan;
    const auto loader = numbers_loader(22, 3)(), full = numbers_loader(24, 3)();
    const auto dropping = numbers_loader(22, 3, true)();
    const auto stream = stream_loader(22, 3)();
    plan.prepare(*loader), plan.prepare(*full), plan.prepare(*dropping), plan.prepare(*stream);
    EXPECT_EQ(loader->dataset_size(), 22);
    EXPECT_EQ(loader->total_batch_size(), 6);
    EXPECT_EQ(loader->remainder(), 4);
    EXPECT_EQ(full->remainder(), 0);
    EXPECT_EQ(dropping->remainder(), 0);
    EXPECT_EQ(stream->dataset_size(), -1);
    EXPECT_EQ(stream->total_batch_size(), 6);
    EXPECT_EQ(stream->remainder(), 0);
    EXPECT_EQ(loader->size(), 4);
    EXPECT_EQ(dropping->size(), 3);
  });
}

}  // namespace
}  // namespace tessera::accelerate::test_facade_loaders
