// Loops of convolution over the patches that a kernel covers (patches_simd.cpp).
#pragma once

#include <tessera/core/isa.h>
#include <tessera/core/kernels/conv/geometry.h>

namespace tessera::kernels {

// Unfolds one group of one sample, planes x [C / G, H, W]. Row (c, kh, kw) of columns [C / G * KH *
// KW, OH * OW], rows `row_stride` elements apart, has the elements under this kernel element at
// each position, 0 outside the planes. Elements have 2, 4 or 8 bytes.
TS_SIMD_DECLARE(void unfold_patches(const ConvSizes& n, int64_t element_bytes, const void* x,
                                    void* columns, int64_t row_stride))

// The transpose of unfolding: each element of x is the sum of its copies in the patches, in the
// order of rows. Columns are dense.
TS_SIMD_DECLARE(void fold_patches(const ConvSizes& n, const float* columns, float* x))
TS_SIMD_DECLARE(void fold_patches(const ConvSizes& n, const double* columns, double* x))

}  // namespace tessera::kernels
