// Loss scaling: small f16 gradients are lifted into f16's range, and steps whose gradients
// overflowed are left out.
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
// Gradients are never written: the inverse scale goes into Optimizer::next_step(), which the update
// multiplies by as it reads them, in f32; so f16 gradients can be unscaled too. Whether one of them
// is not finite is seen by one reading pass, or at no cost from a norm that was taken anyway.
//
// The scale begins at init_scale, is multiplied by backoff_factor where a gradient of any optimizer
// was not finite and by growth_factor after growth_interval updates without (not beyond f32). Where
// both factors are 1 it stays. With a hysteresis of n the first n - 1 overflows since it grew leave
// their steps out and the scale as it is (DeepSpeed).
//
// An optimizer is anything with parameters(group), num_groups(), next_step() and step(): this floor
// knows no update rules and no ranks. Optimizers are known by their next_step() tensor.
//
// Where rank threads or processes hold different gradients (sharded ones, or a parameter that is
// each rank's own affair) an Agreement makes one finding of all: else some would step and others
// not. Reduced gradients are equal on all ranks and need none.
//
// On a GPU the host waits in each step for what was found. With on_device it does not: scale and
// finding stay beside the loss, the update reads them there, and the whole iteration can be
// captured in a graph (optim/graphed_step.h). Then step() returns true also where the step was left
// out, a schedule does not know of it, and loss_scale() and its like read the device when asked.
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
  bool enabled = true;  // false: every call passes through, scale 1, nothing is looked for
  // A scale below it is an error: gradients that overflow even so are NaN or infinite by
  // themselves, and leaving out steps would go on for ever.
  double min_scale = 0x1p-32;
  int64_t hysteresis = 1;               // overflows until the scale falls; 1 with on_device
  bool consecutive_hysteresis = false;  // an update without overflow begins that count anew
  bool on_device = false;               // for losses on a GPU; others are scaled as ever
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

// One that can be told by tensors beside its parameters.
template <class T>
concept DeviceScaledOptimizer = ScaledOptimizer<T> && requires(T& optimizer, const Tensor& value) {
  optimizer.scale_next_step(value);
  optimizer.skip_next_step_where(value);
};

class GradScaler {
 public:
  // Throws ConfigError for options that cannot work.
  explicit GradScaler(const GradScalerOptions& options = {});

  bool enabled() const { return options_.enabled; }
  const GradScalerOptions& options() const { return options_; }
  // These throw ValueError where the scale on a device fell below min_scale.
  double loss_scale() const;
  int64_t growth_tracker() const;  // good updates since the last change
  int64_t skipped_steps() const;   // optimizer steps left out so far

  // loss * loss_scale(). A 16-bit loss comes out as f32: 65536 is more than f16 holds.
  Tensor scale(const Tensor& loss) const;

  // The optimizer's next step divides its gradients by the scale. No pass over them. Throws
  // ValueError where that was done since the last update().
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

  // The optimizer's step was left out for another reason than an overflow, or its gradients were
  // cleared: what it was told by unscale() goes, and the gradients of its next step are unscaled
  // anew. Nothing for one that has come to its step since the last update().
  template <ScaledOptimizer Optimizer>
  void forget(Optimizer& optimizer) {
    if (!forget(optimizer.next_step()) || !is_on_device()) return;
    if constexpr (DeviceScaledOptimizer<Optimizer>) optimizer.scale_next_step(Tensor());
  }

  // The norm of this iteration's gradients, scaled or not, one floating element. It must cover all
  // gradients of the optimizer. Not finite: its step is left out. Throws ValueError before
  // unscale().
  template <ScaledOptimizer Optimizer>
  void note_norm(Optimizer& optimizer, const Tensor& norm) {
    if (enabled()) note_norm(optimizer.next_step(), norm);
  }

  // For a step gate, which is asked before next_step() is read: unscales where nobody did, looks
  // for gradients that are not finite, agrees with the other ranks. Empty: step; else the reason
  // for leaving the step out. Once for each optimizer between two updates, else ValueError.
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

  // before_step() and the step, where no gate does it: false where it was left out.
  template <ScaledOptimizer Optimizer>
  bool step(Optimizer& optimizer) {
    if (!before_step(optimizer).empty()) set_skip(optimizer.next_step());
    return optimizer.step();
  }

  // The next scale. Once for each iteration, after the steps of all optimizers whose gradients
  // carry this scale. Throws ValueError where nothing was unscaled or stepped since the last one,
  // and where the scale fell below min_scale.
  void update();
  bool update_is_due() const;  // some optimizer came to its step since the last update()

  void set_agreement(Agreement agreement) { agreement_ = std::move(agreement); }

  // scale, growth_tracker, skipped_steps, the constants and, with a hysteresis, its count. Between
  // iterations: throws ValueError where an update is due. load_state_dict takes over the constants
  // too; whether scaling is enabled stays.
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
  // Where on_device_ is defined, what was last read of it.
  mutable double scale_;
  mutable int64_t growth_tracker_ = 0;
  mutable int64_t skipped_steps_ = 0;
  int64_t overflows_left_;       // until the scale falls, that one included
  mutable Tensor on_device_;     // f64 [4]: kernels::LossScaleState, made by the first loss
  std::vector<Record> records_;  // of this iteration
  Agreement agreement_;
};

}  // namespace tessera::precision
