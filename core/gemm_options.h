// How matrix products of a GPU are made: a slot of the context.
//
//     auto& options = Context::current().slot<GemmOptions>();
//     const ScopedValue<bool> faster(options.tf32, true);
#pragma once

#include <cstdint>

namespace tessera {

// Whether what stands around a product (a bias's gradient, GELU and its gradient) is made by the
// product itself, where the library offers that.
enum class GemmFusion : uint8_t {
  kNever,
  // Where measurements say that it takes less time than the product and the pass apart: both are
  // measured once, where a shape comes up first, and the winner is kept in a file
  // (core/cuda/libraries/gemm_table.h). Fused products are known to lose for some shapes and versions of the
  // library. Without a table (TESSERA_GEMM_TABLE is empty) nothing is fused.
  kMeasured,
  kAlways,
};

struct GemmOptions {
  // f32 operands are cut to 10 bits of mantissa, for products at the speed of 16 bits; sums stay
  // f32. Products of other dtypes are as before.
  bool tf32 = false;
  GemmFusion fusion = GemmFusion::kMeasured;
};

}  // namespace tessera
