// Collectives over nested values. IDs (OPS-n) are the scenarios of docs/accelerate-scenarios.md.
// ctest labels: threads
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <tessera/accelerate/process/operations.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>

#include "distributed/compared_ranks.h"

namespace tessera::accelerate::test_facade_operations {
namespace {

using distributed::compared_ranks;
using distributed::failing_ranks;
using distributed::world;
using distributed::world_size;
using Values = std::vector<double>;

Tensor numbers(const Values& values) {
  return tensor(std::span(values), {static_cast<int64_t>(values.size())});
}
Tensor range(int64_t first, int64_t size) { return raw::arange(first, 1, size, kF32); }

Values expected_range(int64_t first, int64_t size) { return range(first, size).to_vector(); }

struct Output {
  Tensor logits, loss;
  void visit_tensors(auto&& visit) { visit(logits), visit(loss); }
};

TEST(FacadeOperations, OPS_1_GatherJoinsRowsInRankOrder) {
  for (const int n : {1, 2, 3, 4}) {
    compared_ranks(n, [n](int rank) {
      EXPECT_EQ(gather(range(rank * n + 1, n)).to_vector(), expected_range(1, n * n));
    });
  }
}

TEST(FacadeOperations, OPS_1_GatherMakesAScalarOneElementARank) {
  for (const int n : {1, 3}) {
    compared_ranks(n, [n](int rank) {
      const Tensor all = gather(scalar_tensor(rank, kI64));
      EXPECT_EQ(all.shape(), Shape({n}));
      EXPECT_EQ(all.dtype(), kI64);
      EXPECT_EQ(all.to_vector(), expected_range(0, n));
    });
  }
}

TEST(FacadeOperations, OPS_2_GatherOfATransposedTensorKeepsItsOrder) {
  compared_ranks(2, [](int rank) {
    const Tensor own = (range(0, 6) + 10.0 * rank).view({2, 3}).t();  // [3, 2]
    ASSERT_FALSE(own.is_contiguous());
    const Tensor all = gather(own);
    EXPECT_EQ(all.shape(), Shape({6, 2}));
    EXPECT_EQ(all.to_vector(), (Values{0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15}));
  });
}

TEST(FacadeOperations, OPS_3_GatherObjectJoinsLists) {
  compared_ranks(3, [](int rank) {
    EXPECT_EQ(gather_object(std::vector<int>{rank}), (std::vector<int>{0, 1, 2}));
    // Lists of any length, NaN and text survive.
    const std::vector<std::string> words(static_cast<size_t>(rank), "r" + std::to_string(rank));
    EXPECT_EQ(gather_object(words), (std::vector<std::string>{"r1", "r2", "r2"}));
    const auto all = gather_object(std::vector<double>{std::nan(""), 1.0 * rank});
    ASSERT_EQ(all.size(), 6U);
    EXPECT_TRUE(std::isnan(all[2]));
    EXPECT_EQ(all[5], 2.0);
  });
  EXPECT_EQ(gather_object(std::vector<int>{7}), (std::vector<int>{7}));
}

TEST(FacadeOperations, OPS_3_BroadcastObjectGivesEveryRankTheSame) {
  compared_ranks(3, [](int rank) {
    const std::map<std::string, int> own{{"rank", rank}};
    EXPECT_EQ(broadcast_object(own, 2).at("rank"), 2);
    EXPECT_EQ(broadcast_object(std::string(size_t(rank) + 1, 'a')), "a");
  });
}

TEST(FacadeOperations, OPS_4_BroadcastGivesWhatRank0Holds) {
  compared_ranks(3, [](int rank) {
    const Tensor own = range(rank * 3 + 1, 3);
    EXPECT_EQ(broadcast(own).to_vector(), (Values{1, 2, 3}));
    EXPECT_EQ(broadcast(own, 2).to_vector(), (Values{7, 8, 9}));
    // Nobody's own tensor was written to.
    EXPECT_EQ(own.to_vector(), expected_range(rank * 3 + 1, 3));
    EXPECT_THROW(broadcast(own, 3), ValueError);
  });
}

TEST(FacadeOperations, OPS_5_PadMakesAllAsLongAsTheLongest) {
  for (const int n : {2, 4}) {
    compared_ranks(n, [n](int rank) {
      const Tensor own = range(1, rank == 0 ? n + 1 : n);
      const Tensor padded = pad_across_processes(own);
      Values expected = expected_range(1, n);
      expected.push_back(rank == 0 ? n + 1 : 0);
      EXPECT_EQ(padded.to_vector(), expected);
      EXPECT_EQ(gather(padded).size(0), n * (n + 1));
    });
  }
}

TEST(FacadeOperations, OPS_5_PadTakesDimensionValueAndSide) {
  compared_ranks(2, [](int rank) {
    const Tensor own = raw::full({2, 1 + rank}, 5, kI64);
    const Tensor last = pad_across_processes(own, {.dim = -1, .pad_index = -100});
    const Tensor first = pad_across_processes(own, {.dim = 1, .pad_index = 7, .pad_first = true});
    EXPECT_EQ(last.dtype(), kI64);
    EXPECT_EQ(last.to_vector(), rank == 0 ? (Values{5, -100, 5, -100}) : Values(4, 5));
    EXPECT_EQ(first.to_vector(), rank == 0 ? (Values{7, 5, 7, 5}) : Values(4, 5));
    // A dimension that a tensor lacks: as it is.
    EXPECT_TRUE(pad_across_processes(own, {.dim = 2}).is(own));
  });
}

TEST(FacadeOperations, OPS_6_ReduceOfTwoRanks) {
  compared_ranks(2, [](int rank) {
    const Tensor own = numbers(rank == 0 ? Values{1, 2} : Values{3, 4});
    EXPECT_EQ(reduce(own, RankReduction::kSum).to_vector(), (Values{4, 6}));
    EXPECT_EQ(reduce(own, RankReduction::kMean).to_vector(), (Values{2, 3}));
    EXPECT_EQ(reduce(own, RankReduction::kMax).to_vector(), (Values{3, 4}));
    EXPECT_EQ(own.to_vector(), rank == 0 ? (Values{1, 2}) : (Values{3, 4}));
    EXPECT_THROW(reduce(range(0, 2).to(kI64), RankReduction::kMean), DTypeError);
  });
  // One rank refuses what several do.
  compared_ranks(1, [](int) {
    EXPECT_THROW(reduce(range(0, 2).to(kI64), RankReduction::kMean), DTypeError);
    EXPECT_EQ(reduce(range(0, 2).to(kI64), RankReduction::kSum).to_vector(), (Values{0, 1}));
  });
}

// Values that all have the same number of elements pass the comparison that every collective makes;
// only debug mode sees their shapes.
TEST(FacadeOperations, OPS_7_DebugModeNamesTheOperationAndEveryRanksShapes) {
  using Named = std::map<std::string, Tensor>;
  const OperationOptions debug{.debug = true};
  const auto message_of = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const OperationMismatch& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  compared_ranks(2, [&](int rank) {
    const Named rank_differs{
        {"tensor", raw::zeros(rank == 0 ? Shape{1, 6} : Shape{1, 1, 6}, kF32)}};
    const Named size_differs{{"tensor", raw::zeros(rank == 0 ? Shape{2, 3} : Shape{3, 2}, kF32)}};
    const auto expect = [&](const std::string& message, const std::string& operation) {
      EXPECT_EQ(message.rfind(operation + ": ", 0), 0U) << message;
      EXPECT_NE(message.find("rank 0: f32["), std::string::npos) << message;
      EXPECT_NE(message.find("rank 1: f32["), std::string::npos) << message;
      EXPECT_NE(message.find("test_facade_operations.cpp"), std::string::npos) << message;
    };
    for (const Named& value : {rank_differs, size_differs}) {
      expect(message_of([&] { gather(value, world(), debug); }), "gather");
      expect(message_of([&] { reduce(value, RankReduction::kSum, world(), debug); }), "reduce");
      expect(message_of([&] { broadcast(value, 0, world(), debug); }), "broadcast");
    }
    for (const bool mode : {true, false}) {  // sizes are what pad exists for
      expect(message_of([&] { pad_across_processes(rank_differs, {}, world(), {.debug = mode}); }),
             "pad_across_processes");
    }
    EXPECT_EQ(pad_across_processes(size_differs, {}, world(), debug).at("tensor").size(0), 3);
    // The group is as good as before, and what fits passes.
    EXPECT_EQ(gather(range(rank, 1), world(), debug).to_vector(), (Values{0, 1}));
  });
}

TEST(FacadeOperations, OPS_8_CopyFromOwnerBringsShapeAndDtype) {
  compared_ranks(3, [](int rank) {
    Tensor own;
    if (rank == 1) own = raw::arange(5, 1, 6, kI32).view({2, 1, 3});
    const Tensor copy = copy_from_owner(own);
    EXPECT_EQ(copy.shape(), Shape({2, 1, 3}));
    EXPECT_EQ(copy.dtype(), kI32);
    EXPECT_EQ(copy.to_vector(), expected_range(5, 6));
    EXPECT_THROW(copy_from_owner(Tensor()), DistributedError);
    EXPECT_THROW(copy_from_owner(rank < 2 ? range(0, 1) : Tensor()), DistributedError);
  });
  EXPECT_THROW(copy_from_owner(Tensor()), DistributedError);
}

// Trap 1: upstream's reduce("none") sums.
TEST(FacadeOperations, OPS_9_ReduceNoneKeepsWhatEachRankHas) {
  compared_ranks(2, [](int rank) {
    const Tensor own = range(rank, 2);
    EXPECT_TRUE(reduce(own, RankReduction::kNone).is(own));
  });
}

// Trap 21: upstream checks shapes in debug mode only, and hangs otherwise.
TEST(FacadeOperations, OPS_10_AMismatchWithoutDebugModeIsAnErrorAndNoHang) {
  failing_ranks("shapes differ", 2, [](int rank) {
    EXPECT_THROW(gather(range(0, 2 + rank)), DistributedError);
    EXPECT_THROW(reduce(range(0, 2 + rank), RankReduction::kSum), DistributedError);
    EXPECT_THROW(broadcast(rank == 0 ? range(0, 2) : range(0, 2).to(kI64)), DistributedError);
  });
  // Another operation altogether.
  failing_ranks("operations differ", 2, [](int rank) {
    if (rank == 0) {
      EXPECT_THROW(gather(range(0, 2)), DistributedError);
    } else {
      EXPECT_THROW(reduce(range(0, 2)), DistributedError);
    }
  });
}

// UTL-1: types stay.
TEST(FacadeOperations, OPS_1_NestedValuesKeepTheirStructure) {
  compared_ranks(2, [](int rank) {
    const Tensor own = range(rank, 1);
    const auto vectors = gather(std::vector<Tensor>{own, own + 10.0});
    EXPECT_EQ(vectors[1].to_vector(), (Values{10, 11}));
    const auto maps = gather(std::map<std::string, std::optional<Tensor>>{{"a", own}, {"b", {}}});
    EXPECT_EQ(maps.at("a")->to_vector(), (Values{0, 1}));
    EXPECT_FALSE(maps.at("b").has_value());
    const auto tuples = gather(std::tuple(own, std::string("text"), 3, std::array{own.to(kI64)}));
    EXPECT_EQ(std::get<1>(tuples), "text");
    EXPECT_EQ(std::get<3>(tuples)[0].to_vector(), (Values{0, 1}));
    const Output structs = reduce(Output{own, Tensor()}, RankReduction::kSum);
    EXPECT_EQ(structs.logits.to_vector(), (Values{1}));
    EXPECT_FALSE(structs.loss.defined());
  });
}

// Trap 30: upstream writes into the caller's dict.
TEST(FacadeOperations, OPS_1_WhatTheCallerHoldsIsNotChanged) {
  compared_ranks(2, [](int rank) {
    std::map<std::string, Tensor> own{{"x", range(rank, rank + 1)}, {"y", range(5, 1)}};
    const std::map<std::string, Tensor> before = own;
    pad_across_processes(own);
    reduce(std::map<std::string, Tensor>{{"y", own.at("y")}}, RankReduction::kSum);
    broadcast(own.at("y"));
    gather(own.at("y"));
    for (const auto& [name, value] : own) EXPECT_TRUE(value.is(before.at(name)));
    EXPECT_EQ(own.at("x").to_vector(), expected_range(rank, rank + 1));
    EXPECT_EQ(own.at("y").to_vector(), (Values{5}));
  });
}

TEST(FacadeOperations, OPS_4_ResultsHaveNoHistory) {
  compared_ranks(2, [](int) {
    const Tensor weight = range(0, 2);
    weight.set_requires_grad();
    const Tensor product = weight * weight;
    EXPECT_FALSE(gather(product).requires_grad());
    EXPECT_FALSE(reduce(product, RankReduction::kSum).requires_grad());
    EXPECT_FALSE(broadcast(product).requires_grad());
    EXPECT_TRUE(product.requires_grad());
  });
}

TEST(FacadeOperations, OPS_1_OneRankCommunicatesNothing) {
  const distributed::CommTrace::Scope scope(world().trace());
  const Tensor own = range(0, 3);
  EXPECT_TRUE(reduce(own).is(own));
  EXPECT_TRUE(broadcast(own).is(own));
  EXPECT_TRUE(pad_across_processes(own).is(own));
  EXPECT_TRUE(copy_from_owner(own).is(own));
  EXPECT_EQ(gather(own).data(), own.data());
  EXPECT_TRUE(scope.records().empty());
}

}  // namespace
}  // namespace tessera::accelerate::test_facade_operations
