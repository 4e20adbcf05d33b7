#include <tessera/autograd/checkpoint.h>

#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/mark_rules.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/random.h>

namespace tessera {
namespace {

struct OpenRecomputationGuards {
  std::vector<CheckpointScope::Around> list;
};

struct RecomputationState {
  bool running = false;
};

struct StopRecomputation {};  // everything that backward may ask for is there

// [Note: recomputation] In forward, every tensor that an op of f saves passes through a hook which
// keeps only its number. When backward unpacks the first of them, f runs again under the same
// random and autocast state with a hook that keeps the tensors themselves, in the same order; the
// numbers find them. The second graph is dropped. A tensor is given out once for each time it was
// saved, unless the graph is kept for another backward.
class Recomputation {
 public:
  Recomputation(CheckpointScope::Again again, TensorList inputs, CheckpointScope::Around around)
      : again_(std::move(again)),
        inputs_(std::move(inputs)),
        around_(std::move(around)),
        guards_(Context::current().slot<OpenRecomputationGuards>().list),
        random_(random_state()),
        autocast_(Context::current().slot<AutocastMode>()),
        marks_(Context::current().slot<MarkRulesSlot>()) {}

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
    const ScopedValue<bool> running(Context::current().slot<RecomputationState>().running, true);
    const std::shared_ptr<void> around = around_ ? around_() : nullptr;
    ScopedValue<RandomState> random(random_state(), random_);
    ScopedValue<AutocastMode> autocast(Context::current().slot<AutocastMode>(), autocast_);
    ScopedValue<MarkRulesSlot> marks(Context::current().slot<MarkRulesSlot>(), marks_);
    std::list<std::shared_ptr<void>> guards;  // the last one ends first
    for (const CheckpointScope::Around& guard : guards_) guards.push_front(guard());
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
      again_(inputs);
    } catch (const StopRecomputation&) {
    }
  }

  CheckpointScope::Again again_;
  TensorList inputs_;
  CheckpointScope::Around around_;
  std::vector<CheckpointScope::Around> guards_;
  RandomState random_;
  AutocastMode autocast_;
  MarkRulesSlot marks_;
  int count_ = 0;
  std::map<int, Tensor> tensors_;
};

}  // namespace

CheckpointScope::CheckpointScope(Again again, TensorList inputs, Around around) {
  if (!grad_enabled()) return;
  auto recomputation =
      std::make_shared<Recomputation>(std::move(again), std::move(inputs), std::move(around));
  // The hooks hold the recomputation strongly, it holds no node: no cycle.
  hooks_ = std::make_unique<SavedTensorHooks>(
      [recomputation](const Tensor&) { return std::any(recomputation->next_number()); },
      [recomputation](const std::any& number) {
        return recomputation->find(std::any_cast<int>(number));
      });
}

RecomputationGuard::RecomputationGuard(CheckpointScope::Around around) {
  Context::current().slot<OpenRecomputationGuards>().list.push_back(std::move(around));
}
RecomputationGuard::~RecomputationGuard() {
  Context::current().slot<OpenRecomputationGuards>().list.pop_back();
}

bool is_recomputing() { return Context::current().slot<RecomputationState>().running; }

TensorList checkpoint(const std::function<TensorList(const TensorList&)>& function,
                      const TensorList& inputs) {
  const CheckpointScope scope([function](const TensorList& again) { function(again); }, inputs);
  return function(inputs);
}

Tensor checkpoint(const std::function<Tensor(const Tensor&)>& function, const Tensor& input) {
  return checkpoint(
      [function](const TensorList& inputs) { return TensorList{function(inputs[0])}; },
      TensorList{input})[0];
}

}  // namespace tessera
