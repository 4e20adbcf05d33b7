// Redistribution of DTensors: values, gradients and collectives beside plain tensors.
// ctest labels: threads
#include <random>

#include "distributed/dtensor_fixture.h"

namespace tessera::distributed::test_dtensor_redistribute {
namespace {

// The calls forward and backward, along one axis.
struct Row {
  Placement from, to;
  const char *forward, *backward;
};
const Row kTable[] = {
    {Replicate(), Replicate(), "", ""},
    {Replicate(), Shard(0), "", "all_gather"},
    {Replicate(), Shard(1), "", "all_gather"},
    {Replicate(), Partial(), "", ""},
    {Shard(0), Replicate(), "all_gather", ""},
    {Shard(0), Shard(0), "", ""},
    {Shard(0), Shard(1), "all_to_all", "all_to_all"},
    {Shard(0), Partial(), "all_gather", ""},
    {Shard(1), Replicate(), "all_gather", ""},
    {Shard(1), Shard(0), "all_to_all", "all_to_all"},
    {Shard(1), Shard(1), "", ""},
    {Shard(1), Partial(), "all_gather", ""},
    {Partial(), Replicate(), "all_reduce", ""},
    {Partial(), Shard(0), "reduce_scatter", "all_gather"},
    {Partial(), Shard(1), "reduce_scatter", "all_gather"},
    {Partial(), Partial(), "", ""},
};

TEST(Redistribute, EveryPairOfOneAxisMakesTheCallsOfTheTable) {
  for (const int size : {2, 3, 4}) {
    compared_ranks(size, [&](int) {
      Mesh mesh(world());
      for (const int64_t length : {size * 3, size * 3 + 1, size * 3 + 2, size - 1, 1, 0}) {
        for (const Row& row : kTable) {
          const auto [forward, backward] = check_way(mesh, {length, 7}, {row.from}, {row.to});
          EXPECT_EQ(forward, row.forward) << describe(row.from) << " to " << describe(row.to);
          EXPECT_EQ(backward, row.backward) << describe(row.from) << " to " << describe(row.to);
        }
      }
    });
  }
}

TEST(Redistribute, ShardsOfTheMiddleDimensionMoveToTheOthersAndBack) {
  compared_ranks(3, [&](int) {
    Mesh mesh(world());
    for (const int from : {0, 1, 2}) {
      for (const int to : {0, 1, 2}) {
        check_way(mesh, {4, 5, 7}, {Shard(from)}, {Shard(to)});
      }
    }
  });
}

TEST(Redistribute, EveryPairOfTwoAxesKeepsValuesAndGradients) {
  const Placement one[] = {Replicate(), Shard(0), Shard(1), Partial()};
  const auto run = [&](int rows, int columns) {
    compared_ranks(rows * columns, [&](int) {
      Mesh mesh(world(), {{"a", rows}, {"b", columns}});
      std::vector<Placements> all;
      for (const Placement& a : one) {
        for (const Placement& b : one) all.push_back({a, b});
      }
      all.push_back({StridedShard(0, columns), Shard(0)});
      all.push_back({StridedShard(1, columns), Shard(1)});
      for (const Placements& from : all) {
        for (const Placements& to : all) check_way(mesh, {7, 5}, from, to);
      }
    });
  };
  run(2, 2);
  run(2, 3);
}

TEST(Redistribute, ThreeAxesThatCutOneDimensionArePutTogetherFromTheInside) {
  compared_ranks(8, [&](int) {
    Mesh mesh(world(), {{"a", 2}, {"b", 2}, {"c", 2}});
    const Placements nested = {Shard(0), Shard(0), Shard(0)};
    for (const Placements& other : {Placements{Replicate(), Shard(0), Shard(0)},
                                    {Shard(0), Replicate(), Shard(0)},
                                    {Shard(1), Shard(0), Partial()},
                                    {Shard(0), Shard(1), Shard(0)},
                                    {StridedShard(0, 2), Shard(1), Shard(0)}}) {
      check_way(mesh, {11, 6}, nested, other);
      check_way(mesh, {11, 6}, other, nested);
    }
  });
}

TEST(Redistribute, TwoAxesMakeAsFewCallsAsTheTableAllows) {
  compared_ranks(4, [&](int) {
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}});
    const auto calls = [&](const Placements& from, const Placements& to) {
      const auto [forward, backward] = check_way(mesh, {6, 5}, from, to);
      return forward + " | " + backward;
    };
    const Placements hsdp = {Replicate(), Shard(0)}, whole = {Replicate(), Replicate()};
    EXPECT_EQ(calls(hsdp, whole), "all_gather | ");
    EXPECT_EQ(calls(whole, hsdp), " | all_gather");
    EXPECT_EQ(calls({Partial(), Partial()}, hsdp), "reduce_scatter all_reduce | all_gather");
    EXPECT_EQ(calls({Partial(), Partial()}, whole), "all_reduce all_reduce | ");
    EXPECT_EQ(calls(hsdp, {Shard(1), Shard(0)}), " | all_gather");
    EXPECT_EQ(calls(hsdp, {Replicate(), Shard(1)}), "all_to_all | all_to_all");
    EXPECT_EQ(calls({Shard(0), Shard(0)}, whole), "all_gather all_gather | ");
    // The inner chunk is put together first, and cut again.
    EXPECT_EQ(calls({Shard(0), Shard(0)}, hsdp), "all_gather all_gather | all_gather");
    EXPECT_EQ(calls({Shard(0), Shard(1)}, {Shard(1), Shard(0)}),
              "all_gather all_to_all | all_gather all_to_all");
  });
}

