// Meshes and DTensors over processes: the values, gradients and calls of rank threads.
// ctest ranks: 2 4
#include <tessera/core/parallel.h>

#include "dtensor_fixture.h"
#include "mpi_world.h"

namespace tessera::distributed {
namespace {

class MpiDTensor : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!MpiWorld::backend()) return;
    RankContext& context = rank_context();
    context.rank = MpiWorld::backend()->rank();
    context.world_size = MpiWorld::backend()->size();
    context.timeouts = {30, 30};
    std::vector<int> ranks;
    for (int r = 0; r < context.world_size; ++r) ranks.push_back(r);
    context.world = std::make_shared<Group>("world", MpiWorld::backend(), ranks, context);
    set_num_threads(1);
  }
  static void TearDownTestSuite() { rank_context().world = nullptr; }
  void SetUp() override {
    TS_SKIP_WITHOUT_MPI();
    scope_ = std::make_unique<CommTrace::Scope>(*rank_context().trace);
  }
  void TearDown() override {
    if (scope_) check_equal_traces(*scope_);
  }

 private:
  std::unique_ptr<CommTrace::Scope> scope_;
};

const Placement kOne[] = {Replicate(), Shard(0), Shard(1), Partial()};

TEST_F(MpiDTensor, EveryPairOfOneAxisKeepsValuesAndGradients) {
  Mesh mesh(world());
  for (const int64_t length : {world_size() * 3 + 1, 1}) {
    for (const Placement& from : kOne) {
      for (const Placement& to : kOne) check_way(mesh, {length, 7}, {from}, {to});
    }
  }
}

TEST_F(MpiDTensor, PairsOfTwoAxesAndProductsToo) {
  Mesh mesh(world(), {{"a", 2}, {"b", -1}});
  for (const Placement& from : kOne) {
    for (const Placement& to : kOne) {
      check_way(mesh, {7, 5}, {from, Shard(0)}, {to, Partial()});
      check_way(mesh, {7, 5}, {Partial(), from}, {Shard(0), to});
    }
  }
  const Tensor sum = full({1}, rank());
  all_reduce(sum, ReduceOp::kSum, mesh.group({"b", "a"}));
  EXPECT_EQ(sum.item(), world_size() * (world_size() - 1) / 2);
}

TEST_F(MpiDTensor, DistributedValuesAreThoseOfRank0) {
  Mesh mesh(world(), {{"a", 2}, {"b", -1}});
  const Tensor given = numbered({7, 3}, 100 * rank());
  for (const Placements& placements :
       {Placements{Replicate(), Shard(0)}, {Shard(0), Shard(0)}, {Shard(1), Replicate()}}) {
    expect_equal(full_tensor(distribute_tensor(given, mesh, placements)), numbered({7, 3}, 0),
                 describe(placements));
  }
}

[[maybe_unused]] const auto* const kWorld = testing::AddGlobalTestEnvironment(new MpiWorld);

}  // namespace
}  // namespace tessera::distributed
