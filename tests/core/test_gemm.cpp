// ctest instruction sets
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/gemm/gemm.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels::test_gemm {
namespace {

enum class Layout { kRowMajor, kColumnMajor, kGaps };

// A matrix of rounded random numbers in a given layout, and its values as double.
template <class T>
struct Matrix {
  int64_t rows, columns, row_stride, column_stride;
  std::vector<T> data;

  Matrix(int64_t m, int64_t n, Layout layout, uint32_t seed) : rows(m), columns(n) {
    row_stride = layout == Layout::kColumnMajor ? 1 : layout == Layout::kGaps ? 3 * n + 2 : n;
    column_stride = layout == Layout::kColumnMajor ? m : layout == Layout::kGaps ? 3 : 1;
    data.resize(static_cast<size_t>(
        rows * columns == 0 ? 0 : (rows - 1) * row_stride + (columns - 1) * column_stride + 1));
    std::mt19937 generator(seed);
    std::uniform_real_distribution<double> uniform(-1, 1);
    for (T& value : data) {
      value = std::is_integral_v<T> ? store<T>(static_cast<int64_t>(generator() % 7))
                                    : store<T>(uniform(generator));
    }
  }
  double at(int64_t i, int64_t j) const {
    return load<double>(data[static_cast<size_t>(i * row_stride + j * column_stride)]);
  }
  GemmOperand operand() const { return {data.data(), row_stride, column_stride}; }
};

struct Options {
  double alpha = 1, beta = 0;
  GemmBias bias = GemmBias::kNone;
};

// One product against f64. |y - ref| <= 4 eps(result) |ref terms| + 4 eps(sum) sqrt(k) |terms|.
template <class T, class R>
void expect_product(int64_t m, int64_t n, int64_t k, Layout layout_a, Layout layout_b,
                    Options options = {}) {
  const Matrix<T> a(m, k, layout_a, 1), b(k, n, layout_b, 2);
  Matrix<R> c(m, n, Layout::kRowMajor, 3);
  const Matrix<R> before = c;
  const Matrix<R> bias(1, std::max(m, n), Layout::kRowMajor, 4);
  if (options.beta == 0) {
    for (R& value : c.data) value = store<R>(std::is_integral_v<R> ? 77.0 : NAN);
  }
  gemm({.m = m,
        .n = n,
        .k = k,
        .dtype = dtype_of<T>,
        .result_dtype = dtype_of<R>,
        .a = a.operand(),
        .b = b.operand(),
        .c = c.data.data(),
        .c_row_stride = n,
        .alpha = options.alpha,
        .beta = options.beta,
        .bias = bias.data.data(),
        .bias_kind = options.bias});
  const double sum_eps = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
  const double result_eps = std::is_integral_v<R> ? 0 : epsilon_of(dtype_of<R>);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double reference = 0, absolute = 0;
      for (int64_t q = 0; q < k; ++q) {
        reference += a.at(i, q) * b.at(q, j);
        absolute += std::abs(a.at(i, q) * b.at(q, j));
      }
      reference = options.alpha * reference + options.beta * before.at(i, j);
      absolute = std::abs(options.alpha) * absolute + std::abs(options.beta * before.at(i, j));
      if (options.bias != GemmBias::kNone) {
        const double add = bias.at(0, options.bias == GemmBias::kColumn ? j : i);
        reference += add;
        absolute += std::abs(add);
      }
      const double tolerance =
          std::is_integral_v<R>
              ? 0
              : result_eps * std::abs(reference) +
                    4 * sum_eps * std::sqrt(static_cast<double>(k) + 4) * absolute;
      ASSERT_NEAR(c.at(i, j), reference, tolerance)
          << name_of(dtype_of<T>) << " " << m << "x" << n << "x" << k << " at " << i << "," << j;
    }
  }
}

const Layout kLayouts[] = {Layout::kRowMajor, Layout::kColumnMajor, Layout::kGaps};

template <class T, class R>
void expect_all_layouts() {
  const int64_t shapes[][3] = {{1, 1, 1},     {1, 37, 70},  {37, 1, 33},
                               {14, 32, 16},  {32, 32, 32}, {33, 65, 31},
                               {15, 31, 400}, {64, 48, 97}, {5, 3, 1100}};
  for (const auto& [m, n, k] : shapes) {
    for (Layout a : kLayouts) {
      for (Layout b : kLayouts) expect_product<T, R>(m, n, k, a, b);
    }
  }
}

