// Groups and data-parallel training over processes: the bits of rank threads and of one process.
// ctest ranks: 2 4
// ctest own program: MPI is begun for all of its tests
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "distributed/mpi_world.h"
#include "distributed/replicate_fixture.h"

namespace tessera::distributed::test_mpi_groups {
namespace {

// Runs `body` here as a rank of the world of processes, then all ranks as threads of this process,
// and compares this rank's results bit by bit. A body leaves its results in the list it is given.
using Body = std::function<void(Group&, TensorList&)>;
void expect_bits_of_threads(const Body& body) {
  TensorList mine;
  body(world(), mine);
  const int self = rank();
  TensorList expected;
  compared_ranks(world_size(), [&](int rank) {
    TensorList results;
    body(world(), results);
    if (rank == self) expected = results;
  });
  ASSERT_EQ(mine.size(), expected.size());
  for (size_t i = 0; i < mine.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "result " << i << ", " << mine[i]);
    ASSERT_EQ(mine[i].shape(), expected[i].shape());
    ASSERT_EQ(mine[i].dtype(), expected[i].dtype());
    const Tensor a = mine[i].contiguous(), b = expected[i].contiguous();
    if (a.numel() > 0) {
      ASSERT_EQ(std::memcmp(a.data(), b.data(), static_cast<size_t>(a.nbytes())), 0);
    }
  }
}

// Numbers that depend on who holds them.
Tensor numbers(Group& group, const Shape& shape, DType dtype, uint64_t seed) {
  const auto stream = RandomStream{seed, static_cast<uint64_t>(group.rank())};
  if (is_floating(dtype)) return randn(shape, {}, stream).to(dtype);
  return (randn(shape, {}, stream) * Scalar(20.0) + Scalar(100.0)).to(dtype);
}

constexpr DType kReducible[] = {kF64, kF32, kF16, kBF16, kI64, kI32, kU8};
constexpr DType kAll[] = {kF64, kF32, kF16, kBF16, kF8E4M3, kI64, kU8, kBool};
const Shape kShapes[] = {{0}, {1}, {3}, {8, 5}, {64, 129}};

TEST_F(MpiRanks, ReductionsHaveTheBitsOfThreads) {
  expect_bits_of_threads([](Group& group, TensorList& results) {
    uint64_t seed = 0;
    for (const DType dtype : kReducible) {
      for (const Shape& shape : kShapes) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kMin,
                                  ReduceOp::kProduct}) {
          if (op == ReduceOp::kMean && !is_floating(dtype)) continue;
          const Tensor all = numbers(group, shape, dtype, ++seed);
          group.all_reduce(all, op).wait();
          results.push_back(all);

          const int root = static_cast<int>(seed % static_cast<uint64_t>(group.size()));
          const Tensor one = numbers(group, shape, dtype, seed);
          group.reduce(one, root, op).wait();
          if (group.rank() == root) results.push_back(one);

          Shape whole = shape;
          whole[0] *= group.size();
          const Tensor part = raw::empty(shape, dtype);
          group.reduce_scatter(part, numbers(group, whole, dtype, seed), op).wait();
          results.push_back(part);
        }
      }
    }
  });
}

