// The table of ops on the device "cuda", emulated: values and gradients against the CPU's f64.
#include <gtest/gtest.h>

#include <string>

#include <tessera/core/cuda/backend.h>

#include "op_checks.h"
#include "op_samples.h"

namespace tessera::tests {
namespace {

class CudaOps : public testing::TestWithParam<std::string_view> {};

TEST_P(CudaOps, GiveTheValuesAndGradientsOfTheCpu) {
  const OpRow& row = *find_op_row(GetParam());
  for (const Sample& sample : row.samples) {
    for (const std::string& complaint : check_forward_on(row, sample, cuda(0))) {
      ADD_FAILURE() << complaint;
    }
  }
}

std::vector<std::string_view> names() {
  std::vector<std::string_view> result;
  for (const OpRow& row : op_rows()) result.push_back(row.name);
  return result;
}

INSTANTIATE_TEST_SUITE_P(Table, CudaOps, testing::ValuesIn(names()), [](const auto& info) {
  std::string name(info.param);
  for (char& c : name) {
    if (c == '.') c = '_';
  }
  return name;
});

TEST(CudaDevice, IsTheEmulation) {
  EXPECT_EQ(gpu::backend_kind(), gpu::BackendKind::kEmulated);
  EXPECT_EQ(gpu::device_count(), 2);
}

}  // namespace
}  // namespace tessera::tests
