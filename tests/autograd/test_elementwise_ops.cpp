// Elementwise ops where the table of ops cannot look: torch's promotion, integer rules, gradients
// at kinks and poles, in-place forms, and that the gradient kernels and their composed forms agree.
// Literals are torch 2.15's.
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>

namespace tessera::test_elementwise_ops {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor f64(std::initializer_list<double> values) { return tensor(values, kF64); }
Tensor i64(std::initializer_list<double> values) { return tensor(values, kI64); }
Tensor leaf(std::initializer_list<double> values) { return f64(values).set_requires_grad(); }

void expect_values(const Tensor& x, const std::vector<double>& wanted, const char* what = "") {
  const auto values = x.to_vector<double>();
  ASSERT_EQ(values.size(), wanted.size()) << what;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (std::isnan(wanted[i])) {
      EXPECT_TRUE(std::isnan(values[i])) << what << " at " << i << ": " << values[i];
    } else if (std::isinf(wanted[i])) {
      EXPECT_EQ(values[i], wanted[i]) << what << " at " << i;
    } else {
      EXPECT_NEAR(values[i], wanted[i], 1e-13 * (1 + std::abs(wanted[i]))) << what << " at " << i;
    }
  }
}

void expect_gradient(const Tensor& y, const Tensor& x, const std::vector<double>& wanted,
                     const char* what = "") {
  const std::vector<Tensor> inputs = {x};
  expect_values(grad(y, inputs, ones_like(y), {.retain_graph = true})[0], wanted, what);
  expect_values(grad(y, inputs, ones_like(y), {.create_graph = true})[0], wanted,
                (std::string(what) + ", composed").c_str());
}

// ---- Promotion ----------------------------------------------------------------------------------

constexpr DType kDTypes[] = {kF64, kF32, kF16, kBF16, kI64, kI32, kU8, kBool};

std::vector<std::string> words(const char* line) {
  std::istringstream in(line);
  std::vector<std::string> result;
  for (std::string word; in >> word;) result.push_back(word);
  return result;
}

Tensor ones_of(DType dtype, bool zero_dim) {
  return zero_dim ? scalar_tensor(1, dtype) : raw::full({2}, 1, dtype);
}

void expect_promotion(const char* const (&table)[8], bool zero_dim) {
  for (int i = 0; i < 8; ++i) {
    const auto row = words(table[i]);
    for (size_t j = 0; j < 8; ++j) {
      const Tensor a = ones_of(kDTypes[i], false), b = ones_of(kDTypes[j], zero_dim);
      EXPECT_EQ(name_of(add(a, b).dtype()), row[j]) << a << " + " << b;
      EXPECT_EQ(name_of(add(b, a).dtype()), row[j]) << b << " + " << a;
      EXPECT_EQ(name_of(mul(a, b).dtype()), row[j]) << a << " * " << b;
      EXPECT_EQ(name_of(where(eq(a, 1), a, b).dtype()), row[j]) << "where of " << a << ", " << b;
      EXPECT_EQ(eq(a, b).dtype(), kBool);
    }
  }
}

TEST(ElementwiseOps, TwoTensorsPromoteAsInTorch) {
  expect_promotion({"f64 f64 f64 f64 f64 f64 f64 f64", "f64 f32 f32 f32 f32 f32 f32 f32",
                    "f64 f32 f16 f32 f16 f16 f16 f16", "f64 f32 f32 bf16 bf16 bf16 bf16 bf16",
                    "f64 f32 f16 bf16 i64 i64 i64 i64", "f64 f32 f16 bf16 i64 i32 i32 i32",
                    "f64 f32 f16 bf16 i64 i32 u8 u8", "f64 f32 f16 bf16 i64 i32 u8 bool"},
                   false);
}

TEST(ElementwiseOps, AZeroDimTensorPromotesOnlyACategoryBelowItsOwn) {
  expect_promotion({"f64 f64 f64 f64 f64 f64 f64 f64", "f32 f32 f32 f32 f32 f32 f32 f32",
                    "f16 f16 f16 f16 f16 f16 f16 f16", "bf16 bf16 bf16 bf16 bf16 bf16 bf16 bf16",
                    "f64 f32 f16 bf16 i64 i64 i64 i64", "f64 f32 f16 bf16 i32 i32 i32 i32",
                    "f64 f32 f16 bf16 u8 u8 u8 u8", "f64 f32 f16 bf16 i64 i32 u8 bool"},
                   true);
}

