// f32 products of three bf16 parts, and attention made of them: their arithmetic, on tiles in plain
// C++.
// ctest own program: it links kernels of its own
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include <tessera/core/kernels/gemm/gemm_tile.h>

#include "core/split_tiles.h"

namespace tessera::tests::test_gemm_split {
namespace {

class SplitProduct : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_avx512()) GTEST_SKIP() << "no AVX-512 here, by which operands are packed";
  }
};

struct Operands {
  int64_t m, n, k;
  std::vector<float> a, b;  // (m, k), (k, n)

  template <class Number>
  Operands(int64_t rows, int64_t columns, int64_t depth, const Number& number)
      : m(rows), n(columns), k(depth) {
    std::mt19937 generator(7);
    for (int64_t i = 0; i < m * k; ++i) a.push_back(static_cast<float>(number(generator)));
    for (int64_t i = 0; i < k * n; ++i) b.push_back(static_cast<float>(number(generator)));
  }
};

struct Product {
  std::vector<float> values;
  int64_t tiles = 0;
};
template <class Multiply>
Product product(const Operands& x, const Multiply& multiply) {
  Product result{std::vector<float>(static_cast<size_t>(x.m * x.n), NAN)};
  std::vector<char> scratch(static_cast<size_t>(scratch_bytes(x.m, x.n)) + 64);
  auto* const aligned =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  const kernels::GemmTile tile{.m = x.m,
                               .n = x.n,
                               .k = x.k,
                               .dtype = kF32,
                               .a = x.a.data(),
                               .a_row_stride = x.k,
                               .a_column_stride = 1,
                               .b = x.b.data(),
                               .b_row_stride = x.n,
                               .b_column_stride = 1,
                               .sums = result.values.data(),
                               .sums_row_stride = x.n,
                               .accumulate = false,
                               .isa = kernels::Isa::kAmx,
                               .scratch = aligned};
  result.tiles = multiply(tile);
  return result;
}
Product on_tiles(const Operands& x) { return product(x, multiply_on_reference_tiles); }
Product in_registers(const Operands& x) {
  return product(x, [](const kernels::GemmTile& tile) {
    multiply_in_registers(tile);
    return int64_t{0};
  });
}

// The largest distance from the product in f64, in units of f32's rounding of sum |a b|.
double largest_error(const Operands& x, const std::vector<float>& c) {
  double largest = 0;
  for (int64_t i = 0; i < x.m; ++i) {
    for (int64_t j = 0; j < x.n; ++j) {
      double sum = 0, absolute = 0;
      for (int64_t q = 0; q < x.k; ++q) {
        const double term = static_cast<double>(x.a[static_cast<size_t>(i * x.k + q)]) *
                            static_cast<double>(x.b[static_cast<size_t>(q * x.n + j)]);
        sum += term;
        absolute += std::fabs(term);
      }
      const double away = std::fabs(static_cast<double>(c[static_cast<size_t>(i * x.n + j)]) - sum);
      // What f32 itself cannot hold: half of its smallest number, in each sum.
      const double allowed = 0x1p-24 * absolute + 0x1p-150 * static_cast<double>(x.k);
      if (allowed == 0 && away == 0) continue;
      largest = away / allowed <= largest ? largest : away / allowed;  // NaN stays
    }
  }
  return largest;
}

double symmetric(std::mt19937& g) { return std::uniform_real_distribution<double>(-1, 1)(g); }
double positive(std::mt19937& g) { return std::uniform_real_distribution<double>(0, 1)(g); }

void scale(std::vector<float>& values, double factor) {
  for (float& value : values) value = static_cast<float>(value * factor);
}

TEST_F(SplitProduct, OfOrdinaryNumbersIsMadeOnTilesWithThePrecisionOfF32) {
  const Operands x(33, 40, 200, symmetric);
  const Product c = on_tiles(x);
  // Two stretches of K of 112 and 88, padded to 128 and 96; six products of parts.
  EXPECT_EQ(c.tiles, 4 * 4 * 6 * (4 + 3));
  EXPECT_LT(largest_error(x, c.values), 4);
}

// An error of 4 roundings of sum |a b|, whatever the magnitude of the products.
TEST_F(SplitProduct, KeepsItsPrecisionOnSmallProductsAsOnLarge) {
  for (const auto& [of_a, of_b] : {std::pair{0x1p-40, 0x1p-50},
                                   {1e-17, 1e-17},
                                   {1e-18, 1e-18},
                                   {1e-36, 1e18},
                                   {1e-36, 1.0},
                                   {0x1p-130, 0x1p60},
                                   {0x1p-60, 0x1p-80},
                                   {0x1p61, 0x1p61},
                                   {0x1p100, 0x1p-110}}) {
    Operands x(40, 34, 70, symmetric);
    scale(x.a, of_a);
    scale(x.b, of_b);
    EXPECT_LT(largest_error(x, on_tiles(x).values), 4) << of_a << " x " << of_b;
  }
}

