#include <tessera/core/kernels/quantize/packed_weight.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/scratch.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/fp8/quantize_rows.h>
#include <tessera/core/kernels/gemm/gemm.h>
#include <tessera/core/kernels/gemm/int8_rows.h>
#include <tessera/core/kernels/quantize/packed_rows.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

constexpr const char* kPack = "pack";
constexpr const char* kUnpack = "unpack";
constexpr const char* kPackedProduct = "packed_product";
constexpr int64_t kNestedBlock = 256;
constexpr int64_t kPerThread = 32768;  // numbers at least, as in elementwise kernels
// Unpacked at once by a thread: half of a core's L2, so that the product finds it there.
constexpr int64_t kTileBytes = 512 * 1024;
// Rows of a weight whose products are added up at once, for the gradient of x.
constexpr int64_t kSumRows = 2048;

int64_t pieces_of(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }

// The quantiles of a normal distribution that bitsandbytes has, -1 and 1 at the ends.
constexpr std::array<float, 16> kNf4Codes = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};
// A sign, two bits of exponent and one of fraction, the largest of them 1.
constexpr std::array<float, 16> kFp4Codes = {
    0.0f / 12,  0.0625f / 12, 8.0f / 12,  12.0f / 12,    4.0f / 12,  6.0f / 12,
    2.0f / 12,  3.0f / 12,    0.0f / 12,  -0.0625f / 12, -8.0f / 12, -12.0f / 12,
    -4.0f / 12, -6.0f / 12,   -2.0f / 12, -3.0f / 12,
};

// How a number finds its code.
struct CodeTable {
  std::array<float, 15> bounds;   // in the middle between neighbours
  std::array<uint8_t, 16> order;  // codes, ascending by number; of two zeros the first
};
CodeTable table_of(const std::array<float, 16>& codes) {
  CodeTable table{};
  std::iota(table.order.begin(), table.order.end(), uint8_t{0});
  std::ranges::stable_sort(table.order, [&](uint8_t a, uint8_t b) { return codes[a] < codes[b]; });
  for (size_t i = 0; i < table.bounds.size(); ++i) {
    table.bounds[i] = (codes[table.order[i]] + codes[table.order[i + 1]]) / 2;
  }
  return table;
}
const std::array<float, 16>& codes_array(PackedFormat format) {
  return format == PackedFormat::kNf4 ? kNf4Codes : kFp4Codes;
}

// Signed numbers with an exponent of variable length (Dettmers 2015,
// https://arxiv.org/abs/1511.04561): for each power of ten, one bit more of fraction.
std::array<float, 256> make_dynamic_map() {
  constexpr int kPowers = 7;
  std::array<float, 256> map{};
  size_t count = 0;
  for (int power = 0; power < kPowers; ++power) {
    const Tensor ends = raw::linspace(0.1, 1, (int64_t{1} << power) + 1, kF32);
    const float* const end = ends.data_as<float>();
    const auto unit = static_cast<float>(std::pow(10.0, power - (kPowers - 1)));
    for (int64_t i = 0; i + 1 < ends.numel(); ++i) {
      const float number = unit * ((end[i] + end[i + 1]) / 2);
      map[count++] = number;
      map[count++] = -number;
    }
  }
  map[count++] = 0;
  map[count++] = 1;
  std::ranges::sort(map);
  return map;
}
const std::array<float, 256>& dynamic_map_array() {
  static const std::array<float, 256> map = make_dynamic_map();
  return map;
}

// bitsandbytes looks numbers of -1..1 up in 65536 steps, and the steps next to 0 are wider than the
// smallest numbers of the map: some are never used.
const std::vector<uint8_t>& dynamic_steps() {
  static const std::vector<uint8_t> steps = [] {
    const std::array<float, 256>& map = dynamic_map_array();
    std::vector<uint8_t> nearest(65536);
    size_t code = 0;
    for (size_t i = 0; i < nearest.size(); ++i) {
      const float value = static_cast<float>(i) / 32767.5f - 1;
      while (code < 255 && value > (map[code] + map[code + 1]) / 2) ++code;
      nearest[i] = static_cast<uint8_t>(code);
    }
    return nearest;
  }();
  return steps;
}