TEST(ElementwiseOps, ANumberIsWeak) {
  const char* table[] = {"f64 f64 f64", "f32 f32 f32", "f16 f16 f16", "bf16 bf16 bf16",
                         "i64 i64 f32", "i32 i32 f32", "u8 u8 f32",   "bool i64 f32"};
  const Scalar numbers[] = {true, 3, 1.5};
  for (int i = 0; i < 8; ++i) {
    const auto row = words(table[i]);
    for (size_t j = 0; j < 3; ++j) {
      for (bool zero_dim : {false, true}) {
        const Tensor x = ones_of(kDTypes[i], zero_dim);
        EXPECT_EQ(name_of(add(x, numbers[j]).dtype()), row[j]) << x << " + " << numbers[j];
        EXPECT_EQ(name_of(mul(x, numbers[j]).dtype()), row[j]) << x << " * " << numbers[j];
      }
    }
  }
}

TEST(ElementwiseOps, DivisionAndElementaryFunctionsOfIntegersAreFloat) {
  EXPECT_EQ(div(i64({7}), i64({2})).dtype(), kF32);
  EXPECT_EQ(div(i64({7}), 2).item(), 3.5);
  EXPECT_EQ(exp(i64({0})).dtype(), kF32);
  EXPECT_EQ(sqrt(tensor({1.0}, kBool)).item(), 1);
  EXPECT_EQ(floor(i64({3})).dtype(), kI64);
  EXPECT_EQ(clamp(i64({3}), 0.5).dtype(), kF32);
  EXPECT_EQ(isnan(i64({3})).item(), 0);
}

// ---- Integers -----------------------------------------------------------------------------------

TEST(ElementwiseOps, FloorDivideAndRemainderRoundDown) {
  const auto a = {7., -7., 7., -7., 0., 6., -6., 1.}, b = {3., 3., -3., -3., 5., -2., -2., 7.};
  expect_values(floor_divide(i64(a), i64(b)), {2, -3, -3, 2, 0, -3, 3, 0});
  expect_values(remainder(i64(a), i64(b)), {1, 2, -2, -1, 0, 0, 0, 1});
  const Tensor x = mul(f64(a), 0.75), y = mul(f64(b), 0.5);
  expect_values(floor_divide(x, y), {3, -4, -4, 3, 0, -5, 4, 0});
  expect_values(remainder(x, y), {0.75, 0.75, -0.75, -0.75, 0, -0.5, -0.5, 0.75});
  const Tensor poles = f64({1, -1, 0, kInf, 5, -5, 5}), by = f64({0, 0, 0, 2, kInf, kInf, -kInf});
  expect_values(floor_divide(poles, by), {kInf, -kInf, kNan, kNan, 0, -1, -1});
  expect_values(remainder(poles, by), {kNan, kNan, kNan, kNan, 5, kInf, -kInf});
}

TEST(ElementwiseOps, IntegerDivisionByZeroIsAnError) {
  EXPECT_THROW(floor_divide(i64({1, 2}), i64({1, 0})), ValueError);
  EXPECT_THROW(remainder(i64({1, 2}), i64({0, 1})), ValueError);
  EXPECT_THROW(floor_divide(i64({1}), 0), ValueError);
  EXPECT_THROW(remainder(i64({1}), 0), ValueError);
}

TEST(ElementwiseOps, IntegerPowersAndWrapAround) {
  expect_values(pow(i64({2, -2, 3, -1, -1, 1, 0, 7}), i64({10, 3, -1, -3, -4, -5, 0, 1})),
                {1024, -8, 0, -1, 1, 1, 1, 7});
  EXPECT_THROW(pow(i64({2}), -1), ValueError);
  EXPECT_EQ(add(tensor({250.0}, kU8), 10).item(), 4);
  EXPECT_EQ(sub(tensor({3.0}, kU8), 5).item(), 254);
  EXPECT_EQ(pow(tensor({3.0}, kU8), 7).item(), 139);
  EXPECT_EQ(add(tensor({2147483647.0}, kI32), 1).item(), -2147483648.0);
  EXPECT_EQ(abs(tensor({-2147483648.0}, kI32)).item(), -2147483648.0);
}

