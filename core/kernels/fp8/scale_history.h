// Delayed scales: what a step's largest magnitudes do to the scales of the next one.
#pragma once

#include <cstdint>

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// All on one device. Operands come in threes: an input, a weight and an output's gradient.
struct ScaleHistory {
  Tensor rows;      // f32 [steps, operands], a ring
  Tensor position;  // i64 [2]: how many rows there are, and the newest one's number
  Tensor maxima;    // f32 [operands], of this step; 0 where nothing was noted
  Tensor scales;    // f32 [operands]
};
struct ScaleRules {
  DType format = kF8E4M3;       // of inputs and weights
  DType grad_format = kF8E5M2;  // of gradients
  bool of_newest = false;       // else of the largest of all rows
  bool power_of_two = false;
  int margin = 0;
};
// The maxima become the newest row, as 0 where they are not finite, and scales follow, but for
// operands that have no other maximum than 0; then the maxima are 0. Where all of them are 0
// nothing changes. The host is not waited for. Costs a read of the rows.
void roll_scales(const ScaleHistory& history, const ScaleRules& rules);

}  // namespace tessera::kernels
