// Inputs and weights that both a test and the script of its golden file make.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <tessera/core/factory/factory.h>

namespace tessera::tests {

// numbers() of tests/golden/tensor_parallel_cases.py: f64.
inline Tensor golden_numbers(const Shape& shape, int64_t salt) {
  std::vector<double> values;
  for (int64_t i = 0; i < numel_of(shape); ++i) {
    values.push_back(static_cast<double>((i * 37 + salt * 11) % 23 - 11) / 16);
  }
  return tensor(std::span<const double>(values), shape, kF64);
}

}  // namespace tessera::tests
