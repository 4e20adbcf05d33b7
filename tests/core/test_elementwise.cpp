// Elementwise kernels and copies on every layout, broadcast, dtype and alias, against an element by
// element reference; and the promotion of operands against torch's.
#include <tessera/core/kernels/elementwise/elementwise.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <tessera/core/factory/factory.h>
#include <tessera/core/half.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::test_elementwise {
namespace {

Tensor random_tensor(const Shape& shape, DType dtype = kF32, uint32_t seed = 1) {
  std::mt19937 engine(seed);
  std::vector<double> values(static_cast<size_t>(numel_of(shape)));
  const bool integers = !is_floating(dtype);
  for (double& value : values) {
    const double unit = static_cast<double>(engine()) / 4294967296.0;
    value = dtype == kBool ? std::floor(2 * unit)
            : dtype == kU8 ? std::floor(200 * unit)
            : integers     ? std::floor(200 * unit) - 100
                           : 8 * unit - 4;
  }
  return tensor(std::span<const double>(values), shape, dtype);
}

// The elements of x broadcast to a shape, in row-major order.
std::vector<double> expanded(const Tensor& x, const Shape& shape) {
  return raw::expand(x, shape).to_vector<double>();
}

// Layouts of one logical value: what a kernel may meet.
struct Layout {
  const char* name;
  Tensor tensor;
};
std::vector<Layout> layouts(const Tensor& x) {  // x: contiguous [a, b, c]
  const int64_t a = x.size(0), b = x.size(1), c = x.size(2);
  std::vector<Layout> result{{"contiguous", x}};
  const auto filled = [&](const char* name, const Tensor& view) {
    kernels::copy_into(view, x);
    result.push_back({name, view});
  };
  filled("transposed", raw::permute(raw::empty({c, a, b}, x.dtype()), {1, 2, 0}));
  filled("outer dimensions swapped", raw::transpose(raw::empty({b, a, c}, x.dtype()), 0, 1));
  filled("sliced", raw::narrow(raw::empty({a, b, c + 3}, x.dtype()), 2, 1, c));
  filled("every second", raw::slice(raw::empty({a, b, 2 * c}, x.dtype()), 2, 0, 2 * c, 2));
  filled(
      "offset by one",
      raw::view(raw::narrow(raw::empty({a * b * c + 1}, x.dtype()), 0, 1, a * b * c), {a, b, c}));
  return result;
}

TEST(Elementwise, EveryPairOfLayoutsGivesTheSameSum) {
  const Shape shape{5, 7, 300};  // longer than a tile, no multiple of a vector
  const Tensor x = random_tensor(shape, kF32, 1), y = random_tensor(shape, kF32, 2);
  const Tensor wanted = kernels::binary<fn::Sub>(x, y);
  const auto xs = x.to_vector<float>(), ys = y.to_vector<float>();
  const auto wanted_values = wanted.to_vector<float>();
  for (size_t i = 0; i < xs.size(); ++i) ASSERT_EQ(wanted_values[i], xs[i] - ys[i]);
  for (const Layout& left : layouts(x)) {
    for (const Layout& right : layouts(y)) {
      const Tensor z = kernels::binary<fn::Sub>(left.tensor, right.tensor);
      EXPECT_EQ(z.to_vector<float>(), wanted_values) << left.name << ", " << right.name;
      const Tensor target = left.tensor;  // in place
      const Tensor kept = kernels::copy(target);
      kernels::binary_into<fn::Sub>(target, target, right.tensor);
      EXPECT_EQ(target.to_vector<float>(), wanted_values) << "in place, " << left.name;
      kernels::copy_into(target, kept);
    }
  }
}

TEST(Elementwise, TheResultKeepsTheOrderOfDimensionsOfADenseOperand) {
  const Tensor x = raw::permute(random_tensor({4, 5, 6}), {2, 0, 1});
  EXPECT_EQ(kernels::unary<fn::Neg>(x).strides(), x.strides());
  EXPECT_EQ(kernels::binary<fn::Add>(x, 1.0).strides(), x.strides());
  const Tensor row = random_tensor({5});
  EXPECT_EQ(kernels::binary<fn::Add>(row, x).strides(), x.strides());
  const Tensor sliced = raw::narrow(random_tensor({4, 5, 6}), 2, 1, 3);
  EXPECT_TRUE(kernels::unary<fn::Neg>(sliced).is_contiguous());
  EXPECT_EQ(kernels::convert(x, kBF16).strides(), x.strides());
}

TEST(Elementwise, BroadcastsAsNumpy) {
  const std::vector<std::pair<Shape, Shape>> cases = {
      {{3, 4}, {4}},  {{3, 4}, {3, 1}}, {{3, 1}, {1, 4}},    {{2, 1, 5}, {3, 1}},
      {{}, {3, 4}},   {{1}, {2, 2}},    {{40, 50}, {}},      {{2, 3, 4}, {2, 1, 4}},
      {{64, 3}, {3}}, {{3}, {64, 3}},   {{5, 2000}, {2000}}, {{5, 2000}, {5, 1}},
      {{70000}, {1}}, {{0, 4}, {4}},    {{2, 0}, {2, 1}},    {{300, 1}, {1, 300}},
  };
  for (const auto& [left, right] : cases) {
    const Tensor a = random_tensor(left, kF32, 3), b = random_tensor(right, kF32, 4);
    const Tensor c = kernels::binary<fn::Mul>(a, b);
    const Shape shape = broadcast_shapes(left, right, "test");
    ASSERT_EQ(c.shape(), shape);
    const auto av = expanded(a, shape), bv = expanded(b, shape), cv = c.to_vector<double>();
    for (size_t i = 0; i < cv.size(); ++i) {
      ASSERT_EQ(cv[i], static_cast<float>(av[i] * bv[i])) << left << " " << right << " at " << i;
    }
  }
}

TEST(Elementwise, ShapesThatDoNotBroadcastAreAShapeError) {
  EXPECT_THROW(kernels::binary<fn::Add>(random_tensor({3}), random_tensor({4})), ShapeError);
  const Tensor out = random_tensor({3});
  EXPECT_THROW(kernels::binary_into<fn::Add>(out, out, random_tensor({2, 3})), ShapeError);
}

TEST(Elementwise, EveryDtypeIsCalculatedInItsLane) {
  for (DType dtype : {kF64, kF32, kF16, kBF16, kI64, kI32, kU8}) {
    const Tensor a = random_tensor({3, 700}, dtype, 5), b = random_tensor({3, 700}, dtype, 6);
    const Tensor c = kernels::binary<fn::Add>(a, b);
    ASSERT_EQ(c.dtype(), dtype);
    const auto av = a.to_vector<double>(), bv = b.to_vector<double>(), cv = c.to_vector<double>();
    for (size_t i = 0; i < av.size(); ++i) {
      // The exact sum, then rounded or wrapped to the dtype.
      const double sum = av[i] + bv[i];
      const Tensor rounded = dtype == kU8 ? tensor({std::fmod(sum, 256.0)}, kF64)
                                          : kernels::convert(tensor({sum}, kF64), dtype);
      ASSERT_EQ(cv[i], rounded.item()) << dtype;
    }
  }
}

TEST(Elementwise, PredicatesGiveBoolForEveryDtype) {
  for (DType dtype : {kF64, kF32, kF16, kBF16, kI64, kI32, kU8, kBool}) {
    const Tensor a = random_tensor({2100}, dtype, 7), b = random_tensor({2100}, dtype, 8);
    const Tensor less = kernels::binary<fn::Lt>(a, b);
    ASSERT_EQ(less.dtype(), kBool);
    const auto av = a.to_vector<double>(), bv = b.to_vector<double>(),
               lv = less.to_vector<double>();
    for (size_t i = 0; i < av.size(); ++i) ASSERT_EQ(lv[i], av[i] < bv[i] ? 1 : 0) << dtype;
  }
}

TEST(Elementwise, ANumberKeepsItsPrecisionBesideBF16) {
  const Tensor x = random_tensor({100}, kBF16);
  const auto xv = x.to_vector<float>();
  const auto yv = kernels::binary<fn::Mul>(x, 0.1).to_vector<float>();
  for (size_t i = 0; i < xv.size(); ++i) {
    ASSERT_EQ(yv[i], to_float(from_float<bf16>(xv[i] * 0.1f)));
  }
}

TEST(Elementwise, WhereTakesItsConditionFromAnyDtypeAndValuesFromAny) {
  const Tensor condition = random_tensor({6, 1}, kBool, 9);
  for (DType dtype : {kF64, kF32, kF16, kBF16, kF8E4M3, kI64, kI32, kU8, kBool}) {
    const Tensor a = random_tensor({6, 400}, dtype, 10), b = random_tensor({400}, dtype, 11);
    const Tensor c = kernels::ternary<fn::Where>(condition, a, b);
    ASSERT_EQ(c.dtype(), dtype);
    const auto choice = expanded(condition, {6, 400}), av = a.to_vector<double>(),
               bv = expanded(b, {6, 400}), cv = c.to_vector<double>();
    for (size_t i = 0; i < cv.size(); ++i) ASSERT_EQ(cv[i], choice[i] != 0 ? av[i] : bv[i]);
  }
}

TEST(Elementwise, AnOverlappingOperandIsReadBeforeItIsWritten) {
  const Tensor x = random_tensor({50000});
  const auto before = x.to_vector<float>();
  const Tensor head = raw::narrow(x, 0, 0, 49999), tail = raw::narrow(x, 0, 1, 49999);
  kernels::binary_into<fn::Add>(tail, tail, head);
  const auto after = x.to_vector<float>();
  for (size_t i = 1; i < before.size(); ++i) ASSERT_EQ(after[i], before[i] + before[i - 1]);
  const Tensor square = random_tensor({30, 30});
  const auto old = square.to_vector<float>();
  kernels::copy_into(square, raw::transpose(square, 0, 1));
  const auto now = square.to_vector<float>();
  for (size_t r = 0; r < 30; ++r) {
    for (size_t c = 0; c < 30; ++c) ASSERT_EQ(now[r * 30 + c], old[c * 30 + r]);
  }
}

TEST(Elementwise, LargeTransposedOperandsAreReadInTheOrderOfTheResult) {
  const Tensor x = random_tensor({300, 200}), y = random_tensor({200, 300}, kBF16, 2);
  const auto xv = raw::transpose(x, 0, 1).to_vector<float>(), yv = y.to_vector<float>();
  const auto sum = kernels::binary<fn::Add>(y, raw::transpose(x, 0, 1)).to_vector<float>();
  for (size_t i = 0; i < sum.size(); ++i) ASSERT_EQ(sum[i], xv[i] + yv[i]);
}

TEST(Elementwise, WritingToRepeatedElementsIsAnError) {
  const Tensor x = raw::expand(random_tensor({3, 1}), {3, 4});
  EXPECT_THROW(kernels::binary_into<fn::Add>(x, x, 1), ValueError);
  EXPECT_THROW(kernels::copy_into(x, random_tensor({3, 4})), ValueError);
}

TEST(Elementwise, MetaOperandsGiveMetaResultsAndTheSameErrors) {
  const Tensor x = raw::empty({3, 4}, kF32, kMeta), y = raw::empty({4}, kF32, kMeta);
  const Tensor z = kernels::binary<fn::Add>(x, y);
  EXPECT_TRUE(z.is_meta());
  EXPECT_EQ(z.shape(), (Shape{3, 4}));
  EXPECT_EQ(kernels::binary<fn::Lt>(x, y).dtype(), kBool);
  EXPECT_THROW(kernels::binary<fn::Add>(x, raw::empty({5}, kF32, kMeta)), ShapeError);
  EXPECT_THROW(kernels::unary<fn::Gelu>(raw::empty({5}, kI64, kMeta)), DTypeError);
  EXPECT_THROW(kernels::binary<fn::Add>(x, random_tensor({4})), DeviceError);
}

TEST(Elementwise, FormulasWithoutAnIntegerFormAndFp8ArithmeticAreErrors) {
  EXPECT_THROW(kernels::unary<fn::Exp>(random_tensor({3}, kI64)), DTypeError);
  EXPECT_THROW(kernels::binary<fn::Add>(random_tensor({3}, kF8E4M3), 1), DTypeError);
}

// sin, cos, remainder and floor_divide have a form for common arguments that vectorises. Which of
// both an element meets depends on its neighbours, so both must give the same bits.
TEST(Elementwise, CommonArgumentsGiveTheBitsOfTheFormulaForAll) {
  constexpr int64_t kCount = 1 << 15;
  std::mt19937 engine(7);
  std::vector<float> a, b;
  for (int64_t i = 0; i < kCount; ++i) {
    // Every sign and exponent in the second half; in the first those that the common form takes.
    const auto any = [&] { return __builtin_bit_cast(float, static_cast<uint32_t>(engine())); };
    const auto usual = [&](double size) {
      return static_cast<float>((static_cast<double>(engine()) / 0x1p31 - 1) * size);
    };
    a.push_back(i < kCount / 2 ? usual(i % 3 == 0 ? 10 : 1e8) : any());
    b.push_back(i < kCount / 2 ? usual(i % 5 == 0 ? 100 : 1e3) : any());
    if (i % 7 == 0) a.back() = b.back() * static_cast<float>(engine() % 2000);  // near a multiple
  }
  const float special[] = {0.0f, -0.0f, 1.0f, -3.0f, INFINITY, -INFINITY, NAN};
  for (float x : special) {
    for (float y : special) a.push_back(x), b.push_back(y);
  }
  const Shape shape{static_cast<int64_t>(a.size())};
  const Tensor x = raw::from_blob(a.data(), shape, kF32), y = raw::from_blob(b.data(), shape, kF32);
  const auto expect = [&](const char* name, const Tensor& result, auto&& formula) {
    int64_t differences = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      const float got = result.data_as<float>()[i], wanted = formula(a[i], b[i]);
      const bool same = std::isnan(wanted) ? std::isnan(got)
                                           : __builtin_bit_cast(uint32_t, got) ==
                                                 __builtin_bit_cast(uint32_t, wanted);
      if (!same && ++differences < 5) {
        ADD_FAILURE() << name << " of " << a[i] << ", " << b[i] << ": " << got << ", not "
                      << wanted;
      }
    }
  };
  expect("sin", kernels::unary<fn::Sin>(x), [](float p, float) { return fn::Sin{}(p); });
  expect("cos", kernels::unary<fn::Cos>(x), [](float p, float) { return fn::Cos{}(p); });
  expect("gradient of sin", kernels::binary<fn::SinGrad>(y, x),
         [](float p, float q) { return fn::SinGrad{}(q, p); });
  expect("gradient of cos", kernels::binary<fn::CosGrad>(y, x),
         [](float p, float q) { return fn::CosGrad{}(q, p); });
  expect("remainder", kernels::binary<fn::Remainder>(x, y),
         [](float p, float q) { return fn::Remainder{}(p, q); });
  expect("floor_divide", kernels::binary<fn::FloorDivide>(x, y),
         [](float p, float q) { return fn::FloorDivide{}(p, q); });
}

