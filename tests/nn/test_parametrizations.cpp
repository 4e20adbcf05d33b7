// Weight and spectral norms as parametrizations: names, values, modes, copies. Values of torch are
// in test_golden_modules.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/nn/activation.h>
#include <tessera/nn/container.h>
#include <tessera/nn/conv.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/parametrizations.h>
#include <tessera/nn/recurrent/recurrent.h>

namespace tessera::nn::test_parametrizations {
namespace {

Tensor random(const Shape& shape, uint64_t stream = 0) {
  return randn(shape, {}, RandomStream{12, stream});
}
double largest_difference(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.shape(), b.shape());
  return (a - b).abs().max().item();
}
std::vector<std::string> names_of(const StateDict& state) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state) names.push_back(name);
  return names;
}

TEST(Parametrizations, HaveTorchsNamesAndTheValueFromBefore) {
  Conv2d conv(3, 4, 2);
  const Tensor before = conv.weight.clone(), x = random({1, 3, 4, 4});
  const Tensor expected = conv(x);
  weight_norm(conv);
  EXPECT_EQ(names_of(conv.state_dict()),
            (std::vector<std::string>{"bias", "parametrizations.weight.original0",
                                      "parametrizations.weight.original1"}));
  EXPECT_EQ(conv.get_parameter("parametrizations.weight.original0").shape(), (Shape{4, 1, 1, 1}));
  EXPECT_FALSE(conv.weight.defined());
  EXPECT_TRUE(is_parametrized(conv));
  EXPECT_LT(largest_difference(parametrized(conv), before), 1e-6);
  EXPECT_LT(largest_difference(conv(x), expected), 1e-6);
  EXPECT_FALSE(conv.weight.defined()) << "the call has taken it away again";
  EXPECT_EQ(conv.num_parameters(), 4 + 4 + 48);
  remove_parametrizations(conv);
  EXPECT_FALSE(is_parametrized(conv));
  EXPECT_EQ(names_of(conv.state_dict()), (std::vector<std::string>{"weight", "bias"}));
  EXPECT_TRUE(conv.weight.is_leaf() && conv.weight.requires_grad());
  EXPECT_LT(largest_difference(conv(x), expected), 1e-6);
}

TEST(Parametrizations, TheSpectralNormIsTheLargestSingularValue) {
  Linear linear(6, 4, {.bias = false});
  spectral_norm(linear, "weight", {.n_power_iterations = 60});
  EXPECT_EQ(
      names_of(linear.state_dict()),
      (std::vector<std::string>{"parametrizations.weight.original", "parametrizations.weight.0._u",
                                "parametrizations.weight.0._v"}));
  linear(random({2, 6}));
  const Tensor weight = parametrized(linear).detach();
  // The largest of |W x| / |x|, by many steps along W^T W.
  Tensor x = random({6}, 4);
  for (int i = 0; i < 200; ++i) x = normalize(matmul(weight.t(), matmul(weight, x)), 2, 0);
  EXPECT_NEAR(norm(matmul(weight, x)).item(), 1, 1e-4);
}

TEST(Parametrizations, VectorsMoveInTrainingCallsAlone) {
  Linear linear(6, 4);
  spectral_norm(linear);
  const auto u = [&] { return linear.state_dict().at("parametrizations.weight.0._u").to_vector(); };
  {
    const NoGradGuard no_grad;  // another matrix: u and v are not its vectors yet
    linear.get_parameter("parametrizations.weight.original").copy_(random({4, 6}, 5));
  }
  const auto before = u();
  linear.eval();
  linear(random({2, 6}));
  parametrized(linear);
  EXPECT_EQ(u(), before);
  linear.train();
  linear(random({2, 6}));
  EXPECT_NE(u(), before);
}

TEST(Parametrizations, SeveralOfAModuleAreTrainedCopiedAndTakenAwayAlone) {
  GRU gru(3, 4);
  weight_norm(gru, "weight_ih_l0");
  spectral_norm(gru, "weight_hh_l0");
  gru.eval();
  const Tensor x = random({5, 2, 3});
  const Tensor output = gru(x).output;
  output.sum().backward();
  for (const auto& [name, parameter] : gru.named_parameters()) {
    EXPECT_TRUE(parameter.grad().defined()) << name;
  }
  const auto copy = gru.clone();
  EXPECT_EQ(largest_difference((*copy)(x).output, output), 0);
  EXPECT_TRUE(is_parametrized(*copy, "weight_hh_l0"));
  {
    const NoGradGuard no_grad;
    gru.get_parameter("parametrizations.weight_ih_l0.original0").mul_(2);
  }
  EXPECT_EQ(largest_difference((*copy)(x).output, output), 0) << "copies have their own tensors";
  EXPECT_GT(largest_difference(gru(x).output, output), 1e-3);
  remove_parametrizations(*copy, "weight_ih_l0");
  EXPECT_FALSE(is_parametrized(*copy, "weight_ih_l0"));
  EXPECT_TRUE(is_parametrized(*copy, "weight_hh_l0"));
  EXPECT_LT(largest_difference((*copy)(x).output, output), 1e-6);
}

TEST(Parametrizations, WorkInASequentialUnderCheckpointedCalls) {
  const auto gradients = [](bool checkpointed) {
    Sequential net(layer<Linear>(4, 4), layer<Tanh>(), layer<Linear>(4, 2));
    spectral_norm(net.child(0));
    weight_norm(net.child(2));
    {
      const NoGradGuard no_grad;  // u and v are still on their way: one more step would show
      net.get_parameter("0.parametrizations.weight.original").copy_(random({4, 4}, 6));
    }
    HookHandle handle;
    if (checkpointed) handle = net.checkpoint_calls();
    square(net(random({3, 4}))).sum().backward();
    std::vector<std::vector<double>> all;
    for (const Tensor& parameter : net.parameters()) all.push_back(parameter.grad().to_vector());
    return all;
  };
  EXPECT_EQ(gradients(true), gradients(false));
}

TEST(Parametrizations, RefuseWhatIsNoParameter) {
  Linear linear(3, 2, {.bias = false});
  EXPECT_THROW(weight_norm(linear, "wieght"), ValueError);
  EXPECT_THROW(weight_norm(linear, "bias"), ValueError);
  EXPECT_THROW(parametrized(linear), ValueError);
  EXPECT_THROW(remove_parametrizations(linear), ValueError);
  weight_norm(linear);
  EXPECT_THROW(spectral_norm(linear), ValueError);
  const ParameterDefaultsGuard without_memory({.device = kMeta});
  Linear meta(3, 2);
  EXPECT_THROW(weight_norm(meta), ValueError);
}

}  // namespace
}  // namespace tessera::nn::test_parametrizations
