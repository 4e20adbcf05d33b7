// Kernels over rows: short ones in registers, long ones in shared memory, the longest read twice;
// aligned, not aligned, a piece of a wider matrix. Each on a GPU against the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>

namespace tessera::test_cuda_rows {
namespace {

const Device kGpu = cuda(0);

// Numbers between -range and range.
Tensor numbers(const Shape& shape, DType dtype, double range = 4) {
  std::vector<double> values(static_cast<size_t>(numel_of(shape)));
  uint64_t state = 7;
  for (double& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = range * (static_cast<double>((state >> 33) % 20001) / 10000 - 1);
  }
  return tensor(values, shape, dtype);
}
Tensor leaf(const Tensor& x) { return x.detach().set_requires_grad(); }
double eps_of(DType dtype) {
  return dtype == kF64 ? 0x1p-52 : dtype == kF32 ? 0x1p-23 : dtype == kBF16 ? 0x1p-8 : 0x1p-10;
}

// Within `ulps` of the largest number that is expected.
void expect_close(const Tensor& got, const Tensor& expected, double ulps) {
  ASSERT_TRUE(got.device().is_cuda());
  ASSERT_EQ(got.shape(), expected.shape());
  ASSERT_EQ(got.dtype(), expected.dtype());
  const std::vector<double> a = got.to_vector(), b = expected.to_vector();
  double largest = 0;
  for (const double value : b) {
    if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
  }
  const double bound = ulps * eps_of(got.dtype()) * largest;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isfinite(b[i])) {
      ASSERT_NEAR(a[i], b[i], bound) << "element " << i;
    } else {
      ASSERT_TRUE(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])))
          << "element " << i << ": " << a[i] << ", on the CPU " << b[i];
    }
  }
}

// run(device): results on a device.
template <class Run>
void compare(const Run& run, double ulps) {
  const std::vector<Tensor> got = run(kGpu), expected = run(kCpu);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "result " << i);
    expect_close(got[i], expected[i], ulps);
  }
}

// softmax and log_softmax along dimension 1, with their gradients.
std::vector<Tensor> softmaxes(const Tensor& x, const Tensor& grad, const Device& device) {
  const Tensor a = leaf(x.to(device)), b = leaf(x.to(device));
  const Tensor y = softmax(a, 1), z = log_softmax(b, 1);
  y.backward(grad.to(device));
  z.backward(grad.to(device));
  return {y.detach(), a.grad(), z.detach(), b.grad()};
}

TEST(CudaSoftmax, RowsOfAnyLength) {
  for (const int64_t n : {1, 1000, 1021, 1025, 4096, 50257, 100000}) {
    for (const DType dtype : {kF32, kBF16, kF64}) {
      if (n > 4096 && dtype != (n == 50257 ? kBF16 : kF32)) continue;
      SCOPED_TRACE(testing::Message() << "rows of " << n << " " << dtype);
      const Tensor x = numbers({3, n}, dtype), grad = numbers({3, n}, dtype, 1);
      compare([&](const Device& device) { return softmaxes(x, grad, device); }, 16);
    }
  }
}

TEST(CudaSoftmax, RowsThatBeginAnywhere) {
  for (const int64_t n : {768, 2050}) {
    const Tensor all = numbers({1 + 3 * n}, kBF16);
    compare(
        [&](const Device& device) {
          const Tensor rows = all.to(device).narrow(0, 1, 3 * n).view({3, n});
          return std::vector<Tensor>{softmax(rows, 1)};
        },
        4);
  }
}

TEST(CudaSoftmax, AnotherDimension) {
  for (const Shape& shape : {Shape{2, 70, 33}, Shape{3, 5, 100}, Shape{1, 300, 2}}) {
    const Tensor x = numbers(shape, kF32), grad = numbers(shape, kF32, 1);
    compare([&](const Device& device) { return softmaxes(x, grad, device); }, 16);
  }
}

// A thread, and a whole row, may see nothing but -infinity.
TEST(CudaSoftmax, InfinitiesAndNan) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const int64_t n : {600, 3000}) {
    std::vector<double> values(static_cast<size_t>(4 * n), -infinity);
    values[5] = 1, values[6] = 2;                       // row 0: two numbers
    values[static_cast<size_t>(n) + 7] = std::nan("");  // row 1
    values[static_cast<size_t>(2 * n) + 8] = 3;         // row 2: one number
    for (const DType dtype : {kF32, kF16}) {
      const Tensor x = tensor(values, {4, n}, dtype);
      compare(
          [&](const Device& device) {
            return std::vector<Tensor>{softmax(x.to(device), 1), log_softmax(x.to(device), 1),
                                       softmax(x.to(device).t().contiguous(), 0)};
          },
          4);
    }
  }
}

