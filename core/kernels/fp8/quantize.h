// Quantization to fp8: a matrix with one byte per element, and a scale for each of its tiles.
//
//     const Quantized q = kernels::quantize(x, {.format = kF8E4M3, .tile = ScaleTile::row()});
//     // x[m, n] is about q.values[m, n] * q.inverse[m, 0]
//
// A tile's scale is f32(f64(largest number of the format) / amax), rounded down to a power of two
// if asked for; amax is the largest magnitude in the tile. The scale is 1 if amax is 0, infinite or
// NaN, and the largest f32 where it would overflow. An element is multiplied by it in f32, rounded
// once to nearest even, and clamped to the format's largest number. NaN stays and an infinity
// becomes NaN, so that products of them are not finite. Tiles begin at the first element; the last
// ones may be smaller.
//
// The rules are those of TransformerEngine and torchao, where these agree; torchao's floor of 1e-12
// under amax is left out, so that tensors of small numbers keep all their bits.
#pragma once

#include <cstdint>
#include <optional>

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// Rows and columns of a tile; 0: all of the matrix.
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
  Tensor values;           // [M, N] of the format; on a GPU undefined if not wanted
  Tensor transposed = {};  // [N, M], only on a GPU and if wanted
  Tensor scale = {};       // f32, one per tile: [tiles along M, tiles along N]
  Tensor inverse = {};     // 1 / scale, by which products multiply
  ScaleTile tile = {};
  Tensor sums = {};  // of columns, if wanted
  // For 128 x 128 tiles on a GPU: `inverse`, in the layout in which products read it with
  // `transposed`.
  Tensor inverse_by_columns = {};
  // For bytes that a GPU received: QuantizeWants' `largest` and `counts` from when they were made.
  Tensor seen_largest = {}, seen_counts = {};
  const Tensor& any() const { return values.defined() ? values : transposed; }
  const Device& device() const { return any().device(); }
  int64_t rows() const { return values.defined() ? values.size(0) : transposed.size(1); }
  int64_t columns() const { return values.defined() ? values.size(1) : transposed.size(0); }
  // What quantizing noted on the CPU. A meta tensor has no notes, and a GPU puts its notes into the
  // tensors of QuantizeWants.
  float amax = 0;          // of all tiles; NaN if x has one
  int64_t saturated = 0;   // elements clamped to the largest number, other than by rounding
  int64_t underflown = 0;  // nonzero elements that became 0
};

// The scale of a tile, divided by 2^margin. Its bits are the same on every machine.
float fp8_scale(float amax, DType format, bool power_of_two, int margin = 0);

// Additional results. Copies and notes are for GPUs: their products need the copy in which the sum
// runs along memory, and their host does not see the notes. A CPU makes only `values`, which its
// products read both ways.
struct QuantizeWants {
  bool by_rows = true, by_columns = false;  // values, transposed
  bool sums = false;  // of the columns of x, [N] of x's dtype, before it is quantized
  std::optional<DType> through = {};  // f16, bf16: an f32 x is rounded to it first
  Tensor factor = {};      // f32 [1]: x is first multiplied by it and rounded to its dtype
  Tensor of_largest = {};  // f32 [1]: the largest magnitude for the one scale, if x is a part
  Tensor largest = {};     // f32 [1]: raised to amax; infinite if x has a NaN
  Tensor counts = {};      // i64 [2]: saturated and underflown are added to it
};

// x: [M, N], f32, f16 or bf16, any strides. `scale`: one f32 for the whole matrix as the tile, in
// place of the calculated one; amax is noted all the same. Reads x twice, or once if the scale is
// given, and writes one byte per element and copy. Bytes and scales are the same on all devices.
// Throws DTypeError, ShapeError.
//
// A GPU supports the tiles that its products take: the whole matrix, 128 x 128, and for one of the
// copies a row or 1 x 128 by rows, a column or 128 x 1 by columns; UnsupportedError for others. It
// reads tiles of 128 once. Their scales have the layout that products read: for 1 x 128,
// neighboring rows are adjacent, for 128 x 128, neighboring columns, with a multiple of four per
// row.
Quantized quantize(const Tensor& x, const QuantizeOptions& options, const Tensor& scale = {},
                   const QuantizeWants& wants = {});

// x for two products, one of which sums along its columns and one along its rows, with a scale for
// each row (or 1 x 128) and for each column (or 128 x 1). A GPU reads it once for both maxima and
// once for both copies. `wants`: as above; notes are those of `rows`.
struct QuantizedPair {
  Quantized rows;     // values
  Quantized columns;  // on a GPU `transposed`
};
QuantizedPair quantize_both(const Tensor& x, const QuantizeOptions& rows,
                            const QuantizeOptions& columns, const QuantizeWants& wants = {});

// Quantizes gelu(x), or its gradient dy gelu'(x), which is rounded to x's dtype and never stored;
// one pass on a GPU. x, dy: f16 or bf16 [M, N].
Quantized quantize_gelu(const Tensor& x, bool tanh_form, const QuantizeOptions& options,
                        const Tensor& scale = {}, const QuantizeWants& wants = {});
Quantized quantize_gelu_grad(const Tensor& dy, const Tensor& x, bool tanh_form,
                             const QuantizeOptions& options, const Tensor& scale = {},
                             const QuantizeWants& wants = {});

// The product of quantized matrices a: [M, K] and b: [K, N], each of them optionally `transposed`.
// fp8 numbers, and those with power-of-two scales along K, are bf16 numbers, so that products are
// exact; they are summed in f32, multiplied by the inverse scales and rounded once to `dtype` (f32,
// f16, bf16). Scales along K that are not powers of two throw ValueError.
//
// A GPU uses cuBLASLt (compute capability 8.9 and above). Each operand needs the copy in which the
// sum runs along memory: `values` of a and `transposed` of b, or the other copy if the operand is
// transposed. M, N and K are multiples of 16. Scales of rows and tiles need 9.0: one for each row
// of a and column of b (a scale of the whole matrix stands for all of them), or tiles of 128 along
// the sum in both, of which one at most may have square tiles. UnsupportedError names what is
// missing.
// UnsupportedError that says what is in the way.
struct Fp8Operand {
  const Quantized& matrix;
  bool transposed = false;
};
struct Fp8Product {
  // [N] of `dtype`, added to the rounded result; a GPU adds it to f16 and bf16 before rounding.
  Tensor bias = {};
  // On a GPU partial sums keep about 13 bits. Not for scales that change along the sum.
  bool fast_accumulation = false;
};
Tensor fp8_matmul(const Fp8Operand& a, const Fp8Operand& b, DType dtype,
                  const Fp8Product& product = {});

// values * inverse, rounded to a 16-bit dtype or f32: [M, N].
Tensor dequantize(const Quantized& q, DType dtype);

}  // namespace tessera::kernels
