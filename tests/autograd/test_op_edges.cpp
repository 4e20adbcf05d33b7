// Corners of single ops where torch has a rule of its own.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/functional.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/profile/profiler.h>

namespace tessera::test_op_edges {
namespace {

TEST(AnyAll, GiveU8ForU8AndBoolOtherwise) {
  const Tensor x = tensor({0, 1, 2, 0}).view({2, 2}).to(kU8);
  for (const Tensor& y : {any(x), all(x), any(x, {1}), all(x, {0}, true)}) {
    EXPECT_EQ(y.dtype(), kU8);
  }
  EXPECT_EQ(any(x, {1}).to_vector(), (std::vector<double>{1, 1}));  // 1, not the element 2
  EXPECT_EQ(all(x, {0}).to_vector(), (std::vector<double>{0, 0}));
  for (const DType dtype : {kBool, kI32, kF32}) EXPECT_EQ(any(x.to(dtype)).dtype(), kBool);
  EXPECT_EQ(any(zeros({2}, {.dtype = kU8, .device = kMeta})).dtype(), kU8);
}

TEST(Glu, IsOneOpThatAutocastLeavesInItsDtype) {
  const Tensor x = randn({3, 8});
  // One range, of its own name.
  Profiler profiler;
  {
    const ProfilerScope scope(profiler);
    glu(x);
  }
  ASSERT_EQ(profiler.entries().size(), 1u);
  EXPECT_EQ(profiler.entries().begin()->first, "glu");
  const AutocastGuard autocast;
  EXPECT_EQ(glu(x).dtype(), kF32);
  EXPECT_EQ(glu(x.to(kBF16)).dtype(), kBF16);
  EXPECT_THROW(glu(scalar_tensor(1, kF32)), ShapeError);
  EXPECT_THROW(glu(randn({3, 3})), ShapeError);
  EXPECT_THROW(glu(ones({4}, {.dtype = kI64})), DTypeError);
}

TEST(MaxPool, GivesThePositionsOfItsValues) {
  const Tensor x = tensor({1, 5, 2, 5, 0, 3, 4, 4, 1}).view({1, 1, 3, 3}).clone();
  x.set_requires_grad();
  const auto [values, indices] = max_pool2d_with_indices(x, {2}, {1});
  EXPECT_EQ(values.to_vector(), (std::vector<double>{5, 5, 5, 4}));
  EXPECT_EQ(indices.dtype(), kI64);
  EXPECT_EQ(indices.to_vector(), (std::vector<double>{1, 1, 3, 7}));
  EXPECT_TRUE(values.requires_grad());
  EXPECT_FALSE(indices.requires_grad());
  values.sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{0, 2, 0, 1, 0, 0, 0, 1, 0}));

  const auto row = max_pool1d_with_indices(tensor({3, 1, 2, 7, 5}).view({1, 5}), {2}, {}, {1});
  EXPECT_EQ(row.values.to_vector(), (std::vector<double>{3, 2, 7}));
  EXPECT_EQ(row.indices.to_vector(), (std::vector<double>{0, 2, 3}));
  EXPECT_THROW(max_pool1d(randn({1, 1, 4, 4}), {2}), ShapeError);
  EXPECT_THROW(max_pool2d(randn({1, 4, 4}), {2}, {}, {int64_t{1} << 62}), ValueError);
}

TEST(MaxPool, TakesTheLastNanOfAWindow) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto pooled = max_pool1d_with_indices(tensor({nan, 1, nan, 2}).view({1, 4}), {4});
  EXPECT_TRUE(std::isnan(pooled.values.item()));
  EXPECT_EQ(pooled.indices.item<int64_t>(), 2);
}

TEST(Pooling, InCeilModeAWindowMayBeWiderThanThePaddedInput) {
  const Tensor x = tensor({1, 2}).view({1, 1, 1, 2});
  const auto largest = max_pool2d(x, {1, 3}, {}, {0}, {1}, true);
  EXPECT_EQ(largest.shape(), (Shape{1, 1, 1, 1}));
  EXPECT_EQ(largest.item(), 2);
  EXPECT_EQ(avg_pool2d(x, {1, 3}, {}, {0}, true).item(), 1.5);
  EXPECT_THROW(max_pool2d(x, {1, 3}), ShapeError);
  EXPECT_THROW(max_pool2d(x, {1, 3}, {1}, {0}, {1}, true), ShapeError);
  EXPECT_THROW(max_pool2d(zeros({1, 1, 0, 3}), {1}), ShapeError);
}