void check_device(const char* where, const Tensor& x) {
  TS_CHECK_AS(UnsupportedError, !x.device().is_cuda(), where,
              "packed weights are read on the CPU; got ", x,
              ", and there is no kernel for a GPU; keep the model on the CPU, or in 16 bits");
}
void check_dtype(const char* where, const char* what, DType dtype) {
  TS_CHECK_DTYPE(dtype == kF32 || dtype == kBF16 || dtype == kF16, where, what,
                 " must be f32, bf16 or f16; got ", dtype);
}
void check_options(const PackOptions& options) {
  if (options.format == PackedFormat::kInt8) {
    TS_CHECK_AS(UnsupportedError, !options.double_quantize, kPack,
                "int8 has one scale a row, which is not quantized; double_quantize is for nf4 and "
                "fp4");
    return;
  }
  TS_CHECK(options.block_size >= 32 && options.block_size <= 4096 &&
               std::has_single_bit(static_cast<uint64_t>(options.block_size)),
           kPack, "a block has 32, 64, 128, 256, 512, 1024, 2048 or 4096 numbers; got ",
           options.block_size);
}

float magnitude(uint32_t bits) {  // NaN as one value, whatever its bits were
  const float value = std::bit_cast<float>(bits);
  return std::isnan(value) ? std::numeric_limits<float>::quiet_NaN() : value;
}
const char* at(const Tensor& x, int64_t index) {
  return static_cast<const char*>(x.data()) + index * size_of(x.dtype());
}

void pack_rows(const Tensor& weight, const PackedWeight& packed) {
  auto* const bytes = packed.values.data_as<uint8_t>();
  float* const absmax = packed.absmax.data_as<float>();
  const int64_t K = packed.in_features;
  parallel_for(packed.out_features, std::max<int64_t>(1, kPerThread / std::max<int64_t>(K, 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) {
                   PackRun run{.x = at(weight, row * K), .dtype = weight.dtype(), .n = K};
                   absmax[row] = magnitude(TS_SIMD_CALL(largest_magnitude, run.dtype, run.x, K));
                   run.factor = 127.0f / absmax[row];
                   TS_SIMD_CALL(bytes_of_run, run, bytes + row * K);
                 }
               });
}

void pack_blocks(const Tensor& weight, const PackedWeight& packed, float* absmax) {
  constexpr float kLeast = 1e-38f;  // what a scale is at least, where it divides
  auto* const bytes = packed.values.data_as<uint8_t>();
  const CodeTable table = table_of(codes_array(packed.format));
  const int64_t size = packed.numel(), block = packed.block_size;
  const auto clamped = [](float value) { return value < kLeast ? kLeast : value; };
  parallel_for(pieces_of(size, block), std::max<int64_t>(1, kPerThread / block),
               [&](int64_t begin, int64_t end) {
                 std::array<uint8_t, 4096> codes;
                 for (int64_t b = begin; b < end; ++b) {
                   const int64_t first = b * block, count = std::min(block, size - first);
                   PackRun run{.x = at(weight, first),
                               .dtype = weight.dtype(),
                               .n = count,
                               .bounds = table.bounds.data(),
                               .order = table.order.data()};
                   const float largest =
                       magnitude(TS_SIMD_CALL(largest_magnitude, run.dtype, run.x, count));
                   run.divides = count < block;
                   run.factor = run.divides ? clamped(largest) : 1 / clamped(largest);
                   absmax[b] = run.divides ? run.factor : largest;
                   TS_SIMD_CALL(codes_of_run, run, codes.data());
                   // A half byte that is left over has the code of 0, which both formats pad with.
                   const auto n = static_cast<size_t>(count);
                   if (count % 2 != 0) codes[n] = packed.format == PackedFormat::kNf4 ? 7 : 0;
                   for (size_t i = 0; i < n; i += 2) {
                     bytes[static_cast<size_t>(first) / 2 + i / 2] =
                         static_cast<uint8_t>(codes[i] << 4 | codes[i + 1]);
                   }
                 }
               });
}

