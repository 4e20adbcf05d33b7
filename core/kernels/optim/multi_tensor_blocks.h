// What multi_tensor_cpu.cpp and multi_tensor_simd.cpp share: the loops over one block, in the
// compute type C (float or double).
#pragma once

#include <cstdint>
#include <optional>

#include <tessera/core/dtype.h>
#include <tessera/core/half.h>
#include <tessera/core/isa.h>
#include <tessera/core/kernels/optim/update_rules.h>

namespace tessera::kernels {

// A block of a parameter with its gradient, and where its rounded new values go (or null). All are
// of the compute type and there is no model copy; or, where the rule is `in_registers`, one of the
// combinations that updates_directly() names.
struct UpdateBlock {
  int64_t n;
  void* param;
  const void* grad;
  void* model_copy;
  DType param_dtype, grad_dtype;
};
// Whether blocks of these dtypes may be given as they are.
inline bool updates_directly(DType param, DType grad, std::optional<DType> model_copy) {
  if (model_copy.has_value() && *model_copy != kBF16) return false;
  if (param == kF32) return grad == kF32 || (grad == kBF16 && model_copy.has_value());
  return (param == kF64 || param == kBF16) && grad == param && !model_copy.has_value();
}

// States are of the compute type, those that are absent null; nothing aliases.
TS_SIMD_DECLARE(template <class Rule, class C>
                void update_block(Rule, const typename Rule::template Step<C>& step,
                                  const UpdateBlock& block, C* first, C* second, C* third));
// states[i] = values[i], rounded by noise[i] (state_rounding.h).
TS_SIMD_DECLARE(void round_state_block(int64_t n, const float* values, const uint32_t* noise,
                                       int state, bf16* states));
TS_SIMD_DECLARE(template <class C> void scale_block(int64_t n, C* x, C factor));
TS_SIMD_DECLARE(template <class C> void clamp_block(int64_t n, C* x, C limit));
// Sum of |x|^p of a block of any floating dtype, in f64; the largest |x| for p = infinity. Squares
// have blocks of their own (multi_tensor_square_sum_blocks.h).
TS_SIMD_DECLARE(double power_sum_block(DType dtype, const void* x, int64_t n, double p));

}  // namespace tessera::kernels
