#include "kernels.h"

#include <cmath>

#include <tessera/core/cuda/launch.h>

namespace tessera::bench {
namespace {

constexpr unsigned kBlock = 256;
constexpr int kTurnsTogether = 16;  // so that the loop's own instructions are few

__global__ void nothing() {}

template <bool kExponentials>
__global__ void chains(float* out, int turns, float factor) {
  const int64_t place = gpu::first_index();
  float x[kChains];
  TS_UNROLL
  for (int c = 0; c < kChains; ++c) x[c] = 0.001f * static_cast<float>(c + 1);
  for (int turn = 0; turn < turns; turn += kTurnsTogether) {
    TS_UNROLL
    for (int i = 0; i < kTurnsTogether; ++i) {
      TS_UNROLL
      for (int c = 0; c < kChains; ++c) {
        // by name: --fmad=false makes no such instruction of * and +
        x[c] = kExponentials ? expf(x[c] * factor) : fmaf(x[c], factor, 0.25f);
      }
    }
  }
  float sum = 0;
  TS_UNROLL
  for (int c = 0; c < kChains; ++c) sum += x[c];
  out[place] = sum;
}

}  // namespace

DeviceFacts device_facts() {
  int device = 0;
  TS_CUDA(cudaGetDevice(&device));
  cudaDeviceProp properties;
  TS_CUDA(cudaGetDeviceProperties(&properties, device));
  return {.multiprocessors = properties.multiProcessorCount,
          .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem)};
}

void launch_nothing() { gpu::launch({.name = "nothing", .block = 32, .traffic = {0, 0}}, nothing); }

void launch_chains(float* out, int64_t threads, int turns, bool exponentials) {
  gpu::launch({.name = exponentials ? "exp_chains" : "fma_chains",
               .grid = gpu::blocks(threads, kBlock),
               .block = kBlock,
               .traffic = {0, 4 * threads}},
              exponentials ? chains<true> : chains<false>, out, turns, -0.5f);
}

}  // namespace tessera::bench
