// Clipping of the gradients of prepared models: clip_grad_norm() and clip_grad_value() of the
// Accelerator, and the setting gradient_clipping.
//
// If the parameters are all the gradients of prepared optimizers, the factor goes into their next
// steps, which apply it as they read the gradients; if no step comes, the gradients are multiplied
// before more is added to them (apply()).
#pragma once

#include <vector>

#include <tessera/accelerate/settings/settings.h>
#include <tessera/accelerate/step/loss_scaling.h>
#include <tessera/accelerate/step/prepared_objects.h>

namespace tessera {

class Clipping {
 public:
  Clipping(const accelerate::Settings& settings, const PreparedObjects& prepared,
           LossScaling& loss_scaling)
      : settings_(settings), prepared_(prepared), loss_scaling_(loss_scaling) {}
  Clipping(const Clipping&) = delete;
  Clipping& operator=(const Clipping&) = delete;

  // At the boundary returns the norm before clipping; elsewhere that of the last boundary, and
  // nothing is clipped.
  Tensor clip_norm(const TensorList& parameters, double max_norm, double norm_type);
  void clip_value(const TensorList& parameters, double limit);

  // Applies the setting if the program has not clipped (`clipped`) this optimizer's gradients.
  void before_step(OptimizerRecord& record, bool clipped);
  // Applies pending factors to the gradients before more is added to them.
  void apply();
  // Discards the factor without applying it.
  static void drop(OptimizerRecord& record);

  bool in_graphed_step = false;  // norms are written to one place, which every graph knows

 private:
  bool is_at_boundary(const TensorList& parameters) const;
  using Owners = std::vector<OptimizerRecord*>;
  Owners owners_of(const TensorList& parameters) const;
  bool share_a_factor(const Owners& owners);
  Tensor fold(const Owners& owners, const TensorList& parameters, double max_norm,
              double norm_type);
  static void apply(OptimizerRecord& record);
  Tensor keep_norm(ModelRecord& holder, const Tensor& first, const Tensor& norm) const;

  const accelerate::Settings& settings_;
  const PreparedObjects& prepared_;
  LossScaling& loss_scaling_;
};

}  // namespace tessera
