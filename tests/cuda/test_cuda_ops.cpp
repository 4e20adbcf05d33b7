// The table of ops on the device "cuda", emulated: values and gradients against the CPU's f64.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include <tessera/core/cuda/backend.h>
#include <tessera/core/error.h>

#include "op_checks.h"
#include "op_samples.h"

namespace tessera::tests {
namespace {

// Ops whose kernels a GPU does not have yet; calling one is an UnsupportedError. An op that gains
// its kernels must leave this list.
const std::set<std::string_view> kMissing = {"cross_entropy_inplace"};

bool is_refusal(const std::string& complaint) {
  return complaint.find("has no kernel for cuda:0") != std::string::npos;
}

class CudaOps : public testing::TestWithParam<std::string_view> {};

TEST_P(CudaOps, GiveTheValuesAndGradientsOfTheCpu) {
  const OpRow& row = *find_op_row(GetParam());
  Complaints wrong, refused;
  for (const Sample& sample : row.samples) {
    for (const std::string& complaint : check_forward_on(row, sample, cuda(0))) {
      (is_refusal(complaint) ? refused : wrong).push_back(complaint);
    }
  }
  for (const std::string& complaint : wrong) ADD_FAILURE() << complaint;
  if (kMissing.contains(row.name)) {
    EXPECT_FALSE(refused.empty()) << row.name << " has its kernels now: take it off the list";
    if (!refused.empty()) GTEST_SKIP() << refused.front();
  }
  for (const std::string& complaint : refused) ADD_FAILURE() << complaint;
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
