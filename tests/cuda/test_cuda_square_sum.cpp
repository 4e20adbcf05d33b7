#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels::test_cuda_square_sum {
namespace {

std::vector<int64_t> bits_of(const Tensor& sum) { return sum.to_vector<int64_t>(); }

// Magnitudes from one binade to all that the dtype has.
Tensor spread_over(int64_t size, DType dtype, double binades, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> unit(0, 1);
  const double middle = dtype == kF16 ? -4 : dtype == kF64 ? -26 : -11;
  const double most = dtype == kF16 ? 38 : dtype == kF64 ? 1068 : 276;
  std::vector<double> values(static_cast<size_t>(size));
  for (double& v : values) {
    v = std::exp2(middle + std::min(binades, most) * (unit(random) - 0.5));
    v *= normal(random) < 0 ? -1 : 1;
    if (unit(random) < 0.02) v = 0;
  }
  return tensor(std::span<const double>(values), {size}, dtype);
}

class OfDType : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(CudaSquareSum, OfDType, testing::Values(kF32, kBF16, kF16, kF64),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(OfDType, HasTheBitsOfTheCpuForAnyCut) {
  for (const double binades : {1.0, 16.0, 30.0, 60.0, 1100.0}) {
    const Tensor here = spread_over(20011, GetParam(), binades, 5), there = here.to(cuda(0));
    const std::vector<int64_t> expected = bits_of(multi_tensor_square_sum({&here, 1}, kCpu));
    EXPECT_EQ(bits_of(multi_tensor_square_sum({&there, 1}, cuda(0))), expected) << binades;
    TensorList pieces;  // at addresses of any alignment
    for (int64_t begin = 0; begin < 20011;) {
      const int64_t length = std::min<int64_t>(20011 - begin, 1 + begin / 2);
      pieces.insert(pieces.begin(), raw::narrow(there, 0, begin, length));
      begin += length;
    }
    const Tensor sum = multi_tensor_square_sum(pieces, cuda(0));
    EXPECT_EQ(sum.device(), cuda(0));
    EXPECT_EQ(bits_of(sum), expected) << binades;
    const TensorList both = {there, there.to(kCpu).to(cuda(0)), raw::narrow(there, 0, 0, 0)};
    const std::vector<double> sums = multi_tensor_power_sums(both);
    const double value = square_sum_value(multi_tensor_square_sum({&here, 1}, kCpu));
    EXPECT_EQ(sums, (std::vector<double>{value, value, 0}));
    EXPECT_EQ(multi_tensor_norm(pieces), multi_tensor_norm({&here, 1}));
    EXPECT_EQ(square_sum_clip_factor(sum, 0.5, 0.25).to_vector<double>(),
              multi_tensor_clip_factor({&here, 1}, 2, 0.5, 0.25).to_vector<double>());
  }
}

TEST_P(OfDType, CountsElementsThatAreNotFiniteAndAddsTheOthers) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Tensor x = spread_over(20000, GetParam(), 30, 6);
  raw::narrow(x, 0, 3, 2).fill_(kInfinity);
  raw::narrow(x, 0, 19998, 1).fill_(-kInfinity);
  const auto check = [&](bool has_nan) {
    const Tensor there = x.to(cuda(0)), sum = multi_tensor_square_sum({&there, 1}, cuda(0));
    EXPECT_EQ(bits_of(sum), bits_of(multi_tensor_square_sum({&x, 1}, kCpu)));
    EXPECT_EQ(bits_of(sum)[kSquareSumInfinities], 3);
    EXPECT_EQ(bits_of(sum)[kSquareSumNaNs], has_nan ? 1 : 0);
    const double value = square_sum_value(sum);
    EXPECT_TRUE(has_nan ? std::isnan(value) : value == kInfinity) << value;
    EXPECT_EQ(square_sum_clip_factor(sum, 1, 1).to_vector<double>()[2], 1);
  };
  check(false);
  raw::narrow(x, 0, 9000, 1).fill_(std::nan(""));
  check(true);
}

TEST_P(OfDType, OfNothingButNumbersThatAreNotFinite) {
  for (const double value : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    for (const int64_t size : {1, 20000}) {
      const Tensor x = raw::full({size}, value, GetParam()), there = x.to(cuda(0));
      EXPECT_EQ(bits_of(multi_tensor_square_sum({&there, 1}, cuda(0))),
                bits_of(multi_tensor_square_sum({&x, 1}, kCpu)))
          << value;
    }
  }
}

// One large number and one far below it, on both sides of each power of two.
TEST_P(OfDType, HoldsNumbersAtTheEdgesOfLevels) {
  for (int exponent = 0; exponent < 64; ++exponent) {
    const double power = std::ldexp(1.0, -exponent);
    for (const double small :
         {power, power * (1 + 0x1p-6), power * (1 - 0x1p-8), power * (1 - 0x1p-11)}) {
      for (const double large : {1.0, 2 - 0x1p-6}) {
        const Tensor x = raw::zeros({300}, GetParam(), kCpu);
        raw::narrow(x, 0, 7, 1).fill_(large);
        raw::narrow(x, 0, 290, 1).fill_(small);
        const Tensor there = x.to(cuda(0));
        EXPECT_EQ(bits_of(multi_tensor_square_sum({&there, 1}, cuda(0))),
                  bits_of(multi_tensor_square_sum({&x, 1}, kCpu)))
            << large << " " << small;
      }
    }
  }
}

TEST(CudaSquareSum, OfNoTensorsIsZeroBesideTheOthers) {
  const Tensor sum = multi_tensor_square_sum({}, cuda(0));
  EXPECT_EQ(sum.device(), cuda(0));
  EXPECT_EQ(square_sum_value(sum), 0);
  EXPECT_EQ(square_sum_clip_factor(sum, 1, 1).to_vector<double>(), (std::vector<double>{0, 1, 0}));
}

// Squares of f64 that are too large for a register go one by one, until their sum overflows.
TEST(CudaSquareSum, HoldsTheEndsOfTheRange) {
  for (const double value : {0x1p-537, 0x1.8p-540, 0x1p507, 0x1.4p509, 0x1.fp511, 0x1p512}) {
    for (const int64_t size : {1, 3, 5000}) {
      const Tensor x = raw::full({size}, value, kF64), there = x.to(cuda(0));
      const Tensor sum = multi_tensor_square_sum({&there, 1}, cuda(0));
      EXPECT_EQ(bits_of(sum), bits_of(multi_tensor_square_sum({&x, 1}, kCpu))) << value;
      const double norm = square_sum_clip_factor(sum, 1, 1).to_vector<double>()[0];
      EXPECT_EQ(norm, multi_tensor_norm({&x, 1})) << value;
    }
  }
}

}  // namespace
}  // namespace tessera::kernels::test_cuda_square_sum
