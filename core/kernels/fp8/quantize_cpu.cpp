#include <tessera/core/kernels/fp8/quantize.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/fp8/quantize_rows.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/parallel.h>
#include <tessera/core/raw_views.h>

namespace tessera::kernels {
namespace {

constexpr const char* kQuantize = "quantize";
constexpr const char* kFloat8Matmul = "float8_matmul";
// Rows that a thread takes at once. Never rows of two tiles.
constexpr int64_t kStrip = 32;
constexpr int64_t kPerThread = 32768;

int64_t pieces_of(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }

void check_device(const char* where, const Tensor& x) {
  TS_CHECK_AS(UnsupportedError, !x.device().is_cuda(), where,
              "this build has float8 products on the CPU alone; got ", x,
              "; train in bf16 on the GPU (nothing else was put in its place)");
}

// The matrix cut into tiles, and into strips of rows.
struct QuantizedBlocks {
  int64_t M, N, rows, columns;
  int64_t down, across;      // tiles
  int64_t strips_of_a_tile;  // of rows
  QuantizedBlocks(int64_t m, int64_t n, const ScaleTile& tile)
      : M(m),
        N(n),
        rows(tile.rows > 0 ? std::min(tile.rows, std::max<int64_t>(m, 1))
                           : std::max<int64_t>(m, 1)),
        columns(tile.columns > 0 ? tile.columns : std::max<int64_t>(n, 1)),
        down(pieces_of(m, rows)),
        across(pieces_of(n, columns)),
        strips_of_a_tile(pieces_of(rows, kStrip)) {}

  int64_t strips() const { return down * strips_of_a_tile; }
  // Calls f(strip, row of tiles, first row, last row) for all strips, on several threads.
  template <class F>
  void for_strips(const F& f) const {
    // 32768 numbers at least go to a thread at once, as in elementwise kernels.
    const int64_t grain =
        std::max<int64_t>(1, kPerThread / (std::min(rows, kStrip) * std::max<int64_t>(N, 1)));
    parallel_for(strips(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t strip = begin; strip < end; ++strip) {
        const int64_t tile = strip / strips_of_a_tile;
        const int64_t first = tile * rows + strip % strips_of_a_tile * kStrip;
        const int64_t last = std::min({first + kStrip, (tile + 1) * rows, M});
        if (first < last) f(strip, tile, first, last);
      }
    });
  }
};

// Whether the scales differ along the dimension of K.
bool differs(const Quantized& q, int dim) { return q.inverse.size(dim) > 1; }

bool is_power_of_two(const Tensor& x) {
  const Tensor all = contiguous(x);
  const float* const values = all.data_as<float>();
  return std::all_of(values, values + all.numel(), [](float value) {
    int exponent = 0;
    return std::frexp(value, &exponent) == 0.5f;
  });
}

// bf16 numbers of a quantised matrix, with its scales or without.
Tensor widened(const Quantized& q, DType dtype, bool with_scales) {
  const int64_t M = q.values.size(0), N = q.values.size(1);
  const Tensor result = raw::empty({M, N}, dtype, q.values.device());
  if (result.is_meta() || result.numel() == 0) return result;
  const Tensor values = contiguous(q.values), inverse = contiguous(q.inverse);
  const float* const scales = inverse.data_as<float>();
  const QuantizedBlocks tiling(M, N, with_scales ? q.tile : ScaleTile::tensor());
  auto* const from = static_cast<uint8_t*>(values.data());
  auto* const to = static_cast<char*>(result.data());
  tiling.for_strips([&](int64_t, int64_t tile, int64_t first, int64_t last) {
    for (int64_t m = first; m < last; ++m) {
      QuantizeRun run{.dtype = dtype, .q = from + m * N, .format = q.values.dtype(), .n = N};
      const float* const row = scales + tile * tiling.across;
      char* const y = to + m * N * size_of(dtype);
      if (!with_scales || tiling.across == 1) {
        run.scale = with_scales ? *row : 1;
        TS_SIMD_CALL(dequantize_run, run, y);
      } else if (tiling.columns == 1) {
        run.scales = row;
        TS_SIMD_CALL(dequantize_run, run, y);
      } else {
        for (int64_t t = 0; t < tiling.across; ++t) {
          const int64_t n = t * tiling.columns;
          run.q = from + m * N + n;
          run.n = std::min(tiling.columns, N - n);
          run.scale = row[t];
          TS_SIMD_CALL(dequantize_run, run, y + n * size_of(dtype));
        }
      }
    }
  });
  return result;
}

}  // namespace

