#include <tessera/nn/linear.h>

#include <cmath>

#include <tessera/autograd/ops.h>
#include <tessera/nn/call_scopes.h>
#include <tessera/nn/describe.h>
#include <tessera/nn/init.h>
#include <tessera/nn/parallel_style.h>

namespace tessera::nn {

Linear::Linear(int64_t in_features, int64_t out_features, const LinearOptions& options)
    : in_features(in_features),
      out_features(out_features),
      options(options),
      weight(parameter("weight", Shape{out_features, in_features})),
      bias(options.bias ? parameter("bias", Shape{out_features}) : parameter("bias", Tensor())) {
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}

void Linear::reset_parameters() {
  if (in_features == 0) return;
  const double bound = 1 / std::sqrt(static_cast<double>(in_features));
  init::uniform(weight, -bound, bound, initial_stream("weight"));
  if (bias.defined()) init::uniform(bias, -bound, bound, initial_stream("bias"));
}

Tensor bias_of(const Linear& layer) {
  const Boundary* const boundary = layer.boundary();
  return boundary == nullptr ? layer.bias : boundary->bias(layer.bias);
}

Tensor Linear::forward(const Tensor& x) {
  if (weight.defined() && !is_floating(weight.dtype())) return quantized_linear(*this, x);
  const Tensor added = bias_of(*this);
  if (const Tensor residual = take_residual(*this, x); residual.defined()) {
    count_call(*this, x);
    return linear(x, weight, added, residual);
  }
  if (const auto layer = fp8()) return linear_by(layer, x, weight, added);
  return linear(x, weight, added);
}

std::string Linear::extra_repr() const {
  return detail::describe("in_features", in_features, "out_features", out_features, "bias",
                          options.bias);
}

}  // namespace tessera::nn
