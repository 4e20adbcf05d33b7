// Storage types narrower than float: bf16, f16 (IEEE binary16) and the two OCP fp8 formats.
//
// They only store: arithmetic happens in float. Conversions are integer code without branches, so
// that loops over them vectorize and host and device give the same bits, whatever the hardware and
// its denormal mode. The rules:
//
//   to_float(x)          exact. Signaling NaNs become quiet, except for bf16, which is a shift.
//   from_float<T>(f)     round to nearest, ties to even; subnormals are kept; the sign is kept, on
//                        zero and NaN too. Beyond the largest finite number: infinity for bf16,
//                        f16 and f8e5m2; f8e4m3 has no infinity and saturates to 448, as torch's
//                        `.to(torch.float8_e4m3fn)` does since 2.15 (infinities too).
//                        NaN stays NaN: bf16 and f16 keep the top of the payload (the bits of
//                        F16C and AVX512-BF16), fp8 has the one pattern s.1111.111 or
//                        s.11111.11. On a GPU, whose own instruction rounds to bf16 and f16 (the
//                        integer code would be sixteen of them), a NaN is 0x7fff.
//   from_float_saturate<T>(f)  the same with every overflow and infinity at the largest finite
//                        number (OCP's saturation mode); NaN stays NaN, in fp8 0x7f as by a
//                        GPU's own conversion.
#pragma once

#include <cstdint>

#include <tessera/core/macros.h>

namespace tessera {

struct bf16 {
  uint16_t bits;
  bf16() = default;
  TS_HD explicit bf16(float value);
  TS_HD explicit operator float() const;
  static constexpr TS_HD bf16 from_bits(uint16_t bits) { return bf16(bits, 0); }

 private:
  constexpr TS_HD bf16(uint16_t raw, int) : bits(raw) {}
};

struct f16 {
  uint16_t bits;
  f16() = default;
  TS_HD explicit f16(float value);
  TS_HD explicit operator float() const;
  static constexpr TS_HD f16 from_bits(uint16_t bits) { return f16(bits, 0); }

 private:
  constexpr TS_HD f16(uint16_t raw, int) : bits(raw) {}
};

struct f8e4m3 {
  uint8_t bits;
  f8e4m3() = default;
  TS_HD explicit f8e4m3(float value);
  TS_HD explicit operator float() const;
  static constexpr TS_HD f8e4m3 from_bits(uint8_t bits) { return f8e4m3(bits, 0); }

 private:
  constexpr TS_HD f8e4m3(uint8_t raw, int) : bits(raw) {}
};

struct f8e5m2 {
  uint8_t bits;
  f8e5m2() = default;
  TS_HD explicit f8e5m2(float value);
  TS_HD explicit operator float() const;
  static constexpr TS_HD f8e5m2 from_bits(uint8_t bits) { return f8e5m2(bits, 0); }

 private:
  constexpr TS_HD f8e5m2(uint8_t raw, int) : bits(raw) {}
};

namespace detail {

TS_HD uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
TS_HD float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// A binary format with fewer exponent and mantissa bits than float; `magnitude` is its number
// without the sign bit.
template <int kExponentBits, int kMantissaBits>
struct SmallFloat {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - kBias) << 23;  // as a float
  // The float whose last mantissa bit weighs as much as the format's smallest subnormal.
  static constexpr uint32_t kSubnormalMagic =
      static_cast<uint32_t>(127 + 1 - kBias - kMantissaBits + 23) << 23;

  // Rounds |f|, whose bits are `a`, to nearest even; the exponent runs on past the format's
  // largest, so that the caller decides about overflow with one `min`. NaN is the caller's as well.
  static TS_HD uint32_t encode(uint32_t a) {
    const uint32_t half_minus_one = (1u << (kShift - 1)) - 1;
    const uint32_t normal = (a + half_minus_one + ((a >> kShift) & 1) - kRebias) >> kShift;
    // The float addition rounds at the right bit; in any denormal mode, as its result is normal.
    const uint32_t subnormal = bits_of(float_of(a) + float_of(kSubnormalMagic)) - kSubnormalMagic;
    return a < kMinNormal ? subnormal : normal;
  }

  // The float bits of a finite magnitude.
  static TS_HD uint32_t decode(uint32_t magnitude) {
    const uint32_t widened = magnitude << kShift;
    const uint32_t subnormal = bits_of(float_of(widened + kMinNormal) - float_of(kMinNormal));
    return widened < (1u << 23) ? subnormal : widened + kRebias;
  }
};

TS_HD bool is_nan_magnitude(uint32_t a) { return a > 0x7f800000u; }
TS_HD uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

template <uint32_t kLargest>  // the magnitude at which overflow ends: infinity or the largest
                              // finite
TS_HD uint16_t encode_f16(float value) {
  const uint32_t bits = bits_of(value), a = bits & 0x7fffffffu;
  const uint32_t finite = smaller(SmallFloat<5, 10>::encode(a), kLargest);
  const uint32_t nan = 0x7e00u | ((a >> 13) & 0x3ffu);
  return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | (is_nan_magnitude(a) ? nan : finite));
}