TEST(ElementwiseOps, BoolsAddAsOrMultiplyAsAndAndRefuseTheRest) {
  const Tensor a = tensor({1.0, 0.0, 1.0}, kBool), b = tensor({1.0, 1.0, 0.0}, kBool);
  expect_values(add(a, b), {1, 1, 1});
  expect_values(mul(a, b), {1, 0, 0});
  EXPECT_EQ(add(a, b).dtype(), kBool);
  EXPECT_THROW(sub(a, b), DTypeError);
  EXPECT_THROW(neg(a), DTypeError);
  EXPECT_THROW(abs(a), DTypeError);
  EXPECT_THROW(relu(a), DTypeError);
  EXPECT_THROW(gelu(i64({1})), DTypeError);
  EXPECT_THROW(add(i64({1}), i64({1}), 0.5), DTypeError);
}

TEST(ElementwiseOps, RoundingIsHalfToEvenAndSignOfNanIsZero) {
  expect_values(round(f64({.5, 1.5, 2.5, -.5, -1.5, -2.5})), {0, 2, 2, 0, -2, -2});
  expect_values(sign(f64({kNan, -0.0, 3, -kInf})), {0, 0, 1, -1});
}

TEST(ElementwiseOps, NanWinsInMaximumMinimumClampAndRelu) {
  expect_values(maximum(f64({kNan, 1}), f64({1, kNan})), {kNan, kNan});
  expect_values(minimum(f64({kNan, 1}), f64({1, kNan})), {kNan, kNan});
  expect_values(clamp(f64({kNan, 3}), 0, 1), {kNan, 1});
  expect_values(relu(f64({kNan, -1})), {kNan, 0});
  expect_values(nan_to_num(f64({kNan, kInf, -kInf, 2}), 1, 5), {1, 5, -1.7976931348623157e308, 2});
}

// ---- Gradients at kinks and poles ---------------------------------------------------------------

TEST(ElementwiseOps, GradientsAtKinksAreTorchs) {
  const Tensor x = leaf({-1, 0, 1});
  expect_gradient(abs(x), x, {-1, 0, 1}, "abs");
  expect_gradient(relu(x), x, {0, 0, 1}, "relu");
  expect_gradient(elu(x), x, {std::exp(-1.0), 1, 1}, "elu");
  expect_gradient(leaky_relu(x), x, {0.01, 0.01, 1}, "leaky_relu");
  expect_gradient(softplus(x), x, {0.2689414213699951, 0.5, 0.7310585786300049}, "softplus");
  expect_gradient(sign(x), x, {0, 0, 0}, "sign");
  expect_gradient(floor(x), x, {0, 0, 0}, "floor");
  expect_gradient(sqrt(x), x, {kNan, kInf, 0.5}, "sqrt");
  expect_gradient(log(x), x, {-1, kInf, 1}, "log");
  const Tensor wide = leaf({0, 1, 2, -1, 0.5, kNan});
  expect_gradient(clamp(wide, 0, 1), wide, {0, 0, 0, 0, 1, 0}, "clamp");
  expect_gradient(clamp(wide, 0), wide, {0, 1, 1, 0, 1, 0}, "clamp from below");
  expect_gradient(clamp(wide, {}, 1), wide, {1, 0, 0, 1, 1, 0}, "clamp from above");
  const Tensor special = leaf({kInf, kNan, 1});
  expect_gradient(nan_to_num(special), special, {0, 0, 1}, "nan_to_num");
}

TEST(ElementwiseOps, EqualOperandsOfMaximumShareTheGradient) {
  const Tensor a = leaf({0, 1, 2}), b = leaf({0, 2, 1});
  expect_gradient(maximum(a, b), a, {0.5, 0, 1});
  expect_gradient(maximum(a, b), b, {0.5, 1, 0});
  expect_gradient(minimum(a, b), a, {0.5, 1, 0});
  expect_gradient(minimum(a, b), b, {0.5, 0, 1});
  const Tensor x = leaf({0, 1, 2, -1}), low = leaf({0, 0, 0, 0}), high = leaf({1, 1, 1, 1});
  expect_gradient(clamp(x, low, high), x, {0.5, 0.5, 0, 0});
  expect_gradient(clamp(x, low, high), low, {0.5, 0, 0, 1});
  expect_gradient(clamp(x, low, high), high, {0, 0.5, 1, 0});
  expect_gradient(clamp(x, low, Tensor()), x, {0.5, 1, 1, 0});
}

