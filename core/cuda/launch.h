// What a kernel file needs: launches, shared memory, vectors and reductions over warps and blocks.
// The same file compiles with nvcc and, against core/cuda/emulation, as C++.
//
//     template <class T>
//     __global__ void scale(T* x, int64_t n, T factor) {
//       const int64_t i = gpu::first_index();
//       if (i < n) x[i] *= factor;
//     }
//     gpu::launch({.name = "scale", .grid = gpu::blocks(n, 256), .block = 256},
//                 scale<float>, x, n, f);
//
// Threads of a launch share nothing but what shared arrays and memory hold; float sums have a fixed
// order. Atomic operations on floats are not used.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/cuda/traffic.h>

namespace tessera::gpu {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

struct LaunchConfig {
  const char* name;  // of the op, for errors and profiles
  dim3 grid = 1;
  dim3 block = 1;
  size_t shared_bytes = 0;  // of dynamic_shared; up to 227 KiB
  Traffic traffic = {};
  cudaStream_t stream = current_stream();
};

// Blocks of `size` threads that cover n, each thread `each` elements.
inline unsigned blocks(int64_t n, int64_t size, int64_t each = 1) {
  return static_cast<unsigned>((n + size * each - 1) / (size * each));
}

// Lets blocks of the kernel have that much of dynamic_shared on the current device.
void allow_shared_bytes(const void* kernel, size_t bytes);

// A block gets 48 KiB without asking. Arrays of fixed size count too, of which no kernel has 16.
inline constexpr size_t kSharedWithoutAsking = size_t{32} << 10;

#if defined(__CUDACC__)

template <class... Parameters, class... Arguments>
void launch(const LaunchConfig& config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  if (config.shared_bytes > kSharedWithoutAsking) {
    allow_shared_bytes(reinterpret_cast<const void*>(kernel), config.shared_bytes);
  }
  kernel<<<config.grid, config.block, config.shared_bytes, config.stream>>>(
      static_cast<Parameters>(arguments)...);
  finish_launch(cudaGetLastError(), config.name, config.stream);
}

template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char tessera_dynamic_shared[];
  return reinterpret_cast<T*>(tessera_dynamic_shared);
}

// An array in shared memory: TS_SHARED(float, sums, 32);
#define TS_SHARED(T, name, count) __shared__ T name[count]

#define TS_CHECK_ALIGNMENT(pointer, bytes) ((void)0)

// Before a loop over an array that must stay in registers.
#define TS_UNROLL _Pragma("unroll")
// Before a loop of few turns and a large body.
#define TS_ROLLED _Pragma("unroll 1")

#else

template <class... Parameters, class... Arguments>
void launch(const LaunchConfig& config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  const auto* const function = reinterpret_cast<const void*>(kernel);
  if (config.shared_bytes > kSharedWithoutAsking) {
    allow_shared_bytes(function, config.shared_bytes);
  }
  const cudaError_t error = emulation::enqueue_launch(
      function, config.name, config.grid, config.block, config.shared_bytes, config.stream,
      [kernel, ... values = static_cast<Parameters>(arguments)] { kernel(values...); },
      config.traffic);
  finish_launch(error, config.name, config.stream);
}

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(emulation::dynamic_shared(alignof(T)));
}

#define TS_SHARED(T, name, count)    \
  static const char name##_site = 0; \
  T* const name = static_cast<T*>(   \
      ::tessera::gpu::emulation::static_shared(&name##_site, sizeof(T) * (count), alignof(T)))

#define TS_CHECK_ALIGNMENT(pointer, bytes) \
  ::tessera::gpu::emulation::check_alignment(pointer, bytes)

#define TS_UNROLL
#define TS_ROLLED

#endif

#define TS_DEVICE __device__ __forceinline__

// ---- Indices ------------------------------------------------------------------------------------

TS_DEVICE int64_t first_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
TS_DEVICE int64_t grid_stride() { return int64_t{gridDim.x} * blockDim.x; }

// ---- Vectors: up to 16 bytes a load -------------------------------------------------------------

template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
  T values[N];
};

#if defined(__CUDACC__)
// What one instruction moves.
template <size_t kBytes>
struct Words {
  using Type = uint4;  // one or several
};
template <>
struct Words<8> {
  using Type = uint2;
};
template <>
struct Words<4> {
  using Type = uint32_t;
};
template <>
struct Words<2> {
  using Type = uint16_t;
};
template <>
struct Words<1> {
  using Type = uint8_t;
};

// By name, because the compiler takes stores of four f32 apart where it sees pairs among them.
TS_DEVICE void store_word(uint4* target, const uint4& x) {
  asm("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(x.x),
      "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
}
template <class Word>
TS_DEVICE void store_word(Word* target, const Word& x) {
  *target = x;
}
TS_DEVICE void store_shared_word(uint4* target, const uint4& x) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
      "r"(x.w)
      : "memory");
}
template <class Word>
TS_DEVICE void store_shared_word(Word* target, const Word& x) {
  *target = x;
}
#endif

