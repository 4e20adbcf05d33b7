// Kernels that take other ways for large or odd inputs than the samples of the op table reach: each
// result against the CPU's.
#include "test_cuda_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/launch_times.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/fp8/cast_transpose.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/kernels/norm/norm.h>
#include <tessera/core/kernels/optim/multi_tensor_copy.h>
#include <tessera/core/kernels/random/random_fill.h>
#include <tessera/core/random.h>

#include "on_emulation.h"

namespace tessera::test_cuda_kernels {
namespace {

const Device kGpu = cuda(0);

// Pseudo-random numbers with many equal ones.
Tensor numbers(const Shape& shape, DType dtype, int64_t different = 97) {
  std::vector<double> values(static_cast<size_t>(numel_of(shape)));
  uint64_t state = 7;
  for (double& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = static_cast<double>(static_cast<int64_t>((state >> 33) % 1000003) % different) -
            static_cast<double>(different / 2);
  }
  return tensor(values, shape, dtype);
}

void expect_equal(const Tensor& got, const Tensor& expected, double bound = 0) {
  ASSERT_TRUE(got.device().is_cuda());
  ASSERT_EQ(got.shape(), expected.shape());
  ASSERT_EQ(got.dtype(), expected.dtype());
  const std::vector<double> a = got.to_vector(), b = expected.to_vector();
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_TRUE(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])) ||
                std::fabs(a[i] - b[i]) <= bound)
        << "element " << i << ": " << a[i] << ", on the CPU " << b[i];
  }
}

Tensor leaf(const Tensor& x) { return x.detach().set_requires_grad(); }

int64_t launches_of(const std::string& name, const std::function<void()>& work) {
  int64_t launches = 0;
  for (const gpu::LaunchTime& time : gpu::time_launches(work)) {
    if (time.name == name) ++launches;
  }
  return launches;
}

void expect_close(const Tensor& got, const Tensor& expected, double bound) {
  ASSERT_TRUE(got.device().is_cuda());
  ASSERT_EQ(got.shape(), expected.shape());
  const std::vector<double> a = got.to_vector(), b = expected.to_vector();
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], bound) << "element " << i;
}

// Within 24 roundings of the largest number, or of 1.
void expect_results_close(const std::vector<Tensor>& got, const std::vector<Tensor>& expected,
                          DType dtype) {
  const double eps = dtype == kF64 ? 0x1p-52 : dtype == kF32 ? 0x1p-23 : 0x1p-8;
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    double largest = 1;
    for (const double value : expected[i].to_vector()) {
      largest = std::max(largest, std::abs(value));
    }
    SCOPED_TRACE(testing::Message() << "result " << i);
    expect_close(got[i], expected[i], 24 * eps * largest);
  }
}

// Nothing lies there: only the places are calculated, by 32 bits and by 64.
TEST(CudaWalk, FindsPlacesOfTensorsOfAnySize) {
  for (const Shape& sizes : {Shape{3, 7, 5}, Shape{3, 70001, 50021}, Shape{5, 65536, 65536, 3}}) {
    SCOPED_TRACE(testing::Message() << "of " << sizes);
    std::vector<int64_t> first, second;  // such that no two dimensions are one
    for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
      first.push_back(1000003 * d * d + 7);
      second.push_back(d + 1);
    }
    const Shape strides[] = {Shape(first), Shape(second)};
    const kernels::Walk walk(sizes, strides);
    ASSERT_EQ(walk.dims, sizes.size());
    for (const int64_t position : {int64_t{0}, walk.numel / 3, walk.numel - 4, walk.numel - 2}) {
      const int count = position + 4 <= walk.numel ? 4 : static_cast<int>(walk.numel - position);
      const Tensor groups = raw::empty({4}, kI64, kGpu), singles = raw::empty({4}, kI64, kGpu);
      kernels::tests::find_places(walk, position, count, groups.data_as<int64_t>(),
                                  singles.data_as<int64_t>());
      const auto group = groups.to_vector<int64_t>(), single = singles.to_vector<int64_t>();
      for (int i = 0; i < 4; ++i) {
        int64_t left = position + (i < count ? i : 0), expected = 0;
        for (int d = walk.dims - 1; d >= 0; --d) {
          expected += left % walk.sizes[d] * walk.strides[0][d];
          left /= walk.sizes[d];
        }
        EXPECT_EQ(group[static_cast<size_t>(i)], expected) << position << " + " << i;
        if (i < count) {
          EXPECT_EQ(single[static_cast<size_t>(i)], expected);
        }
      }
    }
  }
}

TEST(CudaSort, IsStableForRowsOfAnyLengthAndDtype) {
  for (const DType dtype : {kF32, kF64, kBF16, kI64, kU8, kBool}) {
    for (const Shape& shape : {Shape{3, 1}, Shape{2, 33}, Shape{2, 2048}, Shape{2, 5001}}) {
      const Tensor x = numbers(shape, kF32).to(dtype);
      for (const bool descending : {false, true}) {
        const auto [values, indices] = sort(x.to(kGpu), 1, descending);
        const auto expected = sort(x, 1, descending);
        expect_equal(values, expected.values);
        expect_equal(indices, expected.indices);
      }
    }
  }
}

TEST(CudaSort, PutsNanLastAndTakesZerosForEqual) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Tensor x = tensor({0.0, nan, -1.0, -0.0, INFINITY, -INFINITY, nan, 2.0}, kF32);
  expect_equal(sort(x.to(kGpu), 0, false).indices, sort(x, 0, false).indices);
  expect_equal(sort(x.to(kGpu), 0, true).indices, sort(x, 0, true).indices);
}

