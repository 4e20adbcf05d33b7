// A matrix narrowed to fp8 with a scale for each row, each column or each tile of 128.
//
// The copy by rows has scales that change from row to row, the copy by columns such that change
// from column to column: of all that a product sums (TileScales::kLines) or of 128 numbers of it. A
// block takes 128 x 128 numbers, so that both are 128 scales, which stand in shared memory; tiles
// of 128 begin and end with the block, which finds their maxima itself. Patches as in
// cast_transpose.cuh, 8 high, but that each number is narrowed twice.
#pragma once

#include <tessera/core/kernels/fp8/cast_transpose.cuh>

namespace tessera::kernels {

enum class TileScales : uint8_t {
  kLines,    // of whole rows and columns, whose maxima are given
  kVectors,  // 1 x 128 and 128 x 1
  kSquares,  // 128 x 128, the same for both copies
};

// Of one copy, see quantize(); null where it is not made.
struct TileOutputs {
  const uint32_t* largest;  // bits of the maxima of lines
  float* scale;
  float* inverse;
  int64_t pitch;  // of squares: floats from a row of tiles to the next
};

template <class T, class Q>
struct TileJob {
  CastJob<T, Q> cast;
  TileScales scales;
  TileOutputs rows, columns;
};

namespace cast {

inline constexpr int kTileSide = 128;
static_assert(kThreads == kTileSide && kAcross * kSide<f8e4m3> == kTileSide);
inline constexpr int kWarps = kThreads / gpu::kWarp;

// The largest magnitudes of each row and column of the block's tile at (m0, n0), in shared memory:
// row_most (kTileSide), column_most (kWarps, kTileSide), the latter to be folded.
template <class T, class Q>
TS_DEVICE void tile_maxima(const CastJob<T, Q>& job, int64_t m0, int64_t n0, const Before& before,
                           uint32_t* row_most, uint32_t* column_most) {
  constexpr int kN = 16 / static_cast<int>(sizeof(T)), kLanes = kTileSide / kN;
  constexpr int kRows = kThreads / kLanes, kTogether = 4;  // loads that overlap
  const int thread = static_cast<int>(threadIdx.x), across = thread % kLanes;
  const int64_t n = n0 + across * kN;
  uint32_t most[kN] = {};
  TS_ROLLED
  for (int first = thread / kLanes; first < kTileSide; first += kTogether * kRows) {
    float values[kTogether][kN] = {};
    TS_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      const int64_t m = m0 + first + i * kRows;
      if (m >= job.M) continue;
      const T* const x = job.x + m * job.N + n;
      if (job.vectors) {
        if (n < job.N) load_numbers<kN, Plain>(x, x, before, values[i]);
      } else {
        for (int j = 0; j < kN; ++j) {
          if (n + j < job.N) values[i][j] = number_of(Plain{}, x[j], x[j], before);
        }
      }
    }
    TS_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      uint32_t row = 0;
      TS_UNROLL
      for (int j = 0; j < kN; ++j) {
        const uint32_t bits = rules::magnitude_bits(values[i][j]);
        most[j] = LargerBits{}(most[j], bits);
        row = LargerBits{}(row, bits);
      }
      TS_UNROLL
      for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
        row = LargerBits{}(row, __shfl_xor_sync(gpu::kAllLanes, row, lanes));
      }
      if (across == 0) row_most[first + i * kRows] = row;
    }
  }
  if constexpr (kLanes < gpu::kWarp) {
    TS_UNROLL
    for (int j = 0; j < kN; ++j) {
      most[j] = LargerBits{}(most[j], __shfl_xor_sync(gpu::kAllLanes, most[j], kLanes));
    }
  }
  const int warp = thread / gpu::kWarp;
  if (thread % gpu::kWarp < kLanes) {
    TS_UNROLL
    for (int j = 0; j < kN; ++j) column_most[warp * kTileSide + across * kN + j] = most[j];
  }
  __syncthreads();
}
TS_DEVICE uint32_t fold_column(const uint32_t* column_most, int column) {
  uint32_t most = 0;
  TS_UNROLL
  for (int warp = 0; warp < kWarps; ++warp) {
    most = LargerBits{}(most, column_most[warp * kTileSide + column]);
  }
  return most;
}

template <class Q>
TS_DEVICE float scale_of_bits(uint32_t largest, bool power_of_two) {
  return rules::scale_of(tessera::detail::float_of(largest), rules::kLargestOf<Q>, power_of_two);
}
TS_DEVICE void put_scale(const TileOutputs& to, int64_t at, float scale) {
  if (to.scale != nullptr) to.scale[at] = scale;
  to.inverse[at] = 1 / scale;
}

