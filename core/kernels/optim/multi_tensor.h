// One pass over many tensors: optimizer updates, the global gradient norm, scaling, averaging.
//
// A call cuts all its tensors into chunks of kMultiTensorChunk elements and runs the chunks in
// parallel, so that a hundred small biases cost what one tensor of their total size does. Every
// element is read and written once: an AdamW step on f32 moves 28 bytes an element.
//
// Types. `param` is f64, f32, bf16 or f16; `grad` any of these; states are f32 (f64 where param is
// f64) and so is the arithmetic, in torch's order of operations. Tensors of one entry have one
// shape; param and states are dense with equal strides, a grad with other strides is copied first.
// Written tensors get a new version. Meta tensors are checked and left alone. Throws ShapeError,
// DTypeError, DeviceError before anything is written.
// Where the rule has kRoundsStates and param is not f64, all states of a call may be bf16 instead:
// they are widened, and rounded as state_rounding.h says.
//
// Low-precision weights. `model_copy` is optional and receives the new value of `param` rounded to
// its own dtype in the same pass. It serves both schemes:
//   - master weights: pass the f32 master as `param` and the model's bf16 weight as `model_copy`;
//   - autocast: pass the f32 weight as `param` and its bf16 copy as `model_copy`.
// Without one, a bf16 param is read, updated in f32 and rounded back.
//
// What changes from step to step can be told by device memory beside the parameters (StepScalars),
// so that a step reads nothing back to the host and a captured graph can be replayed.
#pragma once

#include <array>
#include <span>
#include <vector>

#include <tessera/core/kernels/optim/state_rounding.h>
#include <tessera/core/kernels/optim/update_rules.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

inline constexpr int64_t kMultiTensorChunk = 16384;

// The tensors are f64 of one element, beside those that are updated, and may be undefined.
struct StepScalars {
  StepScalars(const double* values) : values(values) {}
  const double* values;               // host memory
  const double* on_device = nullptr;  // memory of a GPU that kernels read instead of `values`
  Tensor gradient_factor = {};  // gradients are multiplied by it too (multi_tensor_clip_factor)
  Tensor found = {};            // not 0: the update leaves everything as it is
  Tensor skipped = {};          // of the steps that kStep counts, how many were left out
};

// One parameter of an update. `states` are the rule's, in the order of Rule::kStates; those that
// not all of its options need take part where they are defined.
struct UpdateTensors {
  Tensor param;
  Tensor grad;
  std::array<Tensor, kMaxRuleStates> states = {};
  Tensor model_copy = {};
  StateRounding rounding = {};  // of states in bf16
};
// One step of a rule of update_rules.h:
//
//     multi_tensor_update<rules::AdamW>(tensors, {.weight_decay = 0.1}, scalars);
template <class Rule>
void multi_tensor_update(std::span<const UpdateTensors> tensors,
                         const typename Rule::Options& options, const StepScalars& scalars);

// The sums of |x|^p of each tensor (p = 2, 1 or other), or the largest |x| for p = infinity. NaN
// propagates. For p = 2 it is the exact sum of squares, rounded once (multi_tensor_square_sum.h),
// which does not depend on how a tensor is split, on threads or on the device. For other p, f64
// partials of blocks of kMultiTensorChunk elements in row-major order are combined in a binary tree
// over the block index; the result depends only on the values and the tensors they are in.
std::vector<double> multi_tensor_power_sums(std::span<const Tensor> tensors, double p = 2);
// The norm of all tensors as one vector. For p = 2 it is the root of their exact sum of squares,
// rounded to f64 before. For other p, their power sums are combined in a binary tree over the list,
// to the power 1 / p. Infinity or NaN shows a non-finite element at no further cost. A norm over
// several ranks is made of their multi_tensor_square_sum().
double multi_tensor_norm(std::span<const Tensor> tensors, double p = 2);

// What clipping needs, beside the tensors: f64 [3], the norm, which is multi_tensor_norm() * scale,
// min(1, max_norm / (norm + 1e-6)), NaN where the norm is, and 1 where the norm is not finite, else
// 0. `factor`: f64, one element beside the tensors, which multiplies both `scale` and the second
// result; or undefined. A GPU reads nothing back. There is at least one tensor.
Tensor multi_tensor_clip_factor(std::span<const Tensor> tensors, double p, double scale,
                                double max_norm, const Tensor& factor = {});
// f64 [1]: 1 where an element of a tensor, at least one, is not finite, else 0.
Tensor multi_tensor_found_nonfinite(std::span<const Tensor> tensors);

// Elements of a loss scaler's state beside the loss, f64 [kNumLossScaleState].
enum LossScaleState : int {
  kLossScale,
  kGrowthTracker,  // good updates since the scale changed
  kSkippedSteps,
  kFoundNonfinite,  // not 0: since the last update
  kNumLossScaleState,
};
struct LossScaleOptions {
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
};
// The next scale in place, rounded to f32: times backoff_factor where something was found, times
// growth_factor after growth_interval updates without (not beyond f32).
void update_loss_scale(const Tensor& state, const LossScaleOptions& options);

// x *= *factor, in the dtype's compute type.
void multi_tensor_scale(std::span<const Tensor> tensors, const double* factor);
// x = clamp(x, -limit, limit); NaN stays.
void multi_tensor_clamp(std::span<const Tensor> tensors, double limit);
void multi_tensor_zero(std::span<const Tensor> tensors);
// average += weight * (x - average): exponential moving averages, weight = 1 - decay. The lists
// have equal lengths and shapes pair by pair; dtypes may differ.
void multi_tensor_lerp(std::span<const Tensor> averages, std::span<const Tensor> tensors,
                       double weight);

}  // namespace tessera::kernels
