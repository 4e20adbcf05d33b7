// The settings of the loss scale of fp16: LossScaleOptions.
#include <tessera/accelerate/settings/schema/row.h>

namespace tessera::accelerate {

std::vector<Setting> grad_scaler_settings() {
  using S = Settings;
  using O = AcceleratorOptions;
  using LossScale = LossScaleOptions;
  return {
      {.key = "scaler_init_scale",
       .field = field<&S::scaler_init_scale, &O::loss_scale, &LossScale::init_scale>,
       .help = "first loss scale of fp16",
       .least = 1e-9,
       .most = 1e30},
      {.key = "scaler_growth_factor",
       .field = field<&S::scaler_growth_factor, &O::loss_scale, &LossScale::growth_factor>,
       .help = "of the scale after growth_interval updates without overflow",
       .least = 1,
       .most = 1e6},
      {.key = "scaler_backoff_factor",
       .field = field<&S::scaler_backoff_factor, &O::loss_scale, &LossScale::backoff_factor>,
       .help = "of the scale after an overflow",
       .least = 1e-6,
       .most = 1},
      {.key = "scaler_growth_interval",
       .field = field<&S::scaler_growth_interval, &O::loss_scale, &LossScale::growth_interval>,
       .help = "updates without overflow until the scale grows",
       .least = 1,
       .most = 1e9},
      {.key = "scaler_min_scale",
       .field = field<&S::scaler_min_scale, &O::loss_scale, &LossScale::min_scale>,
       .help = "a scale below it is an error: such gradients are NaN or infinite by themselves",
       .least = 0,
       .most = 1e30},
      {.key = "scaler_hysteresis",
       .field = field<&S::scaler_hysteresis, &O::loss_scale, &LossScale::hysteresis>,
       .help = "overflows until the scale falls, counted since it grew last; each leaves its step "
               "out",
       .least = 1,
       .most = 1e6},
      {.key = "scaler_consecutive_hysteresis",
       .field = field<&S::scaler_consecutive_hysteresis, &O::loss_scale,
                      &LossScale::consecutive_hysteresis>,
       .help = "an update without overflow begins that count anew"},
      {.key = "scaler_on_device",
       .field = field<&S::scaler_on_device, &O::loss_scale, &LossScale::on_device>,
       .help =
           "on a GPU the host does not wait to hear whether a step was left out: schedules count "
           "it"},
      {.key = "scaler_enabled",
       .field = field<&S::scaler_enabled, &O::loss_scale, &LossScale::enabled>,
       .help = "scale losses where mixed_precision is fp16"},
  };
}

}  // namespace tessera::accelerate
