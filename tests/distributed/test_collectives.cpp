// Collectives among rank threads: values, bits, order, groups, objects.
// ctest labels: threads
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>

#include "distributed/compared_ranks.h"

namespace tessera::distributed::test_collectives {
namespace {

// Small whole numbers: every sum of eight is exact in every dtype of the sweep.
Tensor numbers(int rank, const Shape& shape, DType dtype) {
  Tensor x = remainder(arange(numel_of(shape)).to(kF32) * (rank + 2), 5) + rank;
  return to(reshape(x, shape), dtype);
}

class Dtypes : public testing::TestWithParam<DType> {};

TEST_P(Dtypes, AllReduceSumsWhatRanksGive) {
  for (const int size : {2, 4, 8}) {
    for (const int64_t count : {1, 3, 8, 1000, 4099}) {
      compared_ranks(size, [&](int rank) {
        const Tensor x = numbers(rank, {count}, GetParam());
        all_reduce(x);
        Tensor expected = zeros({count});
        for (int r = 0; r < size; ++r)
          expected = expected + to(numbers(r, {count}, GetParam()), kF32);
        EXPECT_EQ(x.to_vector(), to(expected, GetParam()).to_vector());
      });
    }
  }
}
INSTANTIATE_TEST_SUITE_P(All, Dtypes, testing::Values(kF64, kF32, kF16, kBF16, kI64, kI32, kU8),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(Collectives, ReductionsKnowMeanMaximumMinimumAndProduct) {
  compared_ranks(4, [](int rank) {
    const auto reduced = [&](ReduceOp op) {
      const Tensor x = full({3}, rank + 1.0);
      all_reduce(x, op);
      return x.to_vector()[2];
    };
    EXPECT_EQ(reduced(ReduceOp::kSum), 10);
    EXPECT_EQ(reduced(ReduceOp::kMean), 2.5);
    EXPECT_EQ(reduced(ReduceOp::kMax), 4);
    EXPECT_EQ(reduced(ReduceOp::kMin), 1);
    EXPECT_EQ(reduced(ReduceOp::kProduct), 24);
  });
}

TEST(Collectives, NarrowSumsAreAccumulatedInF32AndRoundedOnce) {
  compared_ranks(4, [](int rank) {
    // 256 + 1 + 1 + 1: each step in bf16 would stay at 256.
    const Tensor x = full({4}, rank == 0 ? 256.0 : 1.0, {kBF16});
    all_reduce(x);
    EXPECT_EQ(x.to_vector()[0], 260);                // 259 to the nearest bf16
    const Tensor mean = full({4}, 60000.0, {kF16});  // the sum alone overflows f16
    all_reduce(mean, ReduceOp::kMean);
    EXPECT_EQ(mean.to_vector()[0], to(full({1}, 60000.0), {kF16}).to_vector()[0]);
  });
}

TEST(Collectives, SumsAreTakenInRankOrder) {
  compared_ranks(8, [](int rank) {
    const RandomStream stream{3, static_cast<uint64_t>(rank)};
    const Tensor x = randn({1000}, {}, stream);
    all_reduce(x);
    Tensor expected = randn({1000}, {}, RandomStream{3, 0});
    for (uint64_t r = 1; r < 8; ++r) expected = expected + randn({1000}, {}, RandomStream{3, r});
    EXPECT_EQ(x.to_vector(), expected.to_vector());  // to the bit
    // The same sum by scattering and gathering.
    const Tensor again = all_gather(reduce_scatter(randn({1000}, {}, stream)));
    EXPECT_EQ(again.to_vector(), expected.to_vector());
  });
}

TEST(Collectives, NaNWinsMaximumAndMinimumOnEveryRank) {
  compared_ranks(4, [](int rank) {
    for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
      const Tensor x = full({2}, rank == 2 ? std::nan("") : rank);
      all_reduce(x, op);
      EXPECT_TRUE(std::isnan(x.to_vector()[0]));
    }
  });
}

TEST(Collectives, ReduceGivesTheSumToRootAlone) {
  compared_ranks(4, [](int rank) {
    for (int root = 0; root < 4; ++root) {
      const Tensor x = full({5}, rank + 1.0);
      world().reduce(x, root).wait();
      if (rank != root) continue;
      EXPECT_EQ(x.to_vector(), full({5}, 10.0).to_vector());
    }
  });
}

TEST(Collectives, BroadcastGatherAndScatterMoveWholeTensors) {
  compared_ranks(4, [](int rank) {
    const Tensor x = full({2, 3}, rank);
    broadcast(x, 2);
    EXPECT_EQ(x.to_vector(), full({2, 3}, 2).to_vector());

    std::vector<Tensor> outputs;
    if (rank == 1) {
      for (int r = 0; r < 4; ++r) outputs.push_back(zeros({r + 1}));
    }
    world().gather(outputs, full({rank + 1}, rank), 1).wait();
    for (size_t r = 0; r < outputs.size(); ++r) {
      EXPECT_EQ(outputs[r].to_vector(),
                full({static_cast<int64_t>(r) + 1}, static_cast<int>(r)).to_vector());
    }

    std::vector<Tensor> inputs;
    if (rank == 3) {
      for (int r = 0; r < 4; ++r) inputs.push_back(full({2}, 10 * r));
    }
    const Tensor own = zeros({2});
    world().scatter(own, inputs, 3).wait();
    EXPECT_EQ(own.to_vector(), full({2}, 10 * rank).to_vector());
  });
}

TEST(Collectives, AllGatherJoinsRowsAndTakesRaggedOnes) {
  compared_ranks(4, [](int rank) {
    const Tensor joined = all_gather(full({2, 3}, rank));
    EXPECT_EQ(joined.shape(), (Shape{8, 3}));
    for (int r = 0; r < 4; ++r) EXPECT_EQ(joined.select(0, 2 * r + 1).to_vector()[0], r);
    EXPECT_EQ(all_gather(full({}, rank)).to_vector(), (std::vector<double>{0, 1, 2, 3}));

    const auto ragged = all_gather_ragged(full({rank, 2}, rank));  // rank 0 has none
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(ragged[static_cast<size_t>(r)].shape(), (Shape{r, 2}));
      EXPECT_EQ(ragged[static_cast<size_t>(r)].to_vector(), full({r, 2}, r).to_vector());
    }
  });
}

TEST(Collectives, ReduceScatterTakesUnevenParts) {
  compared_ranks(4, [](int rank) {
    std::vector<Tensor> inputs;
    for (int r = 0; r < 4; ++r) inputs.push_back(full({r}, rank + 10.0 * r));
    const Tensor own = zeros({rank});
    world().reduce_scatter(own, inputs, ReduceOp::kMean).wait();
    EXPECT_EQ(own.to_vector(), full({rank}, 1.5 + 10 * rank).to_vector());
  });
}

TEST(Collectives, AllToAllSendsAnotherSizeToEachRank) {
  compared_ranks(4, [](int rank) {
    std::vector<Tensor> inputs, outputs;
    for (int r = 0; r < 4; ++r) {
      inputs.push_back(full({rank * r}, 10 * rank + r));
      outputs.push_back(zeros({rank * r}));
    }
    world().all_to_all(outputs, inputs).wait();
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(outputs[static_cast<size_t>(r)].to_vector(),
                full({rank * r}, 10 * r + rank).to_vector());
    }
  });
}