// Rows and columns of one tile that lie far apart: each keeps its own precision.
TEST_F(SplitProduct, KeepsThePrecisionOfEachRowAndColumn) {
  Operands x(48, 48, 64, symmetric);
  for (int64_t i = 0; i < 48; ++i) {
    for (int64_t q = 0; q < 64; ++q) {
      x.a[static_cast<size_t>(i * 64 + q)] *= std::ldexp(1.0f, static_cast<int>(-i));
      x.b[static_cast<size_t>(q * 48 + i)] *= std::ldexp(1.0f, static_cast<int>(-3 * i / 2));
    }
  }
  EXPECT_LT(largest_error(x, on_tiles(x).values), 4);
}

TEST_F(SplitProduct, IsFiniteWhereTheSumIs) {
  const float large = std::nextafter(0x1p62f, 0.0f);
  const Operands x(32, 32, 16, [&](std::mt19937&) { return large; });
  EXPECT_LT(largest_error(x, on_tiles(x).values), 4);  // 3.4e38
}

TEST_F(SplitProduct, ZerosDoNotCountAsSmallNumbers) {
  const Operands x(32, 32, 64, [](std::mt19937& g) { return g() % 2 == 0 ? 0.0 : symmetric(g); });
  const Product c = on_tiles(x);
  EXPECT_EQ(c.tiles, 2 * 2 * 6 * 2);
  EXPECT_LT(largest_error(x, c.values), 4);
  const Operands zeros(32, 32, 64, [](std::mt19937&) { return 0.0; });
  EXPECT_EQ(on_tiles(zeros).values, std::vector<float>(32 * 32, 0.0f));
}

TEST_F(SplitProduct, ADeepSumIsAtMostTwiceAsFarOffAsInRegisters) {
  for (const int64_t k : {8192, 16384}) {
    for (double (*const numbers)(std::mt19937&) : {symmetric, positive}) {
      const Operands x(32, 64, k, numbers);
      const Product c = on_tiles(x);
      EXPECT_GT(c.tiles, 0);
      const double error = largest_error(x, c.values);
      const double of_registers = largest_error(x, in_registers(x).values);
      RecordProperty("of_registers", std::to_string(of_registers));
      EXPECT_LE(error, 2 * of_registers) << k << (numbers == positive ? ", positive" : "");
    }
  }
}

// ---- Attention ----------------------------------------------------------------------------------

using Matrix = std::vector<std::vector<double>>;

Matrix of_zeros(int64_t rows, int64_t columns) {
  return Matrix(static_cast<size_t>(rows), std::vector<double>(static_cast<size_t>(columns)));
}
Matrix product_of(const Matrix& a, const Matrix& b) {
  Matrix c = of_zeros(static_cast<int64_t>(a.size()), static_cast<int64_t>(b[0].size()));
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t k = 0; k < b.size(); ++k) {
      for (size_t j = 0; j < b[0].size(); ++j) c[i][j] += a[i][k] * b[k][j];
    }
  }
  return c;
}
Matrix transposed(const Matrix& a) {
  Matrix c = of_zeros(static_cast<int64_t>(a[0].size()), static_cast<int64_t>(a.size()));
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < a[0].size(); ++j) c[j][i] = a[i][j];
  }
  return c;
}

// One head, its numbers in f32 and, as read from them, in f64.
struct Head {
  static constexpr int64_t kQueries = 40, kKeys = 48, kWidth = 20;
  std::vector<float> query, key, value, grad_output;
  std::vector<float> output, log_sums, grad_query, grad_key, grad_value;

  static std::vector<float> numbers(int64_t rows, double factor, unsigned seed) {
    std::mt19937 generator(seed);
    std::vector<float> values;
    for (int64_t i = 0; i < rows * kWidth; ++i) {
      values.push_back(static_cast<float>(symmetric(generator) * factor));
    }
    return values;
  }
  Head(double of_query, double of_key, double of_value, double of_grad)
      : query(numbers(kQueries, of_query, 1)),
        key(numbers(kKeys, of_key, 2)),
        value(numbers(kKeys, of_value, 3)),
        grad_output(numbers(kQueries, of_grad, 4)),
        output(query.size()),
        log_sums(static_cast<size_t>(kQueries)),
        grad_query(query.size()),
        grad_key(key.size()),
        grad_value(value.size()) {}

