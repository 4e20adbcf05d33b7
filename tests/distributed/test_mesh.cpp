// Meshes: axes, products of axes and sub-meshes are the groups that one would write by hand.
// ctest labels: threads
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <set>

#include <tessera/core/factory/factory.h>
#include <tessera/distributed/mesh/mesh.h>

#include "distributed/compared_ranks.h"
#include "distributed/fake_rank.h"
#include "message_of.h"

namespace tessera::distributed::test_mesh {
namespace {

using Names = std::vector<std::string_view>;

std::vector<int> ranks_of(const Group& group) {
  return {group.ranks().begin(), group.ranks().end()};
}

// The world ranks that share this one's coordinates on all axes but `free`, by their number alone.
std::vector<int> by_hand(const std::vector<MeshAxis>& axes, int rank,
                         const std::set<size_t>& free) {
  const auto coordinates = [&](int r) {
    std::vector<int> result(axes.size());
    for (size_t i = axes.size(); i-- > 0; r /= axes[i].size) result[i] = r % axes[i].size;
    return result;
  };
  int ranks = 1;
  for (const MeshAxis& axis : axes) ranks *= axis.size;
  std::vector<int> result;
  for (int r = 0; r < ranks; ++r) {
    bool same = true;
    for (size_t i = 0; i < axes.size(); ++i) {
      same &= free.count(i) != 0 || coordinates(r)[i] == coordinates(rank)[i];
    }
    if (same) result.push_back(r);
  }
  return result;
}

const std::vector<std::vector<MeshAxis>> kGrids = {
    {{"dp", 2}},
    {{"dp", 2}, {"tp", 2}},
    {{"dp_replicate", 2}, {"dp_shard", 4}},
    {{"dp", 4}, {"cp", 1}, {"tp", 2}},
    {{"dp_replicate", 2}, {"dp_shard", 2}, {"cp", 2}},
    {{"pp", 2}, {"dp", 3}, {"tp", 2}},
    {{"pp", 1}, {"dp", 2}},
};

int size_of(const std::vector<MeshAxis>& axes) {
  int size = 1;
  for (const MeshAxis& axis : axes) size *= axis.size;
  return size;
}

// Each product of the mesh against by_hand(); `use`: what is done with each group.
void expect_products(const std::vector<MeshAxis>& axes, int rank,
                     const std::function<void(Group&, const std::vector<int>&)>& use) {
  const Mesh mesh(world(), axes);
  for (unsigned chosen = 1; chosen < 1u << axes.size(); ++chosen) {
    std::set<size_t> free;
    Names names;
    for (size_t i = axes.size(); i-- > 0;) {  // the order of the names does not matter
      if ((chosen >> i & 1) == 0) continue;
      free.insert(i);
      names.push_back(axes[i].name);
    }
    const std::vector<int> expected = by_hand(axes, rank, free);
    Group& group = mesh.group(names);
    EXPECT_EQ(ranks_of(group), expected) << mesh.describe() << ", rank " << rank;
    EXPECT_EQ(group.size(), static_cast<int>(expected.size()));
    EXPECT_EQ(mesh.size(names), group.size());
    EXPECT_EQ(mesh.coordinate(names), group.rank());
    EXPECT_EQ(group.backend().size(), group.size());
    EXPECT_EQ(group.backend().rank(), group.rank());
    EXPECT_EQ(&mesh.group(names), &group) << "made once";
    use(group, expected);
  }
  EXPECT_EQ(mesh.size(), size_of(axes));
  EXPECT_EQ(mesh.coordinate(), rank);
  EXPECT_EQ(&mesh.group(), &world());
}

TEST(Mesh, EveryProductHasTheRanksThatDifferAlongItsAxes) {
  for (const auto& axes : kGrids) {
    compared_ranks(size_of(axes), [&](int rank) {
      expect_products(axes, rank, [rank](Group& group, const std::vector<int>& expected) {
        const Tensor sum = raw::full({1}, rank, kI64);
        all_reduce(sum, ReduceOp::kSum, group);
        EXPECT_EQ(sum.item<int64_t>(), std::accumulate(expected.begin(), expected.end(), 0));
      });
    });
  }
}

// A plan asks for the same products where one rank is there alone.
TEST(Mesh, ProductsOfRanksThatAreNotThereAreTheSame) {
  for (const auto& axes : kGrids) {
    for (int rank = 0; rank < size_of(axes); ++rank) {
      on_fake_rank(rank, size_of(axes),
                   [&] { expect_products(axes, rank, [](Group&, const std::vector<int>&) {}); });
    }
  }
}

TEST(Mesh, RanksThatAreNotThereSayNoColour) {
  on_fake_rank(1, 4, [] {
    EXPECT_EQ(message_of<UnsupportedError>([] { world().split(0); }),
              "world: split: the other ranks are not there and say no colour, so that all would be "
              "of this one's; list the members, by subgroup()");
  });
}

TEST(Mesh, OnlyTheFirstRequestForAProductCommunicates) {
  compared_ranks(8, [](int) {
    const Mesh mesh(world(), {{"dp", 2}, {"cp", 2}, {"ep", 1}, {"tp", 2}});
    const auto calls = [&](auto&& body) {
      const CommTrace::Scope scope(world().trace());
      body();
      return scope.records().size();
    };
    EXPECT_GT(calls([&] { mesh.group({"dp", "cp"}); }), 0u);
    EXPECT_EQ(calls([&] { mesh.group({"cp", "dp"}); }), 0u);
    EXPECT_EQ(calls([&] { mesh.group({"ep", "cp", "dp"}); }), 0u) << "an axis of one rank";
    EXPECT_EQ(calls([&] { mesh.group({"tp", "dp", "cp"}); }), 0u) << "the world";
    EXPECT_EQ(calls([&] { mesh.group({"tp", "ep"}); }), 0u) << "one axis";
    EXPECT_EQ(calls([&] { mesh.submesh({"dp", "tp"}); }), 0u);
    EXPECT_EQ(calls([&] { mesh.submesh({"dp", "cp", "ep"}).group({"dp", "cp"}); }), 0u);
    EXPECT_EQ(&mesh.group({"tp", "dp", "cp"}), &world());
    EXPECT_EQ(&mesh.group({"tp", "ep"}), &mesh.group("tp"));
    EXPECT_EQ(mesh.group({"ep"}).size(), 1);
  });
}

TEST(Mesh, SubmeshesShareTheirParentsGroups) {
  compared_ranks(8, [](int rank) {
    const Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 2}});
    Mesh& data = mesh.submesh({"dp_shard", "dp_replicate"});
    EXPECT_EQ(data.describe(),
              "mesh(dp_replicate=2, dp_shard=2) of mesh(dp_replicate=2, dp_shard=2, tp=2)");
    EXPECT_EQ(&data.group("dp_shard"), &mesh.group("dp_shard"));
    EXPECT_EQ(&data.group(), &mesh.group({"dp_replicate", "dp_shard"}));
    EXPECT_EQ(data.size(), 4);
    EXPECT_EQ(data.coordinate(), rank / 2);
    EXPECT_FALSE(data.has("tp"));
    EXPECT_EQ(&mesh.submesh({"dp_replicate", "dp_shard"}), &data) << "made once";
    EXPECT_EQ(&mesh["tp"].group(), &mesh.group("tp"));
    EXPECT_EQ(data["dp_shard"].coordinate(), mesh.coordinate("dp_shard"));
    EXPECT_EQ(message_of<ConfigError>([&] { data.group("tp"); }),
              "Mesh: has no axis 'tp'; it is " + data.describe());
  });
}

