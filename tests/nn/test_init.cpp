#include <tessera/nn/init.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include <tessera/autograd/ops.h>

namespace tessera::nn::test_init {
namespace {

struct Moments {
  double mean, std, low, high;
};
Moments moments_of(const Tensor& x) {
  const auto values = x.to_vector();
  double sum = 0, squares = 0;
  for (const double v : values) sum += v;
  const double n = static_cast<double>(values.size()), mean = sum / n;
  for (const double v : values) squares += (v - mean) * (v - mean);
  const auto [low, high] = std::ranges::minmax(values);
  return {mean, std::sqrt(squares / n), low, high};
}

constexpr RandomStream kStream{3, 14};
constexpr int64_t kRows = 400, kColumns = 250;
// Four standard errors of the mean of n draws with this deviation.
double mean_tolerance(double std) { return 4 * std / std::sqrt(double{kRows * kColumns}); }

TEST(Init, RulesOfOnesOwnFillByPlace) {
  const Tensor x = init::by_index(empty({7, 10007}, {.dtype = kF64}),
                                  [](int64_t i) { return 0.5 * static_cast<double>(i); });
  EXPECT_EQ(x.to_vector(), mul(arange(70049).to(kF64), 0.5).to_vector());
  // Of a view that is not contiguous too, row by row.
  const Tensor square = zeros({4, 4});
  init::by_range(square.t().narrow(0, 1, 2), [](const Tensor& piece, int64_t first) {
    EXPECT_EQ(piece.shape(), Shape{8});
    EXPECT_EQ(first, 0);
    piece.copy_(arange(8).to(kF32));
  });
  EXPECT_EQ(square.to_vector(),
            (std::vector<double>{0, 0, 4, 0, 0, 1, 5, 0, 0, 2, 6, 0, 0, 3, 7, 0}));
}

TEST(Init, UniformFillsItsRange) {
  const Tensor x = init::uniform(empty({kRows, kColumns}), -2, 3, kStream);
  const Moments m = moments_of(x);
  EXPECT_NEAR(m.mean, 0.5, mean_tolerance(5 / std::sqrt(12.0)));
  EXPECT_NEAR(m.std, 5 / std::sqrt(12.0), 0.02);
  EXPECT_GE(m.low, -2);
  EXPECT_LT(m.high, 3);
  EXPECT_LT(m.low, -1.99);
}

TEST(Init, NormalHasItsMoments) {
  const Moments m = moments_of(init::normal(empty({kRows, kColumns}), 1, 0.5, kStream));
  EXPECT_NEAR(m.mean, 1, mean_tolerance(0.5));
  EXPECT_NEAR(m.std, 0.5, 0.01);
}

TEST(Init, TruncatedNormalStaysInsideAndHasTheTruncatedMoments) {
  const Tensor x =
      init::trunc_normal(empty({kRows, kColumns}, {.dtype = kF64}), 0, 1, -1, 2, kStream);
  const Moments m = moments_of(x);
  EXPECT_GE(m.low, -1);
  EXPECT_LE(m.high, 2);
  // Mean and variance of a standard normal on [a, b]: (phi(a) - phi(b)) / Z and
  // 1 + (a phi(a) - b phi(b)) / Z - mean^2.
  const auto phi = [](double t) { return std::exp(-0.5 * t * t) / std::sqrt(2 * M_PI); };
  const double z = 0.5 * (std::erf(2 / std::sqrt(2.0)) - std::erf(-1 / std::sqrt(2.0)));
  const double mean = (phi(-1) - phi(2)) / z;
  const double variance = 1 + (-phi(-1) - 2 * phi(2)) / z - mean * mean;
  EXPECT_NEAR(m.mean, mean, mean_tolerance(1));
  EXPECT_NEAR(m.std, std::sqrt(variance), 0.01);
  EXPECT_THROW(init::trunc_normal(empty({2}), 0, 1, 50, 60), ValueError);
}

TEST(Init, ConstantsAndEye) {
  EXPECT_EQ(init::constant(empty({2}), 4).to_vector(), (std::vector<double>{4, 4}));
  EXPECT_EQ(init::ones(empty({2})).to_vector(), (std::vector<double>{1, 1}));
  EXPECT_EQ(init::zeros(empty({2})).to_vector(), (std::vector<double>{0, 0}));
  EXPECT_EQ(init::eye(empty({2, 3})).to_vector(), (std::vector<double>{1, 0, 0, 0, 1, 0}));
  EXPECT_THROW(init::eye(empty({2})), ShapeError);
}

TEST(Init, DiracPassesTheInputThrough) {
  const auto values = init::dirac(empty({4, 2, 3}), 2).to_vector();
  // Two groups of two: output 2 g + d takes input d of its group at the kernel's centre.
  for (size_t out = 0; out < 4; ++out) {
    for (size_t in = 0; in < 2; ++in) {
      for (size_t k = 0; k < 3; ++k) {
        EXPECT_EQ(values[(out * 2 + in) * 3 + k], in == out % 2 && k == 1 ? 1 : 0);
      }
    }
  }
}

TEST(Init, GainsAreTorchs) {
  using init::calculate_gain, init::Nonlinearity;
  EXPECT_EQ(calculate_gain(Nonlinearity::kLinear), 1);
  EXPECT_DOUBLE_EQ(calculate_gain(Nonlinearity::kTanh), 5.0 / 3);
  EXPECT_DOUBLE_EQ(calculate_gain(Nonlinearity::kRelu), std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(calculate_gain(Nonlinearity::kLeakyRelu, 0.2), std::sqrt(2 / 1.04));
  EXPECT_EQ(calculate_gain(Nonlinearity::kSelu), 0.75);
}

TEST(Init, FansCountTheKernel) {
  const init::Fans fans = init::calculate_fans(empty({6, 4, 3, 5}));
  EXPECT_EQ(fans.in, 4 * 15);
  EXPECT_EQ(fans.out, 6 * 15);
  EXPECT_THROW(init::calculate_fans(empty({6})), ShapeError);
}

TEST(Init, XavierAndKaimingHaveTheirDeviations) {
  const auto std_of = [](const Tensor& x) { return moments_of(x).std; };
  const Tensor x = empty({kRows, kColumns});
  const double xavier = std::sqrt(2.0 / (kRows + kColumns));
  EXPECT_NEAR(std_of(init::xavier_normal(x, 2, kStream)), 2 * xavier, 0.02 * xavier);
  EXPECT_NEAR(std_of(init::xavier_uniform(x, 1, kStream)), xavier, 0.02 * xavier);
  const double he = std::sqrt(2.0 / kColumns);
  EXPECT_NEAR(std_of(init::kaiming_normal(x, {.nonlinearity = init::Nonlinearity::kRelu}, kStream)),
              he, 0.02 * he);
  const double he_out = std::sqrt(2.0 / (1 + 0.25) / kRows);
  EXPECT_NEAR(
      std_of(init::kaiming_uniform(x, {.slope = 0.5, .mode = init::FanMode::kFanOut}, kStream)),
      he_out, 0.02 * he_out);
}

TEST(Init, OrthogonalRowsOrColumnsAreOrthonormal) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{5, 9}, {9, 5}, {6, 6}}) {
    const Tensor x = init::orthogonal(empty({rows, columns}, {.dtype = kF64}), 3, kStream);
    const auto values = x.to_vector();
    const int64_t count = std::min(rows, columns), length = std::max(rows, columns);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        double dot = 0;
        for (int64_t k = 0; k < length; ++k) {
          const auto at = [&](int64_t a) {
            return values[static_cast<size_t>(rows <= columns ? a * columns + k : k * columns + a)];
          };
          dot += at(i) * at(j);
        }
        EXPECT_NEAR(dot, i == j ? 9 : 0, 1e-13) << rows << "x" << columns;
      }
    }
  }
}

