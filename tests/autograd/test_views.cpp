// Views and joins: elements shared or copied, gradients of any order, torch's corner cases.
#include <vector>

#include <gtest/gtest.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/ops.h>

namespace tessera::test_views {
namespace {

using Values = std::vector<double>;
using Function = std::function<TensorList(const TensorList&)>;

Tensor counting(const Shape& shape, DType dtype = kF32) {
  return view(arange(0, numel_of(shape), 1, dtype), shape);
}

Tensor leaf(const Shape& shape, uint64_t stream = 1) {
  return randn(shape, {.dtype = kF64}, RandomStream{5, stream}).set_requires_grad();
}

// First and second derivatives against central differences. The square gives the second something
// to see.
void expect_gradients(const Function& f, const TensorList& inputs) {
  const Function squared = [&](const TensorList& in) {
    TensorList result;
    for (const Tensor& y : f(in)) result.push_back(mul(y, y));
    return result;
  };
  const GradcheckResult first = gradcheck(squared, inputs), second = gradgradcheck(squared, inputs);
  EXPECT_TRUE(first.ok) << first.message;
  EXPECT_TRUE(second.ok) << second.message;
}
#define EXPECT_GRADIENTS(expression, ...) \
  expect_gradients([&](const TensorList& in) -> TensorList { return expression; }, {__VA_ARGS__})

TEST(Views, ShareElementsAndTheVersionWithTheirSource) {
  const Tensor x = counting({2, 3, 4});
  const TensorList views = {view(x, {6, 4}),
                            permute(x, {2, 0, 1}),
                            transpose(x, 0, 2),
                            expand(unsqueeze(x, 0), {2, 2, 3, 4}),
                            squeeze(unsqueeze(x, 1), 1),
                            narrow(x, 1, 0, 2),
                            select(x, 0, 0),
                            slice(x, 2, 0, {}, 2),
                            as_strided(x, {2, 2}, {1, 4}, 0),
                            split(x, 1, 0)[0],
                            chunk(x, 2, 2)[0],
                            unbind(x, 0)[0],
                            reshape(x, {24}),
                            flatten(x),
                            detach(x)};
  fill_(narrow(x, 0, 0, 1), 9);
  for (const Tensor& y : views) {
    EXPECT_EQ(y.storage(), x.storage());
    EXPECT_EQ(y.to_vector()[0], 9);
    EXPECT_EQ(y.version(), x.version());
  }
}

TEST(Views, GradientsOfAnyOrderAreRight) {
  const Tensor x = leaf({2, 3, 4});
  EXPECT_GRADIENTS({view(in[0], {4, 6})}, x);
  EXPECT_GRADIENTS({reshape(transpose(in[0], 0, 1), {6, -1})}, x);
  EXPECT_GRADIENTS({flatten(in[0], 1)}, x);
  EXPECT_GRADIENTS({permute(in[0], {2, 0, -2})}, x);
  EXPECT_GRADIENTS({expand(unsqueeze(in[0], 1), {2, 5, -1, 4})}, x);
  EXPECT_GRADIENTS({squeeze(unsqueeze(in[0], -1))}, x);
  EXPECT_GRADIENTS({narrow(in[0], 1, -2, 2)}, x);
  EXPECT_GRADIENTS({select(in[0], -1, -1)}, x);
  EXPECT_GRADIENTS({slice(in[0], 2, -3, {}, 2)}, x);
  EXPECT_GRADIENTS({slice(in[0], 1, 2, 1)}, x);
  EXPECT_GRADIENTS(split(in[0], Shape{1, 0, 3}, 2), x);
  EXPECT_GRADIENTS(split(in[0], 2, 1), x);
  EXPECT_GRADIENTS(chunk(in[0], 3, -1), x);
  EXPECT_GRADIENTS(unbind(in[0], 1), x);
}

TEST(Views, AsStridedAddsUpElementsThatItShowsTwice) {
  const Tensor x = leaf({6});
  EXPECT_GRADIENTS({as_strided(in[0], {3, 3}, {1, 1}, 1)}, x);
  const Tensor y = counting({6}).set_requires_grad();
  as_strided(y, {3, 3}, {1, 1}, 1).backward(ones({3, 3}));
  EXPECT_EQ(y.grad().to_vector(), (Values{0, 1, 2, 3, 2, 1}));
}

TEST(Views, APartThatIsNotUsedHasAGradientOfZero) {
  const Tensor x = counting({3, 2}).set_requires_grad();
  unbind(x, 0)[1].backward(full({2}, 5));
  EXPECT_EQ(x.grad().to_vector(), (Values{0, 0, 5, 5, 0, 0}));
  x.zero_grad();
  split(x, Shape{1, 2}, 0)[1].backward(ones({2, 2}));
  EXPECT_EQ(x.grad().to_vector(), (Values{0, 0, 1, 1, 1, 1}));
}

TEST(Views, WritingThroughAViewIsSeenByTheGradientOfItsBase) {
  const Tensor x = ones({2, 3}).set_requires_grad();
  const Tensor y = mul(x, Scalar(3));
  mul_(select(y, 0, 1), Scalar(2));
  y.backward(ones({2, 3}));
  EXPECT_EQ(x.grad().to_vector(), (Values{3, 3, 3, 6, 6, 6}));
}

// A leaf that was cut out of other elements: what its views show is counted from its own first one.
TEST(Views, WritingThroughAViewOfALeafThatBeginsWithinItsBytes) {
  const Tensor leaf = zeros({8}).narrow(0, 3, 4).detach();
  const Tensor w = tensor({5.0, 7.0}).set_requires_grad();
  copy_(leaf.narrow(0, 1, 2), w * 2);
  EXPECT_EQ(leaf.to_vector(), (std::vector<double>{0, 10, 14, 0}));
  (leaf * tensor({1.0, 2, 3, 4})).sum().backward();
  EXPECT_EQ(w.grad().to_vector(), (std::vector<double>{4, 6}));
}

TEST(Views, PartsHaveTorchsSizes) {
  const auto sizes = [](const TensorList& parts) {
    std::vector<int64_t> result;
    for (const Tensor& part : parts) result.push_back(part.size(0));
    return result;
  };
  using Sizes = std::vector<int64_t>;
  EXPECT_EQ(sizes(chunk(counting({10}), 4)), (Sizes{3, 3, 3, 1}));
  EXPECT_EQ(sizes(chunk(counting({0}), 3)), (Sizes{0, 0, 0}));
  EXPECT_EQ(sizes(split(counting({0}), 3)), (Sizes{0}));
  EXPECT_EQ(sizes(split(counting({40}), 1)).size(), 40u);
  EXPECT_EQ(sizes(unbind(counting({50, 1}))).size(), 50u);
  EXPECT_THROW(split(counting({4}), Shape{1, 2}, 0), ShapeError);
  EXPECT_THROW(split(counting({4}), 0), ValueError);
  EXPECT_THROW(chunk(counting({4}), 0), ValueError);
  EXPECT_THROW(unbind(counting({})), ShapeError);
}

TEST(Views, MisfitsAreErrorsThatNameTheOp) {
  const Tensor x = counting({2, 3});
  EXPECT_THROW(view(x, {4}), ShapeError);
  EXPECT_THROW(view(transpose(x, 0, 1), {6}), ShapeError);
  EXPECT_THROW(reshape(x, {-1, -1}), ShapeError);
  EXPECT_THROW(narrow(x, 0, 1, 2), IndexError);
  EXPECT_THROW(select(x, 1, 3), IndexError);
  EXPECT_THROW(transpose(x, 0, 2), IndexError);
  EXPECT_THROW(expand(x, {2, 4}), ShapeError);
  EXPECT_THROW(flatten(x, 1, 0), ValueError);
  EXPECT_THROW(as_strided(x, {7}, {1}, 0), ShapeError);
}

TEST(Joins, CatAndStackTakeAnyLayoutAndPromote) {
  const Tensor x = counting({2, 3}), y = transpose(counting({3, 2}), 0, 1);
  EXPECT_EQ(cat({x, y}, 1).to_vector(), (Values{0, 1, 2, 0, 2, 4, 3, 4, 5, 1, 3, 5}));
  EXPECT_EQ(cat({x, y}).shape(), Shape({4, 3}));
  EXPECT_EQ(stack({x, y}, -1).to_vector(), (Values{0, 0, 1, 2, 2, 4, 3, 1, 4, 3, 5, 5}));
  EXPECT_EQ(cat({x, counting({2, 3}, kI64)}).dtype(), kF32);
  EXPECT_EQ(cat({x, empty({0}), y}).shape(), Shape({4, 3})) << "as torch leaves out shape [0]";
  EXPECT_EQ(cat({empty({0, 3}), x}).shape(), Shape({2, 3}));
  EXPECT_THROW(cat({x, counting({2, 2})}), ShapeError);
  EXPECT_THROW(cat({}), ShapeError);
  EXPECT_THROW(cat({counting({}), counting({})}), ShapeError);
  EXPECT_THROW(stack({x, counting({3, 2})}), ShapeError);
}

TEST(Joins, MoreTensorsThanAMaskHasBits) {
  TensorList parts;
  for (int i = 0; i < 50; ++i) parts.push_back(full({1}, i).set_requires_grad(i % 2 == 0));
  cat(parts).backward(arange(0, 50, 1, kF32));
  for (int i = 0; i < 50; ++i) {
    const Tensor grad = parts[static_cast<size_t>(i)].grad();
    ASSERT_EQ(grad.defined(), i % 2 == 0) << i;
    if (grad.defined()) {
      EXPECT_EQ(grad.item(), i);
    }
  }
}

TEST(Joins, GradientsOfAnyOrderAreRight) {
  const Tensor a = leaf({2, 3}), b = leaf({2, 2}, 2), c = leaf({2, 3}, 3);
  EXPECT_GRADIENTS({cat({in[0], in[1]}, 1)}, a, b);
  EXPECT_GRADIENTS({stack({in[0], in[1]}, 1)}, a, c);
  EXPECT_GRADIENTS({repeat(in[0], {2, 1, 3})}, a);
  EXPECT_GRADIENTS({repeat(in[0], {1, 1})}, a);
  EXPECT_GRADIENTS({repeat_interleave(in[0], 2, 1)}, a);
  EXPECT_GRADIENTS({repeat_interleave(in[0], tensor({2, 0, 1}, kI64), 1)}, a);
  EXPECT_GRADIENTS({flip(in[0], {0, -1})}, a);
  EXPECT_GRADIENTS({roll(in[0], {1, -2}, {0, 1})}, a);
  EXPECT_GRADIENTS({roll(in[0], {4})}, a);
}

TEST(Joins, RollsRepeatsAndFlipsAreTorchs) {
  const Tensor x = counting({2, 3});
  EXPECT_EQ(roll(x, {1, -1}, {0, 1}).to_vector(), (Values{4, 5, 3, 1, 2, 0}));
  EXPECT_EQ(roll(x, {2}).to_vector(), (Values{4, 5, 0, 1, 2, 3}));
  EXPECT_EQ(roll(x, {1, 2}, {1, 1}).to_vector(), (Values{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(flip(x, {1}).to_vector(), (Values{2, 1, 0, 5, 4, 3}));
  EXPECT_EQ(flip(x, {}).to_vector(), x.to_vector());
  EXPECT_EQ(repeat(x, {2, 1, 1}).shape(), Shape({2, 2, 3}));
  EXPECT_EQ(repeat(x, {0, 2}).shape(), Shape({0, 6}));
  EXPECT_EQ(repeat_interleave(x, 2).to_vector(), (Values{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5}));
  EXPECT_EQ(repeat_interleave(x, tensor({0, 2}, kI64), 0).to_vector(), (Values{3, 4, 5, 3, 4, 5}));
  EXPECT_THROW(repeat(x, {2}), ShapeError);
  EXPECT_THROW(repeat_interleave(x, tensor({1}, kF32), 0), DTypeError);
  EXPECT_THROW(repeat_interleave(x, tensor({1, 2, 3}, kI64), 0), ShapeError);
  EXPECT_THROW(roll(x, {1, 2}, {0}), ShapeError);
}

TEST(Pads, EveryModeIsTorchsAlsoWhereItCrops) {
  const Tensor x = counting({1, 5});
  EXPECT_EQ(pad(x, {2, 1}, Pad::kReflect).to_vector(), (Values{2, 1, 0, 1, 2, 3, 4, 3}));
  EXPECT_EQ(pad(x, {2, -2}, Pad::kReflect).to_vector(), (Values{2, 1, 0, 1, 2}));
  EXPECT_EQ(pad(x, {2, -1}, Pad::kCircular).to_vector(), (Values{2, 3, 0, 1, 2, 3}));
  EXPECT_EQ(pad(x, {-1, 3}, Pad::kReplicate).to_vector(), (Values{1, 2, 3, 4, 4, 4, 4}));
  EXPECT_EQ(pad(x, {-1, 2}, Pad::kConstant, 7).to_vector(), (Values{1, 2, 3, 4, 7, 7}));
  EXPECT_EQ(pad(x, {0, 0, 1, 0}, Pad::kConstant, 7).shape(), Shape({2, 5}));
  EXPECT_THROW(pad(x, {1}), ShapeError);
  EXPECT_THROW(pad(x, {-3, -3}), ShapeError);
  EXPECT_THROW(pad(x, {-6, 3}), ShapeError);
  EXPECT_THROW(pad(x, {5, 0}, Pad::kReflect), ShapeError);
  EXPECT_THROW(pad(x, {6, 0}, Pad::kCircular), ShapeError);
}

TEST(Pads, GradientsOfAnyOrderAreRight) {
  const Tensor x = leaf({2, 3, 4});
  EXPECT_GRADIENTS({pad(in[0], {1, -2, 0, 2}, Pad::kConstant, 0.5)}, x);
  EXPECT_GRADIENTS({pad(in[0], {3, 2, 1, 0}, Pad::kReflect)}, x);
  EXPECT_GRADIENTS({pad(in[0], {3, -1}, Pad::kReplicate)}, x);
  EXPECT_GRADIENTS({pad(in[0], {4, 2}, Pad::kCircular)}, x);
}

TEST(Views, EveryDTypeMovesUnchanged) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const Tensor x = tensor({0, 1, 1, 0, 1, 0}, dtype);
    const Tensor y = view(x, {2, 3});
    EXPECT_EQ(cat({y, y}, 1).to_vector(), (Values{0, 1, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0})) << dtype;
    EXPECT_EQ(flip(x, {0}).to_vector(), (Values{0, 1, 0, 1, 1, 0})) << dtype;
    EXPECT_EQ(repeat(y, {1, 2}).to_vector(), (Values{0, 1, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0})) << dtype;
    EXPECT_EQ(pad(x, {1, 0}).to_vector(), (Values{0, 0, 1, 1, 0, 1, 0})) << dtype;
  }
}

}  // namespace
}  // namespace tessera::test_views
