// DTensors as storage: how they are made, what they say of themselves, what takes them and what
// refuses them.
// ctest labels: threads
#include <filesystem>
#include <sstream>

#include <tessera/core/factory/dlpack.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/distributed/checkpoint/writer.h>

#include "distributed/dtensor_fixture.h"

namespace tessera::distributed::test_dtensor {
namespace {

TEST(DTensor, DistributedValuesAreThoseOfRank0WhateverTheOthersGive) {
  for (const int size : {2, 3, 4}) {
    compared_ranks(size, [&](int rank) {
      Mesh mesh(world());
      for (const int64_t length : {size * 3, size * 3 + 1, size * 3 + 2, 1, 0}) {
        const Tensor given = numbered({length, 5}, 100 * rank), whole = numbered({length, 5}, 0);
        for (const Placement& placement :
             {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(-1))}) {
          Tensor made;
          EXPECT_EQ(calls_of([&] { made = distribute_tensor(given, mesh, {placement}); }),
                    shard_dim(placement) == -1 && placement == Placement(Replicate()) ? "broadcast"
                                                                                      : "scatter");
          expect_equal(full_tensor(made), whole, describe(made));
          EXPECT_FALSE(made.storage() == given.storage());
        }
      }
    });
  }
}

TEST(DTensor, OnTwoAxesTheShardIsScatteredBeforeItIsCopied) {
  compared_ranks(4, [&](int rank) {
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}});
    const Tensor given = numbered({7, 3}, 100 * rank).set_requires_grad();
    Tensor made;
    EXPECT_EQ(calls_of([&] {
                made = distribute_tensor(given, mesh, {Replicate(), Shard(0)});
              }),
              "scatter broadcast");
    EXPECT_TRUE(made.requires_grad() && made.is_leaf());
    EXPECT_EQ(made.shape(), Shape({rank % 2 == 0 ? 4 : 3, 3}));
    expect_equal(to_local(made.detach()),
                 part_by_hand(numbered({7, 3}, 0), mesh, placements_of(made)), "part");
    const Tensor nested = distribute_tensor(given.detach(), mesh, {Shard(0), Shard(0)});
    expect_equal(full_tensor(nested), numbered({7, 3}, 0), "nested");
    EXPECT_EQ(local_box(nested).offset, Shape({std::vector<int64_t>{0, 2, 4, 6}[rank], 0}));
    // On the ranks of a sub-mesh only.
    Mesh& pair = mesh["dp_shard"];
    const Tensor half = distribute_tensor(given.detach(), pair, {Shard(0)});
    expect_equal(full_tensor(half), numbered({7, 3}, rank < 2 ? 0 : 200), "sub-mesh");
  });
}

TEST(DTensor, SaysWhatItIs) {
  compared_ranks(4, [&](int rank) {
    Mesh mesh(world(), {{"dp", 4}});
    const Tensor x = distribute_tensor(numbered({12, 2}, 0), mesh, {Shard(0)});
    EXPECT_EQ(describe(x), "DTensor f32[12, 2] on mesh(dp=4): [Shard(0)], local [3, 2]");
    EXPECT_EQ(x.describe(), describe(x));
    EXPECT_TRUE(is_dtensor(x));
    EXPECT_FALSE(is_dtensor(to_local(x)));
    EXPECT_EQ(placements_of(x), Placements{Shard(0)});
    EXPECT_EQ(&mesh_of(x), &mesh);
    EXPECT_EQ(global_shape(x), Shape({12, 2}));
    EXPECT_EQ(local_box(x), (Box{{3 * rank, 0}, {3, 2}}));
    std::ostringstream text;
    text << x;
    if (rank == 0) {
      EXPECT_EQ(text.str(),
                "DTensor(local=tensor([[0., 1.],\n        [2., 3.],\n        [4., 5.]]), "
                "f32[12, 2] on mesh(dp=4): [Shard(0)])");
    }
    const Tensor whole = numbered({2});
    EXPECT_EQ(message_of<ValueError>([&] { placements_of(whole); }),
              "DTensor: expects a DTensor; got f32[2] cpu; make one with distribute_tensor() or "
              "from_local()");
  });
}

