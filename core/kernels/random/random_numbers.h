// From random bits to numbers: the formulas that the loops of the CPU and the kernels of a GPU
// share. Internal.
#pragma once

#include <cstdint>

#include <tessera/core/dispatch.h>
#include <tessera/core/math.h>

namespace tessera::kernels {

// A number of [0, 1) that T holds exactly.
template <class T>
inline constexpr int kDigits = 24;
template <>
inline constexpr int kDigits<f16> = 11;
template <>
inline constexpr int kDigits<bf16> = 8;

template <class T>
TS_HD float unit(uint32_t bits) {
  constexpr int kShift = 32 - kDigits<T>;
  return static_cast<float>(static_cast<int32_t>(bits >> kShift)) *
         (1.0f / static_cast<float>(1 << kDigits<T>));
}

TS_HD double unit64(uint64_t bits) {
  return static_cast<double>(static_cast<int64_t>(bits >> 11)) * 0x1p-53;
}

template <class T>
TS_HD T uniform_between(Compute<T> u, Compute<T> low, Compute<T> high) {
  const T value = store<T>(low + u * (high - low));
  return load<Compute<T>>(value) < high ? value : store<T>(low);
}

// Two normal numbers from 64 bits. The angle is taken as quadrant and rest, so that no reduction by
// pi is needed: |rest| <= pi / 4.
TS_HD void box_muller(uint32_t radius_bits, uint32_t angle_bits, float& z0, float& z1) {
  const float u = ::fmaf(static_cast<float>(radius_bits), 0x1p-32f, 0x1p-33f);  // (0, 1]
  const float radius = ::sqrtf(-2.0f * math::detail::log_corrected(u, 0.0f, 0));
  const uint32_t quadrant = (angle_bits + 0x20000000u) >> 30;
  const float rest = static_cast<float>(static_cast<int32_t>(angle_bits - (quadrant << 30))) *
                     (0x1.921fb6p+0f * 0x1p-30f);
  z0 = radius * math::detail::sin_of_reduced(rest, quadrant + 1);
  z1 = radius * math::detail::sin_of_reduced(rest, quadrant);
}

// Bits below this drop an element.
TS_HD uint32_t dropout_threshold(double p) {
  const double threshold = p * 0x1p32 + 0.5;
  return threshold >= 0x1p32 ? 0xffffffffu : static_cast<uint32_t>(static_cast<int64_t>(threshold));
}

}  // namespace tessera::kernels
