// Linears in fp8 beside torchao's emulation, of golden/float8_cases.py.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/fp8/quantize.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/precision/fp8_linear.h>

#include "source_dir.h"

namespace tessera::precision::test_golden_fp8 {
namespace {

class Fp8Golden : public testing::TestWithParam<const char*> {
 protected:
  Tensor value(const std::string& name) const {
    return file_.load(std::string(GetParam()) + "/" + name);
  }
  bool has(const std::string& name) const {
    return file_.contains(std::string(GetParam()) + "/" + name);
  }
  Fp8Recipe recipe() const {
    const std::string name = GetParam();
    return Fp8Recipe::named(name.substr(0, name.find('.')));
  }

 private:
  SafeTensorsFile file_{std::string(tests::source_dir()) + "/tests/golden/float8.safetensors"};
};

TEST_P(Fp8Golden, BytesAndScalesAreEqual) {
  const Fp8Casts casts = recipe().casts();
  const auto expect_equal = [&](const char* operand, const Tensor& source,
                                const kernels::QuantizeOptions& options) {
    const kernels::Quantized q = kernels::quantize(source, options);
    const auto* const bytes = static_cast<const uint8_t*>(q.values.data());
    const Tensor expected = value(std::string(operand) + ".bytes");
    ASSERT_EQ(expected.numel(), q.values.numel());
    const uint8_t* const golden = expected.data_as<uint8_t>();
    int64_t wrong = 0;
    for (int64_t i = 0; i < expected.numel(); ++i) wrong += bytes[i] != golden[i];
    EXPECT_EQ(wrong, 0) << operand;
    EXPECT_EQ(q.scale.to_vector(), value(std::string(operand) + ".scale").to_vector()) << operand;
  };
  expect_equal("input", value("x"), casts.input);
  expect_equal("weight", value("weight"), casts.weight);
  expect_equal("grad_output", value("dy"), casts.grad_output);
  expect_equal("weight_of_grad", value("weight"), casts.weight_of_grad);
  EXPECT_EQ(casts.input_of_weight.has_value(), has("input_of_weight.bytes"));
  if (!casts.input_of_weight) return;
  expect_equal("input_of_weight", value("x"), *casts.input_of_weight);
  expect_equal("grad_output_of_weight", value("dy"), *casts.grad_output_of_weight);
}

// torchao multiplies numbers that were scaled back and rounded to f32 before, here the sum is
// scaled: they differ by rounding, which a 16-bit result shows as neighbours now and then.
TEST_P(Fp8Golden, ResultsAreEqualUpToRounding) {
  const Tensor x = value("x").set_requires_grad(), weight = value("weight").set_requires_grad();
  const Tensor bias = value("bias").set_requires_grad(), dy = value("dy");
  const Tensor y = precision::fp8_linear(x, weight, bias, recipe());
  const TensorList inputs = {x, weight, bias};
  const TensorList grads = grad(TensorList{y}, inputs, TensorList{dy});
  const auto expect_near = [&](const char* name, const Tensor& got) {
    const Tensor expected = value(name);
    EXPECT_EQ(got.dtype(), expected.dtype()) << name;
    const std::vector<double> a = got.to_vector(), b = expected.to_vector();
    double error = 0, all = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      error += (a[i] - b[i]) * (a[i] - b[i]);
      all += b[i] * b[i];
    }
    // One in some hundred elements a neighbour apart, in the norm.
    const double tolerance = x.dtype() == kF32 ? 1e-6 : epsilon_of(kBF16) / 4;
    EXPECT_LE(std::sqrt(error / all), tolerance) << name;
  };
  expect_near("y", y);
  expect_near("grad.x", grads[0]);
  expect_near("grad.weight", grads[1]);
  expect_near("grad.bias", grads[2]);
}

INSTANTIATE_TEST_SUITE_P(Recipes, Fp8Golden,
                         testing::Values("tensorwise.f32", "tensorwise.bf16", "rowwise.f32",
                                         "rowwise.bf16", "rowwise_with_gw_hp.f32",
                                         "rowwise_with_gw_hp.bf16"),
                         [](const auto& info) {
                           std::string name = info.param;
                           name[name.find('.')] = '_';
                           return name;
                         });

}  // namespace
}  // namespace tessera::precision::test_golden_fp8
