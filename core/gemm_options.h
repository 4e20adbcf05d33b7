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
  // What the table of the user or of the card (core/cuda/libraries/gemm_table.h) has of the shape,
  // else a rule (gpu::fused_by_rule): no clock, so that two runs have the same bits.
  kByTable,
  // Where the table has nothing, the product, fused and apart, and the pass are measured where the
  // shape comes up first, and the winner is kept in the table. Without one (TESSERA_GEMM_TABLE is
  // empty), and within a capture, the rule decides.
  kMeasured,
  kAlways,
};

struct GemmOptions {
  // f32 operands are cut to 10 bits of mantissa, for products at the speed of 16 bits; sums stay
  // f32. Products of other dtypes are as before.
  bool tf32 = false;
  GemmFusion fusion = GemmFusion::kByTable;
};

}  // namespace tessera
