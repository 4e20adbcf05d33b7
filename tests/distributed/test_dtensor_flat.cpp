// Flat shards: runs of row-major elements, as parameters have them that lie in one cut piece of
// memory.
// ctest labels: threads
#include <limits>
#include <sstream>

#include <tessera/core/state/state_dict.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "distributed/dtensor_fixture.h"

namespace tessera::distributed::test_dtensor_flat {
namespace {

// Row-major positions of a box's elements in the whole.
std::vector<int64_t> positions_of(const Box& box, const Shape& shape) {
  std::vector<int64_t> positions = {0};
  for (int d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t position : positions) {
      for (int64_t i = box.offset[d]; i < box.end(d); ++i) next.push_back(position * shape[d] + i);
    }
    positions = next;
  }
  return positions;
}

TEST(FlatShards, ARunIsAFewBoxesOneBehindTheOther) {
  const std::vector<Shape> shapes = {{},        {1},       {7},          {3, 4},      {1, 5},
                                     {5, 1},    {2, 3, 4}, {3, 1, 2},    {1, 1, 1},   {2, 2, 2, 2},
                                     {3, 2, 5}, {0, 4},    {2, 3, 1, 2}, {4, 1, 3, 1}};
  for (const Shape& shape : shapes) {
    const int64_t numel = numel_of(shape);
    for (int64_t begin = 0; begin <= numel; ++begin) {
      for (int64_t end = begin; end <= numel; ++end) {
        std::vector<int64_t> expected, held;
        for (int64_t e = begin; e < end; ++e) expected.push_back(e);
        const std::vector<Box> boxes = boxes_of_run(shape, begin, end);
        for (const Box& box : boxes) {
          EXPECT_TRUE(lies_within(box, shape));
          EXPECT_GT(box.numel(), 0);
          const auto own = positions_of(box, shape);
          held.insert(held.end(), own.begin(), own.end());
        }
        EXPECT_EQ(held, expected) << testing::PrintToString(shape.to_vector()) << ' ' << begin;
        EXPECT_LE(boxes.size(), static_cast<size_t>(std::max(1, 2 * shape.size() - 1)));
        if (begin == 0 && end == numel && numel > 0) {
          EXPECT_EQ(boxes, std::vector<Box>{Box::whole(shape)});
        }
      }
    }
  }
}

// Shapes and places in units of `ranks` chunks: whole units, tensors that lie on one rank, across
// two and across three, behind others, with less than an element a rank.
struct Place {
  Shape shape;
  FlatShard flat;
};
std::vector<Place> places(int ranks) {
  return {
      {{4, 3}, {0, (12 + ranks - 1) / ranks}},
      {{4, 3}, {5, 25}},              // on the first rank alone
      {{5, 2}, {5 * ranks - 10, 5}},  // the last two
      {{5, 2}, {7 * ranks - 10, 7}},  // and with an uneven cut
      {{3, 5}, {6 * ranks - 15, 6}},  // the last three
      {{2, 3, 4}, {3, 27}},
      {{2, 3, 4}, {1, (25 + ranks - 1) / ranks}},
      {{7}, {2, (9 + ranks - 1) / ranks}},
      {{1}, {ranks - 1, 1}},
      {{}, {ranks - 1, 1}},
      {{}, {0, 3}},
      {{0, 3}, {2, 4}},
  };
}
std::vector<Place> fitting_places(int ranks) {
  std::vector<Place> all = places(ranks);
  std::erase_if(all, [](const Place& place) { return place.flat.offset < 0; });
  return all;
}

TEST(FlatShards, EveryRankHoldsTheElementsOfItsChunk) {
  for (const int size : {1, 2, 3, 4, 8}) {
    compared_ranks(size, [&](int rank) {
      Mesh mesh(world());
      for (const auto& [shape, flat] : fitting_places(size)) {
        const Tensor given = numbered(shape, 100 * rank), whole = numbered(shape, 0);
        Tensor made;
        EXPECT_EQ(calls_of([&] { made = distribute_tensor(given, mesh, {flat}); }),
                  size > 1 ? "scatter" : "");
        const std::string what = describe(made);
        const Tensor part = part_by_hand(whole, mesh, {flat});
        EXPECT_EQ(made.dim(), 1) << what;
        EXPECT_TRUE(made.is_contiguous());
        EXPECT_FALSE(made.storage() == given.storage());
        expect_equal(to_local(made), part, what);
        Tensor back;
        EXPECT_EQ(calls_of([&] { back = full_tensor(made); }), size > 1 ? "all_gather" : "");
        expect_equal(back, whole, what);
        // The boxes hold the part's elements, in its order.
        std::vector<double> held;
        for (const Box& box : local_boxes(made)) {
          for (const int64_t position : positions_of(box, shape)) {
            held.push_back(static_cast<double>(position));
          }
        }
        EXPECT_EQ(held, part.to_vector()) << what;
        const Tensor again = from_local(part, mesh, {flat}, {.run_check = true, .shape = shape});
        EXPECT_EQ(again.storage(), part.storage());
        expect_equal(full_tensor(again), whole, what);
      }
    });
  }
}

TEST(FlatShards, OtherPlacementsHaveOneBoxOrNone) {
  compared_ranks(3, [&](int rank) {
    Mesh mesh(world());
    const Tensor rows = distribute_tensor(numbered({4, 3}), mesh, {Shard(0)});
    EXPECT_EQ(local_boxes(rows),
              rank == 2 ? std::vector<Box>{} : std::vector<Box>{local_box(rows)});
    const Tensor copy = distribute_tensor(numbered({4, 3}), mesh, {Replicate()});
    EXPECT_EQ(local_boxes(copy), std::vector<Box>{Box::whole({4, 3})});
    EXPECT_EQ(local_boxes(distribute_tensor(numbered({}), mesh, {Replicate()})),
              std::vector<Box>{Box::whole({})});
  });
}

TEST(FlatShards, RedistributionGoesThroughReplicate) {
  for (const int size : {1, 2, 3, 4, 8}) {
    compared_ranks(size, [&](int) {
      Mesh mesh(world());
      const auto along = [&](const char* calls) { return size > 1 ? calls : ""; };
      for (const auto& [shape, flat] : fitting_places(size)) {
        const FlatShard other{flat.offset + 1, flat.chunk + 1};
        using Calls = std::pair<std::string, std::string>;
        EXPECT_EQ(check_way(mesh, shape, {flat}, {Replicate()}), Calls(along("all_gather"), ""));
        EXPECT_EQ(check_way(mesh, shape, {Replicate()}, {flat}), Calls("", along("all_gather")));
        EXPECT_EQ(check_way(mesh, shape, {Partial()}, {flat}),
                  Calls(along("reduce_scatter"), along("all_gather")));
        EXPECT_EQ(check_way(mesh, shape, {flat}, {Partial()}), Calls(along("all_gather"), ""));
        EXPECT_EQ(check_way(mesh, shape, {flat}, {flat}), Calls("", ""));
        EXPECT_EQ(check_way(mesh, shape, {flat}, {other}),
                  Calls(along("all_gather"), along("all_gather")));
        for (int dim = 0; dim < shape.size(); ++dim) {
          EXPECT_EQ(check_way(mesh, shape, {flat}, {Shard(dim)}),
                    Calls(along("all_gather"), along("all_gather")));
          check_way(mesh, shape, {Shard(dim)}, {flat});
        }
      }
    });
  }
}

TEST(FlatShards, OnTwoAxesTheOtherOneIsCopied) {
  compared_ranks(4, [&](int rank) {
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}});
    const Shape shape = {3, 5};
    const FlatShard flat{4, 11};
    const Placements hsdp = {Replicate(), flat};
    const Tensor made = distribute_tensor(numbered(shape, 100 * rank), mesh, hsdp);
    expect_equal(full_tensor(made), numbered(shape, 0), "distributed");
    EXPECT_EQ(made.numel(), rank % 2 == 0 ? 7 : 8);
    const Placements others[] = {
        {Replicate(), Replicate()}, {Replicate(), Shard(0)}, {Shard(0), Replicate()},
        {Shard(1), Shard(0)},       {Partial(), Partial()},  {Shard(0), Shard(0)},
        {flat, Replicate()},        {Replicate(), flat},     {Replicate(), Partial()},
    };
    for (const Placements& other : others) {
      check_way(mesh, shape, hsdp, other);
      check_way(mesh, shape, other, hsdp);
      check_way(mesh, shape, {flat, Replicate()}, other);
      check_way(mesh, shape, other, {flat, Replicate()});
    }
    EXPECT_EQ(check_way(mesh, shape, {Partial(), Partial()}, hsdp).first,
              "reduce_scatter all_reduce");
  });
}

