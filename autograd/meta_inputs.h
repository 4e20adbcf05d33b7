// What an op calculates with whose inputs lie partly on kMeta. By itself that is a DeviceError; in a
// context that has rules these choose: a stage of a pipeline (distributed/pipeline/stages.h) runs the
// whole model, and what other stages calculate is meta there.
#pragma once

#include <initializer_list>
#include <optional>
#include <span>

#include <tessera/autograd/op.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

class MetaInputs {
 public:
  virtual ~MetaInputs() = default;
  // In place of these, of which some are meta and some are not, inputs that lie on one device;
  // throws where there are none. In place: the first one is written to and stays.
  virtual TensorList resolved(const Op& op, std::span<const Tensor> inputs,
                              bool in_place) const = 0;
};

// The current context's; asked only where an op would throw.
struct MetaInputsSlot {
  const MetaInputs* rules = nullptr;
};

// Whether what stands beside the inputs of an op (a target, an index) may be left unread, since x is
// meta and rules are in force.
bool is_left_unread(const Tensor& x);

// For ops that read or cast inputs before differentiable(), which asks the rules (of a copy they do
// not know): what `op` is to be called with instead, where some of the inputs are meta, some are not
// and rules are in force.
std::optional<TensorList> resolved_inputs(const Op& op,
                                          std::initializer_list<const Tensor*> inputs);

}  // namespace tessera
