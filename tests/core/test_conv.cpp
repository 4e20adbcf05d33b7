#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/conv/conv.h>
#include <tessera/core/kernels/pool/pool.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels::test_conv {
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

struct Reference {
  std::vector<double> y, grad_x, grad_weight;
};

// Every product of the definition once: y, and what it means for the gradients.
Reference convolve(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& grad,
                   const ConvGeometry& g) {
  const int64_t N = x.size(0), C = x.size(1), H = x.size(2), W = x.size(3);
  const int64_t O = w.size(0), CG = w.size(1), KH = w.size(2), KW = w.size(3);
  const int64_t OH = g.output_size(H, KH, 0), OW = g.output_size(W, KW, 1);
  const std::vector<double> xs = x.to_vector(), ws = w.to_vector(), gs = grad.to_vector();
  const std::vector<double> bs = bias.to_vector();
  Reference r{std::vector<double>(static_cast<size_t>(N * O * OH * OW)),
              std::vector<double>(xs.size()), std::vector<double>(ws.size())};
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t o = 0; o < O; ++o) {
      for (int64_t i = 0; i < OH; ++i) {
        for (int64_t j = 0; j < OW; ++j) {
          const size_t at_y = static_cast<size_t>(((n * O + o) * OH + i) * OW + j);
          r.y[at_y] = bs[static_cast<size_t>(o)];
          for (int64_t c = 0; c < CG; ++c) {
            for (int64_t kh = 0; kh < KH; ++kh) {
              for (int64_t kw = 0; kw < KW; ++kw) {
                const int64_t h = i * g.stride[0] - g.padding[0] + kh * g.dilation[0];
                const int64_t v = j * g.stride[1] - g.padding[1] + kw * g.dilation[1];
                if (h < 0 || h >= H || v < 0 || v >= W) continue;
                const int64_t channel = o / (O / g.groups) * CG + c;
                const size_t at_x = static_cast<size_t>(((n * C + channel) * H + h) * W + v);
                const size_t at_w = static_cast<size_t>(((o * CG + c) * KH + kh) * KW + kw);
                r.y[at_y] += xs[at_x] * ws[at_w];
                r.grad_x[at_x] += gs[at_y] * ws[at_w];
                r.grad_weight[at_w] += gs[at_y] * xs[at_x];
              }
            }
          }
        }
      }
    }
  }
  return r;
}

// Of sums of `terms` products in f64 the reference's roundings count as well: both walk at random.
void expect_close(const Tensor& x, const std::vector<double>& reference, const char* what,
                  int64_t terms = 0) {
  const std::vector<double> values = x.to_vector();
  ASSERT_EQ(values.size(), reference.size()) << what;
  double scale = 1e-30;
  for (double value : reference) scale = std::max(scale, std::abs(value));
  const double roundings = 4 + std::sqrt(static_cast<double>(terms));
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], reference[i], roundings * epsilon_of(x.dtype()) * scale)
        << what << " of " << x << " at " << i;
  }
}

void expect_conv(const Shape& x_shape, const Shape& w_shape, const ConvGeometry& geometry,
                 int64_t terms = 0) {
  for (DType dtype : kDTypes) {
    const Tensor x = random_tensor(x_shape, dtype, 1), w = random_tensor(w_shape, dtype, 2);
    const Tensor bias = random_tensor({w_shape[0]}, dtype, 3);
    const Tensor y = kernels::conv2d(x, w, bias, geometry);
    const Tensor grad = random_tensor(y.shape(), dtype, 4);
    const Reference r = convolve(x, w, bias, grad, geometry);
    expect_close(y, r.y, "result");
    expect_close(conv2d_input_gradient(grad, w, x_shape, geometry), r.grad_x, "input gradient");
    expect_close(conv2d_weight_gradient(grad, x, w_shape, geometry), r.grad_weight,
                 "weight gradient", terms);
  }
}