TEST(Topk, OfANumberIsTheNumber) {
  const Tensor x = scalar_tensor(3, kF32).set_requires_grad();
  for (const int64_t k : {0, 1}) {
    const auto [values, indices] = topk(x, k);
    EXPECT_EQ(values.item(), 3);
    EXPECT_EQ(indices.item<int64_t>(), 0);
    x.zero_grad();
    values.backward();
    EXPECT_EQ(x.grad().item(), 1);
  }
  EXPECT_THROW(topk(x, 2), ValueError);
}

TEST(Products, HaveGradientsWhereASizeIsZero) {
  for (const auto& [batch, in, out] : {std::tuple<int, int, int>{3, 0, 4}, {3, 2, 0}, {0, 0, 4}}) {
    const Tensor x = randn({2, batch, in}).set_requires_grad();
    const Tensor weight = randn({out, in}).set_requires_grad();
    const Tensor bias = randn({out}).set_requires_grad();
    for (const Tensor& y :
         {linear(x, weight, bias), matmul(x, weight.t()), linear_gelu(x, weight, bias),
          linear_gelu_linear(x, weight, bias, ones({out, out}), {})}) {
      weight.zero_grad();
      y.sum().backward();
      EXPECT_EQ(y.shape(), (Shape{2, batch, out}));
      EXPECT_EQ(weight.grad().shape(), weight.shape());
      EXPECT_EQ(weight.grad().sum().item(), 0);
    }
  }
  const Tensor vector = zeros({0}).set_requires_grad();
  matmul(zeros({2, 1, 0}), vector).sum().backward();
  EXPECT_EQ(vector.grad().shape(), Shape{0});
}

TEST(KlDiv, BroadcastsTheTargetAndTheInputWithGradients) {
  for (const bool log_target : {false, true}) {
    const Tensor narrow = rand({2, 1}).set_requires_grad(), wide = rand({3, 2, 4});
    wide.set_requires_grad();
    for (const auto& [x, target] : {std::pair{narrow, wide}, std::pair{wide, narrow}}) {
      narrow.zero_grad();
      wide.zero_grad();
      kl_div(x, target, KlReduction::kSum, log_target).backward();
      const Tensor narrow_grad = narrow.grad(), wide_grad = wide.grad();
      narrow.zero_grad();
      wide.zero_grad();
      const Shape shape = wide.shape();
      kl_div(x.expand(shape), target.expand(shape), KlReduction::kSum, log_target).backward();
      EXPECT_LT((narrow_grad - narrow.grad()).abs().max().item(), 1e-4);
      EXPECT_LT((wide_grad - wide.grad()).abs().max().item(), 1e-5);
    }
  }
}

TEST(Var, WithoutDegreesOfFreedomHasNoFiniteGradient) {
  const Tensor x = tensor({1, 2}).set_requires_grad();
  for (const double correction : {2.0, 3.0}) {
    x.zero_grad();
    const Tensor y = var(x, {}, correction);
    EXPECT_EQ(y.item(), std::numeric_limits<double>::infinity());
    y.backward();
    EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{-std::numeric_limits<double>::infinity(),
                                                         std::numeric_limits<double>::infinity()}));
  }
}

TEST(CosineSimilarity, PromotesAnIntegerToTheFloatingOperandsDtype) {
  const Tensor half = ones({2, 3}, {.dtype = kBF16}), integer = ones({2, 3}, {.dtype = kI32});
  EXPECT_EQ(cosine_similarity(half, integer).dtype(), kBF16);
  EXPECT_EQ(cosine_similarity(integer, integer).dtype(), kF32);
}

TEST(CosineSimilarity, BelowEpsHasTheGradientOfItsFormula) {
  const Tensor a = tensor({1e-9, 0}, kF64).set_requires_grad(), b = tensor({1, 0}, kF64);
  const Tensor y = cosine_similarity(a, b, 0, 1e-8);
  y.backward();
  EXPECT_DOUBLE_EQ(y.item(), 0.1);  // a b / (max(|a|, eps) max(|b|, eps))
  EXPECT_DOUBLE_EQ(a.grad().to_vector()[0], 1e8);
}

TEST(Max, GivesTheGradientOfANanToTheNans) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Tensor x = tensor({1, nan, 5, nan}).set_requires_grad();
  max(x).backward();
  EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{0, 0.5, 0, 0.5}));
  x.zero_grad();
  min(x).backward();
  EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{0, 0.5, 0, 0.5}));
}

TEST(Cumprod, OfOneFactorPassesTheGradientOn) {
  const Tensor x = tensor({std::numeric_limits<double>::infinity(), 0, 2}).view({3, 1}).clone();
  x.set_requires_grad();
  cumprod(x, 1).sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{1, 1, 1}));
}

