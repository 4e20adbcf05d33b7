// The node of a call of differentiable().
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/node.h>
#include <tessera/autograd/saved_tensor.h>

namespace tessera {

class OpNode final : public Node, public std::enable_shared_from_this<OpNode> {
 public:
  OpNode(const Op& op, BackwardFunction backward) : op_(op), backward_(std::move(backward)) {}

  TensorList apply(TensorList grads) override;
  std::string name() const override { return std::string(op_.name); }
  void release_saved() override;
  bool takes_column_sums(int output) const override {
    return output == 0 && op_.bias >= 0 && (needs & index_bit(static_cast<size_t>(op_.bias))) != 0;
  }

  const Op& op() const { return op_; }

  // Filled by differentiable.cpp.
  IndexMask needs = 0;                    // inputs whose gradient is wanted
  IndexMask kept = 0;                     // inputs that the wanted gradients read
  std::vector<TensorMeta> input_metas;    // of absent inputs: default values
  std::vector<SavedTensor> saved_inputs;  // undefined where not read
  std::vector<SavedTensor> saved_outputs;
  std::vector<SavedExtra> extras;
  bool released = false;

 private:
  const Op& op_;
  BackwardFunction backward_;
};

}  // namespace tessera
