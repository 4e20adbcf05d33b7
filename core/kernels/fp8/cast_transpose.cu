// Tiles of 64 x 64: a thread takes 4 x 4 numbers, writes its four rows as vectors and puts its four
// columns as vectors into shared memory, from where neighbouring threads write neighbouring places
// of a transposed row.
#include <tessera/core/kernels/fp8/cast_transpose.h>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/factory.h>
#include <tessera/core/half.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {
namespace {

constexpr int kPatch = 4, kSide = 16;  // numbers of a thread and threads of a block along a side
constexpr int kTile = kPatch * kSide;

struct LargerBits {
  TS_DEVICE uint32_t operator()(uint32_t a, uint32_t b) const { return a > b ? a : b; }
};

// amax: the bits of a magnitude, which order as magnitudes do; integers, so the order of the
// atomic operations cannot be seen. `vectors`: rows of all matrices begin at whole vectors.
template <class T, class Q>
__global__ void __launch_bounds__(kSide* kSide)
    cast_transpose_kernel(const T* x,          // (M, N)
                          const float* scale,  // one number, or null for 1
                          Q* values,           // (M, N) or null
                          Q* transposed,       // (N, M) or null
                          uint32_t* amax, int64_t M, int64_t N, bool vectors) {
  using Patch = gpu::Vector<Q, kPatch>;
  TS_SHARED(Patch, columns, kTile * (kSide + 1));  // of the tile: (column, four rows)
  TS_SHARED(uint32_t, slot, gpu::kWarp);
  const int tx = static_cast<int>(threadIdx.x) % kSide, ty = static_cast<int>(threadIdx.x) / kSide;
  const int64_t m0 = int64_t{blockIdx.y} * kTile, n0 = int64_t{blockIdx.x} * kTile;
  const int64_t m = m0 + ty * kPatch, n = n0 + tx * kPatch;
  const float factor = scale != nullptr ? *scale : 1.0f;
  const bool whole = vectors && m + kPatch <= M && n + kPatch <= N;
  Patch rows[kPatch];
  uint32_t largest = 0;
  TS_UNROLL
  for (int i = 0; i < kPatch; ++i) {
    gpu::Vector<T, kPatch> in;
    if (whole) {
      in = gpu::load_vector<kPatch>(x + (m + i) * N + n);
    } else {
      TS_UNROLL
      for (int j = 0; j < kPatch; ++j) {
        in.values[j] = m + i < M && n + j < N ? x[(m + i) * N + n + j] : store<T>(0.0f);
      }
    }
    TS_UNROLL
    for (int j = 0; j < kPatch; ++j) {
      const float value = load<float>(in.values[j]);
      largest = LargerBits{}(largest, __builtin_bit_cast(uint32_t, value) & 0x7fffffffu);
      rows[i].values[j] = from_float_saturate<Q>(value * factor);
    }
    if (values == nullptr) continue;
    if (whole) {
      gpu::store_vector(values + (m + i) * N + n, rows[i]);
    } else {
      TS_UNROLL
      for (int j = 0; j < kPatch; ++j) {
        if (m + i < M && n + j < N) values[(m + i) * N + n + j] = rows[i].values[j];
      }
    }
  }
  if (transposed != nullptr) {  // the whole block
    TS_UNROLL
    for (int j = 0; j < kPatch; ++j) {
      Patch column;
      TS_UNROLL
      for (int i = 0; i < kPatch; ++i) column.values[i] = rows[i].values[j];
      columns[(tx * kPatch + j) * (kSide + 1) + ty] = column;
    }
    __syncthreads();
    const int64_t to = m0 + tx * kPatch;
    TS_UNROLL
    for (int j = 0; j < kPatch; ++j) {
      const int64_t row = n0 + ty * kPatch + j;
      if (row >= N) continue;
      const Patch column = columns[(ty * kPatch + j) * (kSide + 1) + tx];
      if (vectors && to + kPatch <= M) {
        gpu::store_vector(transposed + row * M + to, column);
      } else {
        TS_UNROLL
        for (int i = 0; i < kPatch; ++i) {
          if (to + i < M) transposed[row * M + to + i] = column.values[i];
        }
      }
    }
  }
  largest = gpu::block_reduce(largest, LargerBits{}, 0u, slot);
  if (threadIdx.x == 0 && largest > 0) atomicMax(amax, largest);
}

CastTransposed cast_transpose_cuda(const Tensor& x, DType dtype, const Tensor& scale,
                                   bool want_values, bool want_transposed) {
  const int64_t M = x.size(0), N = x.size(1);
  CastTransposed result;
  if (want_values) result.values = raw::empty({M, N}, dtype, x.device());
  if (want_transposed) result.transposed = raw::empty({N, M}, dtype, x.device());
  result.amax = raw::zeros({}, kF32, x.device());
  if (x.numel() == 0) return result;
  const Tensor source = contiguous(x);
  const dim3 grid(gpu::blocks(N, kTile), gpu::blocks(M, kTile));
  TS_CHECK_SHAPE(grid.y <= 65535, "cast_transpose", "at most 65535 tiles of 64 rows; got ", x);
  dispatch_floating(x.dtype(), "cast_transpose", [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      dispatch_cast_target(dtype, [&]<class Q>() {
        const bool vectors = M % kPatch == 0 && N % kPatch == 0 && is_aligned(source.data());
        gpu::launch({.name = "cast_transpose", .grid = grid, .block = kSide * kSide},
                    cast_transpose_kernel<T, Q>, source.data_as<T>(),
                    scale.defined() ? scale.data_as<float>() : nullptr,
                    want_values ? result.values.data_as<Q>() : nullptr,
                    want_transposed ? result.transposed.data_as<Q>() : nullptr,
                    static_cast<uint32_t*>(result.amax.data()), M, N, vectors);
      });
    }
  });
  return result;
}

}  // namespace

void register_cast_transpose() { cuda_kernel<cast_transpose> = cast_transpose_cuda; }

}  // namespace tessera::kernels
