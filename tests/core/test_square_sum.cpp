#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/optim/clip.h>

namespace tessera::kernels::test_square_sum {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A whole number of units of 2^-1075, bit by bit in words: what a sum is held against.
struct BigNumber {
  std::vector<uint64_t> words = std::vector<uint64_t>(36);

  void add(double x) {
    int exponent = 0;
    const auto fraction = static_cast<uint64_t>(std::ldexp(std::frexp(x, &exponent), 53));
    int position = exponent - 53 + 1075;
    for (int bit = 0; bit < 53; ++bit, ++position) {
      if ((fraction >> bit & 1) == 0) continue;
      size_t word = static_cast<size_t>(position) / 64;
      uint64_t carried = uint64_t{1} << (position % 64);
      while (carried != 0) {
        words[word] += carried;
        carried = words[word] < carried ? 1 : 0;
        ++word;
      }
    }
  }
  int compare(const BigNumber& other) const {
    for (size_t i = words.size(); i-- > 0;) {
      if (words[i] != other.words[i]) return words[i] < other.words[i] ? -1 : 1;
    }
    return 0;
  }
};
BigNumber sum_of(double a, double b) {
  BigNumber sum;
  sum.add(a);
  sum.add(b);
  return sum;
}

// Whether no other f64 is nearer to the sum of the squares, and of two the even one is given.
void expect_nearest(double got, const std::vector<double>& values) {
  BigNumber twice;
  for (const double v : values) {
    twice.add(v * v);
    twice.add(v * v);
  }
  const bool even = (std::bit_cast<uint64_t>(got) & 1) == 0;
  EXPECT_LE(twice.compare(sum_of(got, std::nextafter(got, kInfinity))), even ? 0 : -1) << got;
  if (got > 0) {
    EXPECT_GE(twice.compare(sum_of(std::nextafter(got, 0), got)), even ? 0 : 1) << got;
  }
}

std::vector<double> as_stored(const std::vector<double>& values, DType dtype) {
  return tensor(std::span(values), {static_cast<int64_t>(values.size())}, dtype)
      .to_vector<double>();
}

enum class Spread {
  kNormal,     // of a normal distribution
  kTail,       // the same times a lognormal factor: a second level is not enough for all runs
  kWhole,      // every exponent of the dtype, subnormal numbers, zeros
  kFewSmall,   // a normal distribution with single ones far below it
  kTwoScales,  // runs of large magnitudes beside runs of tiny ones
  kSteps,      // largest ones double every few runs; powers of 2
};
constexpr Spread kSpreads[] = {Spread::kNormal,   Spread::kTail,      Spread::kWhole,
                               Spread::kFewSmall, Spread::kTwoScales, Spread::kSteps};
std::vector<double> values_of(int64_t size, DType dtype, Spread spread, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  const double low = dtype == kF16 ? -24 : dtype == kF64 ? -560 : -149;
  const double high = dtype == kF16 ? 15 : dtype == kF64 ? 508 : 127;
  std::uniform_real_distribution<double> exponent(low, high), unit(0, 1);
  const double largest = dtype == kF16 ? 60000 : dtype == kF64 ? 0x1p508 : 3e38;
  std::vector<double> values(static_cast<size_t>(size));
  for (size_t i = 0; i < values.size(); ++i) {
    double v = normal(random);
    if (spread == Spread::kTail) v *= std::exp(6 * normal(random));
    if (spread == Spread::kWhole) v = std::exp2(exponent(random)) * (unit(random) < 0.5 ? 1 : -1);
    if (spread == Spread::kWhole && unit(random) < 0.05) v = 0;
    if (spread == Spread::kFewSmall && unit(random) < 0.002) v *= 0x1p-13 * unit(random);
    if (spread == Spread::kTwoScales && i / 3000 % 2 == 1) v *= 0x1p-20;
    if (spread == Spread::kSteps) {
      v = unit(random);
      if (i % 1024 == 7) v = 1;
      // Small ones at and right below powers of 2, where levels end.
      if (i % 512 == 9) {
        v = std::exp2(-static_cast<double>(i / 512 % 30)) *
            (i / 15360 % 2 == 1 ? 1 - 0x1.0008p-27 : 1);
      }
      v *= std::exp2(i / 4096 % 6);
    }
    values[i] = std::clamp(v, -largest, largest);
  }
  return as_stored(values, dtype);
}

Tensor piece(const std::vector<double>& values, size_t begin, size_t end, DType dtype) {
  return tensor(std::span(values).subspan(begin, end - begin), {static_cast<int64_t>(end - begin)},
                dtype);
}
Tensor sum_of_whole(const std::vector<double>& values, DType dtype) {
  const Tensor x = piece(values, 0, values.size(), dtype);
  return multi_tensor_square_sum({&x, 1}, kCpu);
}
std::vector<int64_t> bits_of(const Tensor& sum) { return sum.to_vector<int64_t>(); }

// The sums of `ranks` that were dealt pieces in any order, added up in any order.
Tensor sum_of_pieces(const std::vector<double>& values, DType dtype, std::mt19937_64& random,
                     size_t largest_piece, size_t ranks) {
  std::vector<TensorList> dealt(ranks);
  for (size_t begin = 0; begin < values.size();) {
    const size_t end = std::min(values.size(), begin + random() % (largest_piece + 1));
    dealt[random() % ranks].push_back(piece(values, begin, end, dtype));
    begin = end;
  }
  std::shuffle(dealt.begin(), dealt.end(), random);
  const Tensor total = raw::zeros({kNumSquareSum}, kI64);
  for (TensorList& pieces : dealt) {
    std::shuffle(pieces.begin(), pieces.end(), random);
    set_num_threads(1 + static_cast<int>(random() % 4));
    const Tensor sum = multi_tensor_square_sum(pieces, kCpu);
    for (int i = 0; i < kNumSquareSum; ++i) {
      total.data_as<int64_t>()[i] += sum.data_as<int64_t>()[i];
    }
  }
  return total;
}

class OfDType : public testing::TestWithParam<DType> {
  void SetUp() override { threads_ = num_threads(); }
  void TearDown() override { set_num_threads(threads_); }
  int threads_ = 1;
};
INSTANTIATE_TEST_SUITE_P(SquareSum, OfDType, testing::Values(kF32, kBF16, kF16, kF64),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(OfDType, the_sum_is_that_of_exact_arithmetic_rounded_once) {
  for (const Spread spread : kSpreads) {
    for (const int64_t size : {1, 2, 31, 64, 1000, 1024, 1025, 2049, 4100, 40011}) {
      SCOPED_TRACE(testing::Message() << "spread " << static_cast<int>(spread) << ", " << size);
      const std::vector<double> values = values_of(size, GetParam(), spread, 7);
      const double got = square_sum_value(sum_of_whole(values, GetParam()));
      ASSERT_TRUE(std::isfinite(got));
      expect_nearest(got, values);
      const Tensor x = piece(values, 0, values.size(), GetParam());
      EXPECT_EQ(multi_tensor_power_sums({&x, 1})[0], got);
      EXPECT_EQ(multi_tensor_norm({&x, 1}), std::sqrt(got));
    }
  }
}

TEST_P(OfDType, the_sum_does_not_see_how_tensors_are_cut_nor_who_adds_the_pieces) {
  std::mt19937_64 random(11);
  for (const Spread spread : kSpreads) {
    const std::vector<double> values = values_of(50021, GetParam(), spread, 3);
    const Tensor whole = sum_of_whole(values, GetParam());
    for (const size_t largest_piece : {size_t{37}, size_t{3000}, size_t{40000}}) {
      for (const size_t ranks : {size_t{1}, size_t{2}, size_t{7}}) {
        const Tensor total = sum_of_pieces(values, GetParam(), random, largest_piece, ranks);
        ASSERT_EQ(square_sum_value(total), square_sum_value(whole))
            << static_cast<int>(spread) << ' ' << largest_piece << ' ' << ranks;
        if (ranks == 1) {
          ASSERT_EQ(bits_of(total), bits_of(whole));
        }
      }
    }
  }
}

// Each limb of what one call gives is below 2^32, so that sums of 2^30 ranks still fit.
TEST_P(OfDType, limbs_of_a_sum_are_carried) {
  for (const Spread spread : kSpreads) {
    const std::vector<int64_t> limbs =
        bits_of(sum_of_whole(values_of(20000, GetParam(), spread, 5), GetParam()));
    for (int i = 0; i < kSquareSumLimbs; ++i) {
      EXPECT_GE(limbs[static_cast<size_t>(i)], 0) << i;
      EXPECT_LT(limbs[static_cast<size_t>(i)], int64_t{1} << 32) << i;
    }
  }
}

TEST_P(OfDType, elements_that_are_not_finite_are_counted_and_the_others_still_added) {
  for (const Spread spread : {Spread::kTail, Spread::kNormal}) {
    std::vector<double> values = values_of(30000, GetParam(), spread, 9);
    values[20000] = values[29999] = 0;
    const std::vector<int64_t> finite = bits_of(sum_of_whole(values, GetParam()));
    std::mt19937_64 random(2);
    const auto check = [&](int64_t nans, int64_t infinities, double expected) {
      std::vector<int64_t> with_counts = finite;
      with_counts[kSquareSumNaNs] = nans;
      with_counts[kSquareSumInfinities] = infinities;
      EXPECT_EQ(bits_of(sum_of_whole(values, GetParam())), with_counts);
      for (const size_t ranks : {size_t{1}, size_t{5}}) {
        const Tensor total = sum_of_pieces(values, GetParam(), random, 5000, ranks);
        EXPECT_EQ(total.data_as<int64_t>()[kSquareSumNaNs], nans);
        EXPECT_EQ(total.data_as<int64_t>()[kSquareSumInfinities], infinities);
        const double got = square_sum_value(total);
        EXPECT_TRUE(std::isnan(expected) ? std::isnan(got) : got == expected) << got;
        const Tensor clip = square_sum_clip_factor(total, 1, 1);
        EXPECT_EQ(clip.data_as<double>()[2], 1);
      }
    };
    values[20000] = -kInfinity;
    check(0, 1, kInfinity);
    values[29999] = kNaN;
    check(1, 1, kNaN);
    values[20000] = 0;
    check(1, 0, kNaN);
  }
}

TEST(SquareSum, the_ends_of_the_range_of_f64_are_in_it) {
  const auto value = [](const std::vector<double>& values) {
    return square_sum_value(sum_of_whole(values, kF64));
  };
  EXPECT_EQ(value({}), 0);
  EXPECT_EQ(value({0, -0.0}), 0);
  EXPECT_EQ(value({0x1p-537}), 0x1p-1074);
  EXPECT_EQ(value({0x1p-537, -0x1p-537, 0x1p-537}), 0x3p-1074);
  EXPECT_EQ(value({0x1p-600}), 0);  // the square of an f64 is rounded by itself
  EXPECT_EQ(value({0x1.8p511}), 0x1.2p1023);
  EXPECT_EQ(value({0x1p512}), kInfinity);
  EXPECT_EQ(value({0x1.8p511, 0x1.8p511}), kInfinity);  // the sum overflows, no square does
  // The most that is finite, 2^1024 - 2^971; half a unit more rounds to infinity, less does not.
  std::vector<double> most = {0x1p511, 0x1p511, 0x1p511, 0x1.ffffffffffffep510};
  EXPECT_EQ(value(most), std::numeric_limits<double>::max());
  most.push_back(0x1.fffp484);
  EXPECT_EQ(value(most), std::numeric_limits<double>::max());
  most.back() = 0x1p485;
  EXPECT_EQ(value(most), kInfinity);
  // Ties go to the even neighbour, and what is far below breaks them.
  EXPECT_EQ(value({0x1p26, 0x1p-1, 0x1p-1}), 0x1p52);
  EXPECT_EQ(value({0x1p27, 1}), 0x1p54);
  EXPECT_EQ(value({0x1p27, 1, 1}), 0x1p54);
  EXPECT_EQ(value({0x1p27, 1, 1, 0x1p-537}), 0x1p54 + 4);
  EXPECT_EQ(value({0x1p27, 2, 1, 1}), 0x1p54 + 8);
}

TEST(SquareSum, tensors_of_all_dtypes_layouts_and_no_elements_go_into_one_sum) {
  const std::vector<double> values = values_of(6000, kBF16, Spread::kNormal, 1);
  const Tensor matrix = tensor(std::span(values), {60, 100}, kF32);
  const Tensor some = raw::narrow(matrix, 1, 10, 30);  // rows with gaps
  const Tensor rest[] = {raw::narrow(matrix, 1, 0, 10), raw::narrow(matrix, 1, 40, 60)};
  const TensorList parts = {raw::transpose(some, 0, 1), rest[0], rest[1], raw::zeros({0}, kF16)};
  EXPECT_EQ(bits_of(multi_tensor_square_sum(parts, kCpu)), bits_of(sum_of_whole(values, kF32)));
  EXPECT_EQ(bits_of(sum_of_whole(values, kBF16)), bits_of(sum_of_whole(values, kF32)));
  EXPECT_EQ(bits_of(sum_of_whole(values, kF64)), bits_of(sum_of_whole(values, kF32)));
  const std::vector<double> each = multi_tensor_power_sums(parts);
  EXPECT_EQ(each.size(), parts.size());
  EXPECT_EQ(each[3], 0);
  EXPECT_EQ(bits_of(multi_tensor_square_sum({}, kCpu)), std::vector<int64_t>(kNumSquareSum));
}

TEST(SquareSum, sums_of_very_many_ranks_merge_without_carries) {
  const std::vector<double> values = values_of(3000, kF32, Spread::kWhole, 1);
  const Tensor one = sum_of_whole(values, kF32), many = raw::zeros({kNumSquareSum}, kI64);
  for (int i = 0; i < kNumSquareSum; ++i) {
    many.data_as<int64_t>()[i] = one.data_as<int64_t>()[i] << 30;
  }
  EXPECT_EQ(square_sum_value(many), square_sum_value(one) * 0x1p30);
}

// Gradients as DDP has them, and cut as ZeRO and FSDP cut them.
TEST(SquareSum, clipping_has_one_coefficient_for_any_cut_of_the_gradients) {
  const std::vector<double> values = values_of(40000, kF32, Spread::kTail, 21);
  const auto clipped = [&](const std::vector<size_t>& ends) {
    TensorList parameters;
    size_t begin = 0;
    for (const size_t end : ends) {
      Tensor parameter = raw::zeros({static_cast<int64_t>(end - begin)}, kF32);
      parameter.set_requires_grad(true);
      parameter.set_grad(piece(values, begin, end, kF32));
      parameters.push_back(parameter);
      begin = end;
    }
    const double norm = optim::clip_grad_norm(parameters, 0.5).item();
    std::vector<double> result = {norm};
    for (const Tensor& parameter : parameters) {
      for (const double v : parameter.grad().to_vector<double>()) result.push_back(v);
    }
    return result;
  };
  const std::vector<double> whole = clipped({40000});
  EXPECT_EQ(clipped({1, 17, 20000, 39999, 40000}), whole);
  EXPECT_EQ(clipped({16384, 16385, 30000, 40000}), whole);
  const Tensor x = piece(values, 0, values.size(), kF32), half = tensor({0.5}, kF64);
  const Tensor sum = sum_of_whole(values, kF32);
  const auto factor = square_sum_clip_factor(sum, 0.25, 0.5, half).to_vector<double>();
  const double norm = std::sqrt(square_sum_value(sum)) * 0.125;
  EXPECT_EQ(factor, (std::vector<double>{norm, 0.5 * std::min(1.0, 0.5 / (norm + 1e-6)), 0}));
  EXPECT_EQ(multi_tensor_clip_factor({&x, 1}, 2, 0.25, 0.5, half).to_vector<double>(), factor);
}

TEST(SquareSum, refuses_what_is_no_sum_and_tensors_that_it_cannot_read) {
  const Tensor integers = raw::zeros({3}, kI64), meta = raw::empty({3}, kF32, kMeta);
  EXPECT_THROW(multi_tensor_square_sum({&integers, 1}, kCpu), DTypeError);
  EXPECT_THROW(multi_tensor_square_sum({&meta, 1}, kCpu), DeviceError);
  EXPECT_THROW(multi_tensor_square_sum({}, kMeta), DeviceError);
  EXPECT_THROW(square_sum_value(integers), ShapeError);
  EXPECT_THROW(square_sum_value(raw::zeros({kNumSquareSum}, kF64)), DTypeError);
  EXPECT_THROW(square_sum_clip_factor(integers, 1, 1), ShapeError);
}

}  // namespace
}  // namespace tessera::kernels::test_square_sum