// The scales of a line that this thread writes, where `writes`: it is in the matrix, and this block
// the one to say it.
template <class Q>
TS_DEVICE float line_scale(const TileOutputs& to, int64_t line, int64_t lines, bool power_of_two,
                           bool writes) {
  if (to.inverse == nullptr || line >= lines) return 1;
  const float scale = scale_of_bits<Q>(to.largest[line], power_of_two);
  if (writes) put_scale(to, line, scale);
  return scale;
}

// by_row, by_column: shared (kTileSide), the scales of the block's rows and columns.
template <class T, class Q>
TS_DEVICE void block_scales(const TileJob<T, Q>& job, int64_t m0, int64_t n0, const Before& before,
                            float* by_row, float* by_column) {
  TS_SHARED(uint32_t, row_most, kTileSide);
  TS_SHARED(uint32_t, column_most, kWarps * kTileSide);
  TS_SHARED(uint32_t, slot, gpu::kWarp);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t M = job.cast.M, N = job.cast.N, m = m0 + thread, n = n0 + thread;
  const bool two = job.cast.power_of_two;
  float row = 1, column = 1;
  if (job.scales == TileScales::kLines) {
    row = line_scale<Q>(job.rows, m, M, two, blockIdx.x == 0);
    column = line_scale<Q>(job.columns, n, N, two, blockIdx.y == 0);
  } else {
    tile_maxima(job.cast, m0, n0, before, row_most, column_most);
    const int64_t tile_row = blockIdx.y, tile_column = blockIdx.x;
    if (job.scales == TileScales::kVectors) {
      row = scale_of_bits<Q>(row_most[thread], two);
      column = scale_of_bits<Q>(fold_column(column_most, thread), two);
      if (job.rows.inverse != nullptr && m < M) put_scale(job.rows, tile_column * M + m, row);
      if (job.columns.inverse != nullptr && n < N) put_scale(job.columns, tile_row * N + n, column);
    } else {
      const uint32_t most = gpu::block_reduce(row_most[thread], LargerBits{}, 0u, slot);
      row = column = scale_of_bits<Q>(most, two);
      if (thread == 0) {
        put_scale(job.rows, tile_row * job.rows.pitch + tile_column, row);
        if (job.columns.inverse != nullptr) {
          put_scale(job.columns, tile_column * job.columns.pitch + tile_row, row);
        }
      }
    }
  }
  by_row[thread] = row;
  by_column[thread] = column;
  __syncthreads();
}

inline constexpr int kTileRows = 8;  // of a patch

// As whole_columns(): eight columns of a patch, at (m, n) of the matrix.
template <bool kSums, class T, class Q>
TS_DEVICE void tile_columns(const CastJob<T, Q>& job, int64_t m, int64_t n, const float* by_row,
                            const float* by_column, const Before& before, Seen& seen, float* sums) {
  constexpr int kPer = kInWord<Q>, kW = kWords<Q>, kN = kW * kPer;
  const bool rows = job.values != nullptr, columns = job.transposed != nullptr;
  uint32_t words[kTileRows][kW];
  float added[kN] = {}, down[kN];
  TS_UNROLL
  for (int j = 0; j < kN; ++j) down[j] = by_column[j];
  TS_UNROLL
  for (int i = 0; i < kTileRows; ++i) {
    const int64_t at = (m + i) * job.N + n;
    const float along = by_row[i];
    float values[kN], first[kN], second[kN];
    load_numbers<kN, Plain>(job.x + at, job.x + at, before, values);
    TS_UNROLL
    for (int j = 0; j < kN; ++j) {
      if constexpr (kSums) added[j] += values[j];
      first[j] = rules::scaled<Q>(values[j], along);
      second[j] = rules::scaled<Q>(values[j], down[j]);
      seen.template number<Q>(values[j], rows ? first[j] : second[j]);
    }
    TS_UNROLL
    for (int w = 0; w < kW; ++w) words[i][w] = pack_word<Q>(second + w * kPer);
    if (rows) {
      gpu::Vector<uint32_t, kW> row;
      TS_UNROLL
      for (int w = 0; w < kW; ++w) row.values[w] = pack_word<Q>(first + w * kPer);
      gpu::store_vector(reinterpret_cast<uint32_t*>(job.values + at), row);
    }
  }
  if constexpr (kSums) {
    TS_UNROLL
    for (int j = 0; j < kN; ++j) sums[j] = added[j];
  }
  if (columns) store_columns<Q>(words, job.transposed + n * job.M + m, job.M);
}

