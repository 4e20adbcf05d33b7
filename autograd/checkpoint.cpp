#include <tessera/autograd/checkpoint.h>

#include <map>
#include <memory>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/random.h>

namespace tessera {
namespace {

struct StopRecomputation {};  // everything that backward may ask for is there

// [Note: recomputation] In forward, every tensor that an op of f saves passes through a hook which
// keeps only its number. When backward unpacks the first of them, f runs again under the same
// random and autocast state with a hook that keeps the tensors themselves, in the same order; the
// numbers find them. The second graph is dropped. A tensor is given out once for each time it was
// saved, unless the graph is kept for another backward.
class Recomputation {
 public:
  Recomputation(std::function<TensorList(const TensorList&)> function, TensorList inputs)
      : function_(std::move(function)),
        inputs_(std::move(inputs)),
        random_(random_state()),
        autocast_(Context::current().slot<AutocastMode>()) {}

  int next_number() { return count_++; }

  Tensor find(int number) {
    auto found = tensors_.find(number);
    if (found == tensors_.end()) {
      run_again();
      found = tensors_.find(number);
      TS_CHECK_AS(AutogradError, found != tensors_.end(), "checkpoint", "the second run saved ",
                  tensors_.size(), " tensors where the first saved ", count_,
                  "; the function must do the same each time it is called");
    }
    // Given out and forgotten: memory falls as backward goes on. A second backward runs f again.
    Tensor tensor = std::move(found->second);
    tensors_.erase(found);
    return tensor;
  }

 private:
  void run_again() {
    EnableGradGuard grad;
    ScopedValue<RandomState> random(random_state(), random_);
    ScopedValue<AutocastMode> autocast(Context::current().slot<AutocastMode>(), autocast_);
    TensorList inputs;
    for (const Tensor& input : inputs_) {
      inputs.push_back(input.defined() ? detach(input) : Tensor());
      if (input.defined() && input.requires_grad()) inputs.back().set_requires_grad();
    }
    int number = 0;
    tensors_.clear();
    SavedTensorHooks hooks(
        [&](const Tensor& tensor) {
          tensors_[number] = detach(tensor);
          if (++number == count_) throw StopRecomputation{};
          return std::any();
        },
        [](const std::any&) -> Tensor {
          TS_THROW(AutogradError, "checkpoint", "backward inside the function is not possible");
        });
    try {
      function_(inputs);
    } catch (const StopRecomputation&) {
    }
  }

  std::function<TensorList(const TensorList&)> function_;
  TensorList inputs_;
  RandomState random_;
  AutocastMode autocast_;
  int count_ = 0;
  std::map<int, Tensor> tensors_;
};

}  // namespace

TensorList checkpoint(const std::function<TensorList(const TensorList&)>& function,
                      const TensorList& inputs) {
  if (!grad_enabled()) return function(inputs);
  auto recomputation = std::make_shared<Recomputation>(function, inputs);
  // The hooks hold the recomputation strongly, it holds no node: no cycle.
  SavedTensorHooks hooks(
      [recomputation](const Tensor&) { return std::any(recomputation->next_number()); },
      [recomputation](const std::any& number) {
        return recomputation->find(std::any_cast<int>(number));
      });
  return function(inputs);
}

Tensor checkpoint(const std::function<Tensor(const Tensor&)>& function, const Tensor& input) {
  return checkpoint(
      [function](const TensorList& inputs) { return TensorList{function(inputs[0])}; },
      TensorList{input})[0];
}

}  // namespace tessera
