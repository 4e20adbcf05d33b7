// Collectives among rank threads: values, bits, order, mistakes, deadlines.
// ctest labels: threads
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory.h>
#include <tessera/distributed/collectives.h>
#include <tessera/distributed/run_ranks.h>

namespace tessera::distributed {
namespace {

// run_ranks with the end that every distributed test has: all ranks called the same.
void on_ranks(int size, const std::function<void(int rank)>& body,
              const RunRanksOptions& options = {}) {
  run_ranks(
      size,
      [&](int rank) {
        const CommTrace::Scope scope(world().trace());
        body(rank);
        check_equal_traces(scope);
      },
      options);
}

// Small whole numbers: every sum of eight is exact in every dtype of the sweep.
Tensor numbers(int rank, const Shape& shape, DType dtype) {
  Tensor x = remainder(arange(numel_of(shape)).to(kF32) * (rank + 2), 5) + rank;
  return to(reshape(x, shape), dtype);
}

class Dtypes : public testing::TestWithParam<DType> {};

TEST_P(Dtypes, AllReduceSumsWhatRanksGive) {
  for (const int size : {2, 4, 8}) {
    for (const int64_t count : {1, 3, 8, 1000, 4099}) {
      on_ranks(size, [&](int rank) {
        const Tensor x = numbers(rank, {count}, GetParam());
        all_reduce(x);
        Tensor expected = zeros({count});
        for (int r = 0; r < size; ++r)
          expected = expected + to(numbers(r, {count}, GetParam()), kF32);
        EXPECT_EQ(x.to_vector(), to(expected, GetParam()).to_vector());
      });
    }
  }
}
INSTANTIATE_TEST_SUITE_P(All, Dtypes, testing::Values(kF64, kF32, kF16, kBF16, kI64, kI32, kU8),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace tessera::distributed
