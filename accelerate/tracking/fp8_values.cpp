#include <tessera/accelerate/tracking/fp8_values.h>

#include <cmath>

namespace tessera::accelerate {

TrackedValues Fp8Values::next(std::span<const precision::Fp8Report> models) {
  int64_t calls = 0, fallbacks = 0;
  Totals now;
  for (const precision::Fp8Report& model : models) {
    calls += model.fp8_calls();
    fallbacks += model.fallbacks();
    for (const precision::Fp8LayerReport& layer : model.layers) {
      for (const precision::Fp8OperandReport& operand : layer.operands) {
        const auto elements = static_cast<double>(operand.elements);
        now.elements += elements;
        now.saturated += std::round(operand.saturated * elements);
        now.underflown += std::round(operand.underflown * elements);
        now.not_finite += static_cast<double>(operand.not_finite);
      }
    }
  }
  const Totals before = now.elements < last_.elements ? Totals() : last_;
  last_ = now;
  const double elements = now.elements - before.elements;
  const auto share = [&](double count) { return elements > 0 ? count / elements : 0.0; };
  return {{"fp8",
           {{"calls", calls},
            {"fallbacks", fallbacks},
            {"saturated", share(now.saturated - before.saturated)},
            {"underflown", share(now.underflown - before.underflown)},
            {"not_finite", static_cast<int64_t>(now.not_finite - before.not_finite)}}}};
}

}  // namespace tessera::accelerate
