// Transposed convolutions against their definition, also where output_padding is a stride or more.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>

namespace tessera::test_conv_transpose {
namespace {

struct Case {
  int spatial = 2;
  Shape x, weight;
  ConvTransposeOptions options;
  bool has_bias = true;
};

Tensor call(const Case& c, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return c.spatial == 1 ? conv_transpose1d(x, weight, bias, c.options)
                        : conv_transpose2d(x, weight, bias, c.options);
}

// Every product of the definition once. One dimension has height 1.
struct Reference {
  Shape shape;
  std::vector<double> y, grad_x, grad_weight, grad_bias;
};

int64_t of(const Shape& values, int d, int spatial, int64_t flat) {
  return spatial == 2 ? values[d] : d == 0 ? flat : values[0];
}

Reference define(const Case& c, const Tensor& x, const Tensor& weight, const Tensor& bias,
                 const Tensor& grad) {
  const auto& o = c.options;
  const int s = c.spatial;
  const int64_t N = c.x[0], C = c.x[1], OG = c.weight[1], O = OG * o.groups;
  int64_t in[2], kernel[2], out[2];
  for (int d = 0; d < 2; ++d) {
    in[d] = s == 2 ? c.x[2 + d] : d == 0 ? 1 : c.x[2];
    kernel[d] = s == 2 ? c.weight[2 + d] : d == 0 ? 1 : c.weight[2];
    out[d] = (in[d] - 1) * of(o.stride, d, s, 1) - 2 * of(o.padding, d, s, 0) +
             of(o.dilation, d, s, 1) * (kernel[d] - 1) + of(o.output_padding, d, s, 0) + 1;
  }
  Reference r;
  r.shape = s == 2 ? Shape{N, O, out[0], out[1]} : Shape{N, O, out[1]};
  const std::vector<double> xs = x.to_vector(), ws = weight.to_vector();
  const std::vector<double> gs = grad.defined() ? grad.to_vector() : std::vector<double>{};
  r.y.assign(static_cast<size_t>(N * O * out[0] * out[1]), 0);
  r.grad_x.assign(xs.size(), 0);
  r.grad_weight.assign(ws.size(), 0);
  r.grad_bias.assign(static_cast<size_t>(O), 0);
  if (bias.defined()) {
    const std::vector<double> bs = bias.to_vector();
    for (size_t i = 0; i < r.y.size(); ++i) {
      r.y[i] = bs[i / static_cast<size_t>(out[0] * out[1]) % static_cast<size_t>(O)];
    }
  }
  for (size_t i = 0; i < gs.size(); ++i) {
    r.grad_bias[i / static_cast<size_t>(out[0] * out[1]) % static_cast<size_t>(O)] += gs[i];
  }
  const int64_t products = N * C * OG * in[0] * in[1] * kernel[0] * kernel[1];
  for (int64_t at = 0; at < products; ++at) {
    int64_t rest = at;
    const auto next = [&](int64_t size) {
      const int64_t index = rest % size;
      rest /= size;
      return index;
    };
    const int64_t kw = next(kernel[1]), kh = next(kernel[0]), w = next(in[1]), h = next(in[0]);
    const int64_t o_of_group = next(OG), channel = next(C), n = next(N);
    const int64_t place[2] = {
        h * of(o.stride, 0, s, 1) - of(o.padding, 0, s, 0) + kh * of(o.dilation, 0, s, 1),
        w * of(o.stride, 1, s, 1) - of(o.padding, 1, s, 0) + kw * of(o.dilation, 1, s, 1)};
    if (place[0] < 0 || place[0] >= out[0] || place[1] < 0 || place[1] >= out[1]) continue;
    const int64_t output = channel / (C / o.groups) * OG + o_of_group;
    const auto y = static_cast<size_t>(((n * O + output) * out[0] + place[0]) * out[1] + place[1]);
    const auto i = static_cast<size_t>(((n * C + channel) * in[0] + h) * in[1] + w);
    const auto k =
        static_cast<size_t>(((channel * OG + o_of_group) * kernel[0] + kh) * kernel[1] + kw);
    r.y[y] += xs[i] * ws[k];
    if (gs.empty()) continue;
    r.grad_x[i] += gs[y] * ws[k];
    r.grad_weight[k] += gs[y] * xs[i];
  }
  return r;
}

void expect_close(const Tensor& got, const std::vector<double>& expected, const char* what) {
  const std::vector<double> values = got.to_vector();
  ASSERT_EQ(values.size(), expected.size()) << what;
  double scale = 1;
  for (const double value : expected) scale = std::max(scale, std::abs(value));
  for (size_t i = 0; i < values.size(); ++i) {
    // Sums of at most 100 products.
    ASSERT_NEAR(values[i], expected[i], 40 * epsilon_of(got.dtype()) * scale) << what << " " << i;
  }
}

void expect_definition(const Case& c, DType dtype) {
  SCOPED_TRACE(testing::Message() << name_of(dtype) << " x " << c.x << " weight " << c.weight
                                  << " stride " << c.options.stride << " padding "
                                  << c.options.padding << " output_padding "
                                  << c.options.output_padding << " dilation " << c.options.dilation
                                  << " groups " << c.options.groups);
  const auto numbers = [&](const Shape& shape, uint64_t stream) {
    return randn(shape, {}, RandomStream{7, stream}).to(dtype);
  };
  const Tensor x = numbers(c.x, 1).set_requires_grad();
  const Tensor weight = numbers(c.weight, 2).set_requires_grad();
  const Tensor bias =
      c.has_bias ? numbers({c.weight[1] * c.options.groups}, 3).set_requires_grad() : Tensor();
  const Tensor y = call(c, x, weight, bias);
  const Tensor grad = numbers(y.shape(), 4);
  const Reference r = define(c, x.detach(), weight.detach(), bias, grad);
  ASSERT_EQ(y.shape(), r.shape);
  expect_close(y, r.y, "result");
  y.backward(grad);
  expect_close(x.grad(), r.grad_x, "input gradient");
  expect_close(weight.grad(), r.grad_weight, "weight gradient");
  if (c.has_bias) expect_close(bias.grad(), r.grad_bias, "bias gradient");
}

TEST(ConvTranspose, MatchesTheDefinitionForAnyOptions) {
  std::mt19937 generator(5);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator);
  };
  int wide = 0;
  for (int tried = 0; tried < 400; ++tried) {
    Case c;
    c.spatial = static_cast<int>(draw(1, 2));
    auto& o = c.options;
    o.groups = draw(1, 2);
    c.x = {draw(1, 2), o.groups * draw(1, 2)};
    c.weight = {c.x[1], draw(1, 2)};
    o.stride = o.padding = o.dilation = o.output_padding = {};
    bool fits = true, is_wide = false;
    for (int d = 0; d < c.spatial; ++d) {
      const int64_t size = draw(1, 5), kernel = draw(1, 3), stride = draw(1, 3);
      const int64_t dilation = draw(1, 5), padding = draw(0, 3);
      const int64_t extra = draw(0, std::max(stride, dilation) - 1);
      c.x.push_back(size);
      c.weight.push_back(kernel);
      o.stride.push_back(stride);
      o.dilation.push_back(dilation);
      o.padding.push_back(padding);
      o.output_padding.push_back(extra);
      fits = fits && (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1 > 0;
      is_wide = is_wide || extra >= stride;
    }
    c.has_bias = draw(0, 1) == 1;
    if (!fits) continue;
    wide += is_wide;
    for (const DType dtype : {kF64, kF32, kBF16}) expect_definition(c, dtype);
  }
  EXPECT_GT(wide, 100);
}

// torch.nn.functional.conv_transpose1d of torch 2.15.
TEST(ConvTranspose, OutputPaddingOfAStrideAddsWhatNoSampleReaches) {
  const Tensor x = tensor({1, 2, 3, 4}).view({2, 1, 2}), weight = ones({1, 1, 2});
  const Tensor y = conv_transpose1d(x, weight, {}, {.output_padding = {1}, .dilation = {2}});
  EXPECT_EQ(y.shape(), (Shape{2, 1, 5}));
  EXPECT_EQ(y.to_vector(), (std::vector<double>{1, 2, 1, 2, 0, 3, 4, 3, 4, 0}));
}

TEST(ConvTranspose, SecondDerivativesExistThereToo) {
  const Tensor x = randn({2, 2, 3}, {}, RandomStream{3, 1}).to(kF64).set_requires_grad();
  const Tensor weight = randn({2, 1, 2}, {}, RandomStream{3, 2}).to(kF64).set_requires_grad();
  const auto function = [](const TensorList& in) -> TensorList {
    return {conv_transpose1d(in[0], in[1], {},
                             {.padding = {1}, .output_padding = {2}, .dilation = {3}})};
  };
  const GradcheckResult first = gradcheck(function, {x, weight});
  EXPECT_TRUE(first.ok) << first.message;
  const GradcheckResult second = gradgradcheck(function, {x, weight});
  EXPECT_TRUE(second.ok) << second.message;
}

}  // namespace
}  // namespace tessera::test_conv_transpose
