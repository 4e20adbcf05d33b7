#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/loss/cross_entropy.h>
#include <tessera/core/parallel.h>

#include "message_of.h"

namespace tessera::test_loss {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor indices(std::vector<int64_t> values) {
  return tensor(std::span<const int64_t>(values), {static_cast<int64_t>(values.size())});
}
// Logits that differ from each other, in [-scale, scale].
Tensor logits(int64_t rows, int64_t classes, DType dtype = kF32, double scale = 3) {
  std::vector<double> values;
  for (int64_t i = 0; i < rows * classes; ++i) {
    values.push_back(scale * std::sin(static_cast<double>(i) * 1.7 + 0.3));
  }
  return tensor(std::span<const double>(values), {rows, classes}, dtype);
}
using Function = std::function<Tensor(const TensorList&)>;
void expect_gradients(const Function& f, const TensorList& inputs, bool twice) {
  const auto list = [&](const TensorList& in) { return TensorList{f(in)}; };
  const GradcheckResult once = gradcheck(list, inputs);
  EXPECT_TRUE(once.ok) << once.message;
  if (!twice) return;
  const GradcheckResult second = gradgradcheck(list, inputs);
  EXPECT_TRUE(second.ok) << "second derivatives: " << second.message;
}
void expect_close(const Tensor& a, const Tensor& b, double tolerance) {
  ASSERT_EQ(a.shape(), b.shape());
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], tolerance) << "at " << i;
}

// torch.nn.functional.cross_entropy(tensor([[1., 2., 0.5], [-1., 0., 3.]]), tensor([1, 0]), ...)
TEST(CrossEntropy, gives_the_numbers_of_torch) {
  const Tensor x =
      tensor(std::span<const double>(std::vector<double>{1, 2, 0.5, -1, 0, 3}), {2, 3});
  const Tensor t = indices({1, 0});
  const Tensor w = tensor({0.2, 1.0, 0.7});
  EXPECT_NEAR(cross_entropy(x, t).item(), 2.265126344, 1e-6);
  EXPECT_NEAR(cross_entropy(x, t, {.weight = w}).item(), 1.064621304, 1e-6);
  EXPECT_NEAR(cross_entropy(x, t, {.weight = w, .label_smoothing = 0.1}).item(), 1.126422510, 1e-6);
  EXPECT_NEAR(cross_entropy(x, t, {.ignore_index = 0, .reduction = Reduction::kSum}).item(),
              0.464368784, 1e-6);
}

TEST(CrossEntropy, is_nll_of_log_softmax_with_every_option_for_long_rows_too) {
  for (int64_t classes : {3, 1000, 1024, 1025, 5000}) {
    const Tensor x = logits(6, classes, kF64).set_requires_grad();
    const Tensor z = logits(6, classes, kF64).set_requires_grad();
    const Tensor t = indices({0, classes - 1, 1, -100, 2, classes / 2});
    std::vector<double> values(static_cast<size_t>(classes));
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.1 + static_cast<double>(i % 7);
    const Tensor w = tensor(std::span<const double>(values), {classes}, kF64);
    for (Reduction reduction : {Reduction::kMean, Reduction::kSum, Reduction::kNone}) {
      const Tensor fused = cross_entropy(x, t, {.weight = w, .reduction = reduction});
      const Tensor composed = nll_loss(log_softmax(z, 1), t, {.weight = w, .reduction = reduction});
      expect_close(fused, composed, 1e-12 * static_cast<double>(classes));
      x.zero_grad();
      z.zero_grad();
      sum(fused).backward();
      sum(composed).backward();
      expect_close(x.grad(), z.grad(), 1e-13);
    }
  }
}

TEST(CrossEntropy, ignored_rows_count_for_nothing) {
  const Tensor x = logits(4, 5).set_requires_grad();
  const Tensor t = indices({1, 7, 7, 3});
  cross_entropy(x, t, {.ignore_index = 7}).backward();
  const std::vector<double> grad = x.grad().to_vector<double>();
  for (size_t i = 5; i < 15; ++i) EXPECT_EQ(grad[i], 0);
  EXPECT_NE(grad[0], 0);
  const Tensor each = cross_entropy(x, t, {.ignore_index = 7, .reduction = Reduction::kNone});
  EXPECT_EQ(each.to_vector<double>()[1], 0);
}

