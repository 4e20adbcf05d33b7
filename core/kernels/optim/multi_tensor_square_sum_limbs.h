// Exact sums of f64 numbers in limbs of 32 bits, on both devices. See [Note: exact sums of squares]
// in multi_tensor_square_sum.h.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <tessera/core/half.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum.h>
#include <tessera/core/macros.h>

namespace tessera::kernels::square_sum {

inline constexpr int kLimbBits = 32;
inline constexpr int64_t kLimbMask = 0xffffffff;
inline constexpr int kLowestBit = -1074;  // of f64: limb 0 counts in units of 2^kLowestBit

// ---- Limbs --------------------------------------------------------------------------------------

// add(index, value) for what value * 2^unit, kLowestBit <= unit <= 971, is in three limbs. A limb
// changes by less than 2^32.
template <class Add>
TS_HD void each_limb_of(int64_t value, int unit, Add&& add) {
  const int position = unit - kLowestBit;
  const int limb = position / kLimbBits, shift = position % kLimbBits;
  const uint64_t low = static_cast<uint64_t>(value & kLimbMask) << shift;
  const int64_t rest =
      static_cast<int64_t>(low >> kLimbBits) + (value >> kLimbBits) * (int64_t{1} << shift);
  add(limb, static_cast<int64_t>(low) & kLimbMask);
  add(limb + 1, rest & kLimbMask);
  add(limb + 2, rest >> kLimbBits);
}
// For one number that is not negative; counted where it is not finite.
template <class Add>
TS_HD void each_limb_of(double number, Add&& add) {
  const auto bits = std::bit_cast<uint64_t>(number);
  const int exponent = static_cast<int>(bits >> 52);
  const auto fraction = static_cast<int64_t>(bits & ((uint64_t{1} << 52) - 1));
  if (number != number) {
    add(int{kSquareSumNaNs}, int64_t{1});
  } else if (exponent == 2047) {
    add(int{kSquareSumInfinities}, int64_t{1});
  } else if (exponent == 0) {
    each_limb_of(fraction, kLowestBit, add);
  } else {
    each_limb_of(fraction | (int64_t{1} << 52), exponent - 1 + kLowestBit, add);
  }
}
TS_HD void add_integer(int64_t* sum, int64_t value, int unit) {
  each_limb_of(value, unit, [&](int i, int64_t x) { sum[i] += x; });
}
TS_HD void add_number(int64_t* sum, double number) {
  each_limb_of(number, [&](int i, int64_t x) { sum[i] += x; });
}

// Limbs in [0, 2^32), but for the last: states are then equal where sums are.
TS_HD void carry(int64_t* sum) {
  int64_t carried = 0;
  for (int i = 0; i + 1 < kSquareSumLimbs; ++i) {
    const int64_t limb = sum[i] + carried;
    carried = limb >> kLimbBits;
    sum[i] = limb & kLimbMask;
  }
  sum[kSquareSumLimbs - 1] += carried;
}

// The f64 nearest to the sum, ties to even. The limbs have been carried.
TS_HD double nearest(const int64_t* sum) {
  if (sum[kSquareSumNaNs] != 0) return static_cast<double>(NAN);
  // 2^1024 is bit 18 of the last limb.
  if (sum[kSquareSumInfinities] != 0 || sum[kSquareSumLimbs - 1] >= int64_t{1} << 18) {
    return static_cast<double>(INFINITY);
  }
  int top = kSquareSumLimbs - 1;
  while (top > 0 && sum[top] == 0) --top;
  const auto limb = [&](int i) { return i < 0 ? uint64_t{0} : static_cast<uint64_t>(sum[i]); };
  if (limb(top) == 0) return 0;
  // The leading 64 bits; the last of them also says whether any below is set, which is all that
  // rounding to 53 asks of them. A sum of subnormals has fewer than 53 and is not rounded at all.
  int shift = 0;
  while ((limb(top) << shift & 0x80000000u) == 0) ++shift;
  uint64_t bits = limb(top) << kLimbBits | limb(top - 1);
  const uint64_t next = limb(top - 2) << shift;
  bits = bits << shift | next >> kLimbBits;
  bool below = (next & kLimbMask) != 0;
  for (int i = 0; i < top - 2; ++i) below |= sum[i] != 0;
  if (below) bits |= 1;
  return ::ldexp(static_cast<double>(bits), (top - 1) * kLimbBits + kLowestBit - shift);
}

// ---- Grids --------------------------------------------------------------------------------------

// A block's squares are summed in f64 registers of up to kMaxLevels levels. All squares are at most
// 2^base and a register receives at most 2^log_adds of them. Its first level counts in units of
// 2^unit_of(base, log_adds, 0), a number that the sum stays below 2^52 of; what a square has below
// that unit is at most half of it, and is what the next level receives, in a finer unit.
inline constexpr int kMaxLevels = 3;
TS_HD constexpr int unit_of(int base, int log_adds, int level) {
  return base + (level + 1) * (log_adds - 52);
}
// What a register of that level begins with: sums leave its exponent as it is, so that the bits
// count units. Those below the first also sink.
TS_HD double anchor_of(int unit, int level) {
  return std::bit_cast<double>((static_cast<uint64_t>(unit + 52 + 1023) << 52) |
                               (level > 0 ? uint64_t{1} << 51 : 0));
}
// Units that a register of that level has counted.
TS_HD int64_t units_in(double sum, double anchor) {
  return std::bit_cast<int64_t>(sum) - std::bit_cast<int64_t>(anchor);
}

// How the bits of |x| of a type tell of x * x.
template <class T>
struct Magnitude;
template <class Bits_, int kFractionBits_, int kBias_, uint64_t kOutlier_,
          int kPrecision = kFractionBits_>
struct MagnitudeOf {
  using Bits = Bits_;
  static constexpr int kFractionBits = kFractionBits_;
  static constexpr int kBias = kBias_;
  // From here on elements go one by one: those that are not finite, and f64 whose squares are too
  // large for the first level.
  static constexpr uint64_t kOutlier = kOutlier_;
  static constexpr bool kIsDouble = kFractionBits == 52;