float float8_scale(float amax, DType format, bool power_of_two, int margin) {
  if (!(amax > 0) || !std::isfinite(amax)) return 1;
  const double largest = format == kF8E4M3 ? 448 : 57344;
  const double wide = std::ldexp(largest / static_cast<double>(amax), -margin);
  using Limits = std::numeric_limits<float>;
  const float scale = static_cast<float>(std::clamp<double>(
      wide, static_cast<double>(Limits::min()), static_cast<double>(Limits::max())));
  // Down to a power of two: without the mantissa.
  return power_of_two ? std::bit_cast<float>(std::bit_cast<uint32_t>(scale) & 0xff800000u) : scale;
}

Quantized quantize(const Tensor& x, const QuantizeOptions& options, const Tensor& scale) {
  TS_CHECK_DTYPE(x.dtype() == kF32 || x.dtype() == kBF16 || x.dtype() == kF16, kQuantize,
                 "expects f32, f16 or bf16; got ", x, "; convert with to(dtype)");
  TS_CHECK_DTYPE(is_float8(options.format), kQuantize, "gives f8e4m3 or f8e5m2; asked for ",
                 options.format);
  TS_CHECK_SHAPE(x.dim() == 2, kQuantize, "expects a matrix; got ", x);
  TS_CHECK_SHAPE(!scale.defined() || (scale.numel() == 1 && scale.dtype() == kF32 &&
                                      options.tile == ScaleTile::tensor()),
                 kQuantize, "expects one f32 as the scale of the whole matrix; got ", scale);
  check_device(kQuantize, x);
  const int64_t M = x.size(0), N = x.size(1);
  const QuantizedBlocks tiling(M, N, options.tile);
  Quantized result{.values = raw::empty({M, N}, options.format, x.device()),
                   .scale = raw::empty({tiling.down, tiling.across}, kF32, x.device()),
                   .inverse = raw::empty({tiling.down, tiling.across}, kF32, x.device()),
                   .tile = options.tile};
  if (x.is_meta()) return result;
  const Tensor source = contiguous(x);
  const int64_t row_bytes = N * size_of(x.dtype());
  const char* const from = static_cast<const char*>(source.data());
  float* const scales = result.scale.data_as<float>();
  uint32_t largest = 0;

  if (scale.defined()) {
    std::fill_n(scales, result.scale.numel(), *scale.data_as<float>());
  } else {
    std::vector<uint32_t> most(static_cast<size_t>(tiling.strips() * tiling.across), 0);
    tiling.for_strips([&](int64_t strip, int64_t, int64_t first, int64_t last) {
      uint32_t* const row = most.data() + strip * tiling.across;
      for (int64_t m = first; m < last; ++m) {
        if (tiling.columns == 1) {
          TS_SIMD_CALL(largest_magnitudes, x.dtype(), from + m * row_bytes, N, row);
          continue;
        }
        for (int64_t t = 0; t < tiling.across; ++t) {
          const int64_t n = t * tiling.columns;
          const uint32_t here = TS_SIMD_CALL(largest_magnitude, x.dtype(),
                                             from + m * row_bytes + n * size_of(x.dtype()),
                                             std::min(tiling.columns, N - n));
          row[t] = std::max(row[t], here);
        }
      }
    });
    for (int64_t tile = 0; tile < tiling.down; ++tile) {
      for (int64_t t = 0; t < tiling.across; ++t) {
        uint32_t bits = 0;
        for (int64_t s = 0; s < tiling.strips_of_a_tile; ++s) {
          const int64_t strip = tile * tiling.strips_of_a_tile + s;
          bits = std::max(bits, most[static_cast<size_t>(strip * tiling.across + t)]);
        }
        scales[tile * tiling.across + t] =
            float8_scale(std::bit_cast<float>(bits), options.format, options.power_of_two);
      }
    }
  }
  float* const inverses = result.inverse.data_as<float>();
  for (int64_t i = 0; i < result.scale.numel(); ++i) inverses[i] = 1 / scales[i];

  std::vector<QuantizeCounts> counts(static_cast<size_t>(tiling.strips()));
  auto* const to = static_cast<uint8_t*>(result.values.data());
  tiling.for_strips([&](int64_t strip, int64_t tile, int64_t first, int64_t last) {
    QuantizeCounts& count = counts[static_cast<size_t>(strip)];
    const float* const row = scales + tile * tiling.across;
    for (int64_t m = first; m < last; ++m) {
      QuantizeRun run{.x = from + m * row_bytes,
                      .dtype = x.dtype(),
                      .q = to + m * N,
                      .format = options.format,
                      .n = N};
      if (tiling.across == 1) {
        run.scale = *row;
        TS_SIMD_CALL(quantize_run, run, count);
      } else if (tiling.columns == 1) {
        run.scales = row;
        TS_SIMD_CALL(quantize_run, run, count);
      } else {
        for (int64_t t = 0; t < tiling.across; ++t) {
          const int64_t n = t * tiling.columns;
          run.x = from + m * row_bytes + n * size_of(x.dtype());
          run.q = to + m * N + n;
          run.n = std::min(tiling.columns, N - n);
          run.scale = row[t];
          TS_SIMD_CALL(quantize_run, run, count);
        }
      }
    }
  });
  for (const QuantizeCounts& count : counts) {
    largest = std::max(largest, count.largest);
    result.saturated += count.saturated;
    result.underflown += count.underflown;
  }
  result.amax = std::bit_cast<float>(largest);
  return result;
}

