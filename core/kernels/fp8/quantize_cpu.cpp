#include <tessera/core/kernels/fp8/quantize.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/fp8/amax.h>
#include <tessera/core/kernels/fp8/quantize_pieces.h>
#include <tessera/core/kernels/fp8/quantize_rows.h>
#include <tessera/core/kernels/fp8/rules.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

constexpr const char* kQuantize = "quantize";
constexpr const char* kFp8Matmul = "fp8_matmul";
// Rows that a thread takes at once. Never rows of two tiles.
constexpr int64_t kStrip = 32;
constexpr int64_t kPerThread = 32768;

int64_t pieces_of(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }

void check_dtype(const char* where, const Tensor& x) {
  TS_CHECK_DTYPE(x.dtype() == kF32 || x.dtype() == kBF16 || x.dtype() == kF16, where,
                 "expects f32, f16 or bf16; got ", x, "; convert with to(dtype)");
}

void check_device(const char* where, const Tensor& x) {
  TS_CHECK_AS(UnsupportedError, !x.device().is_cuda(), where, "runs on the CPU; got ", x,
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

void check_matrix(const Tensor& x, const QuantizeOptions& options) {
  check_dtype(kQuantize, x);
  TS_CHECK_DTYPE(is_fp8(options.format), kQuantize, "gives f8e4m3 or f8e5m2; asked for ",
                 options.format);
  TS_CHECK_SHAPE(x.dim() == 2, kQuantize, "expects a matrix; got ", x);
}
// Of what the CPU alone does.
void check_source(const Tensor& x, const QuantizeOptions& options) {
  check_matrix(x, options);
  check_device(kQuantize, x);
}

Tensor copy_of(const Tensor& scales) {
  const Tensor copy = raw::empty(scales.shape(), kF32, scales.device());
  copy_into(copy, scales);
  return copy;
}

// Largest magnitudes become scales, in place: contiguous f32.
void make_scales(const Tensor& largest, const QuantizeOptions& options) {
  float* const each = largest.data_as<float>();
  for (int64_t i = 0; i < largest.numel(); ++i) {
    each[i] = fp8_scale(each[i], options.format, options.power_of_two);
  }
}

// x by these scales, one a tile, which become the result's; undefined for meta.
Quantized narrowed(const Tensor& x, const QuantizeOptions& options, const Tensor& given) {
  const int64_t M = x.size(0), N = x.size(1);
  const QuantizedBlocks tiling(M, N, options.tile);
  Quantized result{.values = raw::empty({M, N}, options.format, x.device()),
                   .scale = given.defined() && !x.is_meta()
                                ? given
                                : raw::empty({tiling.down, tiling.across}, kF32, x.device()),
                   .inverse = raw::empty({tiling.down, tiling.across}, kF32, x.device()),
                   .tile = options.tile};
  if (x.is_meta()) return result;
  const Tensor source = contiguous(x);
  const int64_t row_bytes = N * size_of(x.dtype());
  const char* const from = static_cast<const char*>(source.data());
  float* const scales = result.scale.data_as<float>();
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
  uint32_t largest = 0;
  for (const QuantizeCounts& count : counts) {
    largest = std::max(largest, count.largest);
    result.saturated += count.saturated;
    result.underflown += count.underflown;
  }
  result.amax = std::bit_cast<float>(largest);
  return result;
}

// Bytes as bf16 numbers, [M, K] or [K, N] of the product. Scales that change along K go into the
// numbers (`inside`), others into the sums.
Tensor numbers_of(const Fp8Operand& operand, bool inside) {
  TS_CHECK(!inside || is_power_of_two(operand.matrix.inverse), kFp8Matmul,
           "scales that change along the sum must be powers of two, as other numbers are not "
           "exact in bf16; quantise with power_of_two");
  const Tensor numbers = widened(operand.matrix, kBF16, inside);
  return operand.transposed ? raw::transpose(numbers, 0, 1) : numbers;
}

// sums [M, N], times the scales that are not in the numbers: one a row and a column, each undefined
// where they are.
struct OutsideScales {
  Tensor by_row, by_column;                       // inverse, contiguous
  int64_t rows_a_scale = 0, columns_a_scale = 0;  // tiles of several have a scale each
};
void scale_into(const Tensor& result, const Tensor& sums, const OutsideScales& scales) {
  const int64_t M = sums.size(0), N = sums.size(1);
  if (sums.numel() == 0) return;
  const auto is_one = [](const Tensor& each) { return !each.defined() || each.numel() <= 1; };
  const auto first = [](const Tensor& each) {
    return each.defined() && each.numel() > 0 ? *each.data_as<float>() : 1.0f;
  };
  const auto spread = [&](const Tensor& each, int64_t tile, int64_t size) {
    std::vector<float> all;
    if (is_one(each)) return all;
    all.resize(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) {
      all[static_cast<size_t>(i)] = each.data_as<float>()[i / std::max<int64_t>(tile, 1)];
    }
    return all;
  };
  const std::vector<float> rows = spread(scales.by_row, scales.rows_a_scale, M);
  const std::vector<float> columns = spread(scales.by_column, scales.columns_a_scale, N);
  const float row = first(scales.by_row), column = first(scales.by_column);
  const DType dtype = result.dtype();
  const float* const from = sums.data_as<float>();
  auto* const to = static_cast<char*>(result.data());
  parallel_for(M, std::max<int64_t>(1, kPerThread / N), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const float scale = rows.empty() ? row : rows[static_cast<size_t>(m)];
      TS_SIMD_CALL(scale_sums, from + m * N, N, columns.empty() ? scale * column : scale,
                   columns.empty() ? nullptr : columns.data(), dtype, to + m * N * size_of(dtype));
    }
  });
}

