#include <tessera/core/kernels/fp8/scale_history.h>

#include <algorithm>
#include <cmath>

#include <tessera/core/error.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/fp8/quantize.h>

namespace tessera::kernels {

void roll_scales(const ScaleHistory& history, const ScaleRules& rules) {
  constexpr const char* kRoll = "roll_scales";
  const int64_t steps = history.rows.size(0), operands = history.rows.size(1);
  TS_CHECK_SHAPE(steps > 0 && history.maxima.numel() == operands &&
                     history.scales.numel() == operands && history.position.numel() == 2,
                 kRoll, "expects maxima and scales of the ", operands, " operands of ",
                 history.rows, "; got ", history.maxima, " and ", history.scales);
  const Device& device = history.rows.device();
  if (device.is_cuda()) return on_cuda<roll_scales>(kRoll, device, history, rules);
  if (device.is_meta()) return;
  float* const maxima = history.maxima.data_as<float>();
  if (std::all_of(maxima, maxima + operands, [](float value) { return value == 0; })) return;
  int64_t* const position = history.position.data_as<int64_t>();
  const int64_t count = std::min(position[0] + 1, steps);
  const int64_t newest = position[0] == 0 ? 0 : (position[1] + 1) % steps;
  float* const rows = history.rows.data_as<float>();
  for (int64_t i = 0; i < operands; ++i) {
    float amax = rows[newest * operands + i] = std::isfinite(maxima[i]) ? maxima[i] : 0;
    for (int64_t row = 0; !rules.of_newest && row < count; ++row) {
      amax = std::max(amax, rows[row * operands + i]);
    }
    if (amax > 0) {
      history.scales.data_as<float>()[i] = fp8_scale(
          amax, i % 3 == 2 ? rules.grad_format : rules.format, rules.power_of_two, rules.margin);
    }
    maxima[i] = 0;
  }
  position[0] = count;
  position[1] = newest;
}

}  // namespace tessera::kernels
