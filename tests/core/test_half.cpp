// Conversions of the storage types against a reference that knows only the formats' definitions:
// the value of a code by ldexp, and the code of a float by the ordered list of midpoints.
#include <tessera/core/half.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <thread>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "thinned.h"

namespace tessera::test_half {
namespace {

struct Format {
  int exponent_bits, mantissa_bits;
  uint32_t largest_finite;  // magnitude
  uint32_t overflow;        // magnitude to which larger numbers go
  uint32_t nan;             // the magnitude of a float NaN without payload
};

template <class T>
struct Describe;
template <>
struct Describe<bf16> {
  static constexpr Format format = {8, 7, 0x7f7f, 0x7f80, 0x7fc0};
};
template <>
struct Describe<f16> {
  static constexpr Format format = {5, 10, 0x7bff, 0x7c00, 0x7e00};
};
template <>
struct Describe<f8e4m3> {
  static constexpr Format format = {4, 3, 0x7e, 0x7e, 0x7f};
};
template <>
struct Describe<f8e5m2> {
  static constexpr Format format = {5, 2, 0x7b, 0x7c, 0x7f};
};

// The value of a finite magnitude, by the definition of the format. Also defined for the code after
// the largest finite one: the number at which the format would go on.
double value_of(const Format& format, uint32_t magnitude) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(magnitude >> format.mantissa_bits);
  const int mantissa = static_cast<int>(magnitude & ((1u << format.mantissa_bits) - 1));
  if (exponent == 0) return std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  return std::ldexp((1 << format.mantissa_bits) + mantissa, exponent - bias - format.mantissa_bits);
}

float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }

template <class T>
constexpr uint32_t kSign = 1u << (8 * sizeof(T) - 1);

template <class T>
class Half : public testing::Test {};
using Types = testing::Types<bf16, f16, f8e4m3, f8e5m2>;
TYPED_TEST_SUITE(Half, Types);

TYPED_TEST(Half, EveryCodeWidensToItsValueAndComesBack) {
  using T = TypeParam;
  const Format format = Describe<T>::format;
  for (uint32_t code = 0; code < 2 * kSign<T>; ++code) {
    const T x = T::from_bits(static_cast<decltype(x.bits)>(code));
    const uint32_t magnitude = code & (kSign<T> - 1);
    const double sign = code & kSign<T> ? -1 : 1;
    const float wide = to_float(x);
    ASSERT_EQ(std::signbit(wide), sign < 0) << code;
    if (magnitude <= format.largest_finite) {
      ASSERT_EQ(static_cast<double>(wide), sign * value_of(format, magnitude)) << code;
      ASSERT_EQ(from_float<T>(wide).bits, code);
      ASSERT_EQ(from_float_saturate<T>(wide).bits, code);
    } else if (magnitude == format.largest_finite + 1 && format.overflow == magnitude) {
      ASSERT_TRUE(std::isinf(wide)) << code;
      ASSERT_EQ(from_float<T>(wide).bits, code);
      ASSERT_EQ(from_float_saturate<T>(wide).bits, (code & kSign<T>) | format.largest_finite);
    } else {
      ASSERT_TRUE(std::isnan(wide)) << code;
      ASSERT_TRUE(std::isnan(to_float(from_float<T>(wide)))) << code;
      ASSERT_TRUE(std::isnan(to_float(from_float_saturate<T>(wide)))) << code;
    }
  }
}

// The first float, as bits, that does not round to `magnitude` or below: found from the midpoint
// between it and its successor. A tie goes to the even code.
uint32_t end_of_code(const Format& format, uint32_t magnitude) {
  const double midpoint = (value_of(format, magnitude) + value_of(format, magnitude + 1)) / 2;
  if (midpoint > std::numeric_limits<float>::max()) return 0x7f800000u;
  uint32_t bits = bits_of(static_cast<float>(midpoint));
  EXPECT_EQ(static_cast<double>(float_of(bits)), midpoint) << "midpoints are floats";
  return magnitude % 2 == 0 ? bits + 1 : bits;
}

// Counts the floats of [begin, end), as bits, whose conversion is not `magnitude` with their sign.
template <class T>
uint64_t count_wrong(uint32_t begin, uint32_t end, uint32_t magnitude) {
  constexpr uint32_t kBlock = 1024;  // known trip count: the loop vectorises at -O2
  uint64_t wrong = 0;
  while (end - begin >= kBlock) {
    uint32_t difference = 0;
    for (uint32_t i = 0; i < kBlock; ++i) {
      difference |= from_float<T>(float_of(begin + i)).bits ^ magnitude;
      difference |= from_float<T>(float_of((begin + i) | 0x80000000u)).bits ^ magnitude ^ kSign<T>;
    }
    wrong += difference != 0;
    begin += kBlock;
  }
  for (; begin < end; ++begin) {
    wrong += from_float<T>(float_of(begin)).bits != magnitude;
    wrong += from_float<T>(float_of(begin | 0x80000000u)).bits != (magnitude | kSign<T>);
  }
  return wrong;
}