TEST(Integers, AreDividedByZeroOnlyWhereThereIsSomethingToDivide) {
  const Tensor none = zeros({0, 2}, {.dtype = kU8}), zero = scalar_tensor(0, kU8);
  EXPECT_EQ(remainder(none, zero).shape(), (Shape{0, 2}));
  EXPECT_EQ(floor_divide(none, zero).shape(), (Shape{0, 2}));
  EXPECT_THROW(remainder(ones({2}, {.dtype = kU8}), zero), ValueError);
}

TEST(Bool, IsANumberForSquareAndForLimitsOfOtherDtypes) {
  const Tensor x = tensor({1, 0}, kBool);
  EXPECT_EQ(square(x).dtype(), kI64);
  EXPECT_EQ(clamp(x, 0, 1).dtype(), kI64);
  EXPECT_EQ(clamp(x, {}, -0.25).dtype(), kF32);
  EXPECT_EQ(clamp(x, {}, -0.25).to_vector(), (std::vector<double>{-0.25, -0.25}));
  EXPECT_THROW(clamp(x, true, {}), DTypeError);
}

TEST(Fill, RefusesNumbersThatAnIntegerDtypeHasNot) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const Tensor mask = ones({2}, {.dtype = kBool});
  for (const DType dtype : {kU8, kI32, kI64}) {
    const Tensor x = zeros({2}, {.dtype = dtype});
    for (const double value : {nan, infinity, -infinity, 1e30, 0x1p63}) {
      EXPECT_THROW(fill_(x, value), ValueError);
      EXPECT_THROW(full({2}, value, {.dtype = dtype}), ValueError);
      EXPECT_THROW(masked_fill(x, mask, value), ValueError);
      EXPECT_THROW(masked_fill_(x, mask, value), ValueError);
    }
  }
  EXPECT_THROW(full({1}, 256, {.dtype = kU8}), ValueError);
  EXPECT_THROW(full({1}, -256, {.dtype = kU8}), ValueError);
  EXPECT_EQ(full({1}, -3, {.dtype = kU8}).item(), 253);  // wraps, as in torch
  EXPECT_EQ(full({1}, 255.5, {.dtype = kU8}).item(), 255);
  EXPECT_EQ(full({1}, -0x1p31, {.dtype = kI32}).item(), -0x1p31);
  EXPECT_THROW(full({1}, int64_t{1} << 31, {.dtype = kI32}), ValueError);
  EXPECT_EQ(full({1}, -0x1p63, {.dtype = kI64}).item<int64_t>(),
            std::numeric_limits<int64_t>::min());
  EXPECT_EQ(full({1}, 1e300).item(), infinity);
  EXPECT_EQ(full({1}, nan, {.dtype = kBool}).item(), 1);
}

TEST(Losses, RefuseToTrainTheirWeights) {
  const Tensor x = randn({3, 2}), t = rand({3, 2}), classes = zeros({3}, {.dtype = kI64});
  const Tensor weight = rand({2}).set_requires_grad();
  const auto full = [&] { return weight.expand({3, 2}); };
  EXPECT_THROW(binary_cross_entropy_with_logits(x, t, full()), ValueError);
  EXPECT_THROW(binary_cross_entropy_with_logits(x, t, {}, Reduction::kMean, weight), ValueError);
  EXPECT_THROW(binary_cross_entropy(t, t, full()), ValueError);
  EXPECT_THROW(cross_entropy(x, classes, {.weight = weight}), ValueError);
  EXPECT_THROW(nll_loss(x, classes, {.weight = weight}), ValueError);
  EXPECT_NO_THROW(cross_entropy(x, classes, {.weight = weight.detach()}));
  const NoGradGuard no_grad;
  EXPECT_NO_THROW(binary_cross_entropy_with_logits(x, t, full()));
}

TEST(Pad, RefusesSizesWhoseSumsAreNoNumbers) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  const Tensor x = ones({1, 3});
  for (const Pad mode : {Pad::kConstant, Pad::kReplicate, Pad::kReflect, Pad::kCircular}) {
    for (const Shape& sizes :
         {Shape{kMax, 0}, Shape{0, kMax}, Shape{kMax, kMax}, Shape{kMin, 0}, Shape{kMin, kMin},
          Shape{kMax, kMin}, Shape{kMax / 2, kMax / 2}, Shape{kMax / 4, 0, kMax / 4, 0}}) {
      EXPECT_THROW(pad(x, sizes, mode), ShapeError) << "mode " << static_cast<int>(mode);
    }
  }
  EXPECT_EQ(pad(x, {1, 2}).shape(), (Shape{1, 6}));
}