TEST(CudaTopk, SelectsFromLongRowsWhatTheCpuSelects) {
  for (const DType dtype : {kF32, kF64, kBF16, kU8}) {
    const Tensor x = numbers({2, 4099}, kF32).to(dtype);
    for (const int64_t k : {1, 40, 2047, 3000}) {
      for (const bool largest : {true, false}) {
        const auto [values, indices] = topk(x.to(kGpu), k, 1, largest);
        const auto expected = topk(x, k, 1, largest);
        expect_equal(values, expected.values);
        expect_equal(indices, expected.indices);
      }
    }
  }
}

// By tiles; with many equal keys at the threshold, and few.
TEST(CudaTopk, SelectsFromRowsOfManyTiles) {
  for (const DType dtype : {kF32, kU8}) {
    const Tensor x = numbers({2, 66001}, kF32, dtype == kF32 ? 60013 : 97).to(dtype);
    const auto [values, indices] = topk(x.to(kGpu), 300, 1, true);
    const auto expected = topk(x, 300, 1, true);
    expect_equal(values, expected.values);
    expect_equal(indices, expected.indices);
  }
}

TEST(CudaIndex, ScattersLongLinesInTheirOrder) {
  // Few lines: sorted by place. In x, index and source the dimension lies differently.
  for (const int64_t dim : {0, 1}) {
    const Tensor index = add(numbers({150, 20}, kI64, 7), 3);
    const Tensor source = mul(numbers({150, 20}, kF32, 1009), 1e-3);
    for (const DType dtype : {kF32, kBF16}) {
      const Tensor x = numbers(dim == 0 ? Shape{7, 21} : Shape{151, 7}, dtype);
      const Tensor values = source.to(dtype);
      const Tensor flipped = values.t().contiguous().t();
      for (const Tensor& v : {values, flipped}) {
        expect_equal(scatter_add(x.to(kGpu), dim, index.to(kGpu), v.to(kGpu)),
                     scatter_add(x, dim, index, v));
        expect_equal(scatter(x.to(kGpu), dim, index.to(kGpu), v.to(kGpu)),
                     scatter(x, dim, index, v));
      }
    }
  }
  // Many lines, and short ones: a thread a line.
  const Tensor index = add(numbers({12, 1500}, kI64, 5), 2);
  const Tensor source = numbers({12, 1500}, kF32), x = numbers({5, 1500}, kF32);
  expect_equal(scatter_add(x.to(kGpu), 0, index.to(kGpu), source.to(kGpu)),
               scatter_add(x, 0, index, source));
}

TEST(CudaIndex, SelectsRowsInUnitsOfAnySize) {
  const Tensor index = tensor({4.0, 0.0, 4.0, 2.0}, kI64);
  for (const DType dtype : {kU8, kBF16, kF32, kF64}) {
    for (const int64_t width : {1, 3, 8, 48}) {
      const Tensor x = numbers({2, 5, width}, kF32).to(dtype);
      expect_equal(index_select(x.to(kGpu), 1, index.to(kGpu)), index_select(x, 1, index));
    }
  }
}

TEST(CudaCast, NarrowsAndTransposesWithTheLargestMagnitude) {
  const Tensor scale = scalar_tensor(24, kF32);
  for (const Shape& shape : {Shape{64, 128}, Shape{68, 132}, Shape{70, 33}, Shape{1, 5}}) {
    for (const DType dtype : {kF32, kBF16, kF16}) {
      const Tensor x = mul(numbers(shape, kF32), 0.37).to(dtype);
      for (const DType to : {kF8E4M3, kF8E5M2, kBF16, kF16}) {
        const auto got = kernels::cast_transpose(x.to(kGpu), to, scale.to(kGpu), true, true);
        const auto expected = kernels::cast_transpose(x, to, scale, true, true);
        expect_equal(got.values, expected.values);
        expect_equal(got.transposed, expected.transposed);
        expect_equal(got.amax, expected.amax);
        // And the CPU's own against what it is made of.
        const Tensor plain = to == kF8E5M2 ? Tensor() : mul(x.to(kF32), 24).to(to);
        if (plain.defined()) {
          EXPECT_EQ(expected.values.to_vector(), plain.to_vector());
          EXPECT_EQ(expected.transposed.to_vector(), plain.to(kF32).t().contiguous().to_vector());
        }
        EXPECT_EQ(expected.amax.item(), amax(x.to(kF32).abs()).item());
      }
    }
  }
  const auto alone =
      kernels::cast_transpose(numbers({8, 8}, kBF16).to(kGpu), kF8E4M3, {}, false, true);
  EXPECT_FALSE(alone.values.defined());
  EXPECT_EQ(alone.transposed.shape(), (Shape{8, 8}));
  const Tensor infinite = tensor({1.0, -INFINITY, 70000.0, NAN}, kF32).view({2, 2});
  const auto ends = kernels::cast_transpose(infinite.to(kGpu), kF8E5M2, {}, true, false);
  const std::vector<double> values = ends.values.to_vector();
  EXPECT_TRUE(std::isnan(values[1]));  // so that no product hides it
  EXPECT_EQ(values[2], 57344);
  EXPECT_TRUE(std::isnan(values[3]));
  EXPECT_TRUE(std::isnan(ends.amax.item()));
  EXPECT_THROW(kernels::cast_transpose(infinite, kI32, {}, true, true), DTypeError);
  EXPECT_THROW(kernels::cast_transpose(infinite.to(kF64), kBF16, {}, true, true), DTypeError);
  EXPECT_THROW(kernels::cast_transpose(infinite.view({4}), kBF16, {}, true, true), ShapeError);
}

