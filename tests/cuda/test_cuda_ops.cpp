// The table of ops on the device "cuda", emulated: values and gradients against the CPU's f64.
#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include <tessera/autograd/autograd.h>
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

TEST(CudaViews, MadeBeforeAWriteHaveTheirGradients) {
  for (const Device& device : {cuda(0), kCpu}) {
    const Tensor x = tensor({1, 2, 3}).to(device).set_requires_grad();
    const Tensor base = mul(x, x), rows = expand(base, {2, 3}), part = narrow(base, 0, 1, 2);
    neg_(base);
    const Tensor loss = add(sum(mul(rows, rows)), sum(part));
    const Tensor first = grad(loss, TensorList{x}, {}, {.create_graph = true})[0];
    // 2 x^4 - x for the last two: 8 x^3 - 2 x, 24 x^2 - 2.
    EXPECT_EQ(first.to_vector(), (std::vector<double>{8, 60, 210}));
    EXPECT_EQ(grad(sum(first), TensorList{x})[0].to_vector(), (std::vector<double>{24, 94, 214}));
  }
}

TEST(CudaPrint, AStreamGetsTheValuesAndTheDevice) {
  std::ostringstream out;
  out << tensor({1, 2.5}).to(cuda(0));
  EXPECT_EQ(out.str(), "tensor([1.0000, 2.5000], device='cuda:0')");
}

TEST(CudaDevice, IsTheEmulation) {
  EXPECT_EQ(gpu::backend_kind(), gpu::BackendKind::kEmulated);
  EXPECT_EQ(gpu::device_count(), 2);
}

}  // namespace
}  // namespace tessera::tests
