// Distributions against torch's: values and gradients; samples against what they are drawn from.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/distributions.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/random.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/core/state/state_dict.h>

#include "autograd/op_checks.h"
#include "golden_files.h"

namespace tessera::tests::test_golden_distributions {
namespace {

using namespace distributions;
using nlohmann::json;

template <class D>
Tensor common(const D& first, const D& second, const std::string& method, const Tensor& value) {
  if (method == "kl_divergence") return kl_divergence(first, second);
  if (method == "log_prob") return first.log_prob(value);
  TS_CHECK(method == "entropy", "golden", "no method '", method, "' here");
  return first.entropy();
}
template <class D>
Tensor with_moments(const D& first, const D& second, const std::string& method,
                    const Tensor& value) {
  if (method == "mean") return first.mean();
  if (method == "variance") return first.variance();
  return common(first, second, method, value);
}
template <class D>
Tensor with_cdf(const D& first, const D& second, const std::string& method, const Tensor& value) {
  return method == "cdf" ? first.cdf(value) : with_moments(first, second, method, value);
}

class GoldenDistributions : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, GoldenDistributions, testing::Values(kF64, kF32),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(GoldenDistributions, ValuesAndGradientsAreThoseOfTorch) {
  const DType dtype = GetParam();
  const SafeTensorsFile file(golden_path("distributions.safetensors"));
  const json cases = golden_json("distributions.json");
  EXPECT_EQ(cases.size(), 29u);
  for (const json& golden : cases) {
    const std::string name = golden["name"], kind = golden["distribution"];
    const std::string method = golden["method"];
    SCOPED_TRACE(name);
    NamedTensors leaves;
    const auto leaf = [&](const std::string& key) -> Tensor {
      if (!file.contains(name + "/" + key)) return {};
      const Tensor x = file.load(name + "/" + key);
      if (!is_floating(x.dtype())) return x;
      leaves.push_back({key, converted(x, dtype).set_requires_grad()});
      return leaves.back().tensor;
    };
    const Tensor p0 = leaf("p0"), p1 = leaf("p1"), value = leaf("value");
    const bool two = method == "kl_divergence";
    const Tensor q0 = two ? leaf("q0") : p0, q1 = two ? leaf("q1") : p1;
    const Of of = golden["of"] == "probs" ? Of::kProbs : Of::kLogits;
    Tensor y;
    if (kind == "Normal") {
      y = with_cdf(Normal(p0, p1), Normal(q0, q1), method, value);
    } else if (kind == "Uniform") {
      y = with_cdf(Uniform(p0, p1), Uniform(q0, q1), method, value);
    } else if (kind == "Bernoulli") {
      y = with_moments(Bernoulli(of, p0), Bernoulli(of, q0), method, value);
    } else {
      y = common(Categorical(of, p0), Categorical(of, q0), method, value);
    }
    // A dozen roundings of numbers up to about 10.
    const double bound = dtype == kF64 ? 1e-13 : 256 * 0x1p-24;
    const Tensor expected = file.load(name + "/y");
    ASSERT_EQ(y.shape(), expected.shape());
    EXPECT_EQ(difference(y, expected.to_vector(), bound), "");
    TensorList inputs;
    for (const auto& [key, tensor] : leaves) inputs.push_back(tensor);
    if (!y.requires_grad()) continue;
    const TensorList gradients =
        grad(y, inputs, converted(file.load(name + "/dy"), dtype), {.allow_unused = true});
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Tensor reference = file.load(name + "/grad." + leaves[i].name);
      const Tensor gradient =
          gradients[i].defined() ? gradients[i] : zeros_like(inputs[i]).detach();
      const double scale = std::max(1.0, largest(reference.to_vector()));
      EXPECT_EQ(difference(gradient, reference.to_vector(), bound * scale), "") << leaves[i].name;
    }
  }
}

double mean_of(const Tensor& x) { return x.to(kF64).mean().item(); }

TEST(Distributions, SamplesHaveTheMomentsOfTheirDistribution) {
  manual_seed(3);
  constexpr int64_t kCount = 40000;
  const double bound = 5 / std::sqrt(static_cast<double>(kCount));  // five standard errors
  const Normal normal(tensor({1.0, -2.0}), tensor({0.5, 3.0}));
  const Tensor drawn = normal.sample({kCount});
  EXPECT_EQ(drawn.shape(), (Shape{kCount, 2}));
  EXPECT_FALSE(drawn.requires_grad());
  EXPECT_NEAR(mean_of(drawn.select(1, 1)), -2, 3 * bound);
  EXPECT_NEAR(std(drawn.select(1, 0)).item(), 0.5, 0.5 * bound);
  const Uniform uniform(tensor({-1.0}), tensor({3.0}));
  const Tensor flat = uniform.sample({kCount});
  EXPECT_GE(flat.min().item(), -1);
  EXPECT_LT(flat.max().item(), 3);
  EXPECT_NEAR(mean_of(flat), 1, 4 * bound);
  const Bernoulli coin(Of::kProbs, tensor({0.0, 0.3, 1.0}));
  const Tensor flips = coin.sample({kCount});
  EXPECT_EQ(mean_of(flips.select(1, 0)), 0);
  EXPECT_NEAR(mean_of(flips.select(1, 1)), 0.3, bound);
  EXPECT_EQ(mean_of(flips.select(1, 2)), 1);
  const Categorical die(Of::kProbs, tensor({1.0, 0.0, 3.0, 0.5, 0.5, 0.0}).view({2, 3}));
  const Tensor faces = die.sample({100, 400});
  EXPECT_EQ(faces.shape(), (Shape{100, 400, 2}));
  EXPECT_EQ(faces.dtype(), kI64);
  EXPECT_NEAR(mean_of(faces.select(2, 0).eq(full({}, 2, {.dtype = kI64}))), 0.75, bound);
  EXPECT_NEAR(mean_of(faces.select(2, 1).eq(full({}, 1, {.dtype = kI64}))), 0.5, bound);
}

TEST(Distributions, TheSameSeedGivesTheSameSamples) {
  const Normal normal(zeros({3}), ones({3}));
  manual_seed(7);
  const auto first = normal.sample({2}).to_vector(), second = normal.sample({2}).to_vector();
  manual_seed(7);
  EXPECT_EQ(normal.sample({2}).to_vector(), first);
  EXPECT_NE(first, second);
}

TEST(Distributions, GradientsGoThroughReparametrisedSamples) {
  const Tensor loc = tensor({1.0, 2.0}).set_requires_grad();
  const Tensor scale = tensor({0.5, 4.0}).set_requires_grad();
  const Tensor drawn = Normal(loc, scale).rsample({5});
  const TensorList gradients = grad(drawn.sum(), {{loc, scale}});
  EXPECT_EQ(gradients[0].to_vector(), (std::vector<double>{5, 5}));
  const std::vector<double> noise = ((drawn - loc) / scale).sum({0}).to_vector();
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(gradients[1].to_vector()[i], noise[i], 64 * 0x1p-24 * 8);
  }
  const Tensor low = zeros({2}).set_requires_grad(), high = ones({2}).set_requires_grad();
  const Tensor flat = Uniform(low, high).rsample();
  const TensorList ends = grad(flat.sum(), {{low, high}});
  EXPECT_EQ(ends[1].to_vector(), flat.to_vector());
  EXPECT_FALSE(Normal(loc, scale).sample().requires_grad());
}

TEST(Distributions, RefuseParametersThatDoNotFit) {
  EXPECT_THROW(Normal(zeros({2}), ones({3})), ShapeError);
  EXPECT_THROW(Normal(zeros({2}), Tensor()), ValueError);
  EXPECT_THROW(Normal(zeros({2}), ones({2}, {.dtype = kF64})), DTypeError);
  EXPECT_THROW(Categorical(Of::kProbs, ones({})), ShapeError);
  EXPECT_THROW(Categorical(Of::kProbs, ones({3})).log_prob(ones({2})), DTypeError);
  EXPECT_THROW(Bernoulli(Of::kProbs, ones({3}, {.dtype = kI64})), DTypeError);
}

}  // namespace
}  // namespace tessera::tests::test_golden_distributions
