#include <tessera/core/kernels/fp8/quantize_tiles.h>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/fp8/cast_transpose.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/fp8/cast_tiles.cuh>

namespace tessera::kernels {
namespace {

constexpr const char* kTiles = "quantize";
constexpr int64_t kTile = cast::kTileSide;

int64_t tiles_of(int64_t size) { return gpu::blocks(size, kTile); }

// Both copies and their scales; what is not wanted is undefined.
struct TiledPair {
  TileScales scales = TileScales::kLines;
  Quantized rows = {}, columns = {};
  Tensor row_largest = {}, column_largest = {};  // of lines: bits as f32
};

// A copy's scales of lines or vectors, as they lie: (pieces of a line, lines).
void add_scales(Quantized& q, bool by_rows, int64_t pieces, int64_t lines, const Device& device) {
  const auto made = [&] {
    const Tensor all = raw::empty({pieces, lines}, kF32, device);
    return by_rows ? raw::transpose(all, 0, 1) : all;
  };
  q.scale = made();
  q.inverse = made();
}

TiledPair pair_of(const Tensor& x, TileScales scales, const QuantizeOptions& options, bool by_rows,
                  bool by_columns) {
  const int64_t M = x.size(0), N = x.size(1);
  const Device device = x.device();
  TiledPair pair{.scales = scales};
  const bool lines = scales == TileScales::kLines;
  if (by_rows) {
    pair.rows.values = raw::empty({M, N}, options.format, device);
    add_scales(pair.rows, true, lines ? 1 : tiles_of(N), M, device);
  }
  if (by_columns) {
    pair.columns.transposed = raw::empty({N, M}, options.format, device);
    add_scales(pair.columns, false, lines ? 1 : tiles_of(M), N, device);
  }
  return pair;
}

// [down, across] with rows of a multiple of four, by rows or by columns.
Tensor square_scales(int64_t down, int64_t across, bool by_columns, const Device& device) {
  const int64_t lines = by_columns ? across : down, pieces = by_columns ? down : across;
  const Tensor all =
      raw::narrow(raw::empty({lines, (pieces + 3) / 4 * 4}, kF32, device), 1, 0, pieces);
  return by_columns ? raw::transpose(all, 0, 1) : all;
}

template <class T>
T* tile_data(const Tensor& x) {
  return x.defined() ? static_cast<T*>(x.data()) : nullptr;
}
bool begins_at_16(const Tensor& x) {
  return !x.defined() || reinterpret_cast<uintptr_t>(x.data()) % 16 == 0;
}

template <class T, class Q>
CastJob<T, Q> cast_job(const Tensor& x, const TiledPair& pair, bool power_of_two,
                       const QuantizeWants& wants, const Tensor& sums) {
  const int64_t M = x.size(0), N = x.size(1);
  CastJob<T, Q> job{};
  job.x = x.data_as<T>();
  job.through = wants.through.value_or(kF32);
  job.factor = tile_data<float>(wants.factor);
  job.power_of_two = power_of_two;
  job.values = tile_data<Q>(pair.rows.values);
  job.transposed = tile_data<Q>(pair.columns.transposed);
  job.amax = tile_data<uint32_t>(wants.largest);
  job.counts = tile_data<unsigned long long>(wants.counts);
  job.no_nan = true;
  job.sums = tile_data<float>(sums);
  job.M = M;
  job.N = N;
  job.vectors = M % 16 == 0 && N % 16 == 0 && begins_at_16(x) && begins_at_16(pair.rows.values) &&
                begins_at_16(pair.columns.transposed);
  return job;
}

template <class T>
void find_lines(const Tensor& x, TiledPair& pair, const QuantizeWants& wants, const dim3& grid) {
  const int64_t M = x.size(0), N = x.size(1);
  const int64_t rows = pair.rows.values.defined() ? M : 0;
  const int64_t columns = pair.columns.transposed.defined() ? N : 0;
  const Tensor largest = raw::zeros({rows + columns}, kF32, x.device());
  if (rows > 0) pair.row_largest = raw::narrow(largest, 0, 0, rows);
  if (columns > 0) pair.column_largest = raw::narrow(largest, 0, rows, columns);
  gpu::launch(
      {.name = "largest_of_lines",
       .grid = grid,
       .block = cast::kThreads,
       .traffic = {.reads = x.nbytes() + largest.nbytes() + (wants.factor.defined() ? 4 : 0),
                   .writes = largest.nbytes()}},
      largest_of_lines_kernel<T>, cast_job<T, f8e4m3>(x, {}, false, wants, {}),
      tile_data<uint32_t>(pair.row_largest), tile_data<uint32_t>(pair.column_largest));
}

template <class T, class Q, bool kSums>
void launch_tiles(const Tensor& x, const TiledPair& pair, bool power_of_two,
                  const QuantizeWants& wants, const Tensor& sums, const dim3& grid) {
  const auto outputs = [&](const Tensor& largest, const Tensor& scale, const Tensor& inverse,
                           int64_t pitch) {
    return TileOutputs{.largest = tile_data<uint32_t>(largest),
                       .scale = tile_data<float>(scale),
                       .inverse = tile_data<float>(inverse),
                       .pitch = pitch};
  };
  const bool squares = pair.scales == TileScales::kSquares;
  const Quantized &rows = pair.rows, &columns = pair.columns;
  const TileJob<T, Q> job{
      .cast = cast_job<T, Q>(x, pair, power_of_two, wants, sums),
      .scales = pair.scales,
      .rows =
          outputs(pair.row_largest, rows.scale, rows.inverse, squares ? rows.inverse.stride(0) : 0),
      .columns = outputs(pair.column_largest, columns.scale, columns.inverse,
                         squares && columns.inverse.defined() ? columns.inverse.stride(1) : 0)};
  const auto bytes = [](const Tensor& each) { return each.defined() ? 4 * each.numel() : 0; };
  const auto scales_of = [&](const Quantized& q) { return bytes(q.scale) + bytes(q.inverse); };
  const int64_t copies = (job.cast.values != nullptr) + (job.cast.transposed != nullptr);
  gpu::launch({.name = "cast_tiles",
               .grid = grid,
               .block = cast::kThreads,
               .traffic = {.reads = x.nbytes() + bytes(pair.row_largest) +
                                    bytes(pair.column_largest) + (wants.factor.defined() ? 4 : 0),
                           .writes = copies * x.numel() + scales_of(rows) + scales_of(columns) +
                                     (kSums ? sums.nbytes() : 0)}},
              cast_tiles_kernel<T, Q, kSums>, job);
}

void run_tiles(const Tensor& x, TiledPair& pair, const QuantizeOptions& options,
               const QuantizeWants& wants, Tensor& sums_of_columns) {
  const int64_t M = x.size(0), N = x.size(1);
  const DType dtype_of_sums = wants.through.value_or(x.dtype());
  if (x.numel() == 0) {
    for (const Quantized* q : {&pair.rows, &pair.columns}) {
      for (const Tensor& each : {q->scale, q->inverse}) {
        if (each.defined() && each.numel() > 0) fill(each, 1);
      }
    }
    if (wants.sums) sums_of_columns = raw::zeros({N}, dtype_of_sums, x.device());
    return;
  }
  const dim3 grid(gpu::blocks(N, kTile), gpu::blocks(M, kTile));
  TS_CHECK_SHAPE(grid.y <= 65535, kTiles, "at most ", 65535 * kTile, " rows; got ", x);
  const Tensor sums = wants.sums ? raw::empty({int64_t{grid.y}, N}, kF32, x.device()) : Tensor();
  dispatch_floating(x.dtype(), kTiles, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      if (pair.scales == TileScales::kLines) find_lines<T>(x, pair, wants, grid);
      const auto launch = [&]<class Q>() {
        wants.sums ? launch_tiles<T, Q, true>(x, pair, options.power_of_two, wants, sums, grid)
                   : launch_tiles<T, Q, false>(x, pair, options.power_of_two, wants, sums, grid);
      };
      options.format == kF8E4M3 ? launch.template operator()<f8e4m3>()
                                : launch.template operator()<f8e5m2>();
    }
  });
  if (wants.sums) sums_of_columns = fold_sums(sums, dtype_of_sums);
}

