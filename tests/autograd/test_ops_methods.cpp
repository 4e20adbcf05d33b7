// Tensor's methods and operators: those that torch.Tensor has, each the function of its name.
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>

#include "autograd/op_samples.h"
#include "message_of.h"

namespace tessera::test_ops_methods {
namespace {

// A name of Tensor and of `Names` is ambiguous in what inherits both: &Both::sin is no expression
// where Tensor has a member sin, however many overloads.
struct Names {
#define METHOD(name) int name;
#define FUNCTION(name)
#include "golden/tensor_methods.inc"
#undef METHOD
};
struct Both : Tensor, Names {};
#define METHOD(name)                        \
  template <class T>                        \
  constexpr bool misses_##name = requires { \
    &T::name;                               \
  };
#include "golden/tensor_methods.inc"
#undef METHOD

TEST(TensorMethods, AreThoseOfTorchForEveryOp) {
#define METHOD(name) EXPECT_FALSE(misses_##name<Both>) << "Tensor has no method " #name;
#include "golden/tensor_methods.inc"
#undef METHOD
  EXPECT_TRUE((misses_sin<Names>));  // what is asked can be answered with yes
}
#undef FUNCTION

TEST(TensorMethods, EveryOpOfTheTableIsListed) {
  std::set<std::string_view> listed;
#define METHOD(name) listed.insert(#name);
#define FUNCTION(name) listed.insert(#name);
#include "golden/tensor_methods.inc"
#undef METHOD
#undef FUNCTION
  for (const tests::OpRow& row : tests::op_rows()) {
    EXPECT_TRUE(listed.contains(row.name))
        << row.name << ": make golden/tensor_methods.inc anew, with tensor_methods.py";
  }
}

// ---- Each is the function of its name -----------------------------------------------------------

void expect_same(const Tensor& a, const Tensor& b, const char* what) {
  ASSERT_EQ(a.defined(), b.defined()) << what;
  if (!a.defined()) return;
  EXPECT_EQ(a.shape(), b.shape()) << what;
  EXPECT_EQ(a.dtype(), b.dtype()) << what;
  const auto left = a.to_vector(), right = b.to_vector();
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_TRUE(left[i] == right[i] || (left[i] != left[i] && right[i] != right[i]))
        << what << " at " << i << ": " << left[i] << ", " << right[i];
  }
}
void expect_same(const ValuesIndices& a, const ValuesIndices& b, const char* what) {
  expect_same(a.values, b.values, what), expect_same(a.indices, b.indices, what);
}
void expect_same(const UniqueResult& a, const UniqueResult& b, const char* what) {
  expect_same(a.values, b.values, what), expect_same(a.inverse, b.inverse, what);
  expect_same(a.counts, b.counts, what);
}
void expect_same(const TensorList& a, const TensorList& b, const char* what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) expect_same(a[i], b[i], what);
}
void expect_same(bool a, bool b, const char* what) { EXPECT_EQ(a, b) << what; }

