// A parameter's state in the backwards of a data-parallel model.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <tessera/core/tensor/tensor.h>

namespace tessera::distributed {

// Identifies a gradient at some time: its object and how often that had been written. The number of
// writes alone is not enough, since another gradient may have had as many.
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
  // If the ranks hold shards of the gradient: the shard of the parameter that this rank updates,
  // whose `.grad` is this rank's shard of the reduced gradient. Else undefined.
  Tensor shard = {};
  bool ready = false;  // its gradient of this backward has come, or is known not to
  // After a reduction: the reduced gradient, to detect a step or zero_grad since.
  bool reduced = false;
  GradientState gradient = {};
  uint32_t parameter_version = 0;
  bool undivided = false;  // `.grad` is a sum that goes on, see [Note: sums of a step]

  // The parameter whose `.grad` holds the reduced gradient.
  const Tensor& updated() const { return shard.defined() ? shard : tensor; }
  // Whether `.grad` is what the last reduction left there, and no step was made with it.
  bool holds_reduced() const {
    return reduced && gradient.is_that_of(updated().grad()) &&
           updated().version() == parameter_version;
  }
  // Records that a reduction has written `.grad`, if there is one.
  void set_reduced() {
    const Tensor grad = updated().grad();
    reduced = grad.defined();
    if (!reduced) return;
    gradient.note(grad);
    parameter_version = updated().version();
  }
};

}  // namespace tessera::distributed
