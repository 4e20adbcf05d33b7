// From numbers to keys: what the sorts of the CPU and of a GPU compare. Internal.
#pragma once

#include <cstdint>
#include <type_traits>

#include <tessera/core/dispatch.h>

namespace tessera::kernels {

template <class T>
using Key =
    std::conditional_t<sizeof(T) == 8, uint64_t,
                       std::conditional_t<sizeof(T) == 4, uint32_t,
                                          std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>>;

// Unsigned numbers in the order of the values: floats have the sign bit or all bits flipped, NaN is
// the largest, -0 equals 0.
template <class T>
TS_HD Key<T> key_of(T value) {
  using K = Key<T>;
  constexpr K kSign = static_cast<K>(K{1} << (8 * sizeof(K) - 1));
  if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, uint8_t>) {
    return static_cast<K>(value);
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<K>(static_cast<K>(value) ^ kSign);
  } else {
    const Compute<T> number = load<Compute<T>>(value);
    if (number != number) return static_cast<K>(~K{0});
    K bits = __builtin_bit_cast(K, value);
    if (number == 0) bits = 0;
    return static_cast<K>(bits & kSign ? ~bits : bits | kSign);
  }
}

}  // namespace tessera::kernels