TEST(Elementwise, ResultsDoNotDependOnTheThreadCount) {
  const Tensor x = raw::transpose(random_tensor({500, 300}), 0, 1);
  const Tensor row = random_tensor({500}, kBF16);
  const int threads = num_threads();
  set_num_threads(1);
  const auto one = kernels::binary<fn::Mul>(kernels::unary<fn::Gelu>(x), row).to_vector<float>();
  set_num_threads(3);
  const auto three = kernels::binary<fn::Mul>(kernels::unary<fn::Gelu>(x), row).to_vector<float>();
  set_num_threads(threads);
  EXPECT_EQ(one, three);
}

TEST(Elementwise, PromotionFollowsRanks) {
  const Tensor bf = random_tensor({2}, kBF16), f = random_tensor({2}), i = random_tensor({2}, kI64);
  const Tensor u = random_tensor({2}, kU8), b = random_tensor({2}, kBool);
  const Tensor zero_f64 = random_tensor({}, kF64), zero_i64 = random_tensor({}, kI64);
  EXPECT_EQ(kernels::promote({bf, f}), kF32);
  EXPECT_EQ(kernels::promote({bf, zero_f64}), kBF16);
  EXPECT_EQ(kernels::promote({i, zero_f64}), kF64);
  EXPECT_EQ(kernels::promote({u, zero_i64}), kU8);
  EXPECT_EQ(kernels::promote({b, zero_i64}), kI64);
  EXPECT_EQ(kernels::promote({i, 1.5}), kF32);
  EXPECT_EQ(kernels::promote({bf, 1.5}), kBF16);
  EXPECT_EQ(kernels::promote({u, 3}), kU8);
  EXPECT_EQ(kernels::promote({b, 3}), kI64);
  EXPECT_EQ(kernels::promote({b, Scalar(true)}), kBool);
  EXPECT_EQ(kernels::promote({zero_f64, 1.5}), kF64);
  EXPECT_THROW(kernels::promote({random_tensor({2}, kF8E4M3), f}), DTypeError);
}