TEST(Mesh, AProductThatHasANameIsAnAxis) {
  compared_ranks(8, [](int rank) {
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}, {"cp", 2}});
    mesh.flatten({"dp_shard", "dp_replicate"}, "dp");
    mesh.flatten({"dp_shard", "cp"}, "fsdp");
    const CommTrace::Scope scope(world().trace());
    EXPECT_TRUE(mesh.has("dp"));
    EXPECT_EQ(mesh.describe(), "mesh(dp_replicate=2, dp_shard=2, cp=2)");
    EXPECT_EQ(&mesh.group("dp"), &mesh.group({"dp_replicate", "dp_shard"}));
    EXPECT_EQ(mesh.size("dp"), 4);
    EXPECT_EQ(mesh.coordinate("dp"), rank / 2);
    EXPECT_EQ(&mesh.group({"dp", "cp"}), &world());
    EXPECT_EQ(mesh["dp"].describe(), "mesh(dp=4) of mesh(dp_replicate=2, dp_shard=2, cp=2)");
    EXPECT_EQ(&mesh["dp"].group(), &mesh.group("dp"));
    Mesh& hybrid = mesh.submesh({"fsdp", "dp_replicate"});
    EXPECT_EQ(hybrid.describe(),
              "mesh(dp_replicate=2, fsdp=4) of mesh(dp_replicate=2, dp_shard=2, cp=2)");
    EXPECT_EQ(hybrid.coordinate("fsdp"), rank % 4);
    EXPECT_EQ(&hybrid.group(), &world());
    EXPECT_EQ(&mesh.submesh({"dp_replicate", "fsdp"}), &hybrid) << "made once";
    EXPECT_TRUE(scope.records().empty()) << "flatten() made the groups";
  });
}

