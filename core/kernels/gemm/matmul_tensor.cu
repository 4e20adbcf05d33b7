// Products of f16 and bf16 on tensor cores (wmma), for where cuBLASLt is missing or does not serve.
//
// A block of 8 warps makes a tile of 128 x 128, a warp 64 x 32 of it, in steps of 32 along K. While
// a step is multiplied out of one half of the shared memory the next one is on its way from memory
// in registers, and is put into the other half afterwards: one barrier a step. Operands are kept in
// shared memory in the order in which they lie in memory, so that each is read by vectors whichever
// way it is transposed. Sums are f32 in the order of K.
#include <mma.h>

#include <type_traits>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/gemm/matmul_tiles.cuh>

namespace tessera::kernels {
namespace {

namespace wmma = nvcuda::wmma;

constexpr int kFragment = 16;
constexpr int kTile = 128, kDepth = 32;           // of a block, and along K
constexpr int kWarpRows = 64, kWarpColumns = 32;  // of a warp
constexpr int kWarps = (kTile / kWarpRows) * (kTile / kWarpColumns);
constexpr int kBlock = kWarps * gpu::kWarp;
constexpr int kWidth = 8;                                   // elements of 16 bytes
constexpr int kVectors = kTile * kDepth / kWidth / kBlock;  // of a thread, for each operand
// Rows in shared memory are 16 bytes longer than they need be: tiles below each other begin in
// different banks.
constexpr int kPadding = 8;
constexpr int kOperand = kTile * (kDepth + kPadding);  // elements, the larger of the two orders
static_assert(kOperand >= kDepth * (kTile + kPadding));
constexpr int kOutput = kFragment + 4;  // floats from row to row of a warp's output
static_assert(kWarps * kFragment * kOutput * sizeof(float) <= 2 * kOperand * sizeof(uint16_t));

// An operand's part of a tile: kTile lines across K by kDepth along K. In memory, and in shared
// memory, it has rows along K, or across it.
template <class T, bool kAlong>
struct Stage {
  static constexpr int kRowLength = kAlong ? kDepth : kTile;
  static constexpr int kStride = kRowLength + kPadding;
  using Rows = gpu::Vector<T, kWidth>[kVectors];

  // This thread's vectors of the tile that begins at (first line, k); zeros beyond the matrix.
  static TS_DEVICE void read(Rows& rows, const T* x, int64_t stride, int64_t first, int64_t lines,
                             int64_t k, int64_t K, bool vectors) {
    TS_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int place = (v * kBlock + static_cast<int>(threadIdx.x)) * kWidth;
      const int64_t row = (kAlong ? first : k) + place / kRowLength;
      const int64_t column = (kAlong ? k : first) + place % kRowLength;
      const int64_t row_end = kAlong ? lines : K, column_end = kAlong ? K : lines;
      const T* const source = x + row * stride + column;
      if (vectors && row < row_end && column + kWidth <= column_end) {
        rows[v] = gpu::load_vector<kWidth>(source);
      } else {
        TS_UNROLL
        for (int j = 0; j < kWidth; ++j) {
          rows[v].values[j] =
              row < row_end && column + j < column_end ? source[j] : T::from_bits(0);
        }
      }
    }
  }
  static TS_DEVICE void write(const Rows& rows, T* stage) {
    TS_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int place = (v * kBlock + static_cast<int>(threadIdx.x)) * kWidth;
      gpu::store_shared_vector(stage + place / kRowLength * kStride + place % kRowLength, rows[v]);
    }
  }
  // Where the fragment of lines from `line` on, and of k from `depth` on, begins.
  static TS_DEVICE const T* fragment(const T* stage, int line, int depth) {
    return kAlong ? stage + line * kStride + depth : stage + depth * kStride + line;
  }
};

template <class T>
using Element = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat16, __half>;