// A row of 24500 in bf16 and what the block shares beside it are over 48 KiB together.
TEST(CudaCrossEntropy, RowsOfAnyLength) {
  for (const int64_t classes : {1025, 24500, 50257, 100000}) {
    for (const DType dtype : {kF32, kBF16}) {
      if (classes > 20000 && dtype != (classes < 100000 ? kBF16 : kF32)) continue;
      SCOPED_TRACE(testing::Message() << classes << " classes, " << dtype);
      const Tensor x = numbers({3, classes}, dtype);
      const Tensor target = tensor({static_cast<double>(classes - 1), -100.0, 17.0}, kI64);
      compare(
          [&](const Device& device) {
            const Tensor a = leaf(x.to(device)), b = leaf(x.to(device));
            const Tensor loss = cross_entropy(a, target.to(device));
            loss.backward();
            const Tensor in_place = cross_entropy_inplace(mul(b, 1), target.to(device));
            in_place.backward();
            return std::vector<Tensor>{loss.detach(), a.grad(), in_place.detach(), b.grad()};
          },
          16);
    }
  }
}

TEST(CudaCrossEntropy, WeightsAndSmoothingInOneWalk) {
  const Tensor x = numbers({4, 1030}, kF32);
  const Tensor weight = add(numbers({1030}, kF32, 0.5), 1);
  const Tensor target = tensor({0.0, 1029.0, 5.0, -100.0}, kI64);
  for (const bool weighted : {false, true}) {
    compare(
        [&](const Device& device) {
          const Tensor a = leaf(x.to(device));
          const Tensor loss = cross_entropy(
              a, target.to(device),
              {.weight = weighted ? weight.to(device) : Tensor(), .label_smoothing = 0.1});
          loss.backward();
          return std::vector<Tensor>{loss.detach(), a.grad()};
        },
        16);
  }
}

// The logits of a padded vocabulary: rows of a wider matrix, which begin at any place.
TEST(CudaCrossEntropy, RowsOfAWiderMatrix) {
  for (const int64_t first : {0, 3}) {
    for (const DType dtype : {kF32, kBF16, kF16}) {
      const Tensor wide = numbers({3, 2057}, dtype);
      const Tensor target = tensor({2049.0, 0.0, 3.0}, kI64);
      compare(
          [&](const Device& device) {
            const Tensor a = leaf(wide.to(device));
            cross_entropy(a.narrow(1, first, 2050), target.to(device)).backward();
            const Tensor b = leaf(wide.to(device));
            const Tensor loss =
                cross_entropy_inplace(mul(b, 1).narrow(1, first, 2050), target.to(device));
            mul(loss, 3).backward();
            return std::vector<Tensor>{a.grad(), loss.detach(), b.grad()};
          },
          8);
    }
  }
}

TEST(CudaCrossEntropy, ForbiddenClassesHaveNoShareInTheLoss) {
  std::vector<double> values(2 * 4000, -std::numeric_limits<double>::infinity());
  for (const size_t i : {3u, 9u, 3999u, 4001u, 4005u}) values[i] = static_cast<double>(i % 7);
  const Tensor x = tensor(values, {2, 4000}, kF32), target = tensor({9.0, 5.0}, kI64);
  compare(
      [&](const Device& device) {
        const Tensor a = leaf(x.to(device)), b = leaf(x.to(device));
        const Tensor loss = cross_entropy(a, target.to(device));
        loss.backward();
        const Tensor in_place = cross_entropy_inplace(mul(b, 1), target.to(device));
        in_place.backward();
        return std::vector<Tensor>{loss.detach(), a.grad(), in_place.detach(), b.grad()};
      },
      8);
}

// The gradient lies over the logits: what multiplies it is made up for when it comes again.
TEST(CudaCrossEntropy, InPlaceGradientServesTwoBackwards) {
  const Tensor x = numbers({3, 1040}, kF32), target = tensor({1.0, 2.0, 3.0}, kI64);
  const auto run = [&](const Device& device) {
    const Tensor a = leaf(x.to(device));
    const Tensor loss = cross_entropy_inplace(mul(a, 1), target.to(device));
    const Tensor twice = mul(loss, 2), thrice = mul(loss, 3);
    backward(twice, {}, {.retain_graph = true});
    const Tensor first = a.grad().clone();
    backward(thrice);
    return std::vector<Tensor>{first, a.grad()};
  };
  compare(run, 8);
}

