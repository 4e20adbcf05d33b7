// The world backend of a test program that runs under mpirun. MPI starts once in a process, so the
// program's tests share it; under plain ctest they skip and say so.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <tessera/core/parallel.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/distributed/transport/rank_context.h>

namespace tessera::distributed {

// Messages and chunks of a few hundred bytes, where the environment asks for them: then small
// tensors travel in as many pieces as tensors of many GiB otherwise do. Native reductions are MPI's
// own, however few the ranks.
inline BackendOptions mpi_test_options() {
  BackendOptions options;
  options.timeout_seconds = 60;
  options.exchange_ranks = 1;
  if (const char* limit = std::getenv("TESSERA_TEST_MESSAGE_LIMIT")) {
    options.message_limit = std::atoll(limit);
    options.chunk_bytes = 3 * options.message_limit;
  }
  return options;
}

class MpiWorld : public testing::Environment {
 public:
  static std::shared_ptr<Backend>& backend() {
    static std::shared_ptr<Backend> backend;
    return backend;
  }
  void SetUp() override {
    if (std::getenv("TESSERA_TEST_MPI")) backend() = make_mpi_backend(mpi_test_options());
  }
  void TearDown() override {
    if (!backend()) return;
    EXPECT_EQ(backend()->shutdown(std::chrono::seconds(20)), "");
    backend().reset();
  }
};

#define TS_SKIP_WITHOUT_MPI()                                                 \
  if (!::tessera::distributed::MpiWorld::backend()) {                         \
    GTEST_SKIP() << "several processes are needed; ctest -L mpi starts them"; \
  }

// The process's own world group; its context is the main thread's.
class MpiRanks : public testing::Test {
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
  // As every distributed test: all ranks have called the same.
  void TearDown() override {
    if (scope_) check_equal_traces(*scope_);
  }

 private:
  std::unique_ptr<CommTrace::Scope> scope_;
};

}  // namespace tessera::distributed