TEST(Gemm, F32MatchesF64InAllLayouts) { expect_all_layouts<float, float>(); }
TEST(Gemm, F64MatchesF64InAllLayouts) { expect_all_layouts<double, double>(); }
TEST(Gemm, F16MatchesF64InAllLayouts) { expect_all_layouts<f16, f16>(); }
TEST(Gemm, Bf16MatchesF64InAllLayouts) { expect_all_layouts<bf16, bf16>(); }
TEST(Gemm, Bf16CanGiveF32) { expect_all_layouts<bf16, float>(); }
TEST(Gemm, IntegersAreExact) {
  expect_all_layouts<int64_t, int64_t>();
  expect_product<int32_t, int32_t>(9, 7, 5, Layout::kRowMajor, Layout::kColumnMajor);
  expect_product<uint8_t, uint8_t>(3, 4, 5, Layout::kRowMajor, Layout::kColumnMajor);
}

template <class T>
void expect_scalars_and_bias() {
  for (GemmBias bias : {GemmBias::kNone, GemmBias::kColumn, GemmBias::kRow}) {
    for (double beta : {0.0, 1.0, -0.5}) {
      for (double alpha : {1.0, 0.25}) {
        expect_product<T, T>(35, 70, 41, Layout::kRowMajor, Layout::kColumnMajor,
                             {alpha, beta, bias});
        expect_product<T, T>(3, 5, 0, Layout::kRowMajor, Layout::kRowMajor, {alpha, beta, bias});
      }
    }
  }
}

TEST(Gemm, AlphaBetaAndBiasAreApplied) {
  expect_scalars_and_bias<float>();
  expect_scalars_and_bias<double>();
  expect_scalars_and_bias<f16>();
  expect_scalars_and_bias<bf16>();
}

TEST(Gemm, TilesCoverLargeMatrices) {
  expect_product<float, float>(1030, 100, 50, Layout::kRowMajor, Layout::kColumnMajor);
  expect_product<double, double>(100, 1600, 50, Layout::kColumnMajor, Layout::kRowMajor);
  expect_product<bf16, bf16>(600, 300, 700, Layout::kColumnMajor, Layout::kRowMajor);
}

// bf16 in all layouts around the edges of what instruction sets multiply at once: 8, 14 or 32 rows,
// 16, 32 or 48 columns, 2 or 32 of K in blocks of 384 or 512. Some rows of a tile are finished
// while others are still to be multiplied.
TEST(Gemm, Bf16BlocksEndAnywhere) {
  const int64_t shapes[][3] = {{8, 48, 2},    {9, 47, 1},   {7, 49, 3},   {40, 97, 66},
                               {33, 49, 385}, {9, 50, 769}, {2, 2, 1537}, {64, 96, 32}};
  for (const auto& [m, n, k] : shapes) {
    for (Layout a : kLayouts) {
      for (Layout b : kLayouts) {
        expect_product<bf16, bf16>(m, n, k, a, b, {.alpha = 0.5, .bias = GemmBias::kColumn});
        expect_product<bf16, bf16>(m, n, k, a, b, {.beta = -2, .bias = GemmBias::kRow});
        expect_product<bf16, float>(m, n, k, a, b, {.beta = 1, .bias = GemmBias::kRow});
      }
    }
  }
}

// One row or one column is read where it lies, in stretches of columns.
template <class T, class R>
void expect_rows_and_columns() {
  for (Layout a : kLayouts) {
    for (Layout b : kLayouts) {
      for (const auto& [n, k] : {std::pair{1, 300}, {31, 64}, {33, 7}, {70, 97}, {2113, 35}}) {
        const Options options{.alpha = 0.5, .beta = 1, .bias = GemmBias::kColumn};
        expect_product<T, R>(1, n, k, a, b, options);
        expect_product<T, R>(n, 1, k, a, b, options);
        expect_product<T, R>(n, 1, k, a, b, {.bias = GemmBias::kRow});
      }
    }
  }
}
TEST(Gemm, OneRowOrColumnMatchesF64InAllLayouts) {
  expect_rows_and_columns<float, float>();
  expect_rows_and_columns<double, double>();
  expect_rows_and_columns<f16, f16>();
  expect_rows_and_columns<bf16, float>();
}

