// sort, argsort and topk: order, stability, NaN, every dtype, gradients.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/parallel.h>

namespace tessera::test_sort {
namespace {

using Values = std::vector<double>;
using Places = std::vector<int64_t>;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

bool less_with_nan(double a, double b) { return std::isnan(b) ? !std::isnan(a) : a < b; }

// The places of a stable sort, NaN largest.
Places reference(const Values& values, bool descending) {
  Places places(values.size());
  std::iota(places.begin(), places.end(), int64_t{0});
  std::stable_sort(places.begin(), places.end(), [&](int64_t i, int64_t j) {
    const double a = values[static_cast<size_t>(i)], b = values[static_cast<size_t>(j)];
    return descending ? less_with_nan(b, a) : less_with_nan(a, b);
  });
  return places;
}

TEST(Sort, NanIsLargestAndZerosAreEqual) {
  const Tensor x = tensor({3, kNan, -0.0, 0, -kInf, 3, kNan, 1});
  EXPECT_EQ(argsort(x).to_vector<int64_t>(), (Places{4, 2, 3, 7, 0, 5, 1, 6}));
  EXPECT_EQ(argsort(x, 0, true).to_vector<int64_t>(), (Places{1, 6, 0, 5, 7, 2, 3, 4}));
  EXPECT_EQ(topk(x, 3).indices.to_vector<int64_t>(), (Places{1, 6, 0}));
  EXPECT_EQ(topk(x, 3, -1, false).indices.to_vector<int64_t>(), (Places{4, 2, 3}));
  EXPECT_EQ(argsort(tensor({-kNan, 1, kNan})).to_vector<int64_t>(), (Places{1, 0, 2}))
      << "the sign of a NaN does not count";
}

TEST(Sort, ShortAndLongRowsOfEveryDTypeAreStable) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    for (const int64_t size : {1, 2, 33, 255, 256, 1000, 5000}) {
      // Few values: many are equal. Large ones, so that all bits of the integers take part.
      Tensor x = to(randint(-4, 5, {2, size}, kI64, RandomStream{1, 1}), dtype);
      if (dtype == kI64 || dtype == kI32) x = mul(x, Scalar(int64_t{1} << 28));
      for (const bool descending : {false, true}) {
        const ValuesIndices sorted = sort(x, 1, descending);
        for (int64_t row = 0; row < 2; ++row) {
          const Values values = select(x, 0, row).to_vector();
          const Places expected = reference(values, descending);
          ASSERT_EQ(select(sorted.indices, 0, row).to_vector<int64_t>(), expected)
              << dtype << " " << size << " " << descending;
          Values in_order;
          for (const int64_t place : expected) {
            in_order.push_back(values[static_cast<size_t>(place)]);
          }
          ASSERT_EQ(select(sorted.values, 0, row).to_vector(), in_order);
        }
      }
    }
  }
}

TEST(Sort, WideNumbersOfAllMagnitudesAreOrdered) {
  const Tensor wide = mul(randn({3000}, {.dtype = kF64}, RandomStream{1, 2}),
                          pow(Scalar(10.0), randint(-300, 300, {3000}, kF64, RandomStream{1, 3})));
  EXPECT_EQ(argsort(wide).to_vector<int64_t>(), reference(wide.to_vector(), false));
  const Tensor integers = randint(INT64_MIN, INT64_MAX, {3000}, kI64, RandomStream{1, 4});
  auto expected = integers.to_vector<int64_t>();
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(sort(integers).values.to_vector<int64_t>(), expected);
}

TEST(Sort, AnyDimensionAndLayout) {
  const Tensor x = randn({4, 5, 6}, {}, RandomStream{1, 5});
  const ValuesIndices middle = sort(x, 1);
  const ValuesIndices moved = sort(contiguous(transpose(x, 1, 2)), -1);
  EXPECT_EQ(middle.values.to_vector(), transpose(moved.values, 1, 2).to_vector());
  EXPECT_EQ(middle.indices.to_vector(), transpose(moved.indices, 1, 2).to_vector());
  EXPECT_EQ(sort(transpose(x, 0, 2), 1).values.to_vector(),
            transpose(middle.values, 0, 2).to_vector());
  EXPECT_EQ(gather(x, 1, middle.indices).to_vector(), middle.values.to_vector());
  EXPECT_EQ(sort(full({}, 3)).indices.item(), 0);
  EXPECT_EQ(sort(empty({0, 3})).values.shape(), Shape({0, 3}));
  EXPECT_EQ(sort(empty({3, 4}, {.device = kMeta})).indices.dtype(), kI64);
  EXPECT_THROW(sort(x, 3), IndexError);
}

TEST(Topk, IsTheFrontOfTheSortForEveryK) {
  for (const int64_t size : {1, 10, 300, 4000}) {
    const Tensor x = randint(0, 500, {3, size}, kF32, RandomStream{1, 6});
    for (const int64_t k : {int64_t{1}, int64_t{3}, size / 3, size / 2 + 1, size}) {
      if (k > size) continue;
      for (const bool largest : {true, false}) {
        const ValuesIndices best = topk(x, k, 1, largest), all = sort(x, 1, largest);
        ASSERT_EQ(best.values.to_vector(), narrow(all.values, 1, 0, k).to_vector()) << size;
        ASSERT_EQ(best.indices.to_vector(), narrow(all.indices, 1, 0, k).to_vector()) << k;
      }
    }
  }
  EXPECT_EQ(topk(ones({2, 3}), 0).values.shape(), Shape({2, 0}));
  EXPECT_THROW(topk(ones({2, 3}), 4), ValueError);
}

TEST(Topk, RisingAndFallingRowsAreNoDifferent) {
  const Tensor rising = arange(0, 100000, 1, kF32);
  EXPECT_EQ(topk(rising, 3).indices.to_vector(), (Values{99999, 99998, 99997}));
  EXPECT_EQ(topk(rising, 3, 0, false).indices.to_vector(), (Values{0, 1, 2}));
  EXPECT_EQ(topk(zeros({100000}), 4).indices.to_vector(), (Values{0, 1, 2, 3}));
}

TEST(Sort, BitsDoNotDependOnTheNumberOfThreads) {
  const Tensor x = randn({64, 700}, {}, RandomStream{1, 7});
  const int threads = num_threads();
  set_num_threads(1);
  const Values one = sort(x).indices.to_vector();
  set_num_threads(3);
  EXPECT_EQ(sort(x).indices.to_vector(), one);
  set_num_threads(threads);
}

TEST(Sort, GradientsOfAnyOrderReturnToTheirPlaces) {
  const Tensor x = randn({3, 6}, {.dtype = kF64}, RandomStream{1, 8}).set_requires_grad();
  const auto check = [&](auto f) {
    const auto squared = [&](const TensorList& in) {
      const Tensor values = f(in[0]);
      return TensorList{mul(values, values)};
    };
    const GradcheckResult first = gradcheck(squared, {x}), second = gradgradcheck(squared, {x});
    EXPECT_TRUE(first.ok) << first.message;
    EXPECT_TRUE(second.ok) << second.message;
  };
  check([](const Tensor& t) { return sort(t, 0).values; });
  check([](const Tensor& t) { return sort(t, 1, true).values; });
  check([](const Tensor& t) { return topk(t, 2, 1).values; });
}

}  // namespace
}  // namespace tessera::test_sort