TEST(Init, SparseHasItsZerosInEveryColumn) {
  const auto values = init::sparse(empty({10, 8}), 0.25, 1, kStream).to_vector();
  for (size_t column = 0; column < 8; ++column) {
    int zeros = 0;
    for (size_t row = 0; row < 10; ++row) zeros += values[row * 8 + column] == 0;
    EXPECT_EQ(zeros, 3);  // ceil(0.25 * 10)
  }
}

TEST(Init, AStreamGivesTheSameValuesForAnyDTypeAndTime) {
  const Tensor once = init::normal(empty({1000}), 0, 1, kStream);
  rand({3});
  const Tensor again = init::normal(empty({1000}), 0, 1, kStream);
  EXPECT_EQ(once.to_vector(), again.to_vector());
  const Tensor half = init::normal(empty({1000}, {.dtype = kBF16}), 0, 1, kStream);
  EXPECT_EQ(half.to_vector(), once.to(kBF16).to_vector());
}

TEST(Init, WritesLeavesThatRequireGradAndRefusesIntegers) {
  const Tensor x = zeros({2}).set_requires_grad();
  EXPECT_NO_THROW(init::ones(x));
  EXPECT_TRUE(x.is_leaf());
  EXPECT_THROW(init::normal(empty({2}, {.dtype = kI64})), DTypeError);
}

}  // namespace
}  // namespace tessera::nn::test_init