TEST(FlatShards, BesideACutTheRunIsOfWhatThatLeaves) {
  compared_ranks(4, [&](int rank) {
    Mesh mesh(world(), {{"dp", 2}, {"tp", 2}});
    const Shape shape = {6, 4};
    const FlatShard flat{1, 7};
    for (const Placement& cut : {Placement(Shard(0)), Placement(Shard(1)),
                                 Placement(BlockShard(0, 3)), Placement(BlockShard(1, 2))}) {
      const Placements placements = {flat, cut};
      const Tensor made = distribute_tensor(numbered(shape, 100 * rank), mesh, placements);
      const Tensor part = part_by_hand(numbered(shape, 0), mesh, placements);
      expect_equal(to_local(made), part, describe(made));
      EXPECT_EQ(made.numel(), 6);
      expect_equal(full_tensor(made), numbered(shape, 0), describe(made));
      std::vector<double> held;  // by the boxes
      for (const Box& box : local_boxes(made)) {
        for (const int64_t at : positions_of(box, shape)) held.push_back(static_cast<double>(at));
      }
      std::vector<double> expected = part.to_vector();
      std::ranges::sort(held);
      std::ranges::sort(expected);
      EXPECT_EQ(held, expected) << describe(made);
      for (const Placements& other : {Placements{Replicate(), Replicate()},
                                      {Replicate(), cut},
                                      {Shard(0), Shard(1)},
                                      {Partial(), cut},
                                      {flat, Shard(1)},
                                      {FlatShard{0, 12}, Replicate()}}) {
        check_way(mesh, shape, placements, other);
        check_way(mesh, shape, other, placements);
      }
    }
    EXPECT_EQ(check_way(mesh, shape, {Partial(), Shard(0)}, {flat, Shard(0)}).first,
              "reduce_scatter");
  });
}

