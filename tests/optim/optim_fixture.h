// What the tests of optimizers and schedules share: two parameters, and gradients for them.
#pragma once

#include <cmath>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/state/state_dict.h>

namespace tessera::optim {

inline NamedTensors make_parameters(DType dtype = kF32) {
  NamedTensors named = {{"a", tensor({1, 2, 3, 4}).view({2, 2}).clone().to(dtype)},
                        {"b", tensor({-1, 0.5}).to(dtype)}};
  for (const auto& one : named) one.tensor.set_requires_grad();
  return named;
}
// Gradients that change from step to step.
inline void set_gradients(const NamedTensors& parameters, int step) {
  double value = 0.1 * step + 0.3;
  for (const auto& [name, parameter] : parameters) {
    std::vector<double> values;
    for (int64_t i = 0; i < parameter.numel(); ++i)
      values.push_back(value = std::sin(3 * value + 1));
    parameter.set_grad(tensor(values, parameter.shape(), parameter.dtype()));
  }
}
inline std::vector<double> values_of(const NamedTensors& parameters) {
  std::vector<double> values;
  for (const auto& [name, parameter] : parameters) {
    const auto own = parameter.to_vector();
    values.insert(values.end(), own.begin(), own.end());
  }
  return values;
}

}  // namespace tessera::optim
