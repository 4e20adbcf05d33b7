// A parameter as the backwards of a data-parallel model know it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <tessera/core/tensor/tensor.h>

namespace tessera::distributed {

// A gradient as it was at some time: which object it was and how often that had been written. The
// number of writes alone says nothing, as another gradient may have had as many.
class GradientState {
 public:
  void note(const Tensor& gradient) {
    counter_ = gradient.impl()->version;
    writes_ = gradient.version();
  }
  bool is_that_of(const Tensor& gradient) const {
    return gradient.defined() && counter_.lock() == gradient.impl()->version &&
           writes_ == gradient.version();
  }

 private:
  std::weak_ptr<VersionCounter> counter_;  // the gradient's memory may go
  uint32_t writes_ = 0;
};

struct ManagedParam {
  std::string name;
  Tensor tensor;
  // Where the ranks hold parts of the gradient: the part of the parameter that this rank updates,
  // whose `.grad` is this rank's part of the reduced gradient. Else undefined.
  Tensor shard = {};
  bool ready = false;  // its gradient of this backward has come, or is known not to
  // After a reduction: what was reduced, to see whether a step or zero_grad came since.
  bool reduced = false;
  GradientState gradient = {};
  uint32_t parameter_version = 0;
  bool undivided = false;  // `.grad` is a sum that goes on, see [Note: sums of a step]

  // Whose `.grad` holds what was reduced.
  const Tensor& updated() const { return shard.defined() ? shard : tensor; }
  // Whether `.grad` is what the last reduction left there, and no step was made with it.
  bool holds_reduced() const {
    return reduced && gradient.is_that_of(updated().grad()) &&
           updated().version() == parameter_version;
  }
  // A reduction has left there what `.grad` holds, if anything.
  void set_reduced() {
    const Tensor grad = updated().grad();
    reduced = grad.defined();
    if (!reduced) return;
    gradient.note(grad);
    parameter_version = updated().version();
  }
};

}  // namespace tessera::distributed
