#include <tessera/optim/clip.h>

#include <algorithm>
#include <cmath>

#include <tessera/core/cuda/graph.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/placement_slot.h>
#include <tessera/core/raw_views.h>
#include <tessera/optim/optimizer.h>

namespace tessera::optim {
namespace {

TensorList gradients_of(const TensorList& parameters) {
  TensorList gradients;
  for (const Tensor& parameter : parameters) {
    if (Tensor gradient = parameter.grad(); gradient.defined()) {
      gradients.push_back(std::move(gradient));
    }
  }
  return gradients;
}

}  // namespace

Tensor clip_grad_norm(const TensorList& parameters, double max_norm, const ClipOptions& options) {
  TS_CHECK(max_norm >= 0, "clip_grad_norm", "max_norm must not be negative; got ", max_norm);
  const TensorList gradients = gradients_of(parameters);
  for (const Tensor& gradient : gradients) check_whole(gradient, "clip_grad_norm");
  TS_CHECK(options.fold_into == nullptr || options.gradient_scale == 1, "clip_grad_norm",
           "the optimizer in fold_into says itself what gradients are multiplied by; leave out "
           "gradient_scale");
  const double scale = options.fold_into != nullptr
                           ? options.fold_into->next_step().data_as<double>()[0]
                           : options.gradient_scale;
  TS_CHECK_AS(UnsupportedError, scale == 1 || gpu::Capture::current() == nullptr, "clip_grad_norm",
              "a factor of the host would be a constant of the graph; keep it on the device (a "
              "GradScaler with on_device)");
  const bool on_device = !gradients.empty() && gradients[0].device().is_cuda();
  if (on_device && options.fold_into != nullptr && !options.error_if_nonfinite) {
    const Tensor norm_and_factor = kernels::multi_tensor_clip_factor(
        gradients, options.norm_type, scale, max_norm, options.fold_into->next_step_factor());
    options.fold_into->scale_next_step(raw::select(norm_and_factor, 0, 1));
    return raw::select(norm_and_factor, 0, 0);
  }
  const double norm = kernels::multi_tensor_norm(gradients, options.norm_type) * scale;
  TS_CHECK(!options.error_if_nonfinite || std::isfinite(norm), "clip_grad_norm",
           "the norm of the gradients is ", norm,
           "; look for the op with AnomalyMode, or lower the learning rate");
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1)) {  // also where the norm is NaN
    if (options.fold_into != nullptr) {
      options.fold_into->scale_next_step(factor);
    } else {
      kernels::multi_tensor_scale(gradients, &factor);
    }
  }
  return scalar_tensor(norm, kF64);
}

void clip_grad_value(const TensorList& parameters, double limit, double gradient_scale) {
  TS_CHECK(limit >= 0, "clip_grad_value", "the limit must not be negative; got ", limit);
  TS_CHECK(gradient_scale > 0, "clip_grad_value", "gradient_scale must be positive; got ",
           gradient_scale);
  kernels::multi_tensor_clamp(gradients_of(parameters), limit / gradient_scale);
}

}  // namespace tessera::optim