TEST(Mesh, AViewHasProductsForAxesAndItsGroupsAtOnce) {
  compared_ranks(8, [](int rank) {
    Mesh mesh(world(), {{"dp_shard", 2}, {"cp", 2}, {"tp", 2}});
    Mesh& view = mesh.view({{"fsdp", {"dp_shard", "cp"}}, {"tp"}});
    const CommTrace::Scope scope(world().trace());
    EXPECT_EQ(view.describe(), "mesh(fsdp=4, tp=2) of mesh(dp_shard=2, cp=2, tp=2)");
    EXPECT_EQ(&view.group("fsdp"), &mesh.group({"dp_shard", "cp"}));
    EXPECT_EQ(&view.group("tp"), &mesh.group("tp"));
    EXPECT_EQ(&view.group(), &world());
    EXPECT_EQ(view.coordinate("fsdp"), rank / 2);
    EXPECT_EQ(view.coordinate(), rank);
    EXPECT_EQ(&mesh.view({{"fsdp", {"cp", "dp_shard"}}, {"tp", {"tp"}}}), &view) << "made once";
    EXPECT_EQ(&view["fsdp"].group(), &view.group("fsdp"));
    // A view of a view, and a sub-mesh of one.
    Mesh& line = view.view({{"all", {"fsdp", "tp"}}});
    EXPECT_EQ(line.describe(), "mesh(all=8) of " + view.describe());
    EXPECT_EQ(&line.group("all"), &world());
    EXPECT_EQ(&joined(view["tp"], mesh["cp"]).group(), &mesh.group({"cp", "tp"}));
    EXPECT_GT(scope.records().size(), 0u) << "of the last one";
  });
}

TEST(Mesh, GroupsOfAViewAreMadeWithIt) {
  compared_ranks(8, [](int) {
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 2}});
    const auto calls = [&](auto&& body) {
      const CommTrace::Scope scope(world().trace());
      body();
      return scope.records().size();
    };
    Mesh* view = nullptr;
    EXPECT_GT(calls([&] {
                view = &mesh.view({{"r", {"dp_replicate"}}, {"dp_shard"}, {"tp"}});
              }),
              0u);
    EXPECT_EQ(
        calls([&] {
          for (const Names& names : {Names{"r", "tp"}, {"dp_shard", "tp"}, {"r", "dp_shard"}}) {
            view->group(names);
          }
          view->group();
        }),
        0u);
  });
}

TEST(Mesh, MeshesAreJoinedInTheOrderOfTheOneThatHoldsBoth) {
  compared_ranks(8, [](int) {
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 2}});
    Mesh& data = mesh.submesh({"dp_replicate", "dp_shard"});
    EXPECT_EQ(&joined(mesh["tp"], data), &mesh) << "all its axes";
    EXPECT_EQ(&joined(mesh["tp"], mesh["dp_shard"]), &joined(data["dp_shard"], mesh["tp"]));
    EXPECT_EQ(joined(mesh["tp"], mesh["dp_shard"]).describe(),
              "mesh(dp_shard=2, tp=2) of mesh(dp_replicate=2, dp_shard=2, tp=2)");
    EXPECT_EQ(message_of<ConfigError>([&] { joined(data, mesh["dp_shard"]); }),
              "Mesh: joined: " + data.describe() + " and " + mesh["dp_shard"].describe() +
                  " share 'dp_shard'; take sub-meshes of other axes");
    Mesh other(world(), {{"dp", 8}});
    EXPECT_EQ(message_of<ConfigError>([&] { joined(data, other); }),
              "Mesh: joined: " + data.describe() +
                  " and mesh(dp=8) are no axes of one mesh; take sub-meshes of one");
  });
}

