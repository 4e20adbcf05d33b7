// The arithmetic of quantization (quantize.h), the same on both devices.
#pragma once

#include <cstdint>
#include <type_traits>

#include <tessera/core/half.h>
#include <tessera/core/macros.h>

namespace tessera::kernels::rules {

TS_HD uint32_t magnitude_bits(float value) { return tessera::detail::bits_of(value) & 0x7fffffffu; }
inline constexpr uint32_t kInfinityBits = 0x7f800000u;

// What is rounded to Q: an element times the scale of its tile. Formats of one byte have NaN in
// place of an infinity, which would end as a number like any other: so what a product makes of it
// is not finite and a step is left out, as where torchao's scale is 448 / infinity.
template <class Q>
TS_HD float scaled(float value, float scale) {
  if constexpr (sizeof(Q) == 1) {
    const float nan = tessera::detail::float_of(0x7fc00000u);
    return value * (magnitude_bits(value) == kInfinityBits ? nan : scale);
  }
  return value * scale;
}

// The first magnitude that is further from the largest number than rounding goes.
template <class Q>
inline constexpr float kSaturatesFrom = 0;
template <>
inline constexpr float kSaturatesFrom<f8e4m3> =
    464;  // itself a tie that goes to 448, which is even
template <>
inline constexpr float kSaturatesFrom<f8e5m2> = 61440;  // a tie that would go to 65536
template <class Q>
TS_HD uint32_t saturates(float scaled) {
  const uint32_t a = magnitude_bits(scaled), limit = magnitude_bits(kSaturatesFrom<Q>);
  const bool beyond = std::is_same_v<Q, f8e4m3> ? a > limit : a >= limit;
  return beyond & (a <= kInfinityBits) ? 1u : 0u;
}

// See fp8_scale() in quantize.h. `largest`: number of the format, divided by 2^margin.
TS_HD float scale_of(float amax, double largest, bool power_of_two) {
  if (!(amax > 0) || magnitude_bits(amax) >= kInfinityBits) return 1;
  constexpr double kSmallest = 0x1p-126, kLargest = 0x1.fffffep127;
  double wide = largest / static_cast<double>(amax);
  wide = wide < kSmallest ? kSmallest : wide > kLargest ? kLargest : wide;
  const auto scale = static_cast<float>(wide);
  // Down to a power of two: without the mantissa.
  return power_of_two ? tessera::detail::float_of(tessera::detail::bits_of(scale) & 0xff800000u)
                      : scale;
}
template <class Q>
inline constexpr double kLargestOf = std::is_same_v<Q, f8e4m3> ? 448 : 57344;

}  // namespace tessera::kernels::rules