// ---- Reading ------------------------------------------------------------------------------------

// A weight whose parts lie in this order in memory.
struct PackedView {
  explicit PackedView(const char* where, const PackedWeight& weight)
      : format(weight.format), K(weight.in_features), block(weight.block_size) {
    for (const Tensor* part : {&weight.values, &weight.absmax}) check_device(where, *part);
    const bool is_int8 = format == PackedFormat::kInt8;
    TS_CHECK_DTYPE(weight.values.dtype() == kU8, where, "packed numbers are u8; got ",
                   weight.values);
    const DType scales = weight.is_nested() ? kU8 : kF32;
    TS_CHECK_DTYPE(weight.absmax.dtype() == scales, where, "scales must be ", scales, "; got ",
                   weight.absmax, "; convert a model's dtype before it is quantized");
    const int64_t blocks = is_int8 ? weight.out_features : pieces_of(weight.numel(), block);
    const int64_t bytes = is_int8 ? weight.numel() : (weight.numel() + 1) / 2;
    TS_CHECK_SHAPE(weight.values.numel() == bytes && weight.absmax.numel() == blocks, where,
                   "a weight [", weight.out_features, ", ", weight.in_features, "] in ",
                   name_of(format), " has ", bytes, " bytes and ", blocks, " scales; got ",
                   weight.values, " and ", weight.absmax);
    values = contiguous(weight.values);
    absmax = contiguous(weight.absmax);
    if (!weight.is_nested()) return;
    TS_CHECK_DTYPE(weight.nested_absmax.dtype() == kF32 && weight.nested_offset.defined() &&
                       weight.nested_offset.dtype() == kF32,
                   where, "nested scales and their offset must be f32; got ", weight.nested_absmax,
                   " and ", weight.nested_offset,
                   "; convert a model's dtype before it is quantized");
    TS_CHECK_SHAPE(weight.nested_absmax.numel() == pieces_of(blocks, kNestedBlock) &&
                       weight.nested_offset.numel() == 1,
                   where, blocks, " scales have ", pieces_of(blocks, kNestedBlock),
                   " of their own and one offset; got ", weight.nested_absmax, " and ",
                   weight.nested_offset);
    nested = contiguous(weight.nested_absmax);
    offset = *weight.nested_offset.data_as<float>();
  }

  float scale(int64_t index) const {
    if (!nested.defined()) return absmax.data_as<float>()[index];
    const float number = dynamic_map_array()[absmax.data_as<uint8_t>()[index]] *
                         nested.data_as<float>()[index / kNestedBlock];
    return number + offset;
  }
  // Numbers [begin, begin + n) of one row, of the whole weight read row by row.
  void read(int64_t begin, int64_t n, DType dtype, void* y) const {
    const uint8_t* const bytes = values.data_as<uint8_t>();
    if (format == PackedFormat::kInt8) {
      if (n == 0) return;
      const float factor = int8_scale(scale(begin / K));
      TS_SIMD_CALL(unpack_bytes, bytes + begin, n, factor, dtype, y);
      return;
    }
    const float* const numbers = codes_array(format).data();
    auto* to = static_cast<char*>(y);
    for (const int64_t end = begin + n; begin < end;) {
      const int64_t stop = std::min(end, (begin / block + 1) * block);
      const float factor = scale(begin / block);
      if (begin % 2 != 0) {  // the lower half of a byte
        const auto alone = static_cast<uint8_t>(bytes[begin / 2] << 4);
        TS_SIMD_CALL(unpack_codes, &alone, 1, numbers, factor, dtype, to);
        to += size_of(dtype);
        ++begin;
      }
      TS_SIMD_CALL(unpack_codes, bytes + begin / 2, stop - begin, numbers, factor, dtype, to);
      to += (stop - begin) * size_of(dtype);
      begin = stop;
    }
  }

