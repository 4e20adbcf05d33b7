// ctest instruction sets
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/kernels/loss/linear_cross_entropy.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels::test_matmul {
namespace {

const DType kDTypes[] = {kF64, kF32, kF16, kBF16};

Tensor random_tensor(const Shape& shape, DType dtype, uint32_t seed) {
  const Tensor x = raw::empty(shape, dtype);
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  dispatch_floating(dtype, "test", [&]<class T>() {
    for (int64_t i = 0; i < x.numel(); ++i) x.data_as<T>()[i] = store<T>(normal(generator));
  });
  return x;
}

// a: [B, M, K], b: [B, K, N] with strides of any kind.
void expect_product(const Tensor& result, const Tensor& a, const Tensor& b) {
  const std::vector<double> y = result.to_vector(), left = a.to_vector(), right = b.to_vector();
  const int64_t B = a.size(0), M = a.size(1), K = a.size(2), N = b.size(2);
  ASSERT_EQ(static_cast<int64_t>(y.size()), B * M * N);
  const double sum_eps = result.dtype() == kF64 ? 0x1p-53 : 0x1p-24;
  for (int64_t i = 0; i < B; ++i) {
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t n = 0; n < N; ++n) {
        double reference = 0, absolute = 0;
        for (int64_t k = 0; k < K; ++k) {
          const double term = left[static_cast<size_t>((i * M + m) * K + k)] *
                              right[static_cast<size_t>((i * K + k) * N + n)];
          reference += term;
          absolute += std::abs(term);
        }
        ASSERT_NEAR(y[static_cast<size_t>((i * M + m) * N + n)], reference,
                    epsilon_of(result.dtype()) * std::abs(reference) +
                        4 * sum_eps * std::sqrt(static_cast<double>(K)) * absolute)
            << result << " at " << i << "," << m << "," << n;
      }
    }
  }
}

TEST(Matmul, TransposedSlicedAndBroadcastOperandsAreReadInPlace) {
  for (DType dtype : kDTypes) {
    const Tensor a = random_tensor({3, 17, 20}, dtype, 1), b = random_tensor({3, 20, 9}, dtype, 2);
    expect_product(kernels::matmul(a, b), a, b);
    const Tensor at = raw::transpose(random_tensor({3, 20, 17}, dtype, 3), 1, 2);
    const Tensor bt = raw::transpose(random_tensor({9, 20, 3}, dtype, 4), 0, 2);
    expect_product(kernels::matmul(at, bt), at, bt);
    const Tensor every_second = raw::slice(random_tensor({3, 34, 40}, dtype, 5), 1, 0, 34, 2);
    const Tensor sliced = raw::slice(every_second, 2, 1, 40, 2);
    expect_product(kernels::matmul(sliced, b), sliced, b);
    const Tensor one = raw::expand(random_tensor({1, 20, 9}, dtype, 6), {3, 20, 9});
    expect_product(kernels::matmul(a, one), a, one);
    const Tensor repeated = raw::expand(random_tensor({3, 1, 20}, dtype, 7), {3, 17, 20});
    expect_product(kernels::matmul(repeated, b), repeated, b);
  }
}

TEST(Matmul, BatchesBroadcast) {
  const Tensor a = random_tensor({2, 1, 5, 4}, kF64, 1), b = random_tensor({3, 4, 6}, kF64, 2);
  const Tensor result = kernels::matmul(a, b);
  ASSERT_EQ(result.shape(), (Shape{2, 3, 5, 6}));
  for (int64_t i = 0; i < 2; ++i) {
    expect_product(raw::select(result, 0, i), raw::expand(raw::select(a, 0, i), {3, 5, 4}), b);
  }
}