// What lies inside of the matrix, number by number.
template <bool kSums, class T, class Q>
TS_DEVICE void cut_tile(const CastJob<T, Q>& job, int64_t m0, int64_t n0, const float* by_row,
                        const float* by_column, const Before& before, Seen& seen, float* sums) {
  const int64_t rows = job.M - m0 < kTileRows ? job.M - m0 : kTileRows;
  const int64_t columns = job.N - n0 < kSide<Q> ? job.N - n0 : kSide<Q>;
  for (int64_t j = 0; j < columns; ++j) {
    float sum = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t m = m0 + i, n = n0 + j;
      const T x = job.x[m * job.N + n];
      const float value = number_of(Plain{}, x, x, before);
      const float first = rules::scaled<Q>(value, by_row[i]);
      const float second = rules::scaled<Q>(value, by_column[j]);
      sum += value;
      seen.template number<Q>(value, job.values != nullptr ? first : second);
      if (job.values != nullptr) job.values[m * job.N + n] = from_float_saturate<Q>(first);
      if (job.transposed != nullptr) job.transposed[n * job.M + m] = from_float_saturate<Q>(second);
    }
    if constexpr (kSums) sums[j] = sum;
  }
}

}  // namespace cast

// rows (M), columns (N), or null: raised to the bits of the largest magnitudes.
template <class T>
__global__ void __launch_bounds__(cast::kThreads)
    largest_of_lines_kernel(CastJob<T, f8e4m3> job, uint32_t* rows, uint32_t* columns) {
  TS_SHARED(uint32_t, row_most, cast::kTileSide);
  TS_SHARED(uint32_t, column_most, cast::kWarps * cast::kTileSide);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t m0 = int64_t{blockIdx.y} * cast::kTileSide;
  const int64_t n0 = int64_t{blockIdx.x} * cast::kTileSide;
  const cast::Before before{job.through, job.factor != nullptr ? *job.factor : 1.0f};
  cast::tile_maxima(job, m0, n0, before, row_most, column_most);
  const uint32_t row = row_most[thread], column = cast::fold_column(column_most, thread);
  if (rows != nullptr && row > 0) atomicMax(rows + m0 + thread, row);
  if (columns != nullptr && column > 0) atomicMax(columns + n0 + thread, column);
}

template <class T, class Q, bool kSums>
__global__ void __launch_bounds__(cast::kThreads, 4) cast_tiles_kernel(TileJob<T, Q> job) {
  constexpr int kN = cast::kSide<Q>, kColumns = cast::kTileSide;
  TS_SHARED(float, by_row, cast::kTileSide);
  TS_SHARED(float, by_column, cast::kTileSide);
  TS_SHARED(uint32_t, slot, gpu::kWarp);
  TS_SHARED(float, partial, kSums ? cast::kDown* kColumns : 1);  // (down, column of the block)
  const CastJob<T, Q>& what = job.cast;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % gpu::kWarp;
  const int warp = thread / gpu::kWarp;
  const int across = lane % 4 + 4 * (warp % 2);
  const int down = lane / 4 + 8 * (warp / 2), first_row = down * cast::kTileRows;
  const int64_t m0 = int64_t{blockIdx.y} * cast::kTileSide;
  const int64_t n0 = int64_t{blockIdx.x} * cast::kTileSide;
  const int64_t m = m0 + first_row;
  const cast::Before before{what.through, what.factor != nullptr ? *what.factor : 1.0f};
  cast::block_scales(job, m0, n0, before, by_row, by_column);
  cast::Seen seen;
  float* const sums = partial + (kSums ? down * kColumns : 0);
  const float* const of_rows = by_row + first_row;
  if (what.vectors) {
    TS_ROLLED
    for (int column = across * cast::kPart<Q>; column < kColumns; column += cast::kStep<Q>) {
      if (m < what.M && n0 + column < what.N) {
        cast::tile_columns<kSums>(what, m, n0 + column, of_rows, by_column + column, before, seen,
                                  sums + column);
      } else if (kSums) {
        for (int j = 0; j < cast::kPart<Q>; ++j) sums[column + j] = 0;
      }
    }
  } else {
    const int column = across * kN;
    if (kSums) {
      for (int j = 0; j < kN; ++j) sums[column + j] = 0;
    }
    if (m < what.M && n0 + column < what.N) {
      cast::cut_tile<kSums>(what, m, n0 + column, of_rows, by_column + column, before, seen,
                            sums + column);
    }
  }
  if constexpr (kSums) {
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < cast::kDown; ++i) sum += partial[i * kColumns + thread];
    if (n0 + thread < what.N) what.sums[int64_t{blockIdx.y} * what.N + n0 + thread] = sum;
  }
  cast::note(what, seen, slot);
}

}  // namespace tessera::kernels