TEST_F(MpiRanks, SumsThatGoOnAndCallsInPlaceHaveTheBitsOfThreads) {
  expect_bits_of_threads([](Group& group, TensorList& results) {
    const int size = group.size(), rank = group.rank();
    uint64_t seed = 500;
    for (const DType dtype : kReducible) {
      for (const int64_t length : {0, 1, 3, 4099}) {
        const auto part_of = [&](const Tensor& whole) {
          return whole.slice(0, rank * length, (rank + 1) * length);
        };
        const Tensor slice = numbers(group, {length}, dtype, ++seed);
        for (int m = 0; m < 2; ++m) {
          const Tensor mine = numbers(group, {size * length}, dtype, ++seed);
          group.reduce_scatter_onto(slice, mine).wait();
          results.push_back(mine);
        }
        TensorList parts;
        for (int r = 0; r < size; ++r) {
          parts.push_back(numbers(group, {r == 1 ? 0 : length + r}, dtype, ++seed));
        }
        const Tensor uneven = numbers(group, {rank == 1 ? 0 : length + rank}, dtype, ++seed);
        group.reduce_scatter_onto(uneven, parts).wait();
        group.reduce_scatter(parts[static_cast<size_t>(rank)], parts).wait();
        results.insert(results.end(), {slice, uneven});
        results.insert(results.end(), parts.begin(), parts.end());

        const Tensor whole = numbers(group, {size * length}, dtype, ++seed);
        group.reduce_scatter(part_of(whole), whole).wait();
        results.push_back(whole.clone());
        group.all_gather(whole, part_of(whole)).wait();
        results.push_back(whole);
        group.all_gather(parts, parts[static_cast<size_t>(rank)]).wait();
        results.insert(results.end(), parts.begin(), parts.end());
      }
    }
    const Tensor base = numbers(group, {12, 10}, kF32, 5), rows = base.t().slice(0, 1, 9, 2);
    group.reduce_scatter_onto(rows, numbers(group, {12, 4 * size}, kF32, 6).t()).wait();
    results.push_back(base);
  });
}

TEST_F(MpiRanks, NativeSumsGoOnAndAreInPlaceWithinRounding) {
  Group& group = world();
  const int size = group.size();
  const auto own = [&](const Tensor& x) { return x.slice(0, 500 * rank(), 500 * (rank() + 1)); };
  const Tensor mine = numbers(group, {500 * size}, kF32, 1);
  const Tensor begin = numbers(group, {500}, kF32, 2), sum = begin.clone();
  group.reduce_scatter_onto(sum, mine).wait();
  rank_context().reduction_mode = ReductionMode::kNative;
  const Tensor native = begin.clone(), whole = mine.clone();
  group.reduce_scatter_onto(native, mine).wait();
  group.reduce_scatter(own(whole), whole).wait();
  rank_context().reduction_mode = ReductionMode::kDeterministic;
  // size additions of numbers below 8, each rounded at sums below 8 (size + 1).
  const double tolerance = 0x1p-24 * 8 * (size + 1) * size;
  EXPECT_LE((native - sum).abs().max().item(), tolerance);
  EXPECT_LE((own(whole) + begin - sum).abs().max().item(), 2 * tolerance);
  for (int r = 0; r < size; ++r) {
    if (r == rank()) continue;
    EXPECT_EQ(whole.slice(0, 500 * r, 500 * (r + 1)).to_vector(),
              mine.slice(0, 500 * r, 500 * (r + 1)).to_vector());
  }
}

