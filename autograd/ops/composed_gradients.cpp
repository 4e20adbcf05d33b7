#include <tessera/autograd/ops/composed_gradients.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>

namespace tessera {

TensorList composed_gradients(const TensorList& inputs, const Tensor& dy,
                              const std::function<Tensor(const TensorList&)>& composed) {
  TensorList arguments = inputs, wanted;
  for (Tensor& argument : arguments) {
    if (!argument.defined() || !argument.requires_grad()) continue;
    // A place of its own on the tape: one tensor may stand for several inputs.
    argument = expand(argument, argument.shape());
    wanted.push_back(argument);
  }
  const TensorList found =
      grad(composed(arguments), wanted, dy, {.create_graph = true, .allow_unused = true});
  TensorList gradients(inputs.size());
  for (size_t i = 0, next = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined() && inputs[i].requires_grad()) gradients[i] = found[next++];
  }
  return gradients;
}

}  // namespace tessera
