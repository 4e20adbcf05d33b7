// A parameter as the backwards of a data-parallel model know it.
#pragma once

#include <cstdint>
#include <string>

#include <tessera/core/tensor.h>

namespace tessera::distributed {

struct ManagedParam {
  std::string name;
  Tensor tensor;
  bool ready = false;  // its gradient of this backward has come, or is known not to
  // After a reduction: what was reduced, to see whether a step or zero_grad came since.
  bool reduced = false;
  uint32_t gradient_version = 0, parameter_version = 0;

  // Whether `.grad` is what the last reduction left there, and no step was made with it.
  bool holds_reduced() const {
    if (!reduced) return false;
    const Tensor grad = tensor.grad();
    return grad.defined() && grad.version() == gradient_version &&
           tensor.version() == parameter_version;
  }
  // A reduction has left there what `.grad` holds, if anything.
  void set_reduced() {
    const Tensor grad = tensor.grad();
    reduced = grad.defined();
    if (!reduced) return;
    gradient_version = grad.version();
    parameter_version = tensor.version();
  }
};

}  // namespace tessera::distributed
