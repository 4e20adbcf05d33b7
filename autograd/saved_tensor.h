// A tensor kept for backward, with the check that nobody wrote to it since.
#pragma once

#include <any>
#include <memory>
#include <string>
#include <string_view>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/node.h>
#include <tessera/autograd/op.h>

namespace tessera {

// torch's name of the form of an op that writes its first input: "mul_" of "mul".
std::string in_place_name(std::string_view op);

struct SavedTensorHookPair {
  SavedTensorHooks::Pack pack;
  SavedTensorHooks::Unpack unpack;
};
// The hooks in force in the current context, innermost last.
struct SavedTensorHookStack {
  std::vector<std::shared_ptr<SavedTensorHookPair>> hooks;
};

class SavedTensor {
 public:
  SavedTensor() = default;
  // Keeps elements, not history: a saved output must not hold the node that made it. A leaf is
  // kept as itself, so that second derivatives reach it.
  explicit SavedTensor(const Tensor& tensor);

  bool defined() const { return kept_.defined() || packed_.has_value(); }
  // Gives the tensor back with `history` as its past where grad mode is on. Throws AutogradError
  // where its elements were written since; `op` and `what` ("input 1") go into the text.
  Tensor unpack(const Edge& history, const Op& op, const char* what, int index) const;
  void reset();

 private:
  Tensor kept_;
  uint32_t version_ = 0;
  std::shared_ptr<SavedTensorHookPair> hooks_;
  std::any packed_;
};

// What forward kept of its own for backward: passes the hooks, and may be written meanwhile, as it
// is nobody else's.
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
