// Weights in 8 or 4 bits, in the formats of bitsandbytes (https://github.com/bitsandbytes-foundation/
// bitsandbytes), and linear layers that read them.
//
// | format | a number is                      | scale for               | bytes a number        |
// |--------|----------------------------------|-------------------------|-----------------------|
// | kInt8  | a byte, -127..127                | a row                   | 1 + 4 / in            |
// | kNf4   | one of 16 quantiles of a normal  | a block of `block_size` | 0.5 + 4 / block_size  |
// | kFp4   | one of 15 small floating numbers | a block                 | the same              |
//
// The scale is the largest magnitude, `absmax`. A weight [out, in] is read row by row, so a block
// may reach over the end of a row. With double quantisation (Dettmers et al. 2023,
// https://arxiv.org/abs/2305.14314, section 3) the scales of blocks are bytes themselves: an offset,
// their mean, is subtracted, and 256 of the rest share a scale; then a number takes
// 0.5 + 1 / block_size + 4 / (256 block_size) bytes.
//
// Bytes and scales are those of bitsandbytes 0.50 on the CPU to the bit, but for the offset, whose
// sum has no order there: here it is the mean in f64, rounded once. As there, a block with an
// infinity has the scale infinity, its finite numbers become 0 and its infinite ones the largest
// code; with a NaN all of its numbers become that code and the scale NaN. In rows of kInt8 both
// become 0.
//
// Everything runs on the CPU; a tensor on a GPU is an UnsupportedError, as no kernel exists there.
#pragma once

#include <cstdint>
#include <span>

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

enum class PackedFormat : uint8_t { kInt8, kNf4, kFp4 };
// As options and messages have them: "int8", "nf4", "fp4".
const char* name_of(PackedFormat format);

struct PackOptions {
  PackedFormat format = PackedFormat::kNf4;
  int64_t block_size = 64;       // of 4 bits: 32, 64, 128 and so on to 4096
  bool double_quantize = false;  // of 4 bits: the scales too
};

struct PackedWeight {
  PackedFormat format = PackedFormat::kNf4;
  int64_t out_features = 0;
  int64_t in_features = 0;
  int64_t block_size = 64;  // 0 for kInt8
  // kInt8: u8 [out, in], the bytes of signed numbers. 4 bits: u8 [(out in + 1) / 2, 1], the first
  // of two numbers in the upper half.
  Tensor values = {};
  Tensor absmax = {};         // f32 [out] or [blocks]; u8 [blocks] with double quantisation
  Tensor nested_absmax = {};  // f32 [ceil(blocks / 256)]; undefined without double quantisation
  Tensor nested_offset = {};  // f32 []; undefined without
  bool is_nested() const { return nested_absmax.defined(); }
  int64_t numel() const { return out_features * in_features; }
};

// Sizes of the parts, for tensors that are made before their values are known. They are on kMeta.
PackedWeight packed_places(int64_t out_features, int64_t in_features, const PackOptions& options);

// weight: [out, in], f32, bf16 or f16. ValueError: a block size that is not in the list;
// UnsupportedError: double quantisation of int8; DTypeError, ShapeError.
PackedWeight pack(const Tensor& weight, const PackOptions& options);
// The whole weight in f32, bf16 or f16: code times scale in f32, rounded once.
Tensor unpack(const PackedWeight& weight, DType dtype);

// Numbers in bytes by the dynamic map, with the largest magnitude of each 256 as their scale: what
// double quantisation does to absmax - offset. x: f32, contiguous.
struct PackedBytes {
  Tensor values;  // u8, x's shape
  Tensor absmax;  // f32 [ceil(numel / 256)]
};
PackedBytes pack_bytes(const Tensor& x);
// The 256 numbers of the map, ascending, and the 16 of a 4-bit format by code.
std::span<const float> dynamic_map();
std::span<const float> codes_of(PackedFormat format);

// x W^T + bias. x: [..., in], f32, bf16 or f16; bias: [out] of x's dtype or undefined; result
// [..., out] of x's dtype. W is unpacked to x's dtype in tiles, one for each thread at a time: the
// whole of it is never in memory. Products are those of gemm.h on the tiles; up to 16 rows read
// kInt8 as it lies (gemm/int8_rows.h).
Tensor packed_product(const Tensor& x, const PackedWeight& weight, const Tensor& bias);
// Its gradient of x: dy W. dy: [..., out]; result [..., in]. Sums are f32 and rounded once.
Tensor packed_product_gradient(const Tensor& dy, const PackedWeight& weight);

}  // namespace tessera::kernels