TEST(CudaScan, GoesOnFromChunkToChunk) {
  const Tensor integers = numbers({2, 40000}, kI64);
  expect_equal(cumsum(integers.to(kGpu), 1), cumsum(integers, 1));
  expect_equal(flip(cumsum(flip(integers.to(kGpu), {1}), 1), {1}),
               flip(cumsum(flip(integers, {1}), 1), {1}));
  const Tensor x = leaf(mul(numbers({40000}, kF32), 0.125)), y = leaf(x.detach().to(kGpu));
  cumsum(x, 0).sum().backward();
  cumsum(y, 0).sum().backward();
  expect_equal(cumsum(y, 0).detach(), cumsum(x, 0).detach());  // all sums are exact
  expect_equal(y.grad(), x.grad());
  const Tensor signs = add(mul(numbers({3, 2500}, kI64, 2), 2), 1);  // -1 and 1
  expect_equal(cumprod(signs.to(kGpu), 1), cumprod(signs, 1));
}

TEST(CudaIndex, AddsEqualIndicesInTheirOrder) {
  const Tensor index = add(numbers({3000}, kI64, 5), 2);
  const Tensor source = mul(numbers({3000, 3}, kF32, 1009), 1e-3);
  for (const DType dtype : {kF32, kBF16}) {
    const Tensor x = numbers({6, 3}, dtype), values = source.to(dtype);
    expect_equal(index_add(x.to(kGpu), 0, index.to(kGpu), values.to(kGpu)),
                 index_add(x, 0, index, values));
  }
  const Tensor x = numbers({2, 6}, kF32);
  const Tensor last = index.narrow(0, 0, 40), rows = source.narrow(0, 0, 40).select(1, 0);
  const Tensor wide = stack({rows, mul(rows, 3)}, 0);
  expect_equal(index_add(x.to(kGpu), 1, last.to(kGpu), wide.to(kGpu)), index_add(x, 1, last, wide));
  // Of equal places the last stays.
  const Tensor places = index.narrow(0, 0, 40), values = source.narrow(0, 0, 40);
  const Tensor y = numbers({6, 3}, kF32);
  expect_equal(index_put(y.to(kGpu), {places.to(kGpu)}, values.to(kGpu)),
               index_put(y, {places}, values));
}

TEST(CudaIndex, ListsNonzeroElementsOfLongTensors) {
  const Tensor x = numbers({7, 5, 211}, kI64, 3);
  expect_equal(nonzero(x.to(kGpu)), nonzero(x));
  const Tensor none = raw::zeros({0, 3}, kF32);
  expect_equal(nonzero(none.to(kGpu)), nonzero(none));
  const Tensor scalar = scalar_tensor(2, kF32);
  expect_equal(nonzero(scalar.to(kGpu)), nonzero(scalar));
}

TEST(CudaIndex, CountsAndWeighs) {
  const Tensor x = add(numbers({5000}, kI64, 11), 5);
  expect_equal(bincount(x.to(kGpu), {}, 14), bincount(x, {}, 14));
  const Tensor weights = mul(numbers({5000}, kF32), 0.25);
  expect_equal(bincount(x.to(kGpu), weights.to(kGpu), 0), bincount(x, weights, 0));
  const Tensor halves = weights.to(kBF16);
  expect_equal(bincount(x.to(kGpu), halves.to(kGpu), 0), bincount(x, halves, 0));
  EXPECT_THROW(bincount(tensor({1, -1}, kI64).to(kGpu), {}, 0), ValueError);
  const Tensor classes = x.narrow(0, 0, 30);
  expect_equal(one_hot(classes.to(kGpu), -1), one_hot(classes, -1));
}

// The second and third dimension of a grid end at 65535: all tiles lie in the first.
TEST(CudaMatmul, CutsMoreRowsAndMatricesThanTheOtherDimensionsOfAGridHave) {
  const auto expect_places = [](int64_t M, int64_t N, int64_t matrices) {
    const int64_t rows = (M + 31) / 32, columns = (N + 31) / 32, tiles = rows * columns * matrices;
    const Tensor places = raw::empty({tiles, 3}, kI64, kGpu);
    ASSERT_EQ(kernels::tests::find_tiles(M, N, 32, matrices, places.data_as<int64_t>()), tiles);
    const std::vector<int64_t> found = places.to_vector<int64_t>();
    for (int64_t i = 0; i < tiles; ++i) {
      const auto* const place = found.data() + 3 * i;
      ASSERT_EQ((place[0] * rows + place[1]) * columns + place[2], i);
      ASSERT_TRUE(place[1] < rows && place[2] < columns);
    }
  };
  expect_places(65536 * 32 + 1, 40, 1);
  expect_places(40, 70, 65537);
  const auto tiles = [](int64_t M, int64_t N, int64_t matrices) {
    return kernels::tests::find_tiles(M, N, 32, matrices, nullptr);
  };
  EXPECT_EQ(tiles(32, 32, INT32_MAX), INT32_MAX);
  EXPECT_THROW(tiles(33, 32, int64_t{1} << 30), ShapeError);
  EXPECT_THROW(tiles(int64_t{1} << 40, int64_t{1} << 40, 1), ShapeError);
}

// Normal numbers of f64 come from the logarithm and the sine of CUDA's library on a GPU, which are within 2
// units of the last place of the C library's.
double bound_of_normals(DType dtype) { return dtype == kF64 && !gpu::on_emulation() ? 0x1p-49 : 0; }

