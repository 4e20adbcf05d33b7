// Autocast: each op runs in the precision that its record names, casts are inserted as needed.
//
// Casts of leaves are kept as *shadows* in the leaf's autograd slot, stamped with its version: the
// second use of a weight costs nothing, and an optimizer step makes them stale.
#pragma once

#include <span>

#include <tessera/autograd/op.h>
#include <tessera/core/context.h>
#include <tessera/core/tensor.h>

namespace tessera {

struct AutocastMode {
  bool enabled = false;
  DType dtype = kBF16;  // of ops with Autocast::kLow
};

// Autocast on (or off) in a scope. Throws DTypeError unless dtype is f16 or bf16.
class AutocastGuard {
 public:
  explicit AutocastGuard(DType dtype = kBF16, bool enabled = true);

 private:
  ScopedValue<AutocastMode> scoped_;
};

namespace detail {
// The inputs as the policy of `op` wants them. Only f32, f16 and bf16 take part; f64, integers and
// bool stay.
TensorList autocast_inputs(const Op& op, std::span<const Tensor> inputs);
}  // namespace detail

}  // namespace tessera
