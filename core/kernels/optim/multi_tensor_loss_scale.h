// update_loss_scale() on the elements of LossScaleState, for the CPU and for a GPU.
#pragma once

#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/macros.h>

namespace tessera::kernels {

TS_HD void next_loss_scale(double* state, const LossScaleOptions& options) {
  const double scale = state[kLossScale];
  if (state[kFoundNonfinite] != 0) {
    state[kLossScale] = static_cast<double>(static_cast<float>(scale * options.backoff_factor));
    state[kGrowthTracker] = 0;
  } else if (++state[kGrowthTracker] >= static_cast<double>(options.growth_interval)) {
    const auto grown = static_cast<float>(scale * options.growth_factor);
    if (grown - grown == 0) state[kLossScale] = static_cast<double>(grown);  // finite
    state[kGrowthTracker] = 0;
  }
  state[kFoundNonfinite] = 0;
}

}  // namespace tessera::kernels
