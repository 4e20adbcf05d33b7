// Autocast: each op runs in the precision of its record; casts are inserted as needed.
//
// Casts of leaves are cached (autograd/weight_cache.h): the second use of a weight costs nothing,
// and optimizers write the casts in the pass that writes the leaf, so that a weight is not cast
// again.
//
// Module-boundary casting is the alternative: inside a unit every op reads its parameters in one
// dtype, and activations keep their dtype (precision/autocast.h casts them at the unit's boundary).
// The two exclude each other.
#pragma once

#include <memory>
#include <span>
#include <unordered_set>

#include <tessera/autograd/op.h>
#include <tessera/core/context.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

using TensorSet = std::unordered_set<const TensorImpl*>;

struct AutocastMode {
  bool enabled = false;
  DType dtype = kBF16;  // of ops with Autocast::kLow
  // If set: module-boundary casting. All ops read these tensors, and nothing else, in `dtype`.
  std::shared_ptr<const TensorSet> boundary = {};
};

// Turns autocast on (or off) in a scope. Throws DTypeError unless dtype is f16 or bf16, and
// ConfigError inside a unit with module-boundary casting; turning autocast off there changes
// nothing.
class AutocastGuard {
 public:
  explicit AutocastGuard(DType dtype = kBF16, bool enabled = true);

 private:
  ScopedValue<AutocastMode> scoped_;
};

// The dtype of a loss of these logits. Under autocast, or in a module that casts at its boundary, a
// loss is f32 for any logits: three digits are too few to observe, and the gradient of a scaled f16
// loss, 65536, would be infinite.
inline DType loss_dtype(const Tensor& logits) {
  return is_low_precision(logits.dtype()) && Context::current().slot<AutocastMode>().enabled
             ? kF32
             : logits.dtype();
}

namespace detail {
// The input is a weight, of which the op reads the cached cast.
extern const Op kAutocastWeight;
// The inputs as the policy of `op` requires. Only f32, f16 and bf16 are cast; f64, integers and
// bool are not.
TensorList autocast_inputs(const Op& op, std::span<const Tensor> inputs);
// x as an op with Autocast::kLow reads it.
Tensor autocast_product(const Tensor& x);
// The same for Autocast::kFloat32: for functions composed of ops, which have no record.
Tensor autocast_float32(const Tensor& x);
}  // namespace detail

}  // namespace tessera