// The dimensions of the operands that become M, K and K, N.
struct ProductShape {
  int64_t M, K, N;
  ProductShape(const Fp8Operand& a, const Fp8Operand& b)
      : M(a.transposed ? a.matrix.columns() : a.matrix.rows()),
        K(a.transposed ? a.matrix.rows() : a.matrix.columns()),
        N(b.transposed ? b.matrix.rows() : b.matrix.columns()) {
    TS_CHECK_SHAPE((b.transposed ? b.matrix.columns() : b.matrix.rows()) == K, kFp8Matmul,
                   "inner dimensions differ: ", a.matrix.any(), " and ", b.matrix.any());
    TS_CHECK_DEVICE(a.matrix.device() == b.matrix.device(), kFp8Matmul,
                    "expects both on one device; got ", a.matrix.any(), " and ", b.matrix.any());
  }
};
void check_product_dtype(DType dtype) {
  TS_CHECK_DTYPE(dtype == kF32 || dtype == kBF16 || dtype == kF16, kFp8Matmul,
                 "gives f32, f16 or bf16; asked for ", dtype);
}
OutsideScales outside_scales(const Fp8Operand& a, bool a_inside, const Fp8Operand& b,
                             bool b_inside) {
  const ScaleTile &left = a.matrix.tile, &right = b.matrix.tile;
  return {.by_row = a_inside ? Tensor() : contiguous(a.matrix.inverse),
          .by_column = b_inside ? Tensor() : contiguous(b.matrix.inverse),
          .rows_a_scale = a.transposed ? left.columns : left.rows,
          .columns_a_scale = b.transposed ? right.rows : right.columns};
}

}  // namespace

float fp8_scale(float amax, DType format, bool power_of_two, int margin) {
  const double largest = format == kF8E4M3 ? rules::kLargestOf<f8e4m3> : rules::kLargestOf<f8e5m2>;
  return rules::scale_of(amax, std::ldexp(largest, -margin), power_of_two);
}

