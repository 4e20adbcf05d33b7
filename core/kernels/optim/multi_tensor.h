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
//
// Low-precision weights. `shadow` is optional and receives the new value of `param` rounded to its
// own dtype in the same pass. It serves both schemes:
//   - master weights: pass the f32 master as `param` and the model's bf16 weight as `shadow`;
//   - autocast: pass the f32 weight as `param` and its bf16 copy as `shadow`.
// Without one, a bf16 param is read, updated in f32 and rounded back.
//
// What changes from step to step can be told by device memory beside the parameters (StepScalars),
// so that a step reads nothing back to the host and a captured graph can be replayed.
#pragma once

#include <span>
#include <vector>

#include <tessera/core/tensor.h>

namespace tessera::kernels {

inline constexpr int64_t kMultiTensorChunk = 16384;

// Indices into StepScalars::values, an array of kNumStepScalars.
enum StepScalar : int {
  kLearningRate,
  kStep,           // 1 in the first step
  kGradientScale,  // gradients are multiplied by it as they are read: clip factor / loss scale
  kSkipStep,       // not 0: the update leaves everything as it is (found_inf)
  kNumStepScalars,
};
// The tensors are f64 of one element, beside those that are updated, and may be undefined.
struct StepScalars {
  StepScalars(const double* values) : values(values) {}
  const double* values;               // host memory
  const double* on_device = nullptr;  // memory of a GPU that kernels read instead of `values`
  Tensor gradient_factor = {};  // gradients are multiplied by it too (multi_tensor_clip_factor)
  Tensor found = {};            // not 0: the update leaves everything as it is
  Tensor skipped = {};          // of the steps that kStep counts, how many were left out
};

struct AdamOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled =
      true;  // AdamW: param *= 1 - lr * weight_decay; Adam: grad += weight_decay * param
  bool maximize = false;
};
struct AdamTensors {
  Tensor param;
  Tensor grad;
  Tensor exp_avg;
  Tensor exp_avg_sq;
  Tensor max_exp_avg_sq = {};  // amsgrad where defined
  Tensor shadow = {};
};
// torch.optim.AdamW and Adam.
void multi_tensor_adam(std::span<const AdamTensors> tensors, const AdamOptions& options,
                       const StepScalars& scalars);

struct SgdOptions {
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
};
struct SgdTensors {
  Tensor param;
  Tensor grad;
  Tensor momentum_buffer = {};  // needed where momentum != 0
  bool first = false;           // the buffer holds nothing yet: it becomes the gradient, undamped
  Tensor shadow = {};
};
// torch.optim.SGD.
void multi_tensor_sgd(std::span<const SgdTensors> tensors, const SgdOptions& options,
                      const StepScalars& scalars);

struct LionOptions {
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0;  // decoupled
  bool maximize = false;
};
struct LionTensors {
  Tensor param;
  Tensor grad;
  Tensor exp_avg;
  Tensor shadow = {};
};
// Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2.
void multi_tensor_lion(std::span<const LionTensors> tensors, const LionOptions& options,
                       const StepScalars& scalars);

struct AdagradOptions {
  double lr_decay = 0;
  double eps = 1e-10;
  double weight_decay = 0;
  bool maximize = false;
};
struct AdagradTensors {
  Tensor param;
  Tensor grad;
  Tensor state_sum;  // filled with the initial accumulator value
  Tensor shadow = {};
};
// torch.optim.Adagrad.
void multi_tensor_adagrad(std::span<const AdagradTensors> tensors, const AdagradOptions& options,
                          const StepScalars& scalars);

struct RmspropOptions {
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool maximize = false;
};
struct RmspropTensors {
  Tensor param;
  Tensor grad;
  Tensor square_avg;
  Tensor grad_avg = {};         // centered where defined
  Tensor momentum_buffer = {};  // needed where momentum != 0; starts as zeros
  Tensor shadow = {};
};
// torch.optim.RMSprop.
void multi_tensor_rmsprop(std::span<const RmspropTensors> tensors, const RmspropOptions& options,
                          const StepScalars& scalars);

// The sums of |x|^p of each tensor (p = 2, 1 or other), or the largest |x| for p = infinity.
// f64 partials of blocks of kMultiTensorChunk elements in row-major order are combined in a binary
// tree over the block index: the result depends on nothing but the values. NaN propagates.
std::vector<double> multi_tensor_power_sums(std::span<const Tensor> tensors, double p = 2);
// The norm of all tensors as one vector: their power sums combined in a binary tree over the list,
// to the power 1 / p. Infinity or NaN tells of a non-finite element at no further cost.
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