TEST(Redistribute, AnAxisOfOneRankIssuesNothing) {
  compared_ranks(2, [&](int) {
    Mesh mesh(world(), {{"dp", 2}, {"tp", 1}});
    const auto [forward, backward] =
        check_way(mesh, {5, 3}, {Replicate(), Partial()}, {Replicate(), Shard(0)});
    EXPECT_EQ(forward + backward, "");
  });
}

TEST(Redistribute, AStridedShardCutsWhatTheAxesToItsRightHaveLeft) {
  compared_ranks(4, [&](int rank) {
    Mesh mesh(world(), {{"dp", 2}, {"tp", 2}});
    const Tensor whole = numbered({8, 1}, 0);
    const Tensor part = to_local(distribute_tensor(whole, mesh, {StridedShard(0, 2), Shard(0)}));
    const double first[] = {0, 4, 2, 6};  // ranks (dp, tp) = (0, 0), (0, 1), (1, 0), (1, 1)
    EXPECT_EQ(part.to_vector(), (std::vector<double>{first[rank], first[rank] + 1}));
  });
}

TEST(Redistribute, OfBlocksARankHoldsItsChunkOfEachOneBehindTheOther) {
  compared_ranks(2, [&](int rank) {
    Mesh mesh(world());
    // Three blocks of three rows: of each the first rank holds two.
    const Tensor rows = distribute_tensor(numbered({9, 1}, 0), mesh, {BlockShard(0, 3)});
    EXPECT_EQ(to_local(rows).to_vector(),
              rank == 0 ? (std::vector<double>{0, 1, 3, 4, 6, 7}) : (std::vector<double>{2, 5, 8}));
    EXPECT_EQ(describe(rows), "DTensor f32[9, 1] on mesh(dp=2): [BlockShard(0, 3)], local " +
                                  std::string(rank == 0 ? "[6, 1]" : "[3, 1]"));
    const std::vector<Box> first = {{{0, 0}, {2, 1}}, {{3, 0}, {2, 1}}, {{6, 0}, {2, 1}}},
                           second = {{{2, 0}, {1, 1}}, {{5, 0}, {1, 1}}, {{8, 0}, {1, 1}}};
    EXPECT_EQ(local_boxes(rows), rank == 0 ? first : second);
    const Tensor columns = distribute_tensor(numbered({2, 4}, 0), mesh, {BlockShard(-1, 2)});
    EXPECT_EQ(to_local(columns).to_vector(),
              rank == 0 ? (std::vector<double>{0, 2, 4, 6}) : (std::vector<double>{1, 3, 5, 7}));
    EXPECT_EQ(message_of<UnsupportedError>([&] { local_box(rows); }),
              "local_box: of [BlockShard(0, 3)] a rank holds 3 pieces of dimension 0, which are no "
              "one box; take local_boxes()");
  });
}