TEST(DTensor, FromLocalCommunicatesOnlyToCheck) {
  compared_ranks(3, [&](int rank) {
    Mesh mesh(world());
    const Tensor even = full({2, 4}, rank);
    EXPECT_EQ(calls_of([&] {
                const Tensor x = from_local(even, mesh, {Shard(0)});
                EXPECT_EQ(global_shape(x), Shape({6, 4}));
                EXPECT_EQ(x.storage(), even.storage());
                even.zero_();
                EXPECT_EQ(x.version(), even.version());
              }),
              "");
    EXPECT_EQ(calls_of([&] { from_local(even, mesh, {Partial()}, {.run_check = true}); }), "");
    EXPECT_EQ(calls_of([&] { from_local(zeros({2}), mesh, {Replicate()}, {.run_check = true}); }),
              "broadcast");
    // Uneven: 7 rows are 3, 3 and 1.
    const Tensor uneven = full({rank < 2 ? 3 : 1, 4}, rank);
    EXPECT_EQ(global_shape(from_local(uneven, mesh, {Shard(0)}, {.shape = Shape{7, 4}})),
              Shape({7, 4}));
    from_local(uneven, mesh, {Shard(0)}, {.run_check = true, .shape = Shape{7, 4}});
  });
}

TEST(DTensor, PartsThatDoNotFitAreTypedErrorsOnEveryRank) {
  compared_ranks(3, [&](int rank) {
    Mesh mesh(world());
    const Tensor uneven = full({rank < 2 ? 3 : 1, 4}, rank);
    EXPECT_EQ(
        message_of<ShapeError>([&] { from_local(uneven, mesh, {Shard(0)}, {.run_check = true}); }),
        "from_local: the parts differ in size, and not all ranks say the shape of the whole: rank "
        "0 of the mesh gives [3,4] of [9,4], rank 2 [1,4] of [3,4]; give FromLocalOptions::shape "
        "alike on all ranks");
    const auto other = [&] {
      from_local(uneven, mesh, {Shard(0)}, {.run_check = true, .shape = Shape{6, 4}});
    };
    EXPECT_NE(message_of<ShapeError>(other).find("rank 0 of the mesh holds [0:2, 0:4]"),
              std::string::npos);
    EXPECT_THROW(from_local(uneven, mesh, {Shard(0)}, {.shape = Shape{12, 4}}), ShapeError);
    const auto differing = [&] {
      from_local(full({2}, rank == 2), mesh, {Replicate()}, {.run_check = true});
    };
    EXPECT_EQ(message_of<ValueError>(differing),
              "from_local: rank 2 of f32[2] on mesh(dp=3): [Replicate] gives another part than "
              "rank 0 of its axis 'dp', which replicates; distribute_tensor() makes them equal");
    EXPECT_THROW(
        from_local(zeros({2}).to(rank == 1 ? kF64 : kF32), mesh, {Partial()}, {.run_check = true}),
        DTypeError);
    EXPECT_THROW(
        distribute_tensor(zeros({rank == 1 ? 3 : 2, 6 / (rank == 1 ? 3 : 2)}), mesh, {Shard(0)}),
        ShapeError);
  });
}