  // Columns [column, column + n) of `rows` rows from `first` on, one row after the other.
  void read_tile(int64_t first, int64_t rows, int64_t column, int64_t n, DType dtype,
                 char* tile) const {
    for (int64_t row = 0; row < rows; ++row) {
      read((first + row) * K + column, n, dtype, tile + row * n * size_of(dtype));
    }
  }

  PackedFormat format;
  int64_t K, block;
  Tensor values, absmax, nested;
  float offset = 0;
};

struct Rows {
  int64_t count;
  Tensor matrix;  // contiguous
};
Rows rows_of(const char* where, const Tensor& x, int64_t columns) {
  check_dtype(where, "x", x.dtype());
  check_device(where, x);
  TS_CHECK_SHAPE(x.dim() >= 1 && x.size(-1) == columns, where, "the last dimension must be ",
                 columns, ", as the weight's; got ", x);
  return {numel_of(x.shape().slice(0, x.dim() - 1)), contiguous(x)};
}
Shape with_last(const Tensor& x, int64_t columns) {
  Shape shape = x.shape();
  shape[shape.size() - 1] = columns;
  return shape;
}
// A multiple of 16 where that fits: whole registers and tiles of the products.
int64_t tile_of(int64_t bytes_each, int64_t most) {
  const int64_t fit = std::max<int64_t>(kTileBytes / std::max<int64_t>(bytes_each, 1), 32);
  return std::max<int64_t>(std::min(fit / 16 * 16, most), 1);
}
// Calls f(first, count, memory of the thread) for tiles of up to `tile` of `size` rows or columns.
// What f throws leaves after the loop, whose body must not: products take workspaces.
template <class F>
void for_tiles(int64_t size, int64_t tile, int64_t bytes_each, F&& f) {
  const int64_t tiles = pieces_of(size, tile);
  Scratch scratch(tiles, tile * bytes_each);
  std::exception_ptr failure;  // of the thread that is first to set `failed`
  std::atomic_flag failed;
  parallel_for(tiles, 1, [&](int64_t begin, int64_t end) {
    char* const unpacked = scratch.take();
    try {
      for (int64_t t = begin; t < end && !failed.test(); ++t) {
        f(t * tile, std::min(tile, size - t * tile), unpacked);
      }
    } catch (...) {
      if (!failed.test_and_set()) failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

const char* name_of(PackedFormat format) {
  switch (format) {
    case PackedFormat::kInt8:
      return "int8";
    case PackedFormat::kNf4:
      return "nf4";
    case PackedFormat::kFp4:
      return "fp4";
  }
  return "?";
}

std::span<const float> dynamic_map() { return dynamic_map_array(); }
std::span<const float> codes_of(PackedFormat format) {
  TS_CHECK(format != PackedFormat::kInt8, "codes_of", "int8 has no table: its bytes are numbers");
  return codes_array(format);
}

PackedWeight packed_places(int64_t out_features, int64_t in_features, const PackOptions& options) {
  check_options(options);
  const bool is_int8 = options.format == PackedFormat::kInt8;
  PackedWeight packed{.format = options.format,
                      .out_features = out_features,
                      .in_features = in_features,
                      .block_size = is_int8 ? 0 : options.block_size};
  const int64_t size = packed.numel();
  const Shape bytes = is_int8 ? Shape{out_features, in_features} : Shape{(size + 1) / 2, 1};
  const int64_t scales = is_int8 ? out_features : pieces_of(size, options.block_size);
  packed.values = raw::empty(bytes, kU8, kMeta);
  packed.absmax = raw::empty({scales}, options.double_quantize ? kU8 : kF32, kMeta);
  if (!options.double_quantize) return packed;
  packed.nested_absmax = raw::empty({pieces_of(scales, kNestedBlock)}, kF32, kMeta);
  packed.nested_offset = raw::empty({}, kF32, kMeta);
  return packed;
}

PackedWeight pack(const Tensor& weight, const PackOptions& options) {
  check_dtype(kPack, "a weight", weight.dtype());
  check_device(kPack, weight);
  TS_CHECK_SHAPE(weight.dim() == 2, kPack, "expects a weight [out, in]; got ", weight);
  PackedWeight packed = packed_places(weight.size(0), weight.size(1), options);
  if (weight.is_meta()) return packed;
  const Tensor whole = contiguous(weight);
  packed.values = raw::empty(packed.values.shape(), kU8);
  packed.absmax = raw::empty(packed.absmax.shape(), kF32);
  if (packed.format == PackedFormat::kInt8) {
    pack_rows(whole, packed);
    return packed;
  }
  float* const absmax = packed.absmax.data_as<float>();
  pack_blocks(whole, packed, absmax);
  if (!options.double_quantize) return packed;
  const int64_t blocks = packed.absmax.numel();
  packed.nested_offset = raw::empty({}, kF32);
  double sum = 0;
  for (int64_t b = 0; b < blocks; ++b) sum += static_cast<double>(absmax[b]);
  const auto offset = static_cast<float>(sum / static_cast<double>(blocks));
  *packed.nested_offset.data_as<float>() = offset;
  for (int64_t b = 0; b < blocks; ++b) absmax[b] -= offset;
  PackedBytes nested = pack_bytes(packed.absmax);
  packed.absmax = std::move(nested.values);
  packed.nested_absmax = std::move(nested.absmax);
  return packed;
}

PackedBytes pack_bytes(const Tensor& x) {
  TS_CHECK_DTYPE(x.dtype() == kF32, kPack, "scales are f32; got ", x);
  check_device(kPack, x);
  const int64_t size = x.numel(), blocks = pieces_of(size, kNestedBlock);
  const Tensor whole = contiguous(x);
  PackedBytes packed{raw::empty(x.shape(), kU8), raw::empty({blocks}, kF32)};
  const float* const from = whole.data_as<float>();
  uint8_t* const to = packed.values.data_as<uint8_t>();
  const uint8_t* const steps = dynamic_steps().data();
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = b * kNestedBlock, end = std::min(begin + kNestedBlock, size);
    float largest = 0;  // NaN is passed over
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(from[i]));
    packed.absmax.data_as<float>()[b] = largest;
    const float factor = 1 / largest;
    for (int64_t i = begin; i < end; ++i) {
      const float value = from[i] * factor;
      const float inside = value > 1 ? 1 : value < -1 ? -1 : value;
      to[i] = std::isnan(value)  // also of a block of zeros
                  ? 0
                  : steps[static_cast<size_t>((inside + 1) * 0.5f * 65535 + 0.5f)];
    }
  }
  return packed;
}

Tensor unpack(const PackedWeight& weight, DType dtype) {
  check_dtype(kUnpack, "the result", dtype);
  const Shape shape{weight.out_features, weight.in_features};
  if (weight.values.is_meta()) return raw::empty(shape, dtype, kMeta);
  const PackedView view(kUnpack, weight);
  const Tensor result = raw::empty(shape, dtype);
  const int64_t K = weight.in_features;
  parallel_for(weight.out_features, std::max<int64_t>(1, kPerThread / std::max<int64_t>(K, 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) {
                   view.read(row * K, K, dtype,
                             static_cast<char*>(result.data()) + row * K * size_of(dtype));
                 }
               });
  return result;
}

Tensor packed_product(const Tensor& x, const PackedWeight& weight, const Tensor& bias) {
  const int64_t N = weight.out_features, K = weight.in_features;
  const Rows rows = rows_of(kPackedProduct, x, K);
  TS_CHECK_SHAPE(!bias.defined() || (bias.dim() == 1 && bias.size(0) == N), kPackedProduct,
                 "expects a bias of [", N, "]; got ", bias);
  TS_CHECK_DTYPE(!bias.defined() || bias.dtype() == x.dtype(), kPackedProduct,
                 "expects x and bias of one dtype; got ", x, " and ", bias);
  const DType dtype = x.dtype();
  const int64_t each = size_of(dtype);
  if (x.is_meta() || weight.values.is_meta()) return raw::empty(with_last(x, N), dtype, kMeta);
  const PackedView view(kPackedProduct, weight);
  const Tensor result = raw::empty(with_last(x, N), dtype);
  if (result.numel() == 0) return result;
  const Tensor added = bias.defined() ? contiguous(bias) : Tensor();
  if (weight.format == PackedFormat::kInt8 && rows.count <= kMostInt8Rows) {
    int8_rows({.m = rows.count,
               .n = N,
               .k = K,
               .dtype = dtype,
               .x = rows.matrix.data(),
               .x_row_stride = K,
               .weight = reinterpret_cast<const int8_t*>(view.values.data_as<uint8_t>()),
               .weight_row_stride = K,
               .absmax = view.absmax.data_as<float>(),
               .bias = added.defined() ? added.data() : nullptr,
               .y = result.data(),
               .y_row_stride = N});
    return result;
  }
  for_tiles(N, tile_of(K * each, N), K * each, [&](int64_t first, int64_t count, char* unpacked) {
    view.read_tile(first, count, 0, K, dtype, unpacked);
    gemm({.m = rows.count,
          .n = count,
          .k = K,
          .dtype = dtype,
          .result_dtype = dtype,
          .a = {rows.matrix.data(), K, 1},
          .b = {unpacked, 1, K},
          .c = static_cast<char*>(result.data()) + first * each,
          .c_row_stride = N,
          .bias = added.defined() ? at(added, first) : nullptr,
          .bias_kind = added.defined() ? GemmBias::kColumn : GemmBias::kNone});
  });
  return result;
}

Tensor packed_product_gradient(const Tensor& dy, const PackedWeight& weight) {
  const int64_t N = weight.out_features, K = weight.in_features;
  const Rows rows = rows_of(kPackedProduct, dy, N);
  const DType dtype = dy.dtype();
  const int64_t each = size_of(dtype);
  if (dy.is_meta() || weight.values.is_meta()) return raw::empty(with_last(dy, K), dtype, kMeta);
  const PackedView view(kPackedProduct, weight);
  // Sums over many rows of the weight go on in f32.
  const int64_t deep = std::min(N, kSumRows), parts = pieces_of(N, std::max<int64_t>(deep, 1));
  const DType sum_dtype = parts > 1 ? kF32 : dtype;
  const Tensor sums = raw::empty(with_last(dy, K), sum_dtype);
  if (sums.numel() == 0) return raw::empty(with_last(dy, K), dtype);
  const auto add_columns = [&](int64_t column, int64_t count, char* unpacked) {
    for (int64_t part = 0; part < std::max<int64_t>(parts, 1); ++part) {
      const int64_t first = part * deep, depth = std::min(deep, N - first);
      view.read_tile(first, depth, column, count, dtype, unpacked);
      gemm({.m = rows.count,
            .n = count,
            .k = depth,
            .dtype = dtype,
            .result_dtype = sum_dtype,
            .a = {at(rows.matrix, first), N, 1},
            .b = {unpacked, count, 1},
            .c = static_cast<char*>(sums.data()) + column * size_of(sum_dtype),
            .c_row_stride = K,
            .beta = part == 0 ? 0.0 : 1.0});
    }
  };
  for_tiles(K, tile_of(deep * each, K), deep * each, add_columns);
  return sums.dtype() == dtype ? sums : convert(sums, dtype);
}

}  // namespace tessera::kernels
