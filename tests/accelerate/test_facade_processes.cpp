// Loaders, metrics and nested collectives over processes: what rank threads do, over MPI.
// ctest ranks: 2 4
// ctest own program: MPI is begun for all of its tests
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>

#include <tessera/accelerate/loaders/loader_plan.h>
#include <tessera/accelerate/metrics.h>
#include <tessera/accelerate/process/operations.h>
#include <tessera/core/factory/factory.h>

#include "accelerate/loader_fixture.h"
#include "distributed/mpi_world.h"

namespace tessera::accelerate::test_facade_processes {
namespace {

using distributed::Group;
using distributed::MpiWorld;
[[maybe_unused]] const auto* const kWorld = testing::AddGlobalTestEnvironment(new MpiWorld);

class FacadeProcesses : public testing::Test {
 protected:
  void SetUp() override {
    TS_SKIP_WITHOUT_MPI();
    std::vector<int> ranks;
    for (int r = 0; r < MpiWorld::backend()->size(); ++r) ranks.push_back(r);
    group = std::make_shared<Group>("world", MpiWorld::backend(), ranks);
    calls.emplace(group->trace());
  }
  void TearDown() override {
    if (calls) check_equal_traces(*calls, *group);
  }
  std::shared_ptr<Group> group;
  std::optional<distributed::CommTrace::Scope> calls;
};

TEST_F(FacadeProcesses, DDL_8_TheRanksHaveEverySampleOnce) {
  for (const bool split : {false, true}) {
    for (const bool dispatch : {false, true}) {
      for (const int64_t size : {1, 22, 36}) {
        LoaderPlan plan(*group, {.split_batches = split, .dispatch_batches = dispatch});
        DataLoader indexed(std::make_shared<Numbers>(size),
                           {.batch_size = 8, .shuffle = true, .workers = 1});
        StreamLoader<int64_t> stream(std::make_shared<NumberStream>(size), {.batch_size = 8});
        plan.prepare(indexed), plan.prepare(stream);
        const auto expect_all = [&](auto& loader) {
          Indices all;
          std::vector<std::string> names;
          for (Tensor& batch : loader) {
            std::vector<std::string> own;
            for (const int64_t i : values_of(batch)) own.push_back(std::to_string(i));
            const auto [turn, text] =
                gather_for_metrics(std::pair(batch, own), plan.active(), *group);
            for (const int64_t i : values_of(turn)) all.push_back(i);
            names.insert(names.end(), text.begin(), text.end());
          }
          ASSERT_EQ(names.size(), all.size());
          for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(names[i], std::to_string(all[i]));
          std::ranges::sort(all);
          Indices expected(static_cast<size_t>(size));
          std::iota(expected.begin(), expected.end(), 0);
          EXPECT_EQ(all, expected);
        };
        expect_all(indexed), expect_all(stream);
      }
    }
  }
}

TEST_F(FacadeProcesses, OPS_5_7_8_SizesAndShapesAreCompared) {
  const int rank = group->rank();
  const Tensor own = raw::full({rank + 1, 2}, rank, kF32);
  EXPECT_EQ(gather(pad_across_processes(own, {}, *group), *group).size(0),
            group->size() * group->size());
  EXPECT_THROW(
      gather(raw::zeros(rank == 0 ? Shape{2, 3} : Shape{3, 2}, kF32), *group, {.debug = true}),
      OperationMismatch);
  const Tensor copy = copy_from_owner(rank == 1 ? own : Tensor(), *group);
  EXPECT_EQ(copy.shape(), Shape({2, 2}));
  EXPECT_EQ(reduce(own.sum(), RankReduction::kMax, *group).item(),
            2.0 * (group->size() - 1) * group->size());
}

}  // namespace
}  // namespace tessera::accelerate::test_facade_processes