TEST(DTensor, PlacementsThatMakeNoSenseAreConfigErrors) {
  compared_ranks(4, [&](int) {
    Mesh mesh(world(), {{"dp", 2}, {"tp", 2}});
    const Tensor x = zeros({4, 4});
    EXPECT_EQ(message_of<ConfigError>([&] { from_local(x, mesh, {Shard(0)}); }),
              "from_local: needs a placement for each axis of mesh(dp=2, tp=2); got [Shard(0)]");
    EXPECT_EQ(message_of<ConfigError>([&] {
                from_local(x, mesh, {Partial(), Partial(ReduceOp::kMax)});
              }),
              "from_local: the Partials of one tensor have one reduction; got [Partial(sum), "
              "Partial(max)]; reduce one axis before the other");
    EXPECT_THROW(from_local(x, mesh, {Replicate(), Shard(2)}), IndexError);
    EXPECT_THROW(from_local(x, mesh, {Replicate(), Partial(ReduceOp::kProduct)}), ConfigError);
    EXPECT_THROW(from_local(x, mesh, {StridedShard(0, 3), Shard(0)}), ConfigError);
    EXPECT_THROW(distribute_tensor(x, mesh, {Replicate(), Partial()}), ConfigError);
    const Tensor history = x.set_requires_grad() * Scalar(2);
    EXPECT_THROW(distribute_tensor(history, mesh, {Replicate(), Shard(0)}), AutogradError);
    const Tensor shard = from_local(x, mesh, {Replicate(), Shard(0)});
    EXPECT_EQ(message_of<ConfigError>([&] {
                to_local(shard, {.grad_placements = Placements{Replicate(), Replicate()}});
              }),
              "to_local: a gradient placed [Replicate, Replicate] has not the shape of a part "
              "placed [Replicate, Shard(0)]; where the part is a shard its gradient is the same "
              "shard");
  });
}

// A copy that ranks use differently has a summand of its gradient on each; nothing tells that here.
TEST(DTensor, TheGradientOfACopyMustBeStated) {
  compared_ranks(4, [](int rank) {
    Mesh mesh(world(), {{"dp", 2}, {"tp", 2}});
    const auto parameter = [&](const Placements& by) {
      return distribute_tensor(numbered({4, 2}), mesh, by).set_requires_grad();
    };
    const Tensor copy = parameter({Replicate(), Shard(0)});
    EXPECT_EQ(
        message_of<AutogradError>([&] { to_local(copy); }),
        "to_local: DTensor f32[4, 2] on mesh(dp=2, tp=2): [Replicate, Shard(0)], local [2, 2] "
        "requires grad and is a copy on each rank of 'dp'; say in grad_placements how its "
        "gradient lies there: Partial() where each rank uses it with data of its own, "
        "Replicate() where all use it alike, or take it under a NoGradGuard");
    // Of what was computed from it, too.
    EXPECT_THROW(to_local(redistribute(copy, {Replicate(), Replicate()})), AutogradError);
    const auto gradient = [&](const Placements& by) {
      copy.zero_grad();
      sum(to_local(copy, {.grad_placements = by}) * Scalar(1.0 + mesh.coordinate("dp"))).backward();
      return full_tensor(copy.grad()).to_vector()[0];
    };
    EXPECT_EQ(gradient({Partial(), Shard(0)}), 3);
    EXPECT_EQ(gradient({Replicate(), Shard(0)}), 1 + mesh.coordinate("dp")) << rank;
    // Where there is nothing to state.
    to_local(parameter({Shard(0), Shard(1)}));
    to_local(copy.detach());
    {
      const NoGradGuard reading;
      to_local(copy);
    }
    Mesh one(world(), {{"dp", 1}, {"tp", 4}});
    to_local(distribute_tensor(numbered({4}), one, {Replicate(), Shard(0)}).set_requires_grad());
  });
}

