// Loss scaling: lifts small f16 gradients into f16's range, and skips steps whose gradients
// overflowed.
//
//     precision::GradScaler scaler;
//     for (auto& batch : loader) {
//       scaler.scale(model(batch.inputs, batch.targets).loss).backward();
//       scaler.unscale(optimizer);                       // only where something reads gradients
//       const Tensor norm = optim::clip_grad_norm(parameters, 1.0, {.fold_into = &optimizer});
//       scaler.note_norm(optimizer, norm);               // spares the pass that looks for overflow
//       scaler.step(optimizer);                          // false where the step was left out
//       scaler.update();                                 // once, after all optimizers
//       optimizer.zero_grad();
//     }
//
// Gradients are never written: the update multiplies by the inverse scale in Optimizer::next_step()
// as it reads them, in f32, so f16 gradients can be unscaled too. One reading pass finds gradients
// that are not finite, or a norm that was taken anyway shows them at no cost.
//
// The scale begins at init_scale. It is multiplied by backoff_factor if a gradient of any optimizer
// was not finite, and by growth_factor after growth_interval updates without (within f32's range).
// If both factors are 1 it is constant. With a hysteresis of n the first n - 1 overflows since it
// grew skip their steps and leave the scale as it is (DeepSpeed).
//
// An optimizer is anything with parameters(group), num_groups(), next_step() and step(): this
// library knows neither update rules nor ranks. Optimizers are identified by their next_step()
// tensor.
//
// If ranks hold different gradients (sharded ones, or a parameter that ranks do not share) an
// Agreement combines their findings; else some would step and others not. Reduced gradients are
// equal on all ranks and need none.
//
// On a GPU the host waits in each step for the finding. With on_device it does not: scale and
// finding stay on the device, the update reads them there, and the whole iteration can be captured
// in a graph (optim/graphed_step.h). Then step() returns true also for a skipped step, a schedule
// does not know of it, and loss_scale() and similar functions read the device.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::precision {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  bool enabled = true;  // false: every call passes through, scale 1, without checks
  // A scale below it is an error: gradients that overflow even then are not finite at any scale,
  // and steps would be skipped forever.
  double min_scale = 0x1p-32;
  int64_t hysteresis = 1;               // overflows until the scale falls; 1 with on_device
  bool consecutive_hysteresis = false;  // an update without overflow restarts that count
  bool on_device = false;               // for losses on a GPU; others are scaled as usual
};

// Takes the maximum over all ranks in place. `found`: f32 [1] on the CPU, 0 or 1. Called once for
// each optimizer and step, in the order of the steps, on every rank.
using Agreement = std::function<void(const Tensor& found)>;

template <class T>
concept ScaledOptimizer = requires(T& optimizer) {
  { optimizer.num_groups() } -> std::convertible_to<size_t>;
  { optimizer.parameters(size_t{0}) } -> std::convertible_to<const NamedTensors&>;
  { optimizer.next_step() } -> std::convertible_to<const Tensor&>;
  { optimizer.step() } -> std::convertible_to<bool>;
};

// An optimizer that takes its factor and flag from tensors on its parameters' device.
template <class T>
concept DeviceScaledOptimizer = ScaledOptimizer<T> && requires(T& optimizer, const Tensor& value) {
  optimizer.scale_next_step(value);
  optimizer.skip_next_step_where(value);
};

class GradScaler {
 public:
  // Throws ConfigError for invalid options.
  explicit GradScaler(const GradScalerOptions& options = {});

  bool enabled() const { return options_.enabled; }
  const GradScalerOptions& options() const { return options_; }
  // These throw ValueError if the scale on a device fell below min_scale.
  double loss_scale() const;
  int64_t growth_tracker() const;  // good updates since the last change
  int64_t skipped_steps() const;   // optimizer steps skipped so far

  // loss * loss_scale(). A 16-bit loss becomes f32, since 65536 exceeds f16's range.
  Tensor scale(const Tensor& loss) const;

  // The optimizer's next step divides its gradients by the scale, without a pass over them. Throws
  // ValueError for a second call since the last update().
  template <ScaledOptimizer Optimizer>
  void unscale(Optimizer& optimizer) {
    if (!enabled()) return;
    unscale(optimizer.next_step());
    if (!is_on_device()) return;
    if constexpr (DeviceScaledOptimizer<Optimizer>) {
      optimizer.scale_next_step(inverse_on_device());
    } else {
      fail_without_device_step();
    }
  }
  template <ScaledOptimizer Optimizer>
  bool is_unscaled(Optimizer& optimizer) const {
    return find(optimizer.next_step()) != nullptr;
  }

