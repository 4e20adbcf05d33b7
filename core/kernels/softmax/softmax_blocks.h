// Rows and columns of softmax_simd.cpp. dtype is that of all tensors.
#pragma once

#include <cstdint>

#include <tessera/core/dtype.h>
#include <tessera/core/isa.h>

namespace tessera::kernels {

inline constexpr int64_t kSoftmaxTile = 256;  // columns that a call takes at most

// x, y: (rows, n) contiguous.
TS_SIMD_DECLARE(void softmax_rows(DType dtype, bool log, const void* x, void* y, int64_t rows,
                                  int64_t n));
TS_SIMD_DECLARE(void softmax_rows_backward(DType dtype, bool log, const void* dy, const void* y,
                                           void* dx, int64_t rows, int64_t n));
// x, y: n rows, `stride` elements apart, of which `columns` are worked on.
TS_SIMD_DECLARE(void softmax_columns(DType dtype, bool log, const void* x, void* y, int64_t n,
                                     int64_t stride, int64_t columns));
TS_SIMD_DECLARE(void softmax_columns_backward(DType dtype, bool log, const void* dy, const void* y,
                                              void* dx, int64_t n, int64_t stride,
                                              int64_t columns));

}  // namespace tessera::kernels