// Vectors, what is left of one, and tensors that begin anywhere; nothing beside them is touched.
// Two's complement in every kernel that adds or multiplies; sanitizers end the emulation otherwise.
TEST(CudaIntegers, WrapPast64BitsAsOnTheCpu) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  const Tensor x =
      tensor(std::vector<int64_t>{kMost, 3, kLeast, -5, kMost, 7, 11, kMost, kMost, kLeast, 2, -1},
             {3, 4});
  const Tensor index = tensor({0, 1, 0, 1}, kI64), rows = tensor({1, 1, 1}, kI64);
  using Call = std::function<Tensor(const Tensor&, const Device&)>;
  const std::vector<std::pair<std::string, Call>> calls = {
      {"sum", [](const Tensor& x, const Device&) { return sum(x); }},
      {"sum of rows", [](const Tensor& x, const Device&) { return sum(x, {1}); }},
      {"sum of columns", [](const Tensor& x, const Device&) { return sum(x, {0}); }},
      {"prod", [](const Tensor& x, const Device&) { return prod(x, 1); }},
      {"prod of columns", [](const Tensor& x, const Device&) { return prod(x, 0); }},
      {"cumsum", [](const Tensor& x, const Device&) { return cumsum(x, 1); }},
      {"cumsum of columns", [](const Tensor& x, const Device&) { return cumsum(x, 0); }},
      {"cumprod", [](const Tensor& x, const Device&) { return cumprod(x, 1); }},
      {"matmul", [](const Tensor& x, const Device&) { return matmul(x, x.t()); }},
      {"dot", [](const Tensor& x, const Device&) { return dot(x.select(0, 0), x.select(0, 1)); }},
      {"index_add",
       [&](const Tensor& x, const Device& to) { return index_add(x, 0, rows.to(to), x); }},
      {"scatter_add",
       [&](const Tensor& x, const Device& to) {
         return scatter_add(x, 1, index.to(to).expand({3, 4}), x);
       }},
      {"triu", [](const Tensor& x, const Device&) { return triu(x, kLeast); }},
      {"triu", [](const Tensor& x, const Device&) { return triu(x, kMost); }},
      {"tril", [](const Tensor& x, const Device&) { return tril(x, kLeast); }},
      {"tril", [](const Tensor& x, const Device&) { return tril(x, kMost); }},
  };
  for (const auto& [name, call] : calls) {
    EXPECT_EQ(call(x.to(kGpu), kGpu).to_vector<int64_t>(), call(x, kCpu).to_vector<int64_t>())
        << name;
  }
  EXPECT_EQ(tril(x, kMost).to_vector<int64_t>(), x.to_vector<int64_t>());
  EXPECT_EQ(triu(x, kLeast).to_vector<int64_t>(), x.to_vector<int64_t>());
}

TEST(CudaFill, WritesElementsThatLieOnOneAnotherOnce) {
  const Tensor x = zeros({3, 1}, {.device = kGpu});
  x.expand({3, 300}).fill_(2);
  EXPECT_EQ(x.to_vector(), (std::vector<double>{2, 2, 2}));
  x.expand({3, 300}).zero_();
  EXPECT_EQ(x.to_vector(), (std::vector<double>{0, 0, 0}));
}

TEST(CudaPool, AWindowOfPaddingAloneIsNowhere) {
  for (const int64_t size : {1, 3}) {
    const Tensor x = ones({1, 1, size, size}, {.device = kGpu}).set_requires_grad();
    const auto [values, indices] = max_pool2d_with_indices(x, {2}, {3}, {1}, {size + 1});
    EXPECT_EQ(values.to_vector(), (std::vector<double>{-INFINITY}));
    EXPECT_EQ(indices.item<int64_t>(), size * size);
    values.sum().backward();
    EXPECT_EQ(x.grad().abs().sum().item(), 0);
  }
}

TEST(CudaReduce, AZeroOfAnExtremumIsPositive) {
  for (const double first : {0.0, -0.0}) {
    const Tensor x = tensor({first, -first}).to(kF32).to(kGpu);
    for (const Tensor& y : {max(x), min(x)}) EXPECT_FALSE(std::signbit(y.item<float>()));
  }
}

TEST(CudaRandom, FillsTensorsOfAnyLengthAndAlignment) {
  const RandomStream stream{11, 4};
  for (const DType dtype : {kF64, kF32, kF16, kBF16, kI64, kI32, kU8, kBool}) {
    const int64_t high = dtype == kI64 ? int64_t{1} << 50 : dtype == kI32 ? 1 << 30 : 200;
    for (const int64_t length : {1, 7, 16, 1027}) {
      for (const int64_t offset : {0, 1, 16}) {
        SCOPED_TRACE(testing::Message() << dtype << ", " << length << " from " << offset);
        const auto expect_same = [&](const auto& fill, double bound = 0) {
          const auto filled = [&](const Device& device) {
            const Tensor all = raw::full({offset + length + 20}, 1, dtype, device);
            fill(all.narrow(0, offset, length));
            return all;
          };
          expect_equal(filled(kGpu), filled(kCpu), bound);
        };
        expect_same([&](const Tensor& x) { kernels::random_bernoulli(x, 0.4, stream); });
        expect_same([&](const Tensor& x) { kernels::random_integers(x, -2, high, stream); });
        if (!is_floating(dtype)) continue;
        expect_same([&](const Tensor& x) { kernels::random_uniform(x, 0, 1, stream); });
        expect_same([&](const Tensor& x) { kernels::random_uniform(x, -2, 3, stream); });
        expect_same([&](const Tensor& x) { kernels::random_normal(x, 0.5, 2, stream); },
                    bound_of_normals(dtype));
      }
    }
  }
}

