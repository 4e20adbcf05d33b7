// A vector's numbers as those that are calculated with, and back: load<C> and store<T> of each, but
// two numbers of 16 bits in a word take an instruction each way, where one by one they take two to
// three.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/half.h>

namespace tessera::kernels {

namespace detail {

template <class T>
TS_DEVICE uint32_t word_of(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  if constexpr (std::is_same_v<T, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
#else
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
#endif
}

}  // namespace detail

template <class C, class T, int N>
TS_DEVICE void unpack(const gpu::Vector<T, N>& vector, C (&values)[N]) {
  if constexpr (std::is_same_v<T, bf16> && std::is_same_v<C, float> && N % 2 == 0) {
    uint32_t words[N / 2];
    memcpy(words, &vector, sizeof(words));
    TS_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      values[2 * i] = tessera::detail::float_of(words[i] << 16);
      values[2 * i + 1] = tessera::detail::float_of(words[i] & 0xffff0000u);
    }
  } else {
    TS_UNROLL
    for (int i = 0; i < N; ++i) values[i] = load<C>(vector.values[i]);
  }
}

template <class T, class C, int N>
TS_DEVICE gpu::Vector<T, N> pack(const C (&values)[N]) {
  gpu::Vector<T, N> vector;
  if constexpr ((std::is_same_v<T, bf16> || std::is_same_v<T, f16>)&&std::is_same_v<C, float> &&
                N % 2 == 0) {
    uint32_t words[N / 2];
    TS_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      words[i] = detail::word_of<T>(values[2 * i], values[2 * i + 1]);
    }
    memcpy(&vector, words, sizeof(words));
  } else {
    TS_UNROLL
    for (int i = 0; i < N; ++i) vector.values[i] = store<T>(values[i]);
  }
  return vector;
}

}  // namespace tessera::kernels