TEST(Redistribute, BlocksMoveAsChunksDo) {
  for (const int size : {2, 3, 4}) {
    compared_ranks(size, [&](int) {
      Mesh mesh(world());
      const auto calls = [&](const Shape& shape, const Placement& from, const Placement& to) {
        const auto [forward, backward] = check_way(mesh, shape, {from}, {to});
        return forward + " | " + backward;
      };
      for (const int blocks : {1, 2, 3}) {
        for (const int64_t block : {size * 3, size * 3 + 1, size * 3 + 2, size - 1, 1, 0}) {
          const Shape rows = {blocks * block, 5}, columns = {5, blocks * block};
          const Placement cut = BlockShard(0, blocks), other = BlockShard(1, blocks);
          EXPECT_EQ(calls(rows, cut, Replicate()), "all_gather | ");
          EXPECT_EQ(calls(rows, Replicate(), cut), " | all_gather");
          EXPECT_EQ(calls(rows, Partial(), cut), "reduce_scatter | all_gather");
          EXPECT_EQ(calls(rows, cut, Partial()), "all_gather | ");
          EXPECT_EQ(calls(rows, cut, cut), " | ");
          EXPECT_EQ(calls(rows, cut, Shard(1)), "all_to_all | all_to_all");
          EXPECT_EQ(calls(columns, Shard(0), other), "all_to_all | all_to_all");
          EXPECT_EQ(calls(columns, other, Replicate()), "all_gather | ");
          // Within a dimension it is put together first. One block is a chunk.
          const std::string within = blocks > 1 ? "all_gather | all_gather" : " | ";
          EXPECT_EQ(calls(rows, cut, Shard(0)), within);
          EXPECT_EQ(calls(columns, Shard(1), other), within);
        }
      }
    });
  }
}

// Any way of lying on any mesh, where there is such a one.
class RandomWays {
 public:
  explicit RandomWays(unsigned seed) : random_(seed) {}
  int number(int from, int to) { return std::uniform_int_distribution<int>(from, to)(random_); }
  std::vector<MeshAxis> mesh(int ranks) {
    std::vector<MeshAxis> axes;
    while (ranks > 1) {
      int size = number(2, ranks);
      while (ranks % size != 0) ++size;
      axes.push_back({std::string(1, static_cast<char>('a' + axes.size())), size});
      ranks /= size;
    }
    return axes;
  }
  Shape shape() {
    static constexpr int64_t kSizes[] = {1, 2, 3, 4, 5, 6, 7, 9, 12};
    Shape shape;
    for (int dims = number(1, 3); dims > 0; --dims) shape.push_back(kSizes[number(0, 8)]);
    return shape;
  }
  Placements placements(Mesh& mesh, const Shape& shape) {
    for (;;) {
      Placements all;
      for (size_t i = 0; i < mesh.axes().size(); ++i) all.push_back(placement(shape));
      for (size_t i = 0; i < all.size(); ++i) {
        auto* strided = std::get_if<StridedShard>(&all[i]);
        for (size_t j = i + 1; strided != nullptr && j < all.size(); ++j) {
          if (shard_dim(all[j]) == strided->dim) strided->split_factor *= mesh.axes()[j].size;
        }
      }
      for (size_t i = 0; i < all.size(); ++i) {
        auto* flat = std::get_if<FlatShard>(&all[i]);
        if (flat == nullptr) continue;
        int64_t left = numel_of(shape);
        for (size_t j = 0; j < all.size(); ++j) {
          if (shard_dim(all[j]) >= 0) left /= mesh.axes()[j].size;
        }
        const int ranks = mesh.axes()[i].size;
        flat->chunk = (flat->offset + left + ranks - 1) / ranks + number(0, 1);
      }
      try {
        return DTensorSpec{&mesh, all, shape}.checked("test").placements;
      } catch (const ConfigError&) {  // there is no such way
      }
    }
  }

