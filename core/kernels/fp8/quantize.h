// Quantization to fp8: a matrix in one byte an element, and a scale for each of its tiles.
//
//     const Quantized q = kernels::quantize(x, {.format = kF8E4M3, .tile = ScaleTile::row()});
//     // x[m, n] is about q.values[m, n] * q.inverse[m, 0]
//
// A tile's scale is f32(f64(largest number of the format) / amax), amax being the largest magnitude
// in the tile; rounded down to a power of two where that is asked for. Where amax is 0, infinite or
// NaN it is 1, where it would leave f32 the largest f32. An element is multiplied by it in f32,
// rounded once to the nearest, ties to even, and ends at the format's largest number. NaN stays,
// and an infinity becomes one: what a product makes of them is not finite. Tiles begin at the first
// element; the last ones may be smaller.
//
// The rules are those of TransformerEngine and torchao, where these agree; torchao's floor of 1e-12
// under amax is left out, so that tensors of small numbers keep all their bits.
#pragma once

#include <cstdint>
#include <optional>

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// Rows and columns of a tile; 0: all that there are.
struct ScaleTile {
  int64_t rows = 0;
  int64_t columns = 0;
  static constexpr ScaleTile tensor() { return {0, 0}; }
  static constexpr ScaleTile row() { return {1, 0}; }
  static constexpr ScaleTile column() { return {0, 1}; }
  friend bool operator==(const ScaleTile&, const ScaleTile&) = default;
};

struct QuantizeOptions {
  DType format = kF8E4M3;  // or kF8E5M2
  ScaleTile tile = {};
  bool power_of_two = false;
  friend bool operator==(const QuantizeOptions&, const QuantizeOptions&) = default;
};

struct Quantized {
  Tensor values;           // [M, N] of the format; on a GPU undefined where not wanted
  Tensor transposed = {};  // [N, M], on a GPU where wanted
  Tensor scale = {};       // f32, one a tile: [tiles along M, tiles along N]
  Tensor inverse = {};     // 1 / scale, what products multiply by
  ScaleTile tile = {};
  Tensor sums = {};  // of columns, where wanted
  // For 128 x 128 tiles on a GPU: `inverse`, in the layout in which products read it with
  // `transposed`.
  Tensor inverse_by_columns = {};
  // For bytes that came from elsewhere to a GPU: the notes of QuantizeWants' `largest` and `counts`
  // when they were made.
  Tensor seen_largest = {}, seen_counts = {};
  const Tensor& any() const { return values.defined() ? values : transposed; }
  const Device& device() const { return any().device(); }
  int64_t rows() const { return values.defined() ? values.size(0) : transposed.size(1); }
  int64_t columns() const { return values.defined() ? values.size(1) : transposed.size(0); }
  // What happened, on the CPU; of a meta tensor nothing did, and what a GPU does is noted where
  // QuantizeWants says.
  float amax = 0;          // of all tiles; NaN where x has one
  int64_t saturated = 0;   // ended at the largest number by more than rounding
  int64_t underflown = 0;  // became 0, and were not
};

// The scale of a tile, divided by 2^margin. Exact on every machine.
float fp8_scale(float amax, DType format, bool power_of_two, int margin = 0);

// What is made besides. Copies and notes are for GPUs, whose products read memory along the sum,
// and whose host is not told what happened: a CPU makes `values`, which its products read both
// ways.
struct QuantizeWants {
  bool by_rows = true, by_columns = false;  // values, transposed
  bool sums = false;  // of the columns of x, [N] of x's dtype, before it is quantized
  std::optional<DType> through = {};  // f16, bf16: an f32 x is rounded to it first
  Tensor factor = {};      // f32 [1]: x is multiplied by it first, and rounded to its dtype
  Tensor of_largest = {};  // f32 [1]: the one scale is of this magnitude, x being a part
  Tensor largest = {};     // f32 [1]: raised to amax; infinite where x has a NaN
  Tensor counts = {};      // i64 [2]: saturated and underflown are added
};

// x: [M, N], f32, f16 or bf16, any strides. `scale`: one f32 to use for all tiles instead of theirs
// (a tile of the whole matrix then); amax is noted all the same. Reads x twice, once where the
// scale is given, and writes a byte an element and copy. Bytes and scales are the same on all
// devices. Throws DTypeError, ShapeError.
//
// A GPU has the tiles that its products take: the whole matrix, 128 x 128, and for one of the
// copies a row or 1 x 128 by rows, a column or 128 x 1 by columns. Others are an UnsupportedError.
// Tiles of 128 it reads once. There scales lie as products read them: those of 1 x 128 with
// neighboring rows beside each other, those of 128 x 128 with neighboring columns, a multiple of
// four a row.
Quantized quantize(const Tensor& x, const QuantizeOptions& options, const Tensor& scale = {},
                   const QuantizeWants& wants = {});

// x for two products, one of which sums along its columns and one along its rows: with a scale for
// each row (or 1 x 128) and for each column (or 128 x 1). A GPU reads it once for both maxima and
// once for both copies. `wants`: as above, notes are those of `rows`.
struct QuantizedPair {
  Quantized rows;     // values
  Quantized columns;  // on a GPU transposed
};
QuantizedPair quantize_both(const Tensor& x, const QuantizeOptions& rows,
                            const QuantizeOptions& columns, const QuantizeWants& wants = {});

// Quantizes gelu(x), or its gradient dy gelu'(x), which are rounded to x's dtype and never stored:
// on a GPU one pass. x, dy: f16 or bf16 [M, N].
Quantized quantize_gelu(const Tensor& x, bool tanh_form, const QuantizeOptions& options,
                        const Tensor& scale = {}, const QuantizeWants& wants = {});
Quantized quantize_gelu_grad(const Tensor& dy, const Tensor& x, bool tanh_form,
                             const QuantizeOptions& options, const Tensor& scale = {},
                             const QuantizeWants& wants = {});

// a b, of quantized matrices a: [M, K] and b: [K, N], each as it lies or (`transposed`) turned
// around. fp8 numbers, with powers of two as the scales along K too, are bf16 numbers, so that
// the products are exact; they are added up in f32, multiplied by the inverse scales and rounded
// once to `dtype` (f32, f16, bf16). Scales along K that are no powers of two throw ValueError.
//
// On a GPU the library multiplies (cuBLASLt, compute capability 8.9 and above): each operand needs
// the copy in which the sum runs along memory, `values` of a and `transposed` of b as they lie, the
// other one where they are turned around; M, N and K are multiples of 16. Scales of rows and tiles
// need 9.0: one of each row of a and column of b (a scale of the whole matrix stands for all of
// them), or tiles of 128 along the sum in both, square ones in one of them at most.
// UnsupportedError that says what is in the way.
struct Fp8Operand {
  const Quantized& matrix;
  bool transposed = false;
};
struct Fp8Product {
  // [N] of `dtype`, added to the rounded result; on a GPU to f16 and bf16 before they are rounded.
  Tensor bias = {};
  // On a GPU partial sums keep about 13 bits. Not with scales that change along the sum.
  bool fast_accumulation = false;
};
Tensor fp8_matmul(const Fp8Operand& a, const Fp8Operand& b, DType dtype,
                  const Fp8Product& product = {});

// values * inverse, rounded to a 16-bit dtype or f32: [M, N].
Tensor dequantize(const Quantized& q, DType dtype);

}  // namespace tessera::kernels