Tensor dequantize(const Quantized& q, DType dtype) {
  check_device("dequantize", q.values);
  TS_CHECK_DTYPE(dtype == kF32 || dtype == kBF16 || dtype == kF16, "dequantize",
                 "gives f32, f16 or bf16; asked for ", dtype);
  return widened(q, dtype, true);
}

Tensor float8_matmul(const Float8Operand& a, const Float8Operand& b, DType dtype) {
  const Quantized &left = a.matrix, &right = b.matrix;
  check_device(kFloat8Matmul, left.values);
  TS_CHECK_DTYPE(dtype == kF32 || dtype == kBF16 || dtype == kF16, kFloat8Matmul,
                 "gives f32, f16 or bf16; asked for ", dtype);
  // The dimensions of the operands that become M, K and K, N.
  const int a_rows = a.transposed ? 1 : 0, b_columns = b.transposed ? 0 : 1;
  const int64_t M = left.values.size(a_rows), K = left.values.size(1 - a_rows);
  const int64_t N = right.values.size(b_columns);
  TS_CHECK_SHAPE(right.values.size(1 - b_columns) == K, kFloat8Matmul,
                 "inner dimensions differ: ", left.values, " and ", right.values);
  if (left.values.is_meta()) return raw::empty({M, N}, dtype, left.values.device());

  // Scales that change along K go into the numbers, others into the sums.
  const auto operand = [&](const Quantized& q, int inner, bool transposed) {
    const bool inside = differs(q, inner);
    TS_CHECK(!inside || is_power_of_two(q.inverse), kFloat8Matmul,
             "scales that change along the sum must be powers of two, as other numbers are not "
             "exact in bf16; quantise with power_of_two");
    const Tensor numbers = widened(q, kBF16, inside);
    return transposed ? raw::transpose(numbers, 0, 1) : numbers;
  };
  const Tensor a_numbers = operand(left, 1 - a_rows, a.transposed);
  const Tensor b_numbers = operand(right, 1 - b_columns, b.transposed);
  const auto outside = [](const Quantized& q, int inner) {
    return differs(q, inner) ? Tensor() : contiguous(q.inverse);
  };
  const Tensor by_row = outside(left, 1 - a_rows), by_column = outside(right, 1 - b_columns);
  const auto first = [](const Tensor& scales) {
    return scales.defined() && scales.numel() > 0 ? *scales.data_as<float>() : 1.0f;
  };
  const bool one_row_scale = !by_row.defined() || by_row.numel() <= 1;
  const bool one_column_scale = !by_column.defined() || by_column.numel() <= 1;
  // Tiles of several rows (blocks that are whole along K) have a scale each.
  const auto spread = [](const Tensor& scales, int64_t tile, int64_t size) {
    std::vector<float> all(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) {
      all[static_cast<size_t>(i)] = scales.data_as<float>()[i / std::max<int64_t>(tile, 1)];
    }
    return all;
  };

  const Tensor result = raw::empty({M, N}, dtype, left.values.device());
  if (result.numel() == 0) return result;
  const Tensor sums = dtype == kF32 ? result : raw::empty({M, N}, kF32, left.values.device());
  matmul_into(sums, a_numbers, b_numbers, false);
  std::vector<float> rows, columns;
  if (!one_row_scale) rows = spread(by_row, a.transposed ? left.tile.columns : left.tile.rows, M);
  if (!one_column_scale) {
    columns = spread(by_column, b.transposed ? right.tile.rows : right.tile.columns, N);
  }
  const float row = first(by_row), column = first(by_column);
  const float* const from = sums.data_as<float>();
  auto* const to = static_cast<char*>(result.data());
  parallel_for(M, std::max<int64_t>(1, kPerThread / N), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const float scale = one_row_scale ? row : rows[static_cast<size_t>(m)];
      TS_SIMD_CALL(scale_sums, from + m * N, N, one_column_scale ? scale * column : scale,
                   one_column_scale ? nullptr : columns.data(), dtype, to + m * N * size_of(dtype));
    }
  });
  return result;
}

}  // namespace tessera::kernels