TEST(CrossEntropy, of_ignored_rows_alone_is_NaN_for_the_mean_and_0_for_the_sum) {
  const Tensor x = logits(2, 3), t = indices({-100, -100});
  EXPECT_TRUE(std::isnan(cross_entropy(x, t).item()));
  EXPECT_TRUE(std::isnan(nll_loss(log_softmax(x, 1), t).item()));
  EXPECT_EQ(cross_entropy(x, t, {.reduction = Reduction::kSum}).item(), 0);
}

TEST(CrossEntropy, in_place_of_ignored_rows_alone_has_a_gradient_of_0_in_every_dtype) {
  for (DType dtype : {kF32, kBF16, kF16}) {
    const Tensor x = logits(2, 3, dtype).set_requires_grad();
    const Tensor loss = cross_entropy_inplace(mul(x, 1), indices({-100, -100}));
    EXPECT_TRUE(std::isnan(loss.item())) << name_of(dtype);
    loss.backward();
    EXPECT_EQ(x.grad().to_vector(), std::vector<double>(6, 0.0)) << name_of(dtype);
  }
}

TEST(CrossEntropy, a_target_outside_the_classes_is_named) {
  const std::string message = message_of<IndexError>([] {
    cross_entropy(logits(3, 4), indices({0, 4, 1}));
  });
  EXPECT_NE(message.find("target 4 at position [1] is outside [0, 4)"), std::string::npos)
      << message;
  EXPECT_THROW(nll_loss(logits(3, 4), indices({0, -1, 1})), IndexError);
  EXPECT_THROW(cross_entropy_inplace(logits(3, 4), indices({0, 9, 1})), IndexError);
  EXPECT_THROW(cross_entropy(logits(3, 4), indices({0, 1})), ShapeError);
  EXPECT_THROW(cross_entropy(logits(3, 4), indices({0, 1, 2}), {.weight = tensor({1.0})}),
               ShapeError);
}

TEST(CrossEntropy, large_and_infinite_logits_stay_exact) {
  const Tensor x =
      tensor(std::span<const double>(std::vector<double>{1000, 0, -kInfinity, 5}), {2, 2});
  EXPECT_EQ(cross_entropy(x, indices({0, 1}), {.reduction = Reduction::kNone}).to_vector<double>(),
            (std::vector<double>{0, 0}));
  EXPECT_EQ(cross_entropy(x, indices({1, 0}), {.reduction = Reduction::kNone}).to_vector<double>(),
            (std::vector<double>{1000, kInfinity}));
}

TEST(CrossEntropy, takes_images_and_vectors) {
  const Tensor x = reshape(logits(6, 5, kF64), {2, 3, 5});  // [N, C, d]
  const Tensor t = reshape(indices({0, 1, 2, 2, 1, 0, 1, 1, 2, 0}), {2, 5});
  const Tensor rows = reshape(permute(x, {0, 2, 1}), {10, 3});
  const Tensor flat = reshape(t, {10});
  EXPECT_NEAR(cross_entropy(x, t).item(), cross_entropy(rows, flat).item(), 1e-14);
  EXPECT_EQ(cross_entropy(x, t, {.reduction = Reduction::kNone}).shape(), (Shape{2, 5}));
  EXPECT_NEAR(cross_entropy(select(rows, 0, 3), select(flat, 0, 3)).item(),
              cross_entropy(narrow(rows, 0, 3, 1), narrow(flat, 0, 3, 1)).item(), 1e-14);
  const Tensor leaf = clone(x).set_requires_grad();
  expect_gradients([&](const TensorList& in) { return cross_entropy(in[0], t); }, {leaf}, true);
}