TEST(Collectives, PermuteGivesEachRankTheTensorOfOneOther) {
  compared_ranks(4, [](int rank) {
    const CommTrace::Scope scope(world().trace());
    // 0 -> 2 -> 1 -> 0, and 3 keeps its own; sizes are those of the sender.
    const std::vector<int> targets = {2, 0, 1, 3};
    const int sources[] = {1, 2, 0, 3};
    const int source = sources[rank];
    const Tensor output = zeros({source + 1});
    world().permute(output, full({rank + 1}, 10.0 * rank), targets).wait();
    EXPECT_EQ(output.to_vector(), full({source + 1}, 10.0 * source).to_vector());
    const Tensor ring =
        permute_ranks(full({2, 3}, 1.0 * rank).t(), std::vector<int>{1, 2, 3, 0}, world());
    EXPECT_EQ(ring.to_vector(), full({3, 2}, (rank + 3) % 4).to_vector());
    const Tensor kept = full({2}, 5.0 + rank);
    world().permute(kept, kept, std::vector<int>{0, 1, 2, 3}).wait();  // in place
    EXPECT_EQ(kept.to_vector(), full({2}, 5.0 + rank).to_vector());
    ASSERT_EQ(scope.records().size(), 3u);
    EXPECT_EQ(scope.records()[0].operation, Operation::kPermute);
    EXPECT_EQ(scope.records()[0].bytes, 4 * (rank + 1));
    EXPECT_EQ(scope.records()[0].wire_bytes(), 4 * (rank + 1));
  });
}