// As ranks fill their shards: wherever the whole is cut, and on either device.
TEST(CudaRandom, PartsHaveTheNumbersOfTheWhole) {
  const RandomStream stream{11, 4};
  const int64_t far = (int64_t{1} << 40) + 5;
  for (const DType dtype : {kF64, kF32, kF16, kBF16, kI64, kU8}) {
    const auto expect_parts = [&](const auto& fill, double bound = 0) {
      const Tensor whole = raw::empty({1100}, dtype);
      fill(whole, 0);
      for (const int64_t first : {1, 2, 7, 8, 16, 1024}) {
        for (const int64_t length : {1, 3, 61}) {
          SCOPED_TRACE(testing::Message() << dtype << ", " << length << " from " << first);
          const Tensor part = raw::full({length + 2}, 1, dtype, kGpu);  // nothing beside is touched
          fill(part.narrow(0, 1, length), first);
          const Tensor expected = raw::full({length + 2}, 1, dtype);
          kernels::copy_into(expected.narrow(0, 1, length), whole.narrow(0, first, length));
          expect_equal(part, expected, bound);
        }
      }
      const Tensor beyond = raw::empty({40}, dtype), there = raw::empty({40}, dtype, kGpu);
      fill(beyond, far);
      fill(there, far);
      expect_equal(there, beyond, bound);
    };
    expect_parts(
        [&](const Tensor& x, int64_t first) { kernels::random_bernoulli(x, 0.4, stream, first); });
    expect_parts([&](const Tensor& x, int64_t first) {
      kernels::random_integers(x, 0, 200, stream, first);
    });
    if (!is_floating(dtype)) continue;
    expect_parts(
        [&](const Tensor& x, int64_t first) { kernels::random_uniform(x, -2, 3, stream, first); });
    expect_parts(
        [&](const Tensor& x, int64_t first) { kernels::random_normal(x, 0.5, 2, stream, first); },
        bound_of_normals(dtype));
  }
}

// Views of one packed buffer at any element, in every pair of dtypes.
TEST(CudaMultiTensorCopy, HasTheBitsOfTheCpu) {
  const std::vector<int64_t> lengths = {0, 1, 5, 16400, 33, 8};
  for (const DType from : {kF64, kF32, kF16, kBF16}) {
    for (const DType to : {kF64, kF32, kF16, kBF16}) {
      for (const int64_t gap : {0, 1, 8}) {
        SCOPED_TRACE(testing::Message() << from << " to " << to << ", gaps of " << gap);
        const Tensor flat = numbers({17000}, from);
        const auto copied = [&](const Device& device) {
          const Tensor source = flat.to(device), target = raw::full({17000}, 3, to, device);
          TensorList sources, targets;
          int64_t place = gap;
          for (const int64_t length : lengths) {
            sources.push_back(source.narrow(0, place, length));
            targets.push_back(target.narrow(0, place, length));
            place += length + gap;
          }
          kernels::multi_tensor_copy(targets, sources);
          return target;
        };
        expect_equal(copied(kGpu), copied(kCpu));
      }
    }
  }
}

TEST(CudaMultiTensorCopy, IsOneLaunchOfAnyMix) {
  const Tensor x = numbers({3, 40}, kF32);
  const auto copied = [&](const Device& device) -> TensorList {
    const TensorList sources = {x.to(device), x.t().to(kF64).to(device), x.to(kI32).to(device),
                                x.to(kU8).to(device).t()};
    const TensorList targets = {
        raw::empty({3, 40}, kBF16, device), raw::empty({40, 3}, kF16, device),
        raw::empty({3, 40}, kI32, device), raw::empty({40, 3}, kU8, device)};
    kernels::multi_tensor_copy(targets, sources);
    return targets;
  };
  TensorList got;
  const auto work = [&] { got = copied(kGpu); };
  EXPECT_EQ(launches_of("multi_tensor_copy", work), 1);
  const TensorList expected = copied(kCpu);
  for (size_t i = 0; i < got.size(); ++i) expect_equal(got[i], expected[i]);
}

// Many pieces and padding, at places that are aligned to vectors on both sides, on one, on none.
TEST(CudaCopySegments, HaveTheBitsOfTheCpuInOneLaunch) {
  for (const DType from : {kF64, kF32, kF16, kBF16, kU8}) {
    for (const DType to : {kF64, kF32, kF16, kBF16, kU8}) {
      if ((from == kU8) != (to == kU8)) continue;
      for (const int64_t gap : {0, 1, 16}) {
        SCOPED_TRACE(testing::Message() << from << " to " << to << ", gaps of " << gap);
        const Tensor flat = numbers({60000}, from);
        const auto copied = [&](const Device& device) {
          const Tensor source = flat.to(device), target = raw::full({60000}, 3, to, device);
          std::vector<kernels::CopySegment> segments;
          int64_t place = gap;
          const auto add = [&](int64_t length) {
            char* const there = static_cast<char*>(target.data()) + place * size_of(to);
            const int64_t first = 48000 - place - length;  // from the end to the beginning
            segments.push_back(
                {static_cast<const char*>(source.data()) + first * size_of(from), there, length});
            segments.push_back({nullptr, there + length * size_of(to), length % 19});
            place += length + length % 19 + gap;
          };
          for (const int64_t length : {0, 1, 16400, 32, 5, 16384}) add(length);
          for (int64_t i = 0; i < 150; ++i) add(i % 35);
          kernels::copy_segments(segments, from, to, device);
          return target;
        };
        Tensor got;
        const auto work = [&] { got = copied(kGpu); };
        EXPECT_EQ(launches_of("copy_segments", work), 1);
        expect_equal(got, copied(kCpu));
      }
    }
  }
}