TEST_F(MpiRanks, MovesHaveTheBitsOfThreads) {
  expect_bits_of_threads([](Group& group, TensorList& results) {
    const int size = group.size(), rank = group.rank();
    uint64_t seed = 1000;
    for (const DType dtype : kAll) {
      for (const Shape& shape : kShapes) {
        const int root = static_cast<int>(++seed % static_cast<uint64_t>(size));
        const Tensor mine = numbers(group, shape, dtype, seed);
        const Tensor same = mine.clone();
        group.broadcast(same, root).wait();
        results.push_back(same);

        Shape whole = shape;
        whole[0] *= size;
        const Tensor gathered = raw::empty(whole, dtype);
        group.all_gather(gathered, mine).wait();
        results.push_back(gathered);

        TensorList out, in, at_root, from_root;
        for (int r = 0; r < size; ++r) {
          // Uneven: rank a sends (a + 2 * b) % 4 rows to rank b.
          in.push_back(numbers(group, {(rank + 2 * r) % 4, 7}, dtype, seed + 50));
          out.push_back(raw::empty({(r + 2 * rank) % 4, 7}, dtype));
          if (rank == root) {
            at_root.push_back(raw::empty(shape, dtype));
            from_root.push_back(numbers(group, shape, dtype, seed + static_cast<uint64_t>(r)));
          }
        }
        group.all_to_all(out, in).wait();
        results.insert(results.end(), out.begin(), out.end());
        group.gather(at_root, mine, root).wait();
        results.insert(results.end(), at_root.begin(), at_root.end());
        const Tensor scattered = raw::empty(shape, dtype);
        group.scatter(scattered, from_root, root).wait();
        results.push_back(scattered);

        TensorList ragged;
        for (int r = 0; r < size; ++r) ragged.push_back(raw::empty({r % 3, 4}, dtype));
        group.all_gather(ragged, numbers(group, {rank % 3, 4}, dtype, seed)).wait();
        results.insert(results.end(), ragged.begin(), ragged.end());

        const Tensor received = raw::empty(shape, dtype);
        const Work send = group.send(mine, (rank + 1) % size, 3);
        const Work receive = group.recv(received, (rank + size - 1) % size, 3);
        send.wait();
        receive.wait();
        results.push_back(received);

        const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
        const Tensor from_next = raw::empty(shape, dtype), from_previous = raw::empty(shape, dtype);
        group
            .exchange({{next, mine, 4}, {previous, received, 5}},
                      {{previous, from_previous, 4}, {next, from_next, 5}})
            .wait();
        results.push_back(from_next);
        results.push_back(from_previous);
      }
    }
  });
}

TEST_F(MpiRanks, NonContiguousTensorsHaveTheBitsOfThreads) {
  expect_bits_of_threads([](Group& group, TensorList& results) {
    const Tensor base = numbers(group, {12, 10}, kF32, 5);
    const Tensor view = base.t().slice(0, 1, 9, 2);
    group.all_reduce(view, ReduceOp::kMean).wait();
    results.push_back(base);
    const Tensor gathered = raw::empty({12 * group.size(), 10}, kF32);
    group.all_gather(gathered, numbers(group, {10, 12}, kF32, 6).t()).wait();
    results.push_back(gathered);
  });
}

TEST_F(MpiRanks, CoalescedCallsAndObjectsHaveTheBitsOfThreads) {
  expect_bits_of_threads([](Group& group, TensorList& results) {
    CoalescedScope calls(group);
    for (uint64_t i = 0; i < 5; ++i) {
      results.push_back(numbers(group, {static_cast<int64_t>(i) + 1, 3}, kBF16, 70 + i));
      calls.all_reduce(results.back());
    }
    calls.finish().wait();
    const auto objects = all_gather_objects(group, {{"rank", group.rank()}, {"nan", std::nan("")}});
    for (const auto& object : objects) {
      results.push_back(scalar_tensor(object.at("rank").get<double>(), kF64));
      results.push_back(scalar_tensor(object.at("nan").get<double>(), kF64));
    }
  });
}

TEST_F(MpiRanks, GroupsIssuedInOppositeOrderComplete) {
  const auto a = world().split(0), b = world().split(0);
  const Tensor x = full({1000}, rank() + 1.0), y = full({1000}, 10.0 * (rank() + 1));
  Work on_a, on_b;
  if (rank() % 2 == 0) {
    on_a = a->all_reduce(x);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    on_b = b->all_reduce(y);
  } else {
    on_b = b->all_reduce(y);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    on_a = a->all_reduce(x);
  }
  on_b.wait();
  on_a.wait();
  const double sum = world_size() * (world_size() + 1) / 2.0;
  EXPECT_EQ(x.to_vector(), std::vector<double>(1000, sum));
  EXPECT_EQ(y.to_vector(), std::vector<double>(1000, 10 * sum));
  a->shutdown();
  b->shutdown();
}

