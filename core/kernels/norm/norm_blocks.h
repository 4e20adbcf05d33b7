// Rows of norm_simd.cpp. weight, bias, dweight, dbias, statistics are in the compute type (float,
// double for f64); the others of `dtype`. Optional pointers may be null.
#pragma once

#include <cstdint>

#include <tessera/core/dtype.h>
#include <tessera/core/isa.h>

namespace tessera::kernels {

// Rows of C columns. Where residual is given, sum receives x + residual and is what is normalized.
struct RowNormBlock {
  DType dtype;
  int64_t rows, C;
  const void* x;
  const void* residual;
  void* sum;
  void* y;
  const void* weight;
  const void* bias;
  void* mean;  // null: rms_norm
  void* rstd;
  double eps;
};
TS_SIMD_DECLARE(void row_norm_block(const RowNormBlock& block));

struct RowNormGradientBlock {
  DType dtype;
  int64_t rows, C;
  const void* dy;
  const void* dsum;
  const void* x;
  const void* weight;
  const void* mean;  // null: rms_norm
  const void* rstd;
  void* dx;       // null: not wanted
  void* dweight;  // (C), added to; null: not wanted
  void* dbias;
  void* scratch;  // 2 C numbers of the compute type
};
TS_SIMD_DECLARE(void row_norm_gradient_block(const RowNormGradientBlock& block));

// y[i] = (x[i] - mean) * scale + shift over a segment of one channel.
TS_SIMD_DECLARE(void affine_segment(DType dtype, const void* x, void* y, int64_t n, double mean,
                                    double scale, double shift));
// The same with a number for each column.
TS_SIMD_DECLARE(void affine_columns(DType dtype, const void* x, void* y, int64_t n,
                                    const void* mean, const void* scale, const void* shift));
struct SegmentSums {
  double dy;
  double dy_xhat;  // of dy (x - mean) rstd
};
TS_SIMD_DECLARE(SegmentSums segment_sums(DType dtype, const void* dy, const void* x, int64_t n,
                                         double mean, double rstd));
// sums_dy[c] += dy, sums_dy_xhat[c] += dy (x - mean) rstd, in f64.
TS_SIMD_DECLARE(void column_sums(DType dtype, const void* dy, const void* x, int64_t n,
                                 const void* mean, const void* rstd, double* sums_dy,
                                 double* sums_dy_xhat));
// dx = a dy - b - (x - mean) c
TS_SIMD_DECLARE(void gradient_segment(DType dtype, const void* dy, const void* x, void* dx,
                                      int64_t n, double mean, double a, double b, double c));
TS_SIMD_DECLARE(void gradient_columns(DType dtype, const void* dy, const void* x, void* dx,
                                      int64_t n, const void* mean, const void* a, const void* b,
                                      const void* c));

}  // namespace tessera::kernels
