// The mesh of a training's settings, and which ranks do what together in it.
// ctest labels: threads
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include <tessera/core/factory/factory.h>
#include <tessera/distributed/mesh/parallel_dims.h>
#include <tessera/distributed/transport/collectives.h>

#include "distributed/compared_ranks.h"
#include "distributed/fake_rank.h"
#include "message_of.h"

namespace tessera::distributed::test_parallel_dims {
namespace {

using Ranks = std::vector<int>;

Ranks ranks_of(const Group& group) { return {group.ranks().begin(), group.ranks().end()}; }

// body(rank) on each rank, as threads and where one is there alone.
void on_both(int size, const std::function<void(int rank)>& body) {
  compared_ranks(size, body);
  for (int rank = 0; rank < size; ++rank) on_fake_rank(rank, size, [&] { body(rank); });
}

// Ranks that differ from this one in the bits of `free`, of 8 in three axes of 2.
Ranks differing(int rank, int free) {
  Ranks ranks;
  for (int other = 0; other < 8; ++other) {
    if (((rank ^ other) & ~free) == 0) ranks.push_back(other);
  }
  return ranks;
}

void expect_groups(ParallelDims& dims, const std::vector<std::pair<Group*, Ranks>>& expected) {
  int number = 0;
  for (const auto& [group, ranks] : expected) {
    EXPECT_EQ(ranks_of(*group), ranks) << number << " of " << dims.mesh().describe();
    EXPECT_EQ(group->size(), std::ssize(ranks));
    EXPECT_EQ(ranks[static_cast<size_t>(group->rank())], rank());
    ++number;
  }
}

// Axes with bits 4, 2 and 1 of a rank's number.
TEST(ParallelDims, EachThingThatRanksDoTogetherHasItsOwn) {
  on_both(8, [](int rank) {
    const auto by = [rank](int free) { return differing(rank, free); };
    ParallelDims tp(world(), {.dp_replicate = 2, .tp = 2});
    EXPECT_EQ(tp.mesh().describe(), "mesh(dp_replicate=2, dp_shard=2, tp=2)");
    expect_groups(tp, {{&tp.batch_ranks(), by(6)},
                       {&tp.loss_ranks(), by(6)},
                       {&tp.parameter_mesh().group("dp_shard"), by(2)},
                       {&tp.parameter_mesh().group(), by(6)},
                       {&tp.fp8_ranks(), by(7)},
                       {&tp.found_inf_ranks(), by(7)},
                       {&tp.state_ranks(), by(7)}});
    EXPECT_EQ(tp.random_coordinate(), rank >> 1);

    ParallelDims cp(world(), {.dp_replicate = 2, .cp = 2});
    EXPECT_EQ(cp.mesh().describe(), "mesh(dp_replicate=2, dp_shard=2, cp=2)");
    EXPECT_EQ(cp.parameter_mesh().describe(),
              "mesh(dp_replicate=2, fsdp=4) of mesh(dp_replicate=2, dp_shard=2, cp=2)");
    expect_groups(cp, {{&cp.batch_ranks(), by(6)},
                       {&cp.loss_ranks(), by(7)},
                       {&cp.parameter_mesh().group("fsdp"), by(3)},
                       {&cp.parameter_mesh().group(), by(7)},
                       {&cp.fp8_ranks(), by(7)}});
    EXPECT_EQ(cp.random_coordinate(), rank >> 1);

    ParallelDims pp(world(), {.pp = 2, .cp = 2});
    EXPECT_EQ(pp.mesh().describe(), "mesh(pp=2, dp_shard=2, cp=2)");
    expect_groups(pp, {{&pp.batch_ranks(), by(2)},
                       {&pp.loss_ranks(), by(3)},
                       {&pp.parameter_mesh().group(), by(3)},
                       {&pp.fp8_ranks(), by(3)},
                       {&pp.found_inf_ranks(), by(7)},
                       {&pp.state_ranks(), by(7)}});
    EXPECT_EQ(pp.random_coordinate(), rank >> 1 & 1);

    ParallelDims all(world(), {.pp = 2, .dp_shard = 1, .cp = 2, .tp = 2});
    EXPECT_EQ(all.mesh().describe(), "mesh(pp=2, dp_shard=1, cp=2, tp=2)");
    expect_groups(all, {{&all.batch_ranks(), by(0)},
                        {&all.loss_ranks(), by(2)},
                        {&all.parameter_mesh().group(), by(2)},
                        {&all.fp8_ranks(), by(3)},
                        {&all.found_inf_ranks(), by(7)}});
    EXPECT_EQ(all.random_coordinate(), 0);
  });
}

TEST(ParallelDims, NothingIsMadeAfterwards) {
  on_both(8, [](int) {
    ParallelDims dims(world(), {.dp_replicate = 2, .cp = 2});
    const CommTrace::Scope scope(*rank_context().trace);
    const size_t groups = rank_context().parts.size();
    for (const char* name : {"dp", "loss", "fsdp", "stage"}) dims.mesh()[name].group();
    dims.parameter_mesh().group();
    EXPECT_EQ(dims.mesh()["dp"].size(), 4);
    EXPECT_TRUE(scope.records().empty());
    EXPECT_EQ(rank_context().parts.size(), groups);
  });
}

TEST(ParallelDims, DataParallelAloneIsTheWorldAndCostsNoCall) {
  on_both(4, [](int rank) {
    const CommTrace::Scope scope(*rank_context().trace);
    ParallelDims shards(world()), copies(world(), {.dp_replicate = -1, .dp_shard = 1});
    EXPECT_EQ(shards.mesh().describe(), "mesh(dp_shard=4)");
    EXPECT_EQ(copies.mesh().describe(), "mesh(dp_replicate=4)");
    EXPECT_EQ(&shards.parameter_mesh(), &shards.mesh());
    for (ParallelDims* dims : {&shards, &copies}) {
      EXPECT_EQ(&dims->batch_ranks(), &world());
      EXPECT_EQ(&dims->loss_ranks(), &world());
      EXPECT_EQ(&dims->fp8_ranks(), &world());
      EXPECT_EQ(dims->random_coordinate(), rank);
    }
    EXPECT_TRUE(scope.records().empty());
    EXPECT_EQ(message_of<ConfigError>([&] { copies.parameter_mesh(); }),
              "ParallelDims: has nothing to cut along 'dp_shard' of mesh(dp_replicate=4); give "
              "dp_shard_size more than 1, or train whole copies (ddp)");
  });
  ParallelDims one(world());
  EXPECT_EQ(one.mesh().describe(), "mesh(dp_shard=1)");
  EXPECT_EQ(&one.loss_ranks(), &world());
}

TEST(ParallelDims, AContextKeepsThatOfEachSizes) {
  compared_ranks(4, [](int) {
    ParallelDims& hybrid = parallel_dims({.dp_replicate = 2});
    ParallelDims& shards = parallel_dims();
    EXPECT_NE(&hybrid, &shards);
    EXPECT_EQ(&parallel_dims({.dp_replicate = -1, .dp_shard = 2}), &hybrid) << "the same mesh";
    EXPECT_EQ(&parallel_dims({.dp_shard = 4}), &shards);
  });
}

TEST(ParallelDims, SizesThatDoNotMultiplyToTheRanksNameWhatWouldFit) {
  const auto complaint = [](const ParallelSizes& sizes) {
    std::string message;
    on_fake_rank(0, 12,
                 [&] { message = message_of<ConfigError>([&] { ParallelDims(world(), sizes); }); });
    return message;
  };
  EXPECT_EQ(complaint({.tp = {5, "flag"}}),
            "ParallelDims: tp_size=5 (flag) would make 5 ranks, which do not divide the 12 that "
            "there are; tp_size=4 or tp_size=6 would fit");
  EXPECT_EQ(complaint({.dp_replicate = {2, "code"}, .dp_shard = {4, "code"}}),
            "ParallelDims: dp_replicate_size=2 (code) and dp_shard_size=4 (code) would make 8 "
            "ranks, and there are 12; dp_replicate_size=3 or dp_shard_size=6 would fit");
  EXPECT_EQ(complaint({.dp_replicate = 24}),
            "ParallelDims: dp_replicate_size=24 would make 24 ranks, which do not divide the 12 "
            "that there are; dp_replicate_size=12 would fit");
  EXPECT_EQ(complaint({.cp = 5, .tp = 7}),
            "ParallelDims: cp_size=5 and tp_size=7 would make 35 ranks, which do not divide the 12 "
            "that there are; leave one of the sizes out");
  EXPECT_EQ(
      complaint({.dp_shard = 1}),
      "ParallelDims: no size is above 1, and there are 12 ranks; let one of dp_shard_size and "
      "dp_replicate_size be -1");
  EXPECT_EQ(complaint({.tp = 0}),
            "ParallelDims: tp_size=0: sizes are at least 1, and -1 may stand once for what the "
            "others leave");
  EXPECT_EQ(complaint({.dp_replicate = -1}),
            "ParallelDims: dp_shard_size=-1: sizes are at least 1, and -1 may stand once for what "
            "the others leave");
  EXPECT_NE(complaint({.pp = 1000000, .dp_replicate = 1000000, .cp = 1000000, .tp = 1000000}), "");
}

}  // namespace
}  // namespace tessera::distributed::test_parallel_dims
