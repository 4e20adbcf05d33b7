// Kernels that each break one rule of scripts/check_ptx.sh, and one that keeps all of them
// (test_check_ptx.sh).
#include <cstdint>

namespace tessera::ptx_test {

__global__ void sound_kernel(const float4* x, float4* y, int64_t n) {
  const int64_t i = threadIdx.x;
  if (i < n) y[i] = x[i];
}

__global__ void scalar_kernel(const float* x, float* y, int64_t n) {
  const int64_t i = threadIdx.x;
  if (i < n) y[i] = x[i];
}

__global__ void product_kernel(const float* x, float* y) { y[threadIdx.x] = x[0] * x[1]; }

__global__ void wide_kernel(const float* x, float* y) {
  y[threadIdx.x] = static_cast<float>(static_cast<double>(x[threadIdx.x]) * 0.1);
}

__global__ void local_kernel(const float* x, float* y, int at) {
  float values[16];
  for (int i = 0; i < 16; ++i) values[i] = x[i] * x[i + 1];
  y[threadIdx.x] = values[at];
}

__global__ void generic_kernel(const float* x, float* y, bool staged) {
  __shared__ float stage[32];
  stage[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const float* const source = staged ? stage : x;
  y[threadIdx.x] = source[threadIdx.x ^ 1];
}

__global__ void division_kernel(const int* x, int* y, int divisor, int n) {
  for (int i = threadIdx.x; i < n; i += 32) y[i] = x[i] / divisor;
}

__global__ void f64_division_kernel(const double* x, double* y, double divisor, int n) {
  for (int i = threadIdx.x; i < n; i += 32) y[i] = x[i] / divisor;
}

__device__ __noinline__ float helper(float x) { return x * x + 1; }
__global__ void call_kernel(const float* x, float* y) { y[threadIdx.x] = helper(x[threadIdx.x]); }

__global__ void clamp_kernel(const int* x, int* y) {
  const int left = *x - static_cast<int>(threadIdx.x);
  const int count = left < 0 ? 0 : left < 2 ? left : 2;
  y[threadIdx.x] = count == 2 ? 7 : count * 5;
}

__global__ void text_kernel(const int* x, const char** y) {
  y[threadIdx.x] = *x > 0 ? "more" : nullptr;
}

__global__ void unlisted_kernel(float* y) { y[threadIdx.x] = 0; }

// Sums that all live to the end.
__global__ void __launch_bounds__(256) greedy_kernel(const float* x, float* y, int n) {
  float sums[64] = {};
  for (int i = 0; i < n; ++i) {
#pragma unroll
    for (int j = 0; j < 64; ++j) sums[j] += x[i] * x[i + j];
  }
#pragma unroll
  for (int j = 0; j < 64; ++j) y[j * 256 + threadIdx.x] = sums[j];
}

__global__ void __launch_bounds__(256) crowded_kernel(const float* x, float* y, int at) {
  __shared__ float stage[10240];
  for (int i = threadIdx.x; i < 10240; i += 256) stage[i] = x[i];
  __syncthreads();
  y[threadIdx.x] = stage[(threadIdx.x + at) % 10240];
}

extern __shared__ float dynamic_shared[];
__global__ void __launch_bounds__(256) staged_kernel(const float* x, float* y) {
  dynamic_shared[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = dynamic_shared[threadIdx.x ^ 1];
}

}  // namespace tessera::ptx_test
