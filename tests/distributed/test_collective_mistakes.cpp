// Wrong and differing calls among rank threads: every rank raises, and its group is whole.
// ctest labels: threads
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>

#include "distributed/compared_ranks.h"
#include "message_of.h"

namespace tessera::distributed::test_collective_mistakes {
namespace {

TEST(Mistakes, WrongRanksDtypesAndShapesAreTypedErrors) {
  compared_ranks(2, [](int rank) {
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
    const Tensor y = zeros({4});
    EXPECT_THROW(world().permute(y, x, std::vector<int>{1, 0, 2}), ValueError);
    EXPECT_THROW(world().permute(y, x, std::vector<int>{1, 1}), ValueError);
    EXPECT_THROW(world().permute(y, x, std::vector<int>{1, 2}), ValueError);
    EXPECT_THROW(world().permute(x, x, std::vector<int>{1, 0}), ValueError);
    EXPECT_THROW(world().permute(zeros({3}), x, std::vector<int>{0, 1}), ShapeError);
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
    expect("sends f32[4] to rank 1, which expects f32[0]", [&] {
      const std::vector<int> there = {1, 2, 0}, back = {2, 0, 1};
      group.permute(zeros({4}), ones({4}), rank == 1 ? back : there).wait();
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

TEST(Mistakes, AnExchangeThatFindsNoMemoryLeavesNothingUnderWay) {
  compared_ranks(2, [](int rank) {
    Group& group = world();
    const Tensor x = full({4}, rank), y = zeros({4});
    if (rank == 0) {
      // A view of one element, which comes by way of a buffer of its size.
      const Tensor huge = zeros({1}).expand({int64_t{1} << 58});
      EXPECT_THROW(group.exchange({{1, x}}, {{1, huge}}), OutOfMemory);
      for (const CommRecord& record : group.trace().records()) {
        EXPECT_NE(record.state, CommRecord::State::kQueued) << record.describe();
      }
    }
    barrier();
    group.exchange({{1 - rank, x}}, {{1 - rank, y}}).wait();
    EXPECT_EQ(y.to_vector(), std::vector<double>(4, 1 - rank));
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
      EXPECT_NE(message.find("test_collective_mistakes.cpp:"), std::string::npos) << message;
      ++raised;
      const Tensor x = full({1}, 1.0);
      all_reduce(x);  // nothing was moved, the group is whole
      EXPECT_EQ(x.to_vector()[0], 4);
    });
    EXPECT_EQ(raised, 4);
  }
}

// In the order of the first rank of each, wherever the others stand.
TEST(Mistakes, RanksThatCalledTheSameAreNamedTogether) {
  const auto described = [](const std::string& letters) {
    std::vector<CallText> texts(letters.size());
    for (size_t i = 0; i < letters.size(); ++i) texts[i] = {letters[i]};
    return describe_mismatch(texts);
  };
  const std::string begin = "ranks call different things here: ";
  const std::string end = "; every rank must call the same collectives in the same order";
  EXPECT_EQ(described("ab"), begin + "rank 0: a; rank 1: b" + end);
  EXPECT_EQ(described("aab"), begin + "rank 0,1: a; rank 2: b" + end);
  EXPECT_EQ(described("aba"), begin + "rank 0,2: a; rank 1: b" + end);
  EXPECT_EQ(described("abbcab"), begin + "rank 0,4: a; rank 1,2,5: b; rank 3: c" + end);
}

// Rank 1 has called something else, has heard of it and calls nothing more. Rank 0 waits on another
// channel, and its own call that failed is under way: it hears of that one.
TEST(Mistakes, AWaitOnAnotherChannelHearsOfTheCallThatFailed) {
  for (const bool coalesced : {false, true}) {
    std::atomic<bool> told{false};
    failing_ranks("rank 1 leaves after its mistake", 2, [&](int rank) {
      const Tensor whole = zeros({8});
      if (rank == 1) {
        EXPECT_THROW(broadcast(whole, 0, world(), {.channel = Channel::kParameter}),
                     DistributedError);
        told.wait(false);
        return;
      }
      Group& group = world();
      const Work gather =
          group.all_gather(whole, zeros({4}), {.channel = Channel::kParameter, .tag = "ahead"});
      const std::string message = message_of<DistributedError>([&] {
        if (coalesced) {
          CoalescedScope calls(group, {.channel = Channel::kGradient});
          calls.all_reduce(zeros({4}));
          calls.finish().wait();
        } else {
          all_reduce(zeros({4}), ReduceOp::kSum, group, {.channel = Channel::kGradient});
        }
      });
      EXPECT_NE(message.find("after another call failed: all_gather"), std::string::npos)
          << message;
      EXPECT_NE(message.find("'ahead'"), std::string::npos) << message;
      EXPECT_NE(message.find("rank 1: broadcast"), std::string::npos) << message;
      told = true;
      told.notify_all();
    });
  }
}

}  // namespace
}  // namespace tessera::distributed::test_collective_mistakes