// kAAlong, kBAlong: elements of the operand lie one after the other along K.
template <class T, class R, bool kAAlong, bool kBAlong>
__global__ void __launch_bounds__(kBlock)
    matmul_tensor_kernel(const Product p, const T* a, const T* b, const T* bias, R* c,
                         const DeviceWalk<3> batch, bool a_vectors, bool b_vectors,
                         bool c_vectors) {
  using A = Stage<T, kAAlong>;
  using B = Stage<T, kBAlong>;
  using E = Element<T>;
  using AOrder = std::conditional_t<kAAlong, wmma::row_major, wmma::col_major>;
  using BOrder = std::conditional_t<kBAlong, wmma::col_major, wmma::row_major>;
  constexpr int kRows = kWarpRows / kFragment, kColumns = kWarpColumns / kFragment;
  T* const stages = gpu::dynamic_shared<T>();  // a and b, twice; tiles need 32 bytes' alignment
  const int warp = static_cast<int>(threadIdx.x) / gpu::kWarp;
  const int lane = static_cast<int>(threadIdx.x) % gpu::kWarp;
  const int warp_row = warp / (kTile / kWarpColumns) * kWarpRows;
  const int warp_column = warp % (kTile / kWarpColumns) * kWarpColumns;
  int64_t offsets[3];
  const TilePlace place = tile_place(p);
  batch.offsets(place.matrix, offsets);
  c += offsets[0];
  a += offsets[1];
  b += offsets[2];
  const int64_t row0 = place.row * kTile, column0 = place.column * kTile;
  const int64_t a_stride = kAAlong ? p.a_row : p.a_column;
  const int64_t b_stride = kBAlong ? p.b_column : p.b_row;

  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[kRows][kColumns];
  TS_UNROLL
  for (int i = 0; i < kRows; ++i) {
    TS_UNROLL
    for (int j = 0; j < kColumns; ++j) wmma::fill_fragment(sums[i][j], 0.0f);
  }
  typename A::Rows a_rows;
  typename B::Rows b_rows;
  A::read(a_rows, a, a_stride, row0, p.M, 0, p.K, a_vectors);
  B::read(b_rows, b, b_stride, column0, p.N, 0, p.K, b_vectors);
  int half = 0;
  A::write(a_rows, stages);
  B::write(b_rows, stages + kOperand);
  __syncthreads();
  for (int64_t k = 0; k < p.K; k += kDepth) {
    const bool more = k + kDepth < p.K;
    if (more) {
      A::read(a_rows, a, a_stride, row0, p.M, k + kDepth, p.K, a_vectors);
      B::read(b_rows, b, b_stride, column0, p.N, k + kDepth, p.K, b_vectors);
    }
    const T* const a_stage = stages + half * 2 * kOperand;
    const T* const b_stage = a_stage + kOperand;
    TS_UNROLL
    for (int depth = 0; depth < kDepth; depth += kFragment) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, E, AOrder> left[kRows];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, E, BOrder> right[kColumns];
      TS_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const T* const from = A::fragment(a_stage, warp_row + i * kFragment, depth);
        wmma::load_matrix_sync(left[i], reinterpret_cast<const E*>(from), A::kStride);
      }
      TS_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        const T* const from = B::fragment(b_stage, warp_column + j * kFragment, depth);
        wmma::load_matrix_sync(right[j], reinterpret_cast<const E*>(from), B::kStride);
      }
      TS_UNROLL
      for (int i = 0; i < kRows; ++i) {
        TS_UNROLL
        for (int j = 0; j < kColumns; ++j) {
          wmma::mma_sync(sums[i][j], left[i], right[j], sums[i][j]);
        }
      }
    }
    if (more) {  // into the half that was read a step ago, before the last barrier
      half = 1 - half;
      A::write(a_rows, stages + half * 2 * kOperand);
      B::write(b_rows, stages + half * 2 * kOperand + kOperand);
    }
    __syncthreads();
  }

  // Each warp passes its fragments through its own part of the memory: a lane gets eight
  // neighbouring numbers of a row.
  float* const output = reinterpret_cast<float*>(stages) + warp * kFragment * kOutput;
  const int own_row = lane / 2, own_column = lane % 2 * kWidth;
  const float alpha = static_cast<float>(p.alpha), beta = static_cast<float>(p.beta);
  TS_UNROLL
  for (int i = 0; i < kRows; ++i) {
    TS_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      wmma::store_matrix_sync(output, sums[i][j], kOutput, wmma::mem_row_major);
      __syncwarp();
      const int64_t row = row0 + warp_row + i * kFragment + own_row;
      const int64_t column = column0 + warp_column + j * kFragment + own_column;
      const bool inside = row < p.M && column < p.N;
      R* const to = c + row * p.c_row + column;
      const bool whole = inside && c_vectors && column + kWidth <= p.N;
      gpu::Vector<R, kWidth> values;
      if (whole && p.beta != 0) values = gpu::load_vector<kWidth>(to);
      TS_UNROLL
      for (int e = 0; e < kWidth; ++e) {
        if (!inside || column + e >= p.N) continue;
        float value = output[own_row * kOutput + own_column + e];
        if (p.alpha != 1) value = alpha * value;
        if (p.beta != 0) value = value + beta * load<float>(whole ? values.values[e] : to[e]);
        if (bias != nullptr) value = value + load<float>(bias[column + e]);
        values.values[e] = store<R>(value);
        if (!whole) to[e] = values.values[e];
      }
      if (whole) gpu::store_vector(to, values);
      __syncwarp();
    }
  }
}

}  // namespace