  // 2^exponent <= |x| < 2^(exponent + 1), but for subnormal numbers.
  TS_HD static constexpr int exponent(uint64_t bits) {
    const int field = static_cast<int>(bits >> kFractionBits);
    return (field == 0 ? 1 : field) - kBias;
  }
  // 2^base is the least power of 4 that is known to be no less than the square. Anchors of f64 must
  // not be subnormal.
  TS_HD static constexpr int base(uint64_t largest, int log_adds) {
    const int base = 2 * exponent(largest) + 2;
    const int least = kLowestBit + kMaxLevels * (52 - log_adds);
    return kIsDouble && base < least ? least : base;
  }
  // The least whose square is not known to be at most 2^base; one that is not finite at least.
  TS_HD static constexpr uint64_t least_beyond(int base) {
    const int field = base / 2 + kBias;  // bases are even
    const auto beyond = static_cast<uint64_t>(field < 0 ? 0 : field) << kFractionBits;
    return beyond < kOutlier ? beyond : kOutlier;
  }
  // Squares of numbers of kPrecision fraction bits from there on are multiples of 2^unit: those of
  // narrow types are exact in f64, those of f64 are rounded to 53 bits and multiples of
  // 2^kLowestBit.
  TS_HD static constexpr uint64_t least_above(int unit) {
    if (kIsDouble && unit <= kLowestBit) return 0;
    // Division toward +infinity. An exponent field of 0 counts as 1.
    const int exponent =
        kIsDouble ? (unit + 52 + 4097) / 2 - 2048 : (unit + 4097) / 2 - 2048 + kPrecision;
    return exponent + kBias <= 1 ? 0 : static_cast<uint64_t>(exponent + kBias) << kFractionBits;
  }
};
template <>
struct Magnitude<double> : MagnitudeOf<uint64_t, 52, 1023, uint64_t{507 + 1023} << 52> {};
template <>
struct Magnitude<float> : MagnitudeOf<uint32_t, 23, 127, uint64_t{255} << 23> {};
template <>
struct Magnitude<bf16> : MagnitudeOf<uint16_t, 7, 127, uint64_t{255} << 7> {};
template <>
struct Magnitude<f16> : MagnitudeOf<uint16_t, 10, 15, uint64_t{31} << 10> {};
// For a T that has been widened to float.
template <class T>
struct Widened : Magnitude<T> {};
template <>
struct Widened<bf16> : MagnitudeOf<uint32_t, 23, 127, uint64_t{255} << 23, 7> {};
template <>
struct Widened<f16> : MagnitudeOf<uint32_t, 23, 127, uint64_t{255} << 23, 10> {};

}  // namespace tessera::kernels::square_sum