TEST(CrossEntropy, probabilities_as_targets_agree_with_indices_and_have_gradients) {
  const Tensor x = logits(3, 4, kF64).set_requires_grad();
  const Tensor t = indices({2, 0, 3});
  const Tensor hot = to(one_hot(t, 4), kF64).set_requires_grad();
  EXPECT_NEAR(cross_entropy(x, hot).item(), cross_entropy(x, t).item(), 1e-14);
  EXPECT_NEAR(cross_entropy(x, hot, {.label_smoothing = 0.3}).item(),
              cross_entropy(x, t, {.label_smoothing = 0.3}).item(), 1e-14);
  expect_gradients([](const TensorList& in) { return cross_entropy(in[0], in[1]); }, {x, hot},
                   true);
}

TEST(CrossEntropy, has_second_derivatives) {
  const Tensor x = logits(3, 4, kF64).set_requires_grad();
  const Tensor t = indices({2, -100, 3});
  expect_gradients(
      [&](const TensorList& in) { return cross_entropy(in[0], t, {.label_smoothing = 0.1}); }, {x},
      true);
}

TEST(CrossEntropy, in_place_leaves_the_gradient_in_the_logits) {
  for (DType dtype : {kF32, kBF16}) {
    const Tensor source = logits(40, 300, dtype).set_requires_grad();
    std::vector<int64_t> values;
    for (int64_t i = 0; i < 40; ++i) values.push_back(i % 5 == 0 ? -100 : i * 7 % 300);
    const Tensor t = indices(values);
    const Tensor plain = cross_entropy(source, t);
    plain.backward();
    const Tensor expected = source.grad();
    source.zero_grad();
    const Tensor work = mul(source, 1);
    const Tensor loss = cross_entropy_inplace(work, t);
    EXPECT_NEAR(loss.item(), plain.item(), 2 * epsilon_of(dtype) * plain.item());
    loss.backward();
    expect_close(source.grad(), expected, epsilon_of(dtype) * 0.05);
    expect_close(detach(work), expected, epsilon_of(dtype) * 0.05);
  }
}

TEST(CrossEntropy, does_not_depend_on_the_thread_count) {
  const Tensor x = logits(300, 500), t = indices(std::vector<int64_t>(300, 3));
  const int threads = num_threads();
  std::vector<std::vector<float>> grads;
  std::vector<double> losses;
  for (int count : {1, 2}) {
    set_num_threads(count);
    const Tensor leaf = clone(x).set_requires_grad();
    const Tensor loss = cross_entropy(leaf, t);
    loss.backward();
    losses.push_back(loss.item());
    grads.push_back(leaf.grad().to_vector<float>());
  }
  set_num_threads(threads);
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_EQ(grads[0], grads[1]);
}

// ---- Pointwise ----------------------------------------------------------------------------------

TEST(Losses, give_the_numbers_of_torch) {
  const Tensor x = tensor({0.5, -1.0, 2.0}), t = tensor({0.0, 1.0, 1.5});
  EXPECT_NEAR(mse_loss(x, t).item(), 1.5, 1e-6);
  EXPECT_NEAR(l1_loss(x, t, Reduction::kSum).item(), 3.0, 1e-6);
  EXPECT_NEAR(smooth_l1_loss(x, t).item(), (0.125 + 1.5 + 0.125) / 3, 1e-6);
  EXPECT_NEAR(huber_loss(x, t, Reduction::kSum, 0.7).item(), 0.125 + 0.7 * 1.65 + 0.125, 1e-6);
  const Tensor p = tensor({0.2, 0.7, 1.0}), y = tensor({0.0, 1.0, 0.3});
  EXPECT_NEAR(binary_cross_entropy(p, y).item(), 23.526606165, 1e-4);
  EXPECT_NEAR(binary_cross_entropy_with_logits(x, y, {}, Reduction::kMean, tensor({3.0})).item(),
              2.172315621, 1e-6);
  EXPECT_NEAR(kl_div(log(tensor({0.2, 0.7, 0.1})), tensor({0.0, 0.6, 0.4})).item(), 0.154009112,
              1e-6);
}