TEST(Norm, HasAGradientWhereItsPowersUnderflowOrOverflow) {
  const struct {
    DType dtype;
    double p;
    std::vector<double> x;
    double tolerance = 16 * 0x1p-24;           // relative
  } cases[] = {{kF16, 2, {3e-6, 4e-6}, 0.02},  // subnormal, as its norm is: few bits are left
               {kF32, 3, {1e-20, -2e-20}},
               {kF32, 4, {1e-14, 2e-14}},
               {kF32, 1.5, {1e-30, -2e-30}},
               {kF32, 0.5, {1e-30, 2e-30}},
               {kF32, 3, {1e20, -2e20}},
               {kF32, 2, {1e-40, 0, -1e-40}, 1e-5}};  // the same, with some more bits
  for (const auto& [dtype, p, values, tolerance] : cases) {
    const Tensor x = tensor(values, {static_cast<int64_t>(values.size())}, dtype);
    const Tensor exact = x.to(kF64).set_requires_grad();
    x.set_requires_grad();
    norm(x, p).backward();
    norm(exact * 0x1p70 * 0x1p70, p).backward();  // far from what f64 has
    const std::vector<double> got = x.grad().to_vector(), expected = exact.grad().to_vector();
    for (size_t i = 0; i < got.size(); ++i) {
      const double exact_value = expected[i] * 0x1p-70 * 0x1p-70;
      EXPECT_NEAR(got[i], exact_value, tolerance * std::abs(exact_value)) << dtype << " p = " << p;
    }
  }
}

TEST(Norm, OfZerosHasAGradientOfZeroOfAnyOrder) {
  for (const double p : {0.5, 1.0, 1.5, 2.0, 3.0}) {
    const Tensor x = zeros({2, 3}).set_requires_grad();
    const Tensor first = grad(norm(x, p).sum(), TensorList{x}, {}, {.create_graph = true})[0];
    EXPECT_EQ(first.to_vector(), std::vector<double>(6, 0.0)) << p;
  }
  const Tensor x = zeros({3}).set_requires_grad();
  const Tensor first = grad(norm(x, 2).sum(), TensorList{x}, {}, {.create_graph = true})[0];
  (first * first).sum().backward();  // the penalty on a gradient that vanished
  EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{0, 0, 0}));
}

TEST(Losses, OfOtherShapesThanTheirTargetAreAnError) {
  const Tensor x = randn({3, 1}), target = randn({3});
  EXPECT_THROW(mse_loss(x, target), ShapeError);  // would be [3, 3]
  EXPECT_THROW(l1_loss(x, target), ShapeError);
  EXPECT_THROW(smooth_l1_loss(x, target), ShapeError);
  EXPECT_THROW(huber_loss(x, target), ShapeError);
  EXPECT_THROW(mse_loss(randn({3}), randn({})), ShapeError);
  EXPECT_THROW(binary_cross_entropy(rand({3, 1}), rand({3})), ShapeError);
  EXPECT_THROW(binary_cross_entropy_with_logits(x, target), ShapeError);
  EXPECT_EQ(mse_loss(x, x.detach()).item(), 0);
}

TEST(Norms, OfARowWhoseVarianceOverflowsAreNoNumbers) {
  const Tensor x = tensor({1e25, -2e25, 3e25, 1, 2, 3}).view({2, 3});
  const Tensor weight = ones({3}), bias = tensor({1.0, 2.0, 3.0});
  for (const Tensor& y : {layer_norm(x, {3}, weight, bias), group_norm(x, 1, weight, bias),
                          residual_layer_norm(x, zeros_like(x), {3}, weight, bias).normalized}) {
    // As in torch: a run that diverged must show it, and not go on with the bias.
    EXPECT_TRUE(all(isnan(y[0])).item<bool>()) << y;
    EXPECT_TRUE(all(isfinite(y[1])).item<bool>()) << y;
  }
}