// Few rows share the reading of a matrix: groups of rows, four columns at a time and what is left
// over, stretches of K, in both layouts of the matrix.
template <class T, class R>
void expect_few_rows() {
  for (Layout b : kLayouts) {
    for (const auto& [m, n, k] : {std::tuple{2, 35, 100},
                                  {3, 34, 1031},
                                  {5, 33, 64},
                                  {6, 70, 45},
                                  {7, 67, 517},
                                  {8, 37, 2100},
                                  {13, 97, 130},
                                  {16, 36, 1024},
                                  {64, 66, 513}}) {
      expect_product<T, R>(m, n, k, Layout::kRowMajor, b,
                           {.alpha = 0.5, .beta = 1, .bias = GemmBias::kColumn});
      expect_product<T, R>(m, n, k, Layout::kGaps, b, {.bias = GemmBias::kRow});
    }
  }
}
TEST(Gemm, FewRowsMatchF64InAllLayouts) {
  expect_few_rows<float, float>();
  expect_few_rows<double, double>();
  expect_few_rows<f16, f16>();
  expect_few_rows<bf16, bf16>();
  expect_few_rows<bf16, float>();
}

// A token's results are those of its place among few (16 on every instruction set).
template <class T>
void expect_same_bits_alone(Layout layout_b) {
  constexpr int64_t n = 75, k = 1021;
  Matrix<T> a(16, k, Layout::kRowMajor, 1);
  const Matrix<T> b(k, n, layout_b, 2);
  const auto rows_from = [&](int64_t first, int64_t rows) {
    std::vector<T> c(static_cast<size_t>(rows * n));
    gemm({.m = rows,
          .n = n,
          .k = k,
          .dtype = dtype_of<T>,
          .result_dtype = dtype_of<T>,
          .a = {a.data.data() + first * k, k, 1},
          .b = b.operand(),
          .c = c.data(),
          .c_row_stride = n});
    return c;
  };
  const std::vector<T> all = rows_from(0, 16);
  for (const auto& [first, rows] :
       {std::pair{0, 1}, {7, 1}, {3, 2}, {2, 7}, {0, 8}, {5, 9}, {1, 15}}) {
    const std::vector<T> alone = rows_from(first, rows);
    EXPECT_EQ(std::memcmp(alone.data(), all.data() + first * n, alone.size() * sizeof(T)), 0)
        << name_of(dtype_of<T>) << " rows " << first << " to " << first + rows;
  }
  a.data[8 * k] = store<T>(NAN);  // the next number in memory after row 7
  const std::vector<T> poisoned = rows_from(0, 16);
  EXPECT_EQ(std::memcmp(poisoned.data(), all.data(), 8 * n * sizeof(T)), 0)
      << name_of(dtype_of<T>) << " beside NaN";
}
TEST(Gemm, RowsHaveTheSameBitsAloneAndAmongFew) {
  for (Layout layout : {Layout::kRowMajor, Layout::kColumnMajor}) {
    expect_same_bits_alone<float>(layout);
    expect_same_bits_alone<double>(layout);
    expect_same_bits_alone<f16>(layout);
    expect_same_bits_alone<bf16>(layout);
  }
}

// A small C and a long K, which is cut into parts.
TEST(Gemm, Bf16PartsOfALongKAreAdded) {
  expect_product<bf16, bf16>(128, 130, 16387, Layout::kRowMajor, Layout::kGaps,
                             {.alpha = 0.5, .beta = -2, .bias = GemmBias::kRow});
}

// Whatever instruction rounds: also where numbers are subnormal, NaN, or too large for bf16.
TEST(Gemm, Bf16IsRoundedAsItIsStored) {
  constexpr int64_t m = 40, n = 70, k = 3;
  Matrix<bf16> a(m, k, Layout::kRowMajor, 1);
  const Matrix<bf16> b(k, n, Layout::kColumnMajor, 2);
  a.data[0] = store<bf16>(NAN);
  a.data[3] = store<bf16>(INFINITY);
  for (size_t i = 6; i < 12; ++i) a.data[i] = store<bf16>(3.3e38f);
  for (double alpha : {1.0, 0x1p-124, 0x1p-127, 0x1p-140}) {
    std::vector<bf16> rounded(m * n);
    std::vector<float> sums(m * n);
    const auto multiply = [&](DType dtype, void* c) {
      gemm({.m = m,
            .n = n,
            .k = k,
            .dtype = kBF16,
            .result_dtype = dtype,
            .a = a.operand(),
            .b = b.operand(),
            .c = c,
            .c_row_stride = n,
            .alpha = alpha});
    };
    multiply(kBF16, rounded.data());
    multiply(kF32, sums.data());
    for (size_t i = 0; i < sums.size(); ++i) {
      ASSERT_EQ(rounded[i].bits, store<bf16>(sums[i]).bits) << sums[i] << " at " << i;
    }
  }
}

