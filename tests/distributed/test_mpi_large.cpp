// Tensors of more than 2^31 elements over processes: a minute and 5 GB, so only on request. The
// suite proper sends small tensors in pieces instead (test_mpi_backend_pieces).
//     ctest -C slow -L slow
// ctest labels: slow
// ctest ranks: 2
// ctest own program: MPI is begun for all of its tests
#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/distributed/transport/collectives.h>

#include "distributed/mpi_world.h"

namespace tessera::distributed::test_mpi_large {
namespace {

[[maybe_unused]] const auto* const kWorld = testing::AddGlobalTestEnvironment(new MpiWorld);

constexpr int64_t kCount = (int64_t{1} << 31) + 12345;

class MpiLarge : public testing::Test {
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
  std::optional<CommTrace::Scope> calls;
};

// A byte that differs between neighbours, blocks and ranks.
uint8_t value_at(int64_t i, int rank) {
  return static_cast<uint8_t>((i * 31 + (i >> 20) * 7 + rank * 101) & 0x7f);
}

void fill(const Tensor& tensor, int rank) {
  auto* data = tensor.data_as<uint8_t>();
  for (int64_t i = 0; i < tensor.numel(); ++i) data[i] = value_at(i, rank);
}

TEST_F(MpiLarge, CountsOver2To31AreReducedAndBroadcast) {
  const Tensor x = raw::empty({kCount}, kU8);
  fill(x, group->rank());
  group->all_reduce(x, ReduceOp::kMax, {.timeout_seconds = 300}).wait();
  const auto* data = x.data_as<uint8_t>();
  for (int64_t i = 0; i < kCount; ++i) {
    uint8_t largest = 0;
    for (int r = 0; r < group->size(); ++r) largest = std::max(largest, value_at(i, r));
    ASSERT_EQ(data[i], largest) << "element " << i;
  }
  fill(x, group->rank() + 5);
  group->broadcast(x, 1, {.timeout_seconds = 300}).wait();
  for (int64_t i = 0; i < kCount; ++i) ASSERT_EQ(data[i], value_at(i, 6)) << "element " << i;
}

TEST_F(MpiLarge, APartOver2To31BytesTravelsAsOneAnswer) {
  const int other = 1 - group->rank();
  const Tensor x = raw::empty({kCount}, kU8);
  if (group->rank() == 0) {
    fill(x, 3);
    group->send(x, other, 9, {.channel = Channel::kPeer, .timeout_seconds = 300}).wait();
    return;
  }
  group->recv(x, other, 9, {.channel = Channel::kPeer, .timeout_seconds = 300}).wait();
  const auto* data = x.data_as<uint8_t>();
  for (int64_t i = 0; i < kCount; ++i) ASSERT_EQ(data[i], value_at(i, 3)) << "element " << i;
}

}  // namespace
}  // namespace tessera::distributed::test_mpi_large