TEST(DTensor, WhatWouldTakeItForTheWholeRefuses) {
  compared_ranks(2, [&](int) {
    Mesh mesh(world());
    const Tensor x = distribute_tensor(numbered({2, 3}), mesh, {Shard(0)}), plain = zeros({1, 3});
    EXPECT_EQ(message_of<UnsupportedError>([&] { sum(x); }),
              "sum: has no rule for DTensor f32[2, 3] on mesh(dp=2): [Shard(0)], local [1, 3]; "
              "take full_tensor() for the whole, or to_local() for this rank's part; parameters of "
              "a sharded model are whole in its calls, model(x), and in a scope of "
              "full_parameters()");
    const std::vector<std::pair<const char*, std::function<void()>>> uses = {
        {"add", [&] { plain + x; }},
        {"add_", [&] { plain.add_(x); }},
        {"into", [&] { x.add_(plain); }},
        {"copy_", [&] { x.copy_(plain); }},
        {"from", [&] { plain.copy_(x); }},
        {"zero_", [&] { x.zero_(); }},
        {"view", [&] { x.view({3}); }},
        {"clone", [&] { x.clone(); }},
        {"to", [&] { x.to(kF64); }},
        {"eq", [&] { x.eq(plain); }},
        {"argmax", [&] { x.argmax(0); }},
        {"matmul",
         [&] {
           x.matmul(zeros({3, 1}));
         }},
        {"zeros_like", [&] { zeros_like(x); }},
        {"ones_like", [&] { ones_like(x); }},
        {"empty_like", [&] { empty_like(x); }},
        {"rand_like", [&] { rand_like(x); }},
        {"randn_like", [&] { randn_like(x); }},
        {"item", [&] { x.item(); }},
        {"to_vector", [&] { x.to_vector(); }},
        {"set_data", [&] { plain.set_data(x); }},
        {"to_dlpack", [&] { to_dlpack(x); }},
        {"distribute_tensor", [&] { distribute_tensor(x, mesh, {Shard(0)}); }},
        {"from_local", [&] { from_local(x, mesh, {Shard(0)}); }},
        {"SaveItem", [&] { SaveItem::whole("x", x); }},
        {"detached", [&] { x.detach() + plain; }},
    };
    for (const auto& [name, use] : uses) EXPECT_THROW(use(), UnsupportedError) << name;
    const std::string path = std::filesystem::temp_directory_path() / "dtensor.safetensors";
    EXPECT_EQ(message_of<UnsupportedError>([&] {
                save_safetensors(path, {{"w", x}});
              }),
              "save_safetensors: writes whole tensors; 'w' is " + describe(x) +
                  "; take its full_tensor() first, or save a checkpoint of parts");
    EXPECT_FALSE(std::filesystem::exists(path));
    EXPECT_EQ(plain.to_vector(), std::vector<double>(3, 0.0)) << "nothing was written";
    EXPECT_EQ(to_local(x).numel(), 3);
  });
}

TEST(DTensor, CollectivesRefuseItOnEveryRank) {
  failing_ranks("a DTensor is given to all_reduce", 2, [&](int) {
    Mesh mesh(world());
    const Tensor x = distribute_tensor(numbered({2, 3}), mesh, {Shard(0)});
    EXPECT_THROW(all_reduce(x), UnsupportedError);
  });
}

// Plans ask one rank for the parts of all.
TEST(DTensor, EachRankKnowsHowManyElementsTheOthersHold) {
  compared_ranks(6, [&](int rank) {
    Mesh mesh(world(), {{"dp", 3}, {"tp", 2}});
    for (const Placements& placements :
         {Placements{Replicate(), Shard(0)}, Placements{Shard(1), Shard(0)},
          Placements{Shard(0), Shard(0)}, Placements{StridedShard{0, 2}, Shard(0)},
          Placements{Partial(), Shard(-1)}, Placements{FlatShard{4, 9}, Replicate()},
          Placements{Replicate(), FlatShard{4, 20}}}) {
      const DTensorSpec spec =
          DTensorSpec{.mesh = &mesh, .placements = placements, .shape = {7, 3}}.checked("test");
      const std::vector<int64_t> numels = spec.part_numels();
      ASSERT_EQ(numels.size(), 6u);
      EXPECT_EQ(numels[static_cast<size_t>(rank)], numel_of(spec.local_shape()))
          << describe(placements) << ", rank " << rank;
    }
  });
}

TEST(DTensor, MetaTensorsAreDistributedWithoutACall) {
  compared_ranks(2, [&](int rank) {
    Mesh mesh(world());
    EXPECT_EQ(
        calls_of([&] {
          const Tensor w = distribute_tensor(zeros({3, 2}, {.device = kMeta}), mesh, {Shard(0)});
          EXPECT_TRUE(w.is_meta());
          EXPECT_EQ(w.shape(), Shape({rank == 0 ? 2 : 1, 2}));
        }),
        "");
  });
}

}  // namespace
}  // namespace tessera::distributed::test_dtensor