// Backward beyond the registers: with vectors in shared memory, without, with rows that begin at
// another place each, read twice; column sums of several blocks of rows and tiles of columns.
TEST(CudaNorm, GradientsOfRowsTooLongForRegisters) {
  struct Case {
    int64_t rows, width;
    DType dtype;
  };
  for (const auto& [rows, width, dtype] :
       {Case{2, 8208, kBF16}, Case{3, 8203, kBF16}, Case{66, 301, kBF16}, Case{2, 8196, kF32},
        Case{1, 30001, kF32}, Case{1, 58000, kF16}, Case{2, 4099, kF64}, Case{130, 37, kF16}}) {
    SCOPED_TRACE(testing::Message() << rows << " rows of " << width << " " << dtype);
    const Tensor x = numbers({rows, width}, dtype), grad = numbers({rows, width}, dtype, 1);
    const Tensor weight = add(numbers({width}, kF32, 0.5), 1).to(dtype);
    const Tensor bias = numbers({width}, dtype, 0.5);
    compare(
        [&](const Device& device) {
          const Tensor a = leaf(x.to(device)), w = leaf(weight.to(device));
          const Tensor b = leaf(bias.to(device));
          layer_norm(a, {width}, w, b).backward(grad.to(device));
          const Tensor c = leaf(x.to(device)), v = leaf(weight.to(device));
          rms_norm(c, {width}, v).backward(grad.to(device));
          // Without a weight: the input's gradient alone.
          const Tensor d = leaf(x.to(device));
          rms_norm(d, {width}).backward(mul(grad, grad).to(device));
          return std::vector<Tensor>{a.grad(), w.grad(), b.grad(), c.grad(), v.grad(), d.grad()};
        },
        16);
  }
}

// In a block's registers, in shared memory with and without vectors, read twice.
TEST(CudaNorm, LongRows) {
  for (const int64_t width : {1025, 4096, 8192, 8200, 60000}) {
    for (const DType dtype : {kF32, kBF16}) {
      SCOPED_TRACE(testing::Message() << "rows of " << width << " " << dtype);
      // More than a block of the backward has, where that takes little time.
      const int64_t rows = width == 1025 || width == 4096 ? 66 : 3;
      if (width > 8200 && dtype == kBF16) continue;
      const Tensor x = numbers({rows, width}, dtype), grad = numbers({rows, width}, dtype, 1);
      const Tensor weight = add(numbers({width}, kF32, 0.5), 1).to(dtype);
      const Tensor bias = numbers({width}, dtype, 0.5);
      compare(
          [&](const Device& device) {
            const Tensor a = leaf(x.to(device)), w = leaf(weight.to(device));
            const Tensor b = leaf(bias.to(device));
            const auto [sum, y] = residual_layer_norm(a, a, {width}, w, b);
            add(y, sum).backward(grad.to(device));
            return std::vector<Tensor>{sum.detach(), y.detach(), a.grad(), w.grad(), b.grad()};
          },
          16);
    }
  }
}

// Planes of any length, one block each in backward; the gradient may begin elsewhere than x.
TEST(CudaNorm, GroupsOfPlanesOfAnyLength) {
  for (const Shape& shape : {Shape{3, 6, 5, 7}, Shape{2, 4, 64}, Shape{2, 4, 1029}, Shape{5, 6}}) {
    for (const DType dtype : {kF64, kF32, kBF16}) {
      for (const int64_t offset : {0, 3}) {
        SCOPED_TRACE(testing::Message() << shape << " " << dtype << " " << offset);
        const Tensor weight = add(numbers({shape[1]}, dtype, 0.25), 1);
        const Tensor bias = numbers({shape[1]}, dtype, 1), x = numbers(shape, dtype, 2);
        const Tensor gradients = numbers({numel_of(shape) + offset}, dtype, 1);
        compare(
            [&](const Device& device) {
              const Tensor a = leaf(x.to(device)), w = leaf(weight.to(device));
              const Tensor b = leaf(bias.to(device));
              const Tensor y = group_norm(a, 2, w, b);
              y.backward(gradients.to(device).narrow(0, offset, numel_of(shape)).reshape(shape));
              return std::vector<Tensor>{y.detach(), a.grad(), w.grad(), b.grad()};
            },
            dtype == kF64   ? 64
            : dtype == kF32 ? 32
                            : 4);  // sums in another order
      }
    }
  }
}