TEST(Matmul, LinearAddsItsBiasToEveryRowOfAnyShape) {
  for (DType dtype : kDTypes) {
    const Tensor x = random_tensor({2, 5, 12}, dtype, 1), weight = random_tensor({7, 12}, dtype, 2);
    const Tensor zero = random_tensor({7}, dtype, 3);
    const std::vector<double> bias = zero.to_vector();
    const std::vector<double> with = kernels::linear(x, weight, zero).to_vector();
    const std::vector<double> without = kernels::linear(x, weight, {}).to_vector();
    for (size_t i = 0; i < with.size(); ++i) {
      // Two roundings against one.
      EXPECT_NEAR(with[i], without[i] + bias[i % 7],
                  2 * epsilon_of(dtype) * (std::abs(without[i]) + std::abs(bias[i % 7])));
    }
    EXPECT_EQ(kernels::linear(raw::select(raw::select(x, 0, 1), 0, 2), weight, {}).shape(),
              Shape{7});
    // Rows that no single stride describes.
    const Tensor swapped = raw::transpose(x, 0, 1);
    const Tensor rows = kernels::linear(swapped, weight, {});
    ASSERT_EQ(rows.shape(), (Shape{5, 2, 7}));
    expect_product(rows, swapped, raw::expand(raw::transpose(weight, 0, 1), {5, 12, 7}));
  }
}

TEST(Matmul, AddmmScalesBothSides) {
  const Tensor x = random_tensor({1, 6}, kF64, 1), a = random_tensor({4, 5}, kF64, 2);
  const Tensor b = random_tensor({5, 6}, kF64, 3);
  const std::vector<double> y = addmm(x, a, b, -2, 0.5).to_vector();
  const std::vector<double> product = kernels::matmul(a, b).to_vector(), row = x.to_vector();
  for (size_t i = 0; i < y.size(); ++i) {
    EXPECT_NEAR(y[i], -2 * row[i % 6] + 0.5 * product[i], 1e-13);
  }
}

TEST(Matmul, EmptyInnerDimensionGivesZeros) {
  for (double value :
       kernels::matmul(raw::empty({3, 0}, kF32), raw::empty({0, 2}, kF32)).to_vector()) {
    EXPECT_EQ(value, 0);
  }
}

TEST(Matmul, MetaTensorsGiveShapes) {
  const Tensor result =
      kernels::matmul(raw::empty({4, 1, 3, 5}, kBF16, kMeta), raw::empty({2, 5, 6}, kBF16, kMeta));
  EXPECT_EQ(result.shape(), (Shape{4, 2, 3, 6}));
  EXPECT_EQ(result.dtype(), kBF16);
  EXPECT_TRUE(result.is_meta());
}

// Loss and gradients by the definition, in f64.
TEST(LinearCrossEntropy, MatchesTheDefinition) {
  const int64_t N = 23, C = 6, V = 37;
  for (DType dtype : kDTypes) {
    const Tensor x = random_tensor({N, C}, dtype, 1), weight = random_tensor({V, C}, dtype, 2);
    const Tensor target = raw::empty({N}, kI64);
    for (int64_t i = 0; i < N; ++i) target.data_as<int64_t>()[i] = i % 5 == 3 ? -100 : i * 7 % V;
    const auto result = linear_cross_entropy(x, weight, target, -100, true, true, true);
    const std::vector<double> xs = x.to_vector(), ws = weight.to_vector();
    std::vector<double> grad_x(xs.size()), grad_weight(ws.size());
    double loss = 0, counted = 0;
    for (int64_t i = 0; i < N; ++i) counted += target.data_as<int64_t>()[i] >= 0;
    for (int64_t i = 0; i < N; ++i) {
      const int64_t label = target.data_as<int64_t>()[i];
      if (label < 0) continue;
      std::vector<double> p(static_cast<size_t>(V));
      double sum = 0;
      for (int64_t v = 0; v < V; ++v) {
        double logit = 0;
        for (int64_t c = 0; c < C; ++c) {
          logit += xs[static_cast<size_t>(i * C + c)] * ws[static_cast<size_t>(v * C + c)];
        }
        if (v == label) loss -= logit / counted;
        sum += p[static_cast<size_t>(v)] = std::exp(logit);
      }
      loss += std::log(sum) / counted;
      for (int64_t v = 0; v < V; ++v) {
        const double d = (p[static_cast<size_t>(v)] / sum - (v == label)) / counted;
        for (int64_t c = 0; c < C; ++c) {
          grad_x[static_cast<size_t>(i * C + c)] += d * ws[static_cast<size_t>(v * C + c)];
          grad_weight[static_cast<size_t>(v * C + c)] += d * xs[static_cast<size_t>(i * C + c)];
        }
      }
    }
    // Logits are f32 sums; the gradient of a narrow type is rounded before its products.
    const double eps = dtype == kF64 ? 1e-14 : dtype == kF32 ? 1e-6 : 2 * epsilon_of(dtype);
    EXPECT_NEAR(result.loss.item(), loss, (dtype == kF64 ? 1e-14 : 1e-6) * std::abs(loss) * 4);
    const std::vector<double> gx = result.grad_x.to_vector(), gw = result.grad_weight.to_vector();
    const double factor = result.gradient_factor;
    for (size_t i = 0; i < gx.size(); ++i) EXPECT_NEAR(gx[i] * factor, grad_x[i], eps);
    for (size_t i = 0; i < gw.size(); ++i) EXPECT_NEAR(gw[i] * factor, grad_weight[i], eps);
  }
}