TEST(FlatShards, SayWhatTheyAre) {
  compared_ranks(3, [&](int rank) {
    Mesh mesh(world(), {{"dp", 3}});
    const FlatShard flat{10, 8};
    const Tensor x = distribute_tensor(numbered({4, 3}, 0), mesh, {flat});
    const char* const parts[] = {"0", "6", "6"};
    EXPECT_EQ(describe(x),
              "DTensor f32[4, 3] on mesh(dp=3): [FlatShard(offset=10, chunk=8)], "
              "local [" +
                  std::string(parts[rank]) + "]");
    if (rank == 1) {
      std::ostringstream text;
      text << x;
      EXPECT_EQ(text.str(),
                "DTensor(local=tensor([0., 1., 2., 3., 4., 5.]), f32[4, 3] on mesh(dp=3): "
                "[FlatShard(offset=10, chunk=8)])");
    }
    EXPECT_EQ(spec_of(x), (DTensorSpec{&mesh, {flat}, {4, 3}}));
    EXPECT_NE(spec_of(x), (DTensorSpec{&mesh, {FlatShard{11, 8}}, {4, 3}}));
    EXPECT_NE(spec_of(x), (DTensorSpec{&mesh, {FlatShard{10, 9}}, {4, 3}}));
    EXPECT_EQ(message_of<UnsupportedError>([&] { local_box(x); }),
              "local_box: of [FlatShard(offset=10, chunk=8)] a rank holds a run of elements, which "
              "is no one box; take local_boxes()");
    const Tensor meta = distribute_tensor(zeros({4, 3}, {.device = kMeta}), mesh, {flat});
    EXPECT_EQ(meta.shape(), x.shape());
  });
}