 private:
  Placement placement(const Shape& shape) {
    const int dim = number(0, shape.size() - 1);
    switch (number(0, 6)) {
      case 0:
        return Replicate();
      case 1:
        return Partial();
      case 2:
        return StridedShard(dim);
      case 3:
        return Shard(dim);
      case 4:
        return FlatShard{number(0, 4), 0};
      default: {
        const int blocks = number(2, 4), size = static_cast<int>(shape[dim]);
        return BlockShard(dim, size % blocks == 0 ? blocks : size);
      }
    }
  }
  std::mt19937 random_;
};

TEST(Redistribute, AnyWayToAnyOtherIsACutOfTheWhole) {
  int strided_over_blocks = 0, blocks_to_blocks = 0, runs_of_chunks = 0;
  for (const int ranks : {2, 3, 4, 6, 8}) {
    compared_ranks(ranks, [&](int rank) {
      RandomWays ways(static_cast<unsigned>(100 + ranks));
      for (int i = 0; i < 12; ++i) {
        Mesh mesh(world(), ways.mesh(ranks));
        for (int j = 0; j < 30; ++j) {
          const Shape shape = ways.shape();
          const Placements from = ways.placements(mesh, shape), to = ways.placements(mesh, shape);
          check_way(mesh, shape, from, to);
          if (rank != 0) continue;
          const auto has = [](const Placements& all, const auto& one) {
            return std::ranges::any_of(all, one);
          };
          const auto block = [](const Placement& p) { return blocks_of(p) > 1; };
          const auto strided = [](const Placement& p) {
            return std::holds_alternative<StridedShard>(p);
          };
          const auto run = [](const Placement& p) { return std::holds_alternative<FlatShard>(p); };
          const auto cut = [](const Placement& p) { return shard_dim(p) >= 0; };
          runs_of_chunks += (has(from, run) && has(from, cut)) || (has(to, run) && has(to, cut));
          blocks_to_blocks += has(from, block) && has(to, block);
          strided_over_blocks += has(to, block) && has(to, strided);
        }
      }
    });
  }
  EXPECT_GT(blocks_to_blocks, 100);
  EXPECT_GT(strided_over_blocks, 30);
  EXPECT_GT(runs_of_chunks, 30);
}

TEST(Redistribute, BlocksThatDoNotDivideOrComeSecondAreConfigErrors) {
  compared_ranks(4, [&](int) {
    Mesh mesh(world(), {{"dp", 2}, {"tp", 2}});
    EXPECT_EQ(message_of<ConfigError>([&] {
                distribute_tensor(zeros({8, 2}), mesh, {Replicate(), BlockShard(0, 3)});
              }),
              "distribute_tensor: the blocks of BlockShard(0, 3) are of one size, and dimension 0 "
              "of [8, 2] does not divide by 3; give the number that it is made of");
    EXPECT_EQ(
        message_of<ConfigError>([&] {
          distribute_tensor(zeros({9, 2}), mesh, {Shard(0), BlockShard(0, 3)});
        }),
        "distribute_tensor: blocks are cut before chunks; got [Shard(0), BlockShard(0, 3)] on "
        "mesh(dp=2, tp=2), where 'dp' cuts dimension 0 first; order the axes otherwise, or "
        "give that one a StridedShard");
    EXPECT_THROW(distribute_tensor(zeros({8, 2}), mesh, {Replicate(), BlockShard(0, 0)}),
                 ConfigError);
    EXPECT_THROW(distribute_tensor(zeros({8, 2}), mesh, {Replicate(), BlockShard(2, 2)}),
                 IndexError);
  });
}