TEST_F(MpiRanks, PartsOfTheWorldReduceOnTheirOwn) {
  const auto parity = world().split(rank() % 2, -rank());
  int count = 0;
  double sum = 0;
  for (int r = rank() % 2; r < world_size(); r += 2, ++count) sum += r;
  EXPECT_EQ(parity->size(), count);
  const Tensor x = scalar_tensor(rank() * 1.0, kF32);
  parity->all_reduce(x).wait();
  EXPECT_EQ(x.item(), sum);
  parity->shutdown();
}

TEST_F(MpiRanks, BackwardGoesOnWhileGradientsTravel) {
  // The work ends although this thread does nothing but look: nobody's wait() drives it.
  const Tensor x = ones({1 << 18});
  const Work work = world().all_reduce(x);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!work.completed() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(work.completed());
  work.wait();
  EXPECT_EQ(x.to_vector(), std::vector<double>(1 << 18, world_size()));
}

TEST_F(MpiRanks, ACE2_ADifferenceIsNamedOnEveryRank) {
  const Tensor x = ones({4});
  const bool odd_one = rank() == world_size() - 1;
  // Called apart from the world's trace, which has to be equal at the end of the test.
  const auto group = world().split(0);
  Work work = odd_one ? group->broadcast(x, 0) : group->all_reduce(x);
  try {
    work.wait();
    ADD_FAILURE() << "the mismatch was not seen";
  } catch (const DistributedError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("all_reduce #1"), text.npos) << text;
    EXPECT_NE(text.find("broadcast #1"), text.npos) << text;
    EXPECT_NE(text.find("test_mpi_groups.cpp"), text.npos) << text;
  }
  EXPECT_EQ(x.to_vector(), std::vector<double>(4, 1.0));
  rank_context().trace = std::make_shared<CommTrace>();
  SetUpTestSuite();
  SetUp();
}

TEST_F(MpiRanks, AMistakeOfOneRankIsItsTypedErrorAndTheOthersNews) {
  const auto group = world().split(0);
  const Tensor x = ones({4}).to(rank() == 0 ? kBool : kF32);
  if (rank() == 0) {
    EXPECT_THROW(group->all_reduce(x), DTypeError);
  } else {
    try {
      group->all_reduce(x).wait();
      ADD_FAILURE() << "rank 0's mistake was not told";
    } catch (const DistributedError& error) {
      EXPECT_NE(std::string(error.what()).find("with a mistake"), std::string::npos)
          << error.what();
    }
  }
  rank_context().trace = std::make_shared<CommTrace>();
  SetUpTestSuite();
  SetUp();
}

TEST_F(MpiRanks, SizesThatTwoRanksSeeDifferentlyAreNamedOnEveryRank) {
  Group& group = world();
  const auto list = [&](int64_t size, int64_t last) {
    TensorList tensors;
    for (int r = 0; r < group.size(); ++r) tensors.push_back(ones({size}));
    tensors.back() = ones({last});
    return tensors;
  };
  const auto expect = [](const char* what, const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "not seen: " << what;
    } catch (const DistributedError& error) {
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
  };
  const bool last = group.rank() == group.size() - 1;
  expect("sends f32[5]", [&] { group.all_to_all(list(1, 1), list(1, last ? 1 : 5)).wait(); });
  expect("which expects f32[7]", [&] {
    group.all_gather(list(2, group.rank() == 0 ? 7 : 3), ones({last ? 3 : 2})).wait();
  });
  expect("which expects f32[3]", [&] {
    const TensorList inputs = list(2, group.rank() == 0 ? 7 : 3);
    group.reduce_scatter(ones({last ? 3 : 2}), inputs).wait();
  });
  expect("sends f32[4]", [&] {
    group.gather(group.rank() == 0 ? list(3, 3) : TensorList{}, ones({last ? 4 : 3}), 0).wait();
  });
  const Tensor x = ones({4});
  group.all_reduce(x).wait();  // the group is as good as before
  EXPECT_EQ(x.to_vector()[0], group.size());
}