bool is_vector(const ScaleTile& tile) {
  return tile == ScaleTile{1, kTile} || tile == ScaleTile{kTile, 1};
}
// Of the copy whose rows are (by rows) or columns are (by columns) summed.
bool fits_rows(const ScaleTile& tile) {
  return tile == ScaleTile::row() || tile == ScaleTile{1, kTile};
}
bool fits_columns(const ScaleTile& tile) {
  return tile == ScaleTile::column() || tile == ScaleTile{kTile, 1};
}

QuantizedPair quantize_both_cuda(const Tensor& given, const QuantizeOptions& rows,
                                 const QuantizeOptions& columns, const QuantizeWants& wants) {
  const bool pairs = fits_rows(rows.tile) && fits_columns(columns.tile) &&
                     is_vector(rows.tile) == is_vector(columns.tile) &&
                     rows.format == columns.format && rows.power_of_two == columns.power_of_two;
  TS_CHECK_AS(UnsupportedError, pairs, kTiles,
              "a GPU makes rows with columns and 1 x 128 with 128 x 1, of one format; asked for "
              "tiles of ",
              rows.tile.rows, " x ", rows.tile.columns, " and ", columns.tile.rows, " x ",
              columns.tile.columns, " (0: all)");
  const Tensor x = contiguous(given);
  TiledPair pair = pair_of(x, is_vector(rows.tile) ? TileScales::kVectors : TileScales::kLines,
                           rows, true, true);
  pair.rows.tile = rows.tile;
  pair.columns.tile = columns.tile;
  run_tiles(x, pair, rows, wants, pair.rows.sums);
  return {.rows = std::move(pair.rows), .columns = std::move(pair.columns)};
}

}  // namespace

