// Policies on modules, f16 on the CPU, and the report of what ran in which precision.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/nn/container.h>
#include <tessera/nn/conv.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/autocast.h>
#include <tessera/precision/report.h>

#include "refusals.h"

namespace tessera::precision::test_precision_autocast {
namespace {

const DType kLowDTypes[] = {kF16, kBF16};

Tensor random(const Shape& shape, double scale = 1) {
  return mul(randn(shape), Scalar(scale)).detach();
}

// A product, and a function between that may be told to run elsewhere.
struct Probe : nn::Module<Probe> {
  Probe() : fc(add<nn::Linear>("fc", 4, 4)) {}
  Tensor forward(const Tensor& x) {
    seen.push_back(fc(x).dtype());
    if (inside) inside(x);
    seen.push_back(fc(x).dtype());
    return fc(x);
  }
  nn::Linear& fc;
  std::function<void(const Tensor&)> inside;
  std::vector<DType> seen;
};
bool autocast_is_on() { return Context::current().slot<AutocastMode>().enabled; }

// ---- Policies ----------------------------------------------------------------------------------

TEST(Policy, HasNamesAndSaysWhatItIs) {
  EXPECT_EQ(policy_named("no"), Policy::f32());
  EXPECT_EQ(policy_named("bf16"), Policy::autocast(kBF16));
  EXPECT_EQ(policy_named("fp16").compute, kF16);
  EXPECT_EQ(policy_named("bf16-pure").parameter, kBF16);
  EXPECT_THROW(policy_named("bf61"), ConfigError);
  EXPECT_EQ(describe(policy_named("bf16")),
            "parameters f32, compute bf16 (autocast), gradients f32, output as computed");
  EXPECT_TRUE(policy_named("fp16").needs_loss_scaling());
  EXPECT_FALSE(policy_named("bf16-pure").needs_loss_scaling());
  EXPECT_TRUE(policy_named("bf16-pure").needs_masters());
  for (const char* name :
       {"no", "f32", "bf16", "fp16", "bf16-pure", "fp16-pure", "bf16-boundary", "fp16-boundary"}) {
    EXPECT_NO_THROW(check(policy_named(name))) << name;
  }
  for (const Policy& policy : {Policy{.parameter = kI64}, Policy{.compute = kI32},
                               Policy{.gradient = kBool}, Policy{.output = kU8}}) {
    EXPECT_THROW(check(policy), ConfigError) << describe(policy);
  }
}

// Accelerate turns fp8 into fp16 where the hardware cannot, with a warning.
TEST(Policy, Trap6Fp8IsNeverReplacedByAnotherPrecision) {
  EXPECT_EQ(policy_named("fp8"), Policy::fp8());
  EXPECT_EQ(policy_named("fp8-delayed").fp8_recipe->scaling, Fp8Scaling::kDelayed);
  EXPECT_THROW(policy_named("fp8-fp16"), ConfigError);
  EXPECT_THROW(check(Policy::fp8(), cuda(0)), UnsupportedError);
  EXPECT_THROW(check({.compute = kF8E4M3}), UnsupportedError);
}

// 16-bit gradients are reduced in 16 bits there.
TEST(Policy, Trap27GradientsAreReducedInF32UnlessAskedFor) {
  for (const char* name : {"bf16", "fp16", "bf16-pure", "fp16-pure", "bf16-boundary"}) {
    EXPECT_EQ(policy_named(name).gradient, kF32) << name;
  }
}

TEST(Policy, OnlyMissingDevicesAndContradictionsAreErrors) {
  EXPECT_THROW(check({.parameter = kI64}), ConfigError);
  EXPECT_THROW(check({.parameter = kBF16, .compute = kF16}), ConfigError);
  EXPECT_THROW(check({.parameter = kBF16, .compute = kF32}), ConfigError);
  EXPECT_NO_THROW(check({.parameter = kBF16, .compute = kF32, .casting = Casting::kBoundary}));
  EXPECT_NO_THROW(check({.compute = kF16}));  // on the CPU, with f16's rounding
  try {
    check(Policy::autocast(kBF16), cuda(63));
  } catch (const UnsupportedError& error) {
    EXPECT_NE(std::string(error.what()).find("cuda:63 is not there"), std::string::npos)
        << error.what();
  }
}

TEST(Policy, SaysWhatContradictsItself) {
  const auto of = [](DType parameter, DType compute, Casting casting = Casting::kAutocast) {
    return Policy{.parameter = parameter, .compute = compute, .casting = casting};
  };
  const auto fp8_over = [](Policy policy) {
    policy.fp8_recipe = Fp8Recipe{};
    return policy;
  };
  for (const Policy& fits :
       {of(kF64, kF64), of(kBF16, kBF16), of(kF16, kF16), of(kF32, kF16), fp8_over(of(kF32, kF16)),
        fp8_over(of(kF32, kBF16)), of(kF16, kBF16, Casting::kBoundary)}) {
    EXPECT_NO_THROW(check(fits)) << describe(fits);
  }
  const char* const fp8 = "fp8 stands on autocast";
  expect_refusals({
      {"parameter f8e4m3 is no dtype", [] { check({.parameter = kF8E4M3}); }},
      {"compute f8e5m2 is no dtype", [] { check({.compute = kF8E5M2}); }},
      {"gradient f8e5m2 is no dtype", [] { check({.gradient = kF8E5M2}); }},
      {"output f8e5m2 is no dtype", [] { check({.output = kF8E5M2}); }},
      {"parameter must be a floating dtype", [] { check({.parameter = kI64}); }},
      {"compute must be a floating dtype", [] { check({.compute = kI64}); }},
      {"gradient must be a floating dtype", [] { check({.gradient = kI64}); }},
      {"output must be a floating dtype", [] { check({.output = kI64}); }},
      {fp8, [&] { check(fp8_over(of(kF32, kF32))); }},
      {fp8, [&] { check(fp8_over(of(kF16, kF16))); }},
      {fp8, [&] { check(fp8_over(of(kF32, kBF16, Casting::kBoundary))); }},
      {"history must be at least 1",
       [] { check({.compute = kBF16, .fp8_recipe = Fp8Recipe{.history = 0}}); }},
      {"computes in bf16 or f16", [&] { check(of(kF32, kF64)); }},
      {"parameters in f32 or in the compute dtype", [&] { check(of(kF64, kBF16)); }},
      {"f64 is never cast", [&] { check(of(kF64, kBF16, Casting::kBoundary)); }},
      {"f64 is never cast", [&] { check(of(kF32, kF64, Casting::kBoundary)); }},
      {"known are no, f32, bf16, fp16, bf16-pure, fp16-pure, bf16-boundary, fp16-boundary, fp8",
       [] { policy_named("f16"); }},
  });
}

TEST(Policy, DescribesItsCastsAndItsOutput) {
  EXPECT_EQ(describe(Policy{}), "parameters f32, compute f32, gradients f32, output as computed");
  EXPECT_EQ(
      describe({.compute = kF16, .gradient = kF16, .output = kF32, .casting = Casting::kBoundary}),
      "parameters f32, compute f16 (cast at the boundary), gradients f16, output f32");
}

// ---- Autocast around a module ------------------------------------------------------------------

TEST(ModuleAutocast, StandsAroundTheCallAndGoesWithItsHandle) {
  for (const DType dtype : kLowDTypes) {
    Probe model;
    AppliedPolicy applied = apply(model, Policy::autocast(dtype));
    const Tensor y = model(random({2, 4}));
    EXPECT_EQ(y.dtype(), dtype);
    EXPECT_EQ(model.seen, (std::vector<DType>{dtype, dtype}));
    EXPECT_FALSE(autocast_is_on());
    sum(to(y, kF32)).backward();
    EXPECT_EQ(model.fc.weight.grad().dtype(), kF32);
    EXPECT_EQ(model.fc.weight.dtype(), kF32);
    applied.remove();
    EXPECT_EQ(model(random({2, 4})).dtype(), kF32);
    EXPECT_EQ(policy_of(model), std::nullopt);
  }
}

TEST(ModuleAutocast, EndsAlsoWhereForwardThrows) {
  Probe model;
  model.inside = [](const Tensor&) { TS_THROW(ValueError, "probe", "does not like it"); };
  const AppliedPolicy applied = apply(model, Policy::autocast(kBF16));
  EXPECT_THROW(model(random({2, 4})), ValueError);
  EXPECT_FALSE(autocast_is_on());
}

// KW-1: autocast fp16 -> fp32 -> fp16.
TEST(ModuleAutocast, KW1NestsF16F32F16) {
  Probe model;
  std::vector<DType> inner;
  model.inside = [&](const Tensor& x) {
    const AutocastGuard off(kF16, false);
    inner.push_back(model.fc.forward(x).dtype());
    {
      const AutocastGuard again(kBF16);
      inner.push_back(model.fc.forward(x).dtype());
    }
    inner.push_back(model.fc.forward(x).dtype());
  };
  const AppliedPolicy applied = apply(model, Policy::autocast(kF16));
  model(random({2, 4}));
  EXPECT_EQ(model.seen, (std::vector<DType>{kF16, kF16}));
  EXPECT_EQ(inner, (std::vector<DType>{kF32, kBF16, kF32}));
}

// Accelerate converts the outputs of prepared models to fp32.
TEST(ModuleAutocast, Trap28OutputsStayInTheComputeDTypeUnlessAskedFor) {
  Probe model;
  {
    const AppliedPolicy applied = apply(model, Policy::autocast(kBF16));
    EXPECT_EQ(model(random({2, 4})).dtype(), kBF16);
  }
  Policy policy = Policy::autocast(kBF16);
  policy.output = kF32;
  const AppliedPolicy applied = apply(model, policy);
  const Tensor y = model(random({2, 4}));
  EXPECT_EQ(y.dtype(), kF32);
  y.backward(ones(y.shape()));
  EXPECT_TRUE(model.fc.weight.grad().defined());
}

TEST(ModuleAutocast, BackwardRunsInForwardsDTypesWhateverScopeItIsCalledIn) {
  const Tensor x = random({16, 8}), weight = random({8, 8}).set_requires_grad();
  std::vector<std::vector<double>> gradients;
  for (const bool inside : {false, true}) {
    const Tensor y = square(linear(x, weight)).mean();  // f32
    const AutocastGuard autocast(kBF16, inside);
    y.backward();
    gradients.push_back(weight.grad().to_vector());
    weight.zero_grad();
  }
  EXPECT_EQ(gradients[0], gradients[1]);
}

TEST(ModuleAutocast, AChildMayHaveAPolicyOfItsOwn) {
  nn::Sequential model(nn::layer<nn::Linear>(4, 4), nn::layer<nn::Linear>(4, 4));
  const AppliedPolicy outer = apply(model, Policy::autocast(kBF16));
  const AppliedPolicy inner = apply(model.child(1), Policy::autocast(kF16));
  EXPECT_EQ(model(random({2, 4})).dtype(), kF16);
}

// ---- Casting at the boundary -------------------------------------------------------------------

// Norms, an embedding and a frozen weight: ops whose records leave dtypes alone.
struct Mixed : nn::Module<Mixed> {
  Mixed()
      : embedding(add<nn::Embedding>("embedding", 7, 4)),
        norm(add<nn::LayerNorm>("norm", Shape{4})),
        fc(add<nn::Linear>("fc", 4, 4)) {
    fc.bias.set_requires_grad(false);
  }
  Tensor forward(const Tensor& ids, const Tensor& x) {
    embedded = embedding(ids);
    return fc(norm(embedded + x));
  }
  nn::Embedding& embedding;
  nn::LayerNorm& norm;
  nn::Linear& fc;
  Tensor embedded;
};

TEST(BoundaryCasting, InputsAndParametersAreCastWhereTheModuleIsEntered) {
  for (const DType dtype : kLowDTypes) {
    Mixed model;
    const AppliedPolicy applied = apply(model, Policy::boundary(dtype));
    const Tensor ids = tensor(std::vector<int64_t>{1, 6}, {2}, kI64);
    const Tensor y = model(ids, random({2, 4}));
    EXPECT_EQ(model.embedded.dtype(), dtype);  // autocast leaves embeddings in f32
    EXPECT_EQ(y.dtype(), dtype);
    sum(to(y, kF32)).backward();
    for (const auto& [name, parameter] : model.named_parameters()) {
      EXPECT_EQ(parameter.dtype(), kF32) << name;
      if (parameter.requires_grad()) {
        EXPECT_EQ(parameter.grad().dtype(), kF32) << name;
      } else {
        EXPECT_FALSE(parameter.grad().defined()) << name;
      }
    }
    EXPECT_FALSE(autocast_is_on());
  }
}

TEST(BoundaryCasting, EqualsTheModuleStoredInThatDTypeToTheBit) {
  for (const DType dtype : kLowDTypes) {
    Mixed model;
    const Tensor ids = tensor(std::vector<int64_t>{1, 6}, {2}, kI64), x = random({2, 4});
    Tensor cast_result, cast_gradient;
    {
      const AppliedPolicy applied = apply(model, Policy::boundary(dtype));
      cast_result = model(ids, x);
      sum(to(cast_result, kF32)).backward();
      cast_gradient = model.fc.weight.grad().clone();
      model.zero_grad();
    }
    model.to(dtype);
    const Tensor stored = model(ids, to(x, dtype));
    sum(to(stored, kF32)).backward();
    EXPECT_EQ(stored.to_vector(), cast_result.to_vector());
    EXPECT_EQ(model.fc.weight.grad().to_vector(), cast_gradient.to_vector());
  }
}

TEST(BoundaryCasting, ReadsWhatTheOptimizerHasWritten) {
  Mixed model, reference;
  reference.load_state_dict(model.state_dict());
  const AppliedPolicy applied = apply(model, Policy::boundary(kBF16));
  optim::AdamW optimizer(model.named_parameters(), {.lr = 0.1});
  const Tensor ids = tensor(std::vector<int64_t>{1, 6}, {2}, kI64), x = random({2, 4});
  for (int step = 0; step < 2; ++step) {
    sum(to(model(ids, x), kF32)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  reference.load_state_dict(model.state_dict());
  reference.to(kBF16);
  EXPECT_EQ(model(ids, x).to_vector(), reference(ids, to(x, kBF16)).to_vector());
}

TEST(BoundaryCasting, RecomputedActivationsAreThoseOfTheFirstRun) {
  struct Recomputed : nn::Module<Recomputed> {
    Recomputed() : fc(add<nn::Linear>("fc", 4, 4)) {}
    Tensor forward(const Tensor& x) {
      const auto function = [&](const TensorList& in) {
        return TensorList{gelu(linear(gelu(linear(in[0], fc.weight)), fc.weight))};
      };
      return (again ? checkpoint(function, TensorList{x}) : function({x}))[0];
    }
    nn::Linear& fc;
    bool again = false;
  } model;
  const Tensor x = random({3, 4});
  for (const Policy& policy : {Policy::boundary(kBF16), Policy::autocast(kBF16)}) {
    const AppliedPolicy applied = apply(model, policy);
    std::vector<std::vector<double>> gradients;
    for (const bool again : {false, true}) {
      model.again = again;
      sum(to(model(x), kF32)).backward();
      gradients.push_back(model.fc.weight.grad().to_vector());
      model.zero_grad();
    }
    EXPECT_EQ(gradients[0], gradients[1]);
  }
}

TEST(BoundaryCasting, AndAutocastExcludeEachOtherPerUnit) {
  Probe model;
  {
    const AppliedPolicy autocast = apply(model, Policy::autocast(kBF16));
    EXPECT_THROW((void)apply(model, Policy::boundary(kBF16)), ConfigError);
  }
  const AppliedPolicy boundary = apply(model, Policy::boundary(kBF16));
  EXPECT_THROW((void)apply(model, Policy::autocast(kBF16)), ConfigError);
  model.inside = [](const Tensor&) { const AutocastGuard guard(kBF16); };
  EXPECT_THROW(model(random({2, 4})), ConfigError);
  // Off is what it is already.
  model.inside = [&](const Tensor& x) {
    const AutocastGuard off(kBF16, false);
    EXPECT_EQ(model.fc.forward(x).dtype(), kBF16);
  };
  EXPECT_EQ(model(random({2, 4})).dtype(), kBF16);
  // Autocast around the unit ends at its boundary.
  const AutocastGuard around(kF16);
  EXPECT_EQ(model(random({2, 4})).dtype(), kBF16);
  EXPECT_TRUE(autocast_is_on());
}

TEST(BoundaryCasting, AModuleThatIsGoneLeavesNoPolicyBehind) {
  for (int time = 0; time < 3; ++time) {
    Probe model;
    AppliedPolicy applied = apply(model, Policy::autocast(kBF16));
    model(random({2, 4}));
  }
}

TEST(PurePolicy, StoresParametersNarrowGivesTheOriginalsOutAndLeavesBuffers) {
  struct WithBuffers : nn::Module<WithBuffers> {
    WithBuffers() : conv(add<nn::Conv2d>("conv", 1, 2, 3)), norm(add<nn::BatchNorm2d>("norm", 2)) {}
    Tensor forward(const Tensor& x) { return norm(conv(x)); }
    nn::Conv2d& conv;
    nn::BatchNorm2d& norm;
  } model;
  const std::vector<double> before = model.conv.weight.to_vector();
  const Tensor handle = model.conv.weight;
  AppliedPolicy applied = apply(model, Policy::pure(kBF16));
  EXPECT_EQ(handle.dtype(), kBF16);  // in place, under all holders
  for (const auto& [name, buffer] : model.named_buffers()) {
    EXPECT_NE(buffer.dtype(), kBF16) << name;
  }
  NamedTensors originals = applied.take_originals();
  EXPECT_EQ(originals.size(), model.named_parameters().size());
  EXPECT_EQ(originals[0].tensor.dtype(), kF32);
  EXPECT_EQ(originals[0].tensor.to_vector(), before);
  const Tensor y = model(random({2, 1, 8, 8}));
  EXPECT_EQ(y.dtype(), kBF16);
}

// ---- f16 on the CPU ----------------------------------------------------------------------------

// f16 storage and rounding, f32 arithmetic: a product of f16 operands is the f32 product of the
// same numbers, rounded once.
TEST(F16OnTheCpu, ProductsAreF32ProductsRoundedOnce) {
  struct Case {
    const char* name;
    std::function<Tensor(const TensorList&)> call;
    TensorList inputs;
    double terms;
  };
  const std::vector<Case> cases = {
      {"matmul",
       [](const TensorList& in) { return matmul(in[0], in[1]); },
       {random({33, 70}), random({70, 19})},
       70},
      {"bmm",
       [](const TensorList& in) { return bmm(in[0], in[1]); },
       {random({3, 9, 20}), random({3, 20, 7})},
       20},
      {"linear",
       [](const TensorList& in) { return linear(in[0], in[1], in[2]); },
       {random({5, 64}), random({17, 64}), random({17})},
       64},
      {"addmm",
       [](const TensorList& in) { return addmm(in[0], in[1], in[2]); },
       {random({6, 7}), random({6, 40}), random({40, 7})},
       40},
      {"einsum",
       [](const TensorList& in) {
         return einsum("bij,bjk->bik", TensorList{in[0], in[1]});
       },
       {random({2, 5, 30}), random({2, 30, 6})},
       30},
      {"conv2d",
       [](const TensorList& in) { return conv2d(in[0], in[1], in[2]); },
       {random({2, 3, 9, 9}), random({4, 3, 3, 3}), random({4})},
       27},
      {"attention",
       [](const TensorList& in) { return scaled_dot_product_attention(in[0], in[1], in[2]); },
       {random({2, 3, 17, 16}), random({2, 3, 17, 16}), random({2, 3, 17, 16})},
       17},
      {"linear_gelu",
       [](const TensorList& in) { return linear_gelu(in[0], in[1], in[2]); },
       {random({5, 64}), random({17, 64}), random({17})},
       64},
      {"linear_gelu_linear",
       [](const TensorList& in) { return linear_gelu_linear(in[0], in[1], in[2], in[3], in[4]); },
       {random({5, 64}), random({17, 64}), random({17}), random({9, 17}), random({9})},
       64},
  };
  const double eps = epsilon_of(kF16);
  for (const Case& each : cases) {
    TensorList wide;
    for (const Tensor& input : each.inputs) wide.push_back(to(to(input, kF16), kF32));
    const std::vector<double> expected = each.call(wide).to_vector();
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::abs(value));
    TensorList leaves;
    for (const Tensor& input : each.inputs) leaves.push_back(input.clone().set_requires_grad());
    const AutocastGuard autocast(kF16);
    const Tensor result = each.call(leaves);
    ASSERT_EQ(result.dtype(), kF16) << each.name;
    const std::vector<double> got = result.detach().to_vector();
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], expected[i], 2 * eps * largest) << each.name << " at " << i;
    }
    sum(result).backward();
    for (const Tensor& leaf : leaves) {
      EXPECT_EQ(leaf.grad().dtype(), kF32) << each.name;
      EXPECT_TRUE(std::isfinite(sum(abs(leaf.grad())).item())) << each.name;
    }
  }
}