TEST_F(MpiRanks, MistakesOfASenderOrReceiverAreToldToTheOther) {
  Group& group = world();
  if (group.rank() > 1) return;
  const bool sends = group.rank() == 0;
  const Tensor x = ones({400000}), meta = empty({4}, {kF32, kMeta});  // too long to be sent ahead
  const auto pass = [&](const Tensor& tensor) {
    (sends ? group.send(tensor, 1, 3) : group.recv(tensor, 0, 3)).wait();
  };
  for (const bool sender_is_wrong : {true, false}) {
    if (sends == sender_is_wrong) {
      EXPECT_THROW(pass(meta), DeviceError);
    } else {
      EXPECT_THROW(pass(x), DistributedError);
    }
  }
  EXPECT_THROW(pass(sends ? x : ones({5})), DistributedError);
  const Tensor right = sends ? x : zeros({400000});
  pass(right);
  EXPECT_EQ(right.to_vector(), x.to_vector());
}

TEST_F(MpiRanks, NeighboursExchangeWhatNoBufferHolds) {
  Group& group = world();
  const int size = group.size(), rank = group.rank();
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  constexpr int64_t kLong = int64_t{3} << 20;
  const Tensor mine = full({kLong}, rank), theirs = zeros({kLong}), back = zeros({kLong});
  group.exchange({{next, mine, 1}, {previous, mine, 2}}, {{previous, theirs, 1}, {next, back, 2}})
      .wait();
  EXPECT_EQ(theirs.sum().item(), static_cast<double>(kLong) * previous);
  EXPECT_EQ(back.sum().item(), static_cast<double>(kLong) * next);
  if (rank > 1) return;
  EXPECT_THROW(group.exchange({{1 - rank, mine}}, {{1 - rank, zeros({rank == 0 ? 7 : 8})}}).wait(),
               DistributedError);
  group.exchange({{1 - rank, mine}}, {{1 - rank, theirs}}).wait();
  EXPECT_EQ(theirs[0].item(), 1 - rank);
}

// ---- Data-parallel training ---------------------------------------------------------------------

TEST_F(MpiRanks, D2_RanksGiveTheBitsOfOneProcessThatAccumulatesInRankOrder) {
  const int size = world_size();
  std::vector<Gradients> expected;
  {
    Context context;
    const ContextGuard guard(context);
    set_num_threads(1);
    manual_seed(3);
    Net alone;
    for (int step = 0; step < 3; ++step) {
      expected.push_back(accumulate_in_one_process(alone, step * size, size, size));
    }
  }
  manual_seed(3);
  Net net;
  Mesh mesh(world());
  Replica replica = replicate(net, mesh, small_buckets());
  EXPECT_GT(replica.report().buckets.size(), 2u);
  for (int step = 0; step < 3; ++step) {
    loss_of(net, step * size + rank()).backward();
    expect_same_bits(gradients_of(net), expected[static_cast<size_t>(step)]);
    net.zero_grad();
  }
  EXPECT_EQ(replica.schedule().rebuilds(), 1);
}

TEST_F(MpiRanks, TrainingHasTheBitsOfThreads) {
  expect_bits_of_threads([](Group& group, TensorList& results) {
    manual_seed(3);
    Net net;
    Mesh mesh(group);
    Replica replica = replicate(net, mesh, small_buckets());
    optim::SGD optimizer(net.named_parameters(), {.lr = 0.05});
    for (int step = 0; step < 4; ++step) {
      loss_of(net, step * group.size() + group.rank()).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const Tensor& parameter : net.parameters()) results.push_back(parameter.detach().clone());
  });
  manual_seed(3);
}

}  // namespace

[[maybe_unused]] static const auto* const kWorld = testing::AddGlobalTestEnvironment(new MpiWorld);

}  // namespace tessera::distributed::test_mpi_groups