// All 2^32 floats in release builds; the neighbourhoods of all midpoints under sanitizers.
TYPED_TEST(Half, EveryFloatRoundsToNearestEven) {
  using T = TypeParam;
  const Format format = Describe<T>::format;
  struct Range {
    uint32_t begin, end, magnitude;
  };
  std::vector<Range> ranges;
  uint32_t begin = 0;
  for (uint32_t magnitude = 0; magnitude <= format.largest_finite; ++magnitude) {
    const uint32_t end = end_of_code(format, magnitude);
    ranges.push_back({begin, end, magnitude});
    begin = end;
  }
  ranges.push_back({begin, 0x7f800001u, format.overflow});

  const bool sanitized = tests::sanitized();
  std::atomic<uint64_t> wrong = 0;
  auto work = [&](size_t remainder) {
    for (size_t i = remainder; i < ranges.size(); i += 2) {
      const auto [first, last, magnitude] = ranges[i];
      if (!sanitized || last - first <= 64) {
        wrong += count_wrong<T>(first, last, magnitude);
      } else {
        wrong += count_wrong<T>(first, first + 32, magnitude);
        wrong += count_wrong<T>(last - 32, last, magnitude);
      }
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  EXPECT_EQ(wrong, 0u);
}

TYPED_TEST(Half, NanStaysNanWithItsSignAndQuiet) {
  using T = TypeParam;
  const Format format = Describe<T>::format;
  for (uint32_t bits : {0x7fc00000u, 0x7f800001u, 0x7fbfffffu}) {
    EXPECT_EQ(from_float<T>(float_of(bits)).bits & format.nan, format.nan) << std::hex << bits;
    EXPECT_EQ(from_float<T>(float_of(bits | 0x80000000u)).bits & (format.nan | kSign<T>),
              format.nan | kSign<T>);
    EXPECT_EQ(from_float_saturate<T>(float_of(bits)).bits & format.nan, format.nan);
  }
}

TYPED_TEST(Half, SaturationEndsAtTheLargestFiniteNumber) {
  using T = TypeParam;
  const Format format = Describe<T>::format;
  const float largest = static_cast<float>(value_of(format, format.largest_finite));
  for (float beyond : {largest, std::nextafter(largest, INFINITY), 3.4e38f, INFINITY}) {
    EXPECT_EQ(from_float_saturate<T>(beyond).bits, format.largest_finite) << beyond;
    EXPECT_EQ(from_float_saturate<T>(-beyond).bits, format.largest_finite | kSign<T>) << beyond;
  }
}

TEST(HalfTypes, KnownCodes) {
  EXPECT_EQ(f16(1.0f).bits, 0x3c00);
  EXPECT_EQ(f16(65519.99f).bits, 0x7bff);
  EXPECT_EQ(f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(f16(0x1p-24f).bits, 0x0001);
  EXPECT_EQ(f16(0x1p-25f).bits, 0x0000);
  EXPECT_EQ(bf16(3.14159265f).bits, 0x4049);
  EXPECT_EQ(f8e4m3(448.0f).bits, 0x7e);
  EXPECT_EQ(f8e4m3(1e9f).bits, 0x7e);  // torch 2.15 saturates
  EXPECT_EQ(f8e5m2(57344.0f).bits, 0x7b);
  EXPECT_EQ(f8e5m2(61440.0f).bits, 0x7c);
  EXPECT_EQ(float(f8e4m3::from_bits(0x01)), 0x1p-9f);
  EXPECT_EQ(float(f8e5m2::from_bits(0x01)), 0x1p-16f);
}

template <class T>
constexpr bool is_plain_storage = std::is_trivially_copyable_v<T>&&
    std::is_trivially_default_constructible_v<T>&& std::is_standard_layout_v<T>;
static_assert(is_plain_storage<bf16> && sizeof(bf16) == 2);
static_assert(is_plain_storage<f16> && sizeof(f16) == 2);
static_assert(is_plain_storage<f8e4m3> && sizeof(f8e4m3) == 1);
static_assert(is_plain_storage<f8e5m2> && sizeof(f8e5m2) == 1);

}  // namespace
}  // namespace tessera::test_half
