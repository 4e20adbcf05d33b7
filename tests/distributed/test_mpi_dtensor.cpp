// Meshes and DTensors over processes: the values, gradients and calls of rank threads.
// ctest ranks: 2 4
// ctest own program: MPI is begun for all of its tests
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/tensor_parallel/parallelize.h>
#include <tessera/optim/clip.h>

#include "distributed/dtensor_fixture.h"
#include "distributed/mpi_world.h"
#include "parallel/divided_training.h"

namespace tessera::distributed::test_mpi_dtensor {
namespace {

const Placement kOne[] = {Replicate(), Shard(0), Shard(1), Partial()};

TEST_F(MpiRanks, EveryPairOfOneAxisKeepsValuesAndGradients) {
  Mesh mesh(world());
  for (const int64_t length : {world_size() * 3 + 1, 1}) {
    for (const Placement& from : kOne) {
      for (const Placement& to : kOne) check_way(mesh, {length, 7}, {from}, {to});
    }
  }
}

TEST_F(MpiRanks, PairsOfTwoAxesAndProductsToo) {
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

TEST_F(MpiRanks, DistributedValuesAreThoseOfRank0) {
  Mesh mesh(world(), {{"a", 2}, {"b", -1}});
  const Tensor given = numbered({7, 3}, 100 * rank());
  for (const Placements& placements :
       {Placements{Replicate(), Shard(0)}, {Shard(0), Shard(0)}, {Shard(1), Replicate()}}) {
    expect_equal(full_tensor(distribute_tensor(given, mesh, placements)), numbered({7, 3}, 0),
                 describe(placements));
  }
}

TEST_F(MpiRanks, TheNormOfPartsIsThatOfTheWhole) {
  Mesh mesh(world(), {{"a", 2}, {"b", -1}});
  const Tensor whole = randn({37, 13}, {}, RandomStream{3, 1});
  const Tensor plain = zeros({37, 13}).set_requires_grad();
  plain.set_grad(whole.clone());
  const double expected = optim::clip_grad_norm({plain}, 0.5).item();
  for (const Placements& by :
       {Placements{Replicate(), Shard(0)}, {Shard(0), Replicate()}, {Shard(1), Shard(0)}}) {
    const Tensor w = distribute_tensor(zeros({37, 13}), mesh, by).set_requires_grad();
    w.set_grad(distribute_tensor(whole, mesh, by));
    EXPECT_EQ(optim::clip_grad_norm({w}, 0.5).item(), expected) << describe(by);
    expect_equal(full_tensor(w.grad()), plain.grad(), describe(by));
  }
}

[[maybe_unused]] const auto* const kWorld = testing::AddGlobalTestEnvironment(new MpiWorld);

// tp of 2 beside data ranks, over processes: what one process trains.
TEST_F(MpiRanks, ATensorParallelModelUnderFullyShardTrainsAsInOneProcess) {
  const int data_ranks = world_size() / 2;
  const auto train = [](const Training& training, int own, int all, double share) {
    const auto optimizer = adamw(training.model->named_parameters());
    std::vector<double> norms;
    for (int step = 0; step < 10; ++step) {
      for (int i = own; i < own + all; ++i) {
        (training.loss(batch_of(step * 4 + i)) * Scalar(share)).backward();
      }
      norms.push_back(optim::clip_grad_norm(training.model->parameters(), 0.5).item());
      optimizer->step();
      optimizer->zero_grad();
    }
    return std::pair(norms, wholes_of(*training.model, false));
  };
  const auto [norms, parameters] = train(gpt(), 0, data_ranks, 1.0 / data_ranks);
  Mesh mesh(world(), {{"dp_shard", -1}, {"tp", 2}});
  const Training training = gpt();
  parallelize_module(*training.model, mesh["tp"], {.sequence = true});
  fully_shard(*training.model, mesh["dp_shard"]);
  const auto [own_norms, own_parameters] = train(training, mesh.coordinate("dp_shard"), 1, 1);
  for (size_t i = 0; i < norms.size(); ++i) EXPECT_NEAR(own_norms[i], norms[i], 1e-11 * norms[i]);
  expect_close(own_parameters, parameters, 1e-11, "parameter");
}

}  // namespace
}  // namespace tessera::distributed::test_mpi_dtensor
