// Loops of convolution over the patches that a kernel meets (patches_simd.cpp).
#pragma once

#include <tessera/core/kernels/common/isa.h>

#include <cstdint>

namespace tessera::kernels {

// One group of one sample: planes (channels, H, W), and where a kernel of KH x KW meets them at OH
// x OW positions. Height, then width.
struct Patches {
  int64_t channels, H, W, KH, KW, OH, OW;
  int64_t stride[2], padding[2], dilation[2];
};

// Row (c, kh, kw) of columns [channels * KH * KW, OH * OW], rows `row_stride` elements apart: what
// that element of the kernel meets at each position, 0 outside of the planes. Elements of 2, 4 or 8
// bytes.
TS_SIMD_DECLARE(void unfold_patches(const Patches& n, int64_t element_bytes, const void* x,
                                    void* columns, int64_t row_stride))

// The transpose of it: each element of x [channels, H, W] is the sum of what patches hold for it,
// in the order of rows. Columns are dense.
TS_SIMD_DECLARE(void fold_patches(const Patches& n, const float* columns, float* x))
TS_SIMD_DECLARE(void fold_patches(const Patches& n, const double* columns, double* x))

}  // namespace tessera::kernels
