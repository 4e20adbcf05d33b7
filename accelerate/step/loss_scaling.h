// The loss scale of fp16 in a training: the agreement of the ranks, gradients that wait for a step
// while the scale changes, and norms that spare a step the search for overflow.
// precision/grad_scaler.h has the scale itself. In other precisions the scale is 1 and nothing is
// done.
//
//     loss_scaling.begin(ranks);                    // fp16
//     seed = weight * loss_scaling.scale();         // backward()
//     loss_scaling.note_norm(parameters, norm);     // clip_grad_norm()
//     reason = loss_scaling.before_step(optimizer)  // empty: it steps
//     loss_scaling.update();                        // before the next loss is scaled
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>

#include <tessera/accelerate/settings/settings.h>
#include <tessera/accelerate/step/prepared_objects.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/precision/grad_scaler.h>

namespace tessera {

class LossScaling {
 public:
  LossScaling(const accelerate::Settings& settings, const PreparedObjects& prepared)
      : settings_(settings), prepared_(prepared) {}
  LossScaling(const LossScaling&) = delete;
  LossScaling& operator=(const LossScaling&) = delete;

  void begin(distributed::Group& ranks);
  precision::GradScaler* scaler() { return scaler_ ? &*scaler_ : nullptr; }  // null: no fp16

  double scale() const { return scaler_ ? scaler_->loss_scale() : 1; }
  // Whether the host does not learn the scale, nor skipped steps.
  bool is_on_device() const {
    return scaler_ && scaler_->options().on_device && prepared_.device.is_cuda();
  }
  // UnsupportedError if the host does not learn it.
  void check_steps_are_known() const;

  // Called before the optimizer's gradients are read unscaled; the first call counts.
  void unscale(optim::Optimizer& optimizer);
  // A finite norm shows that all its gradients are finite, so their step need not look for
  // overflow. One that is not finite may have overflowed itself; then the step looks for overflow.
  void note_norm(const TensorList& parameters, const Tensor& norm);
  void forget_norms() { finite_gradients_.clear(); }
  // Why the step is skipped; empty if it is not.
  std::string before_step(optim::Optimizer& optimizer);
  // Called if the step does not come: discards its pending unscaling.
  void forget(optim::Optimizer& optimizer);

  bool update_is_due() const { return scaler_ && scaler_->update_is_due(); }
  // Called after the steps of all optimizers. Gradients that wait for their step are rescaled.
  void update();

 private:
  // Gradients with a finite norm, as they were then. They are held until their step, or until the
  // next backward, so that an address identifies a gradient.
  struct FiniteGradient {
    Tensor gradient;
    uint32_t version;
    Tensor norm;
  };
  Tensor take_finite_norm(const optim::Optimizer& optimizer);

  const accelerate::Settings& settings_;
  const PreparedObjects& prepared_;
  std::optional<precision::GradScaler> scaler_;
  std::unordered_map<TensorImpl*, FiniteGradient> finite_gradients_;
};

}  // namespace tessera