Quantized quantize_tiles(const Tensor& x, const QuantizeOptions& options,
                         const QuantizeWants& wants) {
  const ScaleTile tile = options.tile;
  const bool squares = tile == ScaleTile{kTile, kTile};
  TS_CHECK_AS(
      UnsupportedError,
      squares || (fits_rows(tile) && !wants.by_columns) || (fits_columns(tile) && !wants.by_rows),
      kTiles,
      "a GPU's copy by rows has a scale for each row, 1 x 128 or 128 x 128, that by columns "
      "for each column, 128 x 1 or 128 x 128; asked for tiles of ",
      tile.rows, " x ", tile.columns, " (0: all)", wants.by_rows ? " by rows" : "",
      wants.by_columns ? " by columns" : "");
  Quantized result;
  if (!squares) {
    TiledPair pair = pair_of(x, is_vector(tile) ? TileScales::kVectors : TileScales::kLines,
                             options, wants.by_rows, wants.by_columns);
    Tensor sums;
    run_tiles(x, pair, options, wants, sums);
    result = std::move(wants.by_rows ? pair.rows : pair.columns);
    result.sums = sums;
  } else {
    TiledPair pair{.scales = TileScales::kSquares};
    const int64_t M = x.size(0), N = x.size(1), down = tiles_of(M), across = tiles_of(N);
    if (wants.by_rows) pair.rows.values = raw::empty({M, N}, options.format, x.device());
    pair.rows.scale = square_scales(down, across, false, x.device());
    pair.rows.inverse = square_scales(down, across, false, x.device());
    if (wants.by_columns) {
      pair.columns.transposed = raw::empty({N, M}, options.format, x.device());
      pair.columns.inverse = square_scales(down, across, true, x.device());
    }
    Tensor sums;
    run_tiles(x, pair, options, wants, sums);
    result = std::move(pair.rows);
    result.transposed = pair.columns.transposed;
    result.inverse_by_columns = pair.columns.inverse;
    result.sums = sums;
  }
  result.tile = tile;
  return result;
}

// Rounded once.
Tensor fold_sums(const Tensor& sums, DType dtype) {
  const Tensor all = sum(sums, {0}, false, kF32);
  return dtype == kF32 ? all : convert(all, dtype);
}

void register_cast_tiles() { cuda_kernel<quantize_both> = quantize_both_cuda; }

}  // namespace tessera::kernels