Quantized quantize(const Tensor& x, const QuantizeOptions& options, const Tensor& scale,
                   const QuantizeWants& wants) {
  check_matrix(x, options);
  TS_CHECK_SHAPE(!scale.defined() || (scale.numel() == 1 && scale.dtype() == kF32 &&
                                      options.tile == ScaleTile::tensor()),
                 kQuantize, "expects one f32 as the scale of the whole matrix; got ", scale);
  if (x.device().is_cuda()) {
    return on_cuda<kernels::quantize>(kQuantize, x.device(), x, options, scale, wants);
  }
  if (wants.through || wants.factor.defined()) {
    Tensor before = x;
    if (wants.factor.defined()) before = binary<fn::Mul>(x, convert(wants.factor, x.dtype()));
    if (wants.through) before = convert(before, *wants.through);
    return quantize(before, options, scale, {.sums = wants.sums});
  }
  if (wants.sums) {
    Quantized result = quantize(x, options, scale);
    result.sums = sum(x, {0}, false, x.dtype());
    return result;
  }
  if (x.is_meta()) return narrowed(x, options, {});
  if (scale.defined()) return narrowed(x, options, copy_of(raw::view(scale, {1, 1})));
  const Tensor source = contiguous(x);
  Tensor scales = largest_of_tiles(source, options.tile);
  make_scales(scales, options);
  return narrowed(source, options, scales);
}

QuantizedPair quantize_both(const Tensor& x, const QuantizeOptions& rows,
                            const QuantizeOptions& columns, const QuantizeWants& wants) {
  check_matrix(x, rows);
  check_matrix(x, columns);
  if (x.device().is_cuda()) {
    return on_cuda<kernels::quantize_both>(kQuantize, x.device(), x, rows, columns, wants);
  }
  QuantizeWants of_columns = wants;
  of_columns.sums = false;
  return {.rows = quantize(x, rows, {}, wants), .columns = quantize(x, columns, {}, of_columns)};
}

namespace {

void check_gelu(const Tensor& x) {
  TS_CHECK_DTYPE(is_low_precision(x.dtype()), kQuantize, "expects f16 or bf16; got ", x);
  TS_CHECK_SHAPE(x.dim() == 2, kQuantize, "expects a matrix; got ", x);
}

}  // namespace

Quantized quantize_gelu(const Tensor& x, bool tanh_form, const QuantizeOptions& options,
                        const Tensor& scale, const QuantizeWants& wants) {
  check_gelu(x);
  if (x.device().is_cuda()) {
    return on_cuda<kernels::quantize_gelu>(kQuantize, x.device(), x, tanh_form, options, scale,
                                           wants);
  }
  return quantize(tanh_form ? unary<fn::GeluTanh>(x) : unary<fn::Gelu>(x), options, scale, wants);
}

Quantized quantize_gelu_grad(const Tensor& dy, const Tensor& x, bool tanh_form,
                             const QuantizeOptions& options, const Tensor& scale,
                             const QuantizeWants& wants) {
  check_gelu(x);
  TS_CHECK_SHAPE(dy.shape() == x.shape() && dy.dtype() == x.dtype(), kQuantize,
                 "expects a gradient like ", x, "; got ", dy);
  if (x.device().is_cuda()) {
    return on_cuda<kernels::quantize_gelu_grad>(kQuantize, x.device(), dy, x, tanh_form, options,
                                                scale, wants);
  }
  return quantize(tanh_form ? binary<fn::GeluTanhGrad>(dy, x) : binary<fn::GeluGrad>(dy, x),
                  options, scale, wants);
}

Quantized quantize_by(const Tensor& x, const QuantizeOptions& options, const Tensor& scales) {
  check_source(x, options);
  const QuantizedBlocks tiling(x.size(0), x.size(1), options.tile);
  TS_CHECK_SHAPE(scales.dtype() == kF32 && scales.shape() == Shape({tiling.down, tiling.across}),
                 kQuantize, "expects f32[", tiling.down, ", ", tiling.across,
                 "] as the scales of the tiles; got ", scales);
  return narrowed(x, options, copy_of(scales));
}