TEST(Losses, binary_cross_entropy_is_bounded_at_0_and_1_and_refuses_what_is_outside) {
  const Tensor x = tensor({0.0, 1.0}).set_requires_grad();
  const Tensor loss = binary_cross_entropy(x, tensor({1.0, 0.0}), {}, Reduction::kSum);
  EXPECT_EQ(loss.item(), 200);
  loss.backward();
  for (double g : x.grad().to_vector<double>()) EXPECT_TRUE(std::isfinite(g));
  EXPECT_THROW(binary_cross_entropy(tensor({1.5}), tensor({1.0})), ValueError);
}

TEST(Losses, with_logits_holds_for_large_logits) {
  const Tensor x = tensor({1000.0, -1000.0}).set_requires_grad();
  const Tensor loss = binary_cross_entropy_with_logits(x, tensor({0.0, 1.0}), {}, Reduction::kNone);
  EXPECT_EQ(loss.to_vector<double>(), (std::vector<double>{1000, 1000}));
  sum(loss).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (std::vector<double>{1, -1}));
}

TEST(Losses, have_first_and_second_derivatives) {
  const Tensor x = logits(2, 3, kF64, 0.9).set_requires_grad();
  const Tensor t = add(logits(2, 3, kF64, 0.4), 0.07).set_requires_grad();
  const std::vector<std::function<Tensor(const Tensor&, const Tensor&)>> losses = {
      [](auto& a, auto& b) { return mse_loss(a, b); },
      [](auto& a, auto& b) { return l1_loss(a, b, Reduction::kSum); },
      [](auto& a, auto& b) { return smooth_l1_loss(a, b, Reduction::kMean, 0.3); },
      [](auto& a, auto& b) { return huber_loss(a, b, Reduction::kNone, 0.3); },
      [](auto& a, auto& b) { return binary_cross_entropy_with_logits(a, b); },
      [](auto& a, auto& b) { return kl_div(a, b, KlReduction::kBatchMean, true); },
  };
  for (size_t i = 0; i < losses.size(); ++i) {
    const auto f = [&](const TensorList& in) { return losses[i](in[0], in[1]); };
    const Tensor a = detach(x).set_requires_grad(), b = detach(t).set_requires_grad();
    SCOPED_TRACE(i);
    expect_gradients(f, {a, b}, true);
  }
}

TEST(Losses, of_meta_tensors_have_shapes) {
  const Tensor x = empty({4, 5}, {kBF16, kMeta}), t = empty({4}, {kI64, kMeta});
  EXPECT_EQ(cross_entropy(x, t).shape(), Shape{});
  EXPECT_EQ(cross_entropy(x, t, {.reduction = Reduction::kNone}).dtype(), kBF16);
  EXPECT_EQ(mse_loss(x, x, Reduction::kNone).shape(), (Shape{4, 5}));
}

// As one op it keeps gradients instead of logits, and says so.
TEST(LinearCrossEntropy, HasSecondDerivativesWhereTheyAreAskedFor) {
  const Tensor x = randn({5, 3}, {.dtype = kF64}), weight = randn({4, 3}, {.dtype = kF64});
  const Tensor target = tensor({0, 3, 1, -100, 2}, kI64);
  for (const Reduction reduction : {Reduction::kMean, Reduction::kSum}) {
    const auto loss = [&](const TensorList& in) {
      return TensorList{linear_cross_entropy(in[0], in[1], target, -100, reduction, true)};
    };
    for (const Tensor& leaf : {x, weight}) leaf.set_requires_grad();
    EXPECT_TRUE(gradgradcheck(loss, {x, weight}).ok);
    const Tensor whole = loss({x, weight})[0];
    const Tensor one = linear_cross_entropy(x, weight, target, -100, reduction);
    EXPECT_NEAR(one.item(), whole.item(), 1e-14 * std::abs(whole.item()));
  }
  const Tensor first =
      grad(linear_cross_entropy(x, weight, target), {x}, {}, {.create_graph = true})[0];
  const std::string text = message_of<UnsupportedError>([&] { grad(first.square().sum(), {x}); });
  EXPECT_TRUE(mentions(text, "which its argument twice_differentiable does")) << text;
}

}  // namespace
}  // namespace tessera::test_loss