TEST(F16OnTheCpu, OverflowIsInfinityAsOnAGpu) {
  const Tensor a = full({1, 4}, 200, {.dtype = kF32}), b = full({4, 1}, 200, {.dtype = kF32});
  const AutocastGuard autocast(kF16);
  EXPECT_EQ(matmul(a, b).item(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(linear(a, neg(b).transpose(0, 1)).item(), -std::numeric_limits<double>::infinity());
  // Sums run in f32 and do not overflow.
  const Tensor wide = full({4096}, 60000, {.dtype = kF16});
  EXPECT_EQ(sum(wide).dtype(), kF32);
  EXPECT_NEAR(sum(wide).item(), 4096 * 59999.0, 4096 * 32);
}

TEST(F16OnTheCpu, CastsOfWeightsAreWrittenByTheOptimizer) {
  nn::Linear layer(8, 8);
  optim::AdamW optimizer(layer.named_parameters(), {.lr = 0.1});
  const Tensor x = random({4, 8});
  for (int step = 0; step < 3; ++step) {
    Tensor y;
    {
      const AutocastGuard autocast(kF16);
      y = layer(x);
    }
    const Tensor expected =
        linear(to(x, kF16), to(layer.weight.detach(), kF16), to(layer.bias.detach(), kF16));
    EXPECT_EQ(y.detach().to_vector(), expected.to_vector()) << "step " << step;
    sum(to(y, kF32)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

// The gradient of a mean over many rows lies below f16's smallest number until the loss scale lifts
// it, and 65536 itself is more than f16 holds.
TEST(F16OnTheCpu, TheFusedLossKeepsGradientsThatALossScaleBringsBack) {
  const int64_t N = 2048, C = 8, V = 512;
  const Tensor x = random({N, C}, 0.5), head = random({V, C}, 0.5);
  Tensor targets = raw::empty({N}, kI64);
  for (int64_t i = 0; i < N; ++i) targets.data_as<int64_t>()[i] = i * 37 % V;
  const auto gradients = [&](bool low, bool fused) {
    const Tensor a = x.clone().set_requires_grad(), w = head.clone().set_requires_grad();
    const AutocastGuard autocast(kF16, low);
    const Tensor loss =
        fused ? linear_cross_entropy(a, w, targets) : cross_entropy(linear(a, w), targets);
    EXPECT_EQ(loss.dtype(), kF32);
    mul(loss, Scalar(65536.0)).backward();
    return std::pair(a.grad().to_vector(), w.grad().to_vector());
  };
  const auto [x_expected, w_expected] = gradients(false, true);
  for (const bool fused : {true, false}) {
    const auto [x_got, w_got] = gradients(true, fused);
    const auto relative = [](const std::vector<double>& got, const std::vector<double>& expected) {
      double error = 0, norm = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        error += (got[i] - expected[i]) * (got[i] - expected[i]);
        norm += expected[i] * expected[i];
      }
      return std::sqrt(error / norm);
    };
    EXPECT_LT(relative(x_got, x_expected), 4 * epsilon_of(kF16)) << fused;
    EXPECT_LT(relative(w_got, w_expected), 4 * epsilon_of(kF16)) << fused;
  }
}

// ---- The report --------------------------------------------------------------------------------

TEST(PrecisionReport, SaysWhatEachLayerRanIn) {
  Mixed model;
  const Policy policy = Policy::autocast(kBF16);
  const AppliedPolicy applied = apply(model, policy);
  const PrecisionWatch watch(model, policy);
  optim::AdamW optimizer(model.named_parameters(), {});
  sum(to(model(tensor(std::vector<int64_t>{1, 6}, {2}, kI64), random({2, 4})), kF32)).backward();
  optimizer.step();
  const PrecisionReport report = watch.report(optimizer.state_dict());
  EXPECT_EQ(report.calls, 1);
  EXPECT_TRUE(report.deviations.empty());
  const auto layer = [&](const std::string& name) {
    for (const LayerPrecision& each : report.layers) {
      if (each.name == name) return each;
    }
    ADD_FAILURE() << "no layer " << name;
    return LayerPrecision{};
  };
  EXPECT_EQ(layer("fc").products, (DTypes{kBF16}));
  EXPECT_EQ(layer("fc").parameters, (DTypes{kF32}));
  EXPECT_EQ(layer("fc").gradients, (DTypes{kF32}));
  EXPECT_EQ(layer("fc").states, (DTypes{kF32}));
  EXPECT_TRUE(layer("fc").masters.empty());
  EXPECT_EQ(layer("embedding").others, (DTypes{kF32}));
  EXPECT_TRUE(layer("norm").products.empty());
  EXPECT_NE(report.table().find("every op ran in the precision that the policy says"),
            std::string::npos)
      << report.table();
}

TEST(PrecisionReport, NamesMastersAndNarrowParameters) {
  nn::Linear model(4, 4);
  AppliedPolicy applied = apply(model, Policy::pure(kBF16));
  optim::AdamW optimizer(model.named_parameters(), {});
  optimizer.begin_masters(applied.take_originals());
  const PrecisionWatch watch(model, applied.policy());
  sum(model(random({2, 4}))).backward();
  const PrecisionReport report = watch.report(optimizer.state_dict());
  ASSERT_EQ(report.layers.size(), 1u);
  EXPECT_EQ(report.layers[0].parameters, (DTypes{kBF16}));
  EXPECT_EQ(report.layers[0].products, (DTypes{kBF16}));
  EXPECT_EQ(report.layers[0].masters, (DTypes{kF32}));
}

TEST(PrecisionReport, NamesOpsThatRanOtherwiseThanThePolicySays) {
  Probe model;
  model.inside = [&](const Tensor& x) {
    const AutocastGuard off(kBF16, false);
    model.fc(x);
  };
  const Policy policy = Policy::autocast(kBF16);
  const AppliedPolicy applied = apply(model, policy);
  const PrecisionWatch watch(model, policy);
  model(random({2, 4}));
  const PrecisionReport report = watch.report();
  ASSERT_EQ(report.deviations.size(), 1u);
  EXPECT_EQ(report.deviations[0].describe(),
            "fc: linear ran in f32, the policy says bf16 (1 call)");
  EXPECT_NE(report.table().find(report.deviations[0].describe()), std::string::npos);
}

TEST(PrecisionReport, NamesEachDtypeThatAnOpReadsOtherwise) {
  static const Op wide{.name = "wide_test_op", .autocast = Autocast::kFloat32};
  static const Op low{.name = "low_test_op", .autocast = Autocast::kLow};
  static const Op view{.name = "view_test_op", .view = true};
  Probe model;
  model.inside = [&](const Tensor& x) {
    OpObserver* const observer = Context::current().slot<OpObserverSlot>().observer;
    const TensorList all = {to(x, kF64), to(x, kF32), to(x, kF16), to(x, kBF16), to(x, kI64), {}};
    observer->saw(wide, all, all);
    observer->saw(low, all, all);
    observer->saw(view, all, all);
  };
  const Policy policy = Policy::autocast(kBF16);
  const AppliedPolicy applied = apply(model, policy);
  const PrecisionWatch watch(model, policy);
  model(random({2, 4}));
  const auto deviations_of = [](const PrecisionReport& report, const std::string& op) {
    DTypes found;
    for (const Deviation& one : report.deviations) {
      if (one.op == op) found.insert(one.found);
    }
    return found;
  };
  const PrecisionReport report = watch.report();
  EXPECT_EQ(deviations_of(report, "wide_test_op"), (DTypes{kF64, kF16, kBF16}));
  EXPECT_EQ(deviations_of(report, "low_test_op"), (DTypes{kF64, kF32, kF16}));
  EXPECT_TRUE(deviations_of(report, "view_test_op").empty());
}

TEST(PrecisionReport, TheTableStandsInColumns) {
  PrecisionReport report{
      .policy = Policy::autocast(kBF16), .calls = 2, .layers = {}, .deviations = {}};
  report.layers.push_back({.name = "", .type = "Net"});
  report.layers.push_back({.name = "fc", .type = "Linear"});
  LayerPrecision& fc = report.layers.back();
  fc.parameters = {kF32}, fc.products = {kBF16, kF32}, fc.others = {kF64}, fc.gradients = {kF32};
  fc.masters = {kF64}, fc.states = {kF16};
  const std::string head =
      "parameters f32, compute bf16 (autocast), gradients f32, output as computed\n"
      "layer    type    parameter  products  other ops  gradient  master  state\n"
      "(model)  Net     -          -         -          -         -       -\n"
      "fc       Linear  f32        f32+bf16  f64        f32       f64     f16\n";
  EXPECT_EQ(report.table(), head + "every op ran in the precision that the policy says\n");
  report.calls = 0;
  EXPECT_TRUE(report.table().ends_with("the model was not called: nothing is known of its ops\n"));
  report.calls = 2;
  report.deviations = {{"", "linear", kBF16, kF32, 1}, {"fc", "exp", kF32, kBF16, 2}};
  EXPECT_TRUE(
      report.table().ends_with("f16\n(model): linear ran in f32, the policy says bf16 (1 call)\n"
                               "fc: exp ran in bf16, the policy says f32 (2 calls)\n"))
      << report.table();
}

}  // namespace
}  // namespace tessera::precision::test_precision_autocast