TEST(CudaDropout, KeepsTheElementsThatTheCpuKeeps) {
  const RandomStream stream{11, 4};
  for (const DType dtype : {kF64, kF32, kF16, kBF16}) {
    const Tensor all = numbers({1060}, dtype), gradients = numbers({1060}, dtype, 31);
    for (const int64_t length : {1, 7, 16, 1027}) {
      for (const int64_t offset : {0, 1, 16}) {
        SCOPED_TRACE(testing::Message() << dtype << ", " << length << " from " << offset);
        const auto run = [&](const Device& device) -> TensorList {
          const Tensor x = leaf(all.to(device).narrow(0, offset, length));
          const Tensor y = dropout(x, 0.3, true, stream);
          y.backward(gradients.to(device).narrow(0, offset, length));
          return {y, x.grad()};
        };
        const TensorList got = run(kGpu), expected = run(kCpu);
        expect_equal(got[0], expected[0]);
        expect_equal(got[1], expected[1]);
      }
    }
    const Tensor columns = numbers({33, 7}, dtype).transpose(0, 1);
    expect_equal(dropout(columns.to(kGpu), 0.3, true, stream), dropout(columns, 0.3, true, stream));
  }
}

TEST(CudaDropout, APartKeepsWhatTheCpuKeepsOfIt) {
  const RandomStream stream{11, 4};
  const std::vector<std::vector<DimCut>> parts = {
      {{.dim = 1, .parts = 2, .part = 1}},
      {{.dim = 2, .blocks = 3, .parts = 2, .part = 1}},
      {{.dim = 1, .parts = 3, .part = 2}, {.dim = 2, .parts = 5, .part = 3}}};
  for (const DType dtype : {kF64, kF32, kBF16}) {
    for (const Shape& shape : {Shape{3, 5, 24}, Shape{2, 3, 9}}) {
      const Tensor x = numbers(shape, dtype);
      for (const std::vector<DimCut>& cuts : parts) {
        const auto place = kernels::DrawPlace::of(shape, cuts);
        expect_equal(kernels::dropout(x.to(kGpu), 0.3, stream, place),
                     kernels::dropout(x, 0.3, stream, place));
      }
    }
  }
}

// The norm takes dropout of a part from a kernel of its own.
TEST(CudaDropout, APartOfAResidualNormKeepsWhatTheCpuKeepsOfIt) {
  const Shape shape{3, 5, 64};
  const std::vector<DimCut> cuts = {{.dim = 1, .parts = 2, .part = 1}};
  const kernels::ResidualDropout drop{0.3, {11, 4}, kernels::DrawPlace::of(shape, cuts)};
  const Tensor x = numbers(shape, kF32), residual = numbers(shape, kF32, 31);
  const Tensor weight = numbers({64}, kF32, 5);
  const auto run = [&](const Device& device) -> TensorList {
    const kernels::RowNorm n = kernels::row_norm_forward(x.to(device), residual.to(device), 64,
                                                         weight.to(device), {}, 1e-5, true, drop);
    const bool wanted[3] = {true, true, false};
    const kernels::RowNormGradients g =
        kernels::row_norm_backward(residual.to(device), {}, n.sum, 64, weight.to(device), n.mean,
                                   n.rstd, wanted, {.dropout = drop, .column_sums = true});
    EXPECT_FALSE(g.column_sums.defined());
    return {n.sum, ne(g.update, 0), eq(g.input, 0)};
  };
  const TensorList got = run(kGpu), expected = run(kCpu);
  for (size_t i = 0; i < got.size(); ++i) expect_equal(got[i], expected[i]);
}

TEST(CudaMultinomial, DrawsWhatTheCpuDraws) {
  const Tensor weights = mul(numbers({3, 301}, kF32).abs(), 0.5);
  const RandomStream stream{11, 4};
  expect_equal(multinomial(weights.to(kGpu), 500, true, stream),
               multinomial(weights, 500, true, stream));
  expect_equal(multinomial(weights.to(kGpu), 90, false, stream),
               multinomial(weights, 90, false, stream));
  EXPECT_THROW(multinomial(tensor({1, -2}).to(kGpu), 1, true, stream), ValueError);
  EXPECT_THROW(multinomial(tensor({1, INFINITY}).to(kGpu), 1, true, stream), ValueError);
  EXPECT_THROW(multinomial(tensor({1, 0}).to(kGpu), 2, false, stream), ValueError);
  EXPECT_THROW(multinomial(tensor({1e308, 1e308}, kF64).to(kGpu), 1, true, stream), ValueError);
}

TEST(CudaRotary, TurnsGroupsAndSinglePairsAlike) {
  for (const int64_t width : {16, 8, 6}) {
    const Tensor angles = mul(numbers({5, width / 2}, kF32), 0.01);
    for (const DType dtype : {kF32, kBF16}) {
      const Tensor x = numbers({2, 5, 3, width}, dtype).transpose(1, 2);
      const Tensor c = cos(angles), s = sin(angles);
      for (const bool interleaved : {false, true}) {
        expect_equal(rotary_embedding(x.to(kGpu), c.to(kGpu), s.to(kGpu), interleaved),
                     rotary_embedding(x, c, s, interleaved));
      }
    }
  }
}