// Short rows, rows in shared memory, rows that are read twice, groups.
TEST(CudaNorm, ARowWhoseVarianceOverflowsIsNotANumber) {
  for (const int64_t C : {3, 1024, 40000}) {
    const Tensor x = cat({numbers({1, C}, kF32, 3e25), numbers({1, C}, kF32)}, 0);
    compare(
        [&](const Device& device) -> std::vector<Tensor> {
          const Tensor bias = numbers({C}, kF32).to(device), weight = ones({C}).to(device);
          const Tensor y = layer_norm(x.to(device), {C}, weight, bias);
          EXPECT_TRUE(all(isnan(y[0])).item<bool>()) << C << " on " << device;
          return {y, group_norm(x.to(device), 1, weight, bias)};
        },
        64);
  }
}

TEST(CudaReduce, RowsAndColumnsOfAnyShape) {
  for (const Shape& shape :
       {Shape{2, 70003}, Shape{70, 50}, Shape{9, 1024}, Shape{700, 65}, Shape{520, 64}}) {
    for (const DType dtype : {kF32, kBF16, kF64}) {
      if (shape[1] > 70000 && dtype != kBF16) continue;
      SCOPED_TRACE(testing::Message() << shape << " " << dtype);
      const Tensor x = numbers(shape, dtype, 1);
      compare(
          [&](const Device& device) {
            const Tensor a = x.to(device);
            std::vector<Tensor> results = {sum(a)};
            for (const int64_t dim : {0, 1}) {
              results.push_back(sum(a, {dim}));
              results.push_back(amax(a, {dim}));
              results.push_back(norm(a, 2, {dim}));
              results.push_back(var(a, {dim}));
              results.push_back(logsumexp(a, {dim}));
            }
            return results;
          },
          dtype == kF64 ? 64 : 4);  // sums of f64 in another order
    }
  }
}

// The first of equal numbers, NaN before all others; rows that begin anywhere, columns in tiles.
TEST(CudaReduce, ExtremaWithTheirPlaces) {
  for (const Shape& shape :
       {Shape{5, 1037}, Shape{1037, 5}, Shape{300, 70}, Shape{2, 50, 33}, Shape{64, 2}}) {
    for (const DType dtype : {kF64, kF32, kBF16, kI64, kBool}) {
      SCOPED_TRACE(testing::Message() << shape << " " << dtype);
      const Tensor whole = numbers(shape, kF32, 20).to(kI64).to(dtype);  // many are equal
      std::vector<Tensor> inputs = {whole};
      if (is_floating(dtype)) {
        inputs.push_back(where(gt(numbers(shape, kF32, 1), 0.99), Scalar(std::nan("")), whole));
      }
      for (const Tensor& x : inputs) {
        compare(
            [&](const Device& device) {
              const Tensor a = x.to(device);
              std::vector<Tensor> results;
              for (int64_t dim = 0; dim < a.dim(); ++dim) {
                for (const auto& [values, indices] : {max(a, dim), min(a, dim)}) {
                  results.push_back(values);
                  results.push_back(indices);
                }
              }
              return results;
            },
            0);
      }
    }
  }
}

TEST(CudaReduce, IntegersConditionsAndPieces) {
  const Tensor x = numbers({1200, 70}, kF32, 50).to(kI64);
  const Tensor wide = numbers({600, 131}, kF32, 1);
  const Tensor got[] = {sum(x.to(kGpu), {0}), sum(x.to(kGpu), {1}), amin(x.to(kGpu), {0}),
                        any(gt(x.to(kGpu), 48), {0}), all(gt(x.to(kGpu), -50), {1})};
  const Tensor expected[] = {sum(x, {0}), sum(x, {1}), amin(x, {0}), any(gt(x, 48), {0}),
                             all(gt(x, -50), {1})};
  for (size_t i = 0; i < std::size(got); ++i) {
    EXPECT_EQ(got[i].to_vector(), expected[i].to_vector()) << i;
  }
  compare(
      [&](const Device& device) {
        const Tensor piece = wide.to(device).narrow(1, 3, 66);
        return std::vector<Tensor>{sum(piece, {0}), sum(piece, {1}), sum(piece.t(), {0})};
      },
      4);
}

}  // namespace
}  // namespace tessera::test_cuda_rows