TEST(Conv, MatchesTheDefinition) { expect_conv({2, 3, 9, 8}, {4, 3, 3, 3}, {}); }
TEST(Conv, StridePaddingDilation) {
  expect_conv({2, 2, 11, 9}, {3, 2, 3, 2},
              {.stride = {2, 3}, .padding = {2, 1}, .dilation = {2, 1}});
}
TEST(Conv, GroupsAndDepthwise) {
  expect_conv({3, 4, 6, 6}, {6, 2, 3, 3}, {.padding = {1, 1}, .groups = 2});
  expect_conv({2, 5, 6, 6}, {5, 1, 3, 3}, {.groups = 5});
}
TEST(Conv, OneByOne) {
  expect_conv({2, 7, 5, 5}, {3, 7, 1, 1}, {});
  expect_conv({3, 6, 5, 4}, {4, 3, 1, 1}, {.groups = 2});
  expect_conv({2, 4, 6, 5}, {3, 4, 1, 1}, {.stride = {2, 1}, .padding = {0, 1}});
}

// The weight gradient is a sum of several products, whose parts of the samples are not equal.
TEST(Conv, PartsOfTheSamples) {
  expect_conv({7, 3, 22, 21}, {4, 3, 3, 3}, {}, 7 * 20 * 19);
  expect_conv({9, 4, 20, 20}, {4, 2, 3, 2}, {.stride = {1, 2}, .padding = {2, 1}, .groups = 2},
              9 * 22 * 11);
}
// Patches of more than 32 MiB: three samples in f64, then two.
TEST(Conv, ChunksOfTheSamples) {
  const Shape x_shape{5, 36, 64, 64}, w_shape{2, 36, 3, 3};
  const Tensor x = random_tensor(x_shape, kF64, 1), w = random_tensor(w_shape, kF64, 2);
  const Tensor bias = random_tensor({2}, kF64, 3), y = kernels::conv2d(x, w, bias, {});
  const Reference r = convolve(x, w, bias, y, {});
  expect_close(y, r.y, "result", 36 * 9);
  expect_close(conv2d_input_gradient(y, w, x_shape, {}), r.grad_x, "input gradient");
  expect_close(conv2d_weight_gradient(y, x, w_shape, {}), r.grad_weight, "weight gradient",
               5 * 62 * 62);
}

TEST(Conv, TransposedInputsAreRead) {
  const Tensor x = raw::permute(random_tensor({2, 6, 5, 3}, kF64, 1), {0, 3, 1, 2});  // NHWC
  const Tensor w = random_tensor({4, 3, 2, 2}, kF64, 2), bias = random_tensor({4}, kF64, 3);
  const Tensor y = kernels::conv2d(x, w, bias, {});
  expect_close(y, convolve(x, w, bias, y, {}).y, "result");
}

TEST(Conv, BitsDoNotDependOnTheThreadCount) {
  const int before = num_threads();
  const Tensor x = random_tensor({9, 8, 14, 14}, kF32, 1),
               w = random_tensor({16, 8, 3, 3}, kF32, 2);
  Tensor grads[2];
  for (int i = 0; i < 2; ++i) {
    set_num_threads(1 + 3 * i);
    const Tensor y = kernels::conv2d(x, w, {}, {});
    grads[i] = conv2d_weight_gradient(y, x, w.shape(), {});
  }
  set_num_threads(before);
  EXPECT_EQ(std::memcmp(grads[0].data(), grads[1].data(), static_cast<size_t>(grads[0].nbytes())),
            0);
}

TEST(Pool, MaximumIsTheFirstOfEqualsAndANaN) {
  const Tensor x = raw::view(tensor({1, 5, 5, 2, NAN, 0, 3, 3, 3}), {1, 3, 3});
  const auto [values, indices] = max_pool(x, {1, 2}, {}, 3, 2);
  const std::vector<double> y = values.to_vector();
  EXPECT_EQ(y[0], 5);
  EXPECT_EQ(y[1], 5);
  EXPECT_TRUE(std::isnan(y[2]) && std::isnan(y[3]));
  EXPECT_EQ(indices.to_vector<int64_t>(), (std::vector<int64_t>{1, 1, 4, 4, 6, 7}));
}

