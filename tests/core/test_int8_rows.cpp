// ctest instruction sets
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/gemm/int8_rows.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels::test_int8_rows {
namespace {

template <class T>
struct Case {
  int64_t m, n, k;
  int64_t x_stride, weight_stride, y_stride;
  std::vector<T> x, bias, y;
  std::vector<int8_t> weight;
  std::vector<float> absmax;

  Case(int64_t m, int64_t n, int64_t k, int64_t gap = 0)
      : m(m), n(n), k(k), x_stride(k + gap), weight_stride(k + gap), y_stride(n + gap) {
    std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<T>& to, int64_t size) {
      to.resize(static_cast<size_t>(size));
      for (T& each : to) each = store<T>(normal(generator));
    };
    fill(x, m * x_stride), fill(bias, n), fill(y, m * y_stride);
    for (int64_t i = 0; i < n * weight_stride; ++i) {
      weight.push_back(static_cast<int8_t>(static_cast<int>(generator() % 256) - 128));
    }
    for (int64_t i = 0; i < n; ++i) absmax.push_back(std::exp(normal(generator)));
  }
  Int8Rows problem(bool with_bias) {
    return {.m = m,
            .n = n,
            .k = k,
            .dtype = dtype_of<T>,
            .x = x.data(),
            .x_row_stride = x_stride,
            .weight = weight.data(),
            .weight_row_stride = weight_stride,
            .absmax = absmax.data(),
            .bias = with_bias ? bias.data() : nullptr,
            .y = y.data(),
            .y_row_stride = y_stride};
  }
};

template <class T>
double at(const std::vector<T>& numbers, int64_t i) {
  return load<double>(numbers[static_cast<size_t>(i)]);
}

// Against f64: (k + 3) eps of f32 of the terms, and one rounding to T.
template <class T>
void expect_product(Case<T> one, bool with_bias) {
  const std::vector<T> before = one.y;
  int8_rows(one.problem(with_bias));
  const double eps = 0x1p-24, eps_of_result = epsilon_of(dtype_of<T>) / 2;
  for (int64_t i = 0; i < one.m; ++i) {
    for (int64_t j = 0; j < one.n; ++j) {
      double sum = 0, terms = 0;
      const double scale = int8_scale(one.absmax[static_cast<size_t>(j)]);
      for (int64_t e = 0; e < one.k; ++e) {
        const double term = at(one.x, i * one.x_stride + e) *
                            one.weight[static_cast<size_t>(j * one.weight_stride + e)] * scale;
        sum += term;
        terms += std::abs(term);
      }
      if (with_bias) sum += at(one.bias, j), terms += std::abs(at(one.bias, j));
      const double bound =
          static_cast<double>(one.k + 3) * eps * terms + 2 * eps_of_result * std::abs(sum);
      ASSERT_NEAR(at(one.y, i * one.y_stride + j), sum, bound)
          << dtype_of<T> << " " << one.m << " x " << one.k << " to " << one.n << ": " << i << ", "
          << j;
    }
    for (int64_t j = one.n; j < one.y_stride; ++j) {
      ASSERT_EQ(at(one.y, i * one.y_stride + j), at(before, i * one.y_stride + j)) << "a gap";
    }
  }
}

template <class T>
void expect_products() {
  for (const auto& [m, n, k] : {std::tuple{1, 1, 1},
                                {1, 67, 517},
                                {2, 35, 100},
                                {3, 34, 1031},
                                {4, 5, 63},
                                {5, 130, 64},
                                {7, 33, 48},
                                {8, 37, 2100},
                                {13, 97, 130},
                                {16, 36, 1024},
                                {3, 4, 0}}) {
    expect_product(Case<T>(m, n, k), true);
    expect_product(Case<T>(m, n, k, 5), false);
  }
  int8_rows(Case<T>(0, 4, 4).problem(true));
}

TEST(Int8Rows, ProductsMatchF64) {
  expect_products<float>();
  expect_products<bf16>();
  expect_products<f16>();
}

TEST(Int8Rows, ARowHasTheSameBitsAloneAndOnAnyNumberOfThreads) {
  Case<float> all(8, 1333, 515);
  const int threads = num_threads();
  set_num_threads(1);
  int8_rows(all.problem(true));
  const std::vector<float> expected = all.y;
  set_num_threads(4);
  int8_rows(all.problem(true));
  EXPECT_EQ(all.y, expected);
  for (const auto& [first, rows] : {std::pair{0, 1}, {7, 1}, {3, 2}, {2, 6}}) {
    std::vector<float> alone(static_cast<size_t>(rows * all.n));
    Int8Rows problem = all.problem(true);
    problem.m = rows;
    problem.x = all.x.data() + first * all.x_stride;
    problem.y = alone.data();
    int8_rows(problem);
    EXPECT_EQ(
        std::memcmp(alone.data(), expected.data() + first * all.n, alone.size() * sizeof(float)), 0)
        << "rows " << first << " to " << first + rows;
  }
  set_num_threads(threads);
}

TEST(Int8Rows, OtherDtypesAndManyRowsAreRefused) {
  Case<double> wide(1, 4, 4);
  EXPECT_THROW(int8_rows(wide.problem(false)), DTypeError);
  Case<float> many(kMostInt8Rows + 1, 4, 4);
  EXPECT_THROW(int8_rows(many.problem(false)), Error);
}

}  // namespace
}  // namespace tessera::kernels::test_int8_rows