TEST(FlatShards, ThatHoldNotAllOrNotAloneAreConfigErrors) {
  compared_ranks(4, [&](int rank) {
    Mesh mesh(world(), {{"a", 2}, {"b", 2}}), line(world());
    const Tensor x = zeros({4, 4});
    EXPECT_EQ(message_of<ConfigError>([&] {
                distribute_tensor(zeros({5, 4}), mesh, {Shard(0), FlatShard{0, 8}});
              }),
              "distribute_tensor: beside a FlatShard the other axes cut evenly; got [Shard(0), "
              "FlatShard(offset=0, chunk=8)] on mesh(a=2, b=2), and dimension 0 of [5, 4] does not "
              "divide by 2; gather along them first");
    EXPECT_EQ(message_of<ConfigError>([&] {
                distribute_tensor(x, mesh, {Shard(0), FlatShard{0, 3}});
              }),
              "distribute_tensor: the 2 chunks of FlatShard(offset=0, chunk=3) must hold all of "
              "[2, 4]: offset + 8 elements is at most chunk * 2; give the unit's true chunk");
    EXPECT_THROW(distribute_tensor(x, mesh, {FlatShard{0, 8}, FlatShard{0, 8}}), ConfigError);
    EXPECT_THROW(from_local(zeros({8}), mesh, {FlatShard{0, 8}, Partial()}, {.shape = x.shape()}),
                 ConfigError);
    EXPECT_EQ(message_of<ConfigError>([&] {
                distribute_tensor(x, line, {FlatShard{1, 4}});
              }),
              "distribute_tensor: the 4 chunks of FlatShard(offset=1, chunk=4) must hold all of "
              "[4, 4]: offset + 16 elements is at most chunk * 4; give the unit's true chunk");
    for (const FlatShard& wrong :
         {FlatShard{-1, 8}, FlatShard{0, -4}, FlatShard{0, 3}, FlatShard{0, int64_t{1} << 62},
          FlatShard{std::numeric_limits<int64_t>::max() - 3, 8}}) {
      EXPECT_THROW(distribute_tensor(x, line, {wrong}), ConfigError) << describe(wrong);
    }
    EXPECT_EQ(message_of<ConfigError>([&] {
                from_local(zeros({4}), line, {FlatShard{0, 4}});
              }),
              "from_local: the shape of the whole does not follow from a part placed "
              "[FlatShard(offset=0, chunk=4)]; give FromLocalOptions::shape");
    if (rank == 1) {
      EXPECT_EQ(message_of<ShapeError>([&] {
                  from_local(zeros({5}), line, {FlatShard{0, 4}}, {.shape = Shape{4, 4}});
                }),
                "from_local: of f32[4, 4] on mesh(dp=4): [FlatShard(offset=0, chunk=4)] this rank "
                "holds the elements [4:8], a part [4]; got f32[5] cpu; a part is what the rank's "
                "chunk of the unit has of the tensor, 1-D");
    }
    const auto checked = [&] {
      from_local(zeros({rank == 2 ? 5 : 4}), line, {FlatShard{0, 4}},
                 {.run_check = true, .shape = Shape{4, 4}});
    };
    EXPECT_NE(message_of<ShapeError>(checked).find("rank 2 of the mesh holds the elements [8:12]"),
              std::string::npos);
    const Tensor flat = distribute_tensor(x, line, {FlatShard{0, 4}});
    EXPECT_THROW(to_local(flat, {.grad_placements = Placements{Replicate()}}), ConfigError);
  });
}

TEST(FlatShards, StatedPartialGradientsAreReducedOnce) {
  for (const int size : {2, 3, 4}) {
    compared_ranks(size, [&](int rank) {
      Mesh mesh(world());
      for (const auto& [shape, flat] : fitting_places(size)) {
        const Tensor shard = distribute_tensor(numbered(shape), mesh, {flat}).set_requires_grad();
        const Tensor whole = full_tensor(shard, {.grad_placements = Placements{Partial()}});
        const Tensor upstream = numbered(shape) * Scalar(rank + 1.0);
        EXPECT_EQ(calls_of([&] { whole.backward(upstream); }), "reduce_scatter");
        const Tensor total = numbered(shape) * Scalar(size * (size + 1) / 2.0);
        EXPECT_EQ(describe(shard.grad()), describe(shard));
        expect_equal(to_local(shard.grad()), part_by_hand(total, mesh, {flat}), describe(shard));
      }
    });
  }
}

TEST(FlatShards, TrainingOnRunsIsTrainingOnTheWhole) {
  compared_ranks(3, [&](int) {
    Mesh mesh(world());
    const Shape shape = {5, 3};
    const Tensor start = numbered(shape) * Scalar(0.125);
    const auto train = [&](const Tensor& w, const auto& whole_of) {
      optim::AdamW optimizer({{"w", w}}, {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const Tensor whole = whole_of(w);
        sum(whole * whole).backward();
        optim::clip_grad_value({w}, 2);
        optimizer.step();
      }
      return optimizer.state_dict();
    };
    const Tensor plain = start.clone().set_requires_grad();
    const StateDict expected = train(plain, [](const Tensor& w) { return w; });
    for (const FlatShard& flat : {FlatShard{0, 5}, FlatShard{4, 7}, FlatShard{20, 12}}) {
      const Tensor w = distribute_tensor(start, mesh, {flat}).set_requires_grad();
      const StateDict state = train(w, [](const Tensor& x) { return full_tensor(x); });
      expect_equal(full_tensor(w).detach(), plain.detach(), describe(w));
      for (const char* name : {"state.w.exp_avg", "state.w.exp_avg_sq"}) {
        EXPECT_EQ(describe(state.at(name)), describe(w));
        expect_equal(full_tensor(state.at(name)), expected.at(name), name);
      }
      // A snapshot has elements of its own and lies alike; another optimizer takes it.
      const StateDict copy = state.clone();
      EXPECT_EQ(describe(copy.at("state.w.exp_avg")), describe(w));
      optim::AdamW next({{"w", w}}, {.lr = 0.5});
      next.load_state_dict(copy);
      expect_equal(to_local(next.state_dict().at("state.w.exp_avg")),
                   to_local(state.at("state.w.exp_avg")), "loaded");
    }
  });
}

}  // namespace
}  // namespace tessera::distributed::test_dtensor_flat