// The window's elements one after the other; of equals the first, of NaNs the last.
void expect_max_pool(const Shape& shape, const int64_t (&kernel)[2], const ConvGeometry& g) {
  for (DType dtype : kDTypes) {
    const Tensor x = random_tensor(shape, dtype, 7);
    dispatch_floating(dtype, "test", [&]<class T>() {
      for (int64_t i = 0; i < x.numel(); i += 37) x.data_as<T>()[i] = store<T>(NAN);
      for (int64_t i = 5; i < x.numel(); i += 11) x.data_as<T>()[i] = store<T>(-INFINITY);
    });
    const int64_t H = shape[1], W = shape[2];
    const int64_t OH = g.output_size(H, kernel[0], 0), OW = g.output_size(W, kernel[1], 1);
    const MaxPool pooled = max_pool(x, kernel, g, OH, OW);
    const std::vector<double> xs = x.to_vector(), values = pooled.values.to_vector();
    const std::vector<int64_t> indices = pooled.indices.to_vector<int64_t>();
    for (int64_t at = 0; at < shape[0] * OH * OW; ++at) {
      const int64_t i = at / OW % OH, j = at % OW;
      double largest = -INFINITY;
      int64_t place = -1;
      for (int64_t k = 0; k < kernel[0] * kernel[1]; ++k) {
        const int64_t h = i * g.stride[0] - g.padding[0] + k / kernel[1] * g.dilation[0];
        const int64_t w = j * g.stride[1] - g.padding[1] + k % kernel[1] * g.dilation[1];
        if (h < 0 || h >= H || w < 0 || w >= W) continue;
        const double value = xs[static_cast<size_t>((at / (OH * OW) * H + h) * W + w)];
        if (place < 0 || value > largest || std::isnan(value)) {
          largest = value;
          place = h * W + w;
        }
      }
      ASSERT_EQ(indices[static_cast<size_t>(at)], place) << x << " at " << at;
      const double found = values[static_cast<size_t>(at)];
      ASSERT_TRUE(found == largest || (std::isnan(found) && std::isnan(largest)))
          << x << " at " << at;
    }
  }
}

TEST(Pool, MaximumMatchesTheDefinition) {
  expect_max_pool({3, 24, 24}, {2, 2}, {.stride = {2, 2}});
  expect_max_pool({2, 9, 13}, {3, 2}, {.stride = {1, 3}, .padding = {1, 1}});
  expect_max_pool({2, 11, 10}, {2, 3}, {.stride = {2, 1}, .padding = {1, 1}, .dilation = {3, 2}});
  expect_max_pool({2, 5, 2}, {1, 9}, {.padding = {0, 4}});  // elements that no window has inside
  expect_max_pool({1, 3, 700}, {2, 3}, {.stride = {1, 2}, .padding = {0, 1}});  // long rows
  expect_max_pool({2, 40, 40}, {3, 3}, {});  // several blocks of rows
}

TEST(Pool, WindowSumsAndTheirTransposeAreOneMatrix) {
  // <A x, g> = <x, A^T g> for overlapping windows of different weights.
  const WindowMap rows{{0, 1, 3}, {2, 4, 5}, {0.5, 1.0 / 3, 0.5}, 5};
  const WindowMap columns{{0, 2}, {3, 4}, {1.0 / 3, 0.5}, 4};
  const Tensor x = random_tensor({2, 5, 4}, kF64, 1), g = random_tensor({2, 3, 2}, kF64, 2);
  const std::vector<double> y = window_sum(x, rows, columns).to_vector(), gs = g.to_vector();
  const std::vector<double> back = window_sum_transposed(g, rows, columns).to_vector();
  const std::vector<double> xs = x.to_vector();
  double left = 0, right = 0;
  for (size_t i = 0; i < y.size(); ++i) left += y[i] * gs[i];
  for (size_t i = 0; i < xs.size(); ++i) right += back[i] * xs[i];
  EXPECT_NEAR(left, right, 1e-12);
  EXPECT_NEAR(y[0], (xs[0] + xs[1] + xs[2] + xs[4] + xs[5] + xs[6]) / 6, 1e-14);
}

TEST(Conv, MetaTensorsGiveShapes) {
  const Tensor x = raw::empty({2, 3, 8, 8}, kF16, kMeta), w = raw::empty({5, 3, 3, 3}, kF16, kMeta);
  const Tensor y = kernels::conv2d(x, w, {}, {.stride = {2, 2}});
  EXPECT_EQ(y.shape(), (Shape{2, 5, 3, 3}));
  EXPECT_EQ(conv2d_weight_gradient(y, x, w.shape(), {}).shape(), w.shape());
}

}  // namespace
}  // namespace tessera::kernels::test_conv
