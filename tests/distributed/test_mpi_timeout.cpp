// A rank that does not come: the others raise in time, name it, and the process can end. MPI has
// requests open then and is not finalized, about which mpirun complains: the test's verdict is what
// the ranks print, not its exit code.
// ctest ranks: 2
// ctest own program: its ranks leave MPI as it is
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/distributed/transport/group.h>

#include "distributed/mpi_world.h"

namespace tessera::distributed::test_mpi_timeout {
namespace {

TEST(MpiTimeout, ACE1_ARankThatDoesNotComeIsNamedAndTheGroupBreaks) {
  if (!std::getenv("TESSERA_TEST_MPI")) GTEST_SKIP() << "ctest -L mpi2 starts several processes";
  std::shared_ptr<Backend> backend = make_mpi_backend(mpi_test_options());
  const auto group = std::make_shared<Group>("world", backend, std::vector<int>{0, 1});
  const Tensor x = ones({100});
  group->all_reduce(x).wait();
  if (backend->rank() == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(2));  // in code that has gone astray
    EXPECT_NE(backend->shutdown(std::chrono::milliseconds(100)), "");
    return;
  }
  const auto begin = std::chrono::steady_clock::now();
  const Work work = group->all_reduce(x, ReduceOp::kSum, {.timeout_seconds = 0.3});
  try {
    work.wait();
    ADD_FAILURE() << "rank 1 did not take part";
  } catch (const DistributedError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("all_reduce #2"), text.npos) << text;
    EXPECT_NE(text.find("rank 1 is at #1 (all_reduce"), text.npos) << text;
  }
  EXPECT_THROW(group->all_reduce(ones({1})).wait(), DistributedError);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20)) << "hung";
  const std::string report = backend->shutdown(std::chrono::seconds(5));
  EXPECT_NE(report.find("MPI is not finalized"), report.npos) << report;
}

}  // namespace
}  // namespace tessera::distributed::test_mpi_timeout
