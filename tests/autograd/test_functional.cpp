// Derivatives of functions against torch.autograd.functional and against each other; calls of
// modules with other parameters.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/functional.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/nn/activation.h>
#include <tessera/nn/container.h>
#include <tessera/nn/functional_call.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>

#include "golden_files.h"
#include "message_of.h"

namespace tessera::tests::test_functional {
namespace {

using functional::Product;
using functional::Products;

// The functions of tests/golden/transform_cases.py.
TensorList lists(const TensorList& x) {
  return {exp(x[0] * x[1]), (x[0] * x[0]).sum({1}) * x[1].sum()};
}
Tensor scalar(const TensorList& x) {
  return exp(x[0] * x[1]).sum() + pow(tanh(x[0]), 3).sum() * x[1].select(0, 0);
}

class Functional : public testing::Test {
 protected:
  Functional() : file(golden_path("functional.safetensors")) {}
  Tensor load(const std::string& name) const { return file.load(name); }
  TensorList inputs() const { return {load("a"), load("b")}; }
  TensorList direction() const { return {load("v.a"), load("v.b")}; }
  void expect_same(const Tensor& got, const std::string& name) const {
    const Tensor reference = load(name);
    ASSERT_EQ(got.shape(), reference.shape()) << name;
    EXPECT_FALSE(got.requires_grad()) << name;
    const std::vector<double> values = got.to_vector(), expected = reference.to_vector();
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_NEAR(values[i], expected[i], 1e-13 * std::max(1.0, std::abs(expected[i]))) << name;
    }
  }
  void expect_same(const Products& got, const std::string& name) const {
    for (size_t i = 0; i < got.outputs.size(); ++i) {
      expect_same(got.outputs[i], name + ".y" + std::to_string(i));
    }
    for (size_t i = 0; i < got.products.size(); ++i) {
      expect_same(got.products[i], name + ".p" + std::to_string(i));
    }
  }
  SafeTensorsFile file;
};

TEST_F(Functional, ProductsAreThoseOfTorch) {
  expect_same(functional::vjp(lists, inputs(), {load("v.0"), load("v.1")}), "vjp");
  expect_same(functional::jvp(lists, inputs(), direction()), "jvp");
  expect_same(functional::hvp(scalar, inputs(), direction()), "hvp");
  expect_same(functional::vhp(scalar, inputs(), direction()), "vhp");
}

TEST_F(Functional, MatricesAreThoseOfTorch) {
  const auto jacobian = functional::jacobian(lists, inputs());
  const auto hessian = functional::hessian(scalar, inputs());
  for (size_t o = 0; o < 2; ++o) {
    for (size_t i = 0; i < 2; ++i) {
      const std::string which = std::to_string(o) + std::to_string(i);
      expect_same(jacobian[o][i], "jacobian." + which);
      expect_same(hessian[o][i], "hessian." + which);
    }
  }
}

TEST(FunctionalOfOneTensor, GivesTensors) {
  const auto cube = [](const Tensor& x) { return x * x * x; };
  const auto energy = [](const Tensor& x) { return (x * x * x).sum(); };
  const Tensor x = tensor({1.0, -2.0}), v = tensor({3.0, 5.0});
  EXPECT_EQ(functional::jacobian(cube, x).to_vector(), (std::vector<double>{3, 0, 0, 12}));
  EXPECT_EQ(functional::hessian(energy, x).to_vector(), (std::vector<double>{6, 0, 0, -12}));
  EXPECT_EQ(functional::jvp(cube, x, v).product.to_vector(), (std::vector<double>{9, 60}));
  EXPECT_EQ(functional::vjp(cube, x, v).product.to_vector(), (std::vector<double>{9, 60}));
  EXPECT_EQ(functional::vjp(energy, x).product.to_vector(), (std::vector<double>{3, 12}));
  const Product curvature = functional::hvp(energy, x, v);
  EXPECT_EQ(curvature.output.item(), -7);
  EXPECT_EQ(curvature.product.to_vector(), (std::vector<double>{18, -60}));
  EXPECT_EQ(functional::vhp(energy, x, v).product.to_vector(), (std::vector<double>{18, -60}));
}

TEST(FunctionalOfOneTensor, IndependenceIsZerosOrAnErrorWithStrict) {
  const Tensor x = tensor({1.0, 2.0}), v = ones({2});
  const auto constant = [](const Tensor&) { return tensor({4.0}); };
  const auto line = [](const Tensor& x) { return (2.0 * x).sum(); };
  EXPECT_EQ(functional::jacobian(constant, x).to_vector(), (std::vector<double>{0, 0}));
  EXPECT_EQ(functional::jvp(constant, x, v).product.to_vector(), (std::vector<double>{0}));
  EXPECT_EQ(functional::hessian(line, x).to_vector(), (std::vector<double>(4, 0)));
  EXPECT_THROW(functional::jacobian(constant, x, {.strict = true}), AutogradError);
  EXPECT_THROW(functional::hessian(line, x, {.strict = true}), AutogradError);
}

TEST(FunctionalOfOneTensor, LeavesInputsAndModesAlone) {
  const Tensor x = tensor({1.0, 2.0}).set_requires_grad();
  const NoGradGuard no_grad;
  const Tensor product = functional::vjp([](const Tensor& x) { return square(x); }, x, x).product;
  EXPECT_EQ(product.to_vector(), (std::vector<double>{2, 8}));
  EXPECT_FALSE(product.requires_grad());
  EXPECT_FALSE(x.grad().defined());
  EXPECT_FALSE(grad_enabled());
}

TEST(FunctionalOfOneTensor, WithCreateGraphResultsAreDifferentiated) {
  const auto cube = [](const Tensor& x) { return x * x * x; };
  const auto energy = [](const Tensor& x) { return exp(x * 0.5).sum(); };
  const Tensor v = tensor({0.5, -1.0}, kF64);
  const auto check = [&](const auto& derivative) {
    const GradcheckResult result =
        gradcheck([&](const TensorList& x) { return TensorList{derivative(x[0])}; },
                  {tensor({0.3, -0.7}, kF64).set_requires_grad()});
    EXPECT_TRUE(result.ok) << result.message;
  };
  const functional::FunctionalOptions graph{.create_graph = true};
  check([&](const Tensor& x) { return functional::jacobian(cube, x, graph); });
  check([&](const Tensor& x) { return functional::jvp(cube, x, v, graph).product; });
  check([&](const Tensor& x) { return functional::vjp(cube, x, v, graph).product; });
  check([&](const Tensor& x) { return functional::hessian(energy, x, graph); });
  check([&](const Tensor& x) { return functional::hvp(energy, x, v, graph).product; });
}

TEST(FunctionalOfOneTensor, RefusesWhatHasNoDerivative) {
  const Tensor x = tensor({1.0, 2.0});
  const auto same = [](const Tensor& x) { return x; };
  EXPECT_THROW(functional::vjp(same, x), ValueError) << "v is missing";
  EXPECT_THROW(functional::jvp(same, x, ones({3})), ShapeError);
  EXPECT_THROW(functional::hessian(same, x), ShapeError);
  EXPECT_THROW(functional::jacobian(same, tensor({1, 2}, kI64)), DTypeError);
  EXPECT_THROW(functional::jacobian([](const Tensor& x) { return argmax(x); }, x), DTypeError);
}

// ---- functional_call ---------------------------------------------------------------------------

struct Net : nn::Module<Net> {
  Net()
      : first(add<nn::Linear>("first", 3, 4)),
        norm(add<nn::BatchNorm1d>("norm", 4)),
        second(add<nn::Linear>("second", 4, 2)) {}
  Tensor forward(const Tensor& x) { return second(tanh(norm(first(x)))); }
  nn::Linear& first;
  nn::BatchNorm1d& norm;
  nn::Linear& second;
};

Tensor input() { return randn({5, 3}, {}, RandomStream{5, 1}); }

TEST(FunctionalCall, IsTheCallOfAModuleThatHasTheseParameters) {
  Net net, other;
  for (const Tensor& parameter : other.parameters()) {
    const NoGradGuard no_grad;
    parameter.mul_(0.5);
  }
  net.eval(), other.eval();
  const Tensor x = input(), before = net(x);
  const TensorList own = net.parameters();
  EXPECT_EQ(nn::functional_call(net, other.named_parameters(), x).to_vector(),
            other(x).to_vector());
  EXPECT_EQ(nn::functional_call(net, other.state_dict(), x).to_vector(), other(x).to_vector());
  EXPECT_EQ(nn::functional_call(net, NamedTensors{}, x).to_vector(), before.to_vector());
  EXPECT_EQ(net(x).to_vector(), before.to_vector());
  for (size_t i = 0; i < own.size(); ++i) EXPECT_TRUE(net.parameters()[i].is(own[i]));
}

TEST(FunctionalCall, GradientsGoToTheGivenTensors) {
  Net net;
  NamedTensors given = net.named_parameters();
  const Tensor factor = full({}, 2).set_requires_grad();
  for (auto& [name, tensor] : given) tensor = tensor.detach() * factor;
  nn::functional_call(net, given, input()).sum().backward();
  EXPECT_TRUE(factor.grad().defined());
  for (const Tensor& parameter : net.parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(FunctionalCall, BuffersAreGivenAndWrittenTo) {
  Net net;
  StateDict given;
  given.set("norm.running_mean", zeros({4}));
  nn::functional_call(net, given, input());
  EXPECT_NE(given.at("norm.running_mean").to_vector(), std::vector<double>(4, 0));
  EXPECT_EQ(net.norm.running_mean.to_vector(), std::vector<double>(4, 0));
}

TEST(FunctionalCall, ATiedParameterIsGivenUnderOneName) {
  struct Tied : nn::Module<Tied> {
    Tied() : a(add<nn::Linear>("a", 2, 2)), b(add<nn::Linear>("b", 2, 2)) {
      b.share_parameter("weight", a.weight);
    }
    Tensor forward(const Tensor& x) { return b(a(x)); }
    nn::Linear& a;
    nn::Linear& b;
  } tied;
  const Tensor x = ones({1, 2});
  const StateDict zero_weight = [] {
    StateDict state;
    state.set("b.weight", zeros({2, 2}));
    return state;
  }();
  EXPECT_EQ(nn::functional_call(tied, zero_weight, x).to_vector(),
            tied.b.bias.detach().to_vector());
  EXPECT_TRUE(tied.a.weight.is(tied.b.weight));
}

TEST(FunctionalCall, TheModuleIsAsBeforeAfterAnError) {
  Net net;
  const Tensor own = net.first.weight;
  StateDict given;
  given.set("first.weight", zeros({4, 3}));
  EXPECT_THROW(nn::functional_call(net, given, ones({5, 2})), ShapeError);
  EXPECT_TRUE(net.first.weight.is(own));
  given.set("second.weight", zeros({3, 3}));
  EXPECT_THROW(nn::functional_call(net, given, input()), ShapeError);
  EXPECT_TRUE(net.first.weight.is(own));
  StateDict unknown;
  unknown.set("third.weight", zeros({1}));
  const std::string message =
      message_of<ValueError>([&] { nn::functional_call(net, unknown, input()); });
  EXPECT_NE(message.find("'third.weight'"), std::string::npos) << message;
}

TEST(FunctionalCall, ARecomputedCallFindsTheGivenParameters) {
  Net plain, checkpointed;
  plain.eval(), checkpointed.eval();
  const HookHandle handle = checkpointed.checkpoint_calls();
  const auto gradient = [&](Net& net) {
    NamedTensors given = net.named_parameters();
    const Tensor factor = full({}, 2).set_requires_grad();
    for (auto& [name, tensor] : given) tensor = tensor.detach() * factor;
    nn::functional_call(net, given, input()).sum().backward();
    return factor.grad().item();
  };
  EXPECT_EQ(gradient(checkpointed), gradient(plain));
}

TEST(FunctionalCall, TheHessianByAllParametersActsAsDifferencesOfGradientsDo) {
  const nn::ParameterDefaultsGuard defaults({.dtype = kF64});
  Net net;
  net.eval();
  const Tensor x = input().to(kF64);
  const NamedTensors names = net.named_parameters();
  const auto loss = [&](const TensorList& values) -> Tensor {
    return square(nn::functional_call(net, nn::with_values(names, values), x)).mean();
  };
  TensorList v;
  for (const Tensor& parameter : net.parameters()) {
    v.push_back(randn(parameter.shape(), {.dtype = kF64}, RandomStream{6, v.size()}));
  }
  const Products product = functional::hvp(loss, net.parameters(), v);
  const auto gradient_at = [&](double step) {
    TensorList moved;
    for (size_t i = 0; i < v.size(); ++i)
      moved.push_back(net.parameters()[i].detach() + step * v[i]);
    return functional::vjp([&](const TensorList& values) { return TensorList{loss(values)}; },
                           moved)
        .products;
  };
  constexpr double kStep = 1e-6;
  const TensorList above = gradient_at(kStep), below = gradient_at(-kStep);
  for (size_t i = 0; i < v.size(); ++i) {
    const Tensor differences = (above[i] - below[i]) / (2 * kStep);
    EXPECT_LT(max(abs(differences - product.products[i])).item(), 1e-7) << names[i].name;
  }
}

}  // namespace
}  // namespace tessera::tests::test_functional