TEST(Interpolate, NearestReadsThePlacesThatTorchReads) {
  const auto places = [](const Shape& shape, double factor) {
    const int spatial = shape.size() - 2;
    const Tensor line = arange(0, shape[shape.size() - 1], 1, kF32);
    const std::vector<double> factors(static_cast<size_t>(spatial), factor);
    Tensor y = interpolate(line.expand(shape).contiguous(), {}, factors);
    while (y.dim() > 1) y = y[0];
    return y.to_vector();
  };
  using Values = std::vector<double>;
  // The factor is used as it was given, but for planes that keep their size or double it.
  EXPECT_EQ(places({1, 1, 4}, 1.2), (Values{0, 0, 1, 2}));
  EXPECT_EQ(places({1, 1, 4}, 2.1), (Values{0, 0, 0, 1, 1, 2, 2, 3}));
  EXPECT_EQ(places({1, 1, 4, 4}, 1.2), (Values{0, 1, 2, 3}));
  EXPECT_EQ(places({1, 1, 4, 4}, 2.1), (Values{0, 0, 1, 1, 2, 2, 3, 3}));
  EXPECT_EQ(places({1, 1, 2, 4, 4}, 1.2), (Values{0, 0, 1, 2}));
  EXPECT_EQ(places({1, 1, 2, 4, 4}, 2.1), (Values{0, 0, 0, 1, 1, 2, 2, 3}));
  // The gradient goes back to where the value came from (torch's does not, in one dimension).
  const Tensor x = arange(0, 4, 1, kF32).view({1, 1, 4}).set_requires_grad();
  interpolate(x, {}, std::vector<double>{2.1}).sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (Values{3, 2, 2, 1}));
}

TEST(Cumprod, HasAGradientInFrontOfAZeroWhateverStandsBehindIt) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Tensor x = tensor({3, 0, infinity, 0, 2}).set_requires_grad();
  cumprod(x, 0).sum().backward();
  const std::vector<double> gradient = x.grad().to_vector();
  EXPECT_EQ(gradient[0], 1);
  EXPECT_TRUE(std::isnan(gradient[1]));
  EXPECT_EQ(std::vector<double>(gradient.begin() + 2, gradient.end()),
            (std::vector<double>{0, 0, 0}));
}