TEST(Copy, ConvertsEveryDtypeToEveryOther) {
  const DType all[] = {kF64, kF32, kF16, kBF16, kF8E4M3, kF8E5M2, kI64, kI32, kU8, kBool};
  for (DType from : all) {
    Tensor x = random_tensor({3, 5, 70}, from, 12);
    if (from != kBool && is_floating(from)) x = kernels::convert(random_tensor({3, 5, 70}), from);
    const auto xv = x.to_vector<double>();
    for (DType to : all) {
      for (const Layout& layout : layouts(x)) {
        const Tensor y = kernels::convert(layout.tensor, to);
        ASSERT_EQ(y.dtype(), to);
        const auto yv = y.to_vector<double>();
        for (size_t i = 0; i < xv.size(); ++i) {
          double wanted = xv[i];
          if (to == kBool) {
            wanted = wanted != 0;
          } else if (to == kU8) {
            wanted = std::fmod(std::trunc(wanted) + 256, 256);
          } else if (!is_floating(to)) {
            wanted = std::trunc(wanted);
          } else if (to == kF32) {
            wanted = static_cast<float>(wanted);
          } else if (to != kF64) {
            wanted = tensor({wanted}, to).item();
          }
          ASSERT_EQ(yv[i], wanted) << from << " to " << to << ", " << layout.name << ", " << xv[i];
        }
      }
    }
  }
}

