// Checks gradients: compares the Jacobian of backward with central differences, in f64.
#pragma once

#include <functional>
#include <string>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

struct GradcheckOptions {
  double step = 1e-6;
  double absolute = 1e-5;
  double relative = 1e-3;
};
struct GradcheckResult {
  bool ok = true;
  double worst = 0;     // largest |backward - differences| / (absolute + relative * |differences|)
  std::string message;  // names input, output and element of the worst entry
};
// function: f64 inputs to outputs, deterministic. Only inputs that require grad and floating
// outputs are checked. Cost: two calls for each input element.
GradcheckResult gradcheck(const std::function<TensorList(const TensorList&)>& function,
                          const TensorList& inputs, const GradcheckOptions& options = {});
// The same for the gradients of gradients: checks backward of the function's backward.
GradcheckResult gradgradcheck(const std::function<TensorList(const TensorList&)>& function,
                              const TensorList& inputs, const GradcheckOptions& options = {});

}  // namespace tessera
