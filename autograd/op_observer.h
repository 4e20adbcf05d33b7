// Observes the ops of a context as they run, for precision/report.h.
#pragma once

#include <span>

#include <tessera/autograd/op.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

class OpObserver {
 public:
  virtual ~OpObserver() = default;
  // Called after forward with the inputs as the op read them, after autocast. In-place forms are
  // not reported.
  virtual void saw(const Op& op, std::span<const Tensor> inputs,
                   std::span<const Tensor> results) = 0;
};

// The current context's; set it with ScopedValue.
struct OpObserverSlot {
  OpObserver* observer = nullptr;
};

}  // namespace tessera
