// Sums that go on from what the output holds, and collectives in place, among rank threads.
// ctest labels: threads
#include <gtest/gtest.h>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/raw_views.h>

#include "distributed/compared_ranks.h"
#include "message_of.h"

namespace tessera::distributed::test_reduce_onto {
namespace {

// What a rank contributes to a micro-batch; the same on whoever asks.
Tensor contribution(int rank, int micro_batch, const Shape& shape, DType dtype) {
  const RandomStream stream{static_cast<uint64_t>(micro_batch), static_cast<uint64_t>(rank)};
  return to(randn(shape, {}, stream), dtype);
}

// The sum of one process: one addition after the other, in the type that sums are accumulated in.
Tensor added_up(const Tensor& begin, const TensorList& contributions) {
  const DType wide = begin.dtype() == kF64 ? kF64 : kF32;
  Tensor sum = to(begin, wide);
  for (const Tensor& one : contributions) sum = sum + to(one, wide);
  return to(sum, begin.dtype());
}

class Onto : public testing::TestWithParam<DType> {};

TEST_P(Onto, GoesOnAddingInRankOrder) {
  const DType dtype = GetParam();
  for (const int size : {1, 2, 3, 8}) {
    for (const int64_t length : {0, 1, 3, 4099}) {
      compared_ranks(size, [&](int rank) {
        const Tensor slice = contribution(99, rank, {length}, dtype);
        Tensor expected = slice.clone();
        for (int m = 0; m < 3; ++m) {
          const Tensor mine = contribution(rank, m, {size * length}, dtype);
          world().reduce_scatter_onto(slice, mine).wait();
          TensorList parts;
          for (int r = 0; r < size; ++r) {
            const Tensor whole = contribution(r, m, {size * length}, dtype);
            parts.push_back(whole.slice(0, rank * length, (rank + 1) * length));
          }
          expected = added_up(expected, parts);
          EXPECT_EQ(slice.to_vector(), expected.to_vector())
              << size << " ranks, " << length << " elements, micro-batch " << m;
          EXPECT_EQ(mine.to_vector(), contribution(rank, m, {size * length}, dtype).to_vector());
        }
      });
    }
  }
}

TEST_P(Onto, TakesUnevenPartsAndEmptyOnes) {
  const DType dtype = GetParam();
  for (const int size : {1, 2, 3, 8}) {
    compared_ranks(size, [&](int rank) {
      const auto length = [](int r) { return r == 1 ? 0 : 1000 * r + 3; };
      const Tensor slice = contribution(99, rank, {length(rank)}, dtype);
      Tensor expected = slice.clone();
      TensorList mine, of_all;
      for (int r = 0; r < size; ++r) {
        mine.push_back(contribution(rank, r, {length(r)}, dtype));
        of_all.push_back(contribution(r, rank, {length(rank)}, dtype));
      }
      world().reduce_scatter_onto(slice, mine).wait();
      EXPECT_EQ(slice.to_vector(), added_up(expected, of_all).to_vector());
    });
  }
}
INSTANTIATE_TEST_SUITE_P(All, Onto, testing::Values(kF64, kF32, kBF16, kF16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(ReduceOnto, RanksTimesMicroBatchesHaveTheBitsOfOneProcess) {
  constexpr int kGradients = 8;
  constexpr int64_t kLength = 240;
  TensorList gradients;
  for (int g = 0; g < kGradients; ++g) gradients.push_back(contribution(g, 7, {kLength}, kF32));
  const auto of_one_process = added_up(zeros({kLength}), gradients).to_vector();
  for (const int size : {1, 2, 4, 8}) {
    compared_ranks(size, [&](int rank) {
      const Tensor slice = zeros({kLength / size}), of_sums = zeros({kLength / size});
      for (int m = 0; m < kGradients / size; ++m) {
        const Tensor& gradient = gradients[static_cast<size_t>(m * size + rank)];
        world().reduce_scatter_onto(slice, gradient).wait();
        of_sums.add_(reduce_scatter(gradient));
      }
      EXPECT_EQ(all_gather(slice).to_vector(), of_one_process) << size << " ranks";
      const bool same = all_gather(of_sums).to_vector() == of_one_process;
      EXPECT_EQ(same, size == 1 || size == kGradients) << "sums of sums are rounded elsewhere";
    });
  }
}

TEST(ReduceOnto, NarrowTypesAreRoundedOnceACall) {
  compared_ranks(3, [](int) {
    // 256 + 1 + 1 + 1: each step in bf16 would stay at 256.
    const Tensor slice = full({2}, 256.0, {kBF16});
    world().reduce_scatter_onto(slice, full({6}, 1.0, {kBF16})).wait();
    EXPECT_EQ(slice.to_vector(), (std::vector<double>{260, 260}));  // 259 to the nearest
  });
}

TEST(ReduceOnto, IntegersAndViewsAreTakenToo) {
  for (const int size : {1, 3}) {
    compared_ranks(size, [&](int rank) {
      const Tensor counts = full({2}, 5, {kI64});
      world().reduce_scatter_onto(counts, full({2 * size}, rank + 1, {kI64})).wait();
      EXPECT_EQ(counts.to_vector()[1], 5 + size * (size + 1) / 2);

      const Tensor base = ones({4, 6}), rows = base.t().slice(0, 1, 6, 2);  // [3, 4]
      const Tensor input = arange(12 * size).to(kF32).reshape({4, 3 * size}).t();
      world().reduce_scatter_onto(rows, input).wait();
      const Tensor expected =
          ones({3, 4}) + input.contiguous().slice(0, 3 * rank, 3 * rank + 3) * Scalar(size);
      EXPECT_EQ(rows.to_vector(), expected.to_vector());
      EXPECT_EQ(base.t().select(0, 0).to_vector(), ones({4}).to_vector());
    });
  }
}

TEST(ReduceOnto, IsAReduceScatterInTheTrace) {
  compared_ranks(2, [](int) {
    const CommTrace::Scope scope(world().trace());
    const Tensor slice = zeros({3});
    const TensorList parts = {ones({3}), ones({3})};
    world().reduce_scatter_onto(slice, ones({6}), {.channel = Channel::kGradient}).wait();
    world().reduce_scatter_onto(slice, parts).wait();
    world().reduce_scatter(slice, ones({6})).wait();
    const auto records = scope.records();
    ASSERT_EQ(count(records, Operation::kReduceScatter), 3);
    EXPECT_EQ(bytes(records, Operation::kReduceScatter), 3 * 3 * 4);
    EXPECT_EQ(records[0].describe(), "reduce_scatter #1 (sum onto, f32[6])");
    EXPECT_EQ(records[1].describe(), "reduce_scatter #1 (sum onto, f32[uneven])");
    EXPECT_EQ(records[2].describe(), "reduce_scatter #2 (sum, f32[6])");
    EXPECT_EQ(records[0].wire_bytes(), records[2].wire_bytes());
    EXPECT_TRUE(records[0].onto && !records[2].onto);
    EXPECT_NE(world().trace().to_json(0).find("\"onto\": true"), std::string::npos);
  });
  const CommTrace::Scope alone(world().trace());
  world().reduce_scatter_onto(zeros({3}), ones({3})).wait();
  EXPECT_TRUE(alone.records().empty());
}

TEST(ReduceOnto, ThatARankCallsOtherwiseIsToldToAllAndChangesNothing) {
  failing_ranks("rank 1 calls reduce_scatter", 3, [](int rank) {
    const Tensor slice = full({2}, 7.0);
    const TensorList parts(3, ones({2}));
    const auto expect_mismatch = [&](const std::function<void(bool other)>& call) {
      const std::string message = message_of<DistributedError>([&] { call(rank == 1); });
      EXPECT_NE(message.find("rank 0,2: reduce_scatter #"), std::string::npos) << message;
      EXPECT_NE(message.find("(sum onto, "), std::string::npos) << message;
      EXPECT_NE(message.find("; rank 1: reduce_scatter #"), std::string::npos) << message;
      EXPECT_EQ(slice.to_vector(), full({2}, 7.0).to_vector());
    };
    expect_mismatch([&](bool other) {
      (other ? world().reduce_scatter(slice, ones({6}))
             : world().reduce_scatter_onto(slice, ones({6})))
          .wait();
    });
    expect_mismatch([&](bool other) {
      (other ? world().reduce_scatter(slice, parts) : world().reduce_scatter_onto(slice, parts))
          .wait();
    });
    world().reduce_scatter_onto(slice, ones({6})).wait();  // the group is as good as before
    EXPECT_EQ(slice.to_vector(), full({2}, 10.0).to_vector());
  });
}

TEST(ReduceOnto, SizesThatDifferAreToldToAll) {
  failing_ranks("sizes differ", 2, [](int rank) {
    const TensorList parts = {ones({2}), ones({rank == 0 ? 4 : 3})};
    const std::string message = message_of<DistributedError>(
        [&] { world().reduce_scatter_onto(ones({rank == 0 ? 2 : 3}), parts).wait(); });
    EXPECT_NE(message.find("rank 0 sends f32[4] to rank 1, which expects f32[3]"),
              std::string::npos)
        << message;
  });
}

TEST(ReduceOnto, MistakesAreTypedErrors) {
  for (const int size : {1, 2}) {
    failing_ranks("all ranks make mistakes", size, [&](int) {
      Group& group = world();
      const Tensor out = zeros({2}), in = zeros({2 * size});
      EXPECT_THROW(group.reduce_scatter_onto(zeros({3}), in), ShapeError);
      EXPECT_THROW(group.reduce_scatter_onto(to(out, kF64), in), DTypeError);
      EXPECT_THROW(group.reduce_scatter_onto(to(out, kBool), to(in, kBool)), DTypeError);
      EXPECT_THROW(group.reduce_scatter_onto(out, TensorList(static_cast<size_t>(size) + 1, out)),
                   ValueError);
      const std::string message =
          message_of<ShapeError>([&] { group.reduce_scatter_onto(out, zeros({2 * size + 1})); });
      EXPECT_NE(message.find("reduce_scatter_onto: input must have"), std::string::npos) << message;
      group.reduce_scatter_onto(out, ones({2 * size})).wait();  // the group is as good as before
      EXPECT_EQ(out.to_vector(), full({2}, size).to_vector());
    });
  }
}

TEST(ReduceOnto, OfRanksThatAreNotThereAddsWhatThisOneHas) {
  std::vector<int> ranks(4);
  for (int r = 0; r < 4; ++r) ranks[static_cast<size_t>(r)] = r;
  const auto group = std::make_shared<Group>("fake", make_fake_backend(2, 4), ranks);
  const CommTrace::Scope scope(group->trace());
  const Tensor slice = full({2}, 10.0);
  group->reduce_scatter_onto(slice, arange(8).to(kF32)).wait();
  EXPECT_EQ(slice.to_vector(), (std::vector<double>{14, 15}));
  const Tensor of_nothing = empty({2}, {kF32, kMeta});
  group->reduce_scatter_onto(of_nothing, empty({8}, {kF32, kMeta})).wait();
  EXPECT_EQ(count(scope.records(), Operation::kReduceScatter), 2);
  EXPECT_EQ(bytes(scope.records(), Operation::kReduceScatter), 16);
}

// ---- In place -----------------------------------------------------------------------------------

TEST(InPlace, ReduceScatterWritesToTheCallersPartOfItsInput) {
  for (const int size : {1, 2, 3, 8}) {
    for (const int64_t length : {0, 1, 3, 2500}) {
      compared_ranks(size, [&](int rank) {
        const Tensor input = contribution(rank, 0, {size * length}, kF32);
        const Tensor own = input.slice(0, rank * length, (rank + 1) * length);
        const Tensor apart = zeros({length});
        world().reduce_scatter(apart, input.clone(), ReduceOp::kMean).wait();
        world().reduce_scatter(own, input, ReduceOp::kMean).wait();
        EXPECT_EQ(own.to_vector(), apart.to_vector());
        const Tensor before = contribution(rank, 0, {size * length}, kF32);
        for (int r = 0; r < size; ++r) {
          if (r == rank) continue;
          EXPECT_EQ(input.slice(0, r * length, (r + 1) * length).to_vector(),
                    before.slice(0, r * length, (r + 1) * length).to_vector());
        }
        TensorList parts;
        for (int r = 0; r < size; ++r) parts.push_back(contribution(rank, 1, {r % 3}, kF32));
        const Tensor mine = parts[static_cast<size_t>(rank)], uneven = zeros({rank % 3});
        const TensorList copies = [&] {
          TensorList list;
          for (const Tensor& part : parts) list.push_back(part.clone());
          return list;
        }();
        world().reduce_scatter(uneven, copies).wait();
        world().reduce_scatter(mine, parts).wait();
        EXPECT_EQ(mine.to_vector(), uneven.to_vector());
      });
    }
  }
}

TEST(InPlace, AllGatherReadsTheCallersPartOfItsOutput) {
  for (const int size : {1, 2, 3, 8}) {
    for (const int64_t length : {0, 1, 3, 2500}) {
      compared_ranks(size, [&](int rank) {
        const Tensor mine = contribution(rank, 0, {length}, kBF16);
        const Tensor apart = zeros({size * length}, {kBF16});
        world().all_gather(apart, mine).wait();
        const Tensor whole = zeros({size * length}, {kBF16});
        const Tensor own = whole.slice(0, rank * length, (rank + 1) * length);
        own.copy_(mine);
        world().all_gather(whole, own).wait();
        EXPECT_EQ(whole.to_vector(), apart.to_vector());

        TensorList outputs;
        for (int r = 0; r < size; ++r) outputs.push_back(full({r % 3, 2}, -1.0));
        const Tensor& part = outputs[static_cast<size_t>(rank)];
        part.fill_(rank);
        world().all_gather(outputs, part).wait();
        for (int r = 0; r < size; ++r) {
          EXPECT_EQ(outputs[static_cast<size_t>(r)].to_vector(), full({r % 3, 2}, r).to_vector());
        }
      });
    }
  }
}

TEST(InPlace, MemoryOfAnotherPartIsRefused) {
  compared_ranks(2, [](int rank) {
    Group& group = world();
    const Tensor whole = zeros({6});
    const auto piece = [&](int64_t begin) { return whole.slice(0, begin, begin + 3); };
    const Tensor own = piece(3 * rank), other = piece(3 - 3 * rank), across = piece(1);
    for (const Tensor& wrong : {other, across}) {
      EXPECT_THROW(group.reduce_scatter(wrong, whole), ValueError);
      EXPECT_THROW(group.all_gather(whole, wrong), ValueError);
      EXPECT_THROW(group.reduce_scatter_onto(wrong, whole), ValueError);
    }
    const TensorList parts = {piece(0), piece(3)};
    EXPECT_THROW(group.reduce_scatter(other, parts), ValueError);
    EXPECT_THROW(group.all_gather(parts, other), ValueError);
    EXPECT_THROW(group.reduce_scatter(across, parts), ValueError);
    const std::string message =
        message_of<ValueError>([&] { group.reduce_scatter_onto(own, whole); });
    EXPECT_NE(message.find("its part would count twice"), std::string::npos) << message;
    EXPECT_THROW(group.reduce_scatter_onto(own, parts), ValueError);
    group.reduce_scatter(own, whole).wait();  // the group is as good as before
  });
  EXPECT_THROW(world().reduce_scatter_onto(zeros({2}), zeros({4})), ShapeError);
  const Tensor x = ones({2});
  EXPECT_THROW(world().reduce_scatter_onto(x, x), ValueError);  // alone, too
  world().reduce_scatter(x, x).wait();
  world().all_gather(x, x).wait();
  EXPECT_EQ(x.to_vector(), ones({2}).to_vector());
}

}  // namespace
}  // namespace tessera::distributed::test_reduce_onto