TEST(ElementwiseOps, PowersAtZeroAndBelow) {
  struct Case {
    double exponent;
    std::vector<double> value, gradient;
  };
  for (const Case& c : std::vector<Case>{
           {0, {1, 1, 1}, {0, 0, 0}},
           {1, {0, 4, -1}, {1, 1, 1}},
           {2, {0, 16, 1}, {0, 8, -2}},
           {3, {0, 64, -1}, {0, 48, 3}},
           {0.5, {0, 2, kNan}, {kInf, 0.25, kNan}},
           {-0.5, {kInf, 0.5, kNan}, {-kInf, -0.0625, kNan}},
           {-1, {kInf, 0.25, -1}, {-kInf, -0.0625, -1}},
           {-2, {kInf, 0.0625, 1}, {-kInf, -0.03125, 2}},
           {2.5, {0, 32, kNan}, {0, 20, kNan}},
       }) {
    const Tensor x = leaf({0, 4, -1});
    const std::string name = "exponent " + std::to_string(c.exponent);
    expect_values(pow(x, c.exponent), c.value, name.c_str());
    expect_gradient(pow(x, c.exponent), x, c.gradient, name.c_str());
  }
  const Tensor x = leaf({0, 3, -1});
  expect_gradient(pow(0, x), x, {0, 0, -kInf}, "base 0");
  expect_gradient(pow(2, x), x, {0.6931471805599453, 5.545177444479562, 0.34657359027997264});
  const Tensor a = leaf({0, 0, 2, -2, 0}), b = leaf({0, 2, 0, 3, -1});
  expect_values(pow(a, b), {1, 0, 1, -8, kInf});
  expect_gradient(pow(a, b), a, {0, 0, 0, 12, -kInf});
  expect_gradient(pow(a, b), b, {0, 0, 0.6931471805599453, kNan, -kInf});
}

// ---- Both forms of a gradient, and second derivatives -------------------------------------------

struct Smooth {
  const char* name;
  Tensor (*call)(const Tensor&);
};
const Smooth kSmooth[] = {
    {"exp", exp},
    {"expm1", expm1},
    {"log", log},
    {"log1p", log1p},
    {"sqrt", sqrt},
    {"rsqrt", rsqrt},
    {"reciprocal", reciprocal},
    {"square", square},
    {"sin", sin},
    {"cos", cos},
    {"tanh", tanh},
    {"sigmoid", sigmoid},
    {"erf", erf},
    {"gelu", [](const Tensor& x) { return gelu(x); }},
    {"gelu tanh", [](const Tensor& x) { return gelu(x, Gelu::kTanh); }},
    {"silu", silu},
    {"elu", [](const Tensor& x) { return elu(x, 1.5); }},
    {"elu of negatives", [](const Tensor& x) { return elu(neg(x), 1.5); }},
    {"softplus", [](const Tensor& x) { return softplus(x, 2); }},
    {"leaky_relu", [](const Tensor& x) { return mul(leaky_relu(neg(x)), x); }},
    {"pow", [](const Tensor& x) { return pow(x, 2.5); }},
    {"pow of a number", [](const Tensor& x) { return pow(1.5, x); }},
    {"pow of tensors", [](const Tensor& x) { return pow(x, x); }},
    {"rdiv", [](const Tensor& x) { return rdiv(2, x); }},
    {"div", [](const Tensor& x) { return div(sin(x), x); }},
    {"addcdiv", [](const Tensor& x) { return addcdiv(x, x, cos(x), 0.5); }},
    {"addcmul", [](const Tensor& x) { return addcmul(x, x, cos(x), 0.5); }},
    {"lerp", [](const Tensor& x) { return lerp(sin(x), cos(x), x); }},
};

TEST(ElementwiseOps, GradientKernelsAndComposedFormsAgree) {
  for (const Smooth& f : kSmooth) {
    const Tensor x = leaf({0.2, 0.5, 0.9, 1.3, 2.1});
    const std::vector<Tensor> inputs = {x};
    const Tensor y = f.call(x), dy = f64({1, -2, 0.5, 3, 1});
    const auto kernel = grad(y, inputs, dy, {.retain_graph = true})[0].to_vector<double>();
    expect_values(grad(y, inputs, dy, {.create_graph = true})[0], kernel, f.name);
  }
}

TEST(ElementwiseOps, SecondDerivativesMatchDifferencesOfTheFirst) {
  for (const Smooth& f : kSmooth) {
    const auto first = [&](const Tensor& x, bool create_graph) {
      const std::vector<Tensor> inputs = {x};
      const Tensor y = f.call(x);
      return grad(y, inputs, ones_like(y), {.create_graph = create_graph})[0];
    };
    const Tensor x = leaf({0.2, 0.5, 0.9, 1.3, 2.1});
    const std::vector<Tensor> inputs = {x};
    const Tensor slope = first(x, true);
    const auto second = grad(slope, inputs, ones_like(slope))[0].to_vector<double>();
    const double h = 1e-5;
    const auto above = first(add(x.detach(), h).set_requires_grad(), false).to_vector<double>();
    const auto below = first(sub(x.detach(), h).set_requires_grad(), false).to_vector<double>();
    for (size_t i = 0; i < second.size(); ++i) {
      // Differences are good to h^2 and eps / h.
      EXPECT_NEAR(second[i], (above[i] - below[i]) / (2 * h), 1e-7 * (1 + std::abs(second[i])))
          << f.name << " at " << i;
    }
  }
}

