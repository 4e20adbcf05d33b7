// Kernels that take other ways for large or odd inputs than the samples of the op table reach: each
// result on the emulated device against the CPU's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/random.h>

namespace tessera {
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

void expect_equal(const Tensor& got, const Tensor& expected) {
  ASSERT_TRUE(got.device().is_cuda());
  ASSERT_EQ(got.shape(), expected.shape());
  ASSERT_EQ(got.dtype(), expected.dtype());
  const std::vector<double> a = got.to_vector(), b = expected.to_vector();
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_TRUE(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])))
        << "element " << i << ": " << a[i] << ", on the CPU " << b[i];
  }
}

Tensor leaf(const Tensor& x) { return x.detach().set_requires_grad(); }

void expect_close(const Tensor& got, const Tensor& expected, double bound) {
  ASSERT_TRUE(got.device().is_cuda());
  ASSERT_EQ(got.shape(), expected.shape());
  const std::vector<double> a = got.to_vector(), b = expected.to_vector();
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], bound) << "element " << i;
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
}

TEST(CudaRotary, TurnsGroupsAndSinglePairsAlike) {
  for (const int64_t width : {8, 6}) {
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

// In registers, in registers with idle lanes, too wide for them, not aligned.
TEST(CudaNorm, RowsOfAllWidths) {
  for (const int64_t width : {512, 24, 1032, 13}) {
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

TEST(CudaEmbedding, GradientSumsLongRunsOfOneToken) {
  const Tensor index = add(numbers({2500}, kI64, 3), 1);
  const Tensor grad = mul(numbers({2500, 4}, kF32), 0.5);
  const auto run = [&](const Device& device) {
    const Tensor table = leaf(raw::zeros({70, 4}, kF32, device));
    embedding(index.to(device), table).backward(grad.to(device));
    return table.grad();
  };
  expect_equal(run(kGpu), run(kCpu));
}

}  // namespace
}  // namespace tessera