  // Called if the optimizer's step was skipped for another reason than an overflow, or its
  // gradients were cleared: discards the pending unscale(), so that the gradients of its next step
  // are unscaled anew. No effect for one that has come to its step since the last update().
  template <ScaledOptimizer Optimizer>
  void forget(Optimizer& optimizer) {
    if (!forget(optimizer.next_step()) || !is_on_device()) return;
    if constexpr (DeviceScaledOptimizer<Optimizer>) optimizer.scale_next_step(Tensor());
  }

  // The norm of this iteration's gradients, scaled or not, one floating element, over all gradients
  // of the optimizer. If it is not finite the step is skipped. Throws ValueError before unscale().
  template <ScaledOptimizer Optimizer>
  void note_norm(Optimizer& optimizer, const Tensor& norm) {
    if (enabled()) note_norm(optimizer.next_step(), norm);
  }

  // For a step gate, which is asked before next_step() is read: unscales if that was not done,
  // looks for gradients that are not finite, agrees with the other ranks. Empty: step; else the
  // reason for skipping it. Once for each optimizer between two updates, else ValueError.
  template <ScaledOptimizer Optimizer>
  std::string before_step(Optimizer& optimizer) {
    if (!enabled()) return {};
    if (!is_unscaled(optimizer)) unscale(optimizer);
    Record& record = begin_step(optimizer.next_step());
    if (!record.judged) {
      TensorList gradients;
      for (size_t group = 0; group < optimizer.num_groups(); ++group) {
        append_gradients(optimizer.parameters(group), gradients);
      }
      judge(record, gradients);
    }
    if constexpr (DeviceScaledOptimizer<Optimizer>) {
      if (is_on_device()) {
        optimizer.skip_next_step_where(finish_step_on_device(record));
        return {};
      }
    }
    return finish_step(record);
  }

  // before_step() and the step, without a gate: returns false if it was skipped.
  template <ScaledOptimizer Optimizer>
  bool step(Optimizer& optimizer) {
    if (!before_step(optimizer).empty()) set_skip(optimizer.next_step());
    return optimizer.step();
  }

  // Updates the scale. Call it once for each iteration, after the steps of all optimizers whose
  // gradients carry this scale. Throws ValueError if nothing was unscaled or stepped since the last
  // one, and if the scale fell below min_scale.
  void update();
  bool update_is_due() const;  // some optimizer came to its step since the last update()

  void set_agreement(Agreement agreement) { agreement_ = std::move(agreement); }

  // scale, growth_tracker, skipped_steps, the constants and, with a hysteresis, its count. Call it
  // between iterations: throws ValueError if an update is due. load_state_dict adopts the constants
  // too; whether scaling is enabled does not change.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  struct Record {
    Tensor next_step;  // whose optimizer
    bool judged = false;
    bool stepped = false;
    bool found = false;
    Tensor found_on_device = {};  // f64 [1]
  };
  const Record* find(const Tensor& next_step) const;
  void unscale(const Tensor& next_step);
  bool forget(const Tensor& next_step);  // whether there was anything
  void note_norm(const Tensor& next_step, const Tensor& norm);
  Record& begin_step(const Tensor& next_step);
  static void append_gradients(const NamedTensors& parameters, TensorList& gradients);
  void judge(Record& record, const TensorList& gradients) const;
  std::string finish_step(Record& record);
  static void set_skip(const Tensor& next_step);

  bool is_on_device() const { return on_device_.defined(); }
  Tensor inverse_on_device() const;
  Tensor finish_step_on_device(Record& record);
  [[noreturn]] static void fail_without_device_step();
  void begin_on_device(const Device& device) const;
  void read_device() const;
  void check_scale() const;

  GradScalerOptions options_;
  // The last values read from on_device_, if that is defined.
  mutable double scale_;
  mutable int64_t growth_tracker_ = 0;
  mutable int64_t skipped_steps_ = 0;
  int64_t overflows_left_;       // until the scale falls, that one included
  mutable Tensor on_device_;     // f64 [4]: kernels::LossScaleState, made by the first loss
  std::vector<Record> records_;  // of this iteration
  Agreement agreement_;
};

}  // namespace tessera::precision