TEST(Mesh, ViewsThatAreNoMeshOfTheSameRanksAreConfigErrors) {
  compared_ranks(8, [](int) {
    Mesh mesh(world(), {{"dp", 2}, {"cp", 2}, {"tp", 2}});
    EXPECT_THROW(mesh.view({}), ConfigError);
    EXPECT_EQ(
        message_of<ConfigError>([&] {
          mesh.view({{"x", {"dp", "tp"}}});
        }),
        "Mesh: view: between the axes of 'x' lies another one of mesh(dp=2, cp=2, tp=2); name "
        "that one too, or order the mesh otherwise");
    EXPECT_EQ(message_of<ConfigError>([&] {
                mesh.view({{"tp"}, {"dp"}});
              }),
              "Mesh: view: 'dp' begins before or within what was named before it; name the axes of "
              "mesh(dp=2, cp=2, tp=2) once and in their order");
    EXPECT_THROW(mesh.view({{"x", {"dp", "cp"}}, {"y", {"cp", "tp"}}}), ConfigError);
    EXPECT_THROW(mesh.view({{"x", {"dp"}}, {"x", {"tp"}}}), ConfigError);
    EXPECT_THROW(mesh.view({{"fsdp"}, {"tp"}}), ConfigError);
  });
}

TEST(Mesh, ProductsThatNoAxisCanBeAreConfigErrors) {
  compared_ranks(8, [](int) {
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}, {"cp", 2}});
    mesh.flatten({"dp_replicate", "dp_shard"}, "dp");
    EXPECT_EQ(message_of<ConfigError>([&] {
                mesh.flatten({"dp_replicate", "cp"}, "loss");
              }),
              "Mesh: flatten: between the axes of 'loss' lies another one of mesh(dp_replicate=2, "
              "dp_shard=2, cp=2); name that one too, or order the mesh otherwise");
    for (const char* name : {"", "dp", "cp"}) {
      EXPECT_EQ(message_of<ConfigError>([&] {
                  mesh.flatten({"dp_shard", "cp"}, name);
                }),
                "Mesh: flatten: '" + std::string(name) +
                    "' is no name for a product of mesh(dp_replicate=2, dp_shard=2, cp=2); give it "
                    "one that no axis has");
    }
    EXPECT_EQ(message_of<ConfigError>([&] {
                mesh.group({"dp", "dp_shard"});
              }),
              "Mesh: axis 'dp_shard' was named twice; name each axis of mesh(dp_replicate=2, "
              "dp_shard=2, cp=2) once");
  });
}

TEST(Mesh, NamesThatAreUnknownRepeatedOrMissingAreConfigErrors) {
  compared_ranks(4, [](int) {
    const Mesh mesh(world(), {{"dp", 2}, {"tp", 2}});
    EXPECT_EQ(message_of<ConfigError>([&] {
                mesh.group({"dp", "cp"});
              }),
              "Mesh: has no axis 'cp'; it is mesh(dp=2, tp=2)");
    EXPECT_EQ(message_of<ConfigError>([&] {
                mesh.size({"tp", "tp"});
              }),
              "Mesh: axis 'tp' was named twice; name each axis of mesh(dp=2, tp=2) once");
    EXPECT_EQ(message_of<ConfigError>([&] { mesh.submesh(Names{}); }),
              "Mesh: needs the name of an axis; got none for mesh(dp=2, tp=2)");
    EXPECT_THROW(mesh.coordinate({"pp"}), ConfigError);
    EXPECT_THROW(mesh["pp"], ConfigError);
  });
}

TEST(Mesh, SizesThatDoNotDivideTheRanksAreConfigErrors) {
  compared_ranks(4, [](int) {
    EXPECT_EQ(message_of<ConfigError>([] {
                Mesh(world(), {{"dp_replicate", 3}, {"dp_shard", -1}});
              }),
              "Mesh: the axes of mesh(dp_replicate=3, dp_shard=-1) beside 'dp_shard' make 3, which "
              "does not divide the group's 4 ranks; choose sizes whose product does");
    EXPECT_EQ(message_of<ConfigError>([] {
                Mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 3}});
              }),
              "Mesh: the axes mesh(dp_replicate=2, dp_shard=3) make 6 ranks, the group has 4; "
              "choose sizes whose product is the number of ranks");
  });
}

}  // namespace
}  // namespace tessera::distributed::test_mesh