TEST(Collectives, SendAndReceiveMatchByTagInOrder) {
  compared_ranks(3, [](int rank) {
    const int next = (rank + 1) % 3, previous = (rank + 2) % 3;
    const Tensor a = zeros({2}), b = zeros({2}), c = zeros({2});
    const Work first = world().recv(b, previous, 7);
    const Work second = world().recv(c, previous, 7);
    const Work other = world().recv(a, previous, 1);
    world().send(full({2}, rank), next, 7).wait();
    world().send(full({2}, rank + 10), next, 7).wait();
    world().send(full({2}, rank + 20), next, 1).wait();
    first.wait(), second.wait(), other.wait();
    EXPECT_EQ(b.to_vector()[0], previous);
    EXPECT_EQ(c.to_vector()[0], previous + 10);
    EXPECT_EQ(a.to_vector()[0], previous + 20);
  });
}

TEST(Collectives, AnExchangeIsManyMessagesAndOneWork) {
  compared_ranks(3, [](int rank) {
    const int next = (rank + 1) % 3, previous = (rank + 2) % 3;
    Group& group = world();
    // To both neighbours, two of them to one, of other dtypes, one of no elements; one is received
    // into a transposed view.
    const Tensor a = zeros({3, 2}).transpose(0, 1), b = zeros({2}, {.dtype = kI64}), c = zeros({5});
    const Tensor number = full({2}, 10 * rank, {.dtype = kI64});
    const Work work =
        group.exchange({{next, full({2, 3}, rank), 1},
                        {next, number, 2},
                        {previous, full({5}, rank + 0.5)},
                        {next, zeros({0}), 9}},
                       {{previous, b, 2}, {previous, a, 1}, {next, c}, {previous, zeros({0}), 9}});
    EXPECT_TRUE(work.valid());
    work.wait();
    EXPECT_TRUE(work.completed());
    EXPECT_EQ(a.to_vector(), std::vector<double>(6, previous));
    EXPECT_EQ(b.to_vector(), std::vector<double>(2, 10 * previous));
    EXPECT_EQ(c.to_vector(), std::vector<double>(5, next + 0.5));

    // It meets sends and recvs of the others too.
    const Tensor x = full({4}, rank), y = zeros({4});
    if (rank == 0) group.exchange({{1, x, 3}}, {{1, y, 4}}).wait();
    if (rank == 1) {
      const Work received = group.recv(y, 0, 3);
      group.send(x, 0, 4).wait();
      received.wait();
    }
    if (rank < 2) {
      EXPECT_EQ(y.to_vector(), std::vector<double>(4, 1 - rank));
    }
    group.exchange({}, {}).wait();
  });
}

TEST(Collectives, TensorsMayBeNonContiguousOrEmpty) {
  compared_ranks(4, [](int rank) {
    const Tensor base = full({4, 6}, rank + 1.0);
    const Tensor column = base.transpose(0, 1).slice(0, 1, 5, 2);  // (2, 4), strides 2, 6
    ASSERT_FALSE(column.is_contiguous());
    all_reduce(column);
    EXPECT_EQ(column.to_vector(), full({2, 4}, 10.0).to_vector());
    EXPECT_EQ(base.to_vector()[0], rank + 1.0);  // what lies between is untouched

    const Tensor target = zeros({6, 4}).transpose(0, 1);
    world().all_gather(target, full({1, 6}, rank)).wait();
    for (int r = 0; r < 4; ++r) EXPECT_EQ(target.select(0, r).to_vector()[5], r);

    const Tensor nothing = zeros({0, 3});
    all_reduce(nothing);
    broadcast(nothing, 1);
    EXPECT_EQ(all_gather(nothing).numel(), 0);
  });
}

