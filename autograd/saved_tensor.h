// A tensor saved for backward, with a check that it was not written since.
#pragma once

#include <any>
#include <memory>
#include <string>
#include <string_view>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/node.h>
#include <tessera/autograd/op.h>

namespace tessera {

// torch's name of the in-place form of an op: "mul_" for "mul".
std::string in_place_name(std::string_view op);

struct SavedTensorHookPair {
  SavedTensorHooks::Pack pack;
  SavedTensorHooks::Unpack unpack;
};
// The active hooks of the current context, innermost last.
struct SavedTensorHookStack {
  std::vector<std::shared_ptr<SavedTensorHookPair>> hooks;
};

class SavedTensor {
 public:
  SavedTensor() = default;
  // Keeps elements, not history: a saved output must not hold the node that made it. A leaf is kept
  // itself, so that second derivatives reach it.
  explicit SavedTensor(const Tensor& tensor);

  bool defined() const { return kept_.defined() || packed_.has_value(); }
  // Returns the tensor with `history` as its past if grad mode is on. Throws AutogradError if its
  // elements were written since; `op` and `what` ("input 1") appear in the text.
  Tensor unpack(const Edge& history, const Op& op, const char* what, int index) const;
  void reset();

 private:
  Tensor kept_;
  uint32_t version_ = 0;
  std::shared_ptr<SavedTensorHookPair> hooks_;
  std::any packed_;
};

// A tensor that forward made for backward: it goes through the hooks, but has no version check,
// since nobody else has it.
class SavedExtra {
 public:
  explicit SavedExtra(const Tensor& tensor);
  Tensor unpack() const;

 private:
  Tensor kept_;
  std::shared_ptr<SavedTensorHookPair> hooks_;
  std::any packed_;
};

}  // namespace tessera
