// Collectives among rank threads: values, bits, order, mistakes, deadlines.
// ctest labels: threads
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <future>
#include <latch>
#include <nlohmann/json.hpp>
#include <thread>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory.h>

#include "compared_ranks.h"

namespace tessera::distributed {
namespace {

void on_ranks(int size, const std::function<void(int rank)>& body,
              const RunRanksOptions& options = {}) {
  compared_ranks(size, body, options);
}

// Small whole numbers: every sum of eight is exact in every dtype of the sweep.
Tensor numbers(int rank, const Shape& shape, DType dtype) {
  Tensor x = remainder(arange(numel_of(shape)).to(kF32) * (rank + 2), 5) + rank;
  return to(reshape(x, shape), dtype);
}

class Dtypes : public testing::TestWithParam<DType> {};

TEST_P(Dtypes, AllReduceSumsWhatRanksGive) {
  for (const int size : {2, 4, 8}) {
    for (const int64_t count : {1, 3, 8, 1000, 4099}) {
      on_ranks(size, [&](int rank) {
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

CommRecord numbered(int64_t sequence, int ranks = 2) {
  CommRecord record;
  record.group = "world";
  record.group_size = ranks;
  record.sequence = sequence;
  return record;
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Group ------------------------------------------------------------------------------------------

TEST(Collectives, ReductionsKnowMeanMaximumMinimumAndProduct) {
  on_ranks(4, [](int rank) {
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
  on_ranks(4, [](int rank) {
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
  on_ranks(8, [](int rank) {
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
  on_ranks(4, [](int rank) {
    for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
      const Tensor x = full({2}, rank == 2 ? std::nan("") : rank);
      all_reduce(x, op);
      EXPECT_TRUE(std::isnan(x.to_vector()[0]));
    }
  });
}

TEST(Collectives, ReduceGivesTheSumToRootAlone) {
  on_ranks(4, [](int rank) {
    for (int root = 0; root < 4; ++root) {
      const Tensor x = full({5}, rank + 1.0);
      world().reduce(x, root).wait();
      if (rank != root) continue;
      EXPECT_EQ(x.to_vector(), full({5}, 10.0).to_vector());
    }
  });
}

TEST(Collectives, BroadcastGatherAndScatterMoveWholeTensors) {
  on_ranks(4, [](int rank) {
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
  on_ranks(4, [](int rank) {
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
  on_ranks(4, [](int rank) {
    std::vector<Tensor> inputs;
    for (int r = 0; r < 4; ++r) inputs.push_back(full({r}, rank + 10.0 * r));
    const Tensor own = zeros({rank});
    world().reduce_scatter(own, inputs, ReduceOp::kMean).wait();
    EXPECT_EQ(own.to_vector(), full({rank}, 1.5 + 10 * rank).to_vector());
  });
}

TEST(Collectives, AllToAllSendsAnotherSizeToEachRank) {
  on_ranks(4, [](int rank) {
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

TEST(Collectives, SendAndReceiveMatchByTagInOrder) {
  on_ranks(3, [](int rank) {
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
  on_ranks(3, [](int rank) {
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
  on_ranks(4, [](int rank) {
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

TEST(Collectives, WorldOfOneIssuesNothing) {
  const CommTrace::Scope scope(world().trace());
  const Tensor x = full({3}, 2.0);
  all_reduce(x, ReduceOp::kMean);
  broadcast(x);
  barrier();
  EXPECT_EQ(all_gather(x).to_vector(), x.to_vector());
  EXPECT_EQ(broadcast_object({{"a", 1}}).at("a"), 1);
  EXPECT_EQ(world_size(), 1);
  EXPECT_TRUE(scope.records().empty());
}

TEST(Collectives, ObjectsKeepNaNAndBytes) {
  on_ranks(4, [](int rank) {
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
  on_ranks(4, [](int rank) {
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
  on_ranks(3, [](int rank) {
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
    on_ranks(size, [&](int rank) {
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
  on_ranks(6, [](int rank) {
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
  on_ranks(128, [](int rank) {
    const Tensor x = full({3}, rank);
    all_reduce(x);
    EXPECT_EQ(x.to_vector()[0], 127 * 64);
    EXPECT_EQ(all_gather(full({}, rank)).to_vector()[100], 100);
  });
}

TEST(Collectives, ChannelsAreIndependent) {
  on_ranks(2, [](int rank) {
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

TEST(Collectives, BackwardTurnsEachConverterAround) {
  on_ranks(4, [](int rank) {
    const auto gradient = [&](auto&& convert) {
      const Tensor x = full({4, 2}, rank + 1.0).set_requires_grad();
      const Tensor y = convert(x);
      (y * (rank + 1.0)).sum().backward();  // each rank uses the result in its own way
      return x.grad().to_vector();
    };
    Group& group = world();
    EXPECT_EQ(gradient([&](auto& x) { return partial_to_replicated(x, group); }),
              full({4, 2}, rank + 1.0).to_vector());
    EXPECT_EQ(gradient([&](auto& x) { return replicated_to_varying(x, group); }),
              full({4, 2}, 10.0).to_vector());
    EXPECT_EQ(gradient([&](auto& x) { return sharded_to_replicated(x, group); }),
              full({4, 2}, 10.0).to_vector());
    const Tensor rows = arange(4).to(kF32).reshape({4, 1}).expand({4, 2}) + 1;
    EXPECT_EQ(gradient([&](auto& x) { return partial_to_sharded(x, group); }), rows.to_vector());
    EXPECT_EQ(gradient([&](auto& x) { return replicated_to_sharded(x, group); }), rows.to_vector());
  });
}

// Mistakes ---------------------------------------------------------------------------------------

TEST(Mistakes, WrongRanksDtypesAndShapesAreTypedErrors) {
  on_ranks(2, [](int rank) {
    const Tensor x = zeros({4});
    EXPECT_THROW(world().send(x, 2), ValueError);
    EXPECT_THROW(world().send(x, rank), ValueError);
    EXPECT_THROW(broadcast(x, -1), ValueError);
    EXPECT_THROW(all_reduce(zeros({4}, {kBool})), DTypeError);
    EXPECT_THROW(all_reduce(to(x, kF8E4M3)), DTypeError);
    EXPECT_THROW(all_reduce(zeros({4}, {kI64}), ReduceOp::kMean), DTypeError);
    EXPECT_THROW(world().all_gather(zeros({4}), x), ShapeError);
    EXPECT_THROW(reduce_scatter(zeros({3})), ShapeError);
    EXPECT_THROW(all_reduce(empty({4}, {kF32, kMeta})), DeviceError);
    EXPECT_THROW(world().subgroup(std::vector<int>{0, 0, 1}), ValueError);
    EXPECT_THROW(world().subgroup(std::vector<int>{0, 2}), ValueError);
    all_reduce(x);  // the group is as good as before
  });
}

TEST(Mistakes, WhatARankGivesItselfMustFitAlsoAlone) {
  for (const int size : {1, 2}) {
    failing_ranks("each rank makes mistakes of its own", size, [](int rank) {
      Group& group = world();
      const auto parts = [&](int64_t numel) {
        return TensorList(static_cast<size_t>(group.size()), zeros({numel}));
      };
      EXPECT_THROW(group.all_to_all(parts(2), parts(800)), ShapeError);
      EXPECT_THROW(group.all_gather(parts(2), zeros({800})), ShapeError);
      EXPECT_THROW(group.reduce_scatter(zeros({2}), parts(800)), ShapeError);
      const Tensor small = zeros({2});
      if (rank == 0) {
        EXPECT_THROW(group.gather(parts(2), zeros({800}), 0), ShapeError);
        EXPECT_THROW(group.scatter(small, parts(800), 0), ShapeError);
      } else {
        EXPECT_THROW(group.gather({}, zeros({800}), 0).wait(), DistributedError);
        EXPECT_THROW(group.scatter(small, {}, 0).wait(), DistributedError);
      }
      barrier();  // the group is as good as before
    });
  }
}

TEST(Mistakes, OfOneRankAreToldToTheOthersInTheSameCall) {
  struct Case {
    std::function<void(bool wrong)> call;
    std::function<bool(const std::exception&)> is_typed;
    const char* reason;
  };
  const auto is = []<class E>(E*) {
    return [](const std::exception& error) { return dynamic_cast<const E*>(&error) != nullptr; };
  };
  const Case cases[] = {
      {[](bool wrong) { all_reduce(zeros({4}, {wrong ? kBool : kF32})); },
       is(static_cast<DTypeError*>(nullptr)), "a reduction of bool has no meaning"},
      {[](bool wrong) {
         all_reduce(wrong ? empty({4}, {kF32, kMeta}) : zeros({4}));
       },
       is(static_cast<DeviceError*>(nullptr)), "does not carry tensors of meta"},
      {[](bool wrong) { broadcast(zeros({4}), wrong ? 3 : 0); },
       is(static_cast<ValueError*>(nullptr)), "broadcast: root is rank 3"},
      {[](bool wrong) {
         world().subgroup(std::vector<int>{0, 1, wrong ? 1 : 2});
       },
       is(static_cast<ValueError*>(nullptr)), "rank 1 is listed twice"},
      {[](bool wrong) {
         world().subgroup(std::vector<int>{0, 1, wrong ? 5 : 2});
       },
       is(static_cast<ValueError*>(nullptr)), "a member is rank 5"},
  };
  failing_ranks("rank 1 makes mistakes", 3, [&](int rank) {
    for (const Case& mistake : cases) {
      try {
        mistake.call(rank == 1);
        ADD_FAILURE() << "nothing was thrown: " << mistake.reason;
      } catch (const std::exception& error) {
        const std::string message = error.what();
        EXPECT_NE(message.find(mistake.reason), std::string::npos) << message;
        if (rank == 1) {
          EXPECT_TRUE(mistake.is_typed(error)) << message;
        } else {
          EXPECT_NE(dynamic_cast<const DistributedError*>(&error), nullptr) << message;
          EXPECT_NE(message.find("rank 1: "), std::string::npos) << message;
          EXPECT_NE(message.find(" with a mistake"), std::string::npos) << message;
        }
      }
    }
    all_reduce(zeros({4}));  // the group is as good as before
  });
}

TEST(Mistakes, SizesThatTwoRanksSeeDifferentlyAreNamedOnEveryRank) {
  failing_ranks("sizes differ", 3, [](int rank) {
    Group& group = world();
    const auto list = [](std::initializer_list<int64_t> sizes) {
      TensorList tensors;
      for (const int64_t size : sizes) tensors.push_back(ones({size}));
      return tensors;
    };
    const auto expect = [](const char* what, const std::function<void()>& call) {
      const std::string message = message_of(call);
      EXPECT_NE(message.find(what), std::string::npos) << message;
    };
    // The sums of the sizes agree, the sizes do not.
    expect("rank 1 sends f32[3] to rank 0, which expects f32[2]", [&] {
      const TensorList outputs = rank == 0 ? list({2, 2, 4}) : list({2, 3, 3});
      group.all_gather(outputs, ones({outputs[static_cast<size_t>(rank)].numel()})).wait();
    });
    expect("to rank 1, which expects f32[3]", [&] {
      const TensorList inputs = rank == 0 ? list({2, 2, 4}) : list({2, 3, 3});
      group.reduce_scatter(ones({inputs[static_cast<size_t>(rank)].numel()}), inputs).wait();
    });
    expect("rank 2 sends f32[5] to rank 1, which expects f32[1]", [&] {
      group.all_to_all(list({1, 1, 1}), rank == 2 ? list({1, 5, 1}) : list({1, 1, 1})).wait();
    });
    expect("rank 1 sends f32[4] to rank 0, which expects f32[3]", [&] {
      group.gather(rank == 0 ? list({3, 3, 3}) : TensorList{}, ones({rank == 1 ? 4 : 3}), 0).wait();
    });
    expect("rank 0 sends f32[3] to rank 2, which expects f32[1]", [&] {
      group.scatter(ones({rank == 2 ? 1 : 3}), rank == 0 ? list({3, 3, 3}) : TensorList{}, 0)
          .wait();
    });
    barrier();  // the group is as good as before
  });
}

TEST(Mistakes, OfASenderOrReceiverAreToldToTheOther) {
  failing_ranks("one side makes a mistake", 2, [](int rank) {
    Group& group = world();
    const Tensor x = zeros({4}), meta = empty({4}, {kF32, kMeta});
    const auto expect = [](const char* what, const std::function<void()>& call) {
      const std::string message = message_of(call);
      EXPECT_NE(message.find(what), std::string::npos) << message;
    };
    for (const int wrong : {0, 1}) {  // rank 0 sends, rank 1 receives
      if (rank == wrong) {
        EXPECT_THROW(rank == 0 ? group.send(meta, 1) : group.recv(meta, 0), DeviceError);
      } else {
        expect(wrong == 0 ? "rank 0: send with a mistake" : "rank 1: recv with a mistake",
               [&] { (rank == 0 ? group.send(x, 1) : group.recv(x, 0)).wait(); });
      }
    }
    expect("send and recv do not match",
           [&] { (rank == 0 ? group.send(x, 1) : group.recv(zeros({5}), 0)).wait(); });
    EXPECT_THROW(group.send(x, 1 - rank, -1), ValueError);
    (rank == 0 ? group.send(x, 1) : group.recv(x, 0)).wait();
  });
}

TEST(Mistakes, OfAnExchangeAreToldToEveryPeerAndNothingMoves) {
  failing_ranks("one exchange has a mistake", 3, [](int rank) {
    Group& group = world();
    const Tensor x = full({4}, 1.0), y = zeros({4}), z = zeros({4});
    const int next = (rank + 1) % 3, previous = (rank + 2) % 3;
    const auto expect = [](const char* what, const std::function<void()>& call) {
      const std::string message = message_of(call);
      EXPECT_NE(message.find(what), std::string::npos) << message;
    };
    // Rank 0 errs in one of four messages; both others hear of it in what they have with it.
    const Tensor meta = empty({4}, {kF32, kMeta});
    const auto trade = [&](const Tensor& to_next, const Tensor& from_next) {
      group.exchange({{next, to_next}, {previous, x}}, {{previous, y}, {next, from_next}}).wait();
    };
    if (rank == 0) {
      EXPECT_THROW(trade(meta, z), DeviceError);
    } else {
      expect("rank 0: exchange with a mistake", [&] { trade(x, z); });
    }
    barrier();
    EXPECT_EQ(y.to_vector(), std::vector<double>(4, rank == 2 ? 1.0 : 0.0))
        << "what comes from the previous rank: of rank 1 to rank 2 alone";
    // Sizes and dtypes that differ are named on both sides.
    if (rank < 2) {
      expect("send and recv do not match", [&] {
        const Tensor other = zeros({rank == 0 ? 4 : 5});
        group.exchange({{1 - rank, x, 5}}, {{1 - rank, other, 5}}).wait();
      });
      expect("send and recv do not match", [&] {
        const Tensor other = zeros({4}, {.dtype = rank == 0 ? kF32 : kI32});
        group.exchange({{1 - rank, x, 6}}, {{1 - rank, other, 6}}).wait();
      });
    }
    // Before anybody is asked.
    EXPECT_THROW(group.exchange({{3, x}}, {}), ValueError);
    EXPECT_THROW(group.exchange({{rank, x}}, {}), ValueError);
    EXPECT_THROW(group.exchange({}, {{next, x, -1}}), ValueError);
    barrier();
    if (rank < 2) {
      const auto overlapping = [&] { group.exchange({{1 - rank, x, 7}}, {{1 - rank, x, 7}}); };
      EXPECT_THROW(overlapping(), ValueError);
    }
    trade(x, z);
    EXPECT_EQ(y.to_vector(), x.to_vector());
    EXPECT_EQ(z.to_vector(), x.to_vector());
  });
}

TEST(Mistakes, ACE2_DifferentCallsRaiseOnEveryRankAndNameBothCallSites) {
  const std::vector<std::function<void(int)>> cases = {
      [](int rank) {  // operation
        const Tensor x = zeros({4});
        if (rank == 1) {
          broadcast(x);
        } else {
          all_reduce(x);
        }
      },
      [](int rank) { all_reduce(zeros({4}, {rank == 1 ? kF32 : kF64})); },  // dtype
      [](int rank) { all_reduce(zeros({rank == 1 ? 4 : 8})); },             // count
      [](int rank) { broadcast(zeros({4}), rank == 1 ? 0 : 1); },           // root
      [](int rank) { all_reduce(zeros({4}), rank == 1 ? ReduceOp::kSum : ReduceOp::kMax); },
  };
  for (const auto& mismatch : cases) {
    std::atomic<int> raised{0};
    failing_ranks("rank 1 calls something else", 4, [&](int rank) {
      const std::string message = message_of([&] { mismatch(rank); });
      EXPECT_NE(message.find("rank 0,2,3: "), std::string::npos) << message;
      EXPECT_NE(message.find("; rank 1: "), std::string::npos) << message;
      EXPECT_NE(message.find("test_collectives.cpp:"), std::string::npos) << message;
      ++raised;
      const Tensor x = full({1}, 1.0);
      all_reduce(x);  // nothing was moved, the group is whole
      EXPECT_EQ(x.to_vector()[0], 4);
    });
    EXPECT_EQ(raised, 4);
  }
}

TEST(Mistakes, DifferentOrdersAreSeenByTheTraces) {
  failing_ranks("a trace is made to differ", 2, [](int rank) {
    const CommTrace::Scope scope(world().trace());
    const auto sub = world().split(rank);  // groups of one issue nothing
    all_reduce(zeros({2}));
    check_equal_traces(scope);
    // A rank that records something that the other does not.
    if (rank == 1) world().trace().add(numbered(9));
    const std::string message = message_of([&] { check_equal_traces(scope); });
    EXPECT_NE(
        message.find("on 'world user' rank 0 called nothing more where rank 1 called barrier #9"),
        std::string::npos)
        << message;
  });
}

TEST(Mistakes, ARankThatCalledNothingIsSeenByTheTraces) {
  failing_ranks("a trace is made to differ", 3, [](int rank) {
    const CommTrace::Scope scope(world().trace());
    const auto pair = world().split(rank < 2 ? 0 : -1);
    if (pair) all_reduce(zeros({2}), ReduceOp::kSum, *pair);
    check_equal_traces(scope);  // who is not in a group need not call
    if (rank == 1) world().trace().add(numbered(1, 3));
    const std::string message = message_of([&] { check_equal_traces(scope); });
    EXPECT_NE(message.find("on 'world user' rank 1 called barrier #1 where 2 of 3 ranks called "
                           "nothing"),
              std::string::npos)
        << message;
  });
}

// Failures ---------------------------------------------------------------------------------------

TEST(Failures, ACE1_ARankThatThrowsMakesTheOthersRaise) {
  for (const bool in_collective : {false, true}) {
    std::atomic<int> raised{0};
    const std::string message = message_of([&] {
      failing_ranks("rank 2 throws", 4, [&](int rank) {
        barrier();
        if (rank == 2) TS_THROW(ValueError, "loss", "is not finite");
        if (!in_collective) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        try {
          for (;;) all_reduce(zeros({4}));
        } catch (const DistributedError& error) {
          EXPECT_NE(std::string(error.what()).find("rank 2 failed: loss: is not finite"),
                    std::string::npos)
              << error.what();
          ++raised;
        }
      });
    });
    EXPECT_EQ(raised, 3);
    EXPECT_EQ(message, "rank 2: loss: is not finite");  // the first cause, not its consequences
  }
}

TEST(Failures, ACE1_ARankThatEndsEarlyIsNamed) {
  std::atomic<int> raised{0};
  failing_ranks("rank 1 ends early", 3, [&](int rank) {
    if (rank == 1) return;
    const std::string message = message_of([] { barrier(); });
    EXPECT_NE(message.find("rank 1 ended"), std::string::npos) << message;
    ++raised;
  });
  EXPECT_EQ(raised, 2);
}

TEST(Failures, ACE1_ATimeoutNamesWhoIsWhereAndLeavesADump) {
  const std::string folder = testing::TempDir();
  std::latch issued(3), gave_up(4);
  failing_ranks("rank 3 does not come", 4, [&](int rank) {
    rank_context().dump_directory = folder;
    std::remove((folder + "/comm-rank-" + std::to_string(rank) + ".json").c_str());
    all_reduce(zeros({4}), ReduceOp::kSum, world(), {.tag = "bucket 0"});
    if (rank == 3) {  // hangs, until the others have given up
      gave_up.arrive_and_wait();
      EXPECT_THROW(barrier(), DistributedError);
      return;
    }
    const Work work = world().all_reduce(zeros({8}), ReduceOp::kSum, {.timeout_seconds = 0.1});
    issued.arrive_and_wait();
    const std::string message = message_of([&] { work.wait(); });
    gave_up.count_down();
    // One rank's wait runs out first and breaks the group for the others.
    EXPECT_NE(message.find("all_reduce #2 (sum, f32[8]) of 'world': waited "), std::string::npos)
        << message;
    EXPECT_NE(message.find("ranks 0,1,2 are at #2; rank 3 is at #1 (all_reduce #1 (sum, f32[4]) "
                           "'bucket 0' at test_collectives.cpp:"),
              std::string::npos)
        << message;
    std::FILE* file =
        std::fopen((folder + "/comm-rank-" + std::to_string(rank) + ".json").c_str(), "r");
    ASSERT_NE(file, nullptr);
    const nlohmann::json dump = nlohmann::json::parse(file);
    std::fclose(file);
    EXPECT_EQ(dump.at("rank"), rank);
    EXPECT_EQ(dump.at("records").at(1).at("state"), "failed");
  });
}

TEST(Failures, AbortEndsWhatIsUnderWayAndRefusesWhatComes) {
  std::latch aborted(2);
  failing_ranks("the group is aborted", 2, [&](int rank) {
    if (rank == 0) {
      const Work work = world().all_reduce(zeros({4}));
      world().abort("tired");
      EXPECT_THROW(work.wait(), DistributedError);
    }
    aborted.arrive_and_wait();
    const std::string message = message_of([] { barrier(); });
    EXPECT_NE(message.find("aborted: tired"), std::string::npos) << message;
  });
}

TEST(Failures, OfAWorkThatNobodyWaitsForAreSaidAndRaisedByTheNextCall) {
  testing::internal::CaptureStderr();
  // A call has ended when both ranks have issued it.
  std::latch issued(2), issued_again(2);
  failing_ranks("the ranks call different things", 2, [&](int rank) {
    const Tensor x = zeros({4});
    const auto differ = [&] { return rank == 0 ? world().all_reduce(x) : world().broadcast(x, 0); };
    differ();
    issued.arrive_and_wait();
    const std::string message = message_of([&] { all_reduce(x); });
    EXPECT_NE(message.find("nobody waited for an earlier call"), std::string::npos) << message;
    EXPECT_NE(message.find("ranks call different things here"), std::string::npos) << message;
    all_reduce(x);  // said once
    // What is under way with a call whose failure was raised is let go without a word.
    const Work first = differ();
    differ();
    issued_again.arrive_and_wait();
    EXPECT_THROW(first.wait(), DistributedError);
    all_reduce(x);
  });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("nobody waited for a collective: all_reduce #1"), std::string::npos) << said;
}

TEST(Failures, NothingFollowsAShutdown) {
  on_ranks(2, [](int) {
    const auto group = world().split(0);
    all_reduce(zeros({4}), ReduceOp::kSum, *group);
    group->shutdown();
    EXPECT_THROW(all_reduce(zeros({4}), ReduceOp::kSum, *group), DistributedError);
    barrier();  // others live
  });
}

// Injected ---------------------------------------------------------------------------------------

TEST(Injected, ADroppedCallMakesTheOthersWaitInVain) {
  failing_ranks("a call is lost", 2, [](int rank) {
    if (rank == 1) {
      rank_context().hooks.before_issue = [](const CommRecord& record) {
        return record.tag != "lost";
      };
    }
    EXPECT_THROW(
        all_reduce(zeros({4}), ReduceOp::kSum, world(), {.timeout_seconds = 0.1, .tag = "lost"}),
        DistributedError);
  });
}

TEST(Injected, DelaysDoNotChangeBits) {
  std::vector<double> reference;
  for (const uint64_t seed : {0, 1, 2, 3}) {
    on_ranks(4, [&](int rank) {
      uint64_t state = seed * 4 + static_cast<uint64_t>(rank);
      rank_context().hooks.before_issue = [&](const CommRecord&) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        if (seed > 0) std::this_thread::sleep_for(std::chrono::microseconds(state >> 54));
        return true;
      };
      const Tensor x = randn({50}, {}, RandomStream{1, static_cast<uint64_t>(rank)});
      for (int i = 0; i < 20; ++i) all_reduce(x, ReduceOp::kMean);
      rank_context().hooks.before_issue = nullptr;
      if (rank != 0) return;
      if (seed == 0) reference = x.to_vector();
      EXPECT_EQ(x.to_vector(), reference);
    });
  }
}

TEST(Injected, TheVirtualClockMakesACollectiveTakeItsLatencyFromTheLastRank) {
  on_ranks(2, [](int rank) {
    auto clock = std::make_shared<VirtualClock>();
    clock->latency = [](const CommRecord& record) { return record.tag == "slow" ? 5.0 : 0.0; };
    rank_context().clock = clock;
    clock->now = rank == 0 ? 1 : 3;  // rank 1 comes last
    const Work work = world().all_reduce(zeros({4}), ReduceOp::kSum, {.tag = "slow"});
    const Work next = world().all_reduce(zeros({4}), ReduceOp::kSum, {.tag = "slow"});
    clock->now += 2;  // compute
    work.wait();
    EXPECT_EQ(clock->now, 8);
    next.wait();
    EXPECT_EQ(clock->now, 13);  // one after the other
    const auto records = world().trace().records();
    EXPECT_EQ(records[0].queued, rank == 0 ? 1 : 3);
    EXPECT_EQ(records[0].done, 8);
    // Rank 1: 15 s of transfers, of which it waited 3 + 5.
    rank_context().clock = nullptr;
    if (rank == 0) return;
    EXPECT_NEAR(hidden_share(records, Channel::kUser), 1 - 8.0 / 15, 1e-12);
  });
}

TEST(Injected, ASkippedWaitIsSeen) {
  // The deliberate bug reads the tensor before the other rank has come.
  std::atomic<bool> early{false};
  std::promise<void> looked;
  on_ranks(2, [&](int rank) {
    if (rank == 1) looked.get_future().wait_for(std::chrono::minutes(1));
    if (rank == 0) rank_context().mutation = Mutation::kSkipWait;
    const Tensor x = full({4}, 1.0);
    const Work work = world().all_reduce(x);
    work.wait();
    if (rank == 0) {
      early = !work.completed();
      looked.set_value();
    }
    rank_context().mutation = Mutation::kNone;
    work.wait();
    EXPECT_EQ(x.to_vector()[0], 2);
  });
  EXPECT_TRUE(early);
}

// Trace and fake ---------------------------------------------------------------------------------

TEST(Trace, RecordsSayWhatWasCalledWhereAndFor) {
  on_ranks(2, [](int) {
    const PhaseScope phase("backward");
    const CommTrace::Scope scope(world().trace());
    all_reduce(zeros({1000}), ReduceOp::kMean, world(),
               {.channel = Channel::kGradient, .tag = "bucket 3"});
    world().all_gather(zeros({8}), zeros({4})).wait();
    const auto records = scope.records();
    ASSERT_EQ(records.size(), 2u);
    EXPECT_EQ(records[0].describe(), "all_reduce #1 (mean, f32[1000]) 'bucket 3'");
    EXPECT_EQ(records[0].phase, "backward");
    EXPECT_EQ(records[0].bytes, 4000);
    EXPECT_EQ(records[0].wire_bytes(), 4000);  // 2 (N - 1) / N
    EXPECT_EQ(records[1].wire_bytes(), 16);
    EXPECT_NE(std::string(records[0].file).find("test_collectives.cpp"), std::string::npos);
    EXPECT_EQ(records[0].state, CommRecord::State::kDone);
    EXPECT_GE(records[0].done, records[0].queued);
    EXPECT_EQ(count(records, Operation::kAllReduce, Channel::kGradient), 1);
    EXPECT_EQ(bytes(records, Operation::kAllReduce), 4000);
  });
}

TEST(Trace, TheRingForgetsTheOldestUnlessAScopeIsOpen) {
  CommTrace trace(4);
  for (int i = 1; i <= 10; ++i) trace.add(numbered(i));
  EXPECT_EQ(trace.records().size(), 4u);
  EXPECT_EQ(trace.records().front().sequence, 7);
  trace.finish(0, false, 1.0);  // of one that is gone
  {
    const CommTrace::Scope scope(trace);
    for (int i = 11; i <= 20; ++i) trace.add(numbered(i));
    EXPECT_EQ(scope.records().size(), 10u);
  }
  EXPECT_EQ(trace.records().size(), 4u);
}

TEST(Fake, CountsAtAThousandRanksWithoutData) {
  Context own;
  const ContextGuard guard(own);
  RankContext& context = rank_context();
  std::vector<int> ranks(1024);
  for (int r = 0; r < 1024; ++r) ranks[static_cast<size_t>(r)] = r;
  const auto group = std::make_shared<Group>("world", make_fake_backend(5, 1024), ranks);
  const CommTrace::Scope scope(*context.trace);
  const Tensor parameter = empty({8192, 8192}, {kBF16, kMeta});
  group->all_reduce(parameter).wait();
  const Tensor shard = empty({8, 8192}, {kBF16, kMeta});
  group->all_gather(parameter, shard).wait();
  const Tensor other = empty({8, 8192}, {kBF16, kMeta});
  group->exchange({{6, shard}, {4, shard}}, {{4, other}}).wait();
  const auto records = scope.records();
  EXPECT_EQ(records[0].bytes, int64_t{2} * 8192 * 8192);
  EXPECT_EQ(records[0].wire_bytes(), 2.0 * 1023 / 1024 * 2 * 8192 * 8192);
  EXPECT_EQ(records[1].wire_bytes(), 1023.0 * 2 * 8 * 8192);
  ASSERT_EQ(records.size(), 5u);
  EXPECT_EQ(records[2].operation, Operation::kSend);
  EXPECT_EQ(records[2].root, 6);
  EXPECT_EQ(records[4].operation, Operation::kRecv);
  EXPECT_EQ(records[4].bytes, int64_t{2} * 8 * 8192);
  const std::vector<int> row = {4, 5, 6, 7};
  EXPECT_EQ(group->subgroup(row)->rank(), 1);
}

}  // namespace
}  // namespace tessera::distributed
