// Values about fp8 linear layers that trackers get in addition to a program's.
//
// | name             | of all layers that take part, on this rank                         |
// |------------------|--------------------------------------------------------------------|
// | `fp8/calls`      | calls in fp8, since the model was prepared                      |
// | `fp8/fallbacks`  | calls in another precision, since then                             |
// | `fp8/saturated`  | share of elements that ended at the largest number, since the last |
// | `fp8/underflown` | share that became 0, since the last                                |
// | `fp8/not_finite` | quantizations with an infinity or NaN, since the last              |
//
// "The last" means the previous call. Shares are those of x, W and dy together; 0 if nothing was
// quantized.
#pragma once

#include <cstdint>
#include <span>

#include <tessera/accelerate/tracking/tracker.h>
#include <tessera/precision/fp8_linear.h>

namespace tessera::accelerate {

class Fp8Values {
 public:
  // One group "fp8". Counts that were reset in between restart.
  TrackedValues next(std::span<const precision::Fp8Report> models);

 private:
  struct Totals {
    double elements = 0, saturated = 0, underflown = 0, not_finite = 0;
  };
  Totals last_;
};

}  // namespace tessera::accelerate