template <int N, class T>
TS_DEVICE Vector<T, N> load_vector(const T* source) {
  TS_CHECK_ALIGNMENT(source, alignof(Vector<T, N>));
#if defined(__CUDACC__)
  return *reinterpret_cast<const Vector<T, N>*>(source);
#else
  Vector<T, N> vector;
  for (int i = 0; i < N; ++i) vector.values[i] = source[i];
  return vector;
#endif
}
// To global memory.
template <int N, class T>
TS_DEVICE void store_vector(T* target, const Vector<T, N>& vector) {
  TS_CHECK_ALIGNMENT(target, alignof(Vector<T, N>));
#if defined(__CUDACC__)
  using Word = typename Words<sizeof(vector)>::Type;
  Word words[sizeof(vector) / sizeof(Word)];
  memcpy(words, &vector, sizeof(vector));
  TS_UNROLL
  for (size_t i = 0; i < sizeof(vector) / sizeof(Word); ++i) {
    store_word(reinterpret_cast<Word*>(target) + i, words[i]);
  }
#else
  emulation::check_space(target, false);
  for (int i = 0; i < N; ++i) target[i] = vector.values[i];
#endif
}
// To shared memory.
template <int N, class T>
TS_DEVICE void store_shared_vector(T* target, const Vector<T, N>& vector) {
  TS_CHECK_ALIGNMENT(target, alignof(Vector<T, N>));
#if defined(__CUDACC__)
  if constexpr (sizeof(T) < 4) {  // stays together, and by name would cost a register
    *reinterpret_cast<Vector<T, N>*>(target) = vector;
  } else {
    using Word = typename Words<sizeof(vector)>::Type;
    Word words[sizeof(vector) / sizeof(Word)];
    memcpy(words, &vector, sizeof(vector));
    TS_UNROLL
    for (size_t i = 0; i < sizeof(vector) / sizeof(Word); ++i) {
      store_shared_word(reinterpret_cast<Word*>(target) + i, words[i]);
    }
  }
#else
  emulation::check_space(target, true);
  for (int i = 0; i < N; ++i) target[i] = vector.values[i];
#endif
}

// ---- Reductions in a fixed order ----------------------------------------------------------------

// Every lane gets op over the warp, as a butterfly.
template <class V, class Op>
TS_DEVICE V warp_reduce(V value, const Op& op) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value = op(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  return value;
}

// Every thread of a one-dimensional block gets op over the block; its size is a multiple of 32.
// `slot`: shared memory for 32 values, free for other use after the next barrier.
template <class V, class Op>
TS_DEVICE V block_reduce(V value, const Op& op, V neutral, V* slot) {
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  value = warp_reduce(value, op);
  if (lane == 0) slot[warp] = value;
  __syncthreads();
  value = lane < blockDim.x / kWarp ? slot[lane] : neutral;
  value = warp_reduce(value, op);
  __syncthreads();  // the next reduction may use the slot
  return value;
}

struct Plus {
  template <class V>
  TS_DEVICE V operator()(V a, V b) const {
    return a + b;
  }
};
struct Larger {  // NaN wins
  template <class V>
  TS_DEVICE V operator()(V a, V b) const {
    return a != a || a > b ? a : b;
  }
};

}  // namespace tessera::gpu
