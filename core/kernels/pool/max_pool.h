// The loop of max pooling over one plane (max_pool_simd.cpp).
#pragma once

#include <tessera/core/isa.h>
#include <tessera/core/kernels/conv/geometry.h>

namespace tessera {
struct bf16;
struct f16;
}  // namespace tessera

namespace tessera::kernels {

// A plane (H, W) under windows of KH x KW at OH x OW positions. Where dilation leads a window past
// the plane its value is -inf and its index H * W, which is none.
struct PoolWindows {
  int64_t H, W, KH, KW, OH, OW;
  ConvGeometry geometry;
};

// values, indices: [OH, OW]. The first of equal values, the last of NaNs.
#define TS_MAX_POOL_DECLARE(T) \
  TS_SIMD_DECLARE(             \
      void max_pool_plane(const PoolWindows& n, const T* x, T* values, int64_t* indices))
TS_MAX_POOL_DECLARE(double)
TS_MAX_POOL_DECLARE(float)
TS_MAX_POOL_DECLARE(f16)
TS_MAX_POOL_DECLARE(bf16)
#undef TS_MAX_POOL_DECLARE

}  // namespace tessera::kernels