TEST(Gemm, WeightGradientsOfWideLayersMatchF64) {
  expect_product<float, float>(1100, 40, 520, Layout::kColumnMajor, Layout::kRowMajor);
  expect_product<float, float>(40, 1700, 520, Layout::kColumnMajor, Layout::kRowMajor, {.beta = 1});
}

TEST(Gemm, EmptyMatricesAreLeftAlone) {
  float untouched = 5;
  gemm({.m = 0, .n = 4, .k = 3, .c = &untouched, .c_row_stride = 4});
  gemm({.m = 4, .n = 0, .k = 3, .c = &untouched, .c_row_stride = 0});
  EXPECT_EQ(untouched, 5);
}

TEST(Gemm, BatchesFollowTheirOffsets) {
  const Matrix<float> a(6, 5, Layout::kRowMajor, 1), b(5, 4, Layout::kRowMajor, 2);
  // Three products: rows 0-1, 4-5 and 2-3 of a, with the same b.
  const int64_t a_offsets[] = {0, 20, 10}, b_offsets[] = {0, 0, 0}, c_offsets[] = {0, 16, 8};
  std::vector<float> c(24, NAN), whole(24, NAN);
  gemm({.m = 2,
        .n = 4,
        .k = 5,
        .a = a.operand(),
        .b = b.operand(),
        .c = c.data(),
        .c_row_stride = 4,
        .batch = 3,
        .a_offsets = a_offsets,
        .b_offsets = b_offsets,
        .c_offsets = c_offsets});
  gemm({.m = 6,
        .n = 4,
        .k = 5,
        .a = a.operand(),
        .b = b.operand(),
        .c = whole.data(),
        .c_row_stride = 4});
  for (size_t i = 0; i < c.size(); ++i) EXPECT_NEAR(c[i], whole[i], 1e-6);
}

// Weight gradients add up a long K; their bits must not depend on who calculates them.
template <class T>
void expect_same_bits_for_any_thread_count(int64_t m, int64_t n, int64_t k, Layout layout_a,
                                           Layout layout_b) {
  const int before = num_threads();
  const Matrix<T> a(m, k, layout_a, 1), b(k, n, layout_b, 2);
  std::vector<T> results[3];
  const int threads[] = {1, 2, 3};
  for (int i = 0; i < 3; ++i) {
    set_num_threads(threads[i]);
    results[i].resize(static_cast<size_t>(m * n));
    gemm({.m = m,
          .n = n,
          .k = k,
          .dtype = dtype_of<T>,
          .result_dtype = dtype_of<T>,
          .a = a.operand(),
          .b = b.operand(),
          .c = results[i].data(),
          .c_row_stride = n});
  }
  set_num_threads(before);
  for (int i = 1; i < 3; ++i) {
    EXPECT_EQ(std::memcmp(results[0].data(), results[i].data(), results[0].size() * sizeof(T)), 0)
        << name_of(dtype_of<T>) << " with " << threads[i] << " threads";
  }
}

TEST(Gemm, BitsDoNotDependOnTheThreadCount) {
  const auto expect = []<class T>(T) {
    constexpr Layout kRows = Layout::kRowMajor, kColumns = Layout::kColumnMajor;
    expect_same_bits_for_any_thread_count<T>(200, 330, 2048, kColumns, kRows);
    expect_same_bits_for_any_thread_count<T>(128, 128, 16385, kRows, kRows);
    expect_same_bits_for_any_thread_count<T>(1, 1333, 515, kRows, kColumns);  // a token's product
    expect_same_bits_for_any_thread_count<T>(1, 1333, 515, kRows, kRows);
    expect_same_bits_for_any_thread_count<T>(1333, 1, 515, kRows, kRows);
    expect_same_bits_for_any_thread_count<T>(5, 1333, 515, kRows, kColumns);
    expect_same_bits_for_any_thread_count<T>(13, 1333, 515, kRows, kRows);
  };
  expect(float());
  expect(double());
  expect(bf16());
  expect(f16());
}

