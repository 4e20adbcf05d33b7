// Buckets, flat layouts and plans: what is known without communication.
#include <gtest/gtest.h>

#include <tessera/core/error.h>
#include <tessera/distributed/backward/buckets.h>
#include <tessera/distributed/backward/buffer.h>
#include <tessera/distributed/backward/step_plan.h>
#include <tessera/distributed/data_parallel/report.h>

namespace tessera::distributed::test_shard_geometry {
namespace {

std::vector<BucketItem> items_of(std::initializer_list<int64_t> bytes, DType dtype = kF32) {
  std::vector<BucketItem> items;
  for (const int64_t size : bytes) items.push_back({size, dtype, kCpu});
  return items;
}
BucketList assign(const std::vector<BucketItem>& items, std::vector<int64_t> caps) {
  return assign_buckets(items, caps);
}

// The tables follow those of torch's ComputeBucketAssignmentTest.
TEST(Buckets, D1_OneDtypeIsCutWhereTheCapIsReached) {
  EXPECT_EQ(assign(items_of({400, 800, 400, 800}), {400}), (BucketList{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(assign(items_of({400, 400, 400, 400}), {800}), (BucketList{{0, 1}, {2, 3}}));
  EXPECT_EQ(assign(items_of({400, 400, 400}), {800}), (BucketList{{0, 1}, {2}}));
}

TEST(Buckets, D1_EveryDtypeHasBucketsOfItsOwn) {
  std::vector<BucketItem> items;
  for (int i = 0; i < 3; ++i) {
    items.push_back({200, kF32, kCpu});
    items.push_back({400, kF64, kCpu});
  }
  EXPECT_EQ(assign(items, {400}), (BucketList{{0, 2}, {1}, {3}, {4}, {5}}));
  items = items_of({100, 100});
  items.push_back({100, kF32, cuda(0)});  // and every device
  items.push_back({100, kF32, cuda(1)});
  EXPECT_EQ(assign(items, {1000}), (BucketList{{0, 1}, {2}, {3}}));
}

TEST(Buckets, D1_TheFirstCapsComeOnceForEachDtypeAndTheLastGoesOn) {
  EXPECT_EQ(assign(items_of({40, 40, 40, 40, 40}), {40, 80}), (BucketList{{0}, {1, 2}, {3, 4}}));
  std::vector<BucketItem> items;
  for (int i = 0; i < 3; ++i) {
    items.push_back({200, kF32, kCpu});
    items.push_back({400, kF64, kCpu});
  }
  EXPECT_EQ(assign(items, {200, 400}), (BucketList{{0}, {1}, {2, 4}, {3}, {5}}));
}

TEST(Buckets, D1_AnItemLargerThanTheCapIsNotSplitAndEndsItsBucket) {
  EXPECT_EQ(assign(items_of({10, 5000, 10, 10}), {100}), (BucketList{{0, 1}, {2, 3}}));
  EXPECT_EQ(assign(items_of({5000, 10}), {100}), (BucketList{{0}, {1}}));
}

TEST(Buckets, D1_ReversedItemsGiveReversedBuckets) {
  // Positions count in the order given: 0 is the last layer.
  EXPECT_EQ(assign(items_of({400, 300, 200, 100}), {400, 500}), (BucketList{{0}, {1, 2}, {3}}));
}

TEST(Buckets, EmptyItemsAndLists) {
  EXPECT_EQ(assign({}, {1}), BucketList{});
  EXPECT_EQ(assign(items_of({0, 0}), {10}), (BucketList{{0, 1}}));
  EXPECT_THROW(assign(items_of({1}), {}), ValueError);
  EXPECT_THROW(assign(items_of({1}), {0}), ValueError);
}

using Rows = FlatLayout::Rows;
using Slice = FlatLayout::Slice;

TEST(FlatLayout, EvenChunksAreRowsWithRoomForTheLargest) {
  const std::vector<Shape> shapes{{5, 3}, {2}, {}, {0, 4}};
  const FlatLayout layout = FlatLayout::even_chunk(shapes, 4, 1);
  // [5, 3]: 2 rows a shard; [2] and the scalar: 1.
  EXPECT_EQ(layout.shard_numel(), 6 + 1 + 1 + 0);
  EXPECT_EQ(layout.gathered_numel(), 4 * 8);
  EXPECT_EQ(layout.rows(0, 0), (Rows{0, 2}));
  EXPECT_EQ(layout.rows(0, 2), (Rows{4, 5}));
  EXPECT_EQ(layout.rows(0, 3), (Rows{5, 5}));
  EXPECT_EQ(layout.rows(1, 1), (Rows{1, 2}));
  EXPECT_EQ(layout.rows(1, 2), (Rows{2, 2}));
  EXPECT_EQ(layout.local_slice(0, 2), (Slice{0, 3}));
  EXPECT_EQ(layout.local_slice(1, 0), (Slice{6, 1}));
  EXPECT_EQ(layout.local_shape(0, 3), (Shape{0, 3}));
  EXPECT_EQ(layout.local_shape(2, 0), Shape{});
  EXPECT_EQ(layout.local_shape(2, 1), Shape{0});
  EXPECT_THROW(FlatLayout::even_chunk(shapes, 0, 1), ValueError);
}

TEST(FlatLayout, RoomsAreMultiplesOfTheAlignment) {
  const std::vector<Shape> shapes{{5, 3}, {2}, {}, {0, 4}, {8, 4}};
  const FlatLayout layout = FlatLayout::even_chunk(shapes, 2, 4);
  EXPECT_EQ(layout.local_slice(0, 0), (Slice{0, 9}));
  EXPECT_EQ(layout.room(0), 12);
  EXPECT_EQ(layout.local_slice(1, 1), (Slice{12, 1}));
  EXPECT_EQ(layout.local_slice(2, 0), (Slice{16, 1}));
  EXPECT_EQ(layout.room(3), 0);
  EXPECT_EQ(layout.local_slice(4, 1), (Slice{20, 16}));
  EXPECT_EQ(layout.shard_numel(), 36);
  EXPECT_EQ(alignment_of({kF32}), 4);
  EXPECT_EQ(alignment_of({kF32, kBF16}), 8);
  EXPECT_EQ(alignment_of({kU8, kF64}), 16);
}

TEST(FlatLayout, ShardsTogetherHoldEveryRowOnceAndNeverOverlap) {
  const std::vector<Shape> shapes{{7, 2}, {1}, {16, 1, 3}, {3, 5}, {}, {64}};
  for (int shards = 1; shards <= 9; ++shards) {
    const FlatLayout layout = FlatLayout::even_chunk(shapes, shards, 1);
    std::vector<int> taken(static_cast<size_t>(layout.gathered_numel()));
    for (size_t i = 0; i < shapes.size(); ++i) {
      int64_t rows = 0, numel = 0;
      for (int shard = 0; shard < shards; ++shard) {
        EXPECT_EQ(layout.rows(i, shard).begin, rows);
        rows += layout.rows(i, shard).size();
        const Slice slice = layout.local_slice(i, shard);
        numel += slice.numel;
        const int64_t begin = shard * layout.shard_numel() + slice.offset;
        for (int64_t j = 0; j < slice.numel; ++j) ++taken[static_cast<size_t>(begin + j)];
      }
      EXPECT_EQ(rows, shapes[i].empty() ? 1 : shapes[i][0]);
      EXPECT_EQ(numel, numel_of(shapes[i]));
    }
    for (const int count : taken) EXPECT_LE(count, 1);
    if (shards == 1) {
      EXPECT_EQ(layout.gathered_numel(), 14 + 1 + 48 + 15 + 1 + 64);
    }
  }
}

TEST(FlatBuffer, HasAViewOfEveryPartWithItsOwnVersion) {
  const std::vector<Shape> shapes{{4, 3}, {2}};
  const FlatBuffer buffer(FlatLayout::even_chunk(shapes, 2, 1), 1, kF32, kCpu,
                          MemoryCategory::kGradient);
  EXPECT_EQ(buffer.flat().shape(), (Shape{7}));
  EXPECT_EQ(buffer.bytes(), 28);
  EXPECT_EQ(buffer.flat().storage()->category(), MemoryCategory::kGradient);
  EXPECT_EQ(buffer.view(0).shape(), (Shape{2, 3}));
  EXPECT_EQ(buffer.view(1).shape(), (Shape{1}));
  buffer.view(1).fill_(5);
  EXPECT_EQ(buffer.flat().to_vector(), (std::vector<double>{0, 0, 0, 0, 0, 0, 5}));
  EXPECT_EQ(buffer.view(0).version(), 0u);
}

TEST(StepPlan, OnlyTheLastMicroBatchSynchronises) {
  EXPECT_TRUE(StepPlan::of(0, 1).sync_gradients);
  EXPECT_FALSE(StepPlan::of(0, 2).sync_gradients);
  EXPECT_FALSE(StepPlan::of(0, 2).is_last);
  const StepPlan last = StepPlan::of(1, 2);
  EXPECT_TRUE(last.sync_gradients && last.is_last && last.all_reduce);
  EXPECT_EQ(last.micro_index, 1);
}

TEST(ShardReport, SaysWhatBucketsHoldAndWhatTheyCost) {
  ShardReport report;
  report.ranks = 4, report.hook = "allreduce", report.rebuilds = 1;
  report.buckets.push_back({.index = 0,
                            .dtype = kF32,
                            .parameters = {"a", "b", "c"},
                            .elements = 12,
                            .bytes = 48,
                            .traffic = {}});
  report.buckets.push_back(
      {.index = 1, .dtype = kBF16, .parameters = {"d"}, .elements = 5, .bytes = 10, .traffic = {}});
  report.gradients = {.collectives = 2, .bytes = 58};
  report.used_map = {.collectives = 1, .bytes = 8};
  report.window_weight = {.collectives = 3, .bytes = 24};
  report.buffers_per_forward = {.collectives = 5, .bytes = 40};
  EXPECT_EQ(report.describe(),
            "replicate over 4 ranks, hook allreduce, buckets made anew 1 times\n"
            "  bucket 0: f32[12], 48 bytes, 3 parameters (a ... c)\n"
            "  bucket 1: bf16[5], 10 bytes, 1 parameters (d)\n"
            "  each synchronising backward: 2 collectives of 58 bytes for gradients, 1 of 8 bytes "
            "for the used map, 3 of 24 bytes for the window's weight\n"
            "  each synchronised forward: 5 broadcasts of 40 bytes for buffers\n");
}

}  // namespace
}  // namespace tessera::distributed::test_shard_geometry