// ---- In place -----------------------------------------------------------------------------------

TEST(ElementwiseOps, InPlaceFormsWriteTheTensorAndKeepItsHistory) {
  const Tensor x = leaf({1, 2, 3});
  const Tensor y = mul(x, 2);
  const Tensor& same = add_(y, x);
  EXPECT_TRUE(same.is(y));
  mul_(y, y.detach());
  expect_values(y, {9, 36, 81});
  expect_gradient(y, x, {9, 18, 27});
  const Tensor z = mul(x, 1);
  exp_(z);
  expect_gradient(z, x, {std::exp(1.0), std::exp(2.0), std::exp(3.0)});
  const Tensor w = mul(x, 1);
  pow_(w, 2);
  expect_gradient(w, x, {2, 4, 6});
  const Tensor v = sub(x, 2);
  relu_(v);
  expect_gradient(v, x, {0, 0, 1});
}

TEST(ElementwiseOps, InPlaceRefusesResultsThatDoNotFit) {
  EXPECT_THROW(add_(i64({1, 2}), 1.5), DTypeError);
  EXPECT_THROW(div_(i64({1, 2}), 2), DTypeError);
  EXPECT_THROW(add_(tensor({1.0}, kBool), 1), DTypeError);
  EXPECT_THROW(add_(f64({1}), f64({1, 2})), ShapeError);
  EXPECT_THROW(sqrt_(i64({4})), DTypeError);
  const Tensor low = tensor({1.0, 2.0}, kBF16);
  add_(low, f64({0.5, 0.25}));
  EXPECT_EQ(low.dtype(), kBF16);
  expect_values(low, {1.5, 2.25});
  EXPECT_THROW(add_(leaf({1}), 1), AutogradError);
}

TEST(ElementwiseOps, GradientsOfBroadcastOperandsAreSummed) {
  const Tensor row = leaf({1, 2, 3});
  const Tensor x = raw::full({4, 3}, 2, kF64);
  expect_gradient(mul(x, row), row, {8, 8, 8});
  expect_gradient(where(gt(x, 1), row, 0), row, {4, 4, 4});
  const Tensor zero_dim = scalar_tensor(3, kF64).set_requires_grad();
  expect_gradient(div(x, zero_dim), zero_dim, {-12 * 2 / 9.0});
}

TEST(ElementwiseOps, ErrorsNameTheOpAndTheOperands) {
  try {
    add(raw::zeros({2, 3}, kF32), raw::zeros({4}, kF32));
    FAIL();
  } catch (const ShapeError& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.rfind("add: ", 0), 0u) << message;
    EXPECT_NE(message.find("[2, 3]"), std::string::npos) << message;
    EXPECT_NE(message.find("[4]"), std::string::npos) << message;
  }
  EXPECT_THROW(mul(raw::zeros({2}, kF8E4M3), 2), DTypeError);
  EXPECT_THROW(where(raw::zeros({2}, kF32), raw::zeros({2}, kF32), 1), DTypeError);
}

TEST(ElementwiseOps, MetaTensorsGiveShapesAndTheSameErrors) {
  const Tensor x = raw::empty({2, 3}, kF32, kMeta), y = raw::empty({3}, kBF16, kMeta);
  EXPECT_EQ(add(x, y).describe(), "f32[2, 3] meta");
  EXPECT_EQ(gelu(y).describe(), "bf16[3] meta");
  EXPECT_EQ(to(x, kI64).describe(), "i64[2, 3] meta");
  EXPECT_THROW(add(x, raw::empty({4}, kF32, kMeta)), ShapeError);
}

TEST(ElementwiseOps, GluIsTheFirstHalfGatedByTheSecond) {
  expect_values(glu(f64({1, 2, 0, 0})), {0.5, 1});
  EXPECT_THROW(glu(f64({1, 2, 3})), ShapeError);
}

}  // namespace
}  // namespace tessera::test_elementwise_ops