TEST(Redistribute, StatedPartialGradientsAreReducedOnce) {
  for (const int size : {2, 3, 4}) {
    compared_ranks(size, [&](int rank) {
      Mesh mesh(world());
      const Shape shape = {size * 3 + 1, 3};
      const Tensor upstream = numbered(shape) * Scalar(rank + 1.0);
      const Tensor total = numbered(shape) * Scalar(size * (size + 1) / 2.0);
      const Tensor copy = distribute_tensor(numbered(shape), mesh, {Replicate()});
      copy.set_requires_grad();
      const Tensor used = to_local(copy, {.grad_placements = Placements{Partial()}});
      EXPECT_EQ(calls_of([&] { used.backward(upstream); }), "all_reduce");
      expect_equal(to_local(copy.grad()), total, "of a copy");
      const Tensor shard = distribute_tensor(numbered(shape), mesh, {Shard(0)});
      shard.set_requires_grad();
      const Tensor whole = full_tensor(shard, {.grad_placements = Placements{Partial()}});
      EXPECT_EQ(calls_of([&] { whole.backward(upstream); }), "reduce_scatter");
      expect_equal(to_local(shard.grad()), part_by_hand(total, mesh, {Shard(0)}), "of a shard");
      EXPECT_EQ(placements_of(shard.grad()), Placements{Shard(0)});
    });
  }
}

TEST(Redistribute, ASummandOfAMeanHasItsShareOfTheGradient) {
  compared_ranks(4, [&](int rank) {
    Mesh mesh(world());
    const Tensor local = full({6, 2}, rank).set_requires_grad();
    const Tensor mean = from_local(local, mesh, {Partial(ReduceOp::kMean)});
    for (const Placement& to : {Placement(Replicate()), Placement(Shard(0))}) {
      const Tensor moved = to_local(redistribute(mean, {to}), {.grad_placements = Placements{to}});
      EXPECT_EQ(moved.numel() == 0 ? 1.5 : moved.to_vector()[0], 1.5);
      local.zero_grad();
      moved.backward(full(moved.shape(), 8.0));
      EXPECT_EQ(local.grad().to_vector(), std::vector<double>(12, 2.0));
    }
    const Tensor value = full({6, 2}, 3.0).set_requires_grad();
    const Tensor there =
        redistribute(from_local(value, mesh, {Replicate()}), {Partial(ReduceOp::kMean)});
    full_tensor(there).backward(full({6, 2}, 8.0));
    EXPECT_EQ(value.grad().to_vector(), std::vector<double>(12, 8.0));
    // A maximum has values and no gradient.
    const Tensor largest = from_local(local.detach(), mesh, {Partial(ReduceOp::kMax)});
    EXPECT_EQ(full_tensor(largest).to_vector()[0], 3);
    EXPECT_EQ(
        message_of<UnsupportedError>([&] { from_local(local, mesh, {Partial(ReduceOp::kMax)}); }),
        "redistribute: there is no gradient through [Partial(max)]; detach() the tensor, or "
        "reduce to_local() parts by hand");
  });
}

TEST(Redistribute, SecondDerivativesGoThroughIt) {
  compared_ranks(3, [&](int) {
    Mesh mesh(world());
    const Tensor whole = numbered({7, 2});
    const Tensor local = part_by_hand(whole, mesh, {Shard(0)}).set_requires_grad();
    const Tensor full = full_tensor(from_local(local, mesh, {Shard(0)}, {.shape = Shape{7, 2}}));
    const Tensor cube = sum(full * full * full);
    const Tensor inputs[] = {local};
    const Tensor first = grad(cube, inputs, {}, {.create_graph = true})[0];
    expect_equal(first.detach(), part_by_hand(whole * whole * Scalar(3), mesh, {Shard(0)}), "3x^2");
    const Tensor second = grad(sum(first), inputs)[0];
    expect_equal(second, part_by_hand(whole * Scalar(6), mesh, {Shard(0)}), "6x");
  });
}

}  // namespace
}  // namespace tessera::distributed::test_dtensor_redistribute