template <uint32_t kLargest>
TS_HD uint16_t encode_bf16(float value) {
  const uint32_t bits = bits_of(value), a = bits & 0x7fffffffu;
  const uint32_t finite = smaller((a + 0x7fffu + ((a >> 16) & 1)) >> 16, kLargest);
  const uint32_t nan = (a >> 16) | 0x40u;
  return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | (is_nan_magnitude(a) ? nan : finite));
}

template <int kExponentBits, int kMantissaBits, uint32_t kLargest>
TS_HD uint8_t encode_f8(float value) {
  const uint32_t bits = bits_of(value), a = bits & 0x7fffffffu;
  const uint32_t finite = smaller(SmallFloat<kExponentBits, kMantissaBits>::encode(a), kLargest);
  return static_cast<uint8_t>(((bits >> 24) & 0x80u) | (is_nan_magnitude(a) ? 0x7fu : finite));
}

// As a GPU's own conversion, whose NaN has no sign.
template <int kExponentBits, int kMantissaBits, uint32_t kLargest>
TS_HD uint8_t encode_f8_saturate(float value) {
  const uint8_t code = encode_f8<kExponentBits, kMantissaBits, kLargest>(value);
  return is_nan_magnitude(bits_of(value) & 0x7fffffffu) ? uint8_t{0x7f} : code;
}

}  // namespace detail

TS_HD float to_float(bf16 x) { return detail::float_of(static_cast<uint32_t>(x.bits) << 16); }

TS_HD float to_float(f16 x) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#else
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t special = 0x7f800000u | (magnitude << 13) | (magnitude > 0x7c00u ? 0x400000u : 0u);
  const uint32_t finite = detail::SmallFloat<5, 10>::decode(magnitude);
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  return detail::float_of(sign | (magnitude >= 0x7c00u ? special : finite));
#endif
}

TS_HD float to_float(f8e4m3 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  const uint32_t finite = detail::SmallFloat<4, 3>::decode(magnitude);
  const uint32_t sign = (x.bits & 0x80u) << 24;
  return detail::float_of(sign | (magnitude == 0x7fu ? 0x7fc00000u : finite));
}

TS_HD float to_float(f8e5m2 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  const uint32_t special = magnitude > 0x7cu ? 0x7fc00000u : 0x7f800000u;
  const uint32_t finite = detail::SmallFloat<5, 2>::decode(magnitude);
  const uint32_t sign = (x.bits & 0x80u) << 24;
  return detail::float_of(sign | (magnitude >= 0x7cu ? special : finite));
}

template <class T>
TS_HD T from_float(float value);
template <>
TS_HD bf16 from_float<bf16>(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bf16::from_bits(bits);
#else
  return bf16::from_bits(detail::encode_bf16<0x7f80>(value));
#endif
}
template <>
TS_HD f16 from_float<f16>(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return f16::from_bits(bits);
#else
  return f16::from_bits(detail::encode_f16<0x7c00>(value));
#endif
}
template <>
TS_HD f8e4m3 from_float<f8e4m3>(float value) {
  return f8e4m3::from_bits(detail::encode_f8<4, 3, 0x7e>(value));
}
template <>
TS_HD f8e5m2 from_float<f8e5m2>(float value) {
  return f8e5m2::from_bits(detail::encode_f8<5, 2, 0x7c>(value));
}

template <class T>
TS_HD T from_float_saturate(float value);
template <>
TS_HD bf16 from_float_saturate<bf16>(float value) {
  return bf16::from_bits(detail::encode_bf16<0x7f7f>(value));
}
template <>
TS_HD f16 from_float_saturate<f16>(float value) {
  return f16::from_bits(detail::encode_f16<0x7bff>(value));
}
template <>
TS_HD f8e4m3 from_float_saturate<f8e4m3>(float value) {
  return f8e4m3::from_bits(detail::encode_f8_saturate<4, 3, 0x7e>(value));
}
template <>
TS_HD f8e5m2 from_float_saturate<f8e5m2>(float value) {
  return f8e5m2::from_bits(detail::encode_f8_saturate<5, 2, 0x7b>(value));
}

TS_HD bf16::bf16(float value) : bits(from_float<bf16>(value).bits) {}
TS_HD f16::f16(float value) : bits(from_float<f16>(value).bits) {}
TS_HD f8e4m3::f8e4m3(float value) : bits(from_float<f8e4m3>(value).bits) {}
TS_HD f8e5m2::f8e5m2(float value) : bits(from_float<f8e5m2>(value).bits) {}
TS_HD bf16::operator float() const { return to_float(*this); }
TS_HD f16::operator float() const { return to_float(*this); }
TS_HD f8e4m3::operator float() const { return to_float(*this); }
TS_HD f8e5m2::operator float() const { return to_float(*this); }

}  // namespace tessera