// On tensor cores, by whole tiles and parts of them, operands in either order, aligned or not. The
// sums are exact, so their order does not matter.
TEST(CudaMatmul, TilesOfTensorCores) {
  struct Size {
    int64_t M, N, K;
  };
  for (const DType dtype : {kBF16, kF16}) {
    for (const auto& [M, N, K] : {Size{48, 64, 16}, Size{130, 136, 72}, Size{61, 150, 33}}) {
      const Tensor a = mul(numbers({2, M, K}, kF32, 9), 0.5).to(dtype);
      const Tensor b = mul(numbers({2, K, N}, kF32, 7), 0.5).to(dtype);
      const auto by_columns = [](const Tensor& x) { return x.transpose(1, 2).contiguous(); };
      const Tensor a_t = by_columns(a), b_t = by_columns(b);
      for (const bool a_turned : {false, true}) {
        for (const bool b_turned : {false, true}) {
          SCOPED_TRACE(testing::Message() << dtype << " " << M << " x " << N << " x " << K << " "
                                          << a_turned << b_turned);
          const auto run = [&](const Device& device) {
            const Tensor left = a_turned ? a_t.to(device).transpose(1, 2) : a.to(device);
            return matmul(left, b_turned ? b_t.to(device).transpose(1, 2) : b.to(device));
          };
          expect_equal(run(kGpu), run(kCpu));
        }
      }
      const Tensor bias = numbers({N}, dtype, 9), x = a.select(0, 1), weight = b_t.select(0, 0);
      expect_equal(linear(x.to(kGpu), weight.to(kGpu), bias.to(kGpu)), linear(x, weight, bias));
      const Tensor c = numbers({M, N}, dtype, 5), other = b.select(0, 1);
      expect_equal(addmm(c.to(kGpu), x.to(kGpu), other.to(kGpu), 0.5, 2),
                   addmm(c, x, other, 0.5, 2));
      const Tensor wide = raw::full({M, N}, 3, kF32), device_wide = wide.to(kGpu);
      kernels::matmul_into(device_wide, x.to(kGpu), other.to(kGpu), true);
      kernels::matmul_into(wide, x, other, true);
      expect_equal(device_wide, wide);
    }
  }
}

TEST(CudaConv, SpansTilesAndParts) {
  // More rows, columns and inner elements than a tile has, and several parts of the sum.
  const Tensor x = mul(numbers({3, 6, 21, 19}, kF32, 9), 0.5);
  const Tensor weight = mul(numbers({66, 3, 3, 3}, kF32, 7), 0.25);
  const ConvOptions options{.padding = {1, 1}, .groups = 2};
  const auto run = [&](const Device& device) {
    const Tensor a = leaf(x.to(device)), w = leaf(weight.to(device));
    const Tensor y = conv2d(a, w, {}, options);
    y.backward(numbers(y.shape(), kF32, 5).to(device));
    return std::vector<Tensor>{y.detach(), a.grad(), w.grad()};
  };
  const std::vector<Tensor> got = run(kGpu), expected = run(kCpu);
  for (size_t i = 0; i < got.size(); ++i) expect_equal(got[i], expected[i]);  // sums are exact
}

TEST(CudaLoss, InPlaceGradientsOfRowsWithAndWithoutVectors) {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const int64_t classes : {1200, 1203}) {
      const Tensor logits = mul(numbers({5, classes}, kF32), 0.1).to(dtype);
      const Tensor target = tensor({7.0, -100.0, 0.0, 1199.0, 1.0}, kI64);
      const auto run = [&](const Device& device) {
        const Tensor x = leaf(logits.to(device));
        const Tensor loss = cross_entropy_inplace(mul(x, 1), target.to(device));
        mul(loss, 2).backward();
        return std::vector<Tensor>{loss.detach(), x.grad()};
      };
      const std::vector<Tensor> got = run(kGpu), expected = run(kCpu);
      const double eps = dtype == kF32 ? 0x1p-23 : dtype == kBF16 ? 0x1p-8 : 0x1p-10;
      expect_close(got[0], expected[0], 16 * eps);
      expect_close(got[1], expected[1], eps);  // at most 1/2
    }
  }
}

// In registers of one to four warps, with idle lanes and without, of more warps, not aligned.
TEST(CudaNorm, RowsOfAllWidths) {
  for (const int64_t width : {512, 24, 768, 1000, 1032, 13}) {
    for (const DType dtype : {kF32, kBF16, kF64}) {
      // More rows than a block of the backward has.
      const Tensor x = mul(numbers({67, width}, kF32), 0.125).to(dtype);
      const Tensor weight = add(mul(numbers({width}, kF32, 9), 0.1), 1).to(dtype);
      const Tensor bias = mul(numbers({width}, kF32, 11), 0.1).to(dtype);
      const Tensor grad = mul(numbers({67, width}, kF32, 41), 0.05).to(dtype);
      const auto run = [&](const Device& device) {
        const Tensor a = leaf(x.to(device)), w = leaf(weight.to(device)), b = leaf(bias.to(device));
        const auto [sum, y] = residual_layer_norm(a, a, {width}, w, b);
        const Tensor z = rms_norm(sum, {width}, w);
        add(add(y, z), sum).backward(grad.to(device));
        return std::vector<Tensor>{y.detach(), z.detach(), a.grad(), w.grad(), b.grad()};
      };
      const std::vector<Tensor> got = run(kGpu), expected = run(kCpu);
      const double eps = dtype == kF64 ? 0x1p-52 : dtype == kF32 ? 0x1p-23 : 0x1p-8;
      for (size_t i = 0; i < got.size(); ++i) {
        double largest = 1;
        for (const double value : expected[i].to_vector()) {
          largest = std::max(largest, std::abs(value));
        }
        SCOPED_TRACE(testing::Message() << "result " << i << " of width " << width);
        expect_close(got[i], expected[i], 16 * eps * largest);
      }
    }
  }
}