TEST(Uint8, IsComparedWithANegativeNumberAsItStands) {
  const Tensor x = tensor({0, 1, 255}, kU8);  // torch makes 255 of -1 first
  EXPECT_EQ(gt(x, -1).to_vector(), (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(eq(x, -1).to_vector(), (std::vector<double>{0, 0, 0}));
  EXPECT_EQ(add(x, -1).to_vector(), (std::vector<double>{255, 0, 254}));
  EXPECT_EQ(add(x, -1).dtype(), kU8);
}

// torch's gradient is 0 there, though the loss is 0 / 0; recorded or not, and so are later ones.
TEST(CrossEntropy, HasNoGradientWhereAllTargetsAreIgnored) {
  const Tensor targets = full({3}, -100, {.dtype = kI64});
  const Tensor class_weight = tensor({1, 2, 0.5, 1}).to(kF32), head = randn({4, 4});
  using Loss = std::function<Tensor(const Tensor&)>;
  std::vector<std::pair<std::string, Loss>> losses;
  for (const double smoothing : {0.0, 0.1}) {
    for (const Tensor& weight : {Tensor(), class_weight}) {
      losses.emplace_back("cross_entropy", [=](const Tensor& x) {
        return cross_entropy(x, targets, {.weight = weight, .label_smoothing = smoothing});
      });
      losses.emplace_back("cross_entropy of [N, C, d]", [=](const Tensor& x) {
        return cross_entropy(x.unsqueeze(2), targets.unsqueeze(1),
                             {.weight = weight, .label_smoothing = smoothing});
      });
    }
  }
  losses.emplace_back("nll_loss", [=](const Tensor& x) {
    return nll_loss(log_softmax(x, 1), targets, {.weight = class_weight});
  });
  losses.emplace_back("linear_cross_entropy", [=](const Tensor& x) {
    return linear_cross_entropy(x, head, targets, -100, Reduction::kMean, true);
  });
  for (const auto& [name, loss] : losses) {
    SCOPED_TRACE(name);
    const Tensor x = randn({3, 4}).set_requires_grad();
    const std::vector<double> none(12, 0.0);
    for (const bool create_graph : {false, true}) {
      // A factor that learns: its gradient is the loss, not one of the logits.
      const Tensor factor = ones({}).set_requires_grad();
      const Tensor first = grad(loss(x) * factor, x, {},
                                {.retain_graph = create_graph, .create_graph = create_graph})[0];
      EXPECT_EQ(first.to_vector(), none) << create_graph;
      if (!create_graph || !first.requires_grad()) continue;
      EXPECT_EQ(grad((first * randn({3, 4})).sum(), x)[0].to_vector(), none);
    }
    for (const double value : functional::hessian(loss, x).to_vector()) EXPECT_EQ(value, 0);
  }
}

// ---- Autocast -----------------------------------------------------------------------------------

// The dtype of results under autocast in bf16, of inputs in f32, bf16 and both orders of a mixture.
TEST(Autocast, FunctionsThatAreMadeOfOpsGiveTheDtypesOfTorch) {
  const Tensor labels = tensor({0, 1, 2, 3}, kI64), signs = ones({4});
  using Call = std::function<Tensor(const Tensor&, const Tensor&)>;
  const std::vector<std::pair<std::string, Call>> in_f32 = {
      {"nll_loss", [&](const Tensor& a, const Tensor&) { return nll_loss(a, labels); }},
      {"cross_entropy", [&](const Tensor& a, const Tensor&) { return cross_entropy(a, labels); }},
      {"quantile", [](const Tensor& a, const Tensor&) { return quantile(a, 0.3); }},
      {"quantile", [](const Tensor& a, const Tensor& b) { return quantile(a, b.select(0, 0)); }},
      {"cdist", [](const Tensor& a, const Tensor& b) { return cdist(a, b); }},
      {"grid_sample",
       [](const Tensor& a, const Tensor& b) {
         return grid_sample(a.view({1, 1, 4, 4}), b.view({1, 2, 4, 2}));
       }},
      {"cosine_embedding_loss",
       [&](const Tensor& a, const Tensor& b) { return cosine_embedding_loss(a, b, signs); }},
      {"triplet_margin_loss",
       [](const Tensor& a, const Tensor& b) { return triplet_margin_loss(a, b, a); }},
      {"poisson_nll_loss", [](const Tensor& a, const Tensor& b) { return poisson_nll_loss(a, b); }},
      {"kl_div", [](const Tensor& a, const Tensor& b) { return kl_div(a, b); }},
      {"huber_loss", [](const Tensor& a, const Tensor& b) { return huber_loss(a, b); }},
  };
  const Tensor a = rand({4, 4}) * 0.8 + 0.1, b = rand({4, 4}) * 0.8 + 0.1;
  const AutocastGuard autocast(kBF16);
  for (const auto& [name, call] : in_f32) {
    for (const DType left : {kF32, kBF16}) {
      for (const DType right : {kF32, kBF16}) {
        EXPECT_EQ(call(a.to(left), b.to(right)).dtype(), kF32) << name << left << right;
      }
    }
  }
  EXPECT_EQ(dot(a.select(0, 0), b.select(0, 0)).dtype(), kF32);
  EXPECT_EQ(dot(a.select(0, 0).to(kBF16), b.select(0, 0).to(kBF16)).dtype(), kBF16);
  // The product inside of it as well.
  const Tensor many = randn({40, 8}), others = randn({40, 8});
  const Tensor distances = cdist(many, others);
  const AutocastGuard off(kBF16, false);
  EXPECT_EQ(distances.to_vector(), cdist(many, others).to_vector());
}

// ---- Integers of few bits -----------------------------------------------------------------------

using Values = std::vector<double>;
const double kInfinite = std::numeric_limits<double>::infinity();
const double kNaN = std::numeric_limits<double>::quiet_NaN();

// Values of torch 2.15: numbers and zero-dimensional tensors wrap to the common dtype first.
TEST(NarrowIntegers, NumbersWrapBeforeTheyAreCalculatedWith) {
  const Tensor x = tensor({3, 200, 7}).to(kU8);
  const Tensor minus_four = scalar_tensor(int64_t{-4}, kI64),
               large = scalar_tensor(int64_t{300}, kI64);
  EXPECT_EQ(minimum(x, minus_four).to_vector(), (Values{3, 200, 7}));
  EXPECT_EQ(maximum(x, minus_four).to_vector(), (Values{252, 252, 252}));
  EXPECT_EQ(maximum(x, large).to_vector(), (Values{44, 200, 44}));
  EXPECT_EQ(floor_divide(x, -4).to_vector(), (Values{0, 0, 0}));
  EXPECT_EQ(floor_divide(x, 300).to_vector(), (Values{0, 4, 0}));
  EXPECT_EQ(floor_divide(minus_four, x).to_vector(), (Values{84, 1, 36}));
  EXPECT_EQ(remainder(x, -4).to_vector(), (Values{3, 200, 7}));
  EXPECT_EQ(remainder(x, large).to_vector(), (Values{3, 24, 7}));
  EXPECT_EQ(remainder(minus_four, x).to_vector(), (Values{0, 52, 0}));
  EXPECT_EQ(fmod(x, -4).to_vector(), (Values{3, 200, 7}));
  EXPECT_EQ(fmod(x, 300).to_vector(), (Values{3, 24, 7}));
  EXPECT_EQ(pow(x, minus_four).to_vector(), (Values{177, 0, 161}));
  EXPECT_EQ(pow(minus_four, x).to_vector(), (Values{192, 0, 0}));
  EXPECT_EQ(add(x, -4).to_vector(), (Values{255, 196, 3}));
  EXPECT_EQ(mul(x, 300).to_vector(), (Values{132, 96, 52}));
  EXPECT_EQ(bitwise_and(x, minus_four).to_vector(), (Values{0, 200, 4}));
  EXPECT_EQ(minimum(x.to(kI32), scalar_tensor((int64_t{1} << 32) + 5, kI64)).to_vector(),
            (Values{3, 5, 5}));
  // Limits are no operands: they end where the dtype does.
  EXPECT_EQ(clamp(x, -4, std::nullopt).to_vector(), (Values{3, 200, 7}));
  EXPECT_EQ(clamp(x, 5, 300).to_vector(), (Values{5, 200, 7}));
  EXPECT_EQ(clamp(x, -4, 100).to_vector(), (Values{3, 100, 7}));
  EXPECT_THROW(clamp(x, 300, std::nullopt), ValueError);
  EXPECT_THROW(clamp(x, std::nullopt, -4), ValueError);
  EXPECT_THROW(clamp_(x.clone(), 300, 400), ValueError);
}

TEST(Losses, TripletsOfIntegersAreF32OfTheirOwnDifferences) {
  const Tensor x = tensor({3, 200, 7}).view({1, 3}).to(kU8);
  const Tensor loss = triplet_margin_loss(x, x + 1, x + 3);
  EXPECT_EQ(loss.dtype(), kF32);
  EXPECT_NEAR(loss.item(), 4.464080810546875, 1e-4);  // 1 - 2 is 255
  const Tensor wide = x.to(kI32);
  EXPECT_EQ(triplet_margin_loss(wide, wide + 1, wide + 3).item(), 0);
}

// ---- What is no number --------------------------------------------------------------------------

TEST(Losses, AGradientOfNaNIsNaNWhereTorchHasIt) {
  const auto gradient = [](const auto& loss) {
    const Tensor x = tensor({kNaN, 1.0, -kInfinite, kInfinite, 5.0}).to(kF32).set_requires_grad();
    loss(x, tensor({0.5, kNaN, 0.0, 1.0, 5.0}).to(kF32)).sum().backward();
    Values values = x.grad().to_vector();
    for (double& value : values) value = std::isnan(value) ? 99 : value;
    return values;
  };
  for (const double beta : {1.0, 2.0}) {
    EXPECT_EQ(gradient([&](const Tensor& x, const Tensor& t) {
                return smooth_l1_loss(x, t, Reduction::kNone, beta);
              }),
              (Values{99, 99, -1, 1, 0}));
  }
  EXPECT_EQ(
      gradient([](const Tensor& x, const Tensor& t) { return huber_loss(x, t, Reduction::kNone); }),
      (Values{99, 99, -1, 1, 0}));
  EXPECT_EQ(
      gradient([](const Tensor& x, const Tensor& t) { return l1_loss(x, t, Reduction::kNone); }),
      (Values{0, 0, -1, 1, 0}));
}

TEST(CtcLoss, AnImpossibleTargetHasAGradientOfNaN) {
  manual_seed(3);
  const Tensor logs = log_softmax(randn({3, 2, 4}), 2).detach();
  const Tensor targets = tensor({1, 1, 2, 1, 2, 3}, kI64).view({2, 3});
  const auto gradient = [&](std::initializer_list<double> steps, bool zero_infinity,
                            Reduction reduction) {
    const Tensor x = logs.clone().set_requires_grad();
    const Tensor loss = ctc_loss(x, targets, tensor(steps, kI64), tensor({3, 1}, kI64), 0,
                                 reduction, zero_infinity);
    loss.sum().backward();
    return x.grad();
  };
  const auto nans = [](const Tensor& x) { return isnan(x).sum().item(); };
  for (const Reduction reduction : {Reduction::kNone, Reduction::kMean, Reduction::kSum}) {
    const Tensor full_length = gradient({3, 3}, false, reduction);
    EXPECT_EQ(nans(full_length.select(1, 0)), 12);
    EXPECT_EQ(nans(full_length.select(1, 1)), 0);
    const Tensor shorter = gradient({2, 3}, false, reduction).select(1, 0);
    EXPECT_EQ(nans(shorter), 8);
    EXPECT_EQ(shorter.select(0, 2).to_vector(), Values(4, 0.0)) << "no step of the sample";
    EXPECT_EQ(gradient({0, 3}, false, reduction).select(1, 0).to_vector(), Values(12, 0.0));
    EXPECT_EQ(gradient({3, 3}, true, reduction).select(1, 0).to_vector(), Values(12, 0.0));
  }
}

TEST(GridSample, CoordinatesThatAreNoNumbersGiveWhatTorchGives) {
  const Tensor x = arange(1, 10).to(kF32).view({1, 1, 3, 3});
  const Tensor grid =
      tensor({kNaN, 0.2, 0.2, kNaN, kNaN, kNaN, kInfinite, 0.0, -kInfinite, 0.5, 0.2, 0.2})
          .to(kF32)
          .view({1, 1, 6, 2});
  const auto sampled = [&](Interpolation mode, GridPadding padding) {
    Values values = grid_sample(x, grid, mode, padding, false).to_vector();
    for (double& value : values) value = std::isnan(value) ? 99 : std::round(value * 1e4) / 1e4;
    return values;
  };
  const Interpolation linear = Interpolation::kLinear, nearest = Interpolation::kNearest;
  EXPECT_EQ(sampled(linear, GridPadding::kZeros), (Values{99, 99, 99, 99, 99, 6.2}));
  EXPECT_EQ(sampled(linear, GridPadding::kBorder), (Values{4.9, 2.3, 1, 6, 6.25, 6.2}));
  EXPECT_EQ(sampled(linear, GridPadding::kReflection), (Values{4.9, 2.3, 1, 4, 6.25, 6.2}));
  EXPECT_EQ(sampled(nearest, GridPadding::kZeros), (Values{0, 0, 0, 0, 0, 5}));
  EXPECT_EQ(sampled(nearest, GridPadding::kBorder), (Values{4, 2, 1, 6, 7, 5}));
  EXPECT_EQ(sampled(nearest, GridPadding::kReflection), (Values{4, 2, 1, 4, 7, 5}));
  const Tensor volume = arange(1, 9).to(kF32).view({1, 1, 2, 2, 2});
  const Tensor places = tensor({kNaN, 0.2, 0.0, 0.2, 0.0, kNaN}).to(kF32).view({1, 1, 1, 2, 3});
  EXPECT_EQ(grid_sample(volume, places, linear).to_vector(), (Values{0, 0}));
}

TEST(GridSample, TheNearestHasGradientsOfZeroForTheGrid) {
  const Tensor grid =
      tensor({0.2, -0.3, kNaN, 0.5}).to(kF32).view({1, 1, 2, 2}).set_requires_grad();
  const Tensor y = grid_sample(ones({1, 1, 3, 3}), grid, Interpolation::kNearest);
  ASSERT_TRUE(y.requires_grad());
  y.sum().backward();
  EXPECT_EQ(grid.grad().to_vector(), Values(4, 0.0));
}

// ---- Sizes and windows --------------------------------------------------------------------------

TEST(Interpolate, AFactorThatLeavesTheSizeLeavesTheElements) {
  const Tensor x = tensor({0, 1, 2, 4, 8}).to(kF32).view({1, 1, 5});
  for (const double factor : {1.0, 1.19}) {
    EXPECT_EQ(interpolate(x, {}, std::vector<double>{factor}, Interpolation::kLinear).to_vector(),
              x.to_vector());
  }
  // An axis alone.
  const Tensor plane = arange(0, 25).to(kF32).view({1, 1, 5, 5});
  const Tensor y = interpolate(plane, {}, std::vector<double>{1.19, 1.5}, Interpolation::kLinear);
  EXPECT_EQ(y.shape(), (Shape{1, 1, 5, 7}));
  EXPECT_EQ(y.select(3, 0).to_vector(), (Values{0, 5, 10, 15, 20}));
}

TEST(MaxPool, AWindowOfPaddingAloneIsNowhere) {
  for (const auto& [size, dilation] : {std::pair(1, 2), std::pair(3, 4)}) {
    const Tensor x = ones({1, 1, size, size}).set_requires_grad();
    const auto [values, indices] = max_pool2d_with_indices(x, {2}, {3}, {1}, {dilation});
    EXPECT_EQ(values.to_vector(), (Values{-kInfinite}));
    EXPECT_EQ(indices.to_vector(), (Values{static_cast<double>(size * size)}));
    values.sum().backward();
    EXPECT_EQ(x.grad().to_vector(), Values(static_cast<size_t>(size * size), 0.0));
  }
}

TEST(Extrema, AZeroIsPositiveWhicheverCameFirst) {
  for (const double first : {0.0, -0.0}) {
    const Tensor x = tensor({first, -first}).to(kF32);
    for (const Tensor& y : {max(x), min(x), amax(x), amin(x)}) {
      EXPECT_FALSE(std::signbit(y.item<float>()));
    }
  }
}

}  // namespace
}  // namespace tessera::test_op_edges
