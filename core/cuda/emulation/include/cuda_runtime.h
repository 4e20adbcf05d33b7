// The part of CUDA's runtime and device language that tessera uses, on the CPU. It stands first on
// the include path of the emulated build, so that the same sources compile for both. Names and
// meanings are CUDA's; what is added is in namespace tessera::gpu::emulation.
//
// Streams run nothing until somebody waits for them, and then in an order drawn from the seed: a
// kernel that needs another stream's result without waiting for its event meets old bytes.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include <tessera/core/cuda/emulation/race.h>
#include <tessera/core/cuda/emulation/simt.h>
#include <tessera/core/cuda/traffic.h>

#define CUDART_VERSION 13000
#define __global__
#define __device__
#define __host__
// Not by force: the kernels of all functors share their loads and stores, which a GPU has in each.
#define __forceinline__ inline
#define __launch_bounds__(...)

// ---- Runtime ------------------------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorPeerAccessAlreadyEnabled = 704,
  cudaErrorLaunchFailure = 719,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault,
};
enum cudaMemoryType {
  cudaMemoryTypeUnregistered,
  cudaMemoryTypeHost,
  cudaMemoryTypeDevice,
};
struct cudaPointerAttributes {
  cudaMemoryType type;
};
struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem;
  int major, minor, multiProcessorCount;
};
using cudaStream_t = struct EmulatedStream*;
using cudaEvent_t = struct EmulatedEvent*;
inline constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDefault = 0,
                          cudaEventDisableTiming = 2, cudaHostAllocDefault = 0;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
cudaError_t cudaMalloc(void** pointer, size_t bytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaMallocHost(void** pointer, size_t bytes);
cudaError_t cudaFreeHost(void* pointer);
// Pinned host memory is read or written when the stream runs; pageable memory then or before the
// call returns, as the seed has it, since CUDA promises neither.
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer);
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* data);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
// For the current device. The last value counts.
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value);

namespace tessera::gpu::emulation {

// Queues a kernel. Returns cudaErrorInvalidConfiguration where the shape exceeds the limits.
// Blocks have 48 KiB of shared memory, arrays of fixed size included, and 227 KiB where
// cudaFuncSetAttribute let the function have that much. `function` may be null: one that asked for
// nothing.
cudaError_t enqueue_launch(const void* function, const char* name, dim3 grid, dim3 block,
                           size_t shared_bytes, cudaStream_t stream, std::function<void()> kernel,
                           const Traffic& declared = {});

// Queues work that takes part in what other threads' streams do, as a collective's. When the stream
// has come to it, `ready` is asked until it says so; whoever waits for the stream lets other
// threads queue theirs meanwhile. Both run on any thread, and must not call the runtime.
void enqueue_when(cudaStream_t stream, std::function<bool()> ready, std::function<void()> work);

}  // namespace tessera::gpu::emulation

// ---- Device language ----------------------------------------------------------------------------

#define threadIdx (::tessera::gpu::emulation::current_thread->index)
#define blockIdx (::tessera::gpu::emulation::current_grid.block_index)
#define blockDim (::tessera::gpu::emulation::current_grid.block_size)
#define gridDim (::tessera::gpu::emulation::current_grid.grid_size)

inline void __syncthreads() { ::tessera::gpu::emulation::sync_threads(); }
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace tessera::gpu::emulation {

template <class T>
struct Exchange {
  T value;
  int source;  // a lane
  T result;
};

template <class T>
T exchange(unsigned mask, T value, int source, const char* name) {
  static_assert(std::is_trivially_copyable_v<T>);
  Exchange<T> own{value, source, value};
  warp_collective(mask, name, &own, [](void* const* payloads, unsigned lanes) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if ((lanes >> lane & 1) == 0) continue;
      Exchange<T>& mine = *static_cast<Exchange<T>*>(payloads[lane]);
      // A lane outside of the mask gives an undefined value on a GPU; here the complement.
      if ((lanes >> mine.source & 1) != 0) {
        mine.result = static_cast<Exchange<T>*>(payloads[mine.source])->value;
      } else {
        unsigned char* bytes = reinterpret_cast<unsigned char*>(&mine.result);
        for (size_t i = 0; i < sizeof(T); ++i) bytes[i] = static_cast<unsigned char>(~bytes[i]);
      }
    }
  });
  return own.result;
}

struct Vote {
  bool predicate;
  unsigned result;
};
inline unsigned vote(unsigned mask, bool predicate, const char* name) {
  Vote own{predicate, 0};
  warp_collective(mask, name, &own, [](void* const* payloads, unsigned lanes) {
    unsigned ballot = 0;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if ((lanes >> lane & 1) == 0) continue;
      ballot |= static_cast<unsigned>(static_cast<Vote*>(payloads[lane])->predicate) << lane;
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if ((lanes >> lane & 1) != 0) static_cast<Vote*>(payloads[lane])->result = ballot;
    }
  });
  return own.result;
}

inline int this_lane() { return current_thread->lane; }
// The lane within the own segment of `width`, or the own one where it would leave it.
inline int inside(int lane, int width) {
  const int first = this_lane() / width * width;
  return lane >= first && lane < first + width ? lane : this_lane();
}

}  // namespace tessera::gpu::emulation

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  ::tessera::gpu::emulation::vote(mask, false, "__syncwarp");
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  namespace e = ::tessera::gpu::emulation;
  const int source = e::this_lane() / width * width + (lane & (width - 1));
  return e::exchange(mask, value, source, "__shfl_sync");
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  namespace e = ::tessera::gpu::emulation;
  return e::exchange(mask, value, e::inside(e::this_lane() ^ lanes, width), "__shfl_xor_sync");
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  namespace e = ::tessera::gpu::emulation;
  return e::exchange(mask, value, e::inside(e::this_lane() - static_cast<int>(delta), width),
                     "__shfl_up_sync");
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  namespace e = ::tessera::gpu::emulation;
  return e::exchange(mask, value, e::inside(e::this_lane() + static_cast<int>(delta), width),
                     "__shfl_down_sync");
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return ::tessera::gpu::emulation::vote(mask, predicate != 0, "__ballot_sync");
}
inline int __any_sync(unsigned mask, int predicate) {
  return ::tessera::gpu::emulation::vote(mask, predicate != 0, "__any_sync") != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return ::tessera::gpu::emulation::vote(mask, predicate != 0, "__all_sync") == mask;
}
inline unsigned __activemask() {
  ::tessera::gpu::emulation::fail("__activemask has no defined value; pass the mask along");
}

// Atomic operations; instrumented code tells the race tracker about them.
template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  if constexpr (std::is_integral_v<T>) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
  } else {
    using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    Bits* const bits = reinterpret_cast<Bits*>(address);
    Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(
        bits, &before, __builtin_bit_cast(Bits, __builtin_bit_cast(T, before) + value), false,
        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return __builtin_bit_cast(T, before);
  }
}
template <class T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
template <class T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  T before = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (before < value && !__atomic_compare_exchange_n(address, &before, value, false,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}
template <class T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  T before = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (value < before && !__atomic_compare_exchange_n(address, &before, value, false,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}

inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((uint64_t{a} * b) >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