TEST(Collectives, OneRankGetsWhatItGivesInAnyLayout) {
  Group& alone = world();
  using Call = std::function<Work(const Tensor& to, const Tensor& from)>;
  const std::vector<std::pair<const char*, Call>> moving = {
      {"all_gather", [&](auto& to, auto& from) { return alone.all_gather(to, from); }},
      {"ragged all_gather",
       [&](auto& to, auto& from) { return alone.all_gather(std::vector{to}, from); }},
      {"reduce_scatter", [&](auto& to, auto& from) { return alone.reduce_scatter(to, from); }},
      {"reduce_scatter of a list",
       [&](auto& to, auto& from) {
         return alone.reduce_scatter(to, std::vector{from}, ReduceOp::kMean);
       }},
      {"all_to_all",
       [&](auto& to, auto& from) { return alone.all_to_all(std::vector{to}, std::vector{from}); }},
      {"gather", [&](auto& to, auto& from) { return alone.gather(std::vector{to}, from, 0); }},
      {"scatter", [&](auto& to, auto& from) { return alone.scatter(to, std::vector{from}, 0); }},
      {"permute",
       [&](auto& to, auto& from) { return alone.permute(to, from, std::vector<int>{0}); }},
  };
  const auto laid = [](bool turned, double first) {
    const Tensor values = arange(12).view({3, 4}) + first;
    return turned ? values.transpose(0, 1).contiguous().transpose(0, 1) : values;
  };
  for (const bool turned_to : {false, true}) {
    for (const bool turned_from : {false, true}) {
      SCOPED_TRACE(testing::Message() << turned_to << turned_from);
      const Tensor from = laid(turned_from, 100);
      const std::vector<double> given = from.to_vector();
      for (const auto& [name, call] : moving) {
        const Tensor to = laid(turned_to, 0);
        call(to, from).wait();
        EXPECT_EQ(to.to_vector(), given) << name;
        EXPECT_EQ(from.to_vector(), given) << name;
      }
      const Tensor sum = laid(turned_to, 1);
      alone.reduce_scatter_onto(sum, from).wait();
      EXPECT_EQ(sum.to_vector(), (laid(false, 1) + laid(false, 100)).to_vector());
      alone.reduce_scatter_onto(sum, std::vector{from}).wait();
      EXPECT_EQ(sum.to_vector(), (laid(false, 1) + laid(false, 100) * 2).to_vector());
      alone.all_reduce(from, ReduceOp::kProduct).wait();
      alone.reduce(from, 0, ReduceOp::kMean).wait();
      alone.broadcast(from, 0).wait();
      EXPECT_EQ(from.to_vector(), given);
    }
  }
}

TEST(Collectives, WorldOfOneIssuesNothing) {
  const CommTrace::Scope scope(world().trace());
  const Tensor x = full({3}, 2.0);
  all_reduce(x, ReduceOp::kMean);
  broadcast(x);
  barrier();
  EXPECT_EQ(all_gather(x).to_vector(), x.to_vector());
  EXPECT_EQ(permute_ranks(x, std::vector<int>{0}).to_vector(), x.to_vector());
  EXPECT_EQ(broadcast_object({{"a", 1}}).at("a"), 1);
  EXPECT_EQ(world_size(), 1);
  EXPECT_TRUE(scope.records().empty());
}

TEST(Collectives, ObjectsKeepNaNAndBytes) {
  compared_ranks(4, [](int rank) {
    const nlohmann::json own = {{"rank", rank}, {"loss", std::nan("")}, {"text", "\u00e9\n"}};
    const auto all = all_gather_objects(world(), own);
    ASSERT_EQ(all.size(), 4u);
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(all[static_cast<size_t>(r)].at("rank"), r);
      EXPECT_TRUE(std::isnan(all[static_cast<size_t>(r)].at("loss").get<double>()));
    }
    EXPECT_EQ(broadcast_object(own, 3).at("rank"), 3);
    EXPECT_EQ(gather_objects(own, 1).size(), rank == 1 ? 4u : 0u);
    std::vector<nlohmann::json> lists;
    for (int r = 0; rank == 2 && r < 4; ++r) lists.push_back(std::vector<int>(r, r));
    EXPECT_EQ(scatter_objects(lists, 2).size(), static_cast<size_t>(rank));
  });
}

TEST(Collectives, CoalescedCallsTravelAsOne) {
  compared_ranks(4, [](int rank) {
    const CommTrace::Scope scope(world().trace());
    CoalescedScope calls(world());
    const Tensor a = full({3}, rank), b = full({2, 2}, 10.0 * rank), c = full({4}, rank);
    calls.all_reduce(a);
    calls.all_reduce(b);
    calls.broadcast(c, 2);
    calls.finish().wait();
    EXPECT_EQ(a.to_vector(), full({3}, 6).to_vector());
    EXPECT_EQ(b.to_vector(), full({2, 2}, 60).to_vector());
    EXPECT_EQ(c.to_vector(), full({4}, 2).to_vector());
    EXPECT_EQ(scope.records().size(), 2u);
  });
}

