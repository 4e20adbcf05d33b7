#include <tessera/accelerate/step/kept_gradients.h>

#include <limits>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {

void KeptGradients::take(const NamedTensors& parameters) {
  const NoGradGuard no_grad;
  entries_.clear();
  for (const auto& [name, parameter] : parameters) {
    const Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    const Tensor elements = raw::alias(gradient);  // also where it is a part
    entries_.push_back({parameter, elements.clone(), 0});
    zero_(elements);
  }
  note_versions();
}

void KeptGradients::apply(double factor) {
  const NoGradGuard no_grad;
  for (const Entry& entry : entries_) {
    const Tensor gradient = entry.parameter.grad();
    if (gradient.defined()) add_(raw::alias(gradient), entry.value, factor);
  }
  note_versions();
}
void KeptGradients::add() { apply(1); }
void KeptGradients::subtract() { apply(-1); }

void KeptGradients::restore() {
  for (const Entry& entry : std::exchange(entries_, {})) entry.parameter.set_grad(entry.value);
}

void KeptGradients::scale(double factor) {
  const NoGradGuard no_grad;
  for (const Entry& entry : entries_) mul_(entry.value, Scalar(factor));
  note_versions();
}

void KeptGradients::note_versions() {
  for (Entry& entry : entries_) {
    if (const Tensor gradient = entry.parameter.grad(); gradient.defined()) {
      entry.version = gradient.version();
    }
  }
}

void KeptGradients::forget_cleared() {
  std::erase_if(entries_, [](const Entry& entry) {
    const Tensor gradient = entry.parameter.grad();
    if (!gradient.defined()) return true;
    return gradient.version() != entry.version &&
           kernels::multi_tensor_norm({&gradient, 1}, std::numeric_limits<double>::infinity()) == 0;
  });
}

}  // namespace tessera