// GELU's gradient in one pass with the sums of the bias, and without vectors apart.
TEST(CudaNorm, GeluBringsTheSumsOfItsBias) {
  for (const int64_t width : {264, 13}) {
    for (const DType dtype : {kF32, kBF16}) {
      for (const Gelu form : {Gelu::kNone, Gelu::kTanh}) {
        SCOPED_TRACE(testing::Message() << width << " " << dtype);
        const Tensor x = mul(numbers({70, 8}, kF32), 0.02).to(dtype);
        const Tensor matrix = mul(numbers({width, 8}, kF32, 31), 0.05).to(dtype);
        const Tensor scales = mul(numbers({width}, kF32, 9), 0.1).to(dtype);
        const Tensor up = mul(numbers({70, width}, kF32, 41), 0.05).to(dtype);
        const auto run = [&](const Device& device) {
          const Tensor a = leaf(x.to(device)), w = leaf(matrix.to(device));
          const Tensor b = leaf(scales.to(device));
          linear_gelu(a, w, b, form).backward(up.to(device));
          const Tensor out = leaf(matrix.t().contiguous().to(device));
          linear_gelu_linear(a, w, b, out, {}, form)
              .backward(up.slice(1, 0, 1).to(device).expand({70, 8}));
          return std::vector<Tensor>{a.grad(), w.grad(), b.grad(), out.grad()};
        };
        const std::vector<Tensor> got = run(kGpu), expected = run(kCpu);
        expect_results_close(got, expected, dtype);
      }
    }
  }
}

// Dropout on the way to the residual draws what dropout draws; the bias of the layer before, whose
// gradient comes with that of the norm, has the gradient that it has on the CPU, also where the
// stream goes on, and where a hook writes over the gradient on its way.
TEST(CudaNorm, BringsDropoutAndTheSumsOfTheBiasBefore) {
  for (const int64_t width : {24, 768, 1032, 13}) {
    for (const DType dtype : {kF32, kBF16, kF64}) {
      if (dtype == kF64 && width != 24) continue;
      for (const bool hooked : {false, true}) {
        SCOPED_TRACE(testing::Message() << width << " " << dtype << (hooked ? " hooked" : ""));
        const Tensor x = mul(numbers({67, 16}, kF32), 0.02).to(dtype);
        const Tensor matrix = mul(numbers({width, 16}, kF32, 31), 0.05).to(dtype);
        const Tensor other = mul(numbers({67, width}, kF32, 37), 0.05).to(dtype);
        const Tensor scales = add(mul(numbers({width}, kF32, 9), 0.1), 1).to(dtype);
        const auto run = [&](const Device& device) {
          const auto put = [&](const Tensor& t) { return leaf(t.to(device)); };
          const Tensor a = put(x), w = put(matrix), b = put(scales), n = put(scales);
          const Tensor residual = put(other);
          const Tensor inner = linear(a, w, b);
          const ResidualNorm first =
              residual_layer_norm(inner, residual, {width}, n, b, 1e-5, 0.25, RandomStream{5, 9});
          const Tensor onto = linear(a, w, b, first.residual);
          const Tensor y = layer_norm(onto, {width}, n, b);
          if (hooked) {
            register_hook(inner, [](const Tensor& g) { return mul(g, 2); });
            register_hook(onto, [](const Tensor& g) { return mul_(g, 3); });
          }
          sum(add(mul(y, first.normalized), mul(onto, 0.5))).backward();
          return std::vector<Tensor>{y.detach(), a.grad(), w.grad(),
                                     b.grad(),   n.grad(), residual.grad()};
        };
        const std::vector<Tensor> got = run(kGpu), expected = run(kCpu);
        expect_results_close(got, expected, dtype);
      }
    }
  }
}

TEST(CudaNorm, BatchNormOfManySamplesAndItsRunningStatistics) {
  const Tensor x = mul(numbers({130, 5}, kF32), 0.125);
  const auto run = [&](const Device& device) {
    const Tensor a = leaf(x.to(device));
    const Tensor mean = raw::zeros({5}, kF32, device), variance = raw::full({5}, 1, kF32, device);
    const Tensor y = batch_norm(a, mean, variance, {}, {}, true, 0.1, 1e-5);
    y.backward(mul(numbers(y.shape(), kF32), 0.25).to(device));
    return std::vector<Tensor>{y.detach(), a.grad(), mean, variance};
  };
  const std::vector<Tensor> got = run(kGpu), expected = run(kCpu);
  for (size_t i = 0; i < got.size(); ++i) expect_close(got[i], expected[i], 3e-5);
}

// 65536 pieces of 64 samples, one more than the second dimension of a grid has.
TEST(CudaNorm, BatchNormHasMoreSamplesThanAGridHasRows) {
  const Tensor x = mul(numbers({65535 * kernels::kNormRows + 1, 1}, kF32), 0.125);
  const auto sums = [&](const Device& device) {
    const Tensor there = x.to(device), mean = raw::full({1}, 0.5, kF32, device);
    constexpr bool kWanted[3] = {false, true, true};
    return kernels::channel_norm_backward(there, there, 0, mean, mean, {}, false, kWanted);
  };
  const kernels::RowNormGradients got = sums(kGpu), expected = sums(kCpu);
  expect_equal(got.weight, expected.weight);
  expect_equal(got.bias, expected.bias);
}

// Rows of the table within a segment, at its ends, over many segments; by vectors and one by one.
TEST(CudaEmbedding, GradientSumsLongRunsOfOneToken) {
  for (const int64_t different : {3, 61, 999}) {
    for (const int64_t width : {4, 5, 520}) {
      for (const DType dtype : {kF32, kBF16}) {
        if (dtype == kBF16 && width < 520) continue;
        const int64_t count = width > 5 ? 200 : 2500;
        const Tensor index = add(numbers({count}, kI64, different), different / 2);
        const Tensor grad = mul(numbers({count, width}, dtype), 0.5);
        const auto run = [&](const Device& device) {
          const Tensor table = leaf(raw::zeros({1000, width}, dtype, device));
          embedding(index.to(device), table, 2).backward(grad.to(device));
          return table.grad();
        };
        expect_equal(run(kGpu), run(kCpu));
      }
    }
  }
}

}  // namespace
}  // namespace tessera::test_cuda_kernels