  kernels::AttentionProblem problem() {
    const auto view = [](std::vector<float>& values) {
      return kernels::HeadView{values.data(), 0, 0, kWidth, 1};
    };
    kernels::AttentionProblem p{};
    p.dtype = kF32;
    p.isa = kernels::Isa::kAmx;
    p.B = p.H = p.Hk = 1;
    p.T = kQueries;
    p.S = p.keys = kKeys;
    p.E = p.Ev = kWidth;
    p.scale = 1;
    p.query = view(query);
    p.key = view(key);
    p.value = view(value);
    p.output = view(output);
    p.log_sums = log_sums.data();
    p.grad_output = view(grad_output);
    p.grad_query = view(grad_query);
    p.grad_key = view(grad_key);
    p.grad_value = view(grad_value);
    return p;
  }
};
Matrix widened(const std::vector<float>& values) {
  Matrix rows = of_zeros(static_cast<int64_t>(values.size()) / Head::kWidth, Head::kWidth);
  for (size_t i = 0; i < values.size(); ++i) {
    rows[i / Head::kWidth][i % Head::kWidth] = static_cast<double>(values[i]);
  }
  return rows;
}

// The largest distance, in roundings of f32 of the largest number.
double distance(const std::vector<float>& got, const Matrix& expected) {
  const Matrix numbers = widened(got);
  double largest = 0, away = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    for (size_t j = 0; j < expected[i].size(); ++j) {
      largest = std::max(largest, std::fabs(expected[i][j]));
      const double own = std::fabs(numbers[i][j] - expected[i][j]);
      away = own <= away ? away : own;  // NaN stays
    }
  }
  return away / (0x1p-24 * largest + 0x1p-149);
}

struct AttentionErrors {
  int64_t forward_tiles, backward_tiles;
  double output, grad_query, grad_key, grad_value;
};
AttentionErrors errors_of(Head head) {
  const kernels::AttentionProblem p = head.problem();
  AttentionErrors errors{};
  errors.forward_tiles = attend(p, false);
  errors.backward_tiles = attend(p, true);
  const Matrix q = widened(head.query), k = widened(head.key), v = widened(head.value),
               g = widened(head.grad_output);
  Matrix weights = product_of(q, transposed(k));
  for (std::vector<double>& row : weights) {
    double sum = 0;
    for (double& x : row) sum += x = std::exp(x);
    for (double& x : row) x /= sum;
  }
  const Matrix output = product_of(weights, v);
  Matrix scores = product_of(g, transposed(v));
  for (size_t t = 0; t < scores.size(); ++t) {
    double delta = 0;
    for (size_t s = 0; s < scores[t].size(); ++s) delta += weights[t][s] * scores[t][s];
    for (size_t s = 0; s < scores[t].size(); ++s)
      scores[t][s] = weights[t][s] * (scores[t][s] - delta);
  }
  errors.output = distance(head.output, output);
  errors.grad_query = distance(head.grad_query, product_of(scores, k));
  errors.grad_key = distance(head.grad_key, product_of(transposed(scores), q));
  errors.grad_value = distance(head.grad_value, product_of(transposed(weights), g));
  return errors;
}

using SplitAttention = SplitProduct;

TEST_F(SplitAttention, OfOrdinaryNumbersIsMadeOnTiles) {
  for (const double of_grad : {1.0, 1e-9, 1e-20}) {
    const AttentionErrors errors = errors_of(Head(1, 1, 1, of_grad));
    EXPECT_GT(errors.forward_tiles, 0);
    EXPECT_GT(errors.backward_tiles, 0) << of_grad;
  }
  EXPECT_EQ(errors_of(Head(0x1p40, 0x1p-40, 1, 1)).forward_tiles, 0);
}

// Of the largest number of a head.
TEST_F(SplitAttention, KeepsThePrecisionOfF32WhateverTheMagnitudes) {
  for (const auto& [query, key, value, grad] : {std::array{1.0, 1.0, 1.0, 1.0},
                                                {1.0, 1.0, 0x1p-78, 1.0},
                                                {1.0, 1.0, 0x1p-100, 1.0},
                                                {1.0, 1.0, 0x1p-125, 1.0},
                                                {1.0, 1.0, 1.0, 0x1p-78},
                                                {1.0, 1.0, 1.0, 0x1p-110},
                                                {1.0, 0x1p-60, 1.0, 0x1p-60},
                                                {0x1p-60, 1.0, 0x1p-30, 0x1p-30},
                                                {0x1p-110, 0x1p-110, 1.0, 1.0},
                                                {0x1p-20, 0x1p20, 0x1p29, 0x1p29},
                                                {0x1p-20, 0x1p20, 0x1p40, 0x1p40},
                                                {0.0, 1.0, 0x1p-100, 0x1p-20}}) {
    const AttentionErrors errors = errors_of(Head(query, key, value, grad));
    SCOPED_TRACE(testing::Message() << query << ", " << key << ", " << value << ", " << grad);
    EXPECT_LT(errors.output, 32);
    EXPECT_LT(errors.grad_query, 32);
    EXPECT_LT(errors.grad_key, 32);
    EXPECT_LT(errors.grad_value, 32);
  }
}

}  // namespace
}  // namespace tessera::tests::test_gemm_split