Tensor largest_of_tiles(const Tensor& x, const ScaleTile& tile) {
  check_source(x, {.tile = tile});
  const QuantizedBlocks tiling(x.size(0), x.size(1), tile);
  const Tensor result = raw::empty({tiling.down, tiling.across}, kF32, x.device());
  if (x.is_meta()) return result;
  const Tensor source = contiguous(x);
  const int64_t row_bytes = tiling.N * size_of(x.dtype());
  const char* const from = static_cast<const char*>(source.data());
  std::vector<uint32_t> most(static_cast<size_t>(tiling.strips() * tiling.across), 0);
  tiling.for_strips([&](int64_t strip, int64_t, int64_t first, int64_t last) {
    uint32_t* const row = most.data() + strip * tiling.across;
    for (int64_t m = first; m < last; ++m) {
      if (tiling.columns == 1) {
        TS_SIMD_CALL(largest_magnitudes, x.dtype(), from + m * row_bytes, tiling.N, row);
        continue;
      }
      for (int64_t t = 0; t < tiling.across; ++t) {
        const int64_t n = t * tiling.columns;
        const uint32_t here = TS_SIMD_CALL(largest_magnitude, x.dtype(),
                                           from + m * row_bytes + n * size_of(x.dtype()),
                                           std::min(tiling.columns, tiling.N - n));
        row[t] = std::max(row[t], here);
      }
    }
  });
  float* const largest = result.data_as<float>();
  for (int64_t tile_row = 0; tile_row < tiling.down; ++tile_row) {
    for (int64_t t = 0; t < tiling.across; ++t) {
      uint32_t bits = 0;
      for (int64_t s = 0; s < tiling.strips_of_a_tile; ++s) {
        const int64_t strip = tile_row * tiling.strips_of_a_tile + s;
        bits = std::max(bits, most[static_cast<size_t>(strip * tiling.across + t)]);
      }
      largest[tile_row * tiling.across + t] = std::bit_cast<float>(bits);
    }
  }
  return result;
}

void merge_largest(const Tensor& largest, const Tensor& other) {
  TS_CHECK_SHAPE(largest.shape() == other.shape(), kQuantize, "expects largest magnitudes of ",
                 largest, "; got ", other);
  float* const to = largest.data_as<float>();
  const float* const from = other.data_as<float>();
  for (int64_t i = 0; i < largest.numel(); ++i) to[i] = larger_magnitude(to[i], from[i]);
}

float larger_magnitude(float a, float b) {
  return std::bit_cast<float>(std::max(std::bit_cast<uint32_t>(a), std::bit_cast<uint32_t>(b)));
}

Tensor scales_of(const Tensor& largest, const QuantizeOptions& options) {
  const Tensor scales = copy_of(largest);
  make_scales(scales, options);
  return scales;
}

Quantized rows_of(const Quantized& q, int64_t first, int64_t count) {
  const int64_t rows = q.tile.rows;
  TS_CHECK_SHAPE(rows == 0 || first % rows == 0, kQuantize, "pieces begin where tiles of ", rows,
                 " rows do; got row ", first);
  const auto piece = [&](const Tensor& scales) {
    return rows == 0 || !scales.defined()
               ? scales
               : raw::narrow(scales, 0, first / rows, pieces_of(count, rows));
  };
  return {.values = raw::narrow(q.values, 0, first, count),
          .scale = piece(q.scale),
          .inverse = piece(q.inverse),
          .tile = q.tile};
}

Tensor dequantize(const Quantized& q, DType dtype) {
  check_device("dequantize", q.values);
  TS_CHECK_DTYPE(dtype == kF32 || dtype == kBF16 || dtype == kF16, "dequantize",
                 "gives f32, f16 or bf16; asked for ", dtype);
  return widened(q, dtype, true);
}