TEST(Collectives, CoalescedBroadcastsKeepTheirRoots) {
  compared_ranks(3, [](int rank) {
    CoalescedScope calls(world());
    std::vector<Tensor> tensors;
    for (int root = 0; root < 3; ++root) {
      tensors.push_back(full({2}, 10.0 * rank + root));
      calls.broadcast(tensors.back(), root);
    }
    calls.finish().wait();
    for (int root = 0; root < 3; ++root) {
      EXPECT_EQ(tensors[static_cast<size_t>(root)].to_vector(),
                full({2}, 10.0 * root + root).to_vector());
    }
  });
}

TEST(Collectives, CoalescedGathersAndScattersAreThoseOfTheirTensors) {
  for (const int size : {1, 2, 4}) {
    compared_ranks(size, [&](int rank) {
      const auto each = [&](int64_t seed, const Shape& shape) {
        return randn(shape, {}, RandomStream{static_cast<uint64_t>(seed), uint64_t(rank)});
      };
      const CommTrace::Scope scope(world().trace());
      CoalescedScope calls(world());
      const Tensor a = each(1, {3, 2}), b = each(2, {2}), c = each(3, {0, 4});
      const Tensor all_a = zeros({2, 3 * size}).transpose(0, 1);  // results may lie anywhere
      const Tensor all_b = zeros({2 * size}), all_c = zeros({0, 4});
      calls.all_gather(all_a, a);
      calls.all_gather(all_b, b);
      calls.all_gather(all_c, c);
      const Tensor d = each(4, {2 * size, 3}), e = each(5, {size});
      const Tensor own_d = zeros({2, 3}), own_e = zeros({1});
      calls.reduce_scatter(own_d, d, ReduceOp::kMean);
      calls.reduce_scatter(own_e, e, ReduceOp::kMean);
      calls.finish().wait();
      EXPECT_EQ(scope.records().size(), size == 1 ? 0u : 2u);
      EXPECT_EQ(all_a.to_vector(), all_gather(a).to_vector());
      EXPECT_EQ(all_b.to_vector(), all_gather(b).to_vector());
      EXPECT_EQ(own_d.to_vector(), reduce_scatter(d, ReduceOp::kMean).to_vector());
      EXPECT_EQ(own_e.to_vector(), reduce_scatter(e, ReduceOp::kMean).to_vector());
    });
  }
}

TEST(Collectives, GroupsSplitByColourAndKey) {
  compared_ranks(6, [](int rank) {
    const auto half = world().split(rank % 2, -rank);  // ranks in falling order
    EXPECT_EQ(half->size(), 3);
    EXPECT_EQ(half->rank(), (4 + rank % 2 - rank) / 2);
    const Tensor x = full({2}, rank);
    all_reduce(x, ReduceOp::kSum, *half);
    EXPECT_EQ(x.to_vector()[0], rank % 2 == 0 ? 6 : 9);

    const auto some = world().split(rank < 2 ? 0 : -1);
    EXPECT_EQ(some != nullptr, rank < 2);

    const std::vector<int> members = {5, 0, 3};
    const auto listed = world().subgroup(rank % 5 == 0 || rank == 3 ? members : std::vector<int>());
    if (listed) {
      EXPECT_EQ(members[static_cast<size_t>(listed->rank())], rank);
      EXPECT_EQ(all_gather(full({}, rank), *listed).to_vector(), (std::vector<double>{5, 0, 3}));
    }
  });
}

TEST(Collectives, AHundredAndTwentyEightRanksAgree) {
  compared_ranks(128, [](int rank) {
    const Tensor x = full({3}, rank);
    all_reduce(x);
    EXPECT_EQ(x.to_vector()[0], 127 * 64);
    EXPECT_EQ(all_gather(full({}, rank)).to_vector()[100], 100);
  });
}

TEST(Collectives, ChannelsAreIndependent) {
  compared_ranks(2, [](int rank) {
    // The ranks use the two channels in opposite orders.
    const Tensor a = full({2}, 1.0), b = full({2}, 2.0);
    const auto reduce_on = [&](const Tensor& x, Channel channel) {
      return world().all_reduce(x, ReduceOp::kSum, {.channel = channel});
    };
    const Work first =
        rank == 0 ? reduce_on(a, Channel::kGradient) : reduce_on(b, Channel::kModule);
    const Work second =
        rank == 0 ? reduce_on(b, Channel::kModule) : reduce_on(a, Channel::kGradient);
    first.wait(), second.wait();
    EXPECT_EQ(a.to_vector()[0], 2);
    EXPECT_EQ(b.to_vector()[0], 4);
  });
}

}  // namespace
}  // namespace tessera::distributed::test_collectives
