// Autocast: each op runs in the precision that its record names, casts are inserted as needed.
//
// Casts of leaves are kept (autograd/weight_cache.h): the second use of a weight costs nothing, and
// optimizers write them in the pass that writes the leaf, so that a weight is cast once in a
// training.
//
// Module-boundary casting is the other way to a low precision: inside a unit its parameters are
// read in one dtype by every op, and activations stay as they come (precision/autocast.h casts them
// where the unit is entered). The two exclude each other.
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
  // Set: module-boundary casting. These tensors, and nothing else, are read in `dtype`, by all ops.
  std::shared_ptr<const TensorSet> boundary = {};
};

// Autocast on (or off) in a scope. Throws DTypeError unless dtype is f16 or bf16, and ConfigError
// where a unit with module-boundary casting is being called; to switch autocast off there changes
// nothing.
class AutocastGuard {
 public:
  explicit AutocastGuard(DType dtype = kBF16, bool enabled = true);

 private:
  ScopedValue<AutocastMode> scoped_;
};

// The dtype of a loss that is made of these logits. Under autocast, or in a module that casts at its
// boundary, a loss is f32, whatever the logits: three digits are too few to look at, and the
// gradient of a scaled f16 loss, 65536, would be infinite.
inline DType loss_dtype(const Tensor& logits) {
  return is_low_precision(logits.dtype()) && Context::current().slot<AutocastMode>().enabled
             ? kF32
             : logits.dtype();
}

namespace detail {
// Its input is a weight, of which it reads the cast that is kept.
extern const Op kAutocastWeight;
// The inputs as the policy of `op` wants them. Only f32, f16 and bf16 take part; f64, integers and
// bool stay.
TensorList autocast_inputs(const Op& op, std::span<const Tensor> inputs);
// x as an op with Autocast::kLow would read it.
Tensor autocast_product(const Tensor& x);
// The same of Autocast::kFloat32: for functions that are made of ops and have no record.
Tensor autocast_float32(const Tensor& x);
}  // namespace detail

}  // namespace tessera