TEST(Copy, FloatsOutsideAnIntegersRangeEndAtItsLimits) {
  const Tensor x = tensor({1e30, -1e30, std::numeric_limits<double>::quiet_NaN(), 3e9}, kF64);
  EXPECT_EQ(kernels::convert(x, kI32).to_vector<int64_t>(),
            (std::vector<int64_t>{INT32_MAX, INT32_MIN, 0, INT32_MAX}));
  EXPECT_EQ(kernels::convert(x, kI64).to_vector<int64_t>(),
            (std::vector<int64_t>{INT64_MAX, INT64_MIN, 0, 3000000000}));
}

TEST(Copy, TransposesOfAllSizesMatchTheirView) {
  for (DType dtype : {kF64, kF32, kBF16, kU8}) {
    for (const Shape& shape : {Shape{1, 9}, Shape{33, 65}, Shape{64, 64}, Shape{130, 31},
                               Shape{3, 70, 40}, Shape{2, 3, 50, 6}}) {
      const Tensor x = random_tensor(shape, dtype, 13);
      const Tensor view = raw::transpose(x, -1, -2);
      const Tensor y = kernels::contiguous(view);
      EXPECT_TRUE(y.is_contiguous());
      EXPECT_EQ(y.to_vector<double>(), view.to_vector<double>()) << shape << dtype;
      if (shape.size() > 2) {
        const Tensor outer = raw::transpose(x, 0, -1);
        EXPECT_EQ(kernels::contiguous(outer).to_vector<double>(), outer.to_vector<double>());
      }
    }
  }
}

