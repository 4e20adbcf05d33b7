// f32 products of three bf16 parts: their arithmetic, on tiles in plain C++.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include <tessera/core/kernels/gemm/gemm_tile.h>

#include "split_tiles.h"

namespace tessera::tests {
namespace {

class SplitProduct : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_avx512()) GTEST_SKIP() << "operands are packed by AVX-512";
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
                               .use_amx = true,
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

}  // namespace
}  // namespace tessera::tests
