// A parameter as the backwards of a data-parallel model know it.
#pragma once

#include <cstdint>
#include <string>

#include <tessera/core/tensor.h>

namespace tessera::distributed {

struct ManagedParam {
  std::string name;
  Tensor tensor;
  // Where the ranks hold parts of the gradient: the part of the parameter that this rank updates,
  // whose `.grad` is this rank's part of the reduced gradient. Else undefined.
  Tensor shard = {};
  bool ready = false;  // its gradient of this backward has come, or is known not to
  // After a reduction: what was reduced, to see whether a step or zero_grad came since.
  bool reduced = false;
  uint32_t gradient_version = 0, parameter_version = 0;
  bool undivided = false;  // `.grad` is a sum that goes on, see [Note: sums of a step]

  // Whose `.grad` holds what was reduced.
  const Tensor& updated() const { return shard.defined() ? shard : tensor; }
  // Whether `.grad` is what the last reduction left there, and no step was made with it.
  bool holds_reduced() const {
    if (!reduced) return false;
    const Tensor grad = updated().grad();
    return grad.defined() && grad.version() == gradient_version &&
           updated().version() == parameter_version;
  }
  // A reduction has left there what `.grad` holds, if anything.
  void set_reduced() {
    const Tensor grad = updated().grad();
    reduced = grad.defined();
    if (!reduced) return;
    gradient_version = grad.version();
    parameter_version = updated().version();
  }
};

}  // namespace tessera::distributed