TEST(Copy, ContiguousReturnsTheSameTensorWhereItAlreadyIs) {
  const Tensor x = random_tensor({3, 4});
  EXPECT_TRUE(kernels::contiguous(x).is(x));
}

TEST(Copy, BroadcastsTheSource) {
  const Tensor target = raw::zeros({3, 4, 5}, kF32), source = random_tensor({4, 1}, kF64);
  kernels::copy_into(target, source);
  const auto sv = expanded(source, {3, 4, 5}), tv = target.to_vector<double>();
  for (size_t i = 0; i < sv.size(); ++i) ASSERT_EQ(tv[i], static_cast<float>(sv[i]));
  EXPECT_THROW(kernels::copy_into(target, random_tensor({2, 5})), ShapeError);
}

TEST(Copy, FillReachesEveryElementAndNoOther) {
  for (DType dtype : {kF64, kF32, kBF16, kF8E5M2, kI64, kU8, kBool}) {
    const Tensor x = raw::zeros({40, 1000}, dtype);
    kernels::fill(raw::slice(raw::narrow(x, 1, 10, 900), 1, 0, 900, 3), 1);
    double total = 0;
    for (double value : x.to_vector<double>()) total += value;
    EXPECT_EQ(total, 40 * 300) << dtype;
  }
}

}  // namespace
}  // namespace tessera::test_elementwise