bool multiply_on_tensor_cores(const char* where, const Product& product, const Tensor& a,
                              const Tensor& b, const Tensor& bias, const Tensor& result,
                              const Walk& batch) {
  constexpr int64_t kLeast = 48;
  Product p = product;
  if (!is_low_precision(a.dtype()) || p.M < kLeast || p.N < kLeast || p.K < kFragment) return false;
  const bool a_along = p.a_column == 1, b_along = p.b_row == 1;
  if ((!a_along && p.a_row != 1) || (!b_along && p.b_column != 1)) return false;
  const auto in_vectors = [&](const Tensor& x, int operand, int64_t stride, int64_t width) {
    bool vectors = is_aligned(x.data()) && stride % width == 0;
    for (int d = 0; d < batch.dims; ++d) vectors &= batch.strides[operand][d] % width == 0;
    return vectors;
  };
  const bool a_vectors = in_vectors(a, 1, a_along ? p.a_row : p.a_column, kWidth);
  const bool b_vectors = in_vectors(b, 2, b_along ? p.b_column : p.b_row, kWidth);
  const bool c_vectors = in_vectors(result, 0, p.c_row, kWidth);
  const gpu::LaunchConfig config{.name = where,
                                 .grid = cut_into_tiles(where, p, kTile, batch.numel),
                                 .block = kBlock,
                                 .shared_bytes = 4 * kOperand * sizeof(uint16_t)};
  const auto run = [&]<class T, class R>() {
    const auto go = [&](auto* kernel) {
      gpu::launch(config, kernel, p, a.data_as<T>(), b.data_as<T>(),
                  bias.defined() ? bias.data_as<T>() : nullptr, result.data_as<R>(),
                  DeviceWalk<3>(batch), a_vectors, b_vectors, c_vectors);
    };
    if (a_along) {
      go(b_along ? matmul_tensor_kernel<T, R, true, true>
                 : matmul_tensor_kernel<T, R, true, false>);
    } else {
      go(b_along ? matmul_tensor_kernel<T, R, false, true>
                 : matmul_tensor_kernel<T, R, false, false>);
    }
  };
  const bool wide = result.dtype() == kF32;
  if (a.dtype() == kBF16) {
    wide ? run.template operator()<bf16, float>() : run.template operator()<bf16, bf16>();
  } else {
    wide ? run.template operator()<f16, float>() : run.template operator()<f16, f16>();
  }
  return true;
}

}  // namespace tessera::kernels