#define SAME(x, name, ...) \
  expect_same(x.name(__VA_ARGS__), name(x __VA_OPT__(, ) __VA_ARGS__), #name)

Tensor matrix() { return tensor({0.9, -0.3, 0.2, 0.5, -0.7, 0.5}).view(2, 3); }
Tensor other() { return tensor({0.5, 0.4, 0.2, -0.6, 0.8, 0.1}).view(2, 3); }
Tensor whole() { return tensor({6, 3, 2, 0, 5, 1}, kI64).view(2, 3); }
Tensor mask() { return tensor({1, 0, 1, 1, 0, 0}, kBool).view(2, 3); }
Tensor places() { return tensor({1, 0, 1, 0, 1, 1}, kI64).view(2, 3); }

TEST(TensorMethods, OfOneTensorAreTheFunctions) {
  const Tensor x = matrix();
  SAME(x, neg), SAME(x, abs), SAME(x, exp), SAME(x, expm1), SAME(x, log), SAME(x, log1p);
  SAME(x, log2), SAME(x, log10), SAME(x, sqrt), SAME(x, rsqrt), SAME(x, reciprocal);
  SAME(x, square), SAME(x, sin), SAME(x, cos), SAME(x, tan), SAME(x, tanh), SAME(x, sigmoid);
  SAME(x, relu), SAME(x, erf), SAME(x, erfinv), SAME(x, lgamma), SAME(x, digamma), SAME(x, sign);
  SAME(x, floor), SAME(x, ceil), SAME(x, trunc), SAME(x, round), SAME(x, nan_to_num);
  SAME(x.log(), isnan), SAME(x.log(), nan_to_num, 7), SAME((x / 0), isinf), SAME((x / 0), isfinite);
  SAME(mask(), logical_not), SAME(whole(), bitwise_not), SAME(x, clamp, -0.5, 0.5);
  SAME(x, clamp, std::nullopt, 0.2), SAME(x, clamp, other(), Tensor()),
      SAME(x, prelu, tensor({0.3}));
  expect_same(x.polygamma(1), polygamma(1, x), "polygamma");
}

TEST(TensorMethods, OfTwoTensorsAreTheFunctions) {
  const Tensor x = matrix(), y = other(), n = whole();
  const Tensor m = n + 1;
  SAME(x, add, y), SAME(x, add, y, 2), SAME(x, sub, y), SAME(x, sub, y, 2), SAME(x, mul, y);
  SAME(x, div, y), SAME(x, floor_divide, y), SAME(x, remainder, y), SAME(x, fmod, y);
  SAME(x, atan2, y), SAME(x, maximum, y), SAME(x, minimum, y), SAME(x.abs(), pow, y);
  SAME(x, eq, y), SAME(x, ne, y), SAME(x, lt, y), SAME(x, le, y), SAME(x, gt, y), SAME(x, ge, y);
  SAME(x, add, 2), SAME(x, sub, 2), SAME(x, mul, 2), SAME(x, div, 2), SAME(x, floor_divide, 0.2);
  SAME(x, remainder, 0.4), SAME(x, fmod, 0.4), SAME(x, pow, 2), SAME(x, eq, 0.5);
  SAME(x, ne, 0.5), SAME(x, lt, 0.5), SAME(x, le, 0.5), SAME(x, gt, 0.5), SAME(x, ge, 0.5);
  SAME(mask(), logical_and, n), SAME(mask(), logical_or, n), SAME(mask(), logical_xor, n);
  SAME(n, bitwise_and, m), SAME(n, bitwise_or, m), SAME(n, bitwise_xor, m);
  SAME(n, bitwise_and, 3), SAME(n, bitwise_or, 3), SAME(n, bitwise_xor, 3);
  SAME(x, isclose, y, 0.1, 0.1), SAME(x, allclose, x), SAME(x, allclose, y);
  SAME(x, addcmul, y, y, 2), SAME(x, addcdiv, y, y, 2), SAME(x, lerp, y, 0.3), SAME(x, lerp, y, y);
  SAME(x, masked_fill, mask(), 9), SAME(x, masked_select, mask());
  expect_same(x.where(mask(), y), where(mask(), x, y), "where");
  expect_same(x.where(mask(), 3), where(mask(), x, 3), "where");
}

TEST(TensorMethods, OfReductionsAreTheFunctions) {
  const Tensor x = matrix();
  SAME(x, sum), SAME(x, sum, 1), SAME(x, sum, {0}, true), SAME(whole(), sum, 0, false, kI64);
  SAME(x, mean), SAME(x, mean, -1), SAME(x, mean, 1, true), SAME(x, var), SAME(x, var, 1);
  SAME(x, var, 1, 0, true), expect_same(x.std(1), tessera::std(x, {1}), "std");
  SAME(x, prod), SAME(x, prod, 1), SAME(x, amax, 1), SAME(x, amin, 1), SAME(x, max), SAME(x, min);
  SAME(x, max, 1), SAME(x, min, 1), SAME(x, argmax), SAME(x, argmax, 1, true), SAME(x, argmin);
  SAME(x, argmin, 1), SAME(x, median), SAME(x, median, 1), SAME(x, quantile, 0.3);
  SAME(x, quantile, tensor({0.2, 0.7}), 1), SAME(mask(), any), SAME(mask(), any, 1),
      SAME(mask(), all);
  SAME(mask(), all, 0), SAME(x, norm), SAME(x, norm, 1, 1, true), SAME(x, logsumexp, 1),
      SAME(x, count_nonzero), SAME(x, count_nonzero, 1);
  SAME(x, cumsum, 1), SAME(x, cumprod, 1), SAME(x, cummax, 1), SAME(x, cummin, 1);
  SAME(x, softmax, 1), SAME(x, log_softmax, 1);
}

TEST(TensorMethods, OfShapesAreTheFunctions) {
  const Tensor x = matrix();
  SAME(x, detach), SAME(x, clone), SAME(x, contiguous), SAME(x, to, kF64), SAME(x, to, kCpu);
  SAME(x, view, -1), SAME(x, reshape, {3, 2}), SAME(x, permute, {1, 0}), SAME(x, flatten);
  SAME(x, transpose, 0, 1), SAME(x, movedim, 0, 1), SAME(x, expand, {4, 2, 3}),
      SAME(x, repeat, {2, 1});
  SAME(x.view(1, 2, 3), squeeze), SAME(x.view(1, 2, 3), squeeze, 0), SAME(x, unsqueeze, 1);
  SAME(x, narrow, 1, 1, 2), SAME(x, select, 1, 2), SAME(x, slice, 1, 0, 3, 2);
  SAME(x, as_strided, {2, 2}, {1, 2}, 1), SAME(x, split, 2, 1), SAME(x, split, {1, 2}, 1);
  SAME(x, chunk, 2, 1), SAME(x, unbind, 1), SAME(x, repeat_interleave, 2, 1), SAME(x, diag_embed);
  SAME(x, repeat_interleave, tensor({1, 0, 2}, kI64), 1), SAME(x, flip, 1), SAME(x, roll, 1, 1);
  SAME(x, tril), SAME(x, triu, 1), expect_same(x.unfold(1, 2, 1), unfold_dim(x, 1, 2, 1), "unfold");
  expect_same(x.t(), transpose(x, 0, 1), "t"), expect_same(x.mT(), transpose(x, 0, 1), "mT");
  expect_same(x.view(3, 2), view(x, {3, 2}), "view");
  expect_same(x.reshape(3, -1), view(x, {3, 2}), "reshape");
  expect_same(x.permute(1, 0), transpose(x, 0, 1), "permute");
  expect_same(x.expand(4, 2, 3), expand(x, {4, 2, 3}), "expand");
  expect_same(x.repeat(2, 1, 1), repeat(x, {2, 1, 1}), "repeat");
  expect_same(x.view_as(other().view(3, 2)), x.view(3, 2), "view_as");
  expect_same(x.t().reshape_as(x), reshape(x.t(), {2, 3}), "reshape_as");
  expect_same(x.expand_as(zeros({4, 2, 3})), x.expand(4, 2, 3), "expand_as");
  EXPECT_EQ(x.ndim(), 2);
  EXPECT_EQ(x.size(), x.shape());
  EXPECT_TRUE(x.is_floating_point() && !x.is_cuda() && !whole().is_floating_point());
}

TEST(TensorMethods, OfProductsAndIndicesAreTheFunctions) {
  const Tensor x = matrix(), y = other(), square = matmul(x, y.t());
  const Tensor row = x[0], rows = tensor({1, 0}, kI64);
  SAME(x, matmul, y.t()), SAME(x.view(1, 2, 3), bmm, y.view(1, 3, 2)), SAME(row, dot, row);
  SAME(row, outer, row), SAME(square, addmm, x, y.t(), 2, 3);
  expect_same(x.mm(y.t()), matmul(x, y.t()), "mm"), expect_same(x.mv(row), matmul(x, row), "mv");
  EXPECT_THROW(x.mm(row), ShapeError);
  EXPECT_THROW(x.mv(y.t()), ShapeError);
  SAME(x, index_fill, 0, rows, 9), SAME(x, diagonal, 1);
  SAME(x, index_select, 0, rows), SAME(x, index_add, 0, rows, y), SAME(x, gather, 0, places());
  SAME(x, scatter, 0, places(), y), SAME(x, scatter, 0, places(), 9), SAME(x, nonzero);
  SAME(x, scatter_add, 0, places(), y),
      SAME(x, scatter_reduce, 0, places(), y, ScatterReduce::kAmax);
  SAME(x, scatter_reduce, 0, places(), y, ScatterReduce::kSum, false), SAME(x, sort),
      SAME(x, topk, 2);
  SAME(x, sort, 0, true), SAME(x, argsort), SAME(x, topk, 1, 0, false), SAME(whole(), unique);
  SAME(places(), unique, true, true, true), SAME(places().view(-1), bincount, Tensor(), 4);
  expect_same(x.index_put({0, rows}, tensor({7, 8})),
              tensor({8, 7, 0.2, 0.5, -0.7, 0.5}).view(2, 3), "index_put");
  manual_seed(3);
  const Tensor drawn = x.abs().multinomial(2);
  manual_seed(3);
  expect_same(drawn, multinomial(x.abs(), 2), "multinomial");
}

// Of the in-place method and function on copies of x: same values, and the method returns its
// tensor.
#define SAME_WRITTEN(x, name, ...)                     \
  {                                                    \
    const Tensor a = x.clone(), b = x.clone();         \
    EXPECT_TRUE(a.name(__VA_ARGS__).is(a)) << #name;   \
    name(b __VA_OPT__(, ) __VA_ARGS__);                \
    expect_same(a, b, #name);                          \
    EXPECT_FALSE(allclose(a, x, 0, 0, true)) << #name; \
  }

TEST(TensorMethods, InPlaceAreTheFunctions) {
  const Tensor x = matrix(), y = other();
  SAME_WRITTEN(x, copy_, y);
  SAME_WRITTEN(x, fill_, 3);
  SAME_WRITTEN(x, zero_);
  SAME_WRITTEN(x, add_, y);
  SAME_WRITTEN(x, add_, y, 2);
  SAME_WRITTEN(x, sub_, y);
  SAME_WRITTEN(x, sub_, y, 2);
  SAME_WRITTEN(x, mul_, y);
  SAME_WRITTEN(x, div_, y);
  SAME_WRITTEN(x, add_, 2);
  SAME_WRITTEN(x, sub_, 2);
  SAME_WRITTEN(x, mul_, 2);
  SAME_WRITTEN(x, div_, 2);
  SAME_WRITTEN(x, pow_, 2);
  SAME_WRITTEN(x, neg_);
  SAME_WRITTEN(x, exp_);
  SAME_WRITTEN(x, sqrt_);
  SAME_WRITTEN(x, tanh_);
  SAME_WRITTEN(x, sigmoid_);
  SAME_WRITTEN(x, relu_);
  SAME_WRITTEN(x, clamp_, -0.1, 0.1);
  SAME_WRITTEN(x, lerp_, y, 0.3);
  SAME_WRITTEN(x, addcmul_, y, y, 2);
  SAME_WRITTEN(x, addcdiv_, y, y, 2);
  SAME_WRITTEN(x, masked_fill_, mask(), 9);
  const Tensor a = empty({64}), b = empty({64});
  for (const auto& [method, function] :
       std::vector<std::pair<std::function<void()>, std::function<void()>>>{
           {[&] { a.uniform_(2, 3); }, [&] { uniform_(b, 2, 3); }},
           {[&] { a.normal_(2, 3); }, [&] { normal_(b, 2, 3); }},
           {[&] { a.bernoulli_(0.4); }, [&] { bernoulli_(b, 0.4); }}}) {
    manual_seed(5), method();
    manual_seed(5), function();
    expect_same(a, b, "random");
  }
}

// Of x.name_(...), which is made of the function name.
#define SAME_MADE(x, name, ...)                                       \
  {                                                                   \
    const Tensor a = (x).clone();                                     \
    const uint32_t version = a.version();                             \
    EXPECT_TRUE(a.name##_(__VA_ARGS__).is(a)) << #name;               \
    EXPECT_GT(a.version(), version) << #name;                         \
    expect_same(a, (x).name(__VA_ARGS__).to((x).dtype()), #name "_"); \
  }

TEST(TensorMethods, InPlaceWithoutAKernelAreTheFunctionsToo) {
  const Tensor x = matrix(), y = other(), n = whole();
  SAME_MADE(x, abs);
  SAME_MADE(x, ceil);
  SAME_MADE(x, cos);
  SAME_MADE(x, digamma);
  SAME_MADE(x, erf);
  SAME_MADE(x, erfinv);
  SAME_MADE(x, expm1);
  SAME_MADE(x, floor);
  SAME_MADE(x, lgamma);
  SAME_MADE(x, log);
  SAME_MADE(x, log10);
  SAME_MADE(x, log1p);
  SAME_MADE(x, log2);
  SAME_MADE(n, logical_not);
  SAME_MADE(n, bitwise_not);
  SAME_MADE(x, reciprocal);
  SAME_MADE(x, round);
  SAME_MADE(x, rsqrt);
  SAME_MADE(x, sign);
  SAME_MADE(x, sin);
  SAME_MADE(x, square);
  SAME_MADE(x, tan);
  SAME_MADE(x, trunc);
  SAME_MADE(x.log(), nan_to_num, 7);
  SAME_MADE(x, polygamma, 1);
  SAME_MADE(x, atan2, y);
  SAME_MADE(n, logical_and, x > 0);
  SAME_MADE(n, logical_or, x > 0);
  SAME_MADE(n, logical_xor, x > 0);
  SAME_MADE(x.abs(), pow, y);
  SAME_MADE(n, bitwise_and, n + 1);
  SAME_MADE(n, bitwise_or, n + 1);
  SAME_MADE(n, bitwise_xor, n + 1);
  SAME_MADE(n, bitwise_and, 3);
  SAME_MADE(n, bitwise_or, 3);
  SAME_MADE(n, bitwise_xor, 3);
  SAME_MADE(x, eq, 0.5);
  SAME_MADE(x, ne, 0.5);
  SAME_MADE(x, lt, 0.5);
  SAME_MADE(x, le, 0.5);
  SAME_MADE(x, gt, 0.5);
  SAME_MADE(x, ge, 0.5);
  SAME_MADE(x, eq, y);
  SAME_MADE(x, ne, y);
  SAME_MADE(x, lt, y);
  SAME_MADE(x, le, y);
  SAME_MADE(x, gt, y);
  SAME_MADE(x, ge, y);
  SAME_MADE(x, floor_divide, y);
  SAME_MADE(x, fmod, y);
  SAME_MADE(x, remainder, y);
  SAME_MADE(x, floor_divide, 0.4);
  SAME_MADE(x, fmod, 0.4);
  SAME_MADE(x, remainder, 0.4);
  SAME_MADE(x, tril);
  SAME_MADE(x, triu, 1);
  SAME_MADE(x, cumsum, 1);
  SAME_MADE(x, cumprod, 1);
  SAME_MADE(x.matmul(y.t()), addmm, x, y.t(), 2, 3);
  const Tensor rows = tensor({1, 0}, kI64);
  SAME_MADE(x, index_add, 0, rows, y);
  SAME_MADE(x, index_fill, 0, rows, 9);
  SAME_MADE(x, scatter, 0, places(), y);
  SAME_MADE(x, scatter, 0, places(), 9);
  SAME_MADE(x, scatter_add, 0, places(), y);
  SAME_MADE(x, scatter_reduce, 0, places(), y, ScatterReduce::kProd);
  EXPECT_THROW(n.sin_(), DTypeError);  // torch: Float cannot be cast to Long
  EXPECT_THROW(n[0].eq_(y), ShapeError);
  const Tensor leaf = tensor({0.5, 2}).requires_grad_(), z = leaf * 2;
  z.square_().log_();
  z.sum().backward();
  EXPECT_EQ(leaf.grad().to_vector(), (std::vector<double>{4, 1}));  // 2 / x
}

TEST(TensorMethods, ALoopOverATensorGivesItsRows) {
  const Tensor x = tensor({1, 2, 3, 4, 5, 6}, {3, 2}).requires_grad_();
  std::vector<double> sums;
  Tensor total = tensor({0, 0});
  for (const Tensor& row : x) {
    sums.push_back(row.sum().item());
    total = total + row * row;
  }
  EXPECT_EQ(sums, (std::vector<double>{3, 7, 11}));
  total.sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{2, 4, 6, 8, 10, 12}));
  const Tensor y = zeros({2, 2});
  for (const Tensor& row : y) row.fill_(1);  // views
  EXPECT_EQ(y.sum().item(), 4);
  for (const Tensor& row : zeros({0, 2})) ADD_FAILURE() << row;
  const auto loop = [] {
    for (const Tensor& row : tensor(1.0)) ADD_FAILURE() << row;
  };
  EXPECT_THROW(loop(), ShapeError);
}

TEST(TensorMethods, PercentIsPythonsRemainder) {
  Tensor x = tensor({-7, 7}, kI64);
  EXPECT_EQ((x % 5).to_vector(), (std::vector<double>{3, 2}));
  EXPECT_EQ((x % tensor({5, -5}, kI64)).to_vector(), (std::vector<double>{3, -3}));
  x %= 4;
  EXPECT_EQ(x.to_vector(), (std::vector<double>{1, 3}));
}

TEST(TensorMethods, ADiagonalIsAView) {
  const Tensor x = zeros({2, 3, 4});
  x.diagonal(1, 2, 0).fill_(1);  // x[i + ...]: rows are dimension 2, columns dimension 0
  EXPECT_EQ(x.sum().item(), 3);
  EXPECT_EQ((x[{1, 2, 0}].item()), 1);
  EXPECT_EQ(x.diagonal(9).numel(), 0);
  EXPECT_THROW(x.diagonal(0, 1, 1), ShapeError);
}

TEST(TensorMethods, MakeTensorsOfThisKind) {
  const Tensor x = matrix().to(kF64);
  for (const Tensor& y :
       {x.new_zeros({4}), x.new_ones({4}), x.new_full({4}, 3), x.new_empty({4}), other().type_as(x),
        zeros_like(matrix(), kF64), rand_like(matrix(), kF64)}) {
    EXPECT_EQ(y.dtype(), kF64);
  }
  EXPECT_EQ(x.new_full({2}, 3).to_vector(), (std::vector<double>{3, 3}));
  EXPECT_EQ(x.new_ones(2).to_vector(), (std::vector<double>{1, 1}));
  EXPECT_EQ(x.new_zeros(2).to_vector(), (std::vector<double>{0, 0}));
  EXPECT_EQ(zeros_like(x, kI64).to_vector(), std::vector<double>(6, 0));
  EXPECT_EQ(x.half().dtype(), kF16);
  EXPECT_EQ(x.bfloat16().dtype(), kBF16);
  EXPECT_TRUE(x.cpu().is(x));
  const Tensor leaf = zeros({2}).requires_grad_(), twice = leaf * 2;
  twice.retain_grad();
  (twice * 3).sum().backward();
  EXPECT_EQ(twice.grad().to_vector(), (std::vector<double>{3, 3}));
  EXPECT_EQ(leaf.grad().to_vector(), (std::vector<double>{6, 6}));
}

// ---- Operators ----------------------------------------------------------------------------------

TEST(TensorOperators, CompareElementByElement) {
  const Tensor x = tensor({1, 2, 3}), y = tensor({3, 2, 1});
  const auto bits = [](const Tensor& z) {
    EXPECT_EQ(z.dtype(), kBool);
    return z.to_vector();
  };
  using Values = std::vector<double>;
  EXPECT_EQ(bits(x == y), (Values{0, 1, 0}));
  EXPECT_EQ(bits(x != y), (Values{1, 0, 1}));
  EXPECT_EQ(bits(x < y), (Values{1, 0, 0}));
  EXPECT_EQ(bits(x <= y), (Values{1, 1, 0}));
  EXPECT_EQ(bits(x > y), (Values{0, 0, 1}));
  EXPECT_EQ(bits(x >= y), (Values{0, 1, 1}));
  EXPECT_EQ(bits(x == 2), (Values{0, 1, 0}));
  EXPECT_EQ(bits(x != 2), (Values{1, 0, 1}));
  EXPECT_EQ(bits(x < 2), (Values{1, 0, 0}));
  EXPECT_EQ(bits(x <= 2), (Values{1, 1, 0}));
  EXPECT_EQ(bits(x > 2), (Values{0, 0, 1}));
  EXPECT_EQ(bits(x >= 2), (Values{0, 1, 1}));
  EXPECT_EQ(bits(2 == x), (Values{0, 1, 0}));
  EXPECT_EQ(bits(2 != x), (Values{1, 0, 1}));
  EXPECT_EQ(bits(2 < x), (Values{0, 0, 1}));
  EXPECT_EQ(bits(2 <= x), (Values{0, 1, 1}));
  EXPECT_EQ(bits(2 > x), (Values{1, 0, 0}));
  EXPECT_EQ(bits(2 >= x), (Values{1, 1, 0}));
}

TEST(TensorOperators, AreLogicalOfBoolAndBitwiseOfIntegers) {
  using Values = std::vector<double>;
  const Tensor a = tensor({1, 1, 0}, kBool), b = tensor({1, 0, 0}, kBool);
  const Tensor m = tensor({6, 3, 0}, kI64), n = tensor({3, 1, 4}, kI64);
  EXPECT_EQ((a & b).to_vector(), (Values{1, 0, 0}));
  EXPECT_EQ((a | b).to_vector(), (Values{1, 1, 0}));
  EXPECT_EQ((a ^ b).to_vector(), (Values{0, 1, 0}));
  EXPECT_EQ((!a).to_vector(), (Values{0, 0, 1}));
  EXPECT_EQ((~a).to_vector(), (Values{0, 0, 1}));
  EXPECT_EQ((m & n).to_vector(), (Values{2, 1, 0}));
  EXPECT_EQ((m | n).to_vector(), (Values{7, 3, 4}));
  EXPECT_EQ((m ^ n).to_vector(), (Values{5, 2, 4}));
  EXPECT_EQ((!m).to_vector(), (Values{0, 0, 1}));
  EXPECT_EQ((~m).to_vector(), (Values{-7, -4, -1}));
  EXPECT_EQ((2 & m).to_vector(), (Values{2, 2, 0}));
  EXPECT_EQ((8 | m).to_vector(), (Values{14, 11, 8}));
  EXPECT_EQ((1 ^ m).to_vector(), (Values{7, 2, 1}));
  EXPECT_THROW(matrix() & matrix(), DTypeError);
}

TEST(TensorOperators, CompoundFormsWriteInPlace) {
  using Values = std::vector<double>;
  const Tensor m = tensor({6, 3, 0}, kI64), view = m.view(3, 1);
  const uint32_t version = m.version();
  m &= tensor({3, 1, 4}, kI64);
  EXPECT_EQ(view.to_vector(), (Values{2, 1, 0}));
  m |= 4;
  EXPECT_EQ(view.to_vector(), (Values{6, 5, 4}));
  m ^= tensor({1, 1, 1}, kI64);
  EXPECT_EQ(view.to_vector(), (Values{7, 4, 5}));
  m &= 6, m |= tensor({1, 0, 0}, kI64), m ^= 2;
  EXPECT_EQ(view.to_vector(), (Values{5, 6, 6}));
  EXPECT_GE(m.version(), version + 6);
  const Tensor bits = tensor({1, 0}, kBool);
  EXPECT_THROW(bits |= tensor({1, 0}, kI64), DTypeError);  // torch: Long cannot be cast to Bool
  EXPECT_THROW(bits |= zeros({2, 2}, kBool), ShapeError);
}

TEST(TensorOperators, TakeEveryArithmeticType) {
  const Tensor x = tensor({3, 6});
  using Values = std::vector<double>;
  const std::vector<int> three(3);
  EXPECT_EQ((x / three.size()).to_vector(), (Values{1, 2}));
  EXPECT_EQ((three.size() * x).to_vector(), (Values{9, 18}));
  EXPECT_EQ((x - static_cast<short>(1)).to_vector(), (Values{2, 5}));
  EXPECT_EQ((x + 1ull).to_vector(), (Values{4, 7}));
  EXPECT_EQ((x * 0.5L).to_vector(), (Values{1.5, 3}));
  EXPECT_EQ((x + static_cast<unsigned char>(200)).to_vector(), (Values{203, 206}));
  EXPECT_EQ((tensor({1}, kI64) + three.size()).dtype(), kI64);
  EXPECT_THROW(x + ~0ull, ValueError);
}

TEST(TensorOperators, OneElementIsTrueOrFalse) {
  const Tensor loss = scalar_tensor(3.5, kF32);
  EXPECT_TRUE(loss > 3 && !(loss > 4) && loss < 4);
  bool entered = false;
  if (loss != 3.5) entered = true;
  EXPECT_FALSE(entered);
  static_assert(!std::is_convertible_v<Tensor, bool> && std::is_constructible_v<bool, Tensor>);
  EXPECT_TRUE(
      mentions(message_of<ShapeError>([] { EXPECT_TRUE(matrix() > 0); }), "any() or all()"));
}

TEST(TensorOperators, FactoriesTakeADTypeOrADevice) {
  for (const Tensor& x : {empty({2, 3}, kF64), zeros({2, 3}, kF64), ones({2, 3}, kF64),
                          full({2, 3}, 1, kF64), rand({2, 3}, kF64), randn({2, 3}, kF64),
                          linspace(0, 1, 6, kF64).view(2, 3), eye(3, kF64).narrow(0, 0, 2)}) {
    EXPECT_EQ(x.describe(), "f64[2, 3] cpu");
  }
  for (const Tensor& x : {empty({2, 3}, kMeta), zeros({2, 3}, kMeta), ones({2, 3}, kMeta),
                          full({2, 3}, 1, kMeta), randn({2, 3}, kMeta)}) {
    EXPECT_EQ(x.describe(), "f32[2, 3] meta");
  }
  EXPECT_EQ(zeros({2}, {}).dtype(), kF32);  // no options, and not the first dtype
  EXPECT_EQ(zeros(3).shape(), Shape({3}));
}

TEST(TensorOperators, ANumberIsAListOfOne) {
  EXPECT_EQ(Shape(3), Shape({3}));
  EXPECT_EQ(matrix().sum(1, true).shape(), Shape({2, 1}));
  EXPECT_EQ(matrix().sum({}, true).shape(), Shape({1, 1}));
  EXPECT_EQ(matrix().sum({0, 1}, true).shape(), Shape({1, 1}));
  static_assert(!std::is_convertible_v<bool, Shape> && !std::is_convertible_v<double, Shape>);
}

}  // namespace
}  // namespace tessera::test_ops_methods