// Products of f32 may be made of narrower ones; no element may be further from f64 than a chain of
// f32 products and sums allows, whatever its magnitude.
TEST(Gemm, F32KeepsItsPrecisionOverTheWholeRange) {
  const int64_t m = 70, n = 90, k = 450;
  for (const auto& [scale_a, scale_b] : {std::pair{1.0, 1.0},
                                         {0x1p61, 0x1p61},
                                         {0x1p100, 0x1p-100},
                                         {0x1p-100, 0x1p40},
                                         {0x1p-30, 0x1p-40},
                                         {0x1p120, 0x1p-140}}) {
    Matrix<float> a(m, k, Layout::kRowMajor, 1), b(k, n, Layout::kRowMajor, 2);
    for (float& value : a.data) value = static_cast<float>(value * scale_a);
    for (float& value : b.data) value = static_cast<float>(value * scale_b);
    std::vector<float> c(static_cast<size_t>(m * n), NAN);
    gemm({.m = m,
          .n = n,
          .k = k,
          .a = a.operand(),
          .b = b.operand(),
          .c = c.data(),
          .c_row_stride = n});
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double reference = 0, absolute = 0;
        for (int64_t q = 0; q < k; ++q) {
          reference += a.at(i, q) * b.at(q, j);
          absolute += std::abs(a.at(i, q) * b.at(q, j));
        }
        // One rounding a product and, as a walk, one a sum. Beyond it subnormal parts may be lost:
        // 2^-126 of an element, times the largest of the other side.
        const double subnormal = 0x1p-126 * (scale_a + scale_b + 1) * static_cast<double>(k);
        ASSERT_NEAR(c[static_cast<size_t>(i * n + j)], reference,
                    0x1p-24 * absolute * 4 + (std::isfinite(subnormal) ? subnormal : 0))
            << scale_a << " x " << scale_b << " at " << i << "," << j;
      }
    }
  }
}

// Infinities and NaN go where they would in a sum of f32 products, and nowhere else.
TEST(Gemm, InfinitiesAndNanReachTheirRowsAndColumnsOnly) {
  const int64_t m = 65, n = 70, k = 500;
  for (Layout layout : {Layout::kRowMajor, Layout::kColumnMajor}) {
    Matrix<float> a(m, k, layout, 1), b(k, n, layout, 2);
    const auto set = [](Matrix<float>& matrix, int64_t row, int64_t column, float value) {
      matrix.data[static_cast<size_t>(row * matrix.row_stride + column * matrix.column_stride)] =
          value;
    };
    const Matrix<float> plain_a = a, plain_b = b;
    set(a, 3, 450, INFINITY);   // inf or -inf by b's sign
    set(a, 40, 10, NAN);        // NaN in its row
    set(b, 200, 69, INFINITY);  // inf or -inf by a's sign
    set(a, 64, 5, 3e38f);       // finite, but near the end of the range
    const auto product = [&](const Matrix<float>& left, const Matrix<float>& right) {
      std::vector<float> c(static_cast<size_t>(m * n));
      gemm({.m = m,
            .n = n,
            .k = k,
            .a = left.operand(),
            .b = right.operand(),
            .c = c.data(),
            .c_row_stride = n});
      return c;
    };
    const std::vector<float> special = product(a, b), plain = product(plain_a, plain_b);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const float value = special[static_cast<size_t>(i * n + j)];
        if (i == 40 || (i == 3 && j == 69 && (b.at(450, 69) > 0) != (a.at(3, 200) > 0))) {
          EXPECT_TRUE(std::isnan(value)) << i << "," << j;
        } else if (i == 3) {
          EXPECT_EQ(value, b.at(450, j) > 0 ? INFINITY : -INFINITY) << j;
        } else if (j == 69) {
          EXPECT_EQ(value, a.at(i, 200) > 0 ? INFINITY : -INFINITY) << i;
        } else if (i == 64) {
          const double expected = 3e38 * b.at(5, j);
          EXPECT_NEAR(value, expected, std::abs(expected) * 1e-6) << j;
        } else {
          EXPECT_NEAR(value, plain[static_cast<size_t>(i * n + j)], 1e-4) << i << "," << j;
        }
      }
    }
  }
}

TEST(Gemm, MixedDtypesAreRefused) {
  EXPECT_THROW(gemm({.m = 1, .n = 1, .k = 1, .dtype = kF32, .result_dtype = kBF16}), DTypeError);
  EXPECT_THROW(gemm({.m = 1, .n = 1, .k = 1, .dtype = kF8E4M3, .result_dtype = kF8E4M3}),
               DTypeError);
}

}  // namespace
}  // namespace tessera::kernels::test_gemm