// Logits 0, -1, -2, ..., -199 and their gradients exp(-v) / sum: those that would be denormal
// numbers, on which processors are slow, are zeros.
TEST(LinearCrossEntropy, GradientsOfExtremeLogitsAreNormalNumbersOrZero) {
  const int64_t N = 3, V = 200;
  for (DType dtype : {kF32, kBF16}) {
    const Tensor x = raw::empty({N, 1}, dtype), weight = raw::empty({V, 1}, dtype);
    const Tensor target = raw::empty({N}, kI64);
    for (int64_t i = 0; i < N; ++i) target.data_as<int64_t>()[i] = 0;
    dispatch_floating(dtype, "test", [&]<class T>() {
      for (int64_t i = 0; i < N; ++i) x.data_as<T>()[i] = store<T>(1.0f);
      for (int64_t v = 0; v < V; ++v) {
        weight.data_as<T>()[v] = store<T>(-static_cast<float>(v));
      }
    });
    const auto result = linear_cross_entropy(x, weight, target, -100, false, true, true);
    const double sum = 1 / (1 - std::exp(-1.0));
    EXPECT_NEAR(result.loss.item(), 3 * std::log(sum), 1e-5);
    const std::vector<double> gradient = result.grad_weight.to_vector();
    for (int64_t v = 0; v < V; ++v) {
      const double expected = 3 * (std::exp(-static_cast<double>(v)) / sum - (v == 0));
      const double value = gradient[static_cast<size_t>(v)];
      if (value == 0) {
        EXPECT_LT(expected, 1e-29) << "class " << v;
      } else {
        EXPECT_NEAR(value, expected, std::abs(expected) * 4 * epsilon_of(dtype)) << "class " << v;
        EXPECT_GE(std::abs(value), 1.1754944e-38) << "class " << v;
      }
    }
    EXPECT_EQ(gradient.back(), 0);
  }
}

TEST(LinearCrossEntropy, ATargetOutsideTheClassesNamesItsPosition) {
  const Tensor x = random_tensor({2, 3}, kF32, 1), weight = random_tensor({4, 3}, kF32, 2);
  const Tensor target = raw::empty({2}, kI32);
  target.data_as<int32_t>()[0] = 1;
  target.data_as<int32_t>()[1] = 4;
  try {
    linear_cross_entropy(x, weight, target, -100, true, false, false);
    FAIL();
  } catch (const IndexError& error) {
    EXPECT_NE(std::string(error.what()).find("target 4 at position [1]"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace tessera::kernels::test_matmul