Tensor fp8_matmul(const Fp8Operand& a, const Fp8Operand& b, DType dtype,
                  const Fp8Product& product) {
  check_product_dtype(dtype);
  const Device& device = a.matrix.device();
  const ProductShape shape(a, b);
  TS_CHECK_SHAPE(!product.bias.defined() ||
                     (product.bias.shape() == Shape({shape.N}) && product.bias.dtype() == dtype),
                 kFp8Matmul, "expects a bias of ", dtype, "[", shape.N, "]; got ", product.bias);
  if (device.is_cuda()) {
    return on_cuda<kernels::fp8_matmul>(kFp8Matmul, device, a, b, dtype, product);
  }
  const Tensor result = raw::empty({shape.M, shape.N}, dtype, a.matrix.values.device());
  if (result.is_meta() || result.numel() == 0) return result;
  const bool a_inside = differs(a.matrix, a.transposed ? 0 : 1);
  const bool b_inside = differs(b.matrix, b.transposed ? 1 : 0);
  const Tensor sums = dtype == kF32 ? result : raw::empty(result.shape(), kF32, result.device());
  matmul_into(sums, numbers_of(a, a_inside), numbers_of(b, b_inside), false);
  scale_into(result, sums, outside_scales(a, a_inside, b, b_inside));
  if (product.bias.defined()) binary_into<fn::Add>(result, result, product.bias);
  return result;
}

void Fp8Sums::add(const Fp8Operand& a, const Fp8Operand& b) {
  const ProductShape shape(a, b);
  // Of a last piece that is one tile the scales would be outside; those of the others are not.
  const auto tiled = [](int64_t along_k) { return along_k != 0; };
  const bool a_inside = tiled(a.transposed ? a.matrix.tile.rows : a.matrix.tile.columns);
  const bool b_inside = tiled(b.transposed ? b.matrix.tile.columns : b.matrix.tile.rows);
  const bool begins = !sums_.defined();
  if (begins) {
    sums_ = raw::empty({shape.M, shape.N}, kF32, a.matrix.values.device());
    const OutsideScales scales = outside_scales(a, a_inside, b, b_inside);
    by_row_ = scales.by_row;
    by_column_ = scales.by_column;
    rows_a_scale_ = scales.rows_a_scale;
    columns_a_scale_ = scales.columns_a_scale;
  }
  matmul_into(sums_, numbers_of(a, a_inside), numbers_of(b, b_inside), !begins);
}

Tensor Fp8Sums::result(DType dtype) const {
  check_product_dtype(dtype);
  TS_CHECK(sums_.defined(), kFp8Matmul, "has no sums before the first add()");
  const Tensor result = dtype == kF32 ? sums_ : raw::empty(sums_.shape(), dtype, sums_.device());
  scale_into(result, sums_, {by_row_, by_column_, rows_a_scale_, columns_a_scale_});
  return result;
}

float largest_magnitude_of(const Tensor& x) {
  constexpr const char* kWhere = "largest_magnitude";
  check_dtype(kWhere, x);
  check_device(kWhere, x);
  if (x.is_meta() || x.numel() == 0) return 0;
  const Tensor source = contiguous(x);
  const auto* const from = source.data_as<char>();
  const int64_t pieces = pieces_of(x.numel(), kPerThread);
  std::vector<uint32_t> most(static_cast<size_t>(pieces), 0);
  parallel_for(pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * kPerThread;
      most[static_cast<size_t>(i)] =
          TS_SIMD_CALL(largest_magnitude, x.dtype(), from + first * size_of(x.dtype()),
                       std::min(kPerThread, x.numel() - first));
    }
  });
  return std::bit_cast<float>(*std::max_element(most.begin(), most.end()));
}

void raise_to_largest(const Tensor& largest, const Tensor& x) {
  constexpr const char* kWhere = "largest_magnitude";
  check_dtype(kWhere, x);
  on_cuda<kernels::raise_to_largest>(kWhere, x.device(), largest, x);
}

}  // namespace tessera::kernels
